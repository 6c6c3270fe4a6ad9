"""Loss scaling for steps that run beside the next iteration: `torch.amp.GradScaler` made awaitable.

torch's scaler has one scale, one record per optimizer, and lives by the order of its calls in one thread. Here the
losses of an iteration, the step of the one before and an update may run at once, so the scaler keeps apart what torch
can mix: each *window* of gradients carries the factor that its losses were scaled with, each iteration keeps its own
records (`scale_ledger`), and only an awaited `update` changes the published scale (`scale_state`). What is done to
gradients, and what optimizers see of it, is torch's.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, cast, overload
from weakref import WeakKeyDictionary

import torch

from roundpipe_async.events import Event
from roundpipe_async.scaling.ledger import NEVER_SCALED, Barrier, Ledger, OptimizerRecord, Stage
from roundpipe_async.scaling.state import Factor, Rules, ScaleState, SkippedStepsError, UpdateOutcome, check_scale
from roundpipe_async.steps import StepHandle, Window, current_window, running_step, tick

__all__ = ["GradScaler", "SkippedStepsError", "UpdateOutcome"]

SKIPPED_WHOLE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Fused optimizers of torch, which make or leave state behind even when their kernel skips: not called at all then."""

_CPU = torch.device("cpu")


class GradScaler:
    """Scales losses so that fp16 gradients do not underflow, and skips steps whose gradients overflowed.

    Used as `torch.amp.GradScaler`, with `await` before `update`::

        loss = await model.forward_backward(..., loss_fn=lambda out, lab: scaler.scale(criterion(out, lab)) / n)
        real_loss = loss.item() / scaler.get_scale()  # before update: it may change the scale
        await model.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()))
        outcome = await scaler.update()

    `scale` and `get_scale` may be called in any thread and never wait. Inside a step function `unscale_` and `step`
    work on that step's gradients, with the factor that its own losses were scaled with; outside they act at once on
    the gradients that the optimizer's parameters hold, as torch's do. With steps that are one step old an overflow is
    seen one iteration late, so it skips two steps and backs off twice.

    The state is on the host and gradients may be on any device, whatever `device` says: `GradScaler("cuda")` works
    and stays enabled on a machine without CUDA. A scaler may be made at import time and used in one event loop after
    another. Errors of misuse are torch's.

    Beyond torch, off by default: `min_scale` and `max_scale` bound what updates make of the scale. `hysteresis=n`:
    the first n - 1 overflows of a row leave the scale as it is. `max_consecutive_skips=n`: the barrier that learns of
    more than n overflows in a row raises `SkippedStepsError`. Always: the scale stays finite and at least 2**-126
    (torch's falls to 0), a warning is given when an overflow first takes it below 1, and `skipped_steps` counts.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        max_consecutive_skips: int | None = None,
    ) -> None:
        rules = Rules(growth_factor, backoff_factor, growth_interval, hysteresis=hysteresis)
        if enabled:
            if not growth_factor > 1.0:
                raise AssertionError(f"growth_factor must be greater than 1.0, not {growth_factor!r}")
            if not backoff_factor < 1.0:
                raise AssertionError(f"backoff_factor must be less than 1.0, not {backoff_factor!r}")
            if not backoff_factor > 0.0:
                raise ValueError(f"backoff_factor must be greater than 0, not {backoff_factor!r}")
            check_scale("init_scale", init_scale)
            if min_scale is not None:
                rules = replace(rules, min_scale=check_scale("min_scale", min_scale))
            if max_scale is not None and max_scale != math.inf:
                rules = replace(rules, max_scale=check_scale("max_scale", max_scale))
            if not rules.min_scale <= init_scale <= rules.max_scale:
                raise ValueError(f"init_scale={init_scale!r} must lie from {min_scale=} to {max_scale=}")
            if hysteresis < 1:
                raise ValueError(f"hysteresis must be at least 1 (back off at every overflow), not {hysteresis!r}")
        self._device = device
        self._enabled = enabled
        self._rules = rules
        self._ledger = Ledger(ScaleState(Factor(init_scale)), enabled, max_consecutive_skips)
        self._key = object()  # under which windows pin this scaler's factor
        self._outside = Window()  # of gradients that no engine call or step function knows of
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    # --- losses ---

    @overload
    def scale(self, outputs: torch.Tensor) -> torch.Tensor: ...

    @overload
    def scale(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]: ...

    @overload
    def scale(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]: ...

    @overload
    def scale(self, outputs: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]: ...

    def scale(self, outputs: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor | Iterable[torch.Tensor]:
        """Multiply a tensor, or each tensor of a (nested) list, tuple or iterable, by the scale. Any thread; no wait.

        In the work of a call (a layer, `loss_fn`) the factor is the one that was in force when the first call of its
        window of gradients was made, whatever was updated meanwhile; in a step function that of the step's gradients;
        elsewhere the published one. The product keeps its factor: if `update` comes before its backward, the gradient
        is brought to the factor of the window that it flows into (exactly, between powers of two).
        """
        if not self._enabled:
            return outputs
        factor, outside = self._factor_here()
        return cast("torch.Tensor | Iterable[torch.Tensor]", self._scaled(outputs, factor, outside))

    def _scaled(self, outputs: Any, factor: Factor, outside: bool) -> Any:
        if isinstance(outputs, torch.Tensor):
            self._ledger.initialized = True
            product = outputs * factor.on(outputs.device)
            if product.requires_grad:
                register_hook: Callable[[Callable[[torch.Tensor], torch.Tensor | None]], object] = product.register_hook
                register_hook(partial(self._bring_to_window, factor=factor, outside=outside))
            return product
        if isinstance(outputs, Iterable):
            scaled = map(partial(self._scaled, factor=factor, outside=outside), outputs)
            return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled
        raise ValueError(f"scale() takes a tensor or an iterable of tensors, not {type(outputs).__name__}")

    def _factor_here(self) -> tuple[Factor, bool]:
        """The factor that a loss made here gets, and whether here is outside of all calls and steps."""
        if (step := running_step()) is not None:
            scheduled_at = step.handle.scheduled_at
            return step.window.pin(self._key, lambda: self._ledger.as_of(scheduled_at)), False
        if (window := current_window.get()) is not None:
            opened_at = window.opened_at
            return window.pin(self._key, lambda: self._ledger.as_of(tick() if opened_at is None else opened_at)), False
        return self._ledger.published.factor, True

    def _bring_to_window(self, grad: torch.Tensor, factor: Factor, outside: bool) -> torch.Tensor | None:
        """Runs in backward, on the gradient of a scaled loss: the window's first factor wins, others adapt."""
        window = current_window.get()
        if window is None:
            # The threads in which autograd walks an accelerator's graph have no context variables: nothing is known
            # there, and torch's rule holds (the published scale at the time of unscaling).
            if not outside or grad.device != _CPU or running_step() is not None:
                return None
            window = self._outside
        pinned = window.pin(self._key, lambda: factor)
        return None if pinned.value == factor.value else grad * (pinned.value / factor.value)

    # --- gradients ---

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale of their losses and look for inf and NaN; once before `step`.

        Inside a step function, or at once outside of one: then it first waits for the steps of a pending update (it
        blocks the thread: prefer a step function). fp16 gradients: ValueError, and nothing is touched.
        """
        if not self._enabled:
            return
        self._check_scaled("unscale_()")
        record, factor = self._record_here(optimizer)
        if record.stage is Stage.UNSCALED:
            raise RuntimeError("unscale_() was called on this optimizer before, since the last update()")
        if record.stage is Stage.STEPPED:
            raise RuntimeError("unscale_() came after step() of this optimizer")
        self._unscale(record, factor)

    def _unscale(self, record: OptimizerRecord, factor: Factor) -> None:
        found = _check_and_multiply(record.optimizer, factor.inverse(_CPU), allow_fp16=False)
        if factor.value < 1.0:  # what was finite may have overflowed now
            for device, again in _check_and_multiply(record.optimizer, Factor(1.0).on(_CPU), allow_fp16=True).items():
                found[device] = torch.maximum(found[device], again)
        record.found_infs, record.stage = found, Stage.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale (unless done), look for inf and NaN in every gradient, then `optimizer.step(*args, **kwargs)` or not.

        Returns what `optimizer.step` does, None after a skip; parameters and optimizer state are then as before. Once
        for each optimizer and update; closures are not supported. Where it runs: as `unscale_`. Optimizers that take
        `grad_scale` and `found_inf`, or `grad_scaler=`, get them as from torch's scaler, and keep nothing of them.
        """
        if not self._enabled:
            return cast("float | None", optimizer.step(*args, **kwargs))
        if "closure" in kwargs:
            raise RuntimeError("step() of an enabled GradScaler takes no closure")
        self._check_scaled("step()")
        record, factor = self._record_here(optimizer)
        if record.stage is Stage.STEPPED:
            raise RuntimeError("step() was called on this optimizer before, since the last update()")
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            result = self._step_that_unscales(record, factor, args, kwargs)
        else:
            if record.stage is Stage.READY:
                self._unscale(record, factor)
            _check_inf_checks(record)
            result = None if record.read_found_inf() else optimizer.step(*args, **kwargs)
        record.stage = Stage.STEPPED
        return cast("float | None", result)

    def _step_that_unscales(self, record: OptimizerRecord, factor: Factor, args: Any, kwargs: dict[str, Any]) -> Any:
        """The step of an optimizer that unscales by itself, by torch's protocol."""
        optimizer: Any = record.optimizer
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
            result = optimizer.step(*args, **kwargs, grad_scaler=self)
            record.read_found_inf()
            return result
        unscaled = record.stage is Stage.UNSCALED
        if not unscaled:
            _refuse_fp16(optimizer)
            record.found_infs = _check_and_multiply(optimizer, Factor(1.0).on(_CPU), allow_fp16=True)
        _check_inf_checks(record)
        found_inf = record.read_found_inf() or 0.0
        if found_inf and isinstance(optimizer, SKIPPED_WHOLE):
            return None
        try:
            # a grad_scale that the user set is part of the product, unless the gradients are unscaled already
            own = getattr(optimizer, "grad_scale", None)
            optimizer.grad_scale = own if unscaled else factor.on(_CPU) * (1 if own is None else own)
            optimizer.found_inf = torch.full((), found_inf, dtype=torch.float32)
            return optimizer.step(*args, **kwargs)
        finally:
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)

    def _record_here(self, optimizer: torch.optim.Optimizer) -> tuple[OptimizerRecord, Factor]:
        """The record that work on this optimizer goes to, and the factor of the gradients that it sees."""
        if (step := running_step()) is not None:
            return self._ledger.iteration_of(step.handle).record_of(optimizer), self._factor_here()[0]
        if current_window.get() is not None:
            raise RuntimeError(
                "unscale_() and step() were called in the work of a call (a layer, loss_fn or hook), where gradients "
                "are not complete: call them in a step function, as in `await model.step(lambda: scaler.step(opt))`"
            )
        self._ledger.settle_pending()
        iteration = self._ledger.iteration_of(None)
        iteration.unscaled_directly = True
        factor = self._outside.get(self._key)
        return iteration.record_of(optimizer), self._ledger.published.factor if factor is None else factor

    def _check_scaled(self, what: str) -> None:
        if not self._ledger.initialized:
            raise AssertionError(NEVER_SCALED.format(what))

    # --- updates ---

    def update(
        self, new_scale: float | torch.Tensor | None = None, is_async: bool = True
    ) -> Coroutine[Any, Any, UpdateOutcome]:
        """Await it once an iteration, after the steps: back off after an overflow, grow after enough good updates.

        A barrier behind the steps of all models that were scheduled before this *call*: its place among steps, calls
        and setters is that of the call, whenever the coroutine is awaited. `is_async=True` waits only for the steps
        of the update before this one and puts that one's result in force: an update takes effect one update later, as
        parameters of background steps do. `is_async=False` waits for the steps in flight and takes effect at once.

        `new_scale` (a number or a one-element tensor, copied at the call) becomes the scale instead of the computed
        one, by the same timetable. Where nothing was unscaled or stepped since the last update: AssertionError (where
        that cannot be known yet because a step is in flight, from the next barrier), and it does not count. The error
        of a background step that nobody saw is raised here, once; the update happens nevertheless.

        An update happens exactly once, at the call: when its coroutine is cancelled, dropped, or its event loop ends,
        the next `update` or `synchronize` in any event loop waits for its steps and puts its result in force, too.

        Inside a step function: RuntimeError, at the call.
        """
        self._refuse_in_step("update()")
        value = None if new_scale is None or not self._enabled else self._checked_new_scale(new_scale)
        barrier, ended = self._ledger.close(self._rules, value, is_async)
        if ended.unscaled_directly:
            self._outside = Window()  # these gradients are used: the next ones may have another factor
        return self._finish(barrier)

    def synchronize(self) -> Coroutine[Any, Any, UpdateOutcome]:
        """Wait for all steps scheduled before this call, settle all updates called before it and put them in force.

        Raises what `update` would, except for having nothing to do.
        """
        self._refuse_in_step("synchronize()")
        return self._finish(self._ledger.everything())

    async def _finish(self, barrier: Barrier) -> UpdateOutcome:
        if not barrier.done.done():
            # Who has to wait is served one at a time, in order. One lock a loop: asyncio's belong to the loop that
            # they were first contended in, the scaler to none.
            async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
                await barrier.done  # a future of this loop; cancelled, it loses nothing: the book has the update
        return self._ledger.finish(barrier)

    @staticmethod
    def _refuse_in_step(what: str) -> None:
        if running_step() is not None:
            raise RuntimeError(
                f"{what} was called inside a step function; it waits for steps: await it outside, after model.step()"
            )

    def _checked_new_scale(self, new_scale: float | torch.Tensor) -> float:
        if isinstance(new_scale, torch.Tensor):
            if new_scale.numel() != 1:
                raise AssertionError(f"new_scale must have one element, not shape {tuple(new_scale.shape)}")
            if new_scale.requires_grad:
                raise AssertionError("new_scale must not require grad: pass new_scale.detach()")
            new_scale = new_scale.item()
        elif not isinstance(new_scale, float | int):
            raise TypeError(f"new_scale must be a float or a one-element tensor, not {type(new_scale).__name__}")
        value, rules = check_scale("new_scale", new_scale), self._rules
        if not rules.min_scale <= value <= rules.max_scale:
            raise ValueError(f"new_scale={value!r} is not within min_scale and max_scale")
        return value

    # --- what is in force ---

    def get_scale(self) -> float:
        """The scale, as a Python float; 1.0 when disabled. Any thread; never waits.

        The published one: the last `update` to be awaited put it in force. Inside a step function that of the
        gradients that the step works on, in the work of a call the one that `scale` multiplies with there.
        """
        if not self._enabled or not self._ledger.initialized:
            return self._ledger.scale()
        if running_step() is not None:
            return self._factor_here()[0].value
        window = current_window.get()
        if window is not None and window.opened_at is not None:
            return cast(Factor, window.get(self._key) or self._ledger.as_of(window.opened_at)).value
        return self._ledger.scale()

    @property
    def skipped_steps(self) -> int:
        """How many `step` calls were skipped, as of the last update in force."""
        return self._ledger.published.skipped_steps

    def is_enabled(self) -> bool:
        """Whether losses are scaled at all."""
        return self._enabled

    def get_growth_factor(self) -> float:
        """The growth factor last set."""
        return self._rules.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by when it grows: from the next `update` that is called."""
        self._rules = replace(self._rules, growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """The backoff factor last set."""
        return self._rules.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by after an overflow: from the next `update` that is called."""
        self._rules = replace(self._rules, backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """The growth interval last set."""
        return self._rules.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set how many good updates in a row make the scale grow: from the next `update` that is called.

        As in torch the count must *reach* it: when it is set below the count, the scale grows no more until an
        overflow starts the count anew.
        """
        self._rules = replace(self._rules, growth_interval=new_interval)

    # --- saving ---

    def state_dict(self) -> dict[str, Any]:
        """The five values that torch's scaler saves, loadable there and back; empty when disabled. Never waits.

        Scale and growth tracker are those of the last update in force; for the newest, `await synchronize()` before.
        With `hysteresis` or `max_consecutive_skips` the count of overflows in a row is a sixth.
        """
        return self._saved(self._ledger.published, self._rules)

    def boundary_state_dict(self, flying: Iterable[StepHandle]) -> tuple[Event[None], Callable[[], dict[str, Any]]]:
        """What `state_dict` will give when every update called so far is in force, for a checkpoint beside training.

        An event, and a function that gives the dict once that happened; training goes on as if nobody had asked.
        AssertionError between `step` and `update`, as for pickle; `flying` are the model's steps in flight.
        """
        event, newest = self._ledger.newest(flying)
        rules = self._rules
        return event, lambda: self._saved(newest(), rules)

    def _saved(self, state: ScaleState, rules: Rules) -> dict[str, Any]:
        if not self._enabled:
            return {}
        saved: dict[str, Any] = {
            "scale": state.factor.value if self._ledger.initialized else state.factor.raw,
            "growth_factor": rules.growth_factor,
            "backoff_factor": rules.backoff_factor,
            "growth_interval": rules.growth_interval,
            "_growth_tracker": state.tracker,
        }
        if rules.hysteresis > 1 or self._ledger.max_consecutive_skips is not None:
            saved["_consecutive_skips"] = state.consecutive_skips
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class or torch's gave, all of it or (on an error) nothing.

        It is in force at once and replaces what updates that are still pending would have led to. Gradients whose
        losses were scaled before keep their factor. No-op when disabled; RuntimeError for an empty dict.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("the state dict is empty: was it saved from a disabled GradScaler?")
        names = ("growth_factor", "backoff_factor", "growth_interval")
        rules = replace(self._rules, **{name: state_dict[name] for name in names})
        scale, tracker = state_dict["scale"], int(state_dict["_growth_tracker"])
        value = check_scale("the scale in the state dict", scale)
        clamped = min(max(value, rules.min_scale), rules.max_scale)
        state = replace(
            self._ledger.published,
            factor=Factor(scale if clamped == value else clamped),
            tracker=tracker,
            consecutive_skips=state_dict.get("_consecutive_skips", 0),
        )
        self._rules = rules
        self._ledger.load(state)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy.deepcopy: the newest state, so steps in flight are waited for (blocks the thread)."""
        if running_step() is not None:
            raise AssertionError("a GradScaler cannot be pickled or copied inside a step function")
        state = self._ledger.clone_state() if self._enabled else self._ledger.published
        scale = state.factor.value if self._ledger.initialized else state.factor.raw
        return {
            "device": self._device,
            "enabled": self._enabled,
            "rules": self._rules,
            "state": replace(state, factor=Factor(scale)),
            "max_consecutive_skips": self._ledger.max_consecutive_skips,
            "warned": self._ledger.warned,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._device, self._enabled, self._rules = state["device"], state["enabled"], state["rules"]
        self._ledger = Ledger(state["state"], self._enabled, state["max_consecutive_skips"])
        self._ledger.warned = state["warned"]
        self._key, self._outside, self._locks = object(), Window(), WeakKeyDictionary()

    # --- what optimizers with a `grad_scaler` argument, and libraries written for torch's scaler, ask of it ---

    def _get_scale_async(self) -> torch.Tensor | None:
        return self._factor_here()[0].on(_CPU) if self._ledger.initialized else None

    def _get_growth_tracker(self) -> int:
        return self._ledger.published.tracker if self._enabled else 0

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, torch.Tensor]:
        self._check_scaled("_check_inf_per_device()")
        record, _ = self._record_here(optimizer)
        record.found_infs = _check_and_multiply(optimizer, Factor(1.0).on(_CPU), allow_fp16=True)
        return record.found_infs

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, torch.Tensor]:
        return self._record_here(optimizer)[0].found_infs


def _check_and_multiply(
    optimizer: torch.optim.Optimizer, by: torch.Tensor, allow_fp16: bool
) -> dict[torch.device, torch.Tensor]:
    """Multiply all gradients in place; for each device that has some, 1 where inf or NaN was among them before."""
    unscale: Callable[..., dict[torch.device, torch.Tensor]] = torch.amp.GradScaler._unscale_grads_
    return unscale(None, optimizer, by, torch.zeros((), dtype=torch.float32), allow_fp16)


def _refuse_fp16(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and param.grad.dtype == torch.float16:
                raise ValueError(
                    "the gradients to unscale are fp16, which overflows: give the optimizer fp32 copies "
                    "(RoundPipe's optim_dtype=torch.float32, parameters from OptimizerCtx)"
                )


def _check_inf_checks(record: OptimizerRecord) -> None:
    if not record.found_infs:
        raise AssertionError(
            f"step() of this {type(record.optimizer).__name__} found no gradients to look for inf in: "
            f"no loss reached its parameters, or unscale_() was called before backward"
        )
