"""Recording, the figures made of records, the files and pictures, and what the engine really reports."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import sys
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_async import DevicePool, ModelExecutePlan, OptimizerCtx, RoundPipe, RoundPipeRunConfig, trace
from roundpipe_async.devices.cpu import WorkerStream
from roundpipe_async.devices.simulated import run_in_virtual_time
from roundpipe_async.scheduling.plan import LayerCost
from roundpipe_async.scheduling.schedule import Schedule, round_robin
from roundpipe_async.scheduling.simulate import Links, simulate
from roundpipe_async.tracing.actions import COMPUTING, PASSES, Action, Record
from roundpipe_async.tracing.chrome import chrome_events, chrome_json
from roundpipe_async.tracing.drawing import Bar, Row, draw, rows_of
from roundpipe_async.tracing.trace import recording
from roundpipe_async.tracing.usage import intersection, union, usage
from tests.support.pools import PoolKind

PNG = b"\x89PNG\r\n\x1a\n"


def on(
    stream: str, kind: str, start_s: float, end_s: float, *, layers: range | None = None, mb: int | None = None,
    size: int = 0, label: str = "", error: str = "",
) -> Record:  # fmt: skip
    """A record by hand; the stream is `cuda:0/compute`, `host` or `optimizer`."""
    device = stream.rpartition("/")[0] or "host"
    return Record(Action(kind, layers, mb, 0, label), device, stream, start_s, end_s, size, error)


HAND_MADE = [
    on("cuda:0/load", "upload", 10.0, 11.0, layers=range(0, 2), size=3_000_000),
    on("cuda:0/compute", "forward", 11.0, 13.0, layers=range(0, 2), mb=0, label="m call 1"),
    on("cuda:0/upload", "upload", 12.0, 14.0, layers=range(0, 0), mb=1, size=1_000_000),
    on("cuda:0/compute", "forward", 14.0, 16.0, layers=range(0, 2), mb=1, label="m call 1"),
    on("cuda:0/download", "download", 13.0, 14.5, mb=0, size=500_000),
    on("cuda:1/compute", "fused", 15.0, 19.0, layers=range(2, 3), mb=0, label="m call 1"),
    on("cuda:1/compute", "collect", 19.0, 20.0, layers=range(2, 3)),
    on("host", "split", 9.0, 9.5),
    on("optimizer", "step", 18.0, 22.0, label="m step 1"),
    on("optimizer", "publish", 22.0, 23.0),
]


# --- figures ---------------------------------------------------------------------------------------------------------


def test_unions_and_intersections() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (0.5, 1.5)]) == [(0, 2), (3, 4)]
    assert union([]) == []
    assert intersection([(0, 2), (3, 6)], [(1, 4), (5, 9)]) == [(1, 2), (3, 4), (5, 6)]
    assert intersection([(0, 1)], [(1, 2)]) == []


def test_figures_of_hand_made_records() -> None:
    """The span is 10 to 20: the host's split and the optimizer's step are not part of it."""
    found = usage(HAND_MADE)
    first, second = found.devices
    assert found.span_s == 10
    assert (first.device, first.computing_s, first.utilisation) == ("cuda:0", 4, 0.4)
    assert (second.device, second.computing_s, second.utilisation) == ("cuda:1", 5, 0.5)
    assert found.bubble == pytest.approx(1 - (4 + 5) / (2 * 10))
    # transfers of cuda:0: 10..11 and 12..14.5, of which 12..13 and 14..14.5 under computation
    assert (first.transfer_s, first.overlapped_s) == (3.5, 1.5)
    assert (first.uploaded_bytes, first.downloaded_bytes) == (4_000_000, 500_000)
    assert found.overlap == first.overlap == pytest.approx(1.5 / 3.5)
    assert math.isnan(second.overlap)
    assert (found.optimizer_s, found.optimizer_overlapped_s, found.optimizer_overlap) == (5, 2, 0.4)
    kinds = {kind.kind: (kind.count, kind.seconds, kind.num_bytes) for kind in found.kinds}
    assert kinds["forward"] == (2, 4, 0) and kinds["upload"] == (2, 3, 4_000_000)


def test_what_runs_at_once_counts_once() -> None:
    """Two pools may have a device of the same name; a device is never busy for more than the time that passed."""
    records = [on("cpu:0/compute", "forward", 0, 2, mb=0), on("cpu:0/compute", "forward", 1, 3, mb=0)]
    assert usage(records).devices[0].computing_s == 3
    assert usage(records).bubble == 0


def test_lending_memory_is_no_transfer() -> None:
    """A CPU device that shares the host's memory wraps parameters in its compute stream."""
    records = [on("cpu:0/compute", "upload", 0, 1, size=100), on("cpu:0/compute", "forward", 1, 4, mb=0)]
    (device,) = usage(records).devices
    assert (device.transfer_s, device.uploaded_bytes, device.computing_s, device.utilisation) == (0, 0, 3, 0.75)
    assert [bar.kind for row in rows_of(records) for bar in row.bars] == ["forward"]


