"""Streams that launch and streams that wait, on a device whose copies land when the test says so."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from roundpipe_async import trace
from roundpipe_async.devices import accelerator, launch
from roundpipe_async.devices.accelerator import CHUNK_BYTES, CHUNKS_IN_FLIGHT, AcceleratorDevice
from roundpipe_async.devices.launch import LaunchedEvent
from roundpipe_async.events import Event
from roundpipe_async.tracing.trace import Action
from tests.support.late_device import LateLane, LateRuntime


@pytest.fixture
def by_hand() -> Iterator[tuple[LateRuntime, AcceleratorDevice]]:
    """A device on which nothing lands but by hand; what is left lands at the end."""
    runtime = LateRuntime(by_hand=True)
    device = AcceleratorDevice(0, runtime)
    yield runtime, device
    runtime.by_hand = False
    with runtime.changed:
        runtime.changed.notify_all()
    device.close()


def lane(runtime: LateRuntime, name: str) -> LateLane:
    return next(lane for lane in runtime.lanes if lane.name == name)


def launched(event: Event[Any]) -> Event[Any]:
    assert event.launched.wait(5)
    return event


# ---- launched, then done --------------------------------------------------------------------------------------------


async def test_a_value_is_there_at_the_launch_and_the_event_happens_when_the_device_has_passed(
    by_hand: tuple[LateRuntime, AcceleratorDevice],
) -> None:
    runtime, device = by_hand
    source = torch.ones(3)
    event = launched(device.upload.submit(lambda: device.from_host(source)))
    assert not event.done()
    assert event.value.isnan().all()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(_value(event), 0.02)
    runtime.land(lane(runtime, "upload"), 2)  # the copy and the mark behind it
    assert torch.equal(await event, source)


async def _value(event: Event[Any]) -> Any:
    return await event


def test_streams_of_the_device_wait_on_the_device_and_the_host_runs_ahead(
    by_hand: tuple[LateRuntime, AcceleratorDevice],
) -> None:
    runtime, device = by_hand
    first = device.upload.submit(lambda: device.from_host(torch.ones(3)))
    second = launched(device.download.submit(lambda: device.to_host(first.value), after=(first,)))
    assert lane(runtime, "download").log == ["wait", "copy", "mark"]
    assert not lane(runtime, "download").head_is_ready()  # nothing can land there before the upload has
    runtime.land(lane(runtime, "upload"), 2)
    assert first.wait(5)
    runtime.land(lane(runtime, "download"), 3)
    assert second.wait(5)
    assert torch.equal(second.value, torch.ones(3))


def test_what_follows_an_event_is_launched_with_it_and_done_with_it(
    by_hand: tuple[LateRuntime, AcceleratorDevice],
) -> None:
    runtime, device = by_hand
    event = launched(device.upload.submit(lambda: [device.from_host(torch.ones(1))]))
    after = event.then(lambda values: values[0])
    assert isinstance(after, LaunchedEvent)
    assert after.value.isnan().all()
    assert not after.done()
    assert not after.settled().done()
    runtime.land(lane(runtime, "upload"), 2)
    assert after.wait(5)
    assert after.value == 1


def test_work_behind_an_event_of_another_kind_waits_on_the_host(by_hand: tuple[LateRuntime, AcceleratorDevice]) -> None:
    runtime, device = by_hand
    gate: Event[int] = Event()
    event = device.upload.submit(lambda: gate.value, after=(gate,))
    assert not event.launched.wait(0.02)
    gate.set(3)
    assert launched(event).value == 3
    assert lane(runtime, "upload").log == ["mark"]


def test_one_stream_waits_for_nothing_of_its_own(by_hand: tuple[LateRuntime, AcceleratorDevice]) -> None:
    runtime, device = by_hand
    first = device.upload.submit(lambda: 1)
    launched(device.upload.submit(lambda: first.value + 1, after=(first,)))
    assert lane(runtime, "upload").log == ["mark", "mark"]


def test_failed_work_is_known_at_once_and_over_when_the_device_has_passed_what_was_launched_of_it(
    by_hand: tuple[LateRuntime, AcceleratorDevice],
) -> None:
    runtime, device = by_hand
    error = ValueError("half-way")

    def fails() -> None:
        device.from_host(torch.ones(1))
        raise error

    event = device.upload.submit(fails)
    behind = device.compute.submit(lambda: pytest.fail("ran behind a failure"), after=(event,))
    assert behind.wait(5)
    assert behind.error is error
    assert event.launched.error is error
    assert not event.done()
    runtime.land(lane(runtime, "upload"), 2)
    assert event.wait(5)
    assert event.error is error
    assert event.then(lambda value: value).error is error


def test_the_host_runs_a_bounded_number_of_actions_ahead(
    by_hand: tuple[LateRuntime, AcceleratorDevice],
) -> None:
    runtime, device = by_hand
    events = [device.upload.submit(lambda: None) for _ in range(launch.MAX_AHEAD + 1)]
    launched(events[-2])
    assert not events[-1].launched.wait(0.02)
    runtime.land(lane(runtime, "upload"))
    launched(events[-1])


def test_a_failure_on_the_device_after_the_launch_is_told_with_a_note() -> None:
    class Broken(LateLane):
        def mark(self, timed: bool) -> Any:
            class Mark:
                def synchronize(self) -> None:
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")

            return Mark()

    stream = launch.LaunchStream("late:0/compute", "late:0", Broken(LateRuntime(), "compute"))
    event = stream.submit(lambda: 1)
    assert event.wait(5)
    assert "illegal memory access" in str(event.error)
    assert "failed on the device, after the work was launched" in event.error.__notes__[0]
    again = stream.submit(lambda: 2)  # and the stream goes on
    assert again.wait(5)
    stream.close()


def test_used_memory_lives_until_the_device_has_passed_and_not_longer(
    by_hand: tuple[LateRuntime, AcceleratorDevice],
) -> None:
    runtime, device = by_hand
    held = torch.ones(2)
    alive = weakref.ref(held)

    def use(value: torch.Tensor) -> None:
        launch.hold(value)

    event = launched(device.upload.submit(lambda held=held: use(held)))  # type: ignore[misc]
    del held
    gc.collect()
    assert alive() is not None
    runtime.land(lane(runtime, "upload"))
    assert event.wait(5)
    assert alive() is None


def test_streams_end_when_their_device_is_dropped() -> None:
    device = AcceleratorDevice(0, LateRuntime())
    assert device.compute.submit(lambda: 1).wait(5)
    assert any(thread.name.startswith("roundpipe_async late:0/compute") for thread in threading.enumerate())
    # the fixture that looks for threads left behind does the rest


async def test_cancelling_who_waits_for_a_device_loses_nothing(by_hand: tuple[LateRuntime, AcceleratorDevice]) -> None:
    runtime, device = by_hand
    event = device.compute.submit(lambda: 7)
    waiting = [asyncio.ensure_future(_value(event)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    launched(event)
    runtime.land(lane(runtime, "compute"))
    assert await waiting[1] == await waiting[2] == await event == 7
    assert waiting[0].cancelled()


def test_backward_runs_in_the_launching_thread() -> None:
    device = AcceleratorDevice(0, LateRuntime())
    assert device.compute.submit(torch.autograd.is_multithreading_enabled).wait(5)  # type: ignore[attr-defined]
    event = device.compute.submit(torch.autograd.is_multithreading_enabled)  # type: ignore[attr-defined]
    assert event.wait(5)
    assert event.value is False
    assert torch.autograd.is_multithreading_enabled()  # type: ignore[attr-defined]


def test_traced_times_are_the_devices(by_hand: tuple[LateRuntime, AcceleratorDevice]) -> None:
    runtime, device = by_hand
    action = Action("upload", range(1), 2)
    with trace() as open_trace:
        event = device.upload.submit(lambda: device.from_host(torch.ones(1)), action=action)
        for count in (1, 3):  # the anchor of the clocks; then start, copy, end
            with runtime.changed:
                queue = lane(runtime, "upload").queue
                assert runtime.changed.wait_for(lambda queue=queue, count=count: len(queue) == count, 5)
            runtime.land(lane(runtime, "upload"), count)
        assert event.wait(5)
    (record,) = open_trace.records
    assert (record.action, record.device, record.stream) == (action, "late:0", "late:0/upload")
    assert record.start_s <= record.end_s


def test_a_stopwatch_tells_the_devices_time_when_the_device_has_passed(
    by_hand: tuple[LateRuntime, AcceleratorDevice],
) -> None:
    runtime, device = by_hand
    told: list[float] = []

    def work(fails: bool) -> None:
        stop = launch.stopwatch()
        device.from_host(torch.ones(1))
        stop(told.append)
        if fails:
            raise ValueError

    event = launched(device.upload.submit(lambda: work(False)))
    failed = device.upload.submit(lambda: work(True))
    assert not told
    runtime.land(lane(runtime, "upload"), 4)  # start, copy, stop, end
    assert event.wait(5)
    assert len(told) == 1
    assert told[0] >= 0
    with runtime.changed:
        queue = lane(runtime, "upload").queue
        assert runtime.changed.wait_for(lambda: len(queue) == 4, 5)
    runtime.land(lane(runtime, "upload"), 4)
    assert failed.wait(5)
    assert len(told) == 1
    launch.stopwatch()(told.append)  # outside an action: at once
    assert len(told) == 2


# ---- parameters in pieces -------------------------------------------------------------------------------------------


def test_parameters_go_in_pieces_and_an_activation_waits_for_two_of_them_at_most(
    by_hand: tuple[LateRuntime, AcceleratorDevice],
) -> None:
    runtime, device = by_hand
    weight = torch.arange(CHUNK_BYTES // 4 * 4.5).float()
    loaded = device.load.submit(lambda: device.from_host(weight))
    load = lane(runtime, "load")
    with runtime.changed:
        assert runtime.changed.wait_for(lambda: load.log.count("mark") == CHUNKS_IN_FLIGHT, 5)
    assert not loaded.launched.wait(0.02)  # the host waits: no more than that is on its way
    assert load.log == ["copy", "mark"] * CHUNKS_IN_FLIGHT
    activation = launched(device.upload.submit(lambda: device.from_host(torch.ones(8))))
    runtime.land(lane(runtime, "upload"), 2)
    assert activation.wait(5)  # it landed while most of the weight is not even launched
    runtime.by_hand = False
    with runtime.changed:
        runtime.changed.notify_all()
    assert loaded.wait(5)
    assert torch.equal(loaded.value, weight)
    assert load.log.count("copy") == 5


@pytest.mark.parametrize(
    "shape", ["contiguous", "channels_last", "transposed", "strided", "expanded", "empty", "scalar"]
)
def test_pieces_keep_values_and_layout(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "CHUNK_BYTES", 64)
    source = {
        "contiguous": torch.randn(5, 9),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": torch.randn(9, 5).t(),
        "strided": torch.randn(9, 20)[:, ::3],
        "expanded": torch.randn(1, 7).expand(9, 7),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
    }[shape]
    device = AcceleratorDevice(0, LateRuntime())
    loaded = device.load.submit(lambda: device.from_host(source))
    home = device.download.submit(lambda: device.to_host(loaded.value), after=(loaded,))
    assert home.wait(5)
    for copy in (loaded.value, home.value):
        assert torch.equal(copy, source)
        assert copy.data_ptr() != source.data_ptr() or not copy.numel()
    if shape in ("channels_last", "transposed"):
        assert home.value.stride() == source.stride()
    assert device.statistics() == {
        "num_uploads": 1, "uploaded_bytes": source.nbytes, "num_downloads": 1, "downloaded_bytes": source.nbytes,
    }  # fmt: skip


def test_small_parameters_are_throttled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "CHUNK_BYTES", 64)
    runtime = LateRuntime()
    device = AcceleratorDevice(0, runtime)
    event = device.load.submit(lambda: [device.from_host(torch.ones(4)) for _ in range(16)])
    assert event.wait(5)
    log = lane(runtime, "load").log
    assert log.count("copy") == 16
    assert log[:5] == ["copy"] * 4 + ["mark"]
    assert log.count("mark") == 4 + 1
