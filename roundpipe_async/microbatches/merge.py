"""What the microbatches give back, put together: outputs into one value, losses into one sum.

The rule for outputs is told in `roundpipe_async.microbatches.split`. All of it is plain differentiable torch, so a
merged output carries the graphs of its parts when grad mode is on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from roundpipe_async import tree
from roundpipe_async.errors import MicrobatchError
from roundpipe_async.microbatches.chunk_spec import (
    child_specs,
    described,
    is_callable,
    marker_kind,
    no_spec,
    refuse_packed,
)


def merge_outputs(outputs: Sequence[Any], spec: Any = None, sizes: Sequence[int] | None = None) -> Any:
    """One value from the outputs of all microbatches, in order.

    `spec` is None or True for the rule, a spec or structure of specs, or a callable that gets the list. With `sizes`
    (the samples of each microbatch) 0-dim tensors are averaged weighted by them, without it all count the same.
    Raises MicrobatchError naming the leaf; what a callable or reducer raises passes.
    """
    if not outputs:
        raise ValueError("there are no outputs to merge")
    if spec is False:
        raise ValueError("merge_output=False asks not to merge")
    if is_callable(spec):
        return spec(list(outputs))
    weights = None if sizes is None else _shares(sizes)
    return _merge(list(outputs), None if spec is True else spec, "output", weights, True)


def _merge(values: list[Any], spec: Any, path: str, weights: list[float] | None, direct: bool) -> Any:
    nodes = [None if isinstance(value, Tensor) else tree.open_node(value) for value in values]
    first = nodes[0]
    kind = marker_kind(spec)
    for index, node in enumerate(nodes):
        if (node is None) is not (first is None) or (node and first and not node.same_container(first)):
            raise MicrobatchError(
                f"{path} has another structure in microbatch {index} than in microbatch 0: "
                f"{tree.flatten(values[index])[1]} and {tree.flatten(values[0])[1]}; merge it with a callable"
            )
    if first is None:
        if spec is not None and kind is None:
            raise no_spec(spec, path)
        return _merge_leaf(values, spec, path, weights, direct)
    if kind != "replicate":
        refuse_packed(values[0], path)
    names = tree.child_names(values[0], first)
    specs = child_specs(spec, first, names, path)
    columns = zip(*(node.children for node in nodes if node is not None), strict=True)
    return first.rebuild(
        [
            _merge(list(column), child_spec, path + name, weights, direct and kind is None)
            for column, child_spec, name in zip(columns, specs, names, strict=True)
        ]
    )


def _merge_leaf(values: list[Any], marker: Any, path: str, weights: list[float] | None, direct: bool) -> Any:
    kind = marker_kind(marker)
    if kind == "reduce":
        merged = marker.init_value
        for value in values:
            merged = marker.reduce_fn(merged, value)
        return merged
    if kind == "replicate" or not all(isinstance(value, Tensor) for value in values):
        if kind == "chunk" and direct:
            raise MicrobatchError(f"{path} has {marker}, but is {described(values[0])}: only tensors are concatenated")
        return _agreed(values, path)
    if len({value.dtype for value in values}) > 1:
        raise _disagreement(values, path, "the dtypes differ")
    dims = {value.dim() for value in values}
    if kind == "chunk":
        return _concatenated(values, marker.split_dim, path)
    if 0 not in dims:
        return _concatenated(values, 0, path)
    if dims != {0}:
        raise _disagreement(values, path, "a 0-dim tensor cannot be concatenated")
    if not (values[0].is_floating_point() or values[0].is_complex()):
        return _agreed(values, path)
    return _averaged(values, weights)


def _concatenated(values: list[Tensor], dim: int, path: str) -> Tensor:
    first = values[0]
    if any(not -value.dim() <= dim < value.dim() for value in values):
        raise _disagreement(values, path, f"there is no dimension {dim} to concatenate along")
    shapes = {(*value.shape[: dim % value.dim()], -1, *value.shape[dim % value.dim() + 1 :]) for value in values}
    if len(shapes) > 1:
        raise _disagreement(values, path, f"they differ in more than dimension {dim}")
    return first if len(values) == 1 else torch.cat(values, dim)


def _averaged(values: list[Tensor], weights: list[float] | None) -> Tensor:
    first = values[0]
    if len(values) == 1:
        return first
    stacked = torch.stack(values)
    if weights is None:
        return stacked.mean()
    if len(weights) != len(values):
        raise ValueError(f"{len(values)} outputs, but sizes of {len(weights)} microbatches")
    wide = torch.promote_types(first.dtype, torch.float32)  # half precision has too few digits for the weights
    return (stacked.to(wide) * torch.tensor(weights, dtype=wide, device=first.device)).sum().to(first.dtype)


def _agreed(values: list[Any], path: str) -> Any:
    for value in values[1:]:
        if not _equal(value, values[0]):
            raise _disagreement(values, path, "such values must agree")
    return values[0]


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        same_kind = one.dtype == other.dtype and one.device == other.device and one.shape == other.shape
        return same_kind and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, float) and one != one:
        return bool(other != other)
    if getattr(one, "shape", None) != getattr(other, "shape", None):
        return False
    result = one == other
    if not isinstance(result, bool) and hasattr(result, "all"):  # arrays compare entry by entry
        result = result.all()
    return bool(result)


def _disagreement(values: list[Any], path: str, why: str) -> MicrobatchError:
    others = range(1, len(values))
    unlike = [index for index in others if described(values[index]) != described(values[0])]
    unlike += [index for index in others if not _equal(values[index], values[0])]
    shown = f"{_shown(values[0])} in microbatch 0"
    if unlike:
        shown += f", {_shown(values[unlike[0]])} in microbatch {unlike[0]}"
    return MicrobatchError(
        f"{path} cannot be merged: {shown}; {why}. Give a merge_output spec or callable, or merge_output=False"
    )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.dim() == 0:
        return f"{described(value)} ({value.item()})"
    return described(value)


# --- losses ----------------------------------------------------------------------------------------------------------


def loss_weights(sizes: Sequence[int] | None, reduction: Literal["sum", "mean"] | None) -> list[float] | None:
    """What each microbatch's loss is multiplied by before backward; None for "sum" (each counts as it is).

    For "mean" it is the microbatch's share of the batch, so that a per-sample mean loss and its gradients are those of
    the whole batch; MicrobatchError where the sizes are not known. (A mean over tokens of which some are ignored has
    its recipe in `roundpipe_async.microbatches.split`.)
    """
    if reduction is None or reduction == "sum":
        return None
    if reduction != "mean":
        raise ValueError(f"loss_reduction must be 'sum' or 'mean', not {reduction!r}")
    if sizes is None:
        raise MicrobatchError(
            'loss_reduction="mean" needs the number of samples of each microbatch, and what split_input returned has '
            "no tensor that tells; weight the losses in loss_fn instead"
        )
    return _shares(sizes)


def _shares(sizes: Sequence[int]) -> list[float]:
    total = sum(sizes)
    return [size / total for size in sizes]


def weighted_loss(loss: Any, weight: float | None) -> Any:
    """A microbatch's loss, or sequence of losses, times its weight; None leaves it as it is."""
    if weight is None:
        return loss
    if isinstance(loss, (list, tuple)):
        return [one * weight for one in loss]
    return loss * weight


