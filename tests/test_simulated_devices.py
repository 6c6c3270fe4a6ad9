"""The engine's own coroutines in virtual time: its timeline is the one that `simulate` computes."""

from __future__ import annotations

import asyncio
import csv
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_async import DevicePool, ModelExecutePlan, RoundPipe, RoundPipeRunConfig, trace
from roundpipe_async.devices.simulated import VirtualTimeLoop, run_in_virtual_time
from roundpipe_async.scheduling.plan import LayerCost
from roundpipe_async.scheduling.schedule import Schedule, round_robin
from roundpipe_async.scheduling.search import search
from roundpipe_async.scheduling.simulate import Links, simulate

DATA = Path(__file__).parent / "data"


class Nothing(nn.Module):
    """A layer that does next to nothing; what it takes is in the cost table."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def workload(name: str) -> tuple[list[LayerCost], Links]:
    with (DATA / "layer_costs_rtx4090.csv").open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        row = next(row for row in rows if row["model"] == name)
    ms = {key: float(row[key]) * 1e-3 for key in ("fwd_ms", "bwd_ms", "head_fwd_ms", "head_bwd_ms", "comm_ms")}
    block = LayerCost(ms["fwd_ms"], ms["fwd_ms"], ms["bwd_ms"], int(float(row["layer_bytes"])))
    head = LayerCost(ms["head_fwd_ms"], ms["head_fwd_ms"], ms["head_bwd_ms"], int(float(row["head_bytes"])))
    return [block] * int(row["num_layers"]) + [head], Links(hop_s=ms["comm_ms"])


def run_on_engine(
    schedule: Schedule, costs: list[LayerCost], links: Links
) -> list[tuple[str, int, range | None, int | None, float, float]]:
    async def run() -> list[tuple[str, int, range | None, int | None, float, float]]:
        config = RoundPipeRunConfig(num_microbatch=schedule.num_microbatch, schedule=schedule)
        pool = DevicePool.simulated(schedule.num_devices, costs, links)
        async with pool, RoundPipe(nn.Sequential(*[Nothing() for _ in costs]), devices=pool) as model:
            with trace() as recorded:
                data = torch.ones(schedule.num_microbatch)
                await model.forward_backward((data,), loss_fn=lambda out, _: out.sum(), run_config=config)
        return [
            (r.action.kind, int(r.device.split(":")[1]), r.action.layers, r.action.microbatch, r.start_s, r.end_s)
            for r in recorded.records
            if r.action.kind in ("forward", "fused", "recompute", "backward")
        ]

    return run_in_virtual_time(run())


def assert_same_timeline(schedule: Schedule, costs: list[LayerCost], links: Links) -> None:
    timeline = simulate(schedule, costs, links)
    expected = {
        (a.kind, a.device, a.layers, a.microbatch): (a.start_s, a.end_s) for a in timeline.actions if a.kind != "upload"
    }
    recorded = run_on_engine(schedule, costs, links)
    assert len(recorded) == len(expected)
    for kind, device, layers, microbatch, start_s, end_s in recorded:
        if kind == "recompute":
            # May begin later than in `simulate`: not before the whole stage has run forward, whose notes it needs. No
            # gradient comes earlier than that, so it delays nothing.
            assert start_s >= expected[kind, device, layers, microbatch][0] - 1e-6
            continue
        assert (start_s, end_s) == pytest.approx(expected[kind, device, layers, microbatch], abs=1e-6)
    assert max(record[-1] for record in recorded) == pytest.approx(timeline.makespan_s, abs=1e-6)


@pytest.mark.parametrize("name", ["qwen3-1.7b", "gpt-oss-20b"])
def test_the_engine_on_simulated_devices_takes_as_long_as_simulate_says(name: str) -> None:
    costs, links = workload(name)
    plan = ModelExecutePlan.auto("fused", _Planned(costs), min_stages=8)
    assert isinstance(plan, ModelExecutePlan)
    assert_same_timeline(round_robin(plan, "fused", len(costs), 16, 8), costs, links)


def test_the_engine_runs_a_searched_schedule_in_the_time_that_was_searched_for() -> None:
    costs, links = workload("qwen3-1.7b")
    assert_same_timeline(search(costs, 16, 8, links=links, effort=0.1), costs, links)


class _Planned:
    def __init__(self, costs: list[LayerCost]) -> None:
        self._costs = costs
        self.device_pool = self.pool = self
        self.devices = range(8)

    def layer_costs(self) -> list[LayerCost]:
        return self._costs


def test_virtual_time_passes_without_real_time() -> None:
    async def sleep() -> float:
        await asyncio.sleep(1e6)
        return asyncio.get_running_loop().time()

    start = time.monotonic()
    assert run_in_virtual_time(sleep()) == pytest.approx(1e6)
    assert time.monotonic() - start < 5
    assert VirtualTimeLoop.time is not time.monotonic


FORWARD_S, BACKWARD_S = 0.025, 0.05


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_S)
        return gradient


class Waits(Nothing):
    """A layer that takes its time and no processor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Wait.apply(x * self.weight)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.slow
async def test_a_real_timeline_of_layers_that_only_wait_is_the_simulated_one() -> None:
    """On four CPU devices, within 5 %; tried again where the machine is busy with something else."""
    costs = [LayerCost(FORWARD_S, FORWARD_S, BACKWARD_S)] * 8
    plan = ModelExecutePlan.auto("fused", _Planned(costs), min_stages=4)
    assert isinstance(plan, ModelExecutePlan)
    schedule = round_robin(plan, "fused", len(costs), 8, 4)
    config = RoundPipeRunConfig(num_microbatch=8, schedule=schedule)
    ratios: list[float] = []
    async with DevicePool.cpu(4, 1) as pool, RoundPipe(nn.Sequential(*[Waits() for _ in costs]), devices=pool) as model:
        while len(ratios) < 8 and not any(abs(ratio - 1) < 0.05 for ratio in ratios):
            with trace() as recorded:
                await model.forward_backward((torch.ones(8),), loss_fn=lambda out, _: out.sum(), run_config=config)
            actions = [r for r in recorded.records if r.action.kind in ("forward", "fused", "recompute", "backward")]
            took_s = max(r.end_s for r in actions) - min(r.start_s for r in actions)
            # With the durations that the layers had: a busy machine wakes sleepers late.
            ratios.append(took_s / simulate(schedule, model.layer_costs()).makespan_s)
    assert any(abs(ratio - 1) < 0.05 for ratio in ratios), ratios
