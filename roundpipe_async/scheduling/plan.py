"""Execution plans: which layers make one stage, forward and backward apart.

Forward and backward are cut differently because backward with recompute costs about three times forward
(arXiv 2604.27085). A plan is decided before anything runs and holds no device, microbatch or tensor; a `Schedule` is
made from it. `partition.py` finds the best plan for given costs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, Protocol, overload

from roundpipe_async.errors import PlanError
from roundpipe_async.scheduling.partition import Cuts, Weights, best_cuts

RunType = Literal["infer", "train", "fused"]
RUN_TYPES: tuple[RunType, ...] = ("infer", "train", "fused")
GIGABYTE = 10**9

logger = logging.getLogger("roundpipe_async")


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What one layer costs for one microbatch. Seconds and bytes; only ratios of the times matter to a plan.

    `recompute_s` is the forward pass that backward repeats, `backward_s` the gradient pass alone. Parameter bytes are
    those that an upload moves; activation bytes are what the layer hands on.
    """

    forward_s: float
    recompute_s: float
    backward_s: float
    parameter_bytes: int = 0
    activation_bytes: int = 0

    @property
    def fused_s(self) -> float:
        """Seconds of forward and backward in one go, without recompute."""
        return self.forward_s + self.backward_s

    @property
    def recomputed_backward_s(self) -> float:
        """Seconds of a backward stage's part: recompute, then backward."""
        return self.recompute_s + self.backward_s


ASSUMED_BYTES_PER_S = 1e11
"""The rate at which a layer's parameters stand in for its forward pass; only ratios between layers matter."""


def timed(costs: Sequence[LayerCost]) -> Sequence[LayerCost]:
    """The costs, or, where no layer has any times, the same with times that follow the parameter bytes."""
    if any(cost.forward_s or cost.recompute_s or cost.backward_s for cost in costs):
        return costs
    unit = [max(cost.parameter_bytes, 1) / ASSUMED_BYTES_PER_S for cost in costs]
    return [replace(cost, forward_s=s, recompute_s=s, backward_s=2 * s) for cost, s in zip(costs, unit, strict=True)]


class Planned(Protocol):
    """What `ModelExecutePlan.auto` asks of a model."""

    @property
    def pool(self) -> Any: ...  # has `devices`, a sequence; `memory_bytes`, the smallest device's, if it knows

    def layer_costs(self) -> Sequence[LayerCost]: ...


