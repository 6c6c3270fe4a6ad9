"""Devices that do nothing until the test says so, and a loop that is stepped by hand.

Here a test decides which piece of work happens next, between which two turns of the event loop, and at which turn a
task is cancelled: so every order can be tried, and each try is the same every time.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from roundpipe_async.devices.base import Stream
from roundpipe_async.devices.cpu import CpuDevice
from roundpipe_async.devices.pool import DevicePool
from roundpipe_async.events import Event
from roundpipe_async.tracing.trace import Action

T = TypeVar("T")


class ManualStream:
    """A stream whose oldest piece of work runs when `play` is called, in the caller's thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.jobs: deque[tuple[Callable[[], Any], Sequence[Event[Any]], Event[Any], Action | None]] = deque()

    def submit(
        self, fn: Callable[[], T], *, after: Sequence[Event[Any]] = (), action: Action | None = None
    ) -> Event[T]:
        event: Event[T] = Event()
        self.jobs.append((fn, tuple(after), event, action))
        return event

    @property
    def playable(self) -> bool:
        """Whether there is work, and everything that it waits for has happened."""
        return bool(self.jobs) and all(event.done() for event in self.jobs[0][1])

    def play(self) -> None:
        """Run the oldest piece of work."""
        fn, after, event, _ = self.jobs.popleft()
        for other in after:
            if other.error is not None:
                event.fail(other.error)
                return
        try:
            value = fn()
        except BaseException as error:
            event.fail(error)
        else:
            event.set(value)


class ManualDevice(CpuDevice):
    """A CPU device with manual streams (one, where it shares the host's memory)."""

    def __init__(self, index: int, own_memory: bool) -> None:
        super().__init__(index, 1, own_memory)
        self.name = f"manual:{index}"
        self.compute: Stream = ManualStream(f"{self.name}/compute")
        self.upload: Stream = ManualStream(f"{self.name}/upload") if own_memory else self.compute
        self.load: Stream = ManualStream(f"{self.name}/load") if own_memory else self.compute
        self.download: Stream = ManualStream(f"{self.name}/download") if own_memory else self.compute


class _SteppedLoop(asyncio.SelectorEventLoop):
    """A loop that pauses between its turns, which other threads do not see."""

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        super().__init__()

    def is_running(self) -> bool:
        return super().is_running() or threading.get_ident() != self._owner


class Hand:
    """A pool of manual devices, and the event loop that is stepped beside it."""

    def __init__(self, num_devices: int = 2, *, own_memory: bool = False, seed: int | None = None) -> None:
        devices = [ManualDevice(index, own_memory) for index in range(num_devices)]
        self.host = ManualStream("host")
        self.optimizer = ManualStream("optimizer")
        self.pool = DevicePool(devices, host=self.host, optimizer=self.optimizer)
        streams = [self.host, self.optimizer]
        for device in devices:
            for stream in (device.upload, device.load, device.compute, device.download):
                assert isinstance(stream, ManualStream)
                if stream not in streams:
                    streams.append(stream)
        self.streams = streams
        self.held: set[ManualStream] = set()
        """Streams that play nothing for now."""
        self.random = None if seed is None else random.Random(seed)
        self.turns = 0
        """Turns of the loop so far."""
        self.on_turn: Callable[[int], None] = lambda turn: None
        """Called before each turn of the loop with its number."""
        self.loop = _SteppedLoop()

    def turn(self) -> None:
        """One turn of the event loop: everything that is ready now, nothing that becomes ready by it."""
        self.on_turn(self.turns)
        self.turns += 1
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def idle(self) -> bool:
        """Whether a turn of the loop would do nothing."""
        return not self.loop._ready  # type: ignore[attr-defined]

    def play(self) -> bool:
        """Let one piece of work happen: of the first stream that can, or of a random one where there is a seed."""
        playable = [stream for stream in self.streams if stream.playable and stream not in self.held]
        if not playable:
            return False
        (self.random.choice(playable) if self.random else playable[0]).play()
        return True

    def advance(self) -> bool:
        """A turn of the loop if it has anything to do, else a piece of work; False if there is neither."""
        if self.random is not None and self.random.random() < 0.3 and self.play():
            return True
        if not self.idle():
            self.turn()
            return True
        return self.play()

    def settle(self) -> None:
        """Go on until nothing moves."""
        while self.advance():
            pass

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that begins with the next turn."""
        return self.loop.create_task(work)

    def within(self, fn: Callable[[], T]) -> T:
        """Call `fn` inside the running loop, as a coroutine would."""

        async def call() -> T:
            return fn()

        task = self.loop.create_task(call())
        while not task.done():
            self.turn()
        return task.result()

    def finish(self, task: asyncio.Task[T], *, threads: bool = False) -> T:
        """Go on until the task is done; gives its result. `threads`: real threads take part, which are waited for."""
        while not task.done():
            if not self.advance():
                if not threads:
                    raise AssertionError(f"stuck: nothing moves, but {task!r} is not done")
                self.loop.call_later(0.0005, self.loop.stop)
                self.loop.run_forever()
        return task.result()

    def run(self, work: Coroutine[Any, Any, T], *, threads: bool = False) -> T:
        """`start` and `finish`."""
        return self.finish(self.start(work), threads=threads)

    def close(self) -> None:
        """End the loop; no task may be left."""
        left = asyncio.all_tasks(self.loop)
        self.pool.close()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        assert not left, f"tasks left: {left}"

    def __enter__(self) -> Hand:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.loop.close()