def test_the_table() -> None:
    lines = str(usage(HAND_MADE)).splitlines()
    assert lines[0] == "10 s, bubble 55.00 %, transfers overlapped 42.86 %, optimizer overlapped 40.00 %"
    assert " ".join(lines[2].split()) == "device computing s % transfer s overlapped MB up MB down"
    assert lines[3].split() == ["cuda:0", "4.000000", "40.00", "3.500000", "42.86", "%", "4.000", "0.500"]
    assert lines[4].split() == ["cuda:1", "5.000000", "50.00", "0.000000", "-", "0.000", "0.000"]
    assert ["forward", "2", "4.000000", "2000.000", "0.000"] in [line.split() for line in lines]
    html = usage(HAND_MADE)._repr_html_()
    assert html.count("<table>") == html.count("</table>") == 2
    assert html.count("<tr>") == (1 + 2) + (1 + 8) and "<td>cuda:0</td>" in html


def test_nothing_recorded_is_said() -> None:
    found = usage([])
    assert str(found) == "nothing was recorded" and "nothing was recorded" in found._repr_html_()
    assert math.isnan(found.bubble) and math.isnan(found.overlap) and found.devices == ()
    assert math.isnan(usage([on("host", "split", 0, 1)]).bubble)
    assert "split" in str(usage([on("host", "split", 0, 1)]))


def test_devices_are_in_the_order_of_their_numbers() -> None:
    records = [on(f"cpu:{i}/compute", "forward", 0, 1, mb=0) for i in (10, 9, 0)]
    assert [device.device for device in usage(records).devices] == ["cpu:0", "cpu:9", "cpu:10"]


# --- Chrome ----------------------------------------------------------------------------------------------------------


def check_chrome(text: str, records: list[Record]) -> list[dict[str, Any]]:
    """The text is what the viewers read: phases, numbers, named processes and threads, flows that begin and end."""
    document = json.loads(text)
    assert document["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = document["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X", "s", "t", "f"}
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert Counter(named.values()) == Counter({record.device for record in records})
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(records)
    zero = min(record.start_s for record in records)
    for event, record in zip(complete, records, strict=True):
        assert named[event["pid"]] == record.device and threads[event["pid"], event["tid"]] == record.stream
        assert event["ts"] == pytest.approx((record.start_s - zero) * 1e6, abs=1e-3) and event["ts"] >= 0
        assert event["dur"] == pytest.approx(record.seconds * 1e6, abs=1e-3)
        assert event["name"].split()[0] == event["cat"] == record.action.kind
    flows: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event)
    for flow in flows.values():
        phases = [event["ph"] for event in flow]
        assert phases == ["s", *["t"] * (len(phases) - 2), "f"] and flow[-1]["bp"] == "e"
        assert len({(event["name"], event["cat"]) for event in flow}) == 1
        assert all(a["ts"] <= b["ts"] for a, b in pairwise(flow))
        for event in flow:  # inside a bar of its thread
            assert any(
                (bar["pid"], bar["tid"]) == (event["pid"], event["tid"])
                and bar["ts"] - 1e-3 <= event["ts"] <= bar["ts"] + bar["dur"] + 1e-3
                for bar in complete
            )
    return events


