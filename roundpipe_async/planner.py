"""Decides for one call which layers form the stages and which device runs which when.

Plans follow the layers' measured times (the sizes of their parameters before the first measurement) and are made anew
when there is much more to measure by; the result of a call does not depend on its plan.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from roundpipe_async.config import RoundPipeRunConfig
from roundpipe_async.errors import ScheduleError
from roundpipe_async.scheduling.plan import LayerCost, ModelExecutePlan, RunType, balanced_plan
from roundpipe_async.scheduling.schedule import PLANNED_AS, Schedule, ScheduleType, round_robin
from roundpipe_async.scheduling.search import Objective, search
from roundpipe_async.scheduling.simulate import Links
from roundpipe_async.scheduling.timing import LayerTimer

_logger = logging.getLogger("roundpipe_async")

SEARCH_EFFORT = 0.25
"""Of the search's usual effort: about half a second, a few times in a model's life."""
SEARCHES = 4
"""How often a schedule is searched for: before the calls 1, 2, 3 and 5, by what was measured until then."""


class Planner:
    """Plans of one model, by run type, and the timer that they learn from."""

    def __init__(self, parameter_bytes: Sequence[int], num_devices: int, free_uploads: bool = False) -> None:
        self.timer = LayerTimer(len(parameter_bytes))
        self._parameter_bytes = parameter_bytes
        self._num_layers = len(parameter_bytes)
        self._num_devices = num_devices
        self._plans: dict[RunType, ModelExecutePlan] = {}
        self._calls: dict[RunType, int] = {}
        self._links = Links(upload_bytes_per_s=math.inf) if free_uploads else Links()
        self._searched: dict[tuple[int, Objective], tuple[int, Schedule]] = {}
        self._told = False

    def costs(self) -> list[LayerCost]:
        """What is known of each layer's times and sizes."""
        return self.timer.costs(self._parameter_bytes)

    def schedule(
        self,
        kind: ScheduleType,
        config: RoundPipeRunConfig,
        num_microbatch: int,
        first_device: Callable[[int], int],
        in_order: bool = False,
    ) -> Schedule:
        """The schedule of one call. May take milliseconds (a search: half a second): not on the event loop's thread.

        `first_device(n)` gives the device at which the next n stage runs of a round robin start. `in_order`: the
        model changes buffers, so that a layer must see its microbatches one after another, in one stage run.
        """
        run_type = PLANNED_AS[kind]
        chosen = config.schedule
        if isinstance(chosen, Schedule):
            schedule = self._check(chosen, kind, num_microbatch)
            if in_order and not _in_order(schedule):
                raise ScheduleError(
                    "the schedule spreads a stage's microbatches over several runs, but the model changes buffers "
                    "(BatchNorm in training mode, say) and must see them in order: use schedule='round_robin'"
                )
            return schedule
        if chosen in ("search", "search_steady") and kind == "fused" and config.execute_plan is None:
            if not in_order:
                return self._search(num_microbatch, "isolated" if chosen == "search" else "steady")
            if not self._told:
                self._told = True
                _logger.info("the model changes buffers, so its stages are not spread: round robin instead of search")
        plan = config.execute_plan
        if plan is None:
            plan = self._plan(run_type)
        else:
            plan.validate(run_type, self._num_layers)
        num_runs = len(plan.bwd_plan) if kind == "train_backward" else len(plan.fwd_plan)
        if kind == "fused":
            num_runs += len(plan.bwd_plan)
        return round_robin(plan, kind, self._num_layers, num_microbatch, self._num_devices, first_device(num_runs))

    def _plan(self, run_type: RunType) -> ModelExecutePlan:
        calls = self._calls[run_type] = self._calls.get(run_type, 0) + 1
        # At the first call by sizes; then after 1, 2, 4, 8, ... calls by what was measured until then.
        if run_type not in self._plans or calls - 1 & calls - 2 == 0:
            self._plans[run_type] = balanced_plan(run_type, self.costs(), self._num_devices)
        return self._plans[run_type]

    def _search(self, num_microbatch: int, objective: Objective) -> Schedule:
        """A searched schedule; the same one again once it has been made anew `SEARCHES` times."""
        key = (num_microbatch, objective)
        calls, schedule = self._searched.get(key, (0, None))
        if schedule is None or (calls & (calls - 1) == 0 and calls < 1 << (SEARCHES - 1)):
            schedule = search(
                self.costs(),
                num_microbatch,
                self._num_devices,
                objective=objective,
                links=self._links,
                effort=SEARCH_EFFORT,
            )
        self._searched[key] = (calls + 1, schedule)
        return schedule

    def _check(self, schedule: Schedule, kind: ScheduleType, num_microbatch: int) -> Schedule:
        schedule.validate()
        for what, has, needs in (
            ("layers", schedule.num_layers, self._num_layers),
            ("microbatches", schedule.num_microbatch, num_microbatch),
        ):
            if has != needs:
                raise ScheduleError(f"the schedule is for {has} {what}, the call has {needs}")
        if schedule.num_devices > self._num_devices:
            raise ScheduleError(f"the schedule is for {schedule.num_devices} devices, the pool has {self._num_devices}")
        phases = {run.phase for run in schedule.runs}
        wanted = {"infer": {"forward"}, "train_forward": {"forward"}, "train_backward": {"backward"}}.get(kind)
        if (wanted is not None and phases != wanted) or (wanted is None and "fused" not in phases):
            raise ScheduleError(f"the schedule has phases {sorted(phases)}: not one for a {kind} call")
        return schedule


def _in_order(schedule: Schedule) -> bool:
    """Whether every layer runs all microbatches forward in one stage run, in ascending order."""
    return all(
        run.microbatches == tuple(range(schedule.num_microbatch)) for run in schedule.runs if run.phase != "backward"
    )
