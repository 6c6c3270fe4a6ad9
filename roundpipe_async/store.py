"""The host's side of one model: who may read and write parameters, gradients and buffers, and in which order.

Every call and every step is *admitted* in one synchronous moment of the event loop; all ordering follows from that
moment, by these rules and no others:

1. A call reads the latest version admitted before it; a step announces the next one. (`Parameters.read`, `admit`)
2. Calls that train are dispatched in order of admission. (`CallTicket.turn`)
3. Calls and steps have their turns at the gradients in order of admission: a call commits when it is first in
   `_gradients`, and is settled then; a step takes what was committed when it is first. (`CallTicket.first`)
4. A call's gradients start from those committed before it since the last step. So it starts its first backward when
   it is first, or at once where a step right before it will leave nothing. (`CallTicket.fresh`, `base`)
5. A call of a model whose buffers change starts when the calls before it that train are settled. (`CallTicket.alone`)
6. Publications and steps run in order of admission on the pool's optimizer stream.

Gradients committed and not yet taken are where plain PyTorch has them: in `parameter.grad`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from typing import Any

import torch
from torch import nn

from roundpipe_async.buffers import BufferChain, LayerBuffers
from roundpipe_async.devices.base import Line, Place
from roundpipe_async.devices.cpu import run_in_thread
from roundpipe_async.devices.pool import DevicePool
from roundpipe_async.errors import ClosedError, WrongLoopError
from roundpipe_async.events import Event, all_of
from roundpipe_async.optimizer import Step, assign_gradients, snapshot
from roundpipe_async.recompute import CallSeed, draw_call_seed
from roundpipe_async.replica import Blueprint, accumulated, through_hooks
from roundpipe_async.stage import CallWork, Layer
from roundpipe_async.steps import StepHandle, Window, register, running_step
from roundpipe_async.tracing.trace import Action
from roundpipe_async.versions import Parameters, Slot, Version

RunGradients = tuple[dict[int, torch.Tensor], dict[int, dict[int, list[torch.Tensor]]]]
"""What one stage run gives: gradients by slot, and those of tied parameters by slot and microbatch, layer by layer."""


class CallTicket:
    """One admitted call's right to read a version and to commit gradients, until it is settled."""

    def __init__(self, version: Version, window: Window, seed: CallSeed | None) -> None:
        self.version = version
        self.window = window
        self.seed = seed
        self.turn: Place | None = None
        """The place in the line of calls that train; None for a call that only reads."""
        self.first: Event[None] = Event()
        """Happens when every call and step before it is done with the gradients. Never for a call without any."""
        self.fresh = False
        """Whether a step right before it takes everything that earlier calls commit."""
        self.alone: Event[None] = Event()
        """Happens when every call before it that trains is settled. Never for a call that only reads."""
        self.settled: Event[None] = Event()
        self.work: CallWork | None = None


class _Taking:
    """A step's place among the calls: when it is first, the step takes what was committed."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self.taken: Event[list[tuple[Slot, torch.Tensor]]] = Event()

    def take(self) -> None:
        gradients = []
        for slot in self.slots:
            gradient = slot.parameter.grad
            if gradient is not None and (slot.parameter.requires_grad or slot.copy is not None):
                slot.parameter.grad = None
                gradients.append((slot, gradient))
        self.taken.set(gradients)


def _tell(handle: StepHandle, outcome: Event[tuple[Any, BaseException | None]]) -> None:
    """Let a step's event happen as its action ended."""
    result, error = outcome.value if outcome.error is None else (None, outcome.error)
    if error is None:
        handle.event.set(result)
    else:
        handle.event.fail(error)


