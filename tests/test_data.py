"""prefetch: any iterable, ahead of a coroutine, in its own thread, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import io
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm.asyncio import tqdm

from roundpipe_async import data
from roundpipe_async.data import Prefetch, prefetch

WAIT_S = 60.0


class Source:
    """Numbers, each made when the test opens the gate (or at once), with a record of all that happened."""

    def __init__(self, count: int = 100, *, gated: bool = False, fail_at: int | None = None) -> None:
        self.count, self.gated, self.fail_at = count, gated, fail_at
        self.gate = threading.Semaphore(0)
        self.made = 0
        self.making = threading.Semaphore(0)  # released whenever a `__next__` begins
        self.waits = threading.Event()
        self.closed = threading.Event()
        self.threads: set[threading.Thread] = set()
        self.passes = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        self.closed.clear()
        self.threads.add(threading.current_thread())
        try:
            for number in range(self.count):
                self.threads.add(threading.current_thread())
                self.making.release()
                if self.gated:
                    assert self.gate.acquire(timeout=WAIT_S)
                if number == self.fail_at:
                    raise LookupError(number)
                self.made += 1
                yield number
        finally:
            self.threads.add(threading.current_thread())
            self.closed.set()


async def until(event: threading.Event) -> None:
    """Wait for a thread's event without holding the loop."""
    with ThreadPoolExecutor(1) as pool:
        assert await asyncio.get_running_loop().run_in_executor(pool, event.wait, WAIT_S)


async def began(source: Source, count: int) -> None:
    """Wait until `count` further items have been begun."""
    with ThreadPoolExecutor(1) as pool:
        for _ in range(count):
            assert await asyncio.get_running_loop().run_in_executor(pool, lambda: source.making.acquire(timeout=WAIT_S))


# ---- what it gives --------------------------------------------------------------------------------------------------


@pytest.mark.both_loops
@pytest.mark.parametrize("buffer", [1, 2, 7, 1000])
async def test_all_items_in_order_in_every_epoch_from_one_own_thread(buffer: int) -> None:
    source = Source()
    batches = prefetch(source, buffer)
    for epoch in (1, 2, 3):
        assert [item async for item in batches] == list(range(100))
        assert source.passes == epoch
        await until(source.closed)
    assert threading.current_thread() not in source.threads
    assert len(source.threads) == 3
    assert all(thread.name.startswith("roundpipe_async") and thread.daemon for thread in source.threads)


@pytest.mark.both_loops
async def test_iterables_of_all_kinds() -> None:
    class OldStyle:
        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise IndexError
            return index

    for iterable in ([0, 1, 2], range(3), iter([0, 1, 2]), (i for i in range(3)), {0: 1, 1: 1, 2: 1}, OldStyle()):
        assert [item async for item in prefetch(iterable)] == [0, 1, 2]
    assert [item async for item in prefetch([])] == []
    assert [item async for item in prefetch([None, None])] == [None, None]
    rows = torch.arange(12.0).reshape(6, 2)
    for workers in (0, 2):
        got = [batch async for (batch,) in prefetch(DataLoader(TensorDataset(rows), batch_size=2, num_workers=workers))]
        assert torch.equal(torch.cat(got), rows)


async def test_a_seeded_loader_keeps_the_order_of_the_plain_loop() -> None:
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=4, shuffle=True)
    torch.manual_seed(3)
    plain = [batch.tolist() for _ in range(2) for (batch,) in loader]
    torch.manual_seed(3)
    assert [batch.tolist() for _ in range(2) async for (batch,) in prefetch(loader)] == plain


async def test_length_truth_and_tqdm() -> None:
    assert len(prefetch(Source(7))) == 7
    endless = prefetch(iter([1]))
    assert endless
    assert prefetch([])
    with pytest.raises(TypeError):
        len(endless)
    shown = tqdm(prefetch(Source(7)), file=(sink := io.StringIO()))
    assert shown.total == 7
    assert [item async for item in shown] == list(range(7))
    assert "7/7" in sink.getvalue()


@pytest.mark.both_loops
async def test_never_more_than_buffer_items_ahead() -> None:
    source = Source()
    iteration = aiter(prefetch(source, 3))
    assert source.made == 0, "nothing runs before the first item is asked for"
    assert await anext(iteration) == 0
    for taken in range(1, 20):
        await began(source, 4 if taken == 1 else 1)  # as many as it may have begun
        assert source.made <= taken + 3
        assert await anext(iteration) == taken
    await iteration.aclose()
    assert 20 <= source.made <= 23


async def test_the_first_item_arrives_before_the_second_is_made() -> None:
    source = Source(3, gated=True)
    source.gate.release()
    iteration = aiter(prefetch(source, 2))
    assert await anext(iteration) == 0
    assert source.made == 1
    source.gate.release(2)
    assert [item async for item in iteration] == [1, 2]
    assert await anext(iteration, "over") == "over"


