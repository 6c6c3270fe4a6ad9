"""Layer times: averages without the warm-up, inference of what was not measured, and records from many threads."""

from __future__ import annotations

import threading

import pytest

from roundpipe_async.scheduling.plan import LayerCost
from roundpipe_async.scheduling.timing import LayerTimer


def test_warm_up_is_dropped_and_the_average_forgets() -> None:
    timer = LayerTimer(2, warm_up=1, weight=0.25)
    timer.record(0, "forward", 100.0)
    assert timer.seconds(0, "forward") is None
    for seconds in (1.0, 2.0, 3.0):
        timer.record(0, "forward", seconds)
    assert timer.seconds(0, "forward") == pytest.approx(2.0)  # plain mean at first
    for _ in range(100):
        timer.record(0, "forward", 8.0)
    assert timer.seconds(0, "forward") == pytest.approx(8.0)
    assert timer.seconds(1, "forward") is None and timer.seconds(0, "backward") is None
    timer.reset()
    assert timer.seconds(0, "forward") is None


def test_what_was_not_measured_is_inferred() -> None:
    timer = LayerTimer(4, warm_up=0)
    timer.record(0, "forward", 2.0)
    timer.record(0, "recompute", 3.0)
    timer.record(0, "backward", 5.0)
    timer.record(1, "backward", 8.0)
    timer.record(2, "forward", 1.0)
    assert timer.costs([100, 200, 50, 25], [1, 2, 3, 4]) == [
        LayerCost(2.0, 3.0, 5.0, 100, 1),
        LayerCost(4.0, 4.0, 8.0, 200, 2),
        LayerCost(1.0, 1.0, 2.0, 50, 3),
        LayerCost(0.5, 0.5, 1.0, 25, 4),  # 7 s of forward for 350 bytes
    ]
    assert not timer.measured
    for layer in range(4):
        timer.record(layer, "forward", 1.0)
        timer.record(layer, "backward", 1.0)
    assert timer.measured


def test_before_the_first_measurement_parameter_bytes_give_the_ratios() -> None:
    costs = LayerTimer(3).costs([100, 300, 0])
    assert costs[1].forward_s == pytest.approx(3 * costs[0].forward_s)
    assert costs[0].backward_s == pytest.approx(2 * costs[0].forward_s)
    assert costs[2].forward_s > 0


def test_the_table_names_every_layer() -> None:
    timer = LayerTimer(2)
    for _ in range(3):
        timer.record(1, "backward", 0.0125)
    lines = timer.table().splitlines()
    assert lines[1].split() == ["0", "-", "-", "-", "0/0/0"]
    assert lines[2].split() == ["1", "-", "-", "12.500", "0/0/2"]


def test_many_threads_lose_no_record() -> None:
    timer = LayerTimer(1, warm_up=0, weight=1e-9)  # a plain mean
    start = threading.Barrier(4)

    def work(value: float) -> None:
        start.wait()
        for _ in range(2000):
            timer.record(0, "forward", value)

    threads = [threading.Thread(target=work, args=(float(value),)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert timer.table().splitlines()[1].split()[-1] == "8000/0/0"
    assert timer.seconds(0, "forward") == pytest.approx(1.5)


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match="warm_up=-1"):
        LayerTimer(1, warm_up=-1)
    with pytest.raises(ValueError, match="1 parameter_bytes for 2 layers"):
        LayerTimer(2).costs([1])
    with pytest.raises(IndexError):
        LayerTimer(2).record(2, "forward", 1.0)
