"""What passes between layers: values cut from the graph that made them, and put at the root of the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_async import tree


@dataclass(slots=True, eq=False)
class Root:
    """Where the gradient of one input of a layer arrives: as autograd made it. In a leaf's `.grad` it would get the
    strides of the leaf, and sums over it, such as a bias's gradient in the layer before, another rounding."""

    gradient: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class Boundary:
    """What passes from one layer to the next for one microbatch: a pytree, cut from the graph of what made it."""

    leaves: list[Any]
    structure: tree.Structure
    needs_grad: tuple[bool, ...]
    """Which leaves would require grad, had the graph not been cut."""

    @classmethod
    def cut(cls, value: Any) -> Boundary:
        """A layer's output as the next one's input."""
        return cls.of_leaves(*tree.flatten(value))

    @classmethod
    def of_leaves(cls, leaves: list[Any], structure: tree.Structure) -> Boundary:
        """`cut` for a value that is flattened already."""
        needs = tuple(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        return cls([_cut(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure, needs)

    def enter(self) -> tuple[Any, list[Root | None]]:
        """The value to call a layer with, and what will hold the gradients of its tensors."""
        roots: list[Root | None] = []
        values = []
        for leaf, needs in zip(self.leaves, self.needs_grad, strict=True):
            root = None
            value = leaf
            if isinstance(leaf, torch.Tensor):
                value = leaf.detach()
                if needs:
                    root = Root()
                    value = _Pass.apply(value.requires_grad_(), root)  # type: ignore[no-untyped-call]
            roots.append(root)
            values.append(value)
        return self.structure.unflatten(values), roots

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Boundary:
        """The boundary with other tensors (a copy elsewhere)."""
        leaves = [fn(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return Boundary(leaves, self.structure, self.needs_grad)

    def versions(self) -> list[int | None]:
        """Counts of the in-place changes of its tensors."""
        tensors = [leaf if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else None for leaf in self.leaves]
        return [None if tensor is None else tensor._version for tensor in tensors]

    def apart_from(self, other: Boundary) -> Boundary:
        """The boundary with copies of those tensors that share memory with some of `other`."""
        shared = {_memory(leaf) for leaf in other.leaves if isinstance(leaf, torch.Tensor)} - {0}
        return self.map(lambda tensor: tensor.clone() if _memory(tensor) in shared else tensor)

    def value(self) -> Any:
        """The value itself, without a graph."""
        return self.structure.unflatten(self.leaves)


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph. A copy where it is a parameter or a view of one: torch would not let the layers to
    come change that in place, and once it is cut nothing would keep them from it."""
    root = tensor._base if tensor._is_view() else tensor
    return tensor.detach().clone() if root is not None and root.is_leaf and root.requires_grad else tensor.detach()


def _memory(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; 0 where it has none of its own (sparse, empty)."""
    if tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


class _Pass(torch.autograd.Function):
    """Identity that is no leaf and no view: a layer may change its input in place, as it may in plain PyTorch."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: Root) -> torch.Tensor:
        ctx.root = root
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None]:
        if gradient is not None:
            root = ctx.root
            root.gradient = gradient if root.gradient is None else root.gradient + gradient
        return None, None