def test_chrome_events_of_hand_made_records() -> None:
    events = check_chrome(chrome_json(HAND_MADE), HAND_MADE)
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["cuda:0", "cuda:1", "host"]
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert threads[:4] == ["cuda:0/compute", "cuda:0/load", "cuda:0/upload", "cuda:0/download"]
    bars = [event for event in events if event["ph"] == "X"]
    assert bars[1] == {
        "name": "forward 0..1 mb0", "cat": "forward", "ph": "X", "ts": 2e6, "dur": 2e6, "pid": 1, "tid": 1,
        "args": {"layers": [0, 1], "microbatch": 0, "label": "m call 1"},
    }  # fmt: skip
    assert bars[2]["name"] == "upload at 0 mb1" and bars[2]["args"]["bytes"] == 1_000_000
    flows = [(event["ph"], event["ts"]) for event in events if event["ph"] in "stf"]
    assert flows == [("s", 3e6), ("f", 8e6)]  # microbatch 0; microbatch 1 went through one stage only


def test_a_flow_belongs_to_one_call() -> None:
    a, b = "a call 1", "b call 1"
    told = [("forward", a), ("forward", b), ("fused", a), ("fused", b), ("fused", "")]
    records = [on("cpu:0/compute", kind, i, i + 1, mb=0, label=label) for i, (kind, label) in enumerate(told)]
    events = check_chrome(chrome_json(records), records)
    assert [event["ph"] for event in events if event["name"] == "a call 1 mb0"] == ["s", "f"]
    assert [event["ts"] for event in events if event["name"] == "b call 1 mb0"] == [1.5e6, 3.5e6]


def test_chrome_says_what_failed() -> None:
    (bar,) = (event for event in chrome_events([on("host", "split", 0, 1, error="ValueError")]) if event["ph"] == "X")
    assert bar["args"] == {"error": "ValueError"}
    assert json.loads(chrome_json([]))["traceEvents"] == []


# --- pictures --------------------------------------------------------------------------------------------------------


