"""Streams whose work a device runs long after the host has launched it.

An action on an accelerator happens twice: it is *launched* when its function has run in the host's thread, and it is
*done* when the device has passed it. What waits on the same kind of device needs the launch only, since the device
itself keeps the order from there on; coroutines and threads wait for the device. So a `LaunchedEvent` has its value
from the launch on, and is done later.

Each stream has two threads. One launches, first in first out; a layer that makes the host wait for the device
(`.item()`) holds up its own stream only. The other waits in the device's runtime (no polling, no event loop) and lets
the events happen. It is one for each stream, and not one for the device: in one line the end of a download would be
told only after the longer kernels that were launched before it.

What an action used (its function, its inputs, what `hold` was told) stays alive until the device has passed it, and
not longer: device memory that one stream allocated and another one reads must not be handed out again before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

from roundpipe_async.devices.cpu import WorkerStream
from roundpipe_async.events import Event
from roundpipe_async.tracing.trace import Action, begin, copied_bytes, record

T = TypeVar("T")
U = TypeVar("U")

MAX_AHEAD = 16
"""Actions that a stream's thread launches before the device has passed the first of them."""


class Mark(Protocol):
    """A point in a device's stream."""

    def synchronize(self) -> None:
        """Block this thread until the device has passed the point."""
        ...


class Lane(Protocol):
    """A stream as the device's runtime has it. Every method but `elapsed_s` is for the launching thread alone."""

    kind: str
    """The device type. Marks of lanes of one kind may be waited for on the device."""

    def entered(self) -> AbstractContextManager[None]:
        """Inside, what this thread launches goes to this lane."""
        ...

    def mark(self, timed: bool) -> Mark:
        """Mark the point after everything launched so far."""
        ...

    def wait(self, mark: Mark) -> None:
        """Let what is launched from now on run after the point, of any lane of the same kind. Does not block."""
        ...

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        """Seconds that the device took from one timed mark to another; it must have passed both."""
        ...


class LaunchedEvent(Event[T]):
    """An event whose value is there when its action is launched; done when the device has passed the action."""

    __slots__ = ("_launched", "_passed", "lane", "mark")

    def __init__(self, lane: Lane) -> None:
        super().__init__()
        self._launched: Event[None] = Event()
        self._passed = False
        self.lane = lane
        self.mark: Mark | None = None

    @property
    def launched(self) -> Event[None]:
        """Happens when the value is there, or when it is known that there will be none."""
        return self._launched

    def done(self) -> bool:
        """Whether the device has passed the action, or it failed."""
        return self._passed

    def launch(self, value: T, mark: Mark) -> None:
        """Give the value; the device will have it at `mark`. The producer's alone."""
        self._value, self.mark = value, mark
        self._launched.set(None)

    def refuse(self, error: BaseException) -> None:
        """Say that there will be no value; `fail` follows when the device has passed what was launched of it."""
        self._launched.fail(error)

    def pass_by(self) -> None:
        """Let the event happen: the device has passed the mark."""
        self._happen(self._value, None)

    def fail(self, error: BaseException) -> None:
        """As `Event.fail`, before or after the launch."""
        if not self._launched.done():
            self._launched.fail(error)
        self._happen(self._value, error)

    def _happen(self, value: Any, error: BaseException | None) -> None:
        with self._lock:
            assert not self._passed, "an event happens once"
            self._value, self._error = value, error
            self._passed = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def then(self, fn: Callable[[T], U]) -> Event[U]:
        """As `Event.then`, launched and done with this one; `fn` gets the value at the launch."""
        after: LaunchedEvent[U] = LaunchedEvent(self.lane)

        def launched(event: Event[None]) -> None:
            if event.error is not None:
                after.refuse(event.error)
            else:
                assert self.mark is not None
                after.launch(fn(cast(T, self._value)), self.mark)

        def passed(event: Event[T]) -> None:
            if event.error is not None:
                after.fail(event.error)
            else:
                after.pass_by()

        self._launched.add_callback(launched)
        self.add_callback(passed)
        return after


class LaunchStream:
    """A `Stream` on a lane of a device: work is launched in order, ordered on the device, and waited for there."""

    def __init__(self, name: str, owner: str, lane: Lane, setup: Callable[[], None] | None = None) -> None:
        self.name = name
        self._launcher = WorkerStream(name, owner=owner, setup=setup)
        self._end = _End(name, owner, lane)
        self._used = False

    def submit(
        self, fn: Callable[[], T], *, after: Sequence[Event[Any]] = (), action: Action | None = None
    ) -> Event[T]:
        """As `Stream.submit`. Events of the same kind of device are waited for on the device, others here."""
        lane = self._end.lane
        event: LaunchedEvent[T] = LaunchedEvent(lane)
        launch = _Launch(self._end, fn, after, event, action)
        begun = self._launcher.submit(launch.run, after=[_startable(other, lane) for other in after])
        begun.add_callback(lambda begun: None if begun.error is None else event.fail(begun.error))
        self._used = True
        return event

    def close(self) -> None:
        """End the threads after what was submitted. Does not wait; closing twice is fine."""
        if self._used:
            self._used = False
            self._launcher.submit(self._end.waiter.close)
        self._launcher.close()


def _startable(event: Event[Any], lane: Lane) -> Event[Any]:
    """What the launching thread has to wait for before work that comes after `event`."""
    return event.launched if isinstance(event, LaunchedEvent) and event.lane.kind == lane.kind else event


