"""Batches for a coroutine: an ordinary iterable, run ahead in its own thread, so that loading never holds the loop.

Each iteration has one daemon thread, which alone touches the iterator: it makes it, draws from it and closes it. The
items travel as a chain of one-shot events, each holding an item and the next event; permits travel back.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable, Iterator, Sized
from contextvars import copy_context
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar, cast
from weakref import WeakSet

from roundpipe_async.events import Event

__all__ = ["Prefetch", "prefetch"]

T = TypeVar("T")

_logger = logging.getLogger("roundpipe_async")
_EXIT_GRACE_S = 1.0


def prefetch(iterable: Iterable[T], buffer: int = 2) -> Prefetch[T]:
    """Iterate over `iterable` with `async for`, at most `buffer` items ahead, without blocking the event loop.

        async for batch in prefetch(dataloader): ...                  # one epoch; iterate again for the next
        async with prefetch(dataloader) as batches: ...               # and wait, at the end, until all is closed

    - Any iterable: a DataLoader, a list, a generator. Its `__iter__` and `__next__` run in the iteration's own thread,
      with the caller's context variables; order is kept; its exceptions reach the consumer as themselves.
    - `break`, an exception or a cancellation in the loop, `aclose()`, the end of the event loop or the loss of the last
      reference end the thread: after the item that it is just making, it closes a generator and drops any other
      iterator, which ends a DataLoader's workers. `aclose()` and `async with` wait for that, the others do not.
    - Iterations are independent of each other, each with its own thread and its own `iter(iterable)`.
    - `len()` is that of `iterable`, where it has one; tqdm (`tqdm.asyncio.tqdm`) shows it.

    A DataLoader draws its order when it begins, so a seeded run has that of the plain loop. A dataset that draws from
    torch's default generator in this process does so ahead of the loop, and so in no fixed order beside the loop's own
    draws: give it a generator of its own.

    TypeError, ValueError: not an iterable, `buffer` not a positive whole number.
    """
    return Prefetch(iterable, buffer)


class Prefetch(Generic[T]):
    """What `prefetch` returns. `async for` starts a new iteration; `anext()` goes on with one that the object keeps."""

    def __init__(self, iterable: Iterable[T], buffer: int = 2) -> None:
        if isinstance(iterable, AsyncIterable):
            raise TypeError(f"{type(iterable).__name__} is asynchronous already: iterate over it directly")
        if not (hasattr(iterable, "__iter__") or hasattr(iterable, "__getitem__")):
            raise TypeError(f"prefetch needs an iterable, not {type(iterable).__name__}")
        if isinstance(buffer, bool) or not isinstance(buffer, int):
            raise TypeError(f"buffer must be a whole number of items, not {buffer!r}")
        if buffer < 1:
            raise ValueError(f"buffer must be at least 1, not {buffer}")
        self._iterable = iterable
        self._buffer = buffer
        self._feeders: WeakSet[_Feeder[T]] = WeakSet()
        self._lock = threading.Lock()
        self._kept: Iteration[T] | None = None

    def __len__(self) -> int:
        return len(cast(Sized, self._iterable))

    def __bool__(self) -> bool:
        return True  # else truth would ask for a length that may not exist

    def __aiter__(self) -> Iteration[T]:
        feeder = _Feeder(self._iterable, self._buffer)
        with self._lock:
            self._feeders.add(feeder)
        return Iteration(feeder)

    async def __anext__(self) -> T:
        if self._kept is None:
            self._kept = self.__aiter__()
        kept = self._kept
        try:
            return cast(T, await kept.__anext__())
        finally:
            if kept.over and self._kept is kept:
                self._kept = None  # the next call begins a new one

    async def aclose(self) -> None:
        """End all iterations of this object and wait until their iterators are closed. Twice is fine."""
        self._kept = None
        with self._lock:
            feeders = list(self._feeders)  # also of iterations that were left by `break`, while their thread runs
        for feeder in feeders:
            feeder.stop()
        for feeder in feeders:
            await feeder.ended

    async def __aenter__(self) -> Prefetch[T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


class Iteration(Generic[T]):
    """One pass over the iterable. As with an async generator, an error or a cancelled `anext()` ends it."""

    def __init__(self, feeder: _Feeder[T]) -> None:
        self._feeder = feeder
        self._items = _items(feeder)  # a native generator: the loop knows it, and ends it when it shuts down

    def __aiter__(self) -> Iteration[T]:
        return self

    def __anext__(self) -> Any:
        return self._items.__anext__()

    @property
    def over(self) -> bool:
        """Whether there will be no more items."""
        return self._feeder.stopped

    async def aclose(self) -> None:
        """End the iteration and wait until its iterator is closed; raises what closing it raised."""
        self._feeder.stop()
        if not self._items.ag_running:  # type: ignore[attr-defined]  # else somebody waits for an item: the feeder wakes him with the end
            await self._items.aclose()
        await self._feeder.ended

    def __del__(self) -> None:
        self._feeder.stop()


async def _items(feeder: _Feeder[T]) -> AsyncGenerator[T, None]:
    link: Any = None
    item: Any = None
    try:
        link = feeder.start()
        while True:
            item, link = await link
            if link is None and item is not None:
                raise item
            if link is None or feeder.stopped:
                return
            feeder.permits.put(None)
            yield item
            item = None  # not held while the next one is waited for
    finally:
        feeder.stop()
        item = link = None  # the traceback of an exception holds this frame


class _Feeder(Generic[T]):
    """The thread's side: makes an item for each permit and hangs it to the end of the chain.

    `stop` is called from finalizers, which run at any point of any code: it takes no lock (SimpleQueue.put is safe).
    """

    def __init__(self, iterable: Iterable[T], buffer: int) -> None:
        self._iterable: Iterable[T] | None = iterable
        self._context = copy_context()
        self.thread: threading.Thread | None = None
        self.permits: SimpleQueue[None] = SimpleQueue()
        for _ in range(buffer):
            self.permits.put(None)
        self.stopped = False
        self.ended: Event[None] = Event()

    def start(self) -> Event[Any]:
        """Start the thread; the chain's first event.

        An event's value is (item, next event), at the end (None, None), after a failure (the exception, None).
        """
        first: Event[Any] = Event()
        if self.stopped:
            first.set((None, None))
            return first
        self._first = first  # not an argument: a thread holds its arguments, and the first event holds the whole chain
        name = "roundpipe_async.prefetch"
        thread = threading.Thread(target=self._context.run, args=(self._run,), name=name, daemon=True)
        _at_exit.add(self)
        thread.start()
        self.thread = thread
        return first

    def stop(self) -> None:
        """Let the thread end after the item that it is just making."""
        if not self.stopped:
            self.stopped = True
            self.permits.put(None)
            if self.thread is None:
                self._iterable = None
                self.ended.set(None)

    def _run(self) -> None:
        link = self._first
        del self._first
        iterator: Iterator[T] | None = None
        failure: BaseException | None = None
        try:
            iterator = self._make_iterator()
            while True:
                self.permits.get()
                if self.stopped:
                    break
                try:
                    item = next(iterator)
                except StopIteration:
                    break
                after: Event[Any] = Event()
                link.set((item, after))
                link = after
                del item, after
        except BaseException as error:  # to the consumer, as itself
            failure = error
        closing = _close(iterator)
        del iterator  # here, in this thread, a DataLoader's workers end
        if closing is None:
            self.ended.set(None)
        else:
            self.ended.fail(closing)
        link.set((failure, None))
        del link, failure, closing  # the traceback holds this frame

    def _make_iterator(self) -> Iterator[T]:
        iterable, self._iterable = self._iterable, None
        assert iterable is not None, "a feeder runs once"
        return iter(iterable)


def _close(iterator: Iterator[Any] | None) -> BaseException | None:
    """Run a generator's cleanup now, though somebody may hold it; what it raised."""
    if isinstance(iterator, Generator):
        try:
            iterator.close()
        except BaseException as error:
            _logger.warning("closing the iterator of a prefetch failed", exc_info=error)
            return error
    return None


class _AtExit:
    """Ends the threads before the interpreter goes: a daemon thread that wakes inside torch after that would abort."""

    def __init__(self) -> None:
        self._feeders: WeakSet[_Feeder[Any]] = WeakSet()
        self._lock = threading.Lock()
        self._registered = False

    def add(self, feeder: _Feeder[Any]) -> None:
        with self._lock:
            self._feeders.add(feeder)
            if not self._registered:
                atexit.register(self._stop_all)
                self._registered = True

    def _stop_all(self) -> None:
        deadline = time.monotonic() + _EXIT_GRACE_S  # an iterator that blocks for ever must not hold the process
        with self._lock:
            feeders = list(self._feeders)
        for feeder in feeders:
            feeder.stop()
        for feeder in feeders:
            if feeder.thread is not None:
                feeder.thread.join(max(0.0, deadline - time.monotonic()))


_at_exit = _AtExit()
