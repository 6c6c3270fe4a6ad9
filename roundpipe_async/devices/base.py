"""What the engine needs of a device, and nothing else: three streams and the copies between host and device.

Backends implement `Device` and `Stream`; everything above this folder is the same on all of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from roundpipe_async.events import Event
from roundpipe_async.tracing.trace import Action
from roundpipe_async.versions import HostMemory

T = TypeVar("T")


@runtime_checkable
class Stream(Protocol):
    """A first-in-first-out line of work on one device."""

    name: str

    def submit(
        self, fn: Callable[[], T], *, after: Sequence[Event[Any]] = (), action: Action | None = None
    ) -> Event[T]:
        """Run `fn` after everything submitted before and after all events of `after`.

        The returned event gives what `fn` returned or raised. When an event of `after` failed, `fn` does not run and
        the returned event fails with that very exception. Never blocks.
        """
        ...


@runtime_checkable
class Device(Protocol):
    """A stateless worker: it keeps nothing between stage runs.

    `load` uploads the parameters of a stage, `upload` everything else. `from_host` and `to_host` are called inside
    functions that run on the device's streams; what they copy to has its values when the stream's event is done. Where
    `shares_host_memory`, both are identities, and the engine leaves the copies out.
    """

    index: int
    name: str
    torch_device: torch.device
    compute: Stream
    upload: Stream
    load: Stream
    download: Stream
    shares_host_memory: bool

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor in the device's memory."""
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a device tensor in host memory."""
        ...

    def host_memory(self, pin_model: str) -> HostMemory:
        """Where the parameters of models live that run here, by `RoundPipe`'s `pin_model`."""
        ...

    def statistics(self) -> dict[str, int]:
        """What the device did so far: `num_uploads`, `uploaded_bytes`, `num_downloads`, `downloaded_bytes`, and
        `peak_bytes` where it can tell how much of its memory was in use at most."""
        ...

    def close(self) -> None:
        """Let what was submitted finish, then end the device's threads. Does not wait; closing twice is fine."""
        ...


class Line:
    """A first-in-first-out line for `capacity` places, joined from any thread and any event loop."""

    def __init__(self, capacity: int) -> None:
        self._free = capacity
        self._inside: list[Place] = []
        self._waiting: deque[Place] = deque()
        self._lock = threading.Lock()

    def join(self) -> Place:
        """Take a place at the end of the line; its `entered` event happens when the place is one of the first."""
        place = Place(self)
        with self._lock:
            for other in [*self._inside, *self._waiting]:
                if other.loop is not None and other.loop.is_closed():  # nobody is left to give it back
                    self._drop(other)
            self._waiting.append(place)
            entering = self._admit()
        for other in entering:
            other.entered.set(None)
        return place

    def _admit(self) -> list[Place]:
        entering = []
        while self._free and self._waiting:
            self._free -= 1
            place = self._waiting.popleft()
            self._inside.append(place)
            place.inside = True
            entering.append(place)
        return entering

    def _leave(self, place: Place) -> None:
        with self._lock:
            self._drop(place)
            entering = self._admit()
        for other in entering:
            other.entered.set(None)

    def _drop(self, place: Place) -> None:
        if place.left:
            return
        place.left = True
        if place.inside:
            self._inside.remove(place)
            self._free += 1
        else:
            self._waiting.remove(place)


class Place:
    """One's place in a `Line`. `leave` at any time, also while still waiting; leaving twice is fine."""

    __slots__ = ("_line", "entered", "inside", "left", "loop")

    def __init__(self, line: Line) -> None:
        self._line = line
        self.loop = _running_loop()
        self.entered: Event[None] = Event()
        self.inside = False
        self.left = False

    def leave(self) -> None:
        """Give the place to the next in line."""
        self._line._leave(self)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