class Store:
    """The parameters, gradients and buffers of one model on the host. Not thread-safe: the loop's thread calls it."""

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        optim_dtype: torch.dtype | None,
        pool: DevicePool,
        pin_model: str = "alloc",
        name: str = "",
    ) -> None:
        self.name = name
        self.pool = pool
        self.parameters = Parameters(layers, optim_dtype, pool.host_memory(pin_model))
        slots_of: list[list[int]] = [[] for _ in layers]
        for slot in self.parameters.slots:
            for layer_index in slot.layers:
                slots_of[layer_index].append(slot.index)
        self.layers = [
            Layer(index, name, module, Blueprint(module), tuple(slots_of[index]), LayerBuffers(module))
            for index, (name, module) in enumerate(layers)
        ]
        self.tied = frozenset(slot.index for slot in self.parameters.slots if len(slot.layers) > 1)
        self.steps_scheduled = 0
        self._modules = tuple({id(m): m for layer in self.layers for m in layer.blueprint.modules}.values())
        self._line = Line(1)
        self._window = Window()
        self._gradients: deque[CallTicket | _Taking] = deque()
        self._training: deque[CallTicket] = deque()
        self._unsettled: dict[CallTicket, None] = {}
        self._steps: deque[StepHandle] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.Lock()
        self.buffers_lock = threading.Lock()

    # ---- admission ------------------------------------------------------------------------------------------------

    def bind_loop(self, name: str) -> None:
        """Make sure that the running loop is the only one with calls of this model in flight.

        A model that is idle, or has only steps in flight (which belong to no loop), goes on in any loop.
        """
        step = running_step()
        if step is not None and step.handle in self._steps:
            raise RuntimeError(
                f"model {name!r} was called inside a step function of its own, in a loop that the step would wait for "
                "for ever: await it outside, after model.step()"
            )
        loop = asyncio.get_running_loop()
        with self._loop_lock:
            if self._loop is loop:
                return
            if self._loop is not None and self._unsettled:
                if not self._loop.is_closed():
                    raise WrongLoopError(
                        f"model {name!r} has {len(self._unsettled)} calls in flight in another event loop: a model "
                        "serves one loop at a time; await them there first, or wrap one model per loop"
                    )
                for ticket in list(self._unsettled):  # their loop closed under them
                    if ticket.work is not None:
                        ticket.work.abandoned = True
                    self.settle(ticket)
            self._loop = loop

    def admit_call(self, *, ordered: bool, gradients: bool, seeded: bool) -> CallTicket:
        """Admit a call. `ordered`: it trains or changes buffers; `gradients`: it will commit some."""
        self.parameters.adopt()
        self._republish()
        ticket = CallTicket(self.parameters.read(), self._window, draw_call_seed() if seeded else None)
        self._unsettled[ticket] = None
        if ordered:
            ticket.turn = self._line.join()
            self._training.append(ticket)
        if gradients:
            self._window.open()
            ticket.fresh = bool(self._gradients) and isinstance(self._gradients[-1], _Taking)
            self._gradients.append(ticket)
        self._advance()
        return ticket

    def layer_bytes(self) -> list[int]:
        """Bytes of each layer's parameters."""
        slots = self.parameters.slots
        return [sum(slots[index].parameter.nbytes for index in layer.slots) for layer in self.layers]

    def training_flags(self) -> dict[int, bool]:
        """The mode of every module, by id: read at the call, whatever `train()` or `eval()` do later."""
        return {id(module): module.training for module in self._modules}

    def changes_buffers(self) -> bool:
        """Whether running the model may change buffers: any module with some is in training mode."""
        return any(module.training and module._buffers for module in self._modules)

    def start_chains(self) -> dict[int, BufferChain]:
        """Buffer chains for one call, from what the last settled call left."""
        with self.buffers_lock:  # held by a commit while it copies: a call sees the buffers of all layers or of none
            return {layer.index: layer.buffers.start() for layer in self.layers if layer.buffers.places}

    # ---- gradients ------------------------------------------------------------------------------------------------

    def base(self, ticket: CallTicket) -> dict[int, torch.Tensor]:
        """The gradients that a call's add to, by slot; ask when `ticket.first` happened, unless the call is `fresh`.

        As in plain PyTorch these are what `zero_grad` left, too, where the copy has the parameter's dtype and no step
        is under way; where it has not, or one is, the step adds them.
        """
        if ticket.fresh:
            return {}
        assert ticket.first.done()
        base = {}
        stepping = any(not handle.done() for handle in self._steps)
        for slot in self.parameters.slots:
            gradient = slot.parameter.grad
            if gradient is None and not stepping and slot.copy is not None and slot.copy.dtype == slot.parameter.dtype:
                gradient = slot.copy.grad
            if gradient is not None:
                base[slot.index] = gradient
        return base

    def commit(self, base: Mapping[int, torch.Tensor], gradients: Mapping[int, torch.Tensor]) -> None:
        """Let a successful call's gradients, which include `base`, be the model's. Only moves references."""
        for index, gradient in gradients.items():
            slot = self.parameters.slots[index]
            slot.parameter.grad = gradient
            if slot.copy is not None and slot.copy.grad is base.get(index):
                slot.copy.grad = None

    def settle(self, ticket: CallTicket) -> None:
        """End a call's rights, whether it committed or not. Twice is fine."""
        if ticket.settled.done():
            return
        if ticket.turn is not None:
            ticket.turn.leave()
        self.parameters.release(ticket.version)
        ticket.work = None
        del self._unsettled[ticket]
        ticket.settled.set(None)
        self._advance()

    def _advance(self) -> None:
        """Let whoever is first now know it."""
        while self._gradients:
            first = self._gradients[0]
            if isinstance(first, _Taking):
                first.take()
            elif not first.settled.done():
                if not first.first.done():
                    first.first.set(None)
                break
            self._gradients.popleft()
        while self._training and self._training[0].settled.done():
            self._training.popleft()
        if self._training and not self._training[0].alone.done():
            self._training[0].alone.set(None)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def admit_step(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], context: Context, is_async: bool
    ) -> StepHandle:
        """Admit a step. Calls from now on read the version before it (`is_async`) or the one that it makes."""
        parameters = self.parameters
        parameters.adopt()
        self._republish()
        self.steps_scheduled += 1
        handle = StepHandle(self.steps_scheduled, self._window)
        self._window = Window()
        copies = {id(slot.copy) for slot in parameters.slots if slot.copy is not None}
        raw = {id(slot.parameter): slot.name for slot in parameters.slots}
        step = Step(handle, fn, args, kwargs, context, snapshot(fn, args, copies), raw)
        if is_async and parameters.latest.number < handle.number - 1:
            self._publish(handle.number - 1)
        taking = _Taking(parameters.slots)
        self._gradients.append(taking)
        stale = parameters.take_stale()
        publication = None if is_async else parameters.admit(handle.number)
        register(handle)
        self._steps.append(handle)
        outcome = self.pool.optimizer.submit(
            lambda: self._run_step(step, taking, stale, publication),
            after=(taking.taken,),
            action=Action("step", label=f"{self.name} step {handle.number}"),
        )
        # Told when the action is over, not inside it: whoever awaited the step finds it in a trace.
        outcome.add_callback(lambda outcome: _tell(handle, outcome))
        self._advance()
        return handle

    def _run_step(
        self, step: Step, taking: _Taking, stale: Sequence[Slot], publication: Version | None
    ) -> tuple[Any, BaseException | None]:
        """The optimizer's thread. Never raises: gives the step's result, or what it failed with."""
        error: BaseException | None = None
        result = None
        try:
            gradients = taking.taken.value
            self.parameters.refresh(stale)
            assign_gradients((self.parameters.copy_of(slot), gradient) for slot, gradient in gradients)
            result = step.run()
            orphans = [slot.name for slot, _ in gradients if not slot.handed_out]
            if orphans:
                raise ValueError(
                    f"{len(orphans)} parameters received gradients, but no optimizer was given their copies: "
                    f"{', '.join(orphans[:5])}. Make the optimizer inside `with OptimizerCtx():`, or add what was "
                    "unfrozen later with optimizer.add_param_group from model.optim_named_parameters()"
                )
        except BaseException as caught:
            error = caught
        try:
            if publication is not None:
                self.parameters.publish(publication)
        except BaseException as caught:
            error = error or caught
        return result, error

    def _publish(self, number: int) -> Event[None]:
        stale = self.parameters.take_stale()
        version = self.parameters.admit(number)
        action = Action("publish", label=f"{self.name} step {number}")
        try:
            return self.pool.optimizer.submit(lambda: self.parameters.publish(version, stale), action=action)
        except ClosedError:  # the pool was closed before the model: what it still runs comes first

            def publish(_: Event[None]) -> None:
                run_in_thread(lambda: self.parameters.publish(version, stale), "publication")

            all_of([handle.event.settled() for handle in self._steps]).add_callback(publish)
            return all_of(version.ready)

    def _republish(self) -> None:
        """A publication that failed is tried again: whoever was to read it failed with it, who comes now need not."""
        if self.parameters.latest.failed:
            self._publish(self.parameters.latest.number)

    # ---- synchronization ------------------------------------------------------------------------------------------

    def in_flight(self) -> list[Event[Any]]:
        """Events of every call and step admitted so far and not done, and of the newest parameters' publication.

        Only those of the publication tell errors: a call's and a step's are told elsewhere.
        """
        self.parameters.adopt()
        self._republish()
        events: list[Event[Any]] = [ticket.settled for ticket in self._unsettled]
        events += [handle.event.settled() for handle in self._steps if not handle.done()]
        if self.parameters.latest.number < self.steps_scheduled:
            self._publish(self.steps_scheduled)
        events += [event for event in self.parameters.latest.ready if not event.done()]
        return events

    def failed_step(self) -> StepHandle | None:
        """The first background step that failed and whose exception nobody has seen yet."""
        while self._steps and self._steps[0].done() and not self._steps[0].unseen and not self._steps[0].waited:
            self._steps.popleft()
        return next((handle for handle in self._steps if handle.done() and handle.unseen), None)


