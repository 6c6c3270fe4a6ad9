"""The arithmetic of loss scaling, as values: a scale factor, the state after each update, the rules between them.

torch's scaler keeps its scale and growth tracker in tensors that every update overwrites; here losses, steps and
updates of neighbouring iterations run at once, so each update makes a new state and nobody's state changes under
them. `advance` is `torch._amp_update_scale_` (fp32 scale, double factor, one rounding, equality with the growth
interval) on Python numbers: the event loop's thread runs it, and it must run no tensor operation.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch

from roundpipe_async.errors import RoundPipeError

SMALLEST = 2.0**-126
"""The least scale: the smallest fp32 number whose reciprocal is finite by a margin. torch's would go on to zero."""


class SkippedStepsError(RoundPipeError, RuntimeError):
    """More updates in a row found inf or NaN than `max_consecutive_skips` allows."""


def round_to_fp32(number: float) -> float:
    """The nearest fp32 number; ±inf where it is too large for fp32."""
    return ctypes.c_float(number).value


def check_scale(name: str, value: float) -> float:
    """`value` rounded to fp32, or ValueError where it cannot be a scale: it must be finite and positive."""
    rounded = round_to_fp32(value)
    if not SMALLEST <= rounded < math.inf:
        raise ValueError(f"{name} must be a finite fp32 number of at least 2**-126 (about 1.2e-38), not {value!r}")
    return rounded


class Factor:
    """One value of the scale, rounded to fp32, with a tensor of it for each device that asked. Never changes."""

    __slots__ = ("_inverses", "_tensors", "raw", "value")

    def __init__(self, raw: float) -> None:
        self.raw = raw
        """As given, before rounding: what torch's scaler tells until it is first used."""
        self.value = round_to_fp32(raw)
        self._tensors: dict[torch.device, torch.Tensor] = {}
        self._inverses: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """The factor as a 0-dim fp32 tensor, so that a 0-dim fp16 loss times it is fp32. Read only."""
        tensor = self._tensors.get(device)
        if tensor is None:
            tensor = self._tensors[device] = constant(self.value, device)
        return tensor

    def inverse(self, device: torch.device) -> torch.Tensor:
        """1 / factor in fp64, rounded to fp32. Read only."""
        tensor = self._inverses.get(device)
        if tensor is None:
            tensor = self._inverses[device] = constant(1.0 / self.value, device)
        return tensor

    def __reduce__(self) -> tuple[type[Factor], tuple[float]]:
        return Factor, (self.raw,)

    def __repr__(self) -> str:
        return f"Factor({self.value!r})"


def constant(value: float, device: torch.device) -> torch.Tensor:
    """A 0-dim fp32 tensor that autograd may save, even when it is made inside `torch.inference_mode`."""
    with torch.inference_mode(False):
        return torch.full((), value, dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True)
class Rules:
    """What an update does to the scale. Those of torch, and three of our own that are off by default."""

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = SMALLEST
    max_scale: float = math.inf
    hysteresis: int = 1

    def clamped(self, scale: float, otherwise: float) -> float:
        """`scale` in fp32 and within bounds; `otherwise` where it is not a finite number."""
        scale = round_to_fp32(scale)
        if not math.isfinite(scale):
            return otherwise
        return min(max(scale, self.min_scale), self.max_scale)


@dataclass(frozen=True, slots=True)
class ScaleState:
    """What an update leaves: scale and growth tracker, a pair that belongs together, and what was counted so far."""

    factor: Factor
    tracker: int = 0
    consecutive_skips: int = 0
    """Updates in a row that found inf or NaN."""
    skipped_steps: int = 0
    """`scaler.step` calls that were skipped since the scaler was made."""
    last_finite: float | None = None
    """The scale of the last update that found no inf or NaN."""


def advance(
    state: ScaleState, rules: Rules, found_inf: float | None, new_scale: float | None, skips: int
) -> ScaleState:
    """The state after an update over gradients in which `found_inf` (a sum over optimizers and devices) was found.

    `found_inf=None`: nothing was looked at. With `new_scale` (fp32, checked) the scale is that and the tracker stays,
    as in torch. `skips`: how many optimizer steps were skipped.
    """
    if found_inf is None:
        consecutive, last_finite = state.consecutive_skips, state.last_finite
    elif found_inf:
        consecutive, last_finite = state.consecutive_skips + 1, state.last_finite
    else:
        consecutive, last_finite = 0, state.factor.value
    scale, tracker = state.factor.value, state.tracker
    if new_scale is not None:
        scale = new_scale
    elif found_inf:
        tracker = 0
        if consecutive >= rules.hysteresis:
            scale = rules.clamped(scale * rules.backoff_factor, otherwise=scale)
    else:
        tracker += 1
        if tracker == rules.growth_interval:
            scale, tracker = rules.clamped(scale * rules.growth_factor, otherwise=scale), 0
    factor = state.factor if scale == state.factor.value else Factor(scale)
    return ScaleState(factor, tracker, consecutive, state.skipped_steps + skips, last_finite)


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """What an `update` tells its caller.

    With `is_async=True` an update settles the one before it, so the first settles none. What a cancelled or failed
    update settled is told by the next one: over a run nothing is told twice or left out. To move a learning-rate
    schedule once for each good step: `for _ in range(outcome.good): schedule.step()`.
    """

    scale: float
    """The scale now in force."""
    skipped: bool
    """Whether an update that is settled now found inf or NaN, so that a step was skipped."""
    settled: int
    """How many updates are settled now and were not told of before."""
    good: int
    """How many of those had a step and skipped none."""

    @property
    def stepped(self) -> bool:
        """Whether a step was made and none was skipped, in what is settled now."""
        return self.good > 0 and not self.skipped
