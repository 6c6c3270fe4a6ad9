"""Plans: the rules of the three run types, and balanced plans that no other plan beats (brute force)."""

from __future__ import annotations

import itertools
import logging
import random
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_async.errors import PlanError
from roundpipe_async.scheduling.plan import LayerCost, ModelExecutePlan, RunType, balanced_plan, balanced_plans


def test_attributes_are_set_one_by_one_as_in_roundpipe() -> None:
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(0, 3)]
    plan.bwd_plan = [range(3, 4), range(2, 3), range(0, 2)]
    plan.validate("fused", 4)
    assert ModelExecutePlan().fwd_plan == [] and ModelExecutePlan().fwd_plan is not ModelExecutePlan().fwd_plan


@pytest.mark.parametrize(
    ("run_type", "forward", "backward"),
    [
        ("infer", [range(0, 2), range(2, 4)], []),
        ("infer", [range(0, 4)], [range(9, 1)]),  # backward stages are not looked at
        ("train", [range(0, 4)], [range(1, 4), range(0, 1)]),
        ("fused", [range(0, 3)], [range(3, 4), range(0, 3)]),
        ("fused", [], [range(0, 4)]),  # everything in the fused stage
    ],
)
def test_plans_that_fit(run_type: RunType, forward: list[range], backward: list[range]) -> None:
    ModelExecutePlan(forward, backward).validate(run_type, 4)


@pytest.mark.parametrize(
    ("run_type", "forward", "backward", "said", "arrow"),
    [
        ("infer", [range(0, 2)], [], "layers 2 to 3 are missing", "fwd_plan"),
        ("infer", [range(1, 4)], [], "must start at layer 0", "fwd_plan"),
        ("infer", [range(0, 2), range(1, 4)], [], "must start at layer 2", "fwd_plan"),
        ("infer", [range(0, 5)], [], "layers 0 to 3", "fwd_plan"),
        ("infer", [range(0, 4, 2)], [], "step 1", "fwd_plan"),
        ("infer", [range(0, 4), range(4, 4)], [], "no layers", "fwd_plan"),
        ("infer", [[0, 1, 2, 3]], [], "range of layer indexes", "fwd_plan"),
        ("train", [range(0, 4)], [], "layers 0 to 3 are missing", "bwd_plan"),
        ("train", [range(0, 3)], [range(0, 4)], "layers 3 to 3 are missing", "fwd_plan"),
        ("train", [range(0, 4)], [range(0, 2), range(2, 4)], "must end with layer 3", "bwd_plan"),
        ("train", [range(0, 4)], [range(2, 4), range(0, 3)], "must end with layer 1", "bwd_plan"),
        ("train", [range(0, 4)], [range(2, 4)], "layers 0 to 1 are missing", "bwd_plan"),
        ("fused", [range(0, 4)], [range(3, 4), range(0, 3)], "runs its own forward", "fwd_plan"),
        ("fused", [range(0, 2)], [range(3, 4), range(0, 3)], "before the fused stage 3..3", "fwd_plan"),
        ("fused", [range(0, 3)], [], "layers 0 to 3 are missing", "bwd_plan"),
    ],
)
def test_faults_are_shown_with_an_arrow(
    run_type: RunType, forward: list[Any], backward: list[range], said: str, arrow: str
) -> None:
    with pytest.raises(PlanError, match=said) as raised:
        ModelExecutePlan(forward, backward).validate(run_type, 4)
    lines = str(raised.value).splitlines()
    at = next(i for i, line in enumerate(lines) if line.strip() == "^ here")
    assert lines[at - 1].startswith(f"  {arrow} = [")


def test_the_arrow_points_at_the_stage() -> None:
    with pytest.raises(PlanError) as raised:
        ModelExecutePlan([range(0, 2), range(3, 4)], [range(4, 5), range(0, 4)]).validate("fused", 5)
    assert str(raised.value).splitlines()[1:] == [
        "  fwd_plan = [0..1, 3..3]",
        "                    ^ here",
        "  bwd_plan = [4..4, 0..3]",
    ]


def test_the_arrow_points_behind_the_last_stage_where_layers_are_missing() -> None:
    with pytest.raises(PlanError) as raised:
        ModelExecutePlan([range(0, 2)], [range(4, 5), range(0, 4)]).validate("fused", 5)
    assert str(raised.value).splitlines()[1:3] == ["  fwd_plan = [0..1]", "                  ^ here"]


def test_unknown_run_types_and_empty_models() -> None:
    with pytest.raises(ValueError, match="infer, train, fused, not 'both'"):
        ModelExecutePlan().validate("both", 3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="at least one layer"):
        ModelExecutePlan().validate("infer", 0)


