"""An accelerator without an accelerator: `AcceleratorDevice` on a runtime whose device is a part of host memory.

Everything of the real thing runs except the hardware: threads that launch and threads that wait, events that have
their value long before they are done, copies that the host does not wait for. Copies *land* late, in an order that a
seed or the test chooses, and until then their destination holds NaN (integers: a number that no index survives). So a
wait that is missing anywhere shows as NaN, and so does a source that was freed before its copy landed. Layers run on
the CPU as soon as what they wait for has landed; their own end is late again.

With `counting`, every byte that lives on the device is counted (`peak_bytes`), and what layers read must live until
the device has passed them: `violations` tells what did not.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from roundpipe_async.devices.accelerator import AcceleratorDevice
from roundpipe_async.devices.launch import Lane
from roundpipe_async.devices.pool import DevicePool

KIND = "late"
GARBAGE = {torch.bool: True, torch.uint8: 255, torch.int8: -100}


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with what nobody must see."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(GARBAGE.get(tensor.dtype, -30_000))


@dataclass(eq=False)
class LateMark:
    """A point in a lane, passed when everything before it has landed."""

    runtime: LateRuntime
    time_s: float = 0.0
    passed: bool = False
    reads: list[tuple[weakref.ref[Any], str]] = field(default_factory=list)
    """Storages that what came before read, and what they are."""

    def synchronize(self) -> None:
        self.runtime.land_until(self)


class LateCopy:
    """A copy on its way. It keeps neither side alive: who launched it has to."""

    def __init__(self, runtime: LateRuntime, target: torch.Tensor, source: torch.Tensor) -> None:
        self._runtime = runtime
        self._target = _Place(target)
        self._source = _Place(source)

    def land(self) -> None:
        target, source = self._target.tensor(), self._source.tensor()
        if source is None:
            self._runtime.violations.append("the source of a copy was freed before the copy landed")
        elif target is not None:  # a target that was freed: memory that its own stream's next copy overwrites
            target.copy_(source)


class _Place:
    """Where a tensor lies, without keeping its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._layout = (tensor.storage_offset(), tensor.size(), tensor.stride())

    def tensor(self) -> torch.Tensor | None:
        storage = self._storage()
        return None if storage is None else torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)


class LateLane:
    """One stream. What computes runs at once, in the launching thread, when what it waits for has landed."""

    kind = KIND

    def __init__(self, runtime: LateRuntime, name: str) -> None:
        self.name = name
        self.computes = name == "compute"
        self.runtime = runtime
        self.queue: deque[LateCopy | LateMark | tuple[LateMark]] = deque()  # a tuple: wait for the mark
        self.log: list[str] = []
        """What was launched, as `copy`, `mark` and `wait`."""
        self._reads: dict[int, tuple[weakref.ref[Any], str]] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        _here.lane = self
        try:
            if self.computes and self.runtime.counting:
                self._reads = {}
                with Watch(self.runtime, self._reads):
                    yield
            else:
                yield
        finally:
            _here.lane = None

    def mark(self, timed: bool) -> LateMark:
        mark = LateMark(self.runtime, reads=list(self._reads.values()))
        self._put(mark, "mark")
        return mark

    def wait(self, mark: LateMark) -> None:
        if self.computes:
            self.log.append("wait")
            mark.synchronize()
        else:
            self._put((mark,), "wait")

    def elapsed_s(self, start: LateMark, end: LateMark) -> float:
        return end.time_s - start.time_s

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.computes:
            target.copy_(source)
        else:
            self._put(LateCopy(self.runtime, target, source), "copy")

    def _put(self, item: LateCopy | LateMark | tuple[LateMark], name: str) -> None:
        with self.runtime.changed:
            self.queue.append(item)
            self.log.append(name)
            self.runtime.changed.notify_all()

    def head_is_ready(self) -> bool:
        return bool(self.queue) and (not isinstance(self.queue[0], tuple) or self.queue[0][0].passed)


class _Here(threading.local):
    lane: LateLane | None = None


_here = _Here()


