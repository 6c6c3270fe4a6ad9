"""What every test may rely on.

- A hung test fails with the stacks of all threads shown (a second, harder limit is in pyproject.toml).
- torch works with one intra-op thread, so that sums are taken in one order and bits can be compared.
- `@pytest.mark.both_loops` runs an async test on asyncio's event loop and on uvloop.
- A test that leaves a task, or an engine thread that no open pool owns, fails.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import inspect
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key

from tests.support.pools import pool_kind  # noqa: F401 - a fixture

HANG_S = 120
CLEANUP_S = 30
LEFTOVER_GRACE_S = 5.0


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


# --- hangs -----------------------------------------------------------------------------------------------------------


@contextmanager
def _watched(item: pytest.Item, phase: str) -> Iterator[None]:
    """Fail the phase of the test after HANG_S with all stacks shown, end the process if even that hangs."""
    stderr = item.config.stash.get(fault_handler_stderr_fd_key, 2)  # the real one, not the captured

    def give_up(signum: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=stderr, all_threads=True)
        faulthandler.dump_traceback_later(CLEANUP_S, file=stderr, exit=True)
        pytest.fail(f"hung in {phase} for {HANG_S} s; the stacks of all threads are on stderr")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    with _watched(item, "setup"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with _watched(item, "the test"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    with _watched(item, "teardown"):
        return (yield)


# --- event loops -----------------------------------------------------------------------------------------------------


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.SelectorEventLoop}
    if item.get_closest_marker("both_loops"):
        uvloop = pytest.importorskip("uvloop")
        factories["uvloop"] = uvloop.new_event_loop
    return factories


# --- leftovers -------------------------------------------------------------------------------------------------------


def pytest_itemcollected(item: pytest.Item) -> None:
    """Async tests also get `_no_task_left`; in sync ones it would make a loop for nothing."""
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function):
        item.fixturenames.insert(0, "_no_task_left")


@pytest.fixture
async def _no_task_left() -> AsyncIterator[None]:
    """No task outlives the test that started it: the engine's have a parent, and the test awaits its own."""
    before = asyncio.all_tasks()
    yield
    deadline = time.monotonic() + LEFTOVER_GRACE_S
    while left := asyncio.all_tasks() - before - {asyncio.current_task()}:
        if time.monotonic() > deadline:
            pytest.fail(f"tasks left running: {sorted(map(repr, left))}")
        await asyncio.sleep(0.01)


_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report


def _engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("roundpipe_async")}


@pytest.fixture(autouse=True)
def _no_thread_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test closes the pools that it makes (or drops them: a collected pool ends its threads).

    The process's default pool is closed here, so that each test that uses it begins with a new one. A test that failed
    is left alone: its traceback keeps alive whatever it made.
    """
    before = _engine_threads()
    yield
    if (pools := sys.modules.get("roundpipe_async.devices.pool")) and pools._default is not None:
        pools._default.close()
    deadline = time.monotonic() + LEFTOVER_GRACE_S
    while (left := _engine_threads() - before) and _failed not in request.node.stash:
        if time.monotonic() > deadline:
            pytest.fail(f"engine threads left running: {sorted(thread.name for thread in left)}")
        gc.collect()
        time.sleep(0.01)
