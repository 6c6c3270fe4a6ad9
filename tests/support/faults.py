"""A model that fails where and when a test says so, and a harness that looks at what is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from roundpipe_async.config import RoundPipeRunConfig
from roundpipe_async.recompute import doing_recompute
from roundpipe_async.scheduling.plan import ModelExecutePlan
from tests.support.aftermath import Traces

ROWS = 9
MICROBATCHES = 3
WIDTH = 5

PLAN = ModelExecutePlan([range(0, 2), range(2, 4)], [range(4, 6), range(2, 4), range(0, 2)])
"""Layers 0 to 3 run forward, and again in backward; 4 and 5 are fused."""
CONFIG = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=PLAN)
FORWARD = RoundPipeRunConfig(execute_plan=ModelExecutePlan([range(0, 2), range(2, 6)], [range(2, 6), range(0, 2)]))
"""For calls without a loss: all layers have to be in the plan of the forward pass."""

Where = tuple[str, int, int]
"""Phase (`forward`, `recompute`, `backward`), layer and microbatch."""


class Faults:
    """What to raise where; shared by all layers of a model."""

    def __init__(self) -> None:
        self.armed: dict[Where, BaseException | Callable[[], None]] = {}
        self.visits: list[Where] = []
        self.traces = Traces()

    def arm(self, phase: str, layer: int, microbatch: int, error: BaseException | Callable[[], None]) -> None:
        """Raise `error` there (or call it), once."""
        self.armed[phase, layer, microbatch] = error

    def visit(self, phase: str, layer: int, microbatch: int) -> None:
        where = (phase, layer, microbatch)
        self.visits.append(where)
        fault = self.armed.pop(where, None)
        if isinstance(fault, BaseException):
            raise fault
        if fault is not None:
            fault()


class _Visit(torch.autograd.Function):
    """Identity that visits on its way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, faults: Faults, layer: int, microbatch: int) -> torch.Tensor:
        ctx.where = (faults, layer, microbatch)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        faults, layer, microbatch = ctx.where
        faults.traces.watch(gradient, f"gradient at layer {layer}, microbatch {microbatch}")
        faults.visit("backward", layer, microbatch)
        return gradient, None, None, None


class FaultyLayer(nn.Module):
    """Linear, BatchNorm and dropout; the last column of the input says which microbatch it is."""

    def __init__(self, index: int, faults: Faults) -> None:
        super().__init__()
        self.index = index
        self._faults = [faults]  # in a list: copies of the model share it
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def __deepcopy__(self, memo: dict[int, Any]) -> FaultyLayer:
        other = FaultyLayer(self.index, self._faults[0])
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, tag = value
        faults, microbatch = self._faults[0], int(tag[0]) // (ROWS // MICROBATCHES)
        phase = "recompute" if doing_recompute() else "forward"
        x = F.dropout(torch.tanh(self.norm(self.linear(x))), 0.2, self.training)
        x = _Visit.apply(x, faults, self.index, microbatch)  # type: ignore[no-untyped-call]
        faults.traces.watch(x, f"{phase} of layer {self.index}, microbatch {microbatch}")
        faults.visit(phase, self.index, microbatch)
        return x, tag


class FirstLayer(FaultyLayer):
    """Takes the call's arguments."""

    def forward(self, x: torch.Tensor, tag: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward((x, tag))

    def __deepcopy__(self, memo: dict[int, Any]) -> FirstLayer:
        other = FirstLayer(self.index, self._faults[0])
        other.load_state_dict(self.state_dict())
        return other


def faulty_model(seed: int = 0) -> tuple[nn.Sequential, Faults]:
    """Six layers, and where to make them fail."""
    torch.manual_seed(seed)
    faults = Faults()
    return nn.Sequential(FirstLayer(0, faults), *(FaultyLayer(i, faults) for i in range(1, 6))), faults


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and tags that say which row is which."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.arange(ROWS)


def loss_of(out: tuple[torch.Tensor, torch.Tensor], label: Any) -> torch.Tensor:
    """The default loss function of these tests."""
    return out[0].square().sum()
