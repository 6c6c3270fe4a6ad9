"""Other people's pipeline schedules in virtual time, to compare ours with: GPipe, 1F1B, interleaved 1F1B, looped BFS.

Their stages stay on a device: stage s on device s mod N, nothing is uploaded. The definitions are those of the
simulator published with arXiv 2604.27085, so that its figures come out: all layers but those with `recompute_s` = 0
are recomputed, by every one of them; a stage's backward recomputes only when its gradient has come; a hop between
devices takes time, a hand-over within a device does not.

`paper_round_robin` gives the paper's own figures for a round robin. It differs from `simulate.simulate` in one point,
taken over from there: the last layer's forward pass may run before its input has come, like a recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from roundpipe_async.scheduling.partition import even_cut
from roundpipe_async.scheduling.plan import LayerCost
from roundpipe_async.scheduling.schedule import Schedule
from roundpipe_async.scheduling.simulate import Links, TimedAction, Timeline

Baseline = Literal["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"]
Pass = Literal["forward", "backward"]
Order = list[tuple[Pass, int, int]]  # (pass, stage, microbatch), one list a device


def baseline(
    name: Baseline,
    stages: Sequence[range],
    costs: Sequence[LayerCost],
    num_microbatch: int,
    num_devices: int,
    links: Links | None = None,
) -> Timeline:
    """One isolated iteration. `stages` cover all layers in order (empty ones are allowed), stage s on device s mod N.

    GPipe and 1F1B take one stage a device, the interleaved ones any multiple. Raises ValueError.
    """
    if sum(len(stage) for stage in stages) != len(costs) or any(b.start != a.stop for a, b in pairwise(stages)):
        raise ValueError(f"the stages {list(stages)} do not cover layers 0 to {len(costs) - 1} in order")
    if len(stages) % num_devices or (name in ("gpipe", "1f1b") and len(stages) != num_devices):
        raise ValueError(f"{name} cannot run {len(stages)} stages on {num_devices} devices")
    if name in ("1f1b", "interleaved_1f1b") and num_microbatch % num_devices:
        raise ValueError(f"{name} needs a multiple of {num_devices} microbatches, not {num_microbatch}")
    order: Callable[[int, int, int, int], Order] = _breadth_first if name in ("gpipe", "looped_bfs") else _one_f_one_b
    orders = [order(device, num_devices, len(stages), num_microbatch) for device in range(num_devices)]
    return _Baseline(stages, costs, num_devices, links or Links()).run(orders)


def even_stages(costs: Sequence[LayerCost], num_stages: int) -> list[range]:
    """Contiguous stages whose longest forward + recompute + backward time is least; empty ones if layers are few."""
    cut = even_cut([cost.forward_s + cost.recomputed_backward_s for cost in costs], num_stages)
    stages = [range(a, b) for a, b in pairwise(cut)]
    return stages + [range(len(costs), len(costs))] * (num_stages - len(stages))


def paper_round_robin(schedule: Schedule, costs: Sequence[LayerCost], links: Links) -> Timeline:
    """A round robin's timeline by the paper's definitions: uploads are free, the last layer's forward is not waited
    for. `Timeline.inner_bubble` is the published bubble "with the optimizer overlapped"."""
    clock = _Clock(schedule.num_devices)
    ready: list[tuple[float, int | None]] = [(0.0, None)] * schedule.num_microbatch
    for i, run in enumerate(schedule.runs):
        parts = [costs[layer] for layer in run.layers]
        work = sum({"forward": c.forward_s, "fused": c.fused_s, "backward": c.backward_s}[run.phase] for c in parts)
        ahead = sum(c.recompute_s for c in parts) if run.phase == "backward" else 0.0
        if run.phase == "fused":
            ahead = parts[-1].forward_s
            work -= ahead
        for m in run.microbatches:
            at, where = ready[m]
            arrived = at + (links.hop_s if where not in (None, run.device) else 0.0)
            start = max(arrived, clock.free[run.device] + ahead)
            if ahead:
                clock.add(TimedAction("recompute", run.device, i, run.layers, m, start - ahead, start))
            clock.add(TimedAction(run.phase, run.device, i, run.layers, m, start, start + work))
            ready[m] = (start + work, run.device)
    return clock.timeline()


def _breadth_first(device: int, num_devices: int, num_stages: int, num_microbatch: int) -> Order:
    """All microbatches forward through each of the device's stages, then all backward (GPipe: one stage each)."""
    mine = range(device, num_stages, num_devices)
    order: Order = [("forward", s, m) for s in mine for m in range(num_microbatch)]
    return order + [("backward", s, m) for s in reversed(mine) for m in range(num_microbatch)]


