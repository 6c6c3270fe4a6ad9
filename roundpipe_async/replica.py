"""Shallow copies of modules that hold other tensors: what a device runs instead of the user's module.

The user's module must not be touched by a worker: its parameters are published, read and stepped meanwhile, and two
devices may run the same layer at once. A replica shares everything with its module (code, hooks, plain attributes)
except the containers of parameters, buffers and submodules. Ties hold: one module or parameter in two places is one
in the replica. References to submodules or parameters that hide in plain attributes (a list of blocks, a bound method
stored in `__init__`) are rewritten to the replica's; what cannot be replicated is refused with a TypeError.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_MODULE_INTERNALS = frozenset(nn.Module().__dict__)


class Blueprint:
    """How to replicate one layer: its modules and the plain attributes in which references hide."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.modules = tuple(layer.modules())
        for module in self.modules:
            if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
                raise TypeError(
                    f"{type(module).__name__} cannot be replicated: its compiled code is bound to its own parameters. "
                    "Wrap the plain module, and compile functions inside its forward instead"
                )
        known: set[int] = {id(module) for module in self.modules}
        known |= {id(parameter) for parameter in layer.parameters()}
        self._hidden: dict[int, tuple[str, ...]] = {}
        for module in self.modules:
            names = tuple(
                name
                for name, value in module.__dict__.items()
                if name not in _MODULE_INTERNALS and _refers(value, known, depth=3)
            )
            if names:
                self._hidden[id(module)] = names

    def replicate(self, tensors: Mapping[int, torch.Tensor], training: Mapping[int, bool]) -> Replica:
        """A replica whose parameters and buffers are `tensors[id(original)]` (buffers that are not in it: shared)."""
        copies: dict[int, Any] = {}
        root = self._copy(self.layer, tensors, training, copies)
        for key, names in self._hidden.items():
            copy = copies.get(key)
            if copy is not None:
                for name in names:
                    copy.__dict__[name] = _rewrite(copy.__dict__[name], copies, tensors)
        for copy in copies.values():
            if isinstance(copy, nn.RNNBase):  # torch keeps a second list of the weights there
                copy._flat_weights = [getattr(copy, name, None) for name in copy._flat_weights_names]
        return Replica(root, copies)

    def _copy(
        self,
        module: nn.Module,
        tensors: Mapping[int, torch.Tensor],
        training: Mapping[int, bool],
        copies: dict[int, Any],
    ) -> nn.Module:
        found = copies.get(id(module))
        if found is not None:
            return found  # type: ignore[no-any-return]
        copy = module.__new__(type(module))
        copies[id(module)] = copy
        values = copy.__dict__
        values.update(module.__dict__)
        values["training"] = training.get(id(module), module.training)
        values["_parameters"] = {
            name: None if parameter is None else _lookup(tensors, parameter, name, module)
            for name, parameter in module._parameters.items()
        }
        values["_buffers"] = {
            name: None if buffer is None else tensors.get(id(buffer), buffer)
            for name, buffer in module._buffers.items()
        }
        values["_modules"] = {
            name: None if child is None else self._copy(child, tensors, training, copies)
            for name, child in module._modules.items()
        }
        return copy


class Replica:
    """A replicated layer: call `module`; `of(original)` finds the copy of a submodule."""

    __slots__ = ("_copies", "module")

    def __init__(self, module: nn.Module, copies: dict[int, Any]) -> None:
        self.module = module
        self._copies = copies

    def of(self, original: nn.Module) -> nn.Module:
        """The copy of one of the layer's modules."""
        return self._copies[id(original)]  # type: ignore[no-any-return]


def as_parameter(
    original: nn.Parameter, tensor: torch.Tensor, requires_grad: bool, hooked: bool = True
) -> nn.Parameter:
    """A leaf that stands for `original` in replicas: `tensor`'s memory, `original`'s attributes and gradient hooks.

    Not `hooked` where the leaf gets only a part of a gradient: then `through_hooks` is for the whole.
    """
    leaf = nn.Parameter(tensor.detach(), requires_grad=requires_grad)
    if original.__dict__:
        leaf.__dict__.update(original.__dict__)
    if requires_grad and hooked:
        if original._backward_hooks:
            leaf._backward_hooks = original._backward_hooks
        if original._post_accumulate_grad_hooks:
            leaf._post_accumulate_grad_hooks = original._post_accumulate_grad_hooks
    return leaf


def through_hooks(original: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """What the hooks of a parameter (`register_hook`) make of one backward's gradient."""
    with torch.no_grad():
        for hook in list((original._backward_hooks or {}).values()):
            result = hook(gradient)
            gradient = gradient if result is None else result
    return gradient


def accumulated(original: nn.Parameter, total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor | None:
    """`total` and one backward's gradient added up, as the parameter's post-accumulate hooks leave it."""
    total = gradient if total is None else total + gradient
    hooks = original._post_accumulate_grad_hooks
    if not hooks:
        return total
    leaf = as_parameter(original, original, True, hooked=False)
    leaf.grad = total
    with torch.no_grad():
        for hook in list(hooks.values()):
            hook(leaf)
    return leaf.grad


def _lookup(tensors: Mapping[int, torch.Tensor], parameter: nn.Parameter, name: str, module: nn.Module) -> torch.Tensor:
    try:
        return tensors[id(parameter)]
    except KeyError:
        raise RuntimeError(
            f"parameter {name!r} of {type(module).__name__} was added to the model after it was wrapped; "
            "wrap the model again"
        ) from None


def _refers(value: Any, known: set[int], depth: int) -> bool:
    if isinstance(value, (nn.Module, nn.Parameter)):
        return id(value) in known
    if isinstance(value, types.MethodType):
        return id(value.__self__) in known
    if depth and isinstance(value, dict):
        return any(_refers(item, known, depth - 1) for item in value.values())
    if depth and isinstance(value, (list, tuple)):
        return any(_refers(item, known, depth - 1) for item in value)
    return False


def _rewrite(value: Any, copies: Mapping[int, Any], tensors: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, nn.Parameter):
        return tensors.get(id(value), value)
    if isinstance(value, types.MethodType):
        owner = copies.get(id(value.__self__))
        return value if owner is None else types.MethodType(value.__func__, owner)
    if isinstance(value, dict):
        return type(value)((key, _rewrite(item, copies, tensors)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_rewrite(item, copies, tensors) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_rewrite(item, copies, tensors) for item in value)
    return value
