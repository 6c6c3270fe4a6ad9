"""Schedules in the making: the search's cheap form of a schedule, laid out over devices in microseconds.

A *draft* lists stages in order of execution, each with the sizes of the groups that its microbatches are split into;
a group is one run on one device. Laying a draft out gives every run a device and the iteration its end, by the rules
of `simulate.py`; a test holds the two equal. Flat lists and local names instead of objects: this is the inner loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from roundpipe_async.scheduling.plan import LayerCost
from roundpipe_async.scheduling.schedule import Phase, Schedule, StageRun
from roundpipe_async.scheduling.simulate import Links

FORWARD, FUSED, BACKWARD = 0, 1, 2
PHASES: tuple[Phase, ...] = ("forward", "fused", "backward")
NOWHERE = -1


class Stage(NamedTuple):
    """Layers start..stop-1 in one phase; `groups` are the sizes of consecutive groups of microbatches."""

    phase: int
    start: int
    stop: int
    groups: tuple[int, ...]


class Draft(NamedTuple):
    """Stages in order of execution. Runs take their devices in turns, or each the one where it can start first."""

    stages: tuple[Stage, ...]
    in_turns: bool


class StageCost(NamedTuple):
    """Of one microbatch: seconds of recompute, then of the rest; the run's upload; hops of its input, kept input."""

    ahead: float
    work: float
    upload: float
    size: int
    hop: float
    kept_hop: float


@dataclass(slots=True)
class Clocks:
    """When each device is free, when its last run but one left, and when its link is free."""

    free: list[float]
    before: list[float]
    link: list[float]

    @classmethod
    def zero(cls, num_devices: int) -> Clocks:
        return cls([0.0] * num_devices, [0.0] * num_devices, [0.0] * num_devices)


@dataclass(slots=True)
class Layout:
    """What laying out gave: the end of the last microbatch, uploaded bytes, the device of each group in order."""

    end: float
    size: int
    devices: list[int]


