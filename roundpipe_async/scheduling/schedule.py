"""Schedules as data: which device runs which stage on which microbatches, in which order.

A schedule is decided before anything runs, so it can be printed, parsed back, validated, simulated and searched
without a device. The engine runs any valid one; `round_robin` is the paper's (arXiv 2604.27085).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from roundpipe_async.errors import ScheduleError
from roundpipe_async.scheduling.plan import ModelExecutePlan, RunType

Phase = Literal["forward", "fused", "backward"]
ScheduleType = Literal["infer", "train_forward", "train_backward", "fused"]
SCHEDULE_TYPES: tuple[ScheduleType, ...] = ("infer", "train_forward", "train_backward", "fused")
PLANNED_AS: dict[ScheduleType, RunType] = {
    "infer": "infer",
    "train_forward": "train",
    "train_backward": "train",
    "fused": "fused",
}
LETTERS: dict[Phase, str] = {"forward": "F", "fused": "FB", "backward": "B"}
PHASES: dict[str, Phase] = {letters: phase for phase, letters in LETTERS.items()}


@dataclass(frozen=True, slots=True)
class StageRun:
    """One visit of a stage to a device: its layers' parameters are uploaded, all `microbatches` run, all is dropped.

    - `forward`: the layers run; what backward will need to recompute is kept on the host.
    - `fused`: forward, loss and backward of the last layers in one go, without recompute.
    - `backward`: the layers are recomputed from the input kept at the stage's first layer, then walked backward.
    """

    phase: Phase
    layers: range
    microbatches: tuple[int, ...]
    device: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """An ordered list of stage runs. On every device they execute in list order, one at a time, each run's
    microbatches in tuple order. All that a run needs comes from runs earlier in the list.

    Several runs may have the same phase and layers with disjoint microbatches (a stage spread over devices, or
    visited in rounds). Immutable; `str` and `parse` are inverse to each other; nothing is checked until `validate`.
    """

    runs: tuple[StageRun, ...]
    num_layers: int
    num_microbatch: int
    num_devices: int

    @property
    def stages(self) -> tuple[tuple[Phase, range], ...]:
        """The distinct (phase, layers), in order of first appearance: the stage numbers of the printed form."""
        return tuple(dict.fromkeys((run.phase, run.layers) for run in self.runs))

    def of_device(self, device: int) -> tuple[StageRun, ...]:
        """The runs of one device, in the order in which it executes them."""
        return tuple(run for run in self.runs if run.device == device)

    def kept_inputs(self, microbatch: int) -> frozenset[int]:
        """The layers whose input forward must keep for this microbatch: first layers of its backward stages."""
        return frozenset(
            run.layers.start for run in self.runs if run.phase == "backward" and microbatch in run.microbatches
        )

    def validate(self) -> None:
        """Raises ScheduleError, naming the run and what is wrong, unless this is a schedule that can be run:

        every (layer, microbatch) exactly once forward or fused and once backward or fused (a schedule of forward
        runs alone, or of backward runs alone, covers its own pass), needs earlier in the list, indexes in range.
        """
        for name in ("num_layers", "num_microbatch", "num_devices"):
            if getattr(self, name) < 1:
                raise ScheduleError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.runs:
            raise ScheduleError("a schedule without runs does nothing")
        for i in range(len(self.runs)):
            self._check_run(i)
        kinds = {run.phase for run in self.runs}
        if kinds == {"forward", "backward"}:
            raise ScheduleError(
                "forward and backward runs without a fused one: nothing computes the loss; let the last layers be"
                " a fused stage, or make two schedules (train_forward, train_backward)"
            )
        _Order(self).check()

    def _check_run(self, i: int) -> None:
        run = self.runs[i]
        if run.phase not in LETTERS:
            raise self._fault(i, f"phase {run.phase!r} is none of {', '.join(LETTERS)}")
        if run.layers.step != 1 or len(run.layers) == 0:
            raise self._fault(i, f"its layers {run.layers!r} are not consecutive layers")
        if run.layers.start < 0 or run.layers.stop > self.num_layers:
            raise self._fault(i, f"the model has layers 0 to {self.num_layers - 1}")
        if not run.microbatches:
            raise self._fault(i, "it has no microbatches")
        for m in run.microbatches:
            if not 0 <= m < self.num_microbatch:
                raise self._fault(i, f"microbatch {m} does not exist, there are {self.num_microbatch}")
        if not 0 <= run.device < self.num_devices:
            raise self._fault(i, f"device {run.device} does not exist, there are {self.num_devices}")

    def _fault(self, i: int, why: str) -> ScheduleError:
        run = self.runs[i]
        layers = f"layers {run.layers.start} to {run.layers.stop - 1}"
        return ScheduleError(
            f"run {i} ({run.phase}, {layers}, microbatches {list(run.microbatches)}, device {run.device}): {why}"
        )

    def __str__(self) -> str:
        """A table of stages, then a row for each device. `[5] 2F0 2F1` is run 5 of the list: stage 2, forward,
        microbatches 0 and 1; `FB` is fused, `B` backward, as torch.distributed.pipelining abbreviates them."""
        numbers = {stage: i for i, stage in enumerate(self.stages)}
        lines = [f"schedule: {self.num_layers} layers, {self.num_microbatch} microbatches, {self.num_devices} devices"]
        for (phase, layers), i in numbers.items():
            lines.append(f"stage {i}: {phase} {layers.start}..{layers.stop - 1}")
        rows: dict[int, list[str]] = {device: [] for device in range(self.num_devices)}
        for position, run in enumerate(self.runs):
            action = f"{numbers[run.phase, run.layers]}{LETTERS[run.phase]}"
            rows.setdefault(run.device, []).append(
                " ".join([f"[{position}]", *(f"{action}{m}" for m in run.microbatches)])
            )
        width = len(str(max(rows, default=0)))
        lines += [f"device {device:{width}}: {' '.join(row)}".rstrip() for device, row in rows.items()]
        return "\n".join(lines)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule that `str` printed as `text`; ScheduleError names the line that cannot be read.

        The numbers in square brackets give the runs' order in the list; they must be 0, 1, 2, … without gaps.
        """
        return _Reader(text).schedule()