@pytest.mark.both_loops
async def test_a_slow_iterator_does_not_hold_the_loop() -> None:
    """The iterator waits for the loop itself: were it run on the loop, nothing would ever go on."""
    source = Source(3, gated=True)
    beats = 0

    async def heart() -> None:
        nonlocal beats
        for _ in range(3):
            await began(source, 1)
            for _ in range(100):
                await asyncio.sleep(0)
                beats += 1
            source.gate.release()

    heartbeat = asyncio.create_task(heart())
    assert [item async for item in prefetch(source, 1)] == [0, 1, 2]
    await heartbeat
    assert beats == 300


async def test_the_loops_default_executor_is_not_needed() -> None:
    loop = asyncio.get_running_loop()
    release = threading.Event()
    executor = ThreadPoolExecutor(1)
    loop.set_default_executor(executor)
    busy = loop.run_in_executor(None, release.wait, WAIT_S)
    assert [item async for item in prefetch(range(5))] == list(range(5))
    release.set()
    await busy


async def test_context_variables_of_the_caller_are_seen_and_not_changed() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")

    def look() -> Iterator[str]:
        yield variable.get()
        variable.set("changed inside")
        yield variable.get()

    variable.set("the caller's")
    assert [item async for item in prefetch(look())] == ["the caller's", "changed inside"]
    assert variable.get() == "the caller's"


async def test_iterations_are_independent() -> None:
    source = Source(50)
    batches = prefetch(source)

    async def consume() -> list[int]:
        got = []
        async for item in batches:
            got.append(item)
            await asyncio.sleep(0)
        return got

    assert await asyncio.gather(consume(), consume(), consume()) == [list(range(50))] * 3
    assert source.passes == 3


