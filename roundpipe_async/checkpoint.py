"""Snapshots of a training run that goes on meanwhile: model, optimizer and scaler after one and the same step.

`state_dict()` of the three, taken one after another beside background steps, are of different moments. A snapshot's
moment is that of the call, for all three: it takes its place among the steps there, and copies when that place comes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import torch
from torch.optim import Optimizer

from roundpipe_async import tree
from roundpipe_async.calls import Begun, call
from roundpipe_async.events import Event
from roundpipe_async.model import RoundPipe
from roundpipe_async.scaling.grad_scaler import GradScaler
from roundpipe_async.steps import Window
from roundpipe_async.store import CallTicket, Store
from roundpipe_async.tracing.trace import Action

Snapshot = dict[str, Any]


def snapshot(
    model: RoundPipe, optimizer: Optimizer | None = None, scaler: GradScaler | None = None
) -> Coroutine[Any, Any, Snapshot]:
    """Await copies of everything that training changes, as it is after every step scheduled before this call.

    A dict of plain containers and tensors, for `torch.save`: `model` (the state dict that the wrapped module will have
    then), `copies` (the optimizer's parameters by name, in their own dtype), `optimizer` and `scaler` (state dicts).
    It shares no storage with anything. Call it between iterations, after `scaler.update()`: between `step` and `update`
    it is an AssertionError. Training need not stop, steps may be in flight, and the run goes on as if nobody had asked;
    one resumed from the snapshot goes on as if it had called `synchronize` there. Not included: gradients that no step
    has taken, schedulers, random state.
    """

    def begin() -> Begun[Snapshot]:
        store = _open_store(model)
        flying = [handle for handle in store._steps if not handle.done()]
        updated, scales = scaler.boundary_state_dict(flying) if scaler else (Event.happened(None), dict)
        groups = [_hyperparameters(group) for group in optimizer.param_groups] if optimizer else []

        def capture() -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor], Any]:
            with torch.no_grad():
                return _copied_parameters(store), _copied_copies(store), _copied_optimizer(optimizer, groups)

        captured = store.pool.optimizer.submit(capture, action=Action("snapshot"))
        ticket = store.admit_call(ordered=True, gradients=False, seeded=False)
        work = _assemble(model, store, ticket, captured, updated, scales)
        return Begun(work, undo=lambda: store.settle(ticket))

    return call(begin, "snapshot")


async def _assemble(
    model: RoundPipe,
    store: Store,
    ticket: CallTicket,
    captured: Event[tuple[dict[int, torch.Tensor], dict[str, torch.Tensor], Any]],
    updated: Event[None],
    scales: Callable[[], dict[str, Any]],
) -> Snapshot:
    try:
        await ticket.alone  # the buffers are now those after every call before this one, and stay so until we settle

        def copy_buffers() -> dict[int, torch.Tensor]:
            return {id(buffer): buffer.detach().clone() for buffer in model._target.buffers()}

        buffers = await store.pool.host.submit(copy_buffers, action=Action("snapshot"))
    finally:
        store.settle(ticket)
    parameters, copies, optimizer_state = await captured
    await updated
    values = {**parameters, **buffers}
    live = model._target.state_dict(keep_vars=True)
    extra = [name for name, value in live.items() if not isinstance(value, torch.Tensor)]
    state = {name: values[id(value)] for name, value in live.items() if name not in extra}
    return {"model": state, "copies": copies, "optimizer": optimizer_state, "scaler": scales()}


def _copied_parameters(store: Store) -> dict[int, torch.Tensor]:
    """The model's parameters as they will be when the last step is published, by id."""
    found = {}
    for slot in store.parameters.slots:
        source = slot.parameter if slot.copy is None or slot.stale_copy else slot.copy
        found[id(slot.parameter)] = source.detach().to(slot.parameter.dtype, copy=True)
    return found


def _copied_copies(store: Store) -> dict[str, torch.Tensor]:
    return {
        slot.name: (slot.parameter.to(slot.copy.dtype) if slot.stale_copy else slot.copy).detach().clone()
        for slot in store.parameters.slots
        if slot.copy is not None
    }


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """They are those of the call, whatever a scheduler does before the copies are taken."""
    return tree.map_tensors(_cloned, {key: value for key, value in group.items() if key != "params"})  # type: ignore[no-any-return]


def _copied_optimizer(optimizer: Optimizer | None, groups: list[dict[str, Any]]) -> Any:
    if optimizer is None:
        return None
    state = tree.map_tensors(_cloned, optimizer.state_dict())
    for group, kept in zip(state["param_groups"], groups, strict=False):
        group.update(kept)
    return state


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def load_snapshot(
    state: Snapshot, model: RoundPipe, optimizer: Optimizer | None = None, scaler: GradScaler | None = None
) -> Coroutine[Any, Any, None]:
    """Await that `model`, `optimizer` and `scaler` are what they were at the snapshot.

    It happens after every step scheduled before this call; calls made after it read the loaded parameters, those made
    before it the older ones. Gradients that no step has taken are dropped. What is loaded is copied: `state` can be
    loaded again. KeyError or ValueError, and nothing is touched, if the names or shapes are not the model's.
    """

    def begin() -> Begun[None]:
        store = _open_store(model)
        _check(state, model, optimizer, scaler)
        store._window = Window()  # what the open one would have held is dropped, and its loss scale with it
        ticket = store.admit_call(ordered=True, gradients=False, seeded=False)
        return Begun(_load(state, model, store, ticket, optimizer, scaler), undo=lambda: store.settle(ticket))

    return call(begin, "load_snapshot")


def _check(state: Snapshot, model: RoundPipe, optimizer: Optimizer | None, scaler: GradScaler | None) -> None:
    for key, given in (("optimizer", optimizer), ("scaler", scaler)):
        if given is not None and state[key] is None:
            raise KeyError(f"the snapshot has no {key}: none was given when it was taken")
    live = {name: value for name, value in model._target.state_dict().items() if isinstance(value, torch.Tensor)}
    saved = state["model"]
    if live.keys() != saved.keys():
        raise KeyError(f"the snapshot is of another model; names that differ: {sorted(live.keys() ^ saved.keys())[:5]}")
    wrong = [name for name, value in live.items() if value.shape != saved[name].shape]
    if wrong:
        raise ValueError(f"the snapshot is of another model; shapes that differ: {wrong[:5]}")


async def _load(
    state: Snapshot,
    model: RoundPipe,
    store: Store,
    ticket: CallTicket,
    optimizer: Optimizer | None,
    scaler: GradScaler | None,
) -> None:
    try:
        await ticket.alone

        def load() -> None:
            live = model._target.state_dict(keep_vars=True)
            saved = {id(value): state["model"][name] for name, value in live.items() if name in state["model"]}
            with torch.no_grad():
                for buffer in model._target.buffers():
                    if id(buffer) in saved:
                        buffer.copy_(saved[id(buffer)])
                for slot in store.parameters.slots:
                    slot.parameter.grad = None
                    value = saved[id(slot.parameter)]
                    if slot.name in state["copies"]:
                        copy = store.parameters.copy_of(slot)
                        copy.copy_(state["copies"][slot.name])
                        copy.grad = None
                    elif not torch.equal(slot.parameter, value):  # frozen, then and now
                        slot.parameter.copy_(value)
            if optimizer is not None:
                optimizer.load_state_dict(tree.map_tensors(_cloned, state["optimizer"]))

        loaded = store.pool.optimizer.submit(load, action=Action("load"))
        if scaler is not None:
            scaler.load_state_dict(state["scaler"])
        for slot in store.parameters.slots:  # changes of the user's, which the copies need not follow any more
            slot.stale_copy = slot.stale_copy and slot.name not in state["copies"]
        store._publish(store.steps_scheduled)
        published = store.parameters.latest.ready
        await loaded
        for event in published:
            await event
    finally:
        store.settle(ticket)


def _open_store(model: RoundPipe) -> Store:
    model._check_open()
    model._store.bind_loop(model._name)
    return model._store
