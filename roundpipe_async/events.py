"""One-shot events: the only thing that threads, streams and coroutines wait for.

An event is made once, happens once (with a value or an exception) and is never cleared. It may be awaited from any
event loop, waited for by any thread and given callbacks; whoever comes late finds it done. Waking a loop is batched:
many events that happen before the loop gets its turn cost one wake-up.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar, Generic, TypeVar, cast
from weakref import WeakKeyDictionary, ref

T = TypeVar("T")
U = TypeVar("U")

_PENDING = object()


class Event(Generic[T]):
    """Something that happens once, with a value or an exception.

    Thread-safe. `set` and `fail` belong to the producer and may be called once; callbacks run in the producer's
    thread (at once, in the caller's thread, when the event is done already) and must neither block nor raise.
    """

    __slots__ = ("__weakref__", "_callbacks", "_error", "_lock", "_value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value: Any = _PENDING
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Event[T]], None]] = []

    @classmethod
    def happened(cls, value: T) -> Event[T]:
        """An event that is done from the start."""
        event = cls()
        event._value = value
        return event

    def done(self) -> bool:
        """Whether the event happened, with a value or an exception."""
        return self._value is not _PENDING or self._error is not None

    @property
    def launched(self) -> Event[Any]:
        """What work on the same kind of device has to wait for before it is launched: here, the event itself."""
        return self

    @property
    def error(self) -> BaseException | None:
        """The exception that the event happened with; None while it is pending or when it has a value."""
        return self._error

    @property
    def value(self) -> T:
        """The value; raises the event's exception, or AssertionError while it is pending."""
        if self._error is not None:
            raise self._error
        assert self._value is not _PENDING, "the event has not happened yet"
        return cast(T, self._value)

    def set(self, value: T) -> None:
        """Let the event happen with a value. The producer's alone."""
        self._happen(value, None)

    def fail(self, error: BaseException) -> None:
        """Let the event happen with an exception. The producer's alone."""
        self._happen(_PENDING, error)

    def _happen(self, value: Any, error: BaseException | None) -> None:
        with self._lock:
            assert not self.done(), "an event happens once"
            self._value, self._error = value, error
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def add_callback(self, callback: Callable[[Event[T]], None]) -> None:
        """Call `callback(event)` when the event happens: at once if it did already."""
        with self._lock:
            if not self.done():
                self._callbacks.append(callback)
                return
        callback(self)

    def then(self, fn: Callable[[T], U]) -> Event[U]:
        """An event that happens with what `fn(value)` gives or raises, right after this one, in the producer's thread.

        `fn` must be quick.
        """
        after = self._following()

        def pass_on(event: Event[T]) -> None:
            if event.error is not None:
                after.fail(event.error)
                return
            try:
                value = fn(event.value)
            except BaseException as error:
                after.fail(error)
            else:
                after.set(value)

        self.add_callback(pass_on)
        return after

    def _following(self) -> Event[Any]:
        return Event()

    def settled(self) -> Event[None]:
        """An event that happens, without an exception, when this one is done."""
        after: Event[None] = Event()
        self.add_callback(lambda _: after.set(None))
        return after

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until the event is done; False when `timeout` seconds passed before. Never on a loop."""
        if not self.done():
            gate = threading.Lock()
            gate.acquire()
            self.add_callback(lambda _: gate.release())
            return gate.acquire(timeout=-1 if timeout is None else timeout)
        return True

    def __await__(self) -> Generator[Any, None, T]:
        """Wait without blocking the loop; gives the value or raises the exception. A cancelled wait loses nothing."""
        if not self.done():
            loop = asyncio.get_running_loop()
            waker = Waker.of(loop)
            future: asyncio.Future[None] = loop.create_future()
            self.add_callback(lambda _: waker.wake(future))
            yield from future
        return self.value


def all_of(events: Sequence[Event[Any]]) -> Event[None]:
    """An event that happens when all of `events` have, or fails with the first failure among them."""
    result: Event[None] = Event()
    left = len(events)
    lock = threading.Lock()

    def count(event: Event[Any]) -> None:
        nonlocal left
        with lock:
            if left <= 0:
                return  # another one has failed
            left = -1 if event.error is not None else left - 1
            decided = left <= 0
        if event.error is not None:
            result.fail(event.error)
        elif decided:
            result.set(None)

    if not events:
        result.set(None)
    for event in events:
        event.add_callback(count)
    return result


class Waker:
    """Wakes futures of one loop from any thread, many with one call.

    The first wake-up after the loop's last turn schedules `_drain`; the ones that follow only queue behind it.
    A closed loop has nobody left to wake: its futures are forgotten.
    """

    _wakers: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, Waker]] = WeakKeyDictionary()
    _wakers_lock = threading.Lock()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # weak: the table of wakers must not keep loops alive
        self._ready: deque[asyncio.Future[None]] = deque()
        self._scheduled = False
        self._lock = threading.Lock()

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Waker:
        """The loop's waker, made at first use."""
        with cls._wakers_lock:
            waker = cls._wakers.get(loop)
            if waker is None:
                waker = cls._wakers[loop] = Waker(loop)
            return waker

    def wake(self, future: asyncio.Future[None]) -> None:
        """Let `future` be done at the loop's next turn."""
        with self._lock:
            self._ready.append(future)
            if self._scheduled:
                return
            self._scheduled = True
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._drain)
        except RuntimeError:  # the loop is closed: nobody waits any more
            with self._lock:
                self._ready.clear()
                self._scheduled = False

    def _drain(self) -> None:
        with self._lock:
            ready, self._ready = self._ready, deque()
            self._scheduled = False
        for future in ready:
            if not future.done():
                future.set_result(None)
