"""A pool of devices that any number of models share, and the two host streams that belong to it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from types import TracebackType

import torch

from roundpipe_async.devices import accelerator
from roundpipe_async.devices.base import Device, Line, Stream
from roundpipe_async.devices.cpu import CpuDevice, WorkerStream
from roundpipe_async.devices.simulated import SimulatedDevice, SimulatedStream
from roundpipe_async.errors import ClosedError
from roundpipe_async.scheduling.plan import LayerCost
from roundpipe_async.scheduling.simulate import Links
from roundpipe_async.versions import HostMemory

_logger = logging.getLogger("roundpipe_async")

DEVICES_VARIABLE = "ROUNDPIPE_ASYNC_DEVICES"
"""Environment variable that overrides the default pool: `cpu:2`, `accelerator`, `accelerator:0,1`."""


class DevicePool:
    """Devices to run stages on, shared by any number of models and event loops, closed by whoever made it.

    Use as `async with DevicePool.cpu(2) as pool: model = RoundPipe(..., devices=pool)`, or call `aclose`. A pool that
    nobody closes ends with the process.
    """

    def __init__(
        self, devices: Sequence[Device], *, host: Stream | None = None, optimizer: Stream | None = None
    ) -> None:
        if not devices:
            raise ValueError("a pool needs at least one device")
        self.devices = tuple(devices)
        self.host: Stream = host or WorkerStream("host")
        """Splits inputs, merges outputs and commits gradients."""
        self.optimizer: Stream = optimizer or WorkerStream("optimizer")
        """Runs optimizer steps and publishes parameters: one stream a pool, first in, first out."""
        # A stage run needs two things of its device, each in the order of the schedule: room for its parameters (two
        # runs hold theirs at a time: one computes, the next uploads) and then its turn to submit work.
        self.rooms = tuple(Line(2) for _ in self.devices)
        self.turns = tuple(Line(1) for _ in self.devices)
        self._next_device = 0
        self._closed = False
        self._lock = threading.Lock()

    @classmethod
    def cpu(cls, num_devices: int = 2, intra_op_threads: int | None = None, *, own_memory: bool = False) -> DevicePool:
        """`num_devices` virtual devices on the CPU.

        Each uses `intra_op_threads` threads inside an operation (default: the caller's `torch.get_num_threads()`
        divided by `num_devices`, at least 1). With `own_memory` tensors are copied to and from the devices as on an
        accelerator.
        """
        if num_devices < 1:
            raise ValueError(f"num_devices must be at least 1, got {num_devices}")
        if intra_op_threads is None:
            intra_op_threads = max(1, torch.get_num_threads() // num_devices)
        elif intra_op_threads < 1:
            raise ValueError(f"intra_op_threads must be at least 1, got {intra_op_threads}")
        return cls([CpuDevice(index, intra_op_threads, own_memory) for index in range(num_devices)])

    @classmethod
    def accelerators(cls, indices: Sequence[int] | None = None) -> DevicePool:
        """The accelerators with these indices, in this order; None: every one that torch reports.

        RuntimeError where torch reports none, ValueError for an index that does not exist.
        """
        return cls(accelerator.accelerator_devices(indices))

    @classmethod
    def simulated(
        cls, num_devices: int, costs: Sequence[LayerCost], links: Links | None = None, *, step_s: float = 0.0
    ) -> DevicePool:
        """`num_devices` devices that only take time: a model of as many layers as `costs` runs on them as it would on
        devices with these costs and `links`; an optimizer step takes `step_s`.

        On `devices.simulated.VirtualTimeLoop` no real time passes; `trace()` records the virtual times.
        """
        if num_devices < 1:
            raise ValueError(f"num_devices must be at least 1, got {num_devices}")
        links = links or Links()
        return cls(
            [SimulatedDevice(index, costs, links) for index in range(num_devices)],
            host=SimulatedStream("host", None, "host", lambda action, after: 0.0),
            optimizer=SimulatedStream(
                "optimizer",
                None,
                "host",
                lambda action, after: step_s if action is not None and action.kind == "step" else 0.0,
            ),
        )

    @classmethod
    def default(cls) -> DevicePool:
        """The process's default pool, made at first use: every accelerator that torch reports, else CPU devices.

        The environment variable `ROUNDPIPE_ASYNC_DEVICES` overrides it. Closing it is allowed; the next use makes
        a new one.
        """
        global _default
        with _default_lock:
            if _default is None or _default.closed:
                _default = _make_default(os.environ.get(DEVICES_VARIABLE))
            return _default

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""
        return self._closed

    def check_open(self) -> None:
        """Raise ClosedError if the pool was closed."""
        if self._closed:
            raise ClosedError("this device pool is closed; make a new one, or leave `devices` out for the default")

    def host_memory(self, pin_model: str) -> HostMemory:
        """Where the parameters of models live that run in this pool, by `RoundPipe`'s `pin_model`."""
        return self.devices[0].host_memory(pin_model)

    def statistics(self) -> list[dict[str, int]]:
        """What each device did so far: see `Device.statistics`."""
        return [device.statistics() for device in self.devices]

    def take_devices(self, count: int) -> int:
        """The index of the device at which the next `count` stage runs of a round robin start; moves it on."""
        with self._lock:
            first = self._next_device
            self._next_device = (first + count) % len(self.devices)
            return first

    def close(self) -> None:
        """Let what was submitted finish, then end the pool's threads. Does not wait; closing twice is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for device in self.devices:
            device.close()
        for stream in (self.host, self.optimizer):
            if isinstance(stream, WorkerStream):
                stream.close()

    async def aclose(self) -> None:
        """Wait for what was submitted, then end the pool's threads. Closing twice is fine."""
        if not self._closed:
            last = [stream.submit(_nothing) for stream in self._streams()]
            for event in last:
                await event
        self.close()

    def _streams(self) -> list[Stream]:
        streams = [self.host, self.optimizer]
        for device in self.devices:
            streams += [device.upload, device.load, device.compute, device.download]
        return streams

    async def __aenter__(self) -> DevicePool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"DevicePool([{', '.join(device.name for device in self.devices)}]{', closed' if self._closed else ''})"


def _nothing() -> None:
    """The last action of a stream that closes."""


_default: DevicePool | None = None
_default_lock = threading.Lock()


def _make_default(wish: str | None) -> DevicePool:
    kind, colon, detail = (wish or "").strip().partition(":")
    try:
        numbers = [int(number) for number in detail.split(",")] if colon else []
    except ValueError:
        numbers = []
    if (kind and kind not in ("cpu", "accelerator")) or (colon and not numbers) or (kind == "cpu" and len(numbers) > 1):
        raise ValueError(
            f"{DEVICES_VARIABLE}={wish!r} is not understood: use cpu, cpu:N, accelerator or accelerator:I,J"
        )
    if kind == "accelerator" or (not kind and accelerator.available()):
        pool = DevicePool.accelerators(numbers or None)
    elif numbers:
        pool = DevicePool.cpu(numbers[0])
    else:
        pool = DevicePool.cpu(max(1, min(2, torch.get_num_threads())))
    _logger.info("default device pool: %r", pool)
    return pool