@dataclass
class ModelExecutePlan:
    """Stages of the forward pass and of the backward pass, each a `range` of layer indexes.

    - `infer`: `fwd_plan` covers all layers, first to last.
    - `train` (`forward` with a graph, `backward` later): besides, `bwd_plan` covers all layers, last stage first.
    - `fused` (`forward_backward`): `bwd_plan` covers all layers, last stage first; its first stage is the fused one
      (forward, loss and backward in one go), and `fwd_plan` covers exactly the layers before it.

    Attributes may be set one by one. Nothing is checked until `validate`, which every use of a plan calls.
    """

    fwd_plan: list[range] = field(default_factory=list)
    bwd_plan: list[range] = field(default_factory=list)

    def validate(self, run_type: RunType, num_layers: int) -> None:
        """Raises PlanError, whose text shows the plan with an arrow at the fault, unless it fits `run_type`."""
        if run_type not in RUN_TYPES:
            raise ValueError(f"run_type is one of {', '.join(RUN_TYPES)}, not {run_type!r}")
        if num_layers < 1:
            raise PlanError(f"a plan needs at least one layer, the model has {num_layers}")
        if run_type == "infer":
            self._check_forward(run_type, num_layers, num_layers)
            return
        self._check_backward(run_type, num_layers)
        forward_stop = num_layers if run_type == "train" else self.bwd_plan[0].start
        self._check_forward(run_type, num_layers, forward_stop)

    @overload
    @classmethod
    def auto(
        cls,
        run_type: RunType,
        model: Planned,
        /,
        *,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
    ) -> ModelExecutePlan: ...
    @overload
    @classmethod
    def auto(
        cls,
        run_type: RunType,
        *models: Planned,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
    ) -> tuple[ModelExecutePlan, ...]: ...
    @classmethod
    def auto(
        cls,
        run_type: RunType,
        *models: Planned,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
    ) -> ModelExecutePlan | tuple[ModelExecutePlan, ...]:
        """The best plan for one model, or a tuple of jointly best plans for several that run one after another.

        Objective and limits are those of `balanced_plan`; `min_stages` defaults to the pool's device count and
        counts the stages of all models together. `model_memory_limit` is in GB (1e9 bytes), as in RoundPipe; it
        defaults to 60 % of the smallest device's memory where the pool knows it (`memory_bytes`), else there is none.
        """
        if not models:
            raise ValueError("ModelExecutePlan.auto needs at least one model after the run type")
        pools = [model.pool for model in models]
        if min_stages is None:
            min_stages = max(len(pool.devices) for pool in pools)
        if model_memory_limit is not None:
            limit: float | None = model_memory_limit * GIGABYTE
        else:
            known = [size for pool in pools if (size := getattr(pool, "memory_bytes", None)) is not None]
            limit = 0.6 * min(known) if known else None
        costs = [tuple(model.layer_costs()) for model in models]
        plans = balanced_plans(run_type, costs, min_stages, upper_threshold, limit)
        return plans[0] if len(models) == 1 else plans

    def _check_forward(self, run_type: str, num_layers: int, stop: int) -> None:
        at = 0
        for i, stage in enumerate(self.fwd_plan):
            self._check_stage("fwd_plan", i, run_type, num_layers)
            if stage.start != at:
                raise self._fault("fwd_plan", i, run_type, f"this stage must start at layer {at}")
            if stage.stop > stop:
                why = "layer {0} belongs to the fused stage bwd_plan[0], which runs its own forward"
                raise self._fault("fwd_plan", i, run_type, why.format(stop))
            at = stage.stop
        if at != stop:
            after = f", the layers before the fused stage {_show(self.bwd_plan[0])}" if run_type == "fused" else ""
            missing = f"layers {at} to {stop - 1} are missing: {run_type} needs layers 0 to {stop - 1} here{after}"
            raise self._fault("fwd_plan", len(self.fwd_plan), run_type, missing)

    def _check_backward(self, run_type: str, num_layers: int) -> None:
        at = num_layers
        for i, stage in enumerate(self.bwd_plan):
            self._check_stage("bwd_plan", i, run_type, num_layers)
            if stage.stop != at:
                why = f"this stage must end with layer {at - 1} (stages go from the last layer to the first)"
                raise self._fault("bwd_plan", i, run_type, why)
            at = stage.start
        if at != 0:
            why = f"layers 0 to {at - 1} are missing: backward needs every layer"
            raise self._fault("bwd_plan", len(self.bwd_plan), run_type, why)

    def _check_stage(self, name: str, i: int, run_type: str, num_layers: int) -> None:
        stage = getattr(self, name)[i]
        if not isinstance(stage, range) or stage.step != 1:
            raise self._fault(name, i, run_type, "a stage is a range of layer indexes with step 1")
        if len(stage) == 0:
            raise self._fault(name, i, run_type, "this stage has no layers")
        if stage.start < 0 or stage.stop > num_layers:
            raise self._fault(name, i, run_type, f"the model has layers 0 to {num_layers - 1}")

    def _fault(self, name: str, index: int, run_type: str, why: str) -> PlanError:
        lines = [f"this plan does not fit run type {run_type!r}: {why}"]
        for attribute in ("fwd_plan", "bwd_plan"):
            shown = [_show(stage) for stage in getattr(self, attribute)]
            lines.append(f"  {attribute} = [" + ", ".join(shown) + "]")
            if attribute == name:
                column = len(f"  {attribute} = [") + sum(len(text) + 2 for text in shown[:index])
                if index == len(shown) and shown:
                    column -= 2
                lines.append(" " * column + "^ here")
        return PlanError("\n".join(lines))


