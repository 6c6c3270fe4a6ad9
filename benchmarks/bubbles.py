"""Idle device time of our schedules beside the published ones: five workloads, 8 devices, 16 microbatches.

    python benchmarks/bubbles.py [MODEL ...]

Everything is virtual time from the measured layer costs in tests/data. Uploads of parameters go at 25 GB/s to each
device in our columns; the published simulator leaves them out. "uploads" is relative to the published round robin.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from roundpipe_async.scheduling.baselines import Baseline, baseline, paper_round_robin
from roundpipe_async.scheduling.schedule import Schedule
from roundpipe_async.scheduling.search import Objective, search
from roundpipe_async.scheduling.simulate import Timeline, simulate, simulate_steady

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.published import NUM_DEVICES, NUM_MICROBATCH, WORKLOADS, Workload

OTHERS: tuple[Baseline, ...] = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs")


def searched(workload: Workload, objective: Objective) -> tuple[Schedule, float]:
    begin = time.process_time()
    schedule = search(workload.costs, NUM_MICROBATCH, NUM_DEVICES, objective=objective, links=workload.links)
    return schedule, time.process_time() - begin


def percent(x: float) -> str:
    return f"{abs(round(100 * x, 2)):.2f}"


def published_table(workloads: list[Workload]) -> None:
    print("Published schedules, % idle in one isolated iteration: computed here / published")
    print(f"{'':16}" + "".join(f"{name:>20}" for name in (*OTHERS, "round robin", "its steady state")))
    for workload in workloads:
        cells = []
        for name in OTHERS:
            stages = workload.device_stages if name in ("1f1b", "gpipe") else workload.interleaved_stages
            line = baseline(name, stages, workload.costs, NUM_MICROBATCH, NUM_DEVICES, workload.free_uploads)
            cells.append(f"{percent(line.bubble)} / {workload.bubbles[name]:.2f}")
        paper = paper_round_robin(workload.paper_schedule(), workload.costs, workload.free_uploads)
        cells.append(f"{percent(paper.bubble)} / {workload.bubbles['roundpipe']:.2f}")
        cells.append(f"{percent(paper.inner_bubble)} / {workload.bubbles['roundpipe_steady']:.2f}")
        print(f"{workload.name:16}" + "".join(f"{cell:>20}" for cell in cells))


def our_table(workloads: list[Workload]) -> None:
    print("\nOurs, with uploads at 25 GB/s a device")
    head = ("round robin", "searched", "seconds", "uploads", "speed-up", "planned in")
    print(f"{'isolated':16}" + "".join(f"{name:>13}" for name in head))
    for workload in workloads:
        robin = simulate(workload.paper_schedule(), workload.costs, workload.links)
        schedule, planned_s = searched(workload, "isolated")
        line = simulate(schedule, workload.costs, workload.links)
        _row(workload.name, percent(robin.bubble), percent(line.bubble), robin, line, line.makespan_s, planned_s,
             robin.makespan_s)  # fmt: skip
    print(f"\n{'steady state':16}" + "".join(f"{name:>13}" for name in head))
    for workload in workloads:
        paper = workload.paper_schedule()
        robin = simulate(paper, workload.costs, workload.links)
        repeated = simulate_steady(paper, workload.costs, workload.links, rotation=len(paper.runs))
        schedule, planned_s = searched(workload, "steady")
        steady = simulate_steady(schedule, workload.costs, workload.links)
        line = simulate(schedule, workload.costs, workload.links)
        _row(workload.name, percent(repeated.bubble), percent(steady.bubble), robin, line, steady.period_s, planned_s,
             repeated.period_s)  # fmt: skip


def _row(
    name: str, before: str, after: str, robin: Timeline, line: Timeline, seconds: float, planned_s: float, was: float
) -> None:
    cells = (before, after, f"{seconds:.3f}", f"{line.uploaded_bytes / robin.uploaded_bytes:.2f}",
             f"{was / seconds:.3f}", f"{planned_s:.2f} s")  # fmt: skip
    print(f"{name:16}" + "".join(f"{cell:>13}" for cell in cells))


def main() -> None:
    names = sys.argv[1:] or list(WORKLOADS)
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        sys.exit(f"no such workload: {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    workloads = [WORKLOADS[name] for name in names]
    published_table(workloads)
    our_table(workloads)


if __name__ == "__main__":
    main()