def round_robin(
    plan: ModelExecutePlan,
    run_type: ScheduleType,
    num_layers: int,
    num_microbatch: int,
    num_devices: int,
    first_device: int = 0,
    round_size: int | None = None,
) -> Schedule:
    """The paper's schedule: stages in order of execution, run i on device (first_device + i) % num_devices, each with
    all its microbatches in ascending order.

    `infer` and `train_forward` run `fwd_plan`, `train_backward` runs `bwd_plan`, `fused` both, with `bwd_plan[0]` as
    the fused stage; the plan is validated for that use. With `round_size` the microbatches go in rounds of at most
    that many, each through all stages before the next (the paper: as many as there are devices); parameters are
    uploaded once for each round. Raises PlanError, ValueError.
    """
    if run_type not in SCHEDULE_TYPES:
        raise ValueError(f"run_type is one of {', '.join(SCHEDULE_TYPES)}, not {run_type!r}")
    for name, value in (("num_microbatch", num_microbatch), ("num_devices", num_devices)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if round_size is not None and round_size < 1:
        raise ValueError(f"round_size is {round_size}; it must be at least 1")
    plan.validate(PLANNED_AS[run_type], num_layers)
    stages: list[tuple[Phase, range]] = []
    if run_type != "train_backward":
        stages += [("forward", layers) for layers in plan.fwd_plan]
    if run_type in ("fused", "train_backward"):
        stages += [("backward", layers) for layers in plan.bwd_plan]
    if run_type == "fused":
        stages[len(plan.fwd_plan)] = ("fused", plan.bwd_plan[0])
    size = round_size or num_microbatch
    rounds = [tuple(range(a, min(a + size, num_microbatch))) for a in range(0, num_microbatch, size)]
    visits = [(phase, layers, microbatches) for microbatches in rounds for phase, layers in stages]
    runs = tuple(StageRun(*visit, (first_device + i) % num_devices) for i, visit in enumerate(visits))
    return Schedule(runs, num_layers, num_microbatch, num_devices)


class _Order:
    """Walks a schedule's runs in list order and keeps, for each microbatch, how far each pass has come."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        kinds = {run.phase for run in schedule.runs}
        self.has_forward = bool(kinds & {"forward", "fused"})
        self.has_backward = bool(kinds & {"backward", "fused"})
        count = schedule.num_microbatch
        self.forward = [0] * count  # layers before this one have run forward
        self.fused = [False] * count
        self.backward = [schedule.num_layers] * count  # layers from this one on have run backward

    def check(self) -> None:
        for i, run in enumerate(self.schedule.runs):
            for m in run.microbatches:
                if run.phase != "backward":
                    self._advance_forward(i, run, m)
                if run.phase != "forward":
                    self._advance_backward(i, run, m)
        for m in range(self.schedule.num_microbatch):
            if self.has_forward and self.forward[m] != self.schedule.num_layers:
                raise ScheduleError(f"microbatch {m} never runs layer {self.forward[m]} forward")
            if self.has_backward and self.backward[m] != 0:
                raise ScheduleError(f"microbatch {m} never runs layer {self.backward[m] - 1} backward")

    def _advance_forward(self, i: int, run: StageRun, m: int) -> None:
        at = self.forward[m]
        if run.layers.start < at:
            raise self.schedule._fault(i, f"microbatch {m} ran layer {run.layers.start} forward before")
        if run.layers.start > at:
            raise self.schedule._fault(i, f"microbatch {m} has not run layer {at} forward in any earlier run")
        self.forward[m] = run.layers.stop

    def _advance_backward(self, i: int, run: StageRun, m: int) -> None:
        at = self.backward[m]
        last = run.layers.stop - 1
        if last >= at:
            raise self.schedule._fault(i, f"microbatch {m} ran layer {last} backward before")
        if last < at - 1:
            where = "the fused stage must hold the last layer" if run.phase == "fused" else "in any earlier run"
            raise self.schedule._fault(i, f"microbatch {m} has not run layer {at - 1} backward: {where}")
        if run.phase == "fused":
            self.fused[m] = True
        elif self.has_forward and not self.fused[m]:
            raise self.schedule._fault(i, f"microbatch {m} has no loss: no earlier fused run has it")
        self.backward[m] = run.layers.start


class _Reader:
    """Reads the printed form of a schedule, line by line."""

    HEAD = re.compile(r"schedule: (\d+) layers, (\d+) microbatches, (\d+) devices")
    STAGE = re.compile(r"stage (\d+): (\w+) (\d+)\.\.(\d+)")
    DEVICE = re.compile(r"device +(\d+):(.*)")
    POSITION = re.compile(r"\[(\d+)\]")
    ACTION = re.compile(r"(\d+)(FB|F|B)(\d+)")

    def __init__(self, text: str) -> None:
        self.lines = [(i, line.strip()) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        self.stages: dict[int, tuple[Phase, range]] = {}
        self.runs: dict[int, StageRun] = {}

    def schedule(self) -> Schedule:
        if not self.lines:
            raise ScheduleError("there is no schedule in an empty text")
        head = self._match(self.HEAD, 0, "'schedule: L layers, M microbatches, D devices'")
        for at in range(1, len(self.lines)):
            if self.lines[at][1].startswith("stage"):
                self._stage(at)
            else:
                self._device(at)
        if sorted(self.runs) != list(range(len(self.runs))):
            raise ScheduleError(f"the run numbers in brackets have gaps: {sorted(self.runs)}")
        layers, microbatches, devices = (int(number) for number in head.groups())
        return Schedule(tuple(self.runs[i] for i in range(len(self.runs))), layers, microbatches, devices)

    def _match(self, pattern: re.Pattern[str], at: int, wanted: str) -> re.Match[str]:
        number, line = self.lines[at]
        found = pattern.fullmatch(line)
        if found is None:
            raise ScheduleError(f"line {number}: {line!r} is not {wanted}")
        return found

    def _stage(self, at: int) -> None:
        index, phase, first, last = self._match(self.STAGE, at, "'stage 0: forward 0..3'").groups()
        if phase not in LETTERS:
            raise ScheduleError(f"line {self.lines[at][0]}: phase {phase!r} is none of {', '.join(LETTERS)}")
        self.stages[int(index)] = (PHASES[LETTERS[phase]], range(int(first), int(last) + 1))

    def _device(self, at: int) -> None:
        number = self.lines[at][0]
        found = self._match(self.DEVICE, at, "'device 0: [0] 0F0 0F1'")
        for position, actions in _groups(found[2].split(), self.POSITION, number):
            stage, microbatches = self._actions(actions, number)
            if position in self.runs:
                raise ScheduleError(f"line {number}: run [{position}] was there before")
            self.runs[position] = StageRun(*stage, microbatches, int(found[1]))

    def _actions(self, words: Sequence[str], number: int) -> tuple[tuple[Phase, range], tuple[int, ...]]:
        stages, microbatches = set(), []
        for word in words:
            found = self.ACTION.fullmatch(word)
            if found is None:
                raise ScheduleError(f"line {number}: {word!r} is not an action like 2F0, 2FB0 or 2B0")
            index = int(found[1])
            if index not in self.stages or LETTERS[self.stages[index][0]] != found[2]:
                raise ScheduleError(f"line {number}: {word!r} does not name a stage declared above")
            stages.add(index)
            microbatches.append(int(found[3]))
        if len(stages) != 1:
            raise ScheduleError(f"line {number}: a run has one stage, this one has {sorted(stages)}")
        return self.stages[stages.pop()], tuple(microbatches)


def _groups(words: Iterable[str], position: re.Pattern[str], number: int) -> Iterator[tuple[int, list[str]]]:
    """Splits a device's row at its [n] marks."""
    listed = list(words)
    marks = [i for i, word in enumerate(listed) if position.fullmatch(word)]
    if listed and (not marks or marks[0] != 0):
        raise ScheduleError(f"line {number}: a row starts with a run number like [0], not {listed[0]!r}")
    for a, b in pairwise([*marks, len(listed)]):
        yield int(listed[a].strip("[]")), listed[a + 1 : b]
