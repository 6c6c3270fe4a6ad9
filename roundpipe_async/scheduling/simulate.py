"""What a schedule costs, without running it: virtual time on devices that do nothing but take time.

The rules are the engine's. On each device runs follow each other in list order, and a run's microbatches in tuple
order. A microbatch starts when its input has arrived (one hop, if another device made it). A run's parameters are
uploaded on the device's own link while the run before it computes: the upload begins when the link is free and the
last run but one has left. A backward stage recomputes a microbatch as soon as the device is free and its kept input
has arrived, whether or not its gradient has; the gradient pass waits for both.

Since whatever a run needs comes from earlier in the list, one walk over the list gives exact times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from roundpipe_async.scheduling.plan import LayerCost
from roundpipe_async.scheduling.schedule import Phase, Schedule, StageRun

ActionKind = Literal["forward", "fused", "recompute", "backward", "upload"]


@dataclass(frozen=True, slots=True)
class Links:
    """How fast data moves: parameters to a device, and activations or gradients from one device to another.

    A hop takes `hop_s` plus the layer's activation bytes over `activation_bytes_per_s`; within a device it is free.
    """

    upload_bytes_per_s: float = 25e9
    hop_s: float = 0.0
    activation_bytes_per_s: float = math.inf

    def hop(self, activation_bytes: float) -> float:
        return self.hop_s + activation_bytes / self.activation_bytes_per_s


@dataclass(frozen=True, slots=True)
class TimedAction:
    """One stretch of a device's compute stream or upload link. `run` is the run's index in the schedule's list."""

    kind: ActionKind
    device: int
    run: int
    layers: range
    microbatch: int | None
    start_s: float
    end_s: float
    bytes: int = 0
    iteration: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """When everything happened. Times are in seconds from the start; `actions` are in the order of the list."""

    actions: tuple[TimedAction, ...] = field(repr=False)  # thousands of them
    num_devices: int
    makespan_s: float
    compute_s: float
    uploaded_bytes: int

    @property
    def bubble(self) -> float:
        """The share of device time in which nothing is computed, 0 to 1."""
        return 1 - self.compute_s / (self.num_devices * self.makespan_s)

    @property
    def inner_bubble(self) -> float:
        """The bubble without the idle time before each device's first and after each device's last computation.

        That is what remains, in the paper's reckoning, when the fill and drain of neighbouring iterations overlap.
        A recompute that waits for its gradient counts as if it had been done just before the gradient came.
        """
        spanned = 0.0
        for device in range(self.num_devices):
            computed = [action for action in self.of_device(device) if action.kind != "upload"]
            if computed:
                first = computed[0]
                late = computed[1].start_s - first.end_s if first.kind == "recompute" else 0.0
                spanned += computed[-1].end_s - first.start_s - late
        return (spanned - self.compute_s) / (self.num_devices * self.makespan_s)

    def of_device(self, device: int) -> tuple[TimedAction, ...]:
        return tuple(action for action in self.actions if action.device == device)

    def busy_s(self, device: int) -> float:
        """Seconds that a device computes."""
        return sum(a.end_s - a.start_s for a in self.of_device(device) if a.kind != "upload")

    def __str__(self) -> str:
        lines = [
            f"{self.makespan_s:.6g} s, bubble {100 * self.bubble:.2f} %, {self.uploaded_bytes / 1e9:.4g} GB uploaded",
            "device   computing      %   uploading      %",
        ]
        for device in range(self.num_devices):
            busy = self.busy_s(device)
            moving = sum(a.end_s - a.start_s for a in self.of_device(device) if a.kind == "upload")
            shares = [100 * x / self.makespan_s for x in (busy, moving)]
            lines.append(f"{device:6}  {busy:9.6g} s {shares[0]:6.2f} {moving:9.6g} s {shares[1]:6.2f}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Steady:
    """Iteration after iteration of one schedule, each begun as soon as the devices and the parameters allow."""

    period_s: float
    bubble: float


def simulate(schedule: Schedule, costs: Sequence[LayerCost], links: Links | None = None) -> Timeline:
    """The timeline of one isolated iteration: every device idle and empty at time 0, parameters on the host.

    `costs` has one entry a layer. `links` defaults to `Links()`: 25 GB/s of uploads to each device, hops that take
    no time. The schedule should be valid; one that is not gives a timeline that no engine would keep.
    """
    walk = _Walk(schedule, costs, links or Links())
    walk.iterate(0.0)
    return walk.timeline()


def simulate_steady(
    schedule: Schedule,
    costs: Sequence[LayerCost],
    links: Links | None = None,
    *,
    rotation: int = 0,
    step_s: float = 0.0,
    num_iterations: int = 24,
) -> Steady:
    """The period of the same schedule repeated with parameters one step old, fill and drain overlapped.

    Iteration i begins, on each device, when that device has done its part of iteration i - 1, and not before the
    optimizer step of iteration i - 2, which takes `step_s`, is done. `rotation` shifts the devices from one iteration
    to the next (a round robin that goes on where it ended: the number of runs). The period is the mean of the last
    two thirds of `num_iterations`, rounded up to whole rotations.
    """
    walk = _Walk(schedule, costs, links or Links(), record=False)
    cycle = schedule.num_devices // math.gcd(rotation, schedule.num_devices)
    warm_up = max(num_iterations // 3, 2)
    counted = math.ceil(max(num_iterations - warm_up, 1) / cycle) * cycle
    for i in range(warm_up + counted):
        walk.iterate(walk.ends[i - 2] + step_s if i >= 2 else 0.0, rotation * i)
    period = (walk.ends[-1] - walk.ends[-1 - counted]) / counted
    return Steady(period, 1 - walk.compute_s / len(walk.ends) / (schedule.num_devices * period))


@dataclass(slots=True)
class _Device:
    """The virtual clock of one device: when its compute stream and its link are free, and one run further back."""

    free: float = 0.0
    before: float = 0.0  # the end of the last run but one: then its parameters left, and the next upload may begin
    link: float = 0.0


@dataclass(slots=True)
class _Microbatch:
    """Where a microbatch's newest activation or gradient is, and when forward produced each kept input."""

    ready: float
    device: int | None = None
    forward_end: dict[int, float] = field(default_factory=dict)  # by the layer that follows


class _Walk:
    """Walks the list of runs, iteration after iteration, and keeps the clocks."""

    def __init__(self, schedule: Schedule, costs: Sequence[LayerCost], links: Links, record: bool = True) -> None:
        if len(costs) != schedule.num_layers:
            raise ValueError(f"{len(costs)} layer costs for a schedule of {schedule.num_layers} layers")
        self.schedule, self.links = schedule, links
        self.prefix = {
            "forward": [0.0, *accumulate(cost.forward_s for cost in costs)],
            "fused": [0.0, *accumulate(cost.fused_s for cost in costs)],
            "backward": [0.0, *accumulate(cost.backward_s for cost in costs)],
            "recompute": [0.0, *accumulate(cost.recompute_s for cost in costs)],
        }
        self.bytes = [0, *accumulate(cost.parameter_bytes for cost in costs)]
        self.hops = [0.0, *(links.hop(cost.activation_bytes) for cost in costs)]  # by the layer that follows
        self.devices = [_Device() for _ in range(schedule.num_devices)]
        self.actions: list[TimedAction] | None = [] if record else None
        self.ends: list[float] = []
        self.compute_s = 0.0
        self.uploaded = 0

    def iterate(self, begin: float, rotation: int = 0) -> None:
        """One more iteration, whose uploads and computations start at `begin` at the earliest."""
        microbatches = [_Microbatch(begin) for _ in range(self.schedule.num_microbatch)]
        for i, run in enumerate(self.schedule.runs):
            self._run(i, run, (run.device + rotation) % len(self.devices), microbatches, begin)
        self.ends.append(max(microbatch.ready for microbatch in microbatches))

    def timeline(self) -> Timeline:
        count = self.schedule.num_devices
        return Timeline(tuple(self.actions or ()), count, self.ends[-1], self.compute_s, self.uploaded)

    def _run(self, i: int, run: StageRun, index: int, microbatches: list[_Microbatch], begin: float) -> None:
        device = self.devices[index]
        size = self.bytes[run.layers.stop] - self.bytes[run.layers.start]
        start = max(device.link, device.before, begin)
        device.link = start + size / self.links.upload_bytes_per_s
        self.uploaded += size
        self._record("upload", index, i, run.layers, None, start, device.link, size)
        device.before = device.free
        now = max(device.free, device.link)
        for m in run.microbatches:
            microbatch = microbatches[m]
            if run.phase == "backward":
                now = self._recompute(i, run, index, m, microbatch, now)
            now = self._compute(i, run, index, m, microbatch, now)
        device.free = now

    def _recompute(self, i: int, run: StageRun, index: int, m: int, microbatch: _Microbatch, now: float) -> float:
        first = run.layers.start
        start = max(now, microbatch.forward_end.get(first, 0.0) + self.hops[first])
        end = start + self._span("recompute", run.layers)
        self._record("recompute", index, i, run.layers, m, start, end)
        return end

    def _compute(self, i: int, run: StageRun, index: int, m: int, microbatch: _Microbatch, now: float) -> float:
        boundary = run.layers.stop if run.phase == "backward" else run.layers.start
        moved = microbatch.device is not None and microbatch.device != index
        start = max(now, microbatch.ready + (self.hops[boundary] if moved else 0.0))
        end = start + self._span(run.phase, run.layers)
        microbatch.ready, microbatch.device = end, index
        if run.phase == "forward":
            for layer in run.layers:
                microbatch.forward_end[layer + 1] = end
        elif run.phase == "fused":
            for layer in run.layers:
                microbatch.forward_end.setdefault(layer + 1, end)
        self._record(run.phase, index, i, run.layers, m, start, end)
        return end

    def _span(self, kind: str, layers: range) -> float:
        prefix = self.prefix[kind]
        return prefix[layers.stop] - prefix[layers.start]

    def _record(
        self,
        kind: ActionKind | Phase,
        index: int,
        i: int,
        layers: range,
        m: int | None,
        start: float,
        end: float,
        size: int = 0,
    ) -> None:
        if kind != "upload":
            self.compute_s += end - start
        if self.actions is not None:
            self.actions.append(TimedAction(kind, index, i, layers, m, start, end, size, len(self.ends)))
