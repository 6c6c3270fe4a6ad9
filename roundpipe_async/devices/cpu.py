"""Virtual devices on the CPU: worker threads that run the work of a stream one after another.

A CPU device aliases host memory, so uploads and downloads cost nothing; with `own_memory` it copies like an
accelerator does, each way on a thread of its own.
"""

from __future__ import annotations

import atexit
import contextvars
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar

import torch

from roundpipe_async.devices.base import Stream
from roundpipe_async.errors import ClosedError
from roundpipe_async.events import Event
from roundpipe_async.tracing.trace import Action, begin, copied, copied_bytes, record
from roundpipe_async.versions import HostMemory

T = TypeVar("T")

EXIT_PATIENCE_S = 2.0
"""How long a leaving process waits for the actions that run at that moment."""

_Job = tuple[Callable[[], Any], Sequence[Event[Any]], Event[Any], Action | None]


class WorkerStream:
    """A stream whose work one daemon thread runs, first in first out, waiting there for the `after` events.

    The thread starts with the first work. It ends when the stream is closed or garbage. When the process leaves,
    what runs is given `EXIT_PATIENCE_S` to end and what waits is dropped: a daemon thread that is killed inside torch
    would take the process down with it.
    """

    def __init__(self, name: str, *, owner: str = "host", setup: Callable[[], None] | None = None) -> None:
        self.name = name
        self._owner = owner
        self._setup = setup
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()

    def submit(
        self, fn: Callable[[], T], *, after: Sequence[Event[Any]] = (), action: Action | None = None
    ) -> Event[T]:
        """As `Stream.submit`."""
        event: Event[T] = Event()
        with self._lock:
            if self._closed:
                raise ClosedError(f"stream {self.name} is closed: its pool was closed while somebody still used it")
            if self._thread is None:
                self._start()
            self._jobs.put((fn, after, event, action))
        return event

    def close(self) -> None:
        """End the thread after what was submitted. Does not wait; closing twice is fine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)

    def _start(self) -> None:
        jobs = self._jobs
        self._thread = threading.Thread(
            target=_work,
            args=(jobs, self._owner, self.name, self._setup),
            name=f"roundpipe_async {self.name}",
            daemon=True,
        )
        weakref.finalize(self, jobs.put, None).atexit = False
        _Leaving.watch(self._thread, jobs)
        # An empty context: the thread must not keep alive whatever the first caller's context holds.
        contextvars.Context().run(self._thread.start)


def _work(jobs: SimpleQueue[_Job | None], owner: str, name: str, setup: Callable[[], None] | None) -> None:
    # A thread's first look makes the process's number of intra-op threads its own. Without it the first operations may
    # run with the machine's number, and sum in another order.
    torch.get_num_threads()
    if setup is not None:
        setup()
    while (job := jobs.get()) is not None and not _Leaving.now:
        _run(job, owner, name)
        del job  # a finished job must not live until the next one comes


def _run(job: _Job, owner: str, name: str) -> None:
    fn, after, event, action = job
    for other in after:
        if not other.done() and not _Leaving.wait(other):
            return  # the process leaves: nobody will miss this action
        if other.error is not None:
            event.fail(other.error)
            return
    start_s = begin()
    try:
        value = fn()
    except BaseException as error:
        if start_s and action is not None:
            record(action, owner, name, start_s, time.perf_counter(), copied_bytes(), type(error).__name__)
        event.fail(error)
        return
    if start_s and action is not None:
        record(action, owner, name, start_s, time.perf_counter(), copied_bytes())
    event.set(value)


class _Leaving:
    """Ends the workers of a process that leaves."""

    now = False
    _threads: ClassVar[dict[threading.Thread, SimpleQueue[_Job | None]]] = {}
    _gates: ClassVar[dict[threading.Thread, threading.Event]] = {}
    _lock = threading.Lock()

    @classmethod
    def wait(cls, event: Event[Any]) -> bool:
        """Block this worker until `event` is done; False when the process leaves first."""
        gate = cls._gates[threading.current_thread()] = threading.Event()
        event.add_callback(lambda _: gate.set())
        while not event.done() and not cls.now:
            gate.wait()
        return event.done()

    @classmethod
    def watch(cls, thread: threading.Thread, jobs: SimpleQueue[_Job | None]) -> None:
        with cls._lock:
            if not cls._threads:
                atexit.unregister(cls.leave)
                atexit.register(cls.leave)
            for other in [other for other in cls._threads if other.ident is not None and not other.is_alive()]:
                del cls._threads[other]
                cls._gates.pop(other, None)
            cls._threads[thread] = jobs

    @classmethod
    def leave(cls) -> None:
        cls.now = True
        deadline = time.monotonic() + EXIT_PATIENCE_S
        for jobs in cls._threads.values():
            jobs.put(None)
        for gate in list(cls._gates.values()):
            gate.set()
        for thread in cls._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def run_in_thread(fn: Callable[[], T], name: str) -> Event[T]:
    """Run one function that may block for long in a daemon thread of its own; the event gives its outcome."""
    stream = WorkerStream(name)
    event = stream.submit(fn)
    stream.close()
    return event


_intra_op_lock = threading.Lock()


def set_intra_op_threads(num_threads: int) -> None:
    """Let torch use `num_threads` threads for operations of the calling thread, and of no other.

    torch keeps the number per thread, but setting it also changes what threads that have not called torch yet will
    pick up. So the old default is put back, by a thread that exists for nothing else.
    """
    with _intra_op_lock:
        default = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        if default != num_threads:
            restorer = threading.Thread(target=torch.set_num_threads, args=(default,), daemon=True)
            restorer.start()
            restorer.join()


class CpuDevice:
    """A share of the CPU: one compute thread that may use `intra_op_threads` threads inside an operation."""

    def __init__(self, index: int, intra_op_threads: int, own_memory: bool = False) -> None:
        self.index = index
        self.name = f"cpu:{index}"
        self.torch_device = torch.device("cpu")
        self.shares_host_memory = not own_memory

        self._counts_lock = threading.Lock()
        self._counts = dict.fromkeys(("num_uploads", "uploaded_bytes", "num_downloads", "downloaded_bytes"), 0)
        self._streams: list[WorkerStream] = []

        def stream(kind: str, threads: int) -> WorkerStream:
            worker = WorkerStream(f"{self.name}/{kind}", owner=self.name, setup=lambda: set_intra_op_threads(threads))
            self._streams.append(worker)
            return worker

        self.compute: Stream = stream("compute", intra_op_threads)
        # Without memory of its own an upload only wraps parameters: not worth a thread.
        self.upload: Stream = stream("upload", 1) if own_memory else self.compute
        self.load: Stream = stream("load", 1) if own_memory else self.compute
        self.download: Stream = stream("download", 1) if own_memory else self.compute

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Device.from_host`."""
        return tensor if self.shares_host_memory else self._copy(tensor, "upload")

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Device.to_host`."""
        return tensor if self.shares_host_memory else self._copy(tensor, "download")

    def _copy(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        with self._counts_lock:
            self._counts[f"num_{what}s"] += 1
            self._counts[f"{what}ed_bytes"] += tensor.nbytes
        copied(tensor.nbytes)
        return tensor.detach().clone()

    def host_memory(self, pin_model: str) -> HostMemory:
        """As `Device.host_memory`: nothing is pinned for a CPU."""
        return HostMemory()

    def statistics(self) -> dict[str, int]:
        """As `Device.statistics`; without memory of its own nothing is copied or counted."""
        with self._counts_lock:
            return dict(self._counts)

    def close(self) -> None:
        """As `Device.close`."""
        for stream in self._streams:
            stream.close()
