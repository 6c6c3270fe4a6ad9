"""Schedules: round robin, what validation finds, and a printed form that loses nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_async.errors import PlanError, ScheduleError
from roundpipe_async.scheduling.plan import ModelExecutePlan
from roundpipe_async.scheduling.schedule import Schedule, StageRun, round_robin

PLAN = ModelExecutePlan([range(0, 2), range(2, 3)], [range(3, 4), range(1, 3), range(0, 1)])
TRAIN = ModelExecutePlan([range(0, 4)], [range(2, 4), range(0, 2)])
TEXT = """\
schedule: 4 layers, 3 microbatches, 2 devices
stage 0: forward 0..1
stage 1: forward 2..2
stage 2: fused 3..3
stage 3: backward 1..2
stage 4: backward 0..0
device 0: [0] 0F0 0F1 0F2 [2] 2FB0 2FB1 2FB2 [4] 4B0 4B1 4B2
device 1: [1] 1F0 1F1 1F2 [3] 3B0 3B1 3B2"""


def test_round_robin_prints_as_its_runs_execute() -> None:
    schedule = round_robin(PLAN, "fused", 4, 3, 2)
    schedule.validate()
    assert str(schedule) == TEXT
    assert schedule.of_device(1) == (schedule.runs[1], schedule.runs[3])
    assert schedule.kept_inputs(0) == {0, 1}


def test_round_robin_starts_at_any_device_and_in_rounds() -> None:
    schedule = round_robin(PLAN, "fused", 4, 5, 3, first_device=2, round_size=2)
    schedule.validate()
    assert [run.device for run in schedule.runs] == [(2 + i) % 3 for i in range(15)]
    assert [run.microbatches for run in schedule.runs[::5]] == [(0, 1), (2, 3), (4,)]


def test_forward_with_a_graph_makes_two_schedules() -> None:
    forward = round_robin(TRAIN, "train_forward", 4, 2, 2)
    backward = round_robin(TRAIN, "train_backward", 4, 2, 2, first_device=1)
    forward.validate()
    backward.validate()
    assert [run.phase for run in forward.runs] == ["forward"]
    assert [(run.phase, run.device) for run in backward.runs] == [("backward", 1), ("backward", 0)]
    round_robin(ModelExecutePlan([range(0, 4)]), "infer", 4, 2, 2).validate()


def test_round_robin_refuses_wrong_use() -> None:
    with pytest.raises(PlanError, match="here"):
        round_robin(TRAIN, "fused", 4, 2, 2)
    with pytest.raises(ValueError, match="num_devices is 0"):
        round_robin(PLAN, "fused", 4, 2, 0)
    with pytest.raises(ValueError, match="round_size is 0"):
        round_robin(PLAN, "fused", 4, 2, 1, round_size=0)
    with pytest.raises(ValueError, match="not 'train'"):
        round_robin(PLAN, "train", 4, 2, 2)  # type: ignore[arg-type]


def test_a_stage_spread_over_devices_is_valid() -> None:
    schedule = round_robin(PLAN, "fused", 4, 3, 2)
    first, *rest = schedule.runs
    spread = (replace(first, microbatches=(2, 0)), replace(first, microbatches=(1,), device=1))
    replace(schedule, runs=(*spread, *rest)).validate()


BASE = round_robin(PLAN, "fused", 4, 3, 2).runs


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ((), "without runs"),
        (BASE[1:], "has not run layer 0 forward in any earlier run"),
        ((BASE[1], BASE[0], *BASE[2:]), "has not run layer 0 forward"),
        ((BASE[0], BASE[0], *BASE[1:]), "ran layer 0 forward before"),
        (BASE[:-1], "microbatch 0 never runs layer 0 backward"),
        ((*BASE, BASE[-1]), "ran layer 0 backward before"),
        ((*BASE[:3], BASE[4]), "has not run layer 2 backward"),
        ((*BASE[:2], *BASE[3:]), "nothing computes the loss"),
        ((*BASE[:2], BASE[3], BASE[2], BASE[4]), "has not run layer 3 backward"),
        ((*BASE[:2], replace(BASE[2], phase="backward"), *BASE[3:]), "nothing computes the loss"),
        ((replace(BASE[0], device=2), *BASE[1:]), "device 2 does not exist, there are 2"),
        ((replace(BASE[0], microbatches=(0, 1, 3)), *BASE[1:]), "microbatch 3 does not exist, there are 3"),
        ((replace(BASE[0], microbatches=(0, 1, 1)), *BASE[1:]), "ran layer 0 forward before"),
        ((replace(BASE[0], microbatches=()), *BASE[1:]), "no microbatches"),
        ((replace(BASE[0], layers=range(0, 5)), *BASE[1:]), "layers 0 to 3"),
        ((replace(BASE[0], layers=range(0, 2, 2)), *BASE[1:]), "not consecutive"),
        ((replace(BASE[0], layers=range(1, 1)), *BASE[1:]), "not consecutive"),
        ((replace(BASE[0], phase="sideways"), *BASE[1:]), "none of forward"),  # type: ignore[arg-type]
        ((*BASE[:1], replace(BASE[1], microbatches=(0, 1)), *BASE[2:]), "has not run layer 2 forward"),
        ((StageRun("fused", range(0, 3), (0, 1, 2), 0),), "fused stage must hold the last layer"),
        ((StageRun("forward", range(0, 3), (0, 1, 2), 0),), "never runs layer 3 forward"),
        ((StageRun("backward", range(1, 4), (0, 1, 2), 0),), "never runs layer 0 backward"),
    ],
)
def test_faults_are_found(runs: tuple[StageRun, ...], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        Schedule(runs, 4, 3, 2).validate()


def test_a_microbatch_without_a_loss_is_found() -> None:
    """Its backward would wait for ever: other microbatches have a fused run, this one has backward runs only."""
    runs = (
        StageRun("forward", range(0, 2), (0, 1), 0),
        StageRun("fused", range(2, 4), (0,), 0),
        StageRun("backward", range(2, 4), (1,), 0),
        StageRun("backward", range(0, 2), (0, 1), 0),
    )
    with pytest.raises(ScheduleError, match="microbatch 1 has no loss"):
        Schedule(runs, 4, 2, 1).validate()


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ScheduleError, match="num_devices is 0"):
        Schedule(BASE, 4, 3, 0).validate()


@st.composite
def plans(draw: st.DrawFn) -> tuple[ModelExecutePlan, int]:
    n = draw(st.integers(1, 9))

    def cut(stop: int) -> list[range]:
        edges = sorted({0, stop, *draw(st.lists(st.integers(0, stop), max_size=4))})
        return [range(a, b) for a, b in pairwise(edges)]

    backward = cut(n)[::-1]
    return ModelExecutePlan(cut(backward[0].start), backward), n


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Round robin, then runs split in two, spread over devices, with microbatches in any order."""
    plan, n = draw(plans())
    count, devices = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    schedule = round_robin(plan, "fused", n, count, devices, round_size=draw(st.none() | st.integers(1, 5)))
    runs = []
    for run in schedule.runs:
        order = draw(st.permutations(run.microbatches))
        at = draw(st.integers(0, len(order)))
        for part in (order[:at], order[at:]):
            if part:
                runs.append(replace(run, microbatches=tuple(part), device=draw(st.integers(0, devices - 1))))
    return replace(schedule, runs=tuple(runs))


