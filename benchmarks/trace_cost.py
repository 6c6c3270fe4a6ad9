"""What recording costs, as a ratio: the same calls with and without an open trace, in turns, in one run.

    python benchmarks/trace_cost.py

Two settings: layers that do nothing, where an engine has nothing but its own work to hide a cost behind (the worst
case), and layers that compute. For each pair of batches of calls, one traced and one not in changing order, the ratio
of their times is taken; printed is the median of the ratios with its quartiles, once for the wall's clock and once for
the process's CPU time, which other processes disturb less. A trace that is entered and left around each traced batch
is part of the cost. First the cost of the hooks alone: what each action pays with no trace open, and with one.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from roundpipe_async import DevicePool, RoundPipe, RoundPipeRunConfig, trace
from roundpipe_async.tracing.trace import Action, begin, copied_bytes, record


def hook_ns(traced: bool, calls: int = 1000, rounds: int = 200) -> float:
    """The least mean time of what a stream does around an action."""
    action = Action("forward", range(4), 0)
    means = []
    for _ in range(rounds):
        with trace() if traced else nullcontext():
            start_ns = time.perf_counter_ns()
            for _ in range(calls):
                start_s = begin()
                if start_s:
                    record(action, "cpu:0", "cpu:0/compute", start_s, time.perf_counter(), copied_bytes())
            means.append((time.perf_counter_ns() - start_ns) / calls)
    return min(means)


async def timed(call: Callable[[], Awaitable[object]], calls: int, traced: bool) -> tuple[float, float, int]:
    """Wall seconds and CPU seconds of a batch of calls, and how many actions were recorded."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    with trace() if traced else nullcontext() as t:
        for _ in range(calls):
            await call()
    spent = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return *spent, 0 if t is None else len(t.records)


async def compare(name: str, width: int, layers: int, rows: int, calls: int, pairs: int) -> None:
    """Print the ratios for layers of one width; width 0: layers that do nothing."""
    parts: list[nn.Module] = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)] if width else [
        nn.Linear(1, 1), *(nn.Identity() for _ in range(layers - 1))]  # fmt: skip
    batch = torch.zeros(rows, width or 1)
    config = RoundPipeRunConfig(num_microbatch=4)
    async with DevicePool.cpu(2, 1) as pool, RoundPipe(nn.Sequential(*parts), devices=pool) as model:

        def loss(out: Tensor, _: object) -> Tensor:
            return out.sum()

        async def call() -> None:
            await model.forward_backward((batch,), loss_fn=loss, run_config=config)

        await timed(call, calls, True)
        await timed(call, calls, False)
        ratios: list[tuple[float, float]] = []
        off_s: list[float] = []
        for pair in range(pairs):
            spent = {}
            for traced in (True, False) if pair % 2 else (False, True):
                spent[traced] = await timed(call, calls, traced)
            ratios.append((spent[True][0] / spent[False][0], spent[True][1] / spent[False][1]))
            off_s.append(spent[False][0])
        per_call = spent[True][2] / calls
        actions = f"{per_call:.0f} actions in {1e3 * statistics.median(off_s) / calls:.2f} ms a call"
        print(f"{name}: {actions}, {pairs} pairs of {calls} calls")
        for clock, of_clock in zip(("wall", "CPU"), zip(*ratios, strict=True), strict=True):
            low, middle, high = statistics.quantiles(of_clock, n=4)
            print(f"  {clock:4} time with / without a trace: {middle:.4f}  (quartiles {low:.4f} to {high:.4f})")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--calls", type=int, default=3, help="calls in a batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    off_ns, on_ns = hook_ns(False), hook_ns(True)
    print(f"hooks around an action: {off_ns:.0f} ns with no trace open, {on_ns:.0f} ns with one")
    await compare("layers that do nothing", 0, 8, 4, options.calls, options.pairs)
    await compare("layers that compute", 256, 8, 512, 1, options.pairs)


if __name__ == "__main__":
    asyncio.run(main())
