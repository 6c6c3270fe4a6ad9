"""Devices of whatever accelerator torch reports: the only file that names accelerator APIs.

torch's generic streams and events do the work, so a device type that a third party registers is as good as any; the
few calls that only CUDA has (and does better) are in `CudaRuntime`. All that differs between device types, and all
that a test replaces to run this file without one, is a `Runtime`.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, cast

import torch

from roundpipe_async.devices.base import Stream
from roundpipe_async.devices.launch import Lane, LaunchStream, Mark, hold, launching_lane
from roundpipe_async.tracing.trace import copied
from roundpipe_async.versions import HostMemory

_logger = logging.getLogger("roundpipe_async")

CHUNK_BYTES = 16 << 20
"""Parameters are uploaded in pieces of this size, so that an activation that is ready waits for two pieces at most."""
CHUNKS_IN_FLIGHT = 2
"""Pieces that are launched before the device has passed the first: one is copied while the host launches the next."""


class Runtime(Protocol):
    """What the engine needs of a device type."""

    kind: str

    def count(self) -> int:
        """How many devices there are."""
        ...

    def device(self, index: int) -> torch.device:
        """The device's name in torch."""
        ...

    def lane(self, index: int, name: str) -> Lane:
        """A new stream on a device; costs nothing before its first use."""
        ...

    def on_device(self, like: torch.Tensor, index: int) -> torch.Tensor:
        """Memory for a copy of a tensor on the device, from the current stream's share of it."""
        ...

    def on_host(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for a copy of a tensor on the host, pinned if that is possible."""
        ...

    def pinned(self, like: torch.Tensor, register: bool) -> torch.Tensor | None:
        """Pinned host memory for a copy of a tensor, None where there is none.

        `register`: pin ordinary memory, which takes just as much of it, where the device type can.
        """
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device on the current stream; the host does not wait if its side is pinned."""
        ...

    def settle_foreign(self, tensor: torch.Tensor) -> None:
        """Wait until a device tensor that somebody else made has its values."""
        ...

    def memory(self, index: int) -> dict[str, int]:
        """What torch's allocator says of the device, of the whole process."""
        ...


class AcceleratorDevice:
    """One accelerator: streams for computing, for parameters and for other data to it, and for data from it.

    Host memory that data come to is pinned and belongs to torch's allocator for pinned memory, which hands it out again
    when the last tensor on it is gone and the device has passed the copies. Where memory cannot be pinned, copies block
    the thread of their stream and nothing else.
    """

    shares_host_memory = False

    def __init__(self, index: int, runtime: Runtime) -> None:
        self.index = index
        self.torch_device = runtime.device(index)
        self.name = f"{runtime.kind}:{index}"
        self._runtime = runtime
        self._counts_lock = threading.Lock()
        self._counts = dict.fromkeys(("num_uploads", "uploaded_bytes", "num_downloads", "downloaded_bytes"), 0)
        names = ("compute", "upload", "load", "download")
        lanes = {name: runtime.lane(index, name) for name in names}
        self._streams = {
            name: LaunchStream(
                f"{self.name}/{name}", self.name, lanes[name], _walk_graphs_here if name == "compute" else None
            )
            for name in names
        }
        self.compute: Stream = self._streams["compute"]
        self.upload: Stream = self._streams["upload"]
        self.load: Stream = self._streams["load"]
        self.download: Stream = self._streams["download"]
        self._throttle = _Throttle(lanes["load"])

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Device.from_host`. A tensor on an accelerator is copied from there."""
        runtime, source = self._runtime, tensor.detach()
        with torch.no_grad():
            if source.layout != torch.strided or source.device.type not in ("cpu", self.torch_device.type):
                return source.to(self.torch_device)
            if source.device.type != "cpu":
                runtime.settle_foreign(source)
            target = runtime.on_device(source, self.index)
            hold(source)
            if launching_lane() is self._throttle.lane:
                self._copy_in_pieces(target, source)
            else:
                runtime.copy(target, source)
        self._count("upload", source.nbytes)
        return target

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Device.to_host`."""
        runtime, source = self._runtime, tensor.detach()
        with torch.no_grad():
            if source.layout != torch.strided:
                return source.to("cpu")
            target = runtime.on_host(source)
            hold(source)
            runtime.copy(target, source)
        self._count("download", source.nbytes)
        return target

    def host_memory(self, pin_model: str) -> HostMemory:
        """As `Device.host_memory`."""
        return HostMemory() if pin_model == "off" else PinnedMemory(self._runtime, register=pin_model == "register")

    def statistics(self) -> dict[str, int]:
        """As `Device.statistics`; `allocated_bytes`, `peak_bytes` and `reserved_bytes` are torch's, of the process."""
        with self._counts_lock:
            return {**self._counts, **self._runtime.memory(self.index)}

    def close(self) -> None:
        """As `Device.close`."""
        for stream in self._streams.values():
            stream.close()

    def _copy_in_pieces(self, target: torch.Tensor, source: torch.Tensor) -> None:
        step = max(1, CHUNK_BYTES // source.element_size())
        if source.numel() <= step or source.stride() != target.stride():
            self._runtime.copy(target, source)
            self._throttle.copied(source.nbytes)
            return
        # Dense memory in the same order on both sides: the pieces need no shape.
        flat_target = target.as_strided((target.numel(),), (1,))
        flat_source = source.as_strided((source.numel(),), (1,))
        for start in range(0, source.numel(), step):
            piece = flat_source[start : start + step]
            self._runtime.copy(flat_target[start : start + step], piece)
            self._throttle.copied(piece.nbytes)

    def _count(self, what: str, num_bytes: int) -> None:
        with self._counts_lock:
            self._counts[f"num_{what}s"] += 1
            self._counts[f"{what}ed_bytes"] += num_bytes
        copied(num_bytes)


class _Throttle:
    """Keeps at most `CHUNKS_IN_FLIGHT` pieces of parameters on their way, so that what is uploaded beside them never
    waits for a whole stage. Of the lane's launching thread."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._marks: deque[Mark] = deque()
        self._unmarked_bytes = 0

    def copied(self, num_bytes: int) -> None:
        """Note a copy that was launched; block while too much is on its way."""
        self._unmarked_bytes += num_bytes
        if self._unmarked_bytes >= CHUNK_BYTES:
            self._unmarked_bytes = 0
            self._marks.append(self.lane.mark(timed=False))
            if len(self._marks) >= CHUNKS_IN_FLIGHT:
                self._marks.popleft().synchronize()


def _walk_graphs_here() -> None:
    # Backward in the calling thread, as on the CPU: hooks see the caller's context variables, layers their own thread
    # state, and no thread that the device's other users share is kept busy.
    torch.autograd.set_multithreading_enabled(False)


# ---- pinned memory --------------------------------------------------------------------------------------------------


class PinnedMemory(HostMemory):
    """Parameter versions in memory that a device reads by itself, while the host does something else."""

    def __init__(self, runtime: Runtime, register: bool) -> None:
        self._runtime = runtime
        self._register = register
        self._possible = True

    def home(self, tensor: torch.Tensor) -> torch.Tensor:
        """A pinned copy, or the tensor itself where it is pinned or cannot be."""
        if tensor.device.type != "cpu" or tensor.is_pinned():
            return tensor
        copy = self._pinned(tensor)
        return tensor if copy is None else copy.copy_(tensor)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned memory where that is possible."""
        pinned = self._pinned(tensor)
        return torch.empty_like(tensor) if pinned is None else pinned

    def _pinned(self, like: torch.Tensor) -> torch.Tensor | None:
        if not self._possible or like.layout != torch.strided:
            return None
        pinned = self._runtime.pinned(like, self._register)
        self._possible = pinned is not None
        return pinned


class _Region(mmap.mmap):
    """Pages that belong to one tensor. A subclass, so that who watches its end is told before the pages go."""


def registered_like(
    like: torch.Tensor, register: Callable[[int, int], int], unregister: Callable[[int], object]
) -> torch.Tensor | int:
    """Memory for a copy of `like` in whole pages of its own, pinned by `register(address, bytes)`, which returns 0 or
    an error code; `unregister(address)` before they go. Gives the error code where it fails."""
    num_bytes = -(-like.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    region = _Region(-1, num_bytes)
    flat = torch.frombuffer(region, dtype=like.dtype, count=like.numel())
    code = register(flat.data_ptr(), num_bytes)
    if code:
        return code
    weakref.finalize(region, unregister, flat.data_ptr()).atexit = False
    layout = torch.empty_like(like, device="meta")
    return flat.as_strided(layout.shape, layout.stride())


# ---- torch's runtimes -----------------------------------------------------------------------------------------------


class TorchLane:
    """A `torch.Stream`, made at its first use."""

    def __init__(self, runtime: TorchRuntime, index: int, priority: int) -> None:
        self.kind = runtime.kind
        self._runtime = runtime
        self._index = index
        self._priority = priority
        self._stream: Any = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """As `Lane.entered`: the thread's device and stream are those of the lane, whatever was current before."""
        torch.accelerator.set_device_index(self._index)
        if self._stream is None:
            self._stream = self._runtime.new_stream(self._index, self._priority)
        torch.accelerator.set_stream(self._stream)
        yield  # the thread belongs to the lane: nothing else runs in it, so nothing is put back

    def mark(self, timed: bool) -> Mark:
        """As `Lane.mark`."""
        event = self._runtime.new_event(self._index, timed)
        event.record(self._stream)
        return cast(Mark, event)

    def wait(self, mark: Mark) -> None:
        """As `Lane.wait`."""
        self._stream.wait_event(mark)

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        """As `Lane.elapsed_s`."""
        return float(cast(Any, start).elapsed_time(end)) / 1e3


class TorchRuntime:
    """`Runtime` in torch's generic terms, for any accelerator."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._logged: set[str] = set()

    def count(self) -> int:
        """As `Runtime.count`."""
        return torch.accelerator.device_count()

    def device(self, index: int) -> torch.device:
        """As `Runtime.device`."""
        return torch.device(self.kind, index)

    def lane(self, index: int, name: str) -> Lane:
        """As `Runtime.lane`."""
        return TorchLane(self, index, priority=-1 if name in ("upload", "download") else 0)

    def new_stream(self, index: int, priority: int) -> Any:
        """A stream; negative priorities go first. A device type that has one stream only works in that, in order."""
        try:
            return torch.Stream(self.device(index), priority=priority)
        except (NotImplementedError, RuntimeError) as error:
            self._log(f"{self.kind} makes no streams, so transfers do not overlap with computing: {error}")
            return torch.accelerator.current_stream(self.device(index))

    def new_event(self, index: int, timed: bool) -> Any:
        """An event to record once."""
        return torch.Event(self.device(index), enable_timing=timed)

    def on_device(self, like: torch.Tensor, index: int) -> torch.Tensor:
        """As `Runtime.on_device`."""
        return torch.empty_like(like, device=self.device(index), pin_memory=False)

    def on_host(self, like: torch.Tensor) -> torch.Tensor:
        """As `Runtime.on_host`."""
        pinned = self.pinned(like, register=False)
        return torch.empty_like(like, device="cpu") if pinned is None else pinned

    def pinned(self, like: torch.Tensor, register: bool) -> torch.Tensor | None:
        """As `Runtime.pinned`."""
        if register:
            self._log("pin_model='register' needs CUDA: memory is pinned by torch's allocator, as with 'alloc'")
        try:
            return torch.empty_like(like, device="cpu", pin_memory=True)
        except RuntimeError as error:
            self._log(f"host memory is not pinned, so transfers are slower and block their thread: {error}")
            return None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """As `Runtime.copy`."""
        host = source if source.device.type == "cpu" else target
        target.copy_(source, non_blocking=host.device.type != "cpu" or host.is_pinned())

    def settle_foreign(self, tensor: torch.Tensor) -> None:
        """As `Runtime.settle_foreign`."""
        torch.accelerator.synchronize(tensor.device)

    def memory(self, index: int) -> dict[str, int]:
        """As `Runtime.memory`."""
        try:
            found = torch.accelerator.memory_stats(index)
        except (AttributeError, NotImplementedError, RuntimeError):
            return {}  # a device type whose allocator keeps no count
        names = {
            "allocated_bytes": "allocated_bytes.all.current",
            "peak_bytes": "allocated_bytes.all.peak",
            "reserved_bytes": "reserved_bytes.all.current",
        }
        return {name: int(found[key]) for name, key in names.items() if key in found}

    def _log(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            _logger.warning(message)


class CudaRuntime(TorchRuntime):
    """`Runtime` with what CUDA (and ROCm under its name) does better."""

    def new_stream(self, index: int, priority: int) -> Any:
        """As `TorchRuntime.new_stream`."""
        return torch.cuda.Stream(index, priority=priority)  # type: ignore[no-untyped-call]

    def new_event(self, index: int, timed: bool) -> Any:
        """As `TorchRuntime.new_event`; who waits for it sleeps, where the generic event keeps a core busy."""
        return torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]

    def settle_foreign(self, tensor: torch.Tensor) -> None:
        """As `Runtime.settle_foreign`; CUDA's users work on the device's default stream unless they say otherwise."""
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream(tensor.device))

    def pinned(self, like: torch.Tensor, register: bool) -> torch.Tensor | None:
        """As `Runtime.pinned`."""
        if not register or not like.numel():
            return super().pinned(like, register=False)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        pinned = registered_like(
            like, lambda address, size: int(runtime.cudaHostRegister(address, size, 0)), runtime.cudaHostUnregister
        )
        if isinstance(pinned, torch.Tensor):
            return pinned
        self._log(f"pin_model='register': cudaHostRegister failed with {pinned}; memory is pinned as with 'alloc'")
        # The failure stays behind as CUDA's last error, and the next kernel would be blamed for it: let it be this one.
        with suppress(RuntimeError):
            torch.zeros(1, device=self.kind)
        return super().pinned(like, register=False)


def available() -> bool:
    """Whether torch reports an accelerator. Probes at the call."""
    return torch.accelerator.is_available() and torch.accelerator.device_count() > 0


def torch_runtime() -> TorchRuntime:
    """The accelerator that torch reports; RuntimeError where there is none. Probes at the call."""
    found = torch.accelerator.current_accelerator() if available() else None
    if found is None:
        raise RuntimeError(
            f"torch {torch.__version__} reports no accelerator (torch.accelerator.is_available() is False): install a "
            "torch built for yours, check its driver and CUDA_VISIBLE_DEVICES, or use DevicePool.cpu()"
        )
    return CudaRuntime(found.type) if found.type == "cuda" else TorchRuntime(found.type)


def accelerator_devices(indices: Sequence[int] | None, runtime: Runtime | None = None) -> list[AcceleratorDevice]:
    """The devices with these indices, in this order; None: all."""
    runtime = runtime or torch_runtime()
    count = runtime.count()
    chosen = list(range(count) if indices is None else indices)
    for index in chosen:
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"indices of accelerators are integers, not {index!r}")
        if not 0 <= index < count:
            raise ValueError(
                f"there is no accelerator {index}: torch reports {count} of type {runtime.kind!r}, numbered from 0 "
                "(CUDA_VISIBLE_DEVICES hides and renumbers them)"
            )
    if not chosen:
        raise ValueError("indices is empty: name at least one accelerator, or leave it out for all of them")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"an accelerator is named twice in {chosen}: a pool uses each once")
    return [AcceleratorDevice(index, runtime) for index in chosen]
