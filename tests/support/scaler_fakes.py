"""What the engine promises a scaler, in one page: windows, calls, and steps that run in order in another thread."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any

import torch

from roundpipe_async.scaling.grad_scaler import GradScaler
from roundpipe_async.steps import StepHandle, StepScope, Window, current_step, current_window, register


class FakeModel:
    """One optimizer stream: steps run first in, first out; `hold()` keeps the steps after it from beginning."""

    def __init__(self) -> None:
        self.window = Window()
        self._numbers = itertools.count(1)
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fake optimizer", daemon=True)
        self._thread.start()
        self._gates: list[threading.Event] = []

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work

    def call(self, work: Callable[[], Any], window: Window | None = None) -> Any:
        """Run the work of a call (loss, backward) here, as the engine does in a device's thread."""
        window = window or self.admit()
        context = copy_context()
        context.run(current_window.set, window)
        return context.run(work)

    def admit(self) -> Window:
        """A call is made: its gradients go to the current window."""
        self.window.open()
        return self.window

    def step(self, step_fn: Callable[[], Any]) -> StepHandle:
        """Schedule a step on the current window; later calls go to the next window."""
        handle = StepHandle(next(self._numbers), self.window)
        self.window = Window()
        register(handle)
        context = copy_context()
        context.run(current_step.set, StepScope(handle))

        def run() -> None:
            try:
                result = context.run(step_fn)
            except BaseException as error:
                handle.event.fail(error)
            else:
                handle.event.set(result)

        self._work.put(run)
        return handle

    def hold(self) -> threading.Event:
        """Keep what is scheduled from now on waiting until the event given is set."""
        gate = threading.Event()
        self._gates.append(gate)
        self._work.put(lambda: gate.wait(60) and None)
        return gate

    def close(self) -> None:
        for gate in self._gates:
            gate.set()
        self._work.put(None)
        self._thread.join(60)
        assert not self._thread.is_alive()


def weights(*values: float, momentum: float = 0.0) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    """A parameter and an SGD with lr=1 over it."""
    parameter = torch.nn.Parameter(torch.tensor(values))
    return parameter, torch.optim.SGD([parameter], lr=1.0, momentum=momentum)


def backward(scaler: GradScaler | torch.amp.GradScaler, parameter: torch.Tensor, slope: float) -> None:
    """The backward of a loss whose unscaled gradient is `slope` everywhere."""
    scaler.scale((parameter * slope).sum()).backward()


INF = float("inf")
NAN = float("nan")