@dataclass
class Problem:
    """What a schedule is wanted for. All times in seconds."""

    costs: Sequence[LayerCost]
    num_microbatch: int
    num_devices: int
    links: Links
    memory_limit_bytes: float | None = None
    _stage_costs: dict[tuple[int, int, int], StageCost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        costs = self.costs
        self.num_layers = len(costs)
        self.forward = [0.0, *accumulate(cost.forward_s for cost in costs)]
        self.recompute = [0.0, *accumulate(cost.recompute_s for cost in costs)]
        self.backward = [0.0, *accumulate(cost.backward_s for cost in costs)]
        self.fused = [0.0, *accumulate(cost.fused_s for cost in costs)]
        self.bytes = [0, *accumulate(cost.parameter_bytes for cost in costs)]
        self.hops = [0.0, *(self.links.hop(cost.activation_bytes) for cost in costs)]
        last = self.num_layers - 1
        singles = [max(c.forward_s, c.recomputed_backward_s) for c in costs[:last]] + [costs[last].fused_s]
        self.longest_layer = max(singles)
        self.longest_stages = (4 * max(singles), 2 * max(singles), 2 * max(singles))  # by phase

    def paper_bytes(self) -> int:
        """What the paper's round robin uploads: all layers twice, the last once, in rounds of a microbatch a device."""
        rounds = -(-self.num_microbatch // self.num_devices)
        return rounds * (2 * self.bytes[-1] - self.costs[-1].parameter_bytes)

    def stage_cost(self, phase: int, start: int, stop: int) -> StageCost:
        key = (phase, start, stop)
        found = self._stage_costs.get(key)
        if found is None:
            times = (self.forward, self.fused, self.backward)[phase]
            ahead = self.recompute[stop] - self.recompute[start] if phase == BACKWARD else 0.0
            size = self.bytes[stop] - self.bytes[start]
            hop = self.hops[stop if phase == BACKWARD else start]
            upload = size / self.links.upload_bytes_per_s
            found = StageCost(ahead, times[stop] - times[start], upload, size, hop, self.hops[start])
            self._stage_costs[key] = found
        return found

    def allows(self, phase: int, start: int, stop: int) -> bool:
        """Whether a stage is short enough, and small enough for half the memory limit (one layer always is)."""
        if stop - start == 1:
            return True
        cost = self.stage_cost(phase, start, stop)
        if cost.ahead + cost.work > self.longest_stages[phase]:
            return False
        size = cost.size * (1 if phase == FORWARD else 2)
        return self.memory_limit_bytes is None or size <= self.memory_limit_bytes / 2

    def effort(self, draft: Draft) -> int:
        """About how much work laying it out is: microbatches placed, and devices looked at."""
        runs = sum(len(stage.groups) for stage in draft.stages)
        return len(draft.stages) * self.num_microbatch + runs * (2 if draft.in_turns else self.num_devices)


def lay_out(
    problem: Problem, draft: Draft, clocks: Clocks, begin: float = 0.0, fixed: Sequence[int] | None = None
) -> Layout:
    """Lays one iteration of `draft` out, from `clocks` (which it moves on) and `begin` at the earliest.

    `fixed` gives the device of each group; otherwise the draft's own rule does. A group that follows another of its
    stage on a device joins that run: nothing is uploaded again.
    """
    free, before, link = clocks.free, clocks.before, clocks.link
    count = problem.num_microbatch
    ready, where = [begin] * count, [NOWHERE] * count
    kept: list[list[float]] = [ready[:]] * (problem.num_layers + 1)
    last_stage = [-1] * len(free)
    devices: list[int] = []
    total = 0
    for number, (phase, start, stop, groups) in enumerate(draft.stages):
        cost = problem.stage_cost(phase, start, stop)
        from_forward = kept[start] if phase == BACKWARD else ready
        low = 0
        for group in groups:
            if fixed is not None:
                device = fixed[len(devices)]
            elif draft.in_turns:
                device = len(devices) % len(free)
            else:
                device = _earliest(clocks, begin, cost, ready[low], where[low], last_stage, number)
            devices.append(device)
            now = free[device]
            if last_stage[device] != number:
                uploading = max(link[device], before[device], begin)
                link[device] = uploading + cost.upload
                total += cost.size
                before[device] = now
                last_stage[device] = number
                if link[device] > now:
                    now = link[device]
            microbatches = range(low, low + group)
            if phase == BACKWARD:
                now = _run_backward(cost, microbatches, now, device, ready, where, from_forward)
            else:
                now = _run_forward(cost, microbatches, now, device, ready, where)
            free[device] = now
            low += group
        if phase == FORWARD:
            kept[start + 1 : stop + 1] = [ready[:]] * (stop - start)
    return Layout(max(ready), total, devices)


def _run_forward(
    cost: StageCost, microbatches: range, now: float, device: int, ready: list[float], where: list[int]
) -> float:
    """A forward or fused run on `device` from `now`: moves its microbatches on, and gives the time of its end."""
    work, hop = cost.work, cost.hop
    for m in microbatches:
        arrived = ready[m]
        if where[m] != device:
            if where[m] != NOWHERE:
                arrived += hop
            where[m] = device
        if arrived > now:
            now = arrived
        now += work
        ready[m] = now
    return now


def _run_backward(
    cost: StageCost,
    microbatches: range,
    now: float,
    device: int,
    ready: list[float],
    where: list[int],
    kept: list[float],
) -> float:
    """A backward run: each microbatch is recomputed once its kept input is there, then waits for its gradient."""
    ahead, work, hop, kept_hop = cost.ahead, cost.work, cost.hop, cost.kept_hop
    for m in microbatches:
        available = kept[m] + kept_hop
        if available > now:
            now = available
        now += ahead
        arrived = ready[m]
        if where[m] != device:
            arrived += hop
            where[m] = device
        if arrived > now:
            now = arrived
        now += work
        ready[m] = now
    return now


def _earliest(
    clocks: Clocks, begin: float, cost: StageCost, ready: float, where: int, last_stage: list[int], number: int
) -> int:
    """The device where the group's first microbatch can start first; of several, the one that was free first."""
    free, before, link = clocks.free, clocks.before, clocks.link
    ahead, upload = cost.ahead, cost.upload
    best, best_free, chosen = float("inf"), 0.0, 0
    for device, start in enumerate(free):
        idle_since = start
        if last_stage[device] != number:
            uploaded = link[device]
            if before[device] > uploaded:
                uploaded = before[device]
            if begin > uploaded:
                uploaded = begin
            uploaded += upload
            if uploaded > start:
                start = uploaded
        start += ahead
        arrived = ready + cost.hop if where != device and where != NOWHERE else ready
        if arrived > start:
            start = arrived
        if start < best or (start == best and idle_since < best_free):
            best, best_free, chosen = start, idle_since, device
    return chosen


def schedule_of(problem: Problem, draft: Draft, devices: Sequence[int]) -> Schedule:
    """The draft as a schedule, each group on the device given for it; groups that joined a run become one run."""
    runs: list[StageRun] = []
    taken = iter(devices)
    for phase, start, stop, groups in draft.stages:
        by_device: dict[int, list[int]] = {}
        low = 0
        for group in groups:
            by_device.setdefault(next(taken), []).extend(range(low, low + group))
            low += group
        for device, microbatches in by_device.items():
            runs.append(StageRun(PHASES[phase], range(start, stop), tuple(microbatches), device))
    return Schedule(tuple(runs), problem.num_layers, problem.num_microbatch, problem.num_devices)