def test_the_picture_has_a_row_a_device_and_host_stream() -> None:
    rows = rows_of(HAND_MADE)
    assert [row.name for row in rows] == ["cuda:0", "cuda:1", "host", "optimizer"]
    assert rows[1].bars == [Bar("fused", 6.0, 10.0, "0"), Bar("collect", 10.0, 11.0)]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_pictures_are_written(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"out.{ending}"
    figure = draw(rows_of(HAND_MADE), "by hand", path)
    assert path.read_bytes().startswith({"png": PNG, "svg": b"<?xml", "pdf": b"%PDF"}[ending])
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cuda:0", "cuda:1", "host", "optimizer"]
    assert axes.get_title() == "by hand" and axes.get_xlim() == (0.0, 14.0)


def test_an_empty_or_instant_picture_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw([], path=tmp_path / "empty.png")
    draw([Row("cpu:0", [Bar("other", 0.0, 0.0, "1")])], path=tmp_path / "instant.png")


def test_measured_and_simulated_are_drawn_alike() -> None:
    pytest.importorskip("matplotlib")
    from roundpipe_async.scheduling.gantt import gantt

    plan = ModelExecutePlan([range(0, 1)], [range(1, 2), range(0, 1)])
    line = simulate(round_robin(plan, "fused", 2, 2, 2), [LayerCost(1, 1, 2, 10)] * 2, Links(10.0))
    records = [
        on(f"sim:{a.device}/{'load' if a.kind == 'upload' else 'compute'}", a.kind, a.start_s, a.end_s,
           layers=a.layers, mb=a.microbatch, size=a.bytes)
        for a in line.actions
    ]  # fmt: skip
    assert usage(records).bubble == pytest.approx(line.bubble, abs=1e-12)
    measured, simulated = draw(rows_of(records)).axes[0], gantt(line).axes[0]

    def shapes(axes: Any) -> list[Any]:
        return [(c.get_facecolor().tolist(), [p.vertices.tolist() for p in c.get_paths()]) for c in axes.collections]

    assert shapes(measured) == shapes(simulated) and simulated.collections


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not there
    with trace() as t:
        pass
    with pytest.raises(ImportError, match=re.escape("roundpipe_async[plot]")):
        t.plot()
    assert t._repr_html_() == "<p>nothing was recorded</p>"  # the tables alone


# --- recording -------------------------------------------------------------------------------------------------------


@pytest.fixture
def stream() -> Any:
    stream = WorkerStream("cpu:7/compute", owner="cpu:7")
    yield stream
    stream.close()


def do(stream: WorkerStream, number: int) -> None:
    event = stream.submit(lambda: number, action=Action("forward", microbatch=number))
    assert event.wait(60) and event.value == number


def microbatches(t: trace) -> list[int | None]:
    return [record.action.microbatch for record in t.records]


def test_contexts_nest_and_overlap(stream: WorkerStream) -> None:
    first, second, inner = trace(), trace(), trace()
    do(stream, 0)
    with first:
        do(stream, 1)
        with inner:
            do(stream, 2)
        second.__enter__()
        do(stream, 3)
    do(stream, 4)
    second.__exit__(None, None, None)
    do(stream, 5)
    assert not recording()
    assert (microbatches(first), microbatches(inner), microbatches(second)) == ([1, 2, 3], [2], [3, 4])
    record = first.records[0]
    assert (record.device, record.stream, record.error) == ("cpu:7", "cpu:7/compute", "")
    assert 0 < record.seconds < 60


def test_contexts_of_many_threads(stream: WorkerStream) -> None:
    """Entering and leaving from everywhere loses no context's actions and leaves none open."""
    barrier = threading.Barrier(4)
    found: list[list[int | None]] = []

    def one(base: int) -> None:
        barrier.wait()
        for i in range(50):
            with trace() as t:
                do(stream, base + i)
            found.append([number for number in microbatches(t) if number == base + i])

    threads = [threading.Thread(target=one, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200 and all(len(numbers) == 1 for numbers in found) and not recording()


def test_an_exception_inside_keeps_what_there_is(stream: WorkerStream) -> None:
    with pytest.raises(KeyError), trace() as t:
        do(stream, 1)
        raise KeyError
    do(stream, 2)
    assert microbatches(t) == [1] and not recording() and repr(t) == "<trace, closed: 1 actions>"


def test_entering_twice_is_an_error(stream: WorkerStream) -> None:
    with trace() as t:
        with pytest.raises(RuntimeError, match="this trace is open: each is entered once"):
            t.__enter__()
        do(stream, 1)
    with pytest.raises(RuntimeError, match="this trace is closed"), t:
        pass
    do(stream, 2)
    assert microbatches(t) == [1] and not recording()


def test_what_began_before_anybody_recorded_is_left_out(stream: WorkerStream) -> None:
    begun, go = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go.wait(60)

    event = stream.submit(work, action=Action("forward", microbatch=0))
    assert begun.wait(60)
    with trace() as t:
        go.set()
        assert event.wait(60)
        do(stream, 1)
    assert microbatches(t) == [1]


def test_failed_work_is_recorded_before_it_is_told(stream: WorkerStream) -> None:
    def fail() -> None:
        raise LookupError("no")

    with trace() as t:
        event = stream.submit(fail, action=Action("forward", microbatch=0))
        assert event.wait(60) and isinstance(event.error, LookupError)
        assert [record.error for record in t.records] == ["LookupError"]
        after = stream.submit(fail, after=[event], action=Action("forward", microbatch=1))
        assert after.wait(60) and after.error is event.error
    assert microbatches(t) == [0], "what never ran is not recorded"


def test_records_are_a_new_list() -> None:
    with trace() as t:
        t.records.append(HAND_MADE[0])
    assert t.records == []


# --- the engine ------------------------------------------------------------------------------------------------------

NUM_LAYERS, WIDTH = 5, 8
PLAN = ModelExecutePlan([range(0, 2), range(2, 4)], [range(4, 5), range(2, 4), range(0, 2)])
CONFIG = RoundPipeRunConfig(num_microbatch=3, execute_plan=PLAN)


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


def passes_of(schedule: Schedule) -> Counter[tuple[str, range, int, int]]:
    """Kind, layers, microbatch and device of everything that the schedule's runs compute."""
    expected: Counter[tuple[str, range, int, int]] = Counter()
    for run in schedule.runs:
        for m in run.microbatches:
            for kind in ("recompute", "backward") if run.phase == "backward" else (run.phase,):
                expected[kind, run.layers, m, run.device] += 1
    return expected


def check_streams(records: list[Record]) -> None:
    """What a stream did, it did one after another."""
    by_stream: dict[str, list[Record]] = {}
    for record in records:
        assert record.start_s <= record.end_s
        by_stream.setdefault(record.stream, []).append(record)
    for of_stream in by_stream.values():
        of_stream.sort(key=lambda record: (record.start_s, record.end_s))
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(of_stream))


def make_model(pool: DevicePool, name: str = "m") -> RoundPipe:
    return RoundPipe(make_layers(), name=name, model_run_config=CONFIG, devices=pool)


async def train(model: RoundPipe, t: trace) -> list[Record]:
    before = len(t.records)
    await model.forward_backward((torch.ones(6, WIDTH),), loss_fn=lambda out, _: out.sum())
    return t.records[before:]


async def test_every_action_of_a_schedule_is_recorded_once(pool_kind: PoolKind) -> None:
    async with pool_kind.make(2) as pool, make_model(pool) as model:
        first = pool._next_device
        with trace() as t:
            records = await train(model, t)
            with OptimizerCtx():
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            await model.step(optimizer.step, False)
        position = {device.name: index for index, device in enumerate(pool.devices)}
        aliased = pool.devices[0].shares_host_memory
        schedule = round_robin(PLAN, "fused", NUM_LAYERS, 3, len(pool.devices), first)
    found = Counter(
        (r.action.kind, r.action.layers, r.action.microbatch, position[r.device])
        for r in records if r.action.kind in PASSES
    )  # fmt: skip
    assert found == passes_of(schedule)
    loads = [r for r in records if r.action.kind == "upload" and r.action.layers and r.action.microbatch is None]
    runs = Counter((run.layers, run.device) for run in schedule.runs)
    assert Counter((r.action.layers, position[r.device]) for r in loads) == runs
    assert all(r.num_bytes == len(r.action.layers or ()) * (WIDTH + 1) * WIDTH * 4 for r in loads)
    labels = {record.action.label for record in records}
    assert labels == {"m call 1"}
    kinds = Counter(record.action.kind for record in t.records)
    assert kinds["collect"] == 3 and kinds["step"] == kinds["split"] == kinds["merge"] == kinds["commit"] == 1
    assert [r.action.label for r in t.records if r.action.kind == "step"] == ["m step 1"]
    if aliased:
        assert kinds["download"] == 0 and t.table().devices[0].transfer_s == 0
    else:
        rows = WIDTH * 2 * 4  # bytes of one microbatch of activations
        moved = [r for r in records if r.action.kind in ("upload", "download") and r not in loads]
        passing = [r.num_bytes for r in moved if (r.action.microbatch or 0) >= 0]
        assert passing.count(rows) >= 3 * 4 * 2, "activations and gradients, into and out of each stage"
        assert t.table().devices[0].uploaded_bytes > 0 < t.table().devices[0].downloaded_bytes
    if pool_kind.name.startswith("cpu"):
        check_streams(t.records)
        check_chrome(t.chrome_json(), t.records)
    assert 0 <= t.table().bubble < 1


def test_virtual_devices_report_what_the_table_says() -> None:
    """The engine on simulated devices: the trace has the virtual times and the table's bytes."""
    costs = [LayerCost(1.0, 1.0, 2.0, 1_000_000)] * NUM_LAYERS

    async def run() -> trace:
        async with DevicePool.simulated(2, costs, Links(1e6)) as pool, make_model(pool) as model:
            with trace() as t:
                await train(model, t)
        return t

    t = run_in_virtual_time(run())
    line = simulate(round_robin(PLAN, "fused", NUM_LAYERS, 3, 2), costs, Links(1e6))
    found = t.table()
    assert sum(device.uploaded_bytes for device in found.devices) == line.uploaded_bytes
    assert math.fsum(device.computing_s for device in found.devices) == pytest.approx(line.compute_s)
    assert found.bubble == pytest.approx(line.bubble)


async def test_two_models_at_once(tmp_path: Path) -> None:
    """One trace sees both, each action says whose it is, and the streams of the pool they share stay in order."""
    async with DevicePool.cpu(2, 1, own_memory=True) as pool, make_model(pool, "a") as a, make_model(pool, "b") as b:
        with trace() as t:
            await asyncio.gather(*(train(model, t) for model in (a, b, a)))
    labels = Counter(record.action.label for record in t.records if record.action.kind in COMPUTING - {"collect"})
    assert labels == {"a call 1": 21, "b call 1": 21, "a call 2": 21}
    check_streams(t.records)
    t.to_chrome(tmp_path / "trace.json")
    events = check_chrome((tmp_path / "trace.json").read_text("utf-8"), t.records)
    flows = Counter(event["name"] for event in events if event["ph"] in "stf")
    assert flows == {f"{label} mb{m}": 5 for label in labels for m in range(3)}


async def test_a_backward_of_its_own_has_its_forward_s_label() -> None:
    async with DevicePool.cpu(2, 1) as pool, RoundPipe(make_layers(), name="m", devices=pool) as model:
        with trace() as t:
            out = await model(torch.ones(3, WIDTH))
            await model.backward(out.sum())
    backward = [record for record in t.records if record.action.kind == "backward"]
    assert backward and {record.action.label for record in backward} == {"m call 1"}
    assert [r.action.label for r in t.records if r.action.kind == "commit"][-1] == "m backward"


async def test_a_trace_in_one_thread_sees_an_engine_in_another() -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def other() -> None:
        async def run() -> None:
            async with DevicePool.cpu(1, 1) as pool, RoundPipe(make_layers(), name="there", devices=pool) as model:
                await model.forward_backward((torch.ones(3, WIDTH),), loss_fn=lambda out, _: out.sum())

        asyncio.run(run())
        loop.call_soon_threadsafe(over.set)

    with trace() as t:
        thread = threading.Thread(target=other)
        thread.start()
        await over.wait()
    thread.join()
    assert {record.action.label for record in t.records} == {"there call 1"}


async def test_a_failed_call_shows_what_failed() -> None:
    """What was skipped after the failure is marked as such."""

    class Boom(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError

    layers = nn.Sequential(nn.Linear(2, 2), Boom())
    async with DevicePool.cpu(1, 1) as pool, RoundPipe(layers, devices=pool) as model:
        with trace() as t, pytest.raises(ArithmeticError):
            await model.forward_backward((torch.ones(4, 2),), loss_fn=lambda out, _: out.sum())
    assert {r.error for r in t.records} <= {"", "ArithmeticError", "Abandoned"}
    assert {r.action.kind for r in t.records if r.error == "ArithmeticError"} == {"fused"}


async def test_it_shows_itself_in_a_notebook() -> None:
    pytest.importorskip("matplotlib")
    async with DevicePool.cpu(2, 1) as pool, RoundPipe(make_layers(), name="m", devices=pool) as model:
        with trace() as t:
            await train(model, t)
            still_open = t._repr_html_()
    for html in (still_open, t._repr_html_()):
        picture = re.search(r'src="data:image/png;base64,([^"]+)"', html)
        assert picture is not None
        data = base64.b64decode(picture[1])
        assert data.startswith(PNG) and data.endswith(b"IEND\xaeB`\x82")
        assert html.count("<table>") == 2 and "cpu:1" in html
    assert t.plot().axes[0].get_title() == f"{100 * t.table().bubble:.2f} % idle"