def balanced_plan(
    run_type: RunType,
    costs: Sequence[LayerCost],
    min_stages: int,
    upper_threshold: float = 1.1,
    memory_limit_bytes: float | None = None,
) -> ModelExecutePlan:
    """The plan with the least *lock-step time*: (number of stages) x (time of the longest stage).

    That product is what an iteration takes, per microbatch, when all stages wait for the slowest one. It is minimised
    exactly, over both passes and the fused stage's size, subject to

    - no stage is longer than `upper_threshold` times the longest single layer (its backward with recompute, the
      fused pass for the last layer): longer stages would only fill and drain the pipeline more slowly;
    - at least `min_stages` stages (`train`: in each pass; fewer layers give fewer stages);
    - a stage's parameters (backward: and as many bytes of gradients) take at most half of `memory_limit_bytes`,
      because the next stage's are uploaded while it runs. A single layer above that gets a stage of its own and a
      log line.

    Among equally good plans: fewest stages, then the least sum of squared stage times. Costs without times (all zero)
    are planned by parameter bytes.
    """
    return balanced_plans(run_type, [costs], min_stages, upper_threshold, memory_limit_bytes)[0]


def balanced_plans(
    run_type: RunType,
    models: Sequence[Sequence[LayerCost]],
    min_stages: int,
    upper_threshold: float = 1.1,
    memory_limit_bytes: float | None = None,
) -> tuple[ModelExecutePlan, ...]:
    """Plans for several models that share one pipeline: as `balanced_plan`, stages counted over all of them."""
    if run_type not in RUN_TYPES:
        raise ValueError(f"run_type is one of {', '.join(RUN_TYPES)}, not {run_type!r}")
    if min_stages < 1:
        raise ValueError(f"min_stages is {min_stages}; it must be at least 1")
    if not upper_threshold >= 1:
        raise ValueError(f"upper_threshold is {upper_threshold}; below 1 not even the longest layer fits a stage")
    if memory_limit_bytes is not None and not memory_limit_bytes > 0:
        raise ValueError(f"the memory limit is {memory_limit_bytes} bytes; it must be positive")
    if any(len(costs) == 0 for costs in models):
        raise PlanError("a plan needs at least one layer, the model has 0")
    weights = [_weights(costs) for costs in models]
    limit = None if memory_limit_bytes is None else memory_limit_bytes / 2
    for costs in models:
        _log_oversize(run_type, costs, limit)
    cuts = best_cuts(run_type, weights, min_stages, upper_threshold, limit)
    return tuple(_plan_of(run_type, cut) for cut in cuts)


def _weights(costs: Sequence[LayerCost]) -> Weights:
    """Times of each layer in each pass, and its parameter bytes."""
    size = [float(cost.parameter_bytes) for cost in costs]
    costs = timed(costs)
    forward = [cost.forward_s for cost in costs]
    fused = [cost.fused_s for cost in costs]
    return Weights(forward, fused, [cost.recomputed_backward_s for cost in costs], size)


def _log_oversize(run_type: str, costs: Sequence[LayerCost], limit: float | None) -> None:
    factor = 1 if run_type == "infer" else 2
    for i, cost in enumerate(costs):
        if limit is not None and cost.parameter_bytes * factor > limit:
            logger.warning(
                "layer %d needs %d bytes on its device, more than half the memory limit (%d): it gets its own stage",
                i, cost.parameter_bytes * factor, int(limit),
            )  # fmt: skip


def _plan_of(run_type: RunType, cuts: Cuts) -> ModelExecutePlan:
    forward = [range(a, b) for a, b in pairwise(cuts.forward)]
    backward = [range(a, b) for a, b in pairwise(cuts.backward)][::-1]
    return ModelExecutePlan(forward, [] if run_type == "infer" else backward)


def _show(stage: object) -> str:
    return f"{stage.start}..{stage.stop - 1}" if isinstance(stage, range) and stage.step == 1 else repr(stage)