async def test_anext_on_the_object_goes_on_with_one_iteration() -> None:
    batches = prefetch(Source(3))
    assert [await anext(batches) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(StopAsyncIteration):
        await anext(batches)
    assert await anext(batches) == 0
    await batches.aclose()
    assert await anext(batches) == 0
    await batches.aclose()


def test_several_loops_one_after_another() -> None:
    batches = prefetch(Source(10))

    async def epoch() -> list[int]:
        return [item async for item in batches]

    for _ in range(3):
        assert asyncio.run(epoch()) == list(range(10))


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.both_loops
async def test_an_error_comes_as_itself_after_the_items_before_it() -> None:
    source = Source(fail_at=3)
    got = []
    with pytest.raises(LookupError, match="3") as caught:
        async for item in prefetch(source):
            got.append(item)
    assert got == [0, 1, 2]
    assert any(entry.name == "__iter__" for entry in caught.traceback), "the traceback shows where"
    await until(source.closed)


async def test_errors_of_iter_and_odd_errors() -> None:
    class Broken:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def __iter__(self) -> Iterator[int]:
            raise self.error

    for error in (KeyError("x"), SystemExit(3), asyncio.CancelledError(), GeneratorExit()):
        with pytest.raises(type(error)) as caught:
            async for _ in prefetch(Broken(error)):
                pass
        assert caught.value is error


def test_wrong_arguments_are_refused_at_once() -> None:
    async def asynchronous() -> Any:
        yield 1

    with pytest.raises(TypeError, match="needs an iterable, not int"):
        prefetch(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="asynchronous already"):
        prefetch(asynchronous())
    for buffer in (0, -1):
        with pytest.raises(ValueError, match="at least 1"):
            prefetch([], buffer)
    for odd in (True, 1.5, None):
        with pytest.raises(TypeError, match="whole number"):
            prefetch([], odd)  # type: ignore[arg-type]


async def test_an_error_keeps_nothing_alive_but_its_own_frames() -> None:
    class Items:
        def __iter__(self) -> Items:
            return self

        def __next__(self) -> int:
            raise fresh_error()

    def fresh_error() -> LookupError:
        return LookupError()

    gc.disable()
    try:
        items = Items()
        gone = weakref.ref(items)
        try:
            async for _ in prefetch(items):
                pass
        except LookupError:
            pass
        del items
        for _ in range(1000):
            if gone() is None:
                break
            await asyncio.sleep(0.001)
        assert gone() is None
    finally:
        gc.enable()


# ---- early ends -----------------------------------------------------------------------------------------------------


@pytest.mark.both_loops
async def test_break_ends_the_thread_and_closes_the_generator() -> None:
    source = Source()
    async for item in prefetch(source):
        if item == 5:
            break
    await until(source.closed)
    assert source.made <= 8
    (thread,) = source.threads
    thread.join(WAIT_S)
    assert not thread.is_alive()


@pytest.mark.both_loops
async def test_leaving_the_context_waits_until_everything_is_closed() -> None:
    source = Source()
    async with prefetch(source) as batches:
        assert isinstance(batches, Prefetch)
        async for item in batches:
            if item == 5:
                break
        kept = aiter(batches)
        await anext(kept)
        assert await anext(batches) == 0
    assert source.closed.is_set()
    assert source.passes == 3
    assert await anext(batches, "new") == 0
    await batches.aclose()
    assert source.closed.is_set()
    assert await anext(kept, "over") == "over"
    await batches.aclose()


@pytest.mark.both_loops
async def test_aclose_waits_for_the_item_in_the_making_and_wakes_who_waits_for_it() -> None:
    source = Source(gated=True)
    batches = prefetch(source)
    iteration = aiter(batches)
    waiting = asyncio.ensure_future(anext(iteration, "over"))
    await began(source, 1)
    closing = asyncio.create_task(batches.aclose())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not closing.done()
    assert not source.closed.is_set()
    source.gate.release()
    await closing
    assert source.closed.is_set()
    assert await waiting == "over"
    assert source.made == 1


@pytest.mark.both_loops
async def test_a_cancelled_consumer_leaves_at_once_and_the_thread_ends() -> None:
    source = Source(gated=True)

    async def consume() -> None:
        async for _ in prefetch(source):
            pass

    task = asyncio.create_task(consume())
    await began(source, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not source.closed.is_set(), "the consumer did not wait for the item in the making"
    source.gate.release()
    await until(source.closed)
    assert source.made == 1


async def test_a_lost_iteration_ends_its_thread() -> None:
    source = Source()
    iteration = aiter(prefetch(source))
    await anext(iteration)
    del iteration
    await until(source.closed)
    cycle: list[Any] = [aiter(prefetch(source))]
    cycle.append(cycle)
    await anext(cycle[0])
    source.closed.clear()
    del cycle
    gc.collect()
    await until(source.closed)


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_the_end_of_the_loop_ends_the_thread_of_a_held_iteration(kind: str) -> None:
    source = Source()
    held: list[Any] = []

    async def main() -> None:
        held.append(aiter(prefetch(source)))
        await anext(held[0])

    factory = pytest.importorskip("uvloop").new_event_loop if kind == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    assert source.closed.wait(WAIT_S)

    async def later() -> Any:
        return await anext(held[0], "over")

    assert asyncio.run(later()) == "over"


async def test_an_iteration_never_begun_costs_no_thread() -> None:
    source = Source()
    before = threading.active_count()
    iteration = aiter(prefetch(source))
    assert threading.active_count() == before
    await iteration.aclose()
    await iteration.aclose()
    assert await anext(iteration, "over") == "over"
    assert source.passes == 0


async def test_an_error_in_closing_is_raised_by_aclose(caplog: pytest.LogCaptureFixture) -> None:
    def source() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            raise OSError("cannot close")

    iteration = aiter(prefetch(source()))
    await anext(iteration)
    with pytest.raises(OSError, match="cannot close"):
        await iteration.aclose()
    assert "closing the iterator" in caplog.text


async def test_the_workers_of_a_loader_are_shut_down() -> None:
    loader = DataLoader(TensorDataset(torch.arange(100)), batch_size=2, num_workers=2)
    workers: list[Any] = []

    class Spy:
        def __iter__(self) -> Iterator[Any]:
            iterator = iter(loader)
            workers.extend(iterator._workers)  # type: ignore[attr-defined]
            return iterator

    async with prefetch(Spy()) as batches:
        async for _ in batches:
            break
    assert len(workers) == 2
    assert not any(worker.is_alive() for worker in workers)


async def test_an_item_is_not_held_once_it_was_given() -> None:
    class Item:
        pass

    iteration = aiter(prefetch((Item() for _ in range(3)), 1))
    item = await anext(iteration)
    gone = weakref.ref(item)
    del item
    second = await anext(iteration)
    assert gone() is None
    del second
    await iteration.aclose()


@pytest.mark.parametrize(
    "end",
    ["", "sys.exit(0)", "del batches", "batches = iter(loader)"],
)
def test_a_process_with_an_iteration_open_ends_cleanly(end: str) -> None:
    program = f"""
import asyncio, sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
from roundpipe_async.data import prefetch

loader = DataLoader(TensorDataset(torch.arange(1000.0)), batch_size=2, num_workers=1)
def matmuls():
    while True:
        yield torch.randn(256, 256) @ torch.randn(256, 256)
def blocks():
    yield 1
    time.sleep(1000)

loop = asyncio.new_event_loop()
batches = [aiter(prefetch(source, 50)) for source in (loader, matmuls(), range(10**9), blocks())]
for batch in batches:
    loop.run_until_complete(anext(batch))
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=WAIT_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    assert not done.stderr or "unclosed event loop" in done.stderr


def test_importing_starts_nothing() -> None:
    assert data._at_exit is not None
    program = "import threading, roundpipe_async.data as d; assert threading.active_count() == 1; " \
              "assert not d._at_exit._registered"  # fmt: skip
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=WAIT_S)
