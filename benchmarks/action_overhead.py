"""What the engine itself costs: calls whose layers do nothing (`scaler_cost.py` does the same for the scaler).

    python benchmarks/action_overhead.py

An action is one microbatch's pass through one stage: forward, fused, recompute or backward. Its cost is the time of
the whole call, split and merge included, divided by the number of its actions, less what the same passes take in a
plain Python loop.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
import time
from collections.abc import Awaitable, Callable

import torch
from torch import Tensor, nn

import roundpipe_async
from roundpipe_async import DevicePool, ModelExecutePlan, RoundPipe, RoundPipeRunConfig

ROUNDS = 5


class Weight(nn.Module):
    """The one layer with a parameter, so that there is something to walk backward to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def make_model(layers: int) -> nn.Sequential:
    return nn.Sequential(Weight(), *(nn.Identity() for _ in range(layers - 1)))


async def median_us(call: Callable[[], Awaitable[object]], calls: int) -> float:
    """The median over ROUNDS of the mean time of a call, after a warm-up."""
    means = []
    for _ in range(ROUNDS + 1):
        start_s = time.perf_counter()
        for _ in range(calls):
            await call()
        means.append((time.perf_counter() - start_s) / calls * 1e6)
    return statistics.median(means[1:])


def plain_infer(model: nn.Sequential, parts: list[Tensor]) -> None:
    with torch.no_grad():
        for x in parts:
            model(x)


def plain_train(model: nn.Sequential, parts: list[Tensor]) -> None:
    """With every layer but the last run twice, as recompute does."""
    for x in parts:
        with torch.no_grad():
            model[:-1](x)
        model(x).sum().backward()


async def yardstick(calls: int) -> None:
    """What asyncio itself takes for nothing on this machine: read the other figures by it."""
    loop = asyncio.get_running_loop()

    async def hop() -> None:
        await loop.run_in_executor(None, int)

    print(f"asyncio's run_in_executor of nothing: {await median_us(hop, 50 * calls):.1f} us")


async def engine(devices: int, layers: int, microbatches: int, calls: int) -> None:
    stages = [range(index, index + 1) for index in range(layers)]
    config = RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=ModelExecutePlan(stages, stages[::-1]))
    trained = RoundPipeRunConfig(
        num_microbatch=microbatches, execute_plan=ModelExecutePlan(stages[:-1], stages[::-1])
    )  # fmt: skip
    batch = torch.zeros(microbatches, 1)
    parts = list(batch.split(1))
    plain = make_model(layers)
    pool = DevicePool.cpu(devices, intra_op_threads=1)
    async with pool, RoundPipe(make_model(layers), devices=pool) as model:

        async def infer() -> None:
            with roundpipe_async.no_grad():
                await model(batch, roundpipe_run_config=config)

        async def train() -> None:
            await model.forward_backward((batch,), loss_fn=lambda x, _: x.sum(), run_config=trained)

        async def plainly(run: Callable[[nn.Sequential, list[Tensor]], None]) -> None:
            run(plain, parts)

        for name, ours, theirs, actions in (
            ("infer", infer, plain_infer, layers * microbatches),
            ("train", train, plain_train, (3 * layers - 2) * microbatches),
        ):
            spent_us = await median_us(ours, calls)
            plain_us = await median_us(functools.partial(plainly, theirs), calls)
            print(
                f"{devices} device(s), {name}: {layers} stages x {microbatches} microbatches, {actions} actions, "
                f"{spent_us / 1e3:.2f} ms a call, {max(0.0, spent_us - plain_us) / actions:.1f} us an action"
            )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--calls", type=int, default=30, help="calls in a round; medians of 5 rounds are printed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    await yardstick(options.calls)
    for devices in (1, 2):
        await engine(devices, options.layers, options.microbatches, options.calls)


if __name__ == "__main__":
    asyncio.run(main())
