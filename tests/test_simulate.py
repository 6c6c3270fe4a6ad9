"""Virtual time: the rules one by one on small schedules, then the published figures of arXiv 2604.27085."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from roundpipe_async.scheduling.baselines import Baseline, baseline, even_stages, paper_round_robin
from roundpipe_async.scheduling.plan import LayerCost, ModelExecutePlan
from roundpipe_async.scheduling.schedule import Schedule, StageRun, round_robin
from roundpipe_async.scheduling.simulate import Links, TimedAction, simulate, simulate_steady
from tests.support.published import NUM_DEVICES, NUM_MICROBATCH, WORKLOADS, Workload

FREE = Links(math.inf)
EVERY = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))


def spans(actions: tuple[TimedAction, ...], kind: str) -> list[tuple[float, float]]:
    return [(action.start_s, action.end_s) for action in actions if action.kind == kind]


def test_one_device_does_one_thing_after_the_other() -> None:
    plan = ModelExecutePlan([range(0, 2)], [range(2, 3), range(0, 2)])
    costs = [LayerCost(1, 2, 3)] * 3
    line = simulate(round_robin(plan, "fused", 3, 2, 1), costs, FREE)
    # two layers forward twice; forward and backward of one layer twice; two layers recomputed and backward twice
    assert spans(line.actions, "forward") == [(0, 2), (2, 4)]
    assert spans(line.actions, "fused") == [(4, 8), (8, 12)]
    assert spans(line.actions, "recompute") == [(12, 16), (22, 26)]
    assert spans(line.actions, "backward") == [(16, 22), (26, 32)]
    assert line.makespan_s == line.compute_s == 32 and line.bubble == 0


def test_a_backward_stage_recomputes_while_it_waits_for_its_gradient() -> None:
    plan = ModelExecutePlan([range(0, 2)], [range(2, 3), range(1, 2), range(0, 1)])
    costs = [LayerCost(1, 1, 4), LayerCost(1, 1, 4), LayerCost(5, 0, 5)]
    line = simulate(round_robin(plan, "fused", 3, 1, 4), costs, Links(math.inf, hop_s=0.5))
    assert spans(line.of_device(2), "recompute") == [(2.5, 3.5)]  # when forward is done, and a hop
    assert spans(line.of_device(3), "recompute") == [(0.0, 1.0)]  # the first layer's input is there from the start
    assert spans(line.actions, "backward") == [(13.0, 17.0), (17.5, 21.5)]  # 0..2, hop, fused 2.5..12.5, hop


def test_hops_cost_time_between_devices_only_and_by_their_bytes() -> None:
    plan = ModelExecutePlan([range(0, 1), range(1, 2)])
    costs = [LayerCost(1, 0, 0, activation_bytes=30), LayerCost(1, 0, 0)]
    links = Links(math.inf, hop_s=0.25, activation_bytes_per_s=40)
    assert simulate(round_robin(plan, "infer", 2, 1, 2), costs, links).makespan_s == 1 + 0.25 + 0.75 + 1
    assert simulate(round_robin(plan, "infer", 2, 1, 1), costs, links).makespan_s == 2


def test_the_next_run_s_parameters_are_uploaded_while_this_one_computes_and_no_earlier() -> None:
    plan = ModelExecutePlan([range(i, i + 1) for i in range(4)])
    costs = [LayerCost(size, 0, 0, parameter_bytes=10) for size in (2, 5, 1, 1)]
    line = simulate(round_robin(plan, "infer", 4, 1, 1), costs, Links(upload_bytes_per_s=10 / 3))
    # two runs' parameters fit: the third's are not begun before the first run has left, at 5
    assert spans(line.actions, "upload") == [(0, 3), (3, 6), (6, 9), (11, 14)]
    assert spans(line.actions, "forward") == [(3, 5), (6, 11), (11, 12), (14, 15)]
    assert line.uploaded_bytes == 40


def test_a_stage_spread_over_devices_runs_at_once() -> None:
    runs = (StageRun("forward", range(0, 1), (0, 2), 0), StageRun("forward", range(0, 1), (3, 1), 1))
    line = simulate(Schedule(runs, 1, 4, 2), [LayerCost(1, 0, 0, parameter_bytes=5)], FREE)
    assert line.makespan_s == 2 and line.uploaded_bytes == 10
    assert [a.microbatch for a in line.of_device(1) if a.kind == "forward"] == [3, 1]


def test_the_inner_bubble_leaves_fill_and_drain_out() -> None:
    plan = ModelExecutePlan([range(0, 2)], [range(2, 3), range(1, 2), range(0, 1)])
    costs = [LayerCost(1, 1, 4), LayerCost(1, 1, 4), LayerCost(5, 0, 5)]
    line = simulate(round_robin(plan, "fused", 3, 1, 4), costs, FREE)
    # each device works without a pause, once the two recomputes that wait for their gradients are counted as late
    assert line.bubble > 0.7 and line.inner_bubble == pytest.approx(0)
    two = simulate(round_robin(plan, "fused", 3, 1, 2), costs, FREE)
    # device 0: 0..2, then recompute 2..3 and backward from 12 on; device 1: 2..12, recompute 12..13, 16..20
    assert two.makespan_s == 20 and two.inner_bubble == pytest.approx((9 + 3) / 40)


def test_costs_must_fit_the_schedule() -> None:
    schedule = round_robin(ModelExecutePlan([range(0, 2)]), "infer", 2, 1, 1)
    with pytest.raises(ValueError, match="1 layer costs for a schedule of 2 layers"):
        simulate(schedule, [LayerCost(1, 1, 1)])


def test_steady_state_of_one_device_has_no_bubble_and_waits_for_the_step_before_last() -> None:
    plan = ModelExecutePlan([range(0, 1)], [range(1, 2), range(0, 1)])
    schedule = round_robin(plan, "fused", 2, 3, 1)
    steady = simulate_steady(schedule, [LayerCost(1, 1, 1)] * 2, FREE)
    assert steady.bubble == pytest.approx(0) and steady.period_s == pytest.approx(15)
    slow = simulate_steady(schedule, [LayerCost(1, 1, 1)] * 2, FREE, step_s=40)
    assert slow.period_s == pytest.approx((15 + 40) / 2)  # two iterations for each wait: one step old


def test_steady_state_of_a_rotated_round_robin_overlaps_fill_and_drain() -> None:
    plan = ModelExecutePlan([range(0, 1)], [range(1, 2), range(0, 1)])
    costs = [LayerCost(2, 1, 1), LayerCost(1, 0, 1)]  # three stages of two seconds on two devices
    schedule = round_robin(plan, "fused", 2, 4, 2)
    assert simulate(schedule, costs, FREE).bubble > 0.2
    assert simulate_steady(schedule, costs, FREE, rotation=3).bubble == pytest.approx(0)
    assert simulate_steady(schedule, costs, FREE).bubble == pytest.approx(0.25)  # one device has two stages


def test_the_table_tells_each_device_s_part() -> None:
    plan = ModelExecutePlan([range(0, 1), range(1, 2)])
    text = str(simulate(round_robin(plan, "infer", 2, 1, 2), [LayerCost(1, 0, 0, 10**9)] * 2, Links(1e9)))
    assert text.splitlines()[0] == "3 s, bubble 66.67 %, 2 GB uploaded"
    assert len(text.splitlines()) == 4


# --- the published figures ------------------------------------------------------------------------------------------


@EVERY
def test_the_engine_s_rules_give_the_published_round_robin(workload: Workload) -> None:
    bubble = 100 * simulate(workload.paper_schedule(), workload.costs, workload.free_uploads).bubble
    exact = workload.name in ("qwen3-1.7b", "llama3-8b", "qwen3-235b-lora")
    assert bubble == pytest.approx(workload.bubbles["roundpipe"], abs=0.0001 if exact else 1.5)


@EVERY
def test_the_paper_s_definitions_give_its_round_robin_to_four_digits(workload: Workload) -> None:
    line = paper_round_robin(workload.paper_schedule(), workload.costs, workload.free_uploads)
    assert 100 * line.bubble == pytest.approx(workload.bubbles["roundpipe"], abs=0.0001)
    assert 100 * line.inner_bubble == pytest.approx(workload.bubbles["roundpipe_steady"], abs=0.0001)


@EVERY
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved_1f1b", "looped_bfs"])
def test_the_other_schedules_give_their_published_bubbles(workload: Workload, name: Baseline) -> None:
    stages = workload.device_stages if name in ("1f1b", "gpipe") else workload.interleaved_stages
    line = baseline(name, stages, workload.costs, NUM_MICROBATCH, NUM_DEVICES, workload.free_uploads)
    reconstructed = workload.name == "qwen3-235b-lora" and stages is workload.interleaved_stages
    assert 100 * line.bubble == pytest.approx(workload.bubbles[name], abs=0.011 if reconstructed else 0.0002)
    assert line.uploaded_bytes == 0


def test_baselines_refuse_what_they_cannot_run() -> None:
    costs = [LayerCost(1, 1, 1)] * 4
    with pytest.raises(ValueError, match="cannot run 4 stages on 2"):
        baseline("1f1b", [range(i, i + 1) for i in range(4)], costs, 4, 2)
    with pytest.raises(ValueError, match="multiple of 2 microbatches, not 3"):
        baseline("interleaved_1f1b", [range(i, i + 1) for i in range(4)], costs, 3, 2)
    with pytest.raises(ValueError, match="do not cover"):
        baseline("gpipe", [range(0, 2), range(3, 4)], costs, 4, 2)


def test_even_stages_have_the_least_longest_stage() -> None:
    costs = [LayerCost(t, 0, 0) for t in (4, 1, 1, 1, 3)]
    assert even_stages(costs, 3) == [range(0, 1), range(1, 4), range(4, 5)]
    assert even_stages(costs, 7)[-2:] == [range(5, 5)] * 2


def test_a_zero_bubble_is_never_claimed_for_less_work() -> None:
    """compute_s counts every action once: the sum over the costs, whatever the schedule."""
    workload = WORKLOADS["qwen3-1.7b"]
    line = simulate(workload.paper_schedule(), workload.costs, workload.links)
    per = [c.forward_s + c.recompute_s + c.backward_s for c in workload.costs]
    assert line.compute_s == pytest.approx(NUM_MICROBATCH * sum(per))
    faster = simulate(workload.paper_schedule(), workload.costs, replace(workload.links, hop_s=0.0))
    assert faster.makespan_s < line.makespan_s
