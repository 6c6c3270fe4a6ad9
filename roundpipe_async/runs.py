"""The kinds of calls of one model, from the split of the batch to the commit: all or nothing.

Each is admitted in one synchronous moment (`admit`), then runs as one coroutine that ends in exactly one of two ways:
committed and settled, or drained, undone and settled.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from roundpipe_async import tree
from roundpipe_async.boundary import Boundary
from roundpipe_async.buffers import refuse_shared
from roundpipe_async.calls import background, stop
from roundpipe_async.config import RoundPipeRunConfig
from roundpipe_async.devices.cpu import run_in_thread
from roundpipe_async.devices.pool import DevicePool
from roundpipe_async.engine import Execution, settled
from roundpipe_async.events import Event, all_of
from roundpipe_async.failures import raise_unchanged
from roundpipe_async.graph import Graph, Walk, current_walks, join_outputs
from roundpipe_async.microbatches.split import SplitCall, loss_weights, merge_outputs, split_call, sum_losses
from roundpipe_async.modes import Modes, usable_by_autograd
from roundpipe_async.packed import Microbatches, arrived, fitted, joined, packed_leaves, unpacked
from roundpipe_async.planner import Planner
from roundpipe_async.scheduling.schedule import Schedule, ScheduleType
from roundpipe_async.stage import CallWork, Gradients, Passed
from roundpipe_async.steps import current_window
from roundpipe_async.store import CallTicket, Store, fold
from roundpipe_async.tracing.trace import Action

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Request:
    """What the user asked for."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: Any
    config: RoundPipeRunConfig