def check_loss(loss: Any, microbatch: int) -> list[Tensor]:
    """The tensors of a microbatch's loss that backward starts from.

    A loss is a tensor of one element, or a list or tuple of them of which at least one needs a gradient (those that
    need none are only summed). TypeError for what is no tensor, ValueError otherwise, both naming the microbatch.
    """
    losses = list(loss) if isinstance(loss, (list, tuple)) else [loss]
    where = f"the loss of microbatch {microbatch}"
    if not losses:
        raise ValueError(f"{where} is an empty {type(loss).__name__}; loss_fn must return at least one loss")
    for one in losses:
        if not isinstance(one, Tensor):
            raise TypeError(
                f"{where} must be a tensor, or a list or tuple of tensors; loss_fn returned {described(one)}"
                + ("" if one is loss else f" in a {type(loss).__name__}")
            )
        if one.numel() != 1:
            raise ValueError(f"{where} must be a scalar, not a {described(one)}; reduce it with .mean() or .sum()")
    needing = [one for one in losses if one.requires_grad]
    if not needing:
        raise ValueError(
            f"{where} needs no gradient: nothing in it depends on a parameter or input that requires grad (all are "
            "frozen, or it was detached or computed without grad mode)"
        )
    return needing


def sum_losses(losses: Sequence[Any]) -> Any:
    """The sum over microbatches, in their order, as Python's `sum`: detached, one tensor, or a list of them.

    `losses` holds for each microbatch a tensor or a sequence of tensors, of the same length in all.
    """
    if not losses:
        raise ValueError("there are no losses to sum")
    several = [isinstance(loss, (list, tuple)) for loss in losses]
    lengths = [len(loss) if many else None for loss, many in zip(losses, several, strict=True)]
    for index, length in enumerate(lengths):
        if length != lengths[0]:
            raise ValueError(
                f"loss_fn returned {_counted(lengths[0])} for microbatch 0, but {_counted(length)} "
                f"for microbatch {index}"
            )
    with torch.no_grad():
        if lengths[0] is None:
            return sum(loss.detach() for loss in losses)
        return [sum(loss.detach() for loss in column) for column in zip(*losses, strict=True)]


def _counted(length: int | None) -> str:
    return "one tensor" if length is None else f"a sequence of {length}"