# --- balanced plans -------------------------------------------------------------------------------------------------

COST = st.builds(
    LayerCost,
    forward_s=st.integers(1, 6),
    recompute_s=st.integers(1, 6),
    backward_s=st.integers(1, 9),
    parameter_bytes=st.integers(1, 5),
)


def compositions(start: int, stop: int) -> list[list[range]]:
    """Every way to cut layers start..stop-1 into consecutive stages."""
    if start == stop:
        return [[]]
    between = range(start + 1, stop)
    found = []
    for count in range(len(between) + 1):
        for marks in itertools.combinations(between, count):
            edges = [start, *marks, stop]
            found.append([range(a, b) for a, b in itertools.pairwise(edges)])
    return found


def all_plans(run_type: RunType, n: int) -> list[ModelExecutePlan]:
    if run_type == "infer":
        return [ModelExecutePlan(forward) for forward in compositions(0, n)]
    backwards = [cut[::-1] for cut in compositions(0, n)]
    if run_type == "train":
        return [ModelExecutePlan(f, b) for f in compositions(0, n) for b in backwards]
    return [ModelExecutePlan(f, b) for b in backwards for f in compositions(0, b[0].start)]


def stage_times(run_type: RunType, plan: ModelExecutePlan, costs: list[LayerCost]) -> list[float]:
    times = [sum(costs[i].forward_s for i in stage) for stage in plan.fwd_plan]
    for k, stage in enumerate(plan.bwd_plan):
        fused = run_type == "fused" and k == 0
        times.append(sum((c.forward_s if fused else c.recompute_s) + c.backward_s for c in (costs[i] for i in stage)))
    return times


def is_allowed(
    run_type: RunType, plans: list[ModelExecutePlan], costs: list[list[LayerCost]], threshold: float, half: float | None
) -> bool:
    longest = 0.0
    for layers in costs:
        for i, c in enumerate(layers):
            last = run_type == "fused" and i == len(layers) - 1
            backward = 0 if run_type == "infer" else c.backward_s + (c.forward_s if last else c.recompute_s)
            longest = max(longest, backward, 0 if last else c.forward_s)
    for plan, layers in zip(plans, costs, strict=True):
        if max(stage_times(run_type, plan, layers)) > threshold * longest:
            return False
        for stages, factor in ((plan.fwd_plan, 1), (plan.bwd_plan, 2)):
            for stage in stages:
                size = factor * sum(layers[i].parameter_bytes for i in stage)
                if half is not None and size > half and len(stage) > 1:
                    return False
    return True


def value(run_type: RunType, plans: list[ModelExecutePlan], costs: list[list[LayerCost]]) -> tuple[float, int, float]:
    times = [t for p, c in zip(plans, costs, strict=True) for t in stage_times(run_type, p, c)]
    return max(times) * len(times), len(times), sum(t * t for t in times)


def enough(run_type: RunType, plans: list[ModelExecutePlan], min_stages: int, most: list[int]) -> bool:
    forward, backward = sum(len(p.fwd_plan) for p in plans), sum(len(p.bwd_plan) for p in plans)
    counts = {"infer": [forward], "train": [forward, backward], "fused": [forward + backward]}[run_type]
    return all(count >= min(min_stages, m) for count, m in zip(counts, most, strict=True))


@settings(max_examples=150, deadline=None)
@given(
    run_type=st.sampled_from(["infer", "train", "fused"]),
    costs=st.lists(COST, min_size=1, max_size=6),
    min_stages=st.integers(1, 7),
    threshold=st.sampled_from([1.0, 1.1, 1.5, 3.0]),
    half=st.sampled_from([None, 2, 6, 12]),
)
def test_no_plan_beats_the_balanced_one(
    run_type: RunType, costs: list[LayerCost], min_stages: int, threshold: float, half: float | None
) -> None:
    plan = balanced_plan(run_type, costs, min_stages, threshold, None if half is None else 2 * half)
    plan.validate(run_type, len(costs))
    n = len(costs)
    most = {"infer": [n], "train": [n, n], "fused": [2 * n - 1]}[run_type]
    rivals = [
        p
        for p in all_plans(run_type, n)
        if is_allowed(run_type, [p], [costs], threshold, half) and enough(run_type, [p], min_stages, most)
    ]
    assert value(run_type, [plan], [costs]) == min(value(run_type, [p], [costs]) for p in rivals)
    assert is_allowed(run_type, [plan], [costs], threshold, half)
    assert enough(run_type, [plan], min_stages, most)