@dataclass(slots=True, eq=False)
class Runner:
    """Everything that the calls of one model share."""

    name: str
    pool: DevicePool
    store: Store
    planner: Planner
    device_types: frozenset[str]
    logged: set[str] = field(default_factory=set)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    # ---- admission ------------------------------------------------------------------------------------------------

    def admit(
        self,
        config: RoundPipeRunConfig,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        return_outputs: bool = False,
    ) -> Execution:
        """Admit a forward pass (with a loss: and its backward), with the modes that stand around the caller now."""
        store = self.store
        store.bind_loop(self.name)
        modes = Modes.capture(config.requires_grad, self.device_types, trains=loss_fn is not None)
        changes_buffers = store.changes_buffers()
        ticket = store.admit_call(
            ordered=modes.grad or changes_buffers,
            gradients=loss_fn is not None,
            seeded=config.preserve_rng_state is not False,
        )
        slots = store.parameters.slots
        work = ticket.work = CallWork(
            layers=store.layers,
            parameters=[slot.parameter for slot in slots],
            version=ticket.version,
            requires_grad=[slot.parameter.requires_grad for slot in slots],
            tied=store.tied,
            training=store.training_flags(),
            changes_buffers=changes_buffers,
            modes=modes,
            window=ticket.window,
            seed=None if ticket.seed is None else ticket.seed.value,
            recompute_grain=config.recompute_grain or "stage",
            loss_fn=loss_fn,
            loss_weights=None,
            return_outputs=return_outputs,
            timer=self.planner.timer,
            label=f"{self.name} call {next(self._numbers)}",
        )
        return Execution(self.pool, store, ticket, work)

    # ---- calls ----------------------------------------------------------------------------------------------------

    async def forward_backward(self, execution: Execution, request: Request) -> Any:
        """A whole call with a loss: gives what `RoundPipe.forward_backward` promises."""
        async with _AllOrNothing(execution):
            split = await self._split(execution, request)
            work, config = execution.work, request.config
            work.loss_weights = loss_weights(split.sizes, config.loss_reduction)
            execution.labels = split.labels
            schedule = await self._plan(execution, config, "fused", len(split.args))
            inputs = await self._put_inputs(execution, split)
            await execution.run_schedule(schedule, _kept_inputs(schedule, work.recompute_grain))
            _raise_first(execution)
            indices = range(len(split.args))
            losses = [execution.fused[m].value.losses for m in indices]
            outputs = [execution.fused[m].value.output for m in indices] if work.return_outputs else None
            gradients = [execution.input_gradients(m) for m in indices]
            await self._walk_inputs(execution, inputs, gradients)
            results = [execution.collected[number].value for number in sorted(execution.collected)]

            def finish() -> Any:
                total = sum_losses(losses)
                if outputs is None:
                    return total
                return total, work.modes.run(self._merged, outputs, split.sizes, config)

            result = await execution.submit(self.pool.host, finish, action=execution.action("merge"))
            await self._commit(execution, results)
        return result

    async def forward(self, execution: Execution, request: Request, packed: Microbatches | None = None) -> Any:
        """A forward pass, with a graph behind the outputs in grad mode; `packed` is told of each output."""
        async with _AllOrNothing(execution):
            split = await self._split(execution, request)
            work, config = execution.work, request.config
            kind: ScheduleType = "train_forward" if work.modes.grad else "infer"
            schedule = await self._plan(execution, config, kind, len(split.args))
            backward: Schedule | None = None
            keep: Sequence[frozenset[int]] = [frozenset()] * len(split.args)
            if work.modes.grad:
                backward = await self._plan(execution, config, "train_backward", len(split.args))
                keep = _kept_inputs(backward, work.recompute_grain)
            inputs = await self._put_inputs(execution, split)
            if packed is not None:
                packed.begin(len(split.args), split.sizes)
                execution.dispatched.add_callback(lambda _: packed.dispatched.set(None))
                for m in range(len(split.args)):
                    execution.watch_output(len(work.layers), m, packed.arrive)
            await execution.run_schedule(schedule, keep)
            _raise_first(execution)
            for handed_on in packed.boundaries if packed is not None else ():
                await handed_on  # before they are taken
            boundaries = [execution.output(len(work.layers), m) for m in range(len(split.args))]
            await inputs.complete()
            graph = None
            if backward is not None:
                kept = execution.take_kept()
                graph = Graph(self.walk_graph, self.store, work, backward, kept, boundaries)

            def finish() -> Any:
                if graph is None:
                    with work.modes.entered(False):
                        outputs = [boundary.value() for boundary in boundaries]
                        return outputs if packed else work.modes.run(self._merged, outputs, split.sizes, config)
                outputs = join_outputs(graph, boundaries, inputs.tensors())
                return outputs if packed else work.modes.run(self._merged, outputs, split.sizes, config)

            result = await execution.submit(self.pool.host, finish, action=execution.action("merge"))
            await self._commit(execution, [])
        return result

    async def forward_packed(self, execution: Execution, request: Request) -> Microbatches:
        """A forward pass whose outputs are handed on one by one; it runs on while its caller goes on."""
        packed = Microbatches()

        async def run() -> None:
            error: BaseException | None = None
            try:
                packed.joined.set(await self.forward(execution, request, packed))
            except BaseException as caught:
                error = caught
                if isinstance(caught, asyncio.CancelledError):
                    error = None
                    raise
            finally:
                packed.end(error)

        def undo() -> None:
            execution.forget()
            packed.end(None)

        task = background(run(), "forward", undo)
        try:
            await packed.started
        except asyncio.CancelledError:
            await stop(task)
            raise
        return packed

    async def backward(self, ticket: CallTicket, tensors: Any, gradients: Any, modes: Modes) -> None:
        """Walk a graph, with the stages of every model in it, in a thread; commit this model's gradients at the end."""
        walk = Walk(self.store, ticket, asyncio.get_running_loop())
        try:
            await self._in_walk(walk, modes, torch.autograd.backward, tensors, gradients)
            await self._commit_walk(walk, modes)
        finally:
            self.store.settle(ticket)

    async def walk_graph(self, graph: Graph, gradients: list[Gradients], walk: Walk | None) -> list[Gradients]:
        """The stages behind one forward call's outputs, backward; commits unless it is part of a larger walk."""
        if walk is not None:
            return await self._run_graph(graph, gradients, walk)
        self.store.bind_loop(self.name)
        ticket = self.store.admit_call(ordered=True, gradients=True, seeded=False)
        walk = Walk(self.store, ticket, asyncio.get_running_loop())
        try:
            of_inputs = await self._run_graph(graph, gradients, walk)
            await self._commit_walk(walk, graph.work.modes)
            return of_inputs
        finally:
            self.store.settle(ticket)

    async def _run_graph(self, graph: Graph, gradients: list[Gradients], walk: Walk) -> list[Gradients]:
        graph.check_unchanged()
        execution = Execution(self.pool, self.store, walk.ticket, graph.work)
        walk.add(execution)
        async with _AllOrNothing(execution, settles=False):
            execution.put_kept(graph.kept)
            graph.kept.clear()
            for m, of_output in enumerate(gradients):
                execution.put_gradient(len(graph.work.layers), m, of_output)
            await execution.run_schedule(graph.schedule, [frozenset()] * len(gradients))
            _raise_first(execution)
            walk.base = execution.base
            walk.results += [execution.collected[number].value for number in sorted(execution.collected)]
            of_inputs = [execution.input_gradients(m) for m in range(len(gradients))]
        graph.release()
        return of_inputs

    async def _in_walk(self, walk: Walk, modes: Modes, fn: Callable[..., Any], *args: Any) -> None:
        def run() -> None:
            current_walks.set({**current_walks.get(), id(walk.store): walk})
            current_window.set(walk.ticket.window)
            fn(*args)

        done = run_in_thread(lambda: modes.run(run), "walk")
        try:
            await done
        except asyncio.CancelledError:
            walk.cancel()
            await settled(done)
            raise

    async def _commit_walk(self, walk: Walk, modes: Modes) -> None:
        ticket = walk.ticket
        base = walk.base or {}

        def commit() -> dict[int, torch.Tensor]:
            return modes.run(fold, walk.results, base, self.store.parameters.slots)

        await ticket.first
        total = await _unbroken(self.pool.host.submit(commit, action=Action("commit", label=f"{self.name} backward")))
        self.store.commit(base, total)

    # ---- pieces ---------------------------------------------------------------------------------------------------

    async def _split(self, execution: Execution, request: Request) -> SplitCall:
        config, pool = request.config, self.pool
        count = config.num_microbatch or len(pool.devices) + 1
        packed = packed_leaves((request.args, request.kwargs))
        for leaf in packed:
            await leaf.started
            count = len(leaf)

        def split() -> SplitCall:
            _check_exists(config.output_device)
            with torch.set_grad_enabled(execution.work.modes.grad):
                args, kwargs, label = request.args, request.kwargs, request.label
                if execution.work.modes.grad:
                    args, kwargs, label = usable_by_autograd((args, kwargs, label))
                return execution.work.modes.run(
                    lambda: split_call(
                        args,
                        kwargs,
                        label,
                        count,
                        config.split_input,
                        config.split_label,
                        name=self.name,
                        logged=self.logged,
                    )
                )

        try:
            result = await execution.submit(pool.host, split, action=execution.action("split"))
            return fitted(result, packed) if packed else result
        finally:
            request.args, request.kwargs, request.label = (), {}, None

    async def _plan(
        self, execution: Execution, config: RoundPipeRunConfig, kind: ScheduleType, num_microbatch: int
    ) -> Schedule:
        return await execution.submit(
            self.pool.host,
            lambda: self.planner.schedule(
                kind, config, num_microbatch, self.pool.take_devices, execution.work.changes_buffers
            ),
            action=execution.action("plan"),
        )

    @staticmethod
    async def _put_inputs(execution: Execution, split: SplitCall) -> _Inputs:
        """Hand the microbatches to the engine."""
        inputs = _Inputs(split, execution.work.modes.grad)
        for m in range(len(split.args)):
            execution.put_input(m, inputs.passed(m))
        # Their runs must stand before ours in the lines of the devices, which is what keeps any two from waiting for
        # each other.
        for packed in inputs.packed:
            await packed.dispatched
        return inputs

    async def _walk_inputs(self, execution: Execution, inputs: _Inputs, gradients: Sequence[Gradients]) -> None:
        """Walk the user's graph behind the inputs."""
        await inputs.complete()
        tensors: list[torch.Tensor] = []
        seeds: list[torch.Tensor] = []
        for of_microbatch, slots in zip(inputs.tensors(), gradients, strict=True):
            for tensor, gradient in zip(of_microbatch, slots, strict=True):
                if tensor is not None and gradient is not None:
                    tensors.append(tensor)
                    seeds.append(gradient)
        if tensors:
            walk = Walk(self.store, execution.ticket, asyncio.get_running_loop())
            walk.base, walk.based = execution.base, execution.based
            await self._in_walk(walk, execution.work.modes, torch.autograd.backward, tensors, seeds)
            execution.more = walk.results

    def _merged(self, outputs: list[Any], sizes: Sequence[int] | None, config: RoundPipeRunConfig) -> Any:
        merge = config.merge_output
        weights = sizes if config.loss_reduction == "mean" else None  # of 0-dim outputs: losses, as a rule
        merged = merge_outputs(outputs, None if isinstance(merge, bool) else merge, weights)
        device = config.output_device
        return merged if device is None else tree.map_tensors(lambda tensor: tensor.to(device), merged)

    async def _commit(self, execution: Execution, results: Sequence[Any]) -> None:
        """From here on the call happens, whatever cancels it."""
        ticket, work, store = execution.ticket, execution.work, self.store
        base = execution.base or {}
        changed = [chain for chain in (work.chains or {}).values() if chain.changed]
        if results:
            await ticket.first
        if not results and not changed:
            return

        def commit() -> Mapping[int, torch.Tensor]:
            total = work.modes.run(fold, [*results, *execution.more], base, store.parameters.slots)
            refuse_shared(work.chains or {})
            with store.buffers_lock:
                for chain in changed:
                    chain.buffers.commit(chain)
            return total

        total = await _unbroken(self.pool.host.submit(commit, action=execution.action("commit")))
        store.commit(base, total)
        execution.committed = True


