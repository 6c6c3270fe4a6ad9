"""Devices that only take time: the real engine on virtual hardware, measured exactly and at once.

Everything above the devices is the real thing, coroutines, store and scheduler; a stream's action takes as long as the
cost table says, on the event loop's clock. On `VirtualTimeLoop` that clock jumps to the next thing that happens, so an
iteration of a large model on eight devices takes milliseconds to run; on an ordinary loop the devices really wait.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch

from roundpipe_async.devices.base import Stream
from roundpipe_async.events import Event, all_of
from roundpipe_async.scheduling.plan import LayerCost
from roundpipe_async.scheduling.simulate import Links
from roundpipe_async.tracing.trace import Action, record, recording
from roundpipe_async.versions import HostMemory

T = TypeVar("T")


class MadeOn(Event[T]):
    """An event that knows the device whose work it ends; None: the host's."""

    __slots__ = ("device",)

    def __init__(self, device: int | None) -> None:
        super().__init__()
        self.device = device

    def _following(self) -> Event[Any]:
        return MadeOn(self.device)


_Job = tuple[Callable[[], Any], Sequence[Event[Any]], MadeOn[Any], Action | None]
Duration = Callable[[Action | None, Sequence[Event[Any]]], float]


class SimulatedStream:
    """A stream whose actions take `duration(action, after)` seconds of the running loop's clock.

    One at a time; `pipelined`, each as soon as it may (what takes time is a distance, not a server), still done in
    order. The functions run in the loop's thread at the end of their time.
    """

    def __init__(
        self,
        name: str,
        device: int | None,
        owner: str,
        duration: Duration,
        *,
        pipelined: bool = False,
        num_bytes: Callable[[Action], int] = lambda action: 0,
    ) -> None:
        self.name = name
        self._device = device
        self._owner = owner
        self._duration = duration
        self._pipelined = pipelined
        self._num_bytes = num_bytes
        self._waiting: deque[_Job] = deque()
        self._busy = False
        self._last: Event[Any] = Event.happened(None)

    def submit(
        self, fn: Callable[[], T], *, after: Sequence[Event[Any]] = (), action: Action | None = None
    ) -> Event[T]:
        """As `Stream.submit`. The loop's thread only."""
        event: MadeOn[T] = MadeOn(self._device)
        if self._pipelined:
            previous, self._last = self._last, event
            self._when(after, lambda: self._travel((fn, after, event, action), previous))
        else:
            self._waiting.append((fn, after, event, action))
            self._next()
        return event

    @staticmethod
    def _when(after: Sequence[Event[Any]], then: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def soon(_: Event[None]) -> None:
            loop.call_soon(then)

        all_of([event.settled() for event in after]).add_callback(soon)

    def _next(self) -> None:
        if not self._busy and self._waiting:
            self._busy = True
            job = self._waiting.popleft()
            self._when(job[1], lambda: self._serve(job))

    def _serve(self, job: _Job) -> None:
        loop = asyncio.get_running_loop()
        start_s = loop.time()

        def end() -> None:
            self._busy = False
            self._end(job, start_s)
            self._next()

        loop.call_later(self._seconds(job), end)

    def _travel(self, job: _Job, previous: Event[Any]) -> None:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        loop.call_later(self._seconds(job), lambda: self._when([previous], lambda: self._end(job, start_s)))

    def _seconds(self, job: _Job) -> float:
        failed = any(event.error is not None for event in job[1])
        return 0.0 if failed else self._duration(job[3], job[1])

    def _end(self, job: _Job, start_s: float) -> None:
        fn, after, event, action = job
        error = next((other.error for other in after if other.error is not None), None)
        if error is None:
            try:
                value = fn()
            except BaseException as caught:
                error = caught
            if action is not None and recording():
                failed = "" if error is None else type(error).__name__
                end_s = asyncio.get_running_loop().time()
                record(action, self._owner, self.name, start_s, end_s, self._num_bytes(action), failed)
        if error is not None:
            event.fail(error)
        else:
            event.set(value)


class SimulatedDevice:
    """A device of a cost table: layers run on the host in no time, and their actions take the table's.

    Parameters travel over a link of `links.upload_bytes_per_s`; what one device made reaches another one hop later.
    """

    def __init__(self, index: int, costs: Sequence[LayerCost], links: Links) -> None:
        self.index = index
        self.name = f"simulated:{index}"
        self.torch_device = torch.device("cpu")
        self.shares_host_memory = False
        self._links = links
        self._hops = [0.0, *(links.hop(cost.activation_bytes) for cost in costs)]
        self._seconds = {
            "forward": [0.0, *accumulate(cost.forward_s for cost in costs)],
            "fused": [0.0, *accumulate(cost.fused_s for cost in costs)],
            "recompute": [0.0, *accumulate(cost.recompute_s for cost in costs)],
            "backward": [0.0, *accumulate(cost.backward_s for cost in costs)],
        }
        self._bytes = [0, *accumulate(cost.parameter_bytes for cost in costs)]
        self._uploaded = 0

        def stream(kind: str, duration: Duration, **options: Any) -> Stream:
            return SimulatedStream(f"{self.name}/{kind}", index, self.name, duration, **options)

        self.compute: Stream = stream("compute", self._compute_s)
        self.load: Stream = stream("load", self._load_s, num_bytes=self._load_bytes)
        self.upload: Stream = stream("upload", self._hop_s, pipelined=True)
        self.download: Stream = stream("download", lambda action, after: 0.0)

    def _compute_s(self, action: Action | None, after: Sequence[Event[Any]]) -> float:
        prefix = None if action is None else self._seconds.get(action.kind)
        if prefix is None or action is None or action.layers is None:
            return 0.0
        return prefix[action.layers.stop] - prefix[action.layers.start]

    def _load_s(self, action: Action | None, after: Sequence[Event[Any]]) -> float:
        if action is None:
            return 0.0
        num_bytes = self._load_bytes(action)
        self._uploaded += num_bytes
        return num_bytes / self._links.upload_bytes_per_s

    def _load_bytes(self, action: Action) -> int:
        return 0 if action.layers is None else self._bytes[action.layers.stop] - self._bytes[action.layers.start]

    def _hop_s(self, action: Action | None, after: Sequence[Event[Any]]) -> float:
        makers = {event.device for event in after if isinstance(event, MadeOn)}
        if not makers - {self.index, None}:
            return 0.0
        at = 0 if action is None or action.layers is None else action.layers.start
        return self._hops[at]

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Device.from_host`."""
        return tensor.detach()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Device.to_host`."""
        return tensor.detach()

    def host_memory(self, pin_model: str) -> HostMemory:
        """As `Device.host_memory`."""
        return HostMemory()

    def statistics(self) -> dict[str, int]:
        """As `Device.statistics`: the table's parameter bytes that were uploaded."""
        return {"uploaded_bytes": self._uploaded}

    def close(self) -> None:
        """As `Device.close`."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next scheduled moment instead of waiting for it. It starts at 0.

    For work that waits for timers alone: other threads' work would take no time on this clock.
    """

    def __init__(self) -> None:
        self._virtual_s = 0.0
        super().__init__(_Jumping(self))
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """The virtual time in seconds."""
        return self._virtual_s

    def jump(self, seconds: float) -> None:
        """Let so much virtual time pass."""
        self._virtual_s += seconds


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        if timeout > 0:
            self._loop.jump(timeout)
        return super().select(0)


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, on a `VirtualTimeLoop`."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
