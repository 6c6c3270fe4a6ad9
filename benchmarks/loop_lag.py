"""How late a coroutine wakes while two CPU devices train at full throughput, and what its waking costs the training.

    python benchmarks/loop_lag.py                          # bf16, 6 rounds, about three minutes
    python benchmarks/loop_lag.py --rounds 2 --seconds 3

A coroutine asks to wake every 10 ms and notes how much later than that it ran. Variants take turns in every round, so a
machine that slows down slows all of them:

    idle          no training: what the loop and the operating system do by themselves
    unobserved    training, and no such coroutine: the throughput to compare with
    untouched     training and the coroutine, nothing set
    switch        with sys.setswitchinterval(0.0002): a thread that runs Python is asked 25 times as often to yield
    nice          the devices' and the optimizer's threads nicer by 10 than the others
    both          the two together
    uvloop        (with --uvloop) everything untouched, on uvloop instead of asyncio's loop

Besides iterations per second it prints CPU seconds of the process per iteration, which other work on the machine
disturbs less.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roundpipe_async import DevicePool, OptimizerCtx, RoundPipe, RoundPipeRunConfig, optim

PERIOD_S = 0.010
SWITCH_S = 0.0002
NICENESS = 10
VARIANTS = ("idle", "unobserved", "untouched", "switch", "nice", "both")


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@dataclass
class Trained:
    """A model in training, on a pool of its own."""

    model: RoundPipe
    optimizer: torch.optim.Optimizer
    data: Tensor

    async def iterate(self) -> None:
        await self.model.forward_backward(
            (self.data,), label=self.data, loss_fn=lambda out, target: (out - target).float().square().mean()
        )
        await self.model.step(lambda: (self.optimizer.step(), self.optimizer.zero_grad()))


@asynccontextmanager
async def trained(options: argparse.Namespace, niceness: int) -> AsyncIterator[Trained]:
    torch.manual_seed(0)
    before = set(threading.enumerate())
    blocks = nn.Sequential(*(Block(options.width) for _ in range(options.layers))).to(getattr(torch, options.dtype))
    async with (
        DevicePool.cpu(2, intra_op_threads=1) as pool,
        RoundPipe(
            blocks,
            optim_dtype=torch.float32,
            devices=pool,
            model_run_config=RoundPipeRunConfig(num_microbatch=8, loss_reduction="mean"),
        ) as model,
    ):
        with OptimizerCtx():
            optimizer = optim.AdamW(model.parameters(), lr=1e-4)
        data = torch.randn(16, options.length, options.width).to(getattr(torch, options.dtype))
        run = Trained(model, optimizer, data)
        for _ in range(3):
            await run.iterate()  # starts the threads
        await model.synchronize()
        for thread in set(threading.enumerate()) - before:
            works = thread.name.endswith(("/compute", "optimizer"))
            if niceness and works and thread.native_id is not None:
                usual = os.getpriority(os.PRIO_PROCESS, 0)
                os.setpriority(os.PRIO_PROCESS, thread.native_id, usual + niceness)  # on Linux, of this one thread
        yield run


@dataclass
class Result:
    lateness_ms: list[float] = field(default_factory=list)
    iterations_per_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


async def watch(lateness_ms: list[float]) -> None:
    while True:
        due_s = time.perf_counter() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        lateness_ms.append((time.perf_counter() - due_s) * 1e3)


async def measure(variant: str, run: Trained, seconds: float, result: Result) -> None:
    watcher = None if variant == "unobserved" else asyncio.create_task(watch(result.lateness_ms))
    interval_s = sys.getswitchinterval()
    if variant in ("switch", "both"):
        sys.setswitchinterval(SWITCH_S)
    try:
        if variant == "idle":
            await asyncio.sleep(seconds)
            return
        iterations, start_s, cpu_start_s = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() < start_s + seconds:
            await run.iterate()
            iterations += 1
        await run.model.synchronize()
        result.iterations_per_s.append(iterations / (time.perf_counter() - start_s))
        result.cpu_s.append((time.process_time() - cpu_start_s) / iterations)
    finally:
        sys.setswitchinterval(interval_s)
        if watcher is not None:
            watcher.cancel()


def report(variant: str, result: Result, base: Result) -> None:
    line = f"{variant:11}"
    if result.lateness_ms:
        cuts = statistics.quantiles(result.lateness_ms, n=100)
        line += f"  late by p50 {cuts[49]:5.2f}  p99 {cuts[98]:5.2f}  max {max(result.lateness_ms):6.2f} ms"
    else:
        line += " " * 43
    if result.iterations_per_s:
        kept = statistics.median(
            ours / theirs for ours, theirs in zip(result.iterations_per_s, base.iterations_per_s, strict=True)
        )
        line += f"  {statistics.median(result.iterations_per_s):5.2f} iterations/s ({kept:4.0%} of unobserved)"
        line += f"  {statistics.median(result.cpu_s):5.3f} CPU s/iteration"
    print(line, flush=True)


async def main(options: argparse.Namespace) -> None:
    results = {variant: Result() for variant in VARIANTS}
    async with trained(options, 0) as plain, trained(options, NICENESS) as niced:
        for _ in range(options.rounds):
            for variant, result in results.items():
                run = niced if variant in ("nice", "both") else plain
                await measure(variant, run, options.seconds, result)
    print(f"{type(asyncio.get_running_loop()).__module__.split('.')[0]}, {options.dtype}, {options.rounds} rounds of "
          f"{options.seconds:g} s a variant, {torch.__version__=}, {os.cpu_count()} cores, "
          f"load average {os.getloadavg()[0]:.1f}")  # fmt: skip
    for variant, result in results.items():
        report(variant, result, results["unobserved"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each variant in a round")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--uvloop", action="store_true", help="run on uvloop")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.uvloop:
        import uvloop

        uvloop.run(main(options))
    else:
        asyncio.run(main(options))
