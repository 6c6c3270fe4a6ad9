"""Plain PyTorch on the same microbatches, one after another: what the engine must equal bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

LossFn = Callable[[Any, Any], Any]


def twin(model: nn.Module) -> nn.Module:
    """The same model with memory of its own."""
    return copy.deepcopy(model)


def plain_forward_backward(model: nn.Module, data: torch.Tensor, label: Any, loss_fn: LossFn, count: int) -> Any:
    """Sum of the microbatches' losses; gradients add up on the model."""
    total: Any = 0
    labels = label.tensor_split(count) if isinstance(label, torch.Tensor) else [label] * count
    for part, of_part in zip(data.tensor_split(count), labels, strict=True):
        loss = loss_fn(model(part), of_part)
        loss.backward()
        total = total + loss.detach()
    return total


def assert_same_gradients(one: nn.Module, other: nn.Module) -> None:
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    for (name, a), (_, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


class Pair(NamedTuple):
    """A tuple between layers."""

    hidden: torch.Tensor
    mask: torch.Tensor


@dataclass
class State:
    """A dataclass between layers; not registered with torch."""

    hidden: torch.Tensor
    depth: int
    skip: torch.Tensor | None = None


class ToTuple(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Pair:
        return Pair(self.linear(x), (x > 0).float())


class TupleToDict(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, pair: Pair) -> dict[str, Any]:
        return {"hidden": self.linear(pair.hidden) * pair.mask, "extra": (pair.hidden, 3, None, "text")}


class DictToState(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value: dict[str, Any]) -> State:
        hidden, number, nothing, text = value["extra"]
        assert (number, nothing, text) == (3, None, "text")
        return State(self.linear(value["hidden"]), 2, skip=hidden)


class FromState(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, state: State) -> torch.Tensor:
        assert state.depth == 2 and state.skip is not None
        return self.linear(state.hidden + state.skip)


class Block(nn.Module):
    """A transformer block without dropout."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    """A projection that may share its weight with an embedding."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, width) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


@dataclass(frozen=True)
class Case:
    """A model, its data and its loss."""

    name: str
    build: Callable[[], nn.Sequential]
    data: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    loss_fn: LossFn


def _token_loss(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), label.flatten())


def _decoder(tied: bool) -> nn.Sequential:
    embedding, head = nn.Embedding(17, 8), Head(8, 17)
    if tied:
        head.weight = embedding.weight
    return nn.Sequential(embedding, Block(8), Block(8), Block(8), head)


def _frozen() -> nn.Sequential:
    model = _mlp()
    for parameter in [*model[0].parameters(), *model[3].parameters()]:
        parameter.requires_grad_(False)
    return model


def _mlp() -> nn.Sequential:
    inner = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), *inner, nn.Linear(6, 3))


def _conv() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        nn.Linear(16, 3),
    )


def _trees() -> nn.Sequential:
    return nn.Sequential(ToTuple(6), TupleToDict(6), DictToState(6), FromState(6, 3))


def _vectors(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 6), torch.randint(0, 3, (rows,))


def _images(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 1, 5, 5), torch.randint(0, 3, (rows,))


def _tokens(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 17, (rows, 5)), torch.randint(0, 17, (rows, 5))


CASES: Sequence[Case] = (
    Case("mlp", _mlp, _vectors, F.cross_entropy),
    Case("frozen", _frozen, _vectors, F.cross_entropy),
    Case("conv_batchnorm", _conv, _images, F.cross_entropy),
    Case("transformer", lambda: _decoder(False), _tokens, _token_loss),
    Case("tied", lambda: _decoder(True), _tokens, _token_loss),
    Case("trees", _trees, _vectors, F.cross_entropy),
)
