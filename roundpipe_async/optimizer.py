"""Optimizer steps: a user's function, run in the optimizer's thread on the copies, one after another.

A background step must do what it would have done at the moment when it was submitted: it keeps the learning rate of
that moment although a scheduler has moved on, and it must not touch the parameters that calls are reading. Both need
a look at `torch.optim` from inside: one hook, installed when the first step runs, that leaves all other optimizers of
the process alone.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from roundpipe_async.optim import live_optimizers
from roundpipe_async.steps import StepHandle, StepScope, current_step, running_step

_optimizer_context: ContextVar[object] = ContextVar("roundpipe_async_optimizer", default=None)
"""The thread and task that entered `OptimizerCtx`: tasks made inside inherit the variable, but are not inside."""


def OptimizerCtx() -> AbstractContextManager[None]:
    """Inside, `parameters()` and `named_parameters()` of every `RoundPipe` give the optimizer's copies.

    `with OptimizerCtx(): optimizer = Adam(model.parameters())`. A context variable: it never leaks into other tasks or
    threads. Step functions run inside one.
    """
    return _optimizer_ctx()


@contextmanager
def _optimizer_ctx() -> Iterator[None]:
    token = _optimizer_context.set(_here())
    try:
        yield
    finally:
        _optimizer_context.reset(token)


def in_optimizer_ctx() -> bool:
    """Whether the caller is inside `OptimizerCtx()` or a step function."""
    entered = _optimizer_context.get()
    return (entered is not None and entered == _here()) or running_step() is not None


def _here() -> tuple[int, object]:
    """The running thread and task."""
    task = asyncio.current_task() if asyncio._get_running_loop() is not None else None
    return threading.get_ident(), None if task is None else ref(task)


Group = dict[str, Any]


@dataclass(slots=True, eq=False)
class Step:
    """One scheduled step: the function, and the moment at which it was submitted."""

    handle: StepHandle
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    context: Context
    snapshots: dict[int, list[Group]]
    """Hyperparameters at submission, by id of the optimizer."""
    raw: Mapping[int, str]
    """Names of the model's own parameters by id: an optimizer over these would do nothing, or harm."""

    def run(self) -> Any:
        """Call the step function. The optimizer's thread."""
        _install_hooks()
        return self.context.run(self._run)

    def _run(self) -> Any:
        current_step.set(StepScope(self.handle, threading.get_ident()))
        _running[threading.get_ident()] = self
        try:
            return self.fn(*self.args, **self.kwargs)
        finally:
            del _running[threading.get_ident()]


_running: dict[int, Step] = {}
"""The step that each optimizer thread runs now."""
_discovered: WeakSet[Optimizer] = WeakSet()
"""Optimizers of other classes than ours that stepped in a step function."""


def snapshot(step_fn: Callable[..., Any], args: Iterable[Any], copies: set[int]) -> dict[int, list[Group]]:
    """The hyperparameters of all optimizers that hold some of `copies` (ids), as they are now.

    Known are ours, those that stepped before, and those that the step function refers to.
    """
    known = {id(optimizer): optimizer for optimizer in (*live_optimizers(), *_discovered)}
    for optimizer in _referred(step_fn, args):
        known[id(optimizer)] = optimizer
    snapshots = {}
    for key, optimizer in known.items():
        groups = optimizer.param_groups
        if any(id(group["params"][0]) in copies for group in groups if group["params"]):
            snapshots[key] = [_hyperparameters(group) for group in groups]
            if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
                # The scheduler's check that steps precede its own: this step does, though it runs later.
                optimizer._opt_called = True  # type: ignore[attr-defined]
    return snapshots


def _referred(step_fn: Callable[..., Any], args: Iterable[Any]) -> list[Optimizer]:
    candidates = list(args)
    owner = getattr(step_fn, "__self__", None)
    candidates.append(owner)
    try:
        variables = inspect.getclosurevars(inspect.unwrap(step_fn))
    except (TypeError, ValueError):
        pass
    else:
        candidates += [*variables.nonlocals.values(), *variables.globals.values()]
    return [candidate for candidate in candidates if isinstance(candidate, Optimizer)]


def _hyperparameters(group: Group) -> Group:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


_hooks_lock = threading.Lock()
_hooks_installed = False


def _install_hooks() -> None:
    global _hooks_installed
    with _hooks_lock:
        if not _hooks_installed:
            register_optimizer_step_pre_hook(_before_step)
            register_optimizer_step_post_hook(_after_step)
            _hooks_installed = True


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let the step read the hyperparameters of the moment when it was submitted."""
    step = _running.get(threading.get_ident())
    if step is None:
        return None
    _refuse_raw(optimizer, step.raw)
    _discovered.add(optimizer)
    groups = step.snapshots.get(id(optimizer))
    if groups is None or len(groups) > len(optimizer.param_groups):
        return None
    # torch lets a hook replace the arguments, `self` among them: a double with other groups and the same state takes
    # the step, while schedulers go on with the groups that they know.
    double = _Double.make(optimizer, groups)
    return (double, *args[1:]), kwargs


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    double = args[0] if args else None
    if double is not optimizer and isinstance(double, Optimizer):
        _Double.merge(double, optimizer)


class _Double:
    """An optimizer with the same state and parameters and with hyperparameters of its own."""

    @staticmethod
    def make(optimizer: Optimizer, groups: Sequence[Group]) -> Optimizer:
        double: Optimizer = object.__new__(type(optimizer))
        double.__dict__.update(optimizer.__dict__)
        live = optimizer.param_groups
        double.param_groups = [
            {**group, **kept} for group, kept in zip(live, [*groups, *live[len(groups) :]], strict=True)
        ]
        double.__dict__["_roundpipe_before"] = [dict(group) for group in double.param_groups]
        return double

    @staticmethod
    def merge(double: Optimizer, optimizer: Optimizer) -> None:
        """Bring home what the step itself changed."""
        before = double.__dict__.pop("_roundpipe_before")
        for key, value in double.__dict__.items():
            if key != "param_groups" and optimizer.__dict__.get(key) is not value:
                optimizer.__dict__[key] = value
        for old, new, live in zip(before, double.param_groups, optimizer.param_groups, strict=False):
            live.update({key: value for key, value in new.items() if key not in old or old[key] is not value})


def _refuse_raw(optimizer: Optimizer, raw: Mapping[int, str]) -> None:
    names = [raw[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in raw]
    if names:
        shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        raise ValueError(
            f"{type(optimizer).__name__} holds {len(names)} of the model's own parameters ({shown}) instead of the "
            "optimizer's copies, so its step would change nothing: make the optimizer inside `with OptimizerCtx():` "
            "from model.parameters(), or from model.optim_parameters()"
        )


def assign_gradients(pairs: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Hand a window's gradients to the copies: cast to their dtype, added to what `zero_grad` left."""
    for copy, gradient in pairs:
        gradient = gradient.to(copy.dtype)
        if copy.grad is None:
            copy.grad = gradient
        else:
            copy.grad.add_(gradient)
