"""What the scaler costs an iteration: scale, step and update beside `torch.amp.GradScaler`, in one run.

    python benchmarks/scaler_cost.py

The loss and the optimizer do next to nothing, so what is timed is the scaler: in a plain loop, and as the engine runs
it (loss in a call's window, step in a step function). Turns are taken, medians of 15 rounds of 1000 iterations.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any

import torch

from roundpipe_async.scaling.grad_scaler import GradScaler
from roundpipe_async.steps import StepHandle, StepScope, Window, current_step, current_window, register

ITERATIONS, ROUNDS = 1000, 15


class Idle(torch.optim.Optimizer):
    """An optimizer that does nothing."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


def problem() -> tuple[torch.Tensor, Idle]:
    """A loss that requires grad, and an optimizer over a dozen parameters with gradients."""
    parameters = [torch.nn.Parameter(torch.ones(64)) for _ in range(12)]
    for parameter in parameters:
        parameter.grad = torch.zeros(64)
    return parameters[0].sum(), Idle(parameters)


async def torchs() -> None:
    loss, optimizer = problem()
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(ITERATIONS):
        scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()


async def plain(is_async: bool = False) -> None:
    loss, optimizer = problem()
    scaler = GradScaler()
    for _ in range(ITERATIONS):
        scaler.scale(loss)
        scaler.step(optimizer)
        await scaler.update(is_async=is_async)


async def plain_async() -> None:
    await plain(is_async=True)


async def engine() -> None:
    loss, optimizer = problem()
    scaler = GradScaler()
    for number in range(ITERATIONS):
        window = Window()
        window.open()
        call, step = copy_context(), copy_context()
        call.run(current_window.set, window)
        call.run(scaler.scale, loss)
        handle = StepHandle(number, window)
        register(handle)
        step.run(current_step.set, StepScope(handle))
        handle.event.set(step.run(scaler.step, optimizer))
        await scaler.update(is_async=False)


async def protocol() -> None:
    """The share of `engine` that is not the scaler's."""
    for number in range(ITERATIONS):
        window = Window()
        window.open()
        call, step = copy_context(), copy_context()
        call.run(current_window.set, window)
        handle = StepHandle(number, window)
        register(handle)
        step.run(current_step.set, StepScope(handle))
        handle.event.set(None)


async def main() -> None:
    runs: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "torch.amp.GradScaler": torchs, "plain loop, sync": plain, "plain loop, async": plain_async,
        "in a step, sync": engine, "(windows, handles alone)": protocol,
    }  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            begun = time.perf_counter()
            await run()
            taken[name].append((time.perf_counter() - begun) / ITERATIONS * 1e6)
    median = {name: statistics.median(times) for name, times in taken.items()}
    for name, microseconds in median.items():
        print(f"{name:26} {microseconds:6.1f} us an iteration")
    theirs, alone = median["torch.amp.GradScaler"], median["(windows, handles alone)"]
    print(f"ratio to torch's, plain loop:  {median['plain loop, sync'] / theirs:.2f} (target: at most 2)")
    print(f"ratio to torch's, in a step:   {(median['in a step, sync'] - alone) / theirs:.2f} (target: at most 2)")


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main())
