"""Calls begin when they are made, whoever awaits them and in whatever order.

A public method that runs work is a plain function: it admits the call in that moment and gives a coroutine that waits
for the outcome. So two calls made one after another are ordered even when they are awaited the other way round,
gathered, or given to tasks. Made without a running loop (`asyncio.run(model.synchronize())`) a call begins when the
coroutine is first awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

T = TypeVar("T")

_tasks: set[asyncio.Task[Any]] = set()  # asyncio itself refers to tasks weakly


def call(begin: Callable[[], Coroutine[Any, Any, T]], name: str) -> Coroutine[Any, Any, T]:
    """Begin a call now if a loop runs: `begin()` admits it and gives what is left to do, which a task then does.

    Cancelling the returned coroutine cancels the call, waits until nothing of it runs any more, and then raises
    CancelledError. An exception of `begin` is raised where the coroutine is awaited.
    """
    task: asyncio.Task[T] | None = None
    error: BaseException | None = None
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        try:
            task = _start(begin, name)
        except Exception as caught:
            error = caught
    coroutine: Any = _outcome(begin, name, task, error)
    coroutine.__qualname__ = f"RoundPipe.{name}"  # for asyncio's and Python's own messages
    return cast("Coroutine[Any, Any, T]", coroutine)


def _start(begin: Callable[[], Coroutine[Any, Any, T]], name: str) -> asyncio.Task[T]:
    task = asyncio.get_running_loop().create_task(begin(), name=f"roundpipe_async {name}")
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


async def _outcome(
    begin: Callable[[], Coroutine[Any, Any, T]],
    name: str,
    task: asyncio.Task[T] | None,
    error: BaseException | None,
) -> T:
    if error is not None:
        try:
            raise error
        finally:
            del error
    if task is None:
        task = _start(begin, name)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as caught:
            cancelled = caught
            task.cancel()
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen: the cancellation goes first
        try:
            raise cancelled
        finally:
            del cancelled
    try:
        return task.result()
    finally:
        del task