def _check_exists(device: torch.device | None) -> None:
    """Raise for an output device that is not there, before anything has run."""
    if device is not None and device.type != "cpu":
        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"output_device={str(device)!r} is not to be had here ({error}): name a device that torch reports, or "
                "leave it out for the host"
            ) from error


class _Inputs:
    """The inputs of one call's microbatches: cut for the engine, whole for the walk behind them."""

    def __init__(self, split: SplitCall, grad: bool) -> None:
        self._values = list(zip(split.args, split.kwargs, strict=True))
        self._grad = grad
        self.packed = packed_leaves(self._values)

    def passed(self, microbatch: int) -> Event[Passed]:
        """What the first layer gets."""
        value = self._values[microbatch]
        wanted = packed_leaves(value)
        if not wanted:
            return Event.happened(self._cut(value))
        arrivals = [packed.boundaries[microbatch] for packed in wanted]
        return all_of(arrivals).then(lambda _: self._cut(unpacked(value, microbatch, arrived)))

    def _cut(self, value: Any) -> Passed:
        leaves, structure = tree.flatten(value)
        cut = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return Passed(Boundary(cut, structure, self._needs(leaves)), {})

    def _needs(self, leaves: Sequence[Any]) -> tuple[bool, ...]:
        return tuple(self._grad and isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)

    async def complete(self) -> None:
        """Wait for the calls that make the inputs, whose graphs `tensors` refer to."""
        for packed in self.packed:
            await packed

    def tensors(self) -> list[list[torch.Tensor | None]]:
        """For each microbatch, leaf by leaf, the tensors behind which the user's graph lies."""
        rows = []
        for m, value in enumerate(self._values):
            leaves = tree.flatten(unpacked(value, m, joined))[0]
            rows.append([leaf if need else None for leaf, need in zip(leaves, self._needs(leaves), strict=True)])
        return rows


