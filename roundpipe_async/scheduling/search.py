"""Schedules that beat round robin: uneven stages, and a stage's microbatches spread over devices that would idle.

An isolated iteration idles while the pipeline fills and drains. Splitting a stage's microbatches into groups that run
on several devices at once shortens both; each group uploads the stage's parameters once more, so there is a budget.
The search starts from drafts made by rule (`seeds.py`) and anneals: it changes a draft a little, lays it out in
virtual time, keeps what got better and, ever more rarely, what got a little worse. It counts its work instead of
looking at a clock, so the same arguments give the same schedule on any machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from roundpipe_async.errors import PlanError
from roundpipe_async.scheduling.drafts import FUSED, Clocks, Draft, Layout, Problem, Stage, lay_out, schedule_of
from roundpipe_async.scheduling.plan import LayerCost, timed
from roundpipe_async.scheduling.schedule import Schedule
from roundpipe_async.scheduling.seeds import draft_of, even_groups, spread_drafts, wave_cuts
from roundpipe_async.scheduling.simulate import Links

Objective = Literal["isolated", "steady"]

EFFORT = 10_000_000  # microbatches placed and devices looked at, in all: two seconds or so
HEAT = 0.05  # how much worse, of the longest layer's time, may be kept at first
OVER_BUDGET = 2.0  # an iteration counts as so many times longer for each unit of the budget that it is over
STEADY_ENOUGH = 1.001  # of the time in which no device idles: nothing is left to search for


class Found(NamedTuple):
    """A draft with its value (what is minimised), its seconds and uploaded bytes, and its groups' devices."""

    value: float
    seconds: float
    size: int
    draft: Draft
    devices: list[int]