class _End:
    """What launched work needs of its stream. Apart from it, so that work in flight keeps no dropped stream alive."""

    def __init__(self, name: str, owner: str, lane: Lane) -> None:
        self.name = name
        self.owner = owner
        self.lane = lane
        self.waiter = WorkerStream(f"{name} (wait)", owner=owner)
        self.ahead = threading.Semaphore(MAX_AHEAD)
        self._anchor: tuple[Mark, float] | None = None

    def anchor(self) -> None:
        """Tie the device's clock to the host's, once. The launching thread's, on an idle lane at best."""
        if self._anchor is None:
            mark = self.lane.mark(timed=True)
            mark.synchronize()
            self._anchor = (mark, time.perf_counter())

    def host_time_s(self, mark: Mark) -> float:
        """When the device passed a timed mark, on the clock of `time.perf_counter`."""
        assert self._anchor is not None
        anchor, anchor_s = self._anchor
        return anchor_s + self.lane.elapsed_s(anchor, mark)


class _Launch(Generic[T]):
    """One action: `run` in the launching thread, `settle` in the waiting one."""

    __slots__ = ("_action", "_after", "_end", "_event", "_fn", "_held", "_num_bytes", "_start", "_timed")

    def __init__(
        self,
        end: _End,
        fn: Callable[[], T],
        after: Sequence[Event[Any]],
        event: LaunchedEvent[T],
        action: Action | None,
    ) -> None:
        self._end = end
        self._fn: Callable[[], T] | None = fn
        self._after = after
        self._event: LaunchedEvent[T] | None = event
        self._action = action
        self._held: list[Any] = []
        self._start: Mark | None = None
        self._timed: list[tuple[Mark, Mark, Callable[[float], object]]] = []
        self._num_bytes = 0

    @property
    def lane(self) -> Lane:
        """The lane of the action's stream."""
        return self._end.lane

    def hold(self, value: Any) -> None:
        """Keep `value` until the device has passed this action."""
        self._held.append(value)

    def time(self, start: Mark, stop: Mark, report: Callable[[float], object]) -> None:
        """Report the seconds between two marks when the device has passed this action."""
        self._timed.append((start, stop, report))

    def run(self) -> None:
        """Launch the action."""
        end, event = self._end, self._event
        assert event is not None
        end.ahead.acquire()
        value: Any = None
        error: BaseException | None = None
        try:
            with end.lane.entered():
                timed = self._action is not None and begin() > 0
                if timed:
                    end.anchor()
                for other in self._after:
                    if isinstance(other, LaunchedEvent) and other.lane is not end.lane and not other.done():
                        assert other.mark is not None
                        end.lane.wait(other.mark)
                if timed:
                    self._start = end.lane.mark(timed)
                _current.launch = self
                try:
                    assert self._fn is not None
                    value = self._fn()
                except BaseException as caught:
                    error = caught
                    if not isinstance(caught, Exception):  # what no user will see needs no memory of how it came
                        caught.__traceback__ = None
                finally:
                    _current.launch = None
                self._num_bytes = copied_bytes() if timed else 0
                mark = end.lane.mark(timed)
            if error is None:
                event.launch(value, mark)
            else:
                event.refuse(error)
            value = None  # what this thread still holds when the event is done would be in somebody's way
            end.waiter.submit(partial(self.settle, mark, error))
        except BaseException:
            end.ahead.release()
            raise
        finally:
            del error, event  # the error's traceback holds this frame: let the frame hold neither

    def settle(self, mark: Mark, error: BaseException | None) -> None:
        """Wait for the device, let go of everything, and let the event happen."""
        end, event = self._end, self._event
        assert event is not None
        try:
            mark.synchronize()
            self._report(mark, error)
        except Exception as caught:
            caught.add_note(f"roundpipe_async: {end.name} failed on the device, after the work was launched")
            error = error or caught
        finally:
            end.ahead.release()
        self._fn, self._after, self._held, self._timed, self._event = None, (), [], [], None
        if error is None:
            event.pass_by()
        else:
            event.fail(error)

    def _report(self, mark: Mark, error: BaseException | None) -> None:
        """Tell traces and stopwatches the device's times."""
        end, action = self._end, self._action
        if error is None:
            for start, stop, report in self._timed:
                report(end.lane.elapsed_s(start, stop))
        if self._start is not None and action is not None:
            start_s, end_s = end.host_time_s(self._start), end.host_time_s(mark)
            failed = "" if error is None else type(error).__name__
            record(action, end.owner, end.name, start_s, end_s, self._num_bytes, failed)


class _Current(threading.local):
    launch: _Launch[Any] | None = None


_current = _Current()


def hold(value: Any) -> bool:
    """Keep `value` until the device has passed the action that this thread launches; False when it launches none."""
    launch = _current.launch
    if launch is None:
        return False
    launch.hold(value)
    return True


def stopwatch() -> Callable[[Callable[[float], object]], None]:
    """Start timing this thread's work, or on a device what it launches from here on.

    Call what is returned, at the end, with who wants to know the seconds: told at once, or, where a device does the
    work, when it has done it, and then only if the whole action succeeded.
    """
    launch = _current.launch
    if launch is None:
        start_s = time.perf_counter()

        def stop_here(report: Callable[[float], object]) -> None:
            report(time.perf_counter() - start_s)

        return stop_here
    start = launch.lane.mark(timed=True)

    def stop(report: Callable[[float], object]) -> None:
        launch.time(start, launch.lane.mark(timed=True), report)

    return stop


def launching_lane() -> Lane | None:
    """The lane that this thread launches an action on now."""
    launch = _current.launch
    return None if launch is None else launch.lane