@settings(max_examples=60, deadline=None)
@given(
    run_type=st.sampled_from(["infer", "train", "fused"]),
    first=st.lists(COST, min_size=1, max_size=3),
    second=st.lists(COST, min_size=1, max_size=3),
    min_stages=st.integers(1, 8),
    threshold=st.sampled_from([1.0, 1.1, 2.0]),
)
def test_no_pair_of_plans_beats_the_joint_ones(
    run_type: RunType, first: list[LayerCost], second: list[LayerCost], min_stages: int, threshold: float
) -> None:
    costs = [first, second]
    found = list(balanced_plans(run_type, costs, min_stages, threshold))
    a, b = len(first), len(second)
    most = {"infer": [a + b], "train": [a + b, a + b], "fused": [2 * a + 2 * b - 2]}[run_type]
    rivals = [
        [p, q]
        for p in all_plans(run_type, a)
        for q in all_plans(run_type, b)
        if is_allowed(run_type, [p, q], costs, threshold, None) and enough(run_type, [p, q], min_stages, most)
    ]
    for plan, layers in zip(found, costs, strict=True):
        plan.validate(run_type, len(layers))
    assert value(run_type, found, costs) == min(value(run_type, pair, costs) for pair in rivals)


def test_two_layers_make_one_stage_or_three() -> None:
    """Two stages would leave the first layer out of one pass; once the count of two was taken to be possible."""
    plan = balanced_plan("fused", [LayerCost(1, 1, 1), LayerCost(6, 6, 9)], 2, 1.5)
    assert plan == ModelExecutePlan([range(0, 1)], [range(1, 2), range(0, 1)])


@pytest.mark.parametrize("run_type", ["infer", "train", "fused"])
@pytest.mark.parametrize("threshold", [1.1, 4.0])
def test_a_hundred_uneven_layers_take_well_under_a_second(run_type: RunType, threshold: float) -> None:
    draw = random.Random(7)
    costs = [LayerCost(draw.uniform(1, 2), draw.uniform(1, 2), draw.uniform(2, 4), 10) for _ in range(100)]
    begin = time.perf_counter()
    plan = balanced_plan(run_type, costs, 8, threshold)
    assert time.perf_counter() - begin < 1.0
    plan.validate(run_type, 100)


def test_parameter_bytes_stand_in_before_the_first_measurement() -> None:
    costs = [LayerCost(0, 0, 0, size) for size in (10, 10, 10, 30)]
    assert balanced_plan("infer", costs, 1).fwd_plan == [range(0, 3), range(3, 4)]
    plan = balanced_plan("fused", [LayerCost(0, 0, 0)] * 4, 3)
    plan.validate("fused", 4)


def test_a_layer_above_the_memory_limit_gets_its_own_stage_and_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    costs = [LayerCost(1, 1, 2, size) for size in (10, 100, 10)] + [LayerCost(9, 9, 9, 10)]
    with caplog.at_level(logging.WARNING, "roundpipe_async"):
        plan = balanced_plan("infer", costs, 1, 1.1, memory_limit_bytes=100)
    assert range(1, 2) in plan.fwd_plan
    assert "layer 1 needs 100 bytes" in caplog.text


@dataclass
class Model:
    costs: list[LayerCost]
    pool: Any = field(default_factory=lambda: SimpleNamespace(devices=(0, 1, 2)))

    def layer_costs(self) -> list[LayerCost]:
        return self.costs


def test_auto_plans_one_model_or_several() -> None:
    model = Model([LayerCost(1, 1, 2, 10)] * 6)
    one = ModelExecutePlan.auto("fused", model)
    assert one == balanced_plan("fused", model.costs, 3)
    both = ModelExecutePlan.auto("fused", model, Model([LayerCost(2, 2, 4, 10)] * 3), min_stages=5)
    assert isinstance(both, tuple) and len(both) == 2
    with pytest.raises(ValueError, match="at least one model"):
        ModelExecutePlan.auto("fused")


def test_auto_takes_sixty_percent_of_the_smallest_device() -> None:
    big = [LayerCost(1, 1, 2, 10**9)] * 6 + [LayerCost(50, 50, 50, 1)]
    pool = SimpleNamespace(devices=(0,), memory_bytes=10 * 10**9)  # half of 6 GB: 3 layers forward
    plan = ModelExecutePlan.auto("infer", Model(big, pool))
    assert max(len(stage) for stage in plan.fwd_plan) == 3
    assert plan == ModelExecutePlan.auto("infer", Model(big), min_stages=1, model_memory_limit=6)
    with pytest.raises(ValueError, match="limit is -1"):
        balanced_plan("infer", big, 1, memory_limit_bytes=-1)
    with pytest.raises(ValueError, match="upper_threshold is"):
        ModelExecutePlan.auto("infer", Model(big), upper_threshold=0.5)