def fold(
    results: Sequence[RunGradients], base: Mapping[int, torch.Tensor], slots: Sequence[Slot]
) -> dict[int, torch.Tensor]:
    """The gradients of a call from those of its stage runs, in the schedule's order.

    The runs' own include `base` already, and went through their parameters' hooks. Of tied parameters, plain PyTorch
    adds the shares of all layers for one microbatch, in backward order, and that sum, through the hooks, to what it
    has: so does this, bit for bit.
    """
    total: dict[int, torch.Tensor] = {}
    shares: dict[int, dict[int, torch.Tensor]] = {}
    for gradients, tied in results:
        for slot, gradient in gradients.items():
            total[slot] = total[slot] + gradient if slot in total else gradient
        for slot, by_microbatch in tied.items():
            mine = shares.setdefault(slot, {})
            for microbatch, of_layers in by_microbatch.items():
                for gradient in of_layers:
                    mine[microbatch] = mine[microbatch] + gradient if microbatch in mine else gradient
    for slot, mine in shares.items():
        parameter = slots[slot].parameter
        so_far = base.get(slot)
        for microbatch in sorted(mine):
            so_far = accumulated(parameter, so_far, through_hooks(parameter, mine[microbatch]))
        if so_far is not None:
            total[slot] = so_far
    return total
