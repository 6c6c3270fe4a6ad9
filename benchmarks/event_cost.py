"""What it costs the host to tell the event loop that a device has passed an action.

    python benchmarks/event_cost.py                 # a device that passes everything at once: the host's share alone
    python benchmarks/event_cost.py --accelerator   # the first accelerator, with empty actions

One at a time: submit an empty action, await it, submit the next; so each goes through the launching thread, the
device's event, the waiting thread and the loop, and the figure is the whole way. Ahead: 64 actions are
submitted before the first is awaited, as the engine does in small; the figure is the host time of all threads
(`time.process_time`) an action. The same for a CPU device's stream, which has no waiting thread. Medians of rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

from roundpipe_async import DevicePool
from roundpipe_async.devices.base import Stream
from roundpipe_async.devices.cpu import WorkerStream
from roundpipe_async.devices.launch import LaunchStream

AHEAD = 64


class Passed:
    """A mark that the device passes at once, and that notes when the waiting thread saw it."""

    seen_s = 0.0

    def synchronize(self) -> None:
        self.seen_s = time.perf_counter()


class InstantLane:
    """A device's stream that takes no time."""

    kind = "instant"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        yield

    def mark(self, timed: bool) -> Any:
        return Passed()

    def wait(self, mark: Any) -> None:
        pass

    def elapsed_s(self, start: Any, end: Any) -> float:
        return 0.0


def nothing() -> None:
    """An empty action."""


async def one_at_a_time_us(stream: Stream, count: int) -> float:
    """Wall time of an action that is awaited before the next is submitted."""
    start_s = time.perf_counter()
    for _ in range(count):
        await stream.submit(nothing)
    return (time.perf_counter() - start_s) / count * 1e6


async def told_us(stream: LaunchStream, count: int) -> float:
    """From the moment that the waiting thread sees the device's event to the next line of the coroutine."""
    late_s = []
    for _ in range(count):
        event: Any = stream.submit(nothing)
        await event
        late_s.append(time.perf_counter() - event.mark.seen_s)
    return statistics.median(late_s) * 1e6


async def ahead_us(stream: Stream, count: int) -> float:
    """Host time of an action, of all threads together, with `AHEAD` submitted before one is awaited."""
    start_s = time.process_time()
    for _ in range(count // AHEAD):
        for event in [stream.submit(nothing) for _ in range(AHEAD)]:
            await event
    return (time.process_time() - start_s) / (count // AHEAD * AHEAD) * 1e6


async def measure(stream: Stream, count: int, rounds: int) -> dict[str, float]:
    """Medians, after a warm-up."""
    found: dict[str, list[float]] = {"one at a time": [], "ahead": []}
    for _ in range(rounds + 1):
        found["one at a time"].append(await one_at_a_time_us(stream, count))
        found["ahead"].append(await ahead_us(stream, count))
    return {name: statistics.median(values[1:]) for name, values in found.items()}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="actions in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--accelerator", action="store_true", help="also the first accelerator")
    options = parser.parse_args()
    launched = LaunchStream("instant:0/compute", "instant:0", InstantLane())
    worker = WorkerStream("cpu:0/compute")
    streams: dict[str, Stream] = {"instant device": launched, "CPU device": worker}
    async with contextlib.AsyncExitStack() as stack:
        if options.accelerator:
            pool = await stack.enter_async_context(DevicePool.accelerators([0]))
            streams[pool.devices[0].name] = pool.devices[0].compute
        for name, stream in streams.items():
            found = await measure(stream, options.count, options.rounds)
            print(
                f"{name}: one at a time {found['one at a time']:.0f} us from submit to await, "
                f"ahead {found['ahead']:.0f} us of host time an action"
            )
    told = [await told_us(launched, options.count) for _ in range(options.rounds)]
    print(f"of these, from the waiting thread to the coroutine: {statistics.median(told):.0f} us")
    launched.close()
    worker.close()


if __name__ == "__main__":
    asyncio.run(main())
