"""Runs a schedule: one coroutine for each stage run, awaiting the events of the work that it submits.

A run is *enqueued* in the schedule's order, when what its layers need of the host is there. Enqueued, it holds places
in two lines of its device, room for its parameters and the turn to submit; since it waits there only for runs that
were enqueued before it, of whatever call or model, no two runs ever wait for each other. Its coroutine then submits
the work of each microbatch behind the events of its inputs and awaits what it submitted, two microbatches late: so
the device never waits for the event loop, the host never runs far ahead, and what a coroutine has dropped is free.

When anything raises or the call is cancelled, no further layer starts, what runs on is waited for, and only then the
call ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import anyio
import torch

from roundpipe_async import tree
from roundpipe_async.boundary import Boundary
from roundpipe_async.devices.base import Device, Place, Stream
from roundpipe_async.devices.pool import DevicePool
from roundpipe_async.events import Event
from roundpipe_async.failures import place_of
from roundpipe_async.scheduling.schedule import Schedule, StageRun
from roundpipe_async.stage import Abandoned, CallWork, Fused, Gradients, Passed, StageWork, move
from roundpipe_async.store import CallTicket, RunGradients, Store
from roundpipe_async.tracing.trace import Action

T = TypeVar("T")

RUN_AHEAD = 2
"""Microbatches that a stage run may have in flight on its device."""


async def settled(event: Event[Any]) -> None:
    """Wait until an event is done, whatever became of it and however often the waiter is cancelled meanwhile."""
    done = event.settled()
    while not done.done():
        try:
            await done
        except asyncio.CancelledError:
            continue


class Execution:
    """One call on its way over the devices: `submit` and `run_schedule`, then the results; `drain` in any case."""

    def __init__(self, pool: DevicePool, store: Store, ticket: CallTicket, work: CallWork) -> None:
        self.pool = pool
        self.store = store
        self.ticket = ticket
        self.work = work
        self.base: Mapping[int, torch.Tensor] | None = None
        """The gradients that this call's add to; None before anybody needed to know."""
        self.based: set[int] = set()
        """The slots that a run started from its base."""
        self.more: Sequence[RunGradients] = ()
        """Gradients that came from a graph behind the inputs."""
        self.committed = False
        self.dispatched: Event[None] = Event()
        """Happens when every run of the schedule is enqueued."""
        self.labels: Sequence[Any] = ()
        self.fused: dict[int, Event[Fused]] = {}
        """Results of the fused stage, by microbatch."""
        self.collected: dict[int, Event[RunGradients]] = {}
        """Gradients, by number of the run."""
        self._values: dict[tuple[int, int], asyncio.Future[Event[Passed]]] = {}
        self._kept: dict[tuple[int, int], asyncio.Future[Event[Passed]]] = {}
        self._gradients: dict[tuple[int, int], asyncio.Future[Event[Gradients]]] = {}
        self._forwarded: dict[tuple[int, int], asyncio.Future[Event[Any]]] = {}
        """A forward run's work on a microbatch, by the run's last layer."""
        self._last_layer: dict[int, int] = {}
        """Of each layer, the last layer of its forward run."""
        self._last: dict[Stream, Event[Any]] = {}
        self._places: list[Place] = []
        self._scope: anyio.CancelScope | None = None

    # ---- submitting ------------------------------------------------------------------------------------------------

    def action(self, kind: str, layers: range | None = None, microbatch: int | None = None, size: int = 0) -> Action:
        """What a piece of work of this call is for; `size` in bytes."""
        return Action(kind, layers, microbatch, size, self.work.label)

    def submit(
        self,
        stream: Stream,
        fn: Callable[[], T],
        *,
        after: Sequence[Event[Any]] = (),
        action: Action | None = None,
        order: tuple[int, int] = (-1, -1),
    ) -> Event[T]:
        """Submit work of this call: skipped once the call is abandoned, waited for by `drain`; what it raises is noted.

        `order` is the number of the run and the microbatch: it decides which of two failures is the first.
        """
        work = self.work

        def guarded() -> T:
            work.check()
            try:
                return fn()
            except Abandoned:
                raise
            except BaseException as error:
                passable = work.failures.add(*order, error, place_of(action, stream.name))
                if passable is error:
                    raise
                raise passable from error

        event = stream.submit(guarded, after=after, action=action)
        self._last[stream] = event
        return event

    async def drain(self) -> None:
        """Wait until nothing of the call runs any more. No cancellation cuts it short."""
        for event in list(self._last.values()):
            await settled(event)
        self._leave()

    def release(self) -> None:
        """Let go of everything that the call made, now that nothing of it runs any more and its results were taken."""
        for table in (self.fused, self.collected, self._values, self._kept, self._gradients, self._forwarded):
            table.clear()
        self._last.clear()
        self.labels = ()

    def _leave(self) -> None:
        for place in self._places:
            place.leave()

    def forget(self) -> None:
        """End the call where nobody can wait for it: it never began, or its event loop is gone."""
        self.work.abandoned = True
        self._leave()
        self.undo()
        self.store.settle(self.ticket)

    def undo(self) -> None:
        """Put the random state back, unless the call has happened."""
        if self.ticket.seed is not None and not self.committed:
            self.ticket.seed.undo()

    # ---- inputs and results ---------------------------------------------------------------------------------------

    def put_input(self, microbatch: int, event: Event[Passed]) -> None:
        """Give the input of the first layer."""
        self._future(self._values, 0, microbatch).set_result(event)

    def put_gradient(self, layer: int, microbatch: int, gradients: Gradients) -> None:
        """Give the gradients of what passes into `layer` (of the output, for the number of layers)."""
        self._future(self._gradients, layer, microbatch).set_result(Event.happened(gradients))

    def output(self, layer: int, microbatch: int) -> Boundary:
        """The output of the last forward run."""
        return self._values.pop((layer, microbatch)).result().value.take()

    def input_gradients(self, microbatch: int) -> Gradients:
        """The gradients of the first layer's input, of a schedule that ended there."""
        return self._gradients.pop((0, microbatch)).result().value

    def watch_output(self, layer: int, microbatch: int, tell: Callable[[int, Event[Passed]], None]) -> None:
        """Call `tell(microbatch, event)` when the last forward run's work on a microbatch has been submitted."""

        def submitted(future: asyncio.Future[Event[Passed]]) -> None:
            if not future.cancelled():
                tell(microbatch, future.result())

        self._future(self._values, layer, microbatch).add_done_callback(submitted)

    def take_kept(self) -> dict[tuple[int, int], Event[Passed]]:
        """The inputs kept for a backward that comes with a call of its own."""
        kept, self._kept = self._kept, {}
        return {key: future.result() for key, future in kept.items()}

    def put_kept(self, kept: Mapping[tuple[int, int], Event[Passed]]) -> None:
        """Give what the forward call kept."""
        for (layer, microbatch), event in kept.items():
            self._future(self._kept, layer, microbatch).set_result(event)

    @staticmethod
    def _future(
        table: dict[tuple[int, int], asyncio.Future[Event[T]]], layer: int, microbatch: int
    ) -> asyncio.Future[Event[T]]:
        key = (layer, microbatch)
        if key not in table:
            table[key] = asyncio.get_running_loop().create_future()
        return table[key]

    # ---- running --------------------------------------------------------------------------------------------------

    async def run_schedule(self, schedule: Schedule, keep: Sequence[frozenset[int]]) -> None:
        """Run every stage run; `keep[microbatch]` are the layers whose input a backward will need.

        Ends without an exception when user code raised: ask `CallWork.failures` after `drain`.
        """
        finished: list[Event[None]] = []
        for run in schedule.runs:
            if run.phase == "forward":
                self._last_layer.update(dict.fromkeys(run.layers, run.layers[-1]))
        try:
            async with anyio.create_task_group() as group:
                self._scope = group.cancel_scope
                try:
                    for number, run in enumerate(schedule.runs):
                        await self._startable(run, finished)
                        room, turn = self.pool.rooms[run.device].join(), self.pool.turns[run.device].join()
                        self._places += (room, turn)
                        finished.append(Event())
                        group.start_soon(self._stage_run, number, run, keep, room, turn, finished[-1])
                except Exception as error:  # a publication failed
                    self._fail(-1, error)
                if self.ticket.turn is not None:
                    self.ticket.turn.leave()
                if not self.work.abandoned and not self.dispatched.done():
                    self.dispatched.set(None)
        except BaseException:
            self.work.abandoned = True
            raise

    def cancel(self) -> None:
        """Let no further work of the call start. The loop's thread."""
        self.work.abandoned = True
        if self._scope is not None:
            self._scope.cancel()

    def _fail(self, number: int, error: BaseException) -> None:
        """Note what went wrong, if it is not known yet, and let no further work of the call start."""
        self.cancel()
        if error not in self.work.failures and not isinstance(error, (Abandoned, asyncio.CancelledError)):
            self.work.failures.add(number, -1, error, "in waiting for the parameters")

    async def _startable(self, run: StageRun, finished: Sequence[Event[None]]) -> None:
        """Wait for what the run's layers need of the host. Nothing that is waited for here needs a place in a line of
        a device that this call's later runs hold."""
        ahead = 2 * len(self.pool.devices)
        if len(finished) >= ahead:
            await finished[len(finished) - ahead]
        if self.ticket.turn is not None:
            await self.ticket.turn.entered
        for layer in run.layers:
            await self.work.version.ready[layer]
        if self.work.chains is None:
            if self.work.changes_buffers:
                await self.ticket.alone
            self.work.chains = self.store.start_chains()
        if run.phase != "forward" and self.base is None:
            if not self.ticket.fresh:
                await self.ticket.first
            self.base = self.store.base(self.ticket)

    async def _stage_run(
        self,
        number: int,
        run: StageRun,
        keep: Sequence[frozenset[int]],
        room: Place,
        turn: Place,
        finished: Event[None],
    ) -> None:
        try:
            await room.entered
            device = self.pool.devices[run.device]
            stage = StageWork(self.work, run, device, self._base_of(run))
            loaded = self.submit(
                device.load,
                stage.load,
                action=self.action("upload", run.layers, size=self._num_bytes(run)),
                order=(number, -1),
            )
            await turn.entered
            submit = {"forward": self._forward, "fused": self._fused, "backward": self._backward}[run.phase]
            in_flight: deque[Event[Any]] = deque()
            for microbatch in run.microbatches:
                while len(in_flight) >= RUN_AHEAD:
                    await in_flight.popleft()
                in_flight.append(await submit(number, stage, microbatch, loaded, keep))
            if run.phase != "forward":
                in_flight.append(self._collect(number, stage, loaded))
            turn.leave()
            while in_flight:
                await in_flight.popleft()
            room.leave()
            finished.set(None)
        except BaseException as error:
            self._fail(number, error)
            if isinstance(error, asyncio.CancelledError) and not self.work.failures:
                raise
            # Anything else is noted: `CallWork.failures` tells.

    def _base_of(self, run: StageRun) -> dict[int, torch.Tensor]:
        """The gradients to start from: for the first run that touches a parameter; tied ones are added at the end."""
        base = {}
        if run.phase != "forward":
            assert self.base is not None
            for layer in run.layers:
                for slot in self.work.layers[layer].slots:
                    if slot in self.base and slot not in self.based and slot not in self.work.tied:
                        self.based.add(slot)
                        base[slot] = self.base[slot]
        return base

    def _num_bytes(self, run: StageRun) -> int:
        tensors = self.work.version.tensors
        slots = {slot for layer in run.layers for slot in self.work.layers[layer].slots}
        return sum(tensors[slot].nbytes for slot in slots)

    async def _forward(
        self, number: int, stage: StageWork, microbatch: int, loaded: Event[None], keep: Sequence[frozenset[int]]
    ) -> Event[Any]:
        layers = stage.run.layers
        source = await self._future(self._values, layers.start, microbatch)
        del self._values[layers.start, microbatch]
        kept = frozenset(layer for layer in keep[microbatch] if layer in layers)
        order = (number, microbatch)
        boundary = self._upload(stage.device, layers.start, source, Passed.take, Boundary.map, order)
        passed = self.submit(
            stage.device.compute,
            lambda: stage.forward(microbatch, boundary(), kept),
            after=(loaded, boundary.event),
            action=self.action("forward", layers, microbatch),
            order=order,
        )
        done = self._download(stage.device, passed, Passed.map, order)
        self._future(self._forwarded, layers[-1], microbatch).set_result(done)
        for layer in kept:
            self._future(self._kept, layer, microbatch).set_result(done)
        self._future(self._values, layers.stop, microbatch).set_result(done)
        return done

    async def _fused(
        self, number: int, stage: StageWork, microbatch: int, loaded: Event[None], keep: Sequence[frozenset[int]]
    ) -> Event[Any]:
        layers = stage.run.layers
        source = await self._future(self._values, layers.start, microbatch)
        del self._values[layers.start, microbatch]
        order = (number, microbatch)
        boundary = self._upload(stage.device, layers.start, source, Passed.take, Boundary.map, order)
        label = self._label(stage.device, microbatch, order)
        fused = self.submit(
            stage.device.compute,
            lambda: stage.fused(microbatch, boundary(), label.value),
            after=(loaded, boundary.event, label),
            action=self.action("fused", layers, microbatch),
            order=order,
        )
        done = self._download(stage.device, fused, Fused.map, order)
        self.fused[microbatch] = done
        self._future(self._gradients, layers.start, microbatch).set_result(done.then(Fused.take))
        return done

    async def _backward(
        self, number: int, stage: StageWork, microbatch: int, loaded: Event[None], keep: Sequence[frozenset[int]]
    ) -> Event[Any]:
        layers, device, order = stage.run.layers, stage.device, (number, microbatch)
        by_layer = self.work.recompute_grain == "layer"
        kept = {}
        for layer in layers if by_layer else (layers.start,):
            source = await self._future(self._kept, layer, microbatch)
            del self._kept[layer, microbatch]
            kept[layer] = self._upload(device, layer, source, _kept_taker(layer), Boundary.map, order)
        after = [loaded, *(source.event for source in kept.values())]
        if layers[-1] in self._last_layer:  # recompute may need what the forward of the stage's last layer noted
            last = self._last_layer[layers[-1]]
            after.append(await self._future(self._forwarded, last, microbatch))
        graphs: Event[Any] | None = None
        if not by_layer:
            graphs = self.submit(
                device.compute,
                lambda: stage.recompute(microbatch, kept[layers.start]()),
                after=after,
                action=self.action("recompute", layers, microbatch),
                order=order,
            )
            after = [graphs]
        top = await self._future(self._gradients, layers.stop, microbatch)
        del self._gradients[layers.stop, microbatch]
        incoming = self._upload(device, layers.stop, top, _same, move, order)

        def backward() -> Gradients:
            if graphs is None:
                return stage.backward_by_layer(microbatch, {layer: take() for layer, take in kept.items()}, incoming())
            return stage.backward(microbatch, graphs.value, incoming())

        gradients = self.submit(
            device.compute,
            backward,
            after=(*after, incoming.event),
            action=self.action("backward", layers, microbatch),
            order=order,
        )
        done = self._download(device, gradients, move, order)
        self._future(self._gradients, layers.start, microbatch).set_result(done)
        return done

    def _collect(self, number: int, stage: StageWork, loaded: Event[None]) -> Event[Any]:
        collected = self.submit(
            stage.device.compute,
            stage.collect,
            after=(loaded,),
            action=self.action("collect", stage.run.layers),
            order=(number, len(self.work.layers)),
        )
        done = self._download(stage.device, collected, _map_collected, (number, -1))
        self.collected[number] = done
        return done

    # ---- copies between host and device ---------------------------------------------------------------------------

    def _label(self, device: Device, microbatch: int, order: tuple[int, int]) -> Event[Any]:
        label = self.labels[microbatch] if self.labels else None
        if device.shares_host_memory:
            return Event.happened(label)
        action = self.action("upload", microbatch=microbatch)
        return self.submit(device.upload, lambda: tree.map_tensors(device.from_host, label), action=action, order=order)

    def _upload(
        self,
        device: Device,
        layer: int,
        source: Event[Any],
        take: Callable[[Any], T],
        move_to: Callable[[T, Callable[[torch.Tensor], torch.Tensor]], T],
        order: tuple[int, int],
    ) -> _Arrival[T]:
        """Bring what passes into `layer` to the device."""
        if device.shares_host_memory:
            return _Arrival(source, take)
        event = self.submit(
            device.upload,
            lambda: move_to(take(source.value), device.from_host),
            after=(source,),
            action=self.action("upload", range(layer, layer), order[1]),
            order=order,
        )
        return _Arrival(event, _same)

    def _download(
        self,
        device: Device,
        result: Event[T],
        move_to: Callable[[T, Callable[[torch.Tensor], torch.Tensor]], T],
        order: tuple[int, int],
    ) -> Event[T]:
        if device.shares_host_memory:
            return result
        return self.submit(
            device.download,
            lambda: move_to(result.value, device.to_host),
            after=(result,),
            action=self.action("download", microbatch=order[1]),
            order=order,
        )


class _Arrival(Generic[T]):
    """Something that will be on the device when `event` has happened; call it there, once, to have it."""

    __slots__ = ("_take", "event")

    def __init__(self, event: Event[Any], take: Callable[[Any], T]) -> None:
        self.event = event
        self._take = take

    def __call__(self) -> T:
        return self._take(self.event.value)


def _same(value: T) -> T:
    return value


def _kept_taker(layer: int) -> Callable[[Passed], Boundary]:
    return lambda passed: passed.kept.pop(layer)


def _map_collected(collected: RunGradients, fn: Callable[[torch.Tensor], torch.Tensor]) -> RunGradients:
    gradients, tied = collected
    return (
        {slot: fn(gradient) for slot, gradient in gradients.items()},
        {slot: {m: [fn(share) for share in parts] for m, parts in shares.items()} for slot, shares in tied.items()},
    )