class LateRuntime:
    """`Runtime` of the late devices of one pool."""

    kind = KIND

    def __init__(
        self,
        num_devices: int = 1,
        seed: int = 0,
        latency_s: float = 0.0,
        *,
        counting: bool = False,
        by_hand: bool = False,
    ) -> None:
        self.num_devices = num_devices
        self.latency_s = latency_s
        self.counting = counting
        self.by_hand = by_hand
        """Nothing lands but by `land`."""
        self.pins = True
        self.lanes: list[LateLane] = []
        self.changed = threading.Condition()
        self.violations: list[str] = []
        self._random = random.Random(seed)
        self._known: set[int] = set()
        self._freed: deque[tuple[int, int]] = deque()
        self._count_lock = threading.Lock()
        self._live_bytes = 0
        self.peak_bytes = 0

    # ---- Runtime ---------------------------------------------------------------------------------------------------

    def count(self) -> int:
        return self.num_devices

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def lane(self, index: int, name: str) -> Lane:
        lane = LateLane(self, name)
        self.lanes.append(lane)
        return lane

    def on_device(self, like: torch.Tensor, index: int) -> torch.Tensor:
        tensor = self.count_storage(blank(torch.empty_like(like)))
        if _here.lane is not None and not _here.lane.computes:
            tensor.untyped_storage()._uploaded = True  # type: ignore[attr-defined]
        return tensor

    def on_host(self, like: torch.Tensor) -> torch.Tensor:
        return blank(torch.empty_like(like))

    def pinned(self, like: torch.Tensor, register: bool) -> torch.Tensor | None:
        return torch.empty_like(like) if self.pins else None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert _here.lane is not None, "copies are launched on a lane"
        _here.lane.copy(target, source)

    def settle_foreign(self, tensor: torch.Tensor) -> None:
        raise AssertionError("there is nothing foreign here")

    def memory(self, index: int) -> dict[str, int]:
        return {"allocated_bytes": self.live_bytes, "peak_bytes": self.peak_bytes} if self.counting else {}

    # ---- landing ---------------------------------------------------------------------------------------------------

    def land_until(self, mark: LateMark) -> None:
        """Let things land, in any order that the lanes allow, until the mark is passed."""
        while not mark.passed:
            if self.latency_s:
                time.sleep(self._random.random() * self.latency_s)
            with self.changed:
                if not mark.passed and (self.by_hand or not self._land_one()):
                    self.changed.wait()

    def land(self, lane: LateLane, count: int = 1) -> None:
        """By hand: let the next `count` things of a lane land."""
        with self.changed:
            for _ in range(count):
                assert lane.head_is_ready(), "nothing on this lane can land now"
                self._land(lane)

    def _land_one(self) -> bool:
        ready = [lane for lane in self.lanes if lane.head_is_ready()]
        if ready:
            self._land(self._random.choice(ready))
        return bool(ready)

    def _land(self, lane: LateLane) -> None:
        item = lane.queue.popleft()
        if isinstance(item, LateCopy):
            with _disable_current_modes(), torch.no_grad():  # it lands in a thread that does something else
                item.land()
        elif isinstance(item, LateMark):
            for storage, what in item.reads:
                if storage() is None:
                    self.violations.append(f"{what}, which a layer reads, was freed before the device passed the layer")
            item.passed, item.time_s = True, time.perf_counter()
        self.changed.notify_all()

    # ---- counting --------------------------------------------------------------------------------------------------

    def count_storage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor's memory as the device's, until it is freed."""
        if self.counting:
            storage = tensor.untyped_storage()
            key, num_bytes = storage.data_ptr(), storage.nbytes()
            with self._count_lock:
                self._settle_freed()
                if num_bytes and key not in self._known:
                    self._known.add(key)
                    self._live_bytes += num_bytes
                    self.peak_bytes = max(self.peak_bytes, self._live_bytes)
                    # No lock in there: the collector may call it in a thread that holds one.
                    weakref.finalize(storage, self._freed.append, (key, num_bytes)).atexit = False
        return tensor

    @property
    def live_bytes(self) -> int:
        """Bytes that live on the devices now."""
        with self._count_lock:
            self._settle_freed()
            return self._live_bytes

    def _settle_freed(self) -> None:
        while self._freed:
            key, num_bytes = self._freed.popleft()
            self._known.discard(key)
            self._live_bytes -= num_bytes


class Watch(TorchDispatchMode):
    """Sees what a layer reads and makes."""

    def __init__(self, runtime: LateRuntime, reads: dict[int, tuple[weakref.ref[Any], str]]) -> None:
        super().__init__()
        self._runtime = runtime
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and getattr(tensor.untyped_storage(), "_uploaded", False):
                what = f"{tuple(tensor.shape)} in {func}"
                self._reads[tensor.data_ptr()] = (weakref.ref(tensor.untyped_storage()), what)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._runtime.count_storage(tensor)
        return result


def late_devices(runtime: LateRuntime) -> list[AcceleratorDevice]:
    return [AcceleratorDevice(index, runtime) for index in range(runtime.num_devices)]


def late_pool(runtime: LateRuntime) -> DevicePool:
    """A pool of all devices of the runtime."""
    devices: Sequence[AcceleratorDevice] = late_devices(runtime)
    return DevicePool(devices)