def _one_f_one_b(device: int, num_devices: int, num_stages: int, num_microbatch: int) -> Order:
    """Forwards to warm up, then one forward and one backward in turns, then the backwards left. With several stages
    a device, groups of N microbatches go through all of them in turn."""
    loops = num_stages // num_devices
    total = num_microbatch * loops

    def action(name: Pass, i: int) -> tuple[Pass, int, int]:
        loop = i // num_devices % loops
        loop = loop if name == "forward" else loops - 1 - loop
        microbatch = i // (num_devices * loops) * num_devices + i % num_devices
        return name, loop * num_devices + device, microbatch

    behind = num_devices - 1 - device
    warm_up = min(total, (loops - 1) * num_devices + 2 * behind if loops > 1 else behind + 1)
    order = [action("forward", i) for i in range(warm_up)]
    for i in range(warm_up, total):
        turn = [action("forward", i), action("backward", i - warm_up)]
        order += turn if loops > 1 else reversed(turn)
    return order + [action("backward", i) for i in range(total - warm_up, total)]


class _Clock:
    """When each device is free, and what it did."""

    def __init__(self, num_devices: int) -> None:
        self.free = [0.0] * num_devices
        self.actions: list[TimedAction] = []

    def add(self, action: TimedAction) -> None:
        self.actions.append(action)
        self.free[action.device] = action.end_s

    def timeline(self) -> Timeline:
        computed = sum(action.end_s - action.start_s for action in self.actions)
        return Timeline(tuple(self.actions), len(self.free), max(self.free), computed, 0)


@dataclass
class _Baseline:
    """Executes each device's order, an action as soon as it is the device's next and its input has come."""

    stages: Sequence[range]
    costs: Sequence[LayerCost]
    num_devices: int
    links: Links

    def run(self, orders: Sequence[Order]) -> Timeline:
        clock = _Clock(self.num_devices)
        ends: dict[tuple[Pass, int, int], float] = {}
        at = [0] * len(orders)
        moved = True
        while moved:
            moved = False
            for device, order in enumerate(orders):
                while at[device] < len(order) and self._try(order[at[device]], device, ends, clock):
                    at[device] += 1
                    moved = True
        assert all(i == len(order) for i, order in zip(at, orders, strict=True)), "the orders wait for each other"
        return clock.timeline()

    def _try(
        self,
        action: tuple[Pass, int, int],
        device: int,
        ends: dict[tuple[Pass, int, int], float],
        clock: _Clock,
    ) -> bool:
        name, stage, microbatch = action
        need: tuple[Pass, int, int] | None = None
        if name == "forward":
            need = ("forward", stage - 1, microbatch) if stage else None
        elif stage == len(self.stages) - 1:
            need = ("forward", stage, microbatch)
        else:
            need = ("backward", stage + 1, microbatch)
        start = clock.free[device]
        if need is not None:
            if need not in ends:
                return False
            hop = self.links.hop_s if need[1] % self.num_devices != device else 0.0
            start = max(start, ends[need] + hop)
        layers = self.stages[stage]
        parts = [self.costs[layer] for layer in layers]
        if name == "backward":
            end = start + sum(cost.recompute_s for cost in parts)
            clock.add(TimedAction("recompute", device, stage, layers, microbatch, start, end))
            start = end
        end = start + sum(cost.forward_s if name == "forward" else cost.backward_s for cost in parts)
        clock.add(TimedAction(name, device, stage, layers, microbatch, start, end))
        ends[action] = end
        return True
