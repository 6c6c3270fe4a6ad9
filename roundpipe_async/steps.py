"""What a gradient scaler must know of calls and steps, without knowing the engine.

The gradients that one optimizer step works on are a *window*: everything committed since the step before. A loss is
scaled inside a call, its gradients are unscaled inside the step that closes the window, much later and in another
thread; the window carries what both must agree on. The engine enters `current_window` around the work of a call and
`current_step` around a step function; the scaler reads them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator, Hashable
from contextvars import ContextVar
from typing import Any, TypeVar, cast
from weakref import WeakSet

from roundpipe_async.errors import StepError
from roundpipe_async.events import Event

V = TypeVar("V")

_ticks = itertools.count(1)


def tick() -> int:
    """The next moment of the process's program order: larger than every tick before."""
    return next(_ticks)


class Window:
    """The gradients of one step: what was fixed for them at first use, and when. Thread-safe.

    `opened_at` is the tick of the admission of the window's first call (None before): values pinned by that call's
    work are those published at that moment, whatever was published since.
    """

    def __init__(self) -> None:
        self.opened_at: int | None = None
        self._pins: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def open(self) -> None:
        """Note the admission of a call; the first one counts."""
        if self.opened_at is None:
            self.opened_at = tick()

    def pin(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value pinned for `key`; `make()` decides it at the first use."""
        with self._lock:
            if key not in self._pins:
                self._pins[key] = make()
            return cast(V, self._pins[key])

    def get(self, key: Hashable) -> Any | None:
        """The value pinned for `key`, or None."""
        with self._lock:
            return self._pins.get(key)


class StepHandle:
    """A scheduled optimizer step. Awaiting it gives the step function's result or raises its exception.

    The step happens whether or not anybody awaits or keeps the handle. An exception that nobody awaited is raised by
    the next `step`, `synchronize`, `update` or `aclose`, once.
    """

    def __init__(self, number: int, window: Window) -> None:
        self.number = number
        """How many steps of the same model were scheduled up to and including this one."""
        self.window = window
        self.scheduled_at = tick()
        self.event: Event[Any] = Event()
        self.waited = False
        """Whether somebody is to raise this step's error, and nobody else may."""
        self._delivered = False
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether the step function has returned or raised."""
        return self.event.done()

    @property
    def delivered(self) -> bool:
        """Whether the step failed and its exception was raised to somebody."""
        return self._delivered

    def reserve(self) -> Callable[[], None]:
        """Keep the error for the caller, who will ask for `result`, or else calls what this gives."""
        self.waited = True

        def lose() -> None:
            self.waited = False

        return lose

    @property
    def unseen(self) -> bool:
        """Whether the step failed, and nobody was told yet nor waits to be."""
        return not self._delivered and not self.waited and self.event.error is not None

    def claim_error(self) -> BaseException | None:
        """The exception of a failed step, for the first who asks; None afterwards, or where there is none."""
        with self._lock:
            if self._delivered or not self.event.done() or self.event.error is None:
                return None
            self._delivered = True
            return self.event.error

    def result(self) -> Any:
        """What the step function of a finished step returned or raised; raised to the first who asks."""
        if self.event.error is None:
            return self.event.value
        error = self.claim_error()
        if error is None:
            raise StepError(
                f"step {self.number} failed, and its error was raised already, here or at a later call: "
                f"{self.event.error!r}"
            ) from self.event.error
        raise error

    def __await__(self) -> Generator[Any, None, Any]:
        # Waits for the end alone, so that a waiter that is cancelled at that moment does not take the error along.
        yield from self.event.settled().__await__()
        return self.result()


class StepScope:
    """What runs now in the optimizer's thread: the step and the window of gradients that it works on."""

    __slots__ = ("handle", "thread")

    def __init__(self, handle: StepHandle, thread: int | None = None) -> None:
        self.handle = handle
        self.thread = thread
        """The thread that runs the step function; None: any that has this context."""

    @property
    def window(self) -> Window:
        """The window whose gradients this step consumes."""
        return self.handle.window


current_window: ContextVar[Window | None] = ContextVar("roundpipe_async_window", default=None)
"""Set while work of a call runs (layers, loss function, backward): the window that its gradients go to."""

current_step: ContextVar[StepScope | None] = ContextVar("roundpipe_async_step", default=None)
"""Set while a step function runs: read it with `running_step`."""


def running_step() -> StepScope | None:
    """The step whose function is running here, if any. What a step function starts elsewhere with its context, such as
    a task by `asyncio.run_coroutine_threadsafe`, is no part of it."""
    scope = current_step.get()
    return scope if scope is None or scope.thread in (None, threading.get_ident()) else None


_in_flight: dict[StepHandle, None] = {}
_failed: WeakSet[StepHandle] = WeakSet()  # weak: the errors of a model that is gone concern nobody
_registry_lock = threading.Lock()


def register(handle: StepHandle) -> None:
    """Count a step as in flight from now until its event happens."""
    with _registry_lock:
        _in_flight[handle] = None

    def finished(event: Event[Any]) -> None:
        with _registry_lock:
            _in_flight.pop(handle, None)
            if event.error is not None:
                _failed.add(handle)

    handle.event.add_callback(finished)


def steps_in_flight() -> tuple[StepHandle, ...]:
    """The steps of all models that are scheduled and not finished, or failed with an error that nobody saw yet.

    In order of scheduling.
    """
    with _registry_lock:
        unseen = [handle for handle in _failed if handle.unseen]
        return tuple(sorted([*_in_flight, *unseen], key=lambda handle: handle.scheduled_at))
