"""How a model runs: the options that RoundPipe's users know, once per model and once per call.

Every option is None by default, which means "not said here": a call's options win over the model's, and the model
decides what was said nowhere. Values are checked when the config is made, so that a typing error shows at the line
that made it and not in the middle of a training step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

if TYPE_CHECKING:
    from roundpipe_async.scheduling.plan import ModelExecutePlan
    from roundpipe_async.scheduling.schedule import Schedule

SplitInput: TypeAlias = (
    "Callable[[tuple[Any, ...], dict[str, Any], int], tuple[list[tuple[Any, ...]], list[dict[str, Any]]]] "
    "| tuple[Any, Any] | Any"
)
SplitLabel: TypeAlias = "Callable[[Any, int], list[Any]] | Any"
MergeOutput: TypeAlias = "Callable[[list[Any]], Any] | bool | Any"


@dataclass(frozen=True, slots=True)
class RoundPipeRunConfig:
    """Options of a model (its `model_run_config`) or of one call (its `run_config`). None: not said here.

    A wrong value raises ValueError, a wrong type TypeError, when the config is made.
    """

    requires_grad: bool | None = None
    """Whether outputs carry a graph. Default: the caller's grad mode."""
    output_device: torch.device | None = None
    """Where outputs are put, a `torch.device` or its name. Default: the host."""
    preserve_rng_state: bool | None = None
    """Whether recompute draws the same random numbers as forward. Default: True."""
    recompute_grain: Literal["stage", "layer"] | None = None
    """What backward recomputes at once: a whole stage, or layer by layer (less memory). Default: "stage"."""
    num_microbatch: int | None = None
    """How many microbatches a batch is cut into, at most. Default: devices + 1."""
    split_input: SplitInput | None = None
    """`(spec of args, spec of kwargs)` or a callable `(args, kwargs, n) -> (list of args, list of kwargs)`; see
    `roundpipe_async.microbatches.split`. Default: by rows."""
    split_label: SplitLabel | None = None
    """A spec or a callable `(label, n) -> list`. Default: by rows."""
    merge_output: MergeOutput | None = None
    """A spec, a callable `(list of outputs) -> output`, or False to leave outputs in microbatches. Default (also
    True): tensors are concatenated, 0-dim ones averaged, other values must agree."""
    execute_plan: ModelExecutePlan | None = None
    """Which layers form the stages. Default: balanced by measured times."""
    loss_reduction: Literal["sum", "mean"] | None = None
    """How the losses of the microbatches add up: as they are, or each weighted by its share of the batch, which makes
    a per-sample mean loss that of the whole batch. Default: "sum"."""
    schedule: Literal["round_robin", "search", "search_steady"] | Schedule | None = None
    """Which device runs which stage when. Default: "round_robin", whose numbers are the same for any number of devices.
    "search" spreads stages over devices so that an iteration that starts and ends with idle devices is shortest,
    "search_steady" so that iterations submitted ahead follow each other closest: a plan's gradients are summed in a
    fixed order of its own. Or a `Schedule`. `forward_backward` alone is searched for."""

    def __post_init__(self) -> None:
        for name in ("requires_grad", "preserve_rng_state"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise TypeError(f"{name} must be True, False or None, not {value!r}")
        _one_of("recompute_grain", self.recompute_grain, ("stage", "layer"))
        _one_of("loss_reduction", self.loss_reduction, ("sum", "mean"))
        object.__setattr__(self, "num_microbatch", _count(self.num_microbatch))
        object.__setattr__(self, "output_device", _device(self.output_device))
        self._check_specs()
        plan = self.execute_plan
        if plan is not None and not (hasattr(plan, "fwd_plan") and hasattr(plan, "bwd_plan")):
            raise TypeError(f"execute_plan must be a ModelExecutePlan, not {plan!r}")
        if isinstance(self.schedule, str):
            _one_of("schedule", self.schedule, ("round_robin", "search", "search_steady"))
        elif self.schedule is not None and not hasattr(self.schedule, "runs"):
            raise TypeError(f"schedule must be the name of a way to make one, or a Schedule, not {self.schedule!r}")

    def _check_specs(self) -> None:
        spec = self.split_input
        if isinstance(spec, (bool, int, str, list, dict)) or (isinstance(spec, tuple) and len(spec) != 2):
            raise TypeError(
                "split_input must be a pair (spec of the positional arguments or None, spec of the keyword arguments "
                f"or None) or a callable (args, kwargs, num_microbatch) -> (list of args, list of kwargs), not {spec!r}"
            )
        if isinstance(self.split_label, (bool, int, str)):
            raise TypeError(
                "split_label must be a spec or a callable (label, num_microbatch) -> list of labels, "
                f"not {self.split_label!r}"
            )
        if isinstance(self.merge_output, (int, str)) and not isinstance(self.merge_output, bool):
            raise TypeError(
                f"merge_output must be a spec, a callable (outputs) -> output, or a bool, not {self.merge_output!r}"
            )

    def merged(self, call_level: RoundPipeRunConfig | None) -> RoundPipeRunConfig:
        """This config, the model's, with everything that the call says put in its place."""
        if call_level is None:
            return self
        if not isinstance(call_level, RoundPipeRunConfig):
            raise TypeError(f"run_config must be a RoundPipeRunConfig, not {call_level!r}")
        said = {field.name: getattr(call_level, field.name) for field in fields(call_level)}
        return RoundPipeRunConfig(
            **{name: value if value is not None else getattr(self, name) for name, value in said.items()}
        )


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value is None or (isinstance(value, str) and value in allowed):
        return
    error = ValueError if isinstance(value, str) else TypeError
    raise error(f"{name} must be {', '.join(map(repr, allowed))} or None, not {value!r}")


def _count(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"num_microbatch must be a whole number of at least 1, not {value!r}")
    count = operator.index(value)
    if count < 1:
        raise ValueError(f"num_microbatch must be at least 1, not {count}")
    return count


def _device(value: object) -> torch.device | None:
    if value is None or isinstance(value, torch.device):
        return value
    if not isinstance(value, str):
        raise TypeError(f"output_device must be a torch.device or its name, not {value!r}")
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"output_device is no device that torch knows: {value!r}") from error