class _AllOrNothing:
    """Around a call: whatever ends it, nothing of it runs on, and unless it committed nothing of it stays."""

    def __init__(self, execution: Execution, settles: bool = True) -> None:
        self._execution = execution
        self._settles = settles

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        execution = self._execution
        if error is not None:
            execution.work.abandoned = True
        if isinstance(error, GeneratorExit):  # the loop is gone, and with it whoever could wait
            if self._settles:
                execution.forget()
            return
        try:
            await execution.drain()
            execution.release()
            if error is not None:
                if self._settles:
                    execution.undo()
                if not isinstance(error, asyncio.CancelledError):
                    first = execution.work.failures.first()
                    if first is not None and first is not error:
                        raise_unchanged(first)
        finally:
            if self._settles:
                execution.store.settle(execution.ticket)


def _raise_first(execution: Execution) -> None:
    if execution.work.abandoned:
        raise _Failed


class _Failed(Exception):
    """Stands for the user's exception until everything of the call has ended and the first one is known."""


def _kept_inputs(schedule: Schedule, grain: str) -> list[frozenset[int]]:
    """For each microbatch, the layers whose input forward keeps: one a stage, or every one."""
    if grain == "stage":
        return [schedule.kept_inputs(m) for m in range(schedule.num_microbatch)]
    layers = frozenset(layer for run in schedule.runs if run.phase == "backward" for layer in run.layers)
    return [layers] * schedule.num_microbatch


async def _unbroken(event: Event[T]) -> T:
    """Wait for what must not be given up half-way."""
    await settled(event)
    return event.value