@given(schedules())
def test_parse_reads_back_what_str_prints(schedule: Schedule) -> None:
    schedule.validate()
    text = str(schedule)
    assert Schedule.parse(text) == schedule
    assert str(Schedule.parse(text)) == text


@given(schedules(), st.data())
def test_a_schedule_with_a_microbatch_taken_out_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(schedule.runs) - 1))
    run = schedule.runs[i]
    left = run.microbatches[1:]
    runs = [*schedule.runs[:i], *([replace(run, microbatches=left)] if left else []), *schedule.runs[i + 1 :]]
    with pytest.raises(ScheduleError):
        replace(schedule, runs=tuple(runs)).validate()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("schedule: 4", "schedule: four", "line 1"),
        ("stage 1: forward", "stage 1: foward", "line 3: phase 'foward'"),
        ("[3]", "[5]", "gaps"),
        ("[3]", "[2]", r"run \[2\] was there before"),
        ("3B0", "3F0", "line 8: '3F0' does not name a stage"),
        ("3B0", "9B0", "line 8: '9B0' does not name a stage"),
        ("3B0", "3X0", "line 8: '3X0' is not an action"),
        ("[3] 3B0", "3B0 [3]", r"a run has one stage"),
        ("device 1: [1]", "device 1:", "starts with a run number"),
        ("device 1: [1]", "devise 1: [1]", "line 8"),
    ],
)
def test_parse_names_the_line_it_cannot_read(old: str, new: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        Schedule.parse(TEXT.replace(old, new))


def test_parse_of_nothing() -> None:
    with pytest.raises(ScheduleError, match="empty"):
        Schedule.parse("\n \n")
