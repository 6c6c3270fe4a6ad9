"""Calls begin when they are made, whoever awaits them and in whatever order.

A public method that runs work is a plain function: it admits the call in that moment and gives a coroutine that waits
for the outcome. So two calls made one after another are ordered even when they are awaited the other way round,
gathered, or given to tasks. Made without a running loop (`asyncio.run(model.synchronize())`) a call begins when the
coroutine is first awaited.

The work runs in a task of its own, and everything that can become of that task is thought of here: a waiter that is
cancelled before it ever waited, a task that is cancelled before it ever ran, exceptions that would end the loop.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import anyio

from roundpipe_async.errors import WrongLoopError

T = TypeVar("T")

_tasks: set[asyncio.Task[Any]] = set()  # asyncio itself refers to tasks weakly


def _nothing() -> None:
    pass


def _same(value: T) -> T:
    return value


@dataclass(slots=True, eq=False)
class Begun(Generic[T]):
    """A call that was admitted: what is left of it."""

    work: Coroutine[Any, Any, T]
    """What a task of its own does."""
    undo: Callable[[], None] = _nothing
    """Ends the admission where the task was cancelled before it ran at all, so that `work` never started."""
    finish: Callable[[T], T] = _same
    """Makes the outcome of what `work` gave, in whoever awaits it, with nothing in between: so an exception that is
    raised once is raised to somebody. Not called where the waiter was cancelled."""
    lose: Callable[[], None] = _nothing
    """Called instead of `finish` where nobody waits for the outcome any more."""


class _Raised:
    """An exception that would have ended the event loop, had the task raised it."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def call(begin: Callable[[], Begun[T]], name: str) -> Coroutine[Any, Any, T]:
    """Begin a call now if a loop runs: `begin()` admits it and gives what is left to do, which a task then does.

    Cancelling the returned coroutine cancels the call, waits until nothing of it runs any more, and then raises
    CancelledError. An exception of `begin` is raised where the coroutine is awaited.
    """
    return _Call(begin, name)


class _Call(Coroutine[Any, Any, T]):
    """A coroutine that hears of it when it is cancelled before it started: a task may be, a plain one would not."""

    def __init__(self, begin: Callable[[], Begun[T]], name: str) -> None:
        self.__name__ = name
        self.__qualname__ = f"RoundPipe.{name}"  # for asyncio's and Python's own messages
        self._begin: Callable[[], Begun[T]] | None = begin
        self._task: asyncio.Task[T | _Raised] | None = None
        self._finish: Callable[[T], T] = _same
        self._lose: Callable[[], None] = _nothing
        self._error: BaseException | None = None
        self._cancelled: asyncio.CancelledError | None = None
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            try:
                self._start()
            except BaseException as error:
                self._error = error
        self._coroutine = cast(Any, self._outcome())
        self._coroutine.__name__ = name
        self._coroutine.__qualname__ = f"RoundPipe.{name}"

    def _start(self) -> None:
        begin, self._begin = self._begin, None
        assert begin is not None
        begun = begin()
        self._finish, self._lose = begun.finish, begun.lose
        self._task = background(_contained(begun.work), self.__name__, lambda: _undo(begun))

    async def _outcome(self) -> T:
        error, self._error = self._error, None
        cancelled, self._cancelled = self._cancelled, None
        try:
            if error is not None:
                raise error
            if self._task is None:
                self._start()
            task = self._task
            assert task is not None
            if task.get_loop() is not asyncio.get_running_loop():
                raise WrongLoopError(f"{self.__qualname__} was called in one event loop and awaited in another")
            if cancelled is not None:
                task.cancel()
            while not task.done():
                try:
                    # anyio's scopes cancel again and again; once is enough.
                    with anyio.CancelScope(shield=cancelled is not None):
                        await asyncio.wait([task])
                except asyncio.CancelledError as caught:
                    cancelled = cancelled or caught
                    task.cancel()
            if cancelled is not None:
                if not task.cancelled():
                    task.exception()  # seen: the cancellation goes first
                raise cancelled
            result = task.result()
            if isinstance(result, _Raised):
                raise result.error
            self._lose = _nothing
            return self._finish(result)
        finally:
            error = cancelled = None  # no cycle of exception, traceback and frame
            self._task, self._finish = None, _same
            self._drop()

    # ---- as Python's own coroutines -------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, Any, T]:
        return cast("Generator[Any, Any, T]", self._coroutine.__await__())

    def send(self, value: Any) -> Any:
        """As a coroutine's."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """As a coroutine's; CancelledError, before the coroutine started, cancels the call and waits for its end."""
        thrown = error[0] if len(error) == 1 else error[1]
        if inspect.getcoroutinestate(self._coroutine) == inspect.CORO_CREATED and self._begin is None:
            thrown = error[0]() if isinstance(error[0], type) and thrown is None else thrown
            if isinstance(thrown, asyncio.CancelledError) and self._error is None:
                self._cancelled = thrown
                return self._coroutine.send(None)
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """As a coroutine's. What the call began goes on."""
        self._coroutine.close()
        self._drop()

    def __del__(self) -> None:
        self._drop()

    def _drop(self) -> None:
        lose, self._lose = self._lose, _nothing
        lose()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cr_"):  # what asyncio's and anyio's look into
            return getattr(self._coroutine, name)
        raise AttributeError(name)


def background(work: Coroutine[Any, Any, T], name: str, undo: Callable[[], None] = _nothing) -> asyncio.Task[T]:
    """A task for work that goes on beside whoever began it; it is kept until it is done.

    `undo` is called if the task was cancelled before its first turn, when nothing inside `work` can clean up.
    """
    started = False

    async def run() -> T:
        nonlocal started
        started = True
        return await work

    def done(task: asyncio.Task[T]) -> None:
        _tasks.discard(task)
        if not started:
            work.close()
            undo()

    task = asyncio.get_running_loop().create_task(run(), name=f"roundpipe_async {name}")
    _tasks.add(task)
    task.add_done_callback(done)
    return task


async def stop(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it is done, however often the waiter is cancelled meanwhile."""
    while not task.done():
        task.cancel()
        try:
            with anyio.CancelScope(shield=True):
                await asyncio.wait([task])
        except asyncio.CancelledError:
            continue
    if not task.cancelled():
        task.exception()  # seen


async def _contained(work: Coroutine[Any, Any, T]) -> T | _Raised:
    try:
        return await work
    except (KeyboardInterrupt, SystemExit) as error:
        return _Raised(error)


def _undo(begun: Begun[Any]) -> None:
    begun.work.close()
    begun.undo()
