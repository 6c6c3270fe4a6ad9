"""Ways to cut a model into stages, for tests that must hold for each of them."""

from __future__ import annotations

from roundpipe_async.scheduling.plan import ModelExecutePlan

PLANS = ("one_each", "two_stages", "inner", "fused")


def plan_of(kind: str, layers: int) -> ModelExecutePlan:
    """`one_each`: a stage for every layer; `two_stages`: all but the last recomputed at once; `inner`: the first and
    the last are stages of their own; `fused`: no recompute."""
    if kind == "fused" or layers < 3:
        return ModelExecutePlan([], [range(layers)])
    last = layers - 1
    if kind == "one_each":
        return ModelExecutePlan([range(i, i + 1) for i in range(last)], [range(i, i + 1) for i in range(last, -1, -1)])
    if kind == "inner":
        return ModelExecutePlan([range(1), range(1, last)], [range(last, layers), range(1, last), range(1)])
    return ModelExecutePlan([range(last)], [range(last, layers), range(last)])