def search(
    costs: Sequence[LayerCost],
    num_microbatch: int,
    num_devices: int,
    *,
    objective: Objective = "isolated",
    links: Links | None = None,
    upload_budget: float = 1.5,
    memory_limit_bytes: float | None = None,
    effort: float = 1.0,
    seed: int = 0,
) -> Schedule:
    """The best schedule found for a `forward_backward` (forward, fused, backward runs), valid for the engine.

    `isolated` minimises the time of one iteration that starts with every device idle and empty and ends with the last
    microbatch: for steps that are waited for (`is_async=False`). `steady` minimises the time from one iteration to
    the next when they follow each other with parameters one step old (`simulate.simulate_steady`, no rotation).

    - It uploads at most `upload_budget` times the parameter bytes of the paper's round robin, which uploads every
      layer twice (the last one once) for each round of a microbatch a device.
    - A stage of several layers takes at most half of `memory_limit_bytes` (parameters; backward: and gradients) and
      at most twice (forward: four times) the time of the longest single layer's stage.
    - `effort` scales how long it searches (1.0: two or three seconds on a core); the result depends on the arguments
      alone. `links` defaults to `Links()`.

    Raises PlanError without layers, ValueError for sizes below 1 or an unknown objective.
    """
    if objective not in ("isolated", "steady"):
        raise ValueError(f"objective is 'isolated' or 'steady', not {objective!r}")
    for name, value in (("num_microbatch", num_microbatch), ("num_devices", num_devices)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if not costs:
        raise PlanError("a schedule needs at least one layer, the model has 0")
    problem = Problem(tuple(timed(costs)), num_microbatch, num_devices, links or Links(), memory_limit_bytes)
    hunt = _Hunt(problem, objective, upload_budget * problem.paper_bytes(), int(EFFORT * effort), seed)
    found = hunt.run()
    schedule = schedule_of(problem, found.draft, found.devices)
    schedule.validate()
    return schedule


class _Hunt:
    """One search: its budget of work, the best draft so far, and the way to value a draft."""

    def __init__(self, problem: Problem, objective: Objective, budget: float, effort: int, seed: int) -> None:
        self.problem, self.budget, self.effort = problem, budget, effort
        self.measure: Callable[[Draft], tuple[float, Layout]] = (
            self._isolated if objective == "isolated" else self._steady
        )
        self.passes = 1 if objective == "isolated" else 5
        self.objective = objective
        self.random = random.Random(seed)
        self.spent = 0
        self.best: Found | None = None
        busy = problem.num_microbatch * sum(c.forward_s + c.recompute_s + c.backward_s for c in problem.costs)
        saved = problem.num_microbatch * problem.costs[-1].recompute_s
        self.least = (busy - saved) / problem.num_devices

    def run(self) -> Found:
        self._seed()
        best = self._best()
        if self.objective == "steady" and best.seconds <= STEADY_ENOUGH * self.least:
            return best
        self._anneal(best)
        return self._best()

    def _best(self) -> Found:
        assert self.best is not None, "one of the seeds keeps every budget"
        return self.best

    def _seed(self) -> None:
        problem = self.problem
        plain = draft_of(problem, [(1, 1)] * (problem.num_layers - 1), 1, [(1, 1)] * (problem.num_layers - 1), False)
        self.best = self.value(plain)  # uploads the least that is possible, so it is taken even over the budget
        for draft in spread_drafts(problem):
            self._consider(draft)
        body = problem.num_layers - 1
        if body:
            self._seed_waves(wave_cuts(problem, 0, body), wave_cuts(problem, 2, body))

    def _seed_waves(self, forwards: list[list[tuple[int, int]]], backwards: list[list[tuple[int, int]]]) -> None:
        """Chooses the cut of one pass while the other is held, in turns: not every pair of them."""
        devices = self.problem.num_devices
        forward, backward = forwards[-1], backwards[0]
        for _ in range(2):
            for fused in (devices, 1):
                made = [(draft_of(self.problem, forward, fused, cut, True), cut) for cut in backwards]
                backward = min(made, key=lambda pair: self._consider(pair[0]).value)[1]
                made = [(draft_of(self.problem, cut, fused, backward, True), cut) for cut in forwards]
                forward = min(made, key=lambda pair: self._consider(pair[0]).value)[1]

    def _consider(self, draft: Draft) -> Found:
        found = self.value(draft)
        if found.size <= self.budget and (self.best is None or found.value < self.best.value):
            self.best = found
        return found

    def value(self, draft: Draft) -> Found:
        self.spent += self.passes * self.problem.effort(draft)
        seconds, layout = self.measure(draft)
        over = max(0.0, layout.size / self.budget - 1) if self.budget else 0.0
        return Found(seconds * (1 + OVER_BUDGET * over), seconds, layout.size, draft, layout.devices)

    def _isolated(self, draft: Draft) -> tuple[float, Layout]:
        layout = lay_out(self.problem, draft, Clocks.zero(self.problem.num_devices))
        return layout.end, layout

    def _steady(self, draft: Draft) -> tuple[float, Layout]:
        """The mean period of iterations 3 and 4; devices are chosen in iteration 1, where the pipeline is full."""
        clocks = Clocks.zero(self.problem.num_devices)
        ends: list[float] = []
        layout: Layout | None = None
        for i in range(self.passes):
            begin = ends[i - 2] if i >= 2 else 0.0
            fixed = layout.devices if layout is not None and i >= 2 else None
            layout = lay_out(self.problem, draft, clocks, begin, fixed)
            ends.append(layout.end)
        assert layout is not None
        return (ends[-1] - ends[-3]) / 2, layout

    def _anneal(self, start: Found) -> None:
        current = start
        begun = self.spent
        total = max(1, self.effort - begun)
        while self.spent < self.effort:
            self.spent += 1
            changed = change(self.problem, current.draft, self.random)
            if changed is None:
                continue
            found = self._consider(changed)
            heat = HEAT * self.problem.longest_layer * (1 - min(1.0, (self.spent - begun) / total)) ** 2
            worse = found.value - current.value
            if worse <= 0 or (heat > 0 and self.random.random() < math.exp(-worse / heat)):
                current = found


def change(problem: Problem, draft: Draft, draw: random.Random) -> Draft | None:
    """A neighbouring draft, or None where the drawn change is not possible there."""
    stages = list(draft.stages)
    at = draw.randrange(len(stages))
    kind = draw.random()
    if kind < 0.35:
        _regroup(problem, stages, at, draw)
        return draft._replace(stages=tuple(stages))
    if kind < 0.6:
        done = _move_microbatch(stages, at, draw)
    elif kind < 0.7:
        done = _split_group(stages, at, draw)
    elif kind < 0.8:
        done = _join_groups(stages, at, draw)
    elif kind < 0.88:
        done = _move_boundary(problem, stages, at, draw)
    elif kind < 0.94:
        done = _join_stages(problem, stages, at)
    else:
        done = _split_stage(stages, at, draw)
    return draft._replace(stages=tuple(stages)) if done else None


def _regroup(problem: Problem, stages: list[Stage], at: int, draw: random.Random) -> None:
    """Splits the microbatches of a few consecutive stages anew, into even groups."""
    stop = min(len(stages), at + draw.choice((1, 1, 2, 3, 6, 10)))
    groups = even_groups(problem.num_microbatch, draw.choice((1, 2, 3, 4, 5, 6, problem.num_devices)))
    for i in range(at, stop):
        stages[i] = stages[i]._replace(groups=groups)


def _move_microbatch(stages: list[Stage], at: int, draw: random.Random) -> bool:
    groups = list(stages[at].groups)
    source, target = draw.randrange(len(groups)), draw.randrange(len(groups))
    if source == target:
        return False
    groups[source] -= 1
    groups[target] += 1
    stages[at] = stages[at]._replace(groups=tuple(group for group in groups if group))
    return True


def _split_group(stages: list[Stage], at: int, draw: random.Random) -> bool:
    groups = stages[at].groups
    i = draw.randrange(len(groups))
    if groups[i] < 2:
        return False
    first = draw.randrange(1, groups[i])
    stages[at] = stages[at]._replace(groups=(*groups[:i], first, groups[i] - first, *groups[i + 1 :]))
    return True


def _join_groups(stages: list[Stage], at: int, draw: random.Random) -> bool:
    groups = stages[at].groups
    if len(groups) < 2:
        return False
    i = draw.randrange(len(groups) - 1)
    stages[at] = stages[at]._replace(groups=(*groups[:i], groups[i] + groups[i + 1], *groups[i + 2 :]))
    return True


def _move_boundary(problem: Problem, stages: list[Stage], at: int, draw: random.Random) -> bool:
    """Moves a layer from a stage to its neighbour. Around the fused stage three stages change: the last forward
    stage and the first backward one end where the fused one begins."""
    by = draw.choice((-1, 1))
    if stages[at].phase == FUSED:
        touched = [(at - 1, 0, by), (at, by, 0), (at + 1, 0, by)]
    elif at + 1 < len(stages) and stages[at + 1].phase == stages[at].phase:
        upward = stages[at].start < stages[at + 1].start
        touched = [(at, 0, by), (at + 1, by, 0)] if upward else [(at, by, 0), (at + 1, 0, by)]
    else:
        return False
    moved: dict[int, list[Stage]] = {}
    for i, start, stop in touched:
        if not 0 <= i < len(stages):
            return False
        stage = stages[i]._replace(start=stages[i].start + start, stop=stages[i].stop + stop)
        if stage.start == stage.stop and stage.phase != FUSED:
            moved[i] = []  # it gave its only layer away
        elif stage.start < stage.stop and problem.allows(stage.phase, stage.start, stage.stop):
            moved[i] = [stage]
        else:
            return False
    for i in sorted(moved, reverse=True):
        stages[i : i + 1] = moved[i]
    return True


def _join_stages(problem: Problem, stages: list[Stage], at: int) -> bool:
    if at + 1 >= len(stages) or stages[at].phase != stages[at + 1].phase:
        return False
    first, second = stages[at], stages[at + 1]
    start, stop = min(first.start, second.start), max(first.stop, second.stop)
    if not problem.allows(first.phase, start, stop):
        return False
    stages[at : at + 2] = [first._replace(start=start, stop=stop)]
    return True


def _split_stage(stages: list[Stage], at: int, draw: random.Random) -> bool:
    stage = stages[at]
    if stage.phase == FUSED or stage.stop - stage.start < 2:
        return False
    middle = draw.randrange(stage.start + 1, stage.stop)
    lower, upper = stage._replace(stop=middle), stage._replace(start=middle)
    stages[at : at + 1] = [lower, upper] if stage.phase < FUSED else [upper, lower]
    return True
