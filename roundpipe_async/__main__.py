"""`python -m roundpipe_async`: how would my model run on N devices, and what does this machine have?"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata

from roundpipe_async.scheduling.baselines import Baseline, baseline, even_stages
from roundpipe_async.scheduling.gantt import gantt
from roundpipe_async.scheduling.plan import balanced_plan
from roundpipe_async.scheduling.schedule import Schedule, round_robin
from roundpipe_async.scheduling.search import search
from roundpipe_async.scheduling.simulate import Links, Timeline, simulate, simulate_steady
from roundpipe_async.scheduling.workloads import MEASURED, Workload, load_costs

BASELINES: tuple[Baseline, ...] = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; the exit status is 2 for wrong use, as argparse has it."""
    parser = argparse.ArgumentParser(prog="python -m roundpipe_async", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("simulate", help="compare schedules in virtual time")
    command.add_argument("--costs", required=True, metavar="FILE|MODEL",
                         help=f"a CSV file of layer costs, or one of {', '.join(MEASURED)}")  # fmt: skip
    command.add_argument("--devices", type=_positive, default=8)
    command.add_argument("--microbatches", type=_positive, default=16)
    command.add_argument("--upload-gbs", type=float, default=25.0, help="GB/s to each device (default: 25)")
    command.add_argument("--hop-ms", type=float, help="time of one activation hop (default: measured, else 0)")
    command.add_argument("--upload-budget", type=float, default=1.5, help="times the uploads of the round robin")
    command.add_argument("--effort", type=float, default=1.0, help="how long to search (default: 1)")
    command.add_argument("--plot", metavar="FILE", help="draw the searched schedule")
    command.add_argument("--print", action="store_true", help="print the searched schedule")
    commands.add_parser("info", help="devices, versions, memory")
    options = parser.parse_args(arguments)
    if options.command == "info":
        _info()
        return 0
    try:
        workload = _workload(options.costs)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    _simulate(workload, options)
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _workload(name: str) -> Workload:
    if name in MEASURED:
        return MEASURED[name]
    if not os.path.exists(name):
        raise ValueError(f"{name!r} is neither a file nor one of {', '.join(MEASURED)}")
    return load_costs(name)


def _simulate(workload: Workload, options: argparse.Namespace) -> None:
    devices, microbatches = options.devices, options.microbatches
    hop_s = workload.hop_s if options.hop_ms is None else options.hop_ms / 1e3
    links = Links(options.upload_gbs * 1e9, hop_s)
    print(f"{workload.name}: {len(workload.costs)} layers, {devices} devices, {microbatches} microbatches")
    print(f"{'schedule':22}{'seconds':>10}{'idle %':>10}{'GB uploaded':>13}{'next after':>12}{'idle %':>10}")
    for name in BASELINES:
        loops = max(len(workload.costs) // devices, 1)
        count = devices if name in ("gpipe", "1f1b") else loops * devices
        _baseline_row(name, workload, count, devices, microbatches, hop_s)
    plan = balanced_plan("fused", workload.costs, devices)
    robin = round_robin(plan, "fused", len(workload.costs), microbatches, devices, round_size=devices)
    _row("round robin, rounds", robin, workload, links, len(robin.runs))
    robin = round_robin(plan, "fused", len(workload.costs), microbatches, devices)
    _row("round robin", robin, workload, links, len(robin.runs))
    made = {
        objective: search(workload.costs, microbatches, devices, objective=objective, links=links,
                          upload_budget=options.upload_budget, effort=options.effort)
        for objective in ("isolated", "steady")
    }  # fmt: skip
    line = _row("searched, isolated", made["isolated"], workload, links)
    _row("searched, steady", made["steady"], workload, links)
    print("'next after': seconds to the next iteration when they follow each other, parameters one step old.")
    if options.print:
        print(made["isolated"])
    if options.plot:
        gantt(line, f"{workload.name}, searched", options.plot)
        print(f"drawn: {options.plot}")


def _baseline_row(
    name: Baseline, workload: Workload, num_stages: int, devices: int, microbatches: int, hop_s: float
) -> None:
    stages = even_stages(workload.costs, num_stages)
    try:
        line = baseline(name, stages, workload.costs, microbatches, devices, Links(math.inf, hop_s))
    except ValueError as error:
        print(f"{name:22}{'-':>10}  {error}")
        return
    print(f"{name:22}{line.makespan_s:10.4g}{100 * line.bubble:10.2f}{'-':>13}{'-':>12}{'-':>10}")


def _row(name: str, schedule: Schedule, workload: Workload, links: Links, rotation: int = 0) -> Timeline:
    line = simulate(schedule, workload.costs, links)
    steady = simulate_steady(schedule, workload.costs, links, rotation=rotation)
    print(f"{name:22}{line.makespan_s:10.4g}{100 * line.bubble:10.2f}{line.uploaded_bytes / 1e9:13.4g}"
          f"{steady.period_s:12.4g}{abs(round(100 * steady.bubble, 2)):10.2f}")  # fmt: skip
    return line


def _info() -> None:
    from roundpipe_async.devices.pool import DevicePool

    print(f"python {platform.python_version()} on {platform.platform()}")
    for package in ("roundpipe_async", "torch", "anyio", "uvloop", "matplotlib", "transformers"):
        print(f"{package} {_or_none(partial(metadata.version, package), 'not installed')}")
    print(f"{os.cpu_count()} processors, {_or_none(_host_memory, '?')} GB of memory")
    pool = DevicePool.default()
    try:
        for device in pool.devices:
            print(f"device {device.index}: {device.name} ({device.torch_device})")
    finally:
        pool.close()


def _host_memory() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.1f}"


def _or_none(read: Callable[[], str], otherwise: str) -> str:
    try:
        return read()
    except (metadata.PackageNotFoundError, AttributeError, OSError, ValueError):
        return otherwise


if __name__ == "__main__":
    sys.exit(main())
