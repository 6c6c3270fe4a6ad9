"""One batch into microbatches, and what they give back into one value.

**The rule.** The batch size is the number of rows (dim 0) of the first tensor with at least one dimension, in the order
of positional arguments, then keyword arguments, then (where those hold none) the label. Every tensor with that many
rows is cut along dim 0 into `min(num_microbatch, batch size)` chunks whose sizes differ by at most one, the larger
ones first, as `torch.tensor_split` does. Everything else is given whole to every microbatch: tensors with another
number of rows, 0-dim tensors, numbers, strings, objects; lists that are not made of tensors are never cut, and a list
that somebody split already is not guessed at. What is given whole is said once in a log line. An empty batch is an
error. With no tensor anywhere there is one microbatch. Chunks are views: nothing is copied, and gradients of an input
flow through them.

**Specs** replace the rule leaf by leaf: `TensorChunkSpec(dim)`, `_Replicate` and, for outputs, `_CustomReducer` of
`torch.distributed.pipelining.microbatch`, in the structure of the value. One spec may stand for a whole subtree, None
stands for the rule, and a dict may leave keys out (the rule again) but not name others. A tensor cut by an explicit
spec must have as many entries along that dimension as the batch has samples, or a multiple (so many to a sample);
the first such tensor decides the batch size.

**Callables** replace everything: `split_input(args, kwargs, n) -> (list of args, list of kwargs)`, whose length is then
the number of microbatches, `split_label(label, n) -> list`, `merge_output(outputs) -> output`. Labels that no callable
splits are cut where `split_input` cut the inputs, if the rows of its first tensors tell.

**Outputs** are merged by one rule, for one microbatch as for many: tensors are concatenated along dim 0; 0-dim
floating-point and complex tensors are averaged; 0-dim tensors of whole numbers and bools, and all other values, must
agree, for their average would be something else. Differing types, dtypes or structures are an error that names the
leaf. Containers keep their type.

**A token mean over the whole batch** (padding ignored, so microbatches of different weight) needs no option: divide
each microbatch's *sum* by the number of tokens of the batch, which a 0-dim tensor in the label carries whole to each:

    label = (targets, (targets != -100).sum())

    def loss_fn(logits, label):
        targets, num_tokens = label
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum") / num_tokens

The losses then add up to the batch's token mean, and so do their gradients (`loss_reduction="sum"`, the default).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

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
from roundpipe_async.microbatches.merge import check_loss, loss_weights, merge_outputs, sum_losses, weighted_loss

__all__ = [
    "SplitCall",
    "SplitInputs",
    "check_loss",
    "chunk_sizes",
    "loss_weights",
    "merge_outputs",
    "split_call",
    "split_inputs",
    "split_label",
    "sum_losses",
    "weighted_loss",
]

logger = logging.getLogger("roundpipe_async")


@dataclass(frozen=True, slots=True)
class SplitInputs:
    """The inputs of the microbatches, in order."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    sizes: list[int] | None
    """Samples of each microbatch; None where a callable split the inputs and its results do not tell."""
    batch_size: int | None
    """Samples in all; None where no tensor tells."""


@dataclass(frozen=True, slots=True)
class SplitCall:
    """Inputs and labels of the microbatches of one call, in order; all three lists have the same length."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    labels: list[Any]
    sizes: list[int] | None
    """Samples of each microbatch; None where a callable split the inputs and its results do not tell."""


class _Leaf(NamedTuple):
    path: str
    value: Any
    marker: Any
    """The spec that holds here, or None for the rule."""
    direct: bool
    """Whether the spec was given for this very leaf, not for a subtree around it."""


def split_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    label: Any,
    num_microbatch: int,
    split_input: Any = None,
    label_spec: Any = None,
    *,
    name: str = "",
    logged: set[str] | None = None,
) -> SplitCall:
    """Cut inputs and label of a call into microbatches, by the module's rule, the specs or the callables.

    `name` says in the log line which model's input is given whole to every microbatch; `logged` holds the paths of
    which that was said already (None: say it each time). Raises MicrobatchError; what a callable raises passes.
    """
    say = _Teller(name, logged)
    batch_size = None
    if not is_callable(split_input):
        batch_size = _batch_size(_input_leaves(args, kwargs, split_input))
        if batch_size is None and is_callable(label_spec):
            labels = _call_split_label(label_spec, label, _checked_count(num_microbatch))
            count = len(labels)
            return SplitCall(*_replicated(args, kwargs, count), labels=labels, sizes=[1] if count == 1 else None)
        if batch_size is None:
            batch_size = _batch_size(_leaves(label, label_spec, "label"))
    inputs = split_inputs(args, kwargs, num_microbatch, split_input, batch_size=batch_size, say=say)
    if is_callable(split_input) and not is_callable(label_spec) and inputs.batch_size is not None:
        _check_label_fits(_leaves(label, label_spec, "label"), inputs.batch_size)
    labels = split_label(label, len(inputs.args), inputs.batch_size, label_spec, sizes=inputs.sizes, say=say)
    return SplitCall(inputs.args, inputs.kwargs, labels, inputs.sizes)


def split_inputs(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    num_microbatch: int,
    spec: Any = None,
    *,
    batch_size: int | None = None,
    say: _Teller | None = None,
) -> SplitInputs:
    """Cut a call's inputs; `batch_size` holds where no tensor among them tells (None: one microbatch then)."""
    num_microbatch = _checked_count(num_microbatch)
    if is_callable(spec):
        return _call_split_input(spec, args, kwargs, num_microbatch)
    leaves = _input_leaves(args, kwargs, spec)
    found = _batch_size(leaves)
    batch_size = found if found is not None else batch_size
    if batch_size is None:
        return SplitInputs(*_replicated(args, kwargs, 1), sizes=[1], batch_size=None)
    sizes = chunk_sizes(batch_size, num_microbatch)
    _, structure = tree.flatten((args, kwargs))
    parts = [structure.unflatten(part) for part in _cut_all(leaves, sizes, say)]
    return SplitInputs([part[0] for part in parts], [part[1] for part in parts], sizes, batch_size)


def split_label(
    label: Any,
    num_microbatch: int,
    batch_size: int | None,
    spec: Any = None,
    *,
    sizes: list[int] | None = None,
    say: _Teller | None = None,
) -> list[Any]:
    """The label of each of `num_microbatch` microbatches of a batch of `batch_size` samples.

    `sizes` are the samples of each microbatch (None: as even as can be). Where the batch size is not known the
    label's own first tensor decides, and must have a row for each microbatch.
    """
    num_microbatch = _checked_count(num_microbatch)
    if is_callable(spec):
        labels = _call_split_label(spec, label, num_microbatch)
        if len(labels) != num_microbatch:
            raise MicrobatchError(f"split_label returned {len(labels)} labels for {num_microbatch} microbatches")
        return labels
    leaves = _leaves(label, spec, "label")
    if batch_size is None:
        batch_size, sizes = _batch_size(leaves), None
    if batch_size is not None and sizes is None:
        sizes = chunk_sizes(batch_size, num_microbatch)
        if len(sizes) != num_microbatch:
            raise MicrobatchError(
                f"the label has {batch_size} rows, too few for the {num_microbatch} microbatches of the inputs; "
                "split it with a split_label callable"
            )
    if sizes is None:
        return [tree.map_tensors(_same, label) for _ in range(num_microbatch)]
    _, structure = tree.flatten(label)
    return [structure.unflatten(part) for part in _cut_all(leaves, sizes, say)]


def chunk_sizes(batch_size: int, num_microbatch: int) -> list[int]:
    """Samples of each microbatch: as even as can be, larger ones first, none empty; an empty batch is an error."""
    if batch_size < 1:
        raise MicrobatchError(f"a batch of {batch_size} samples cannot be cut into microbatches")
    count = min(num_microbatch, batch_size)
    small, rest = divmod(batch_size, count)
    return [small + 1] * rest + [small] * (count - rest)


class _Teller:
    """Says once for each path that its value is given whole to every microbatch."""

    def __init__(self, name: str, logged: set[str] | None) -> None:
        self.name = name
        self.logged = logged

    def __call__(self, whole: list[_Leaf]) -> None:
        if self.logged is not None:
            whole = [leaf for leaf in whole if leaf.path not in self.logged]
            self.logged.update(leaf.path for leaf in whole)
        if whole:
            model = f"{self.name}: " if self.name else ""
            values = ", ".join(f"{leaf.path} ({described(leaf.value)})" for leaf in whole)
            logger.info("%sgiven whole to every microbatch: %s", model, values)


def _checked_count(num_microbatch: int) -> int:
    if num_microbatch < 1:
        raise ValueError(f"num_microbatch must be at least 1, not {num_microbatch}")
    return num_microbatch


def _input_leaves(args: tuple[Any, ...], kwargs: dict[str, Any], spec: Any) -> list[_Leaf]:
    args_spec, kwargs_spec = spec if isinstance(spec, tuple) and len(spec) == 2 else (spec, spec)
    if spec is not None and not isinstance(spec, tuple) and marker_kind(spec) is None:
        raise MicrobatchError(f"split_input must be (spec of args, spec of kwargs) or a callable, not {spec!r}")
    return [*_leaves(args, args_spec, "args"), *_leaves(kwargs, kwargs_spec, "kwargs")]


def _leaves(value: Any, spec: Any, path: str, direct: bool = True) -> list[_Leaf]:
    """The leaves of `value`, in the order of `tree.flatten`, each with the spec that holds for it."""
    kind = marker_kind(spec)
    node = None if isinstance(value, Tensor) else tree.open_node(value)
    if node is None:
        if spec is not None and kind not in ("chunk", "replicate"):
            raise no_spec(spec, path)
        return [_Leaf(path, value, spec, direct)]
    if kind != "replicate":
        refuse_packed(value, path)
    names = tree.child_names(value, node)
    specs = child_specs(spec, node, names, path)
    below = direct and kind is None
    return [
        leaf
        for child, child_spec, name in zip(node.children, specs, names, strict=True)
        for leaf in _leaves(child, child_spec, path + name, below)
    ]


def _batch_size(leaves: list[_Leaf]) -> int | None:
    """The batch size by the module's rule; None where no tensor tells."""
    for leaf in leaves:
        if marker_kind(leaf.marker) == "chunk" and (leaf.direct or isinstance(leaf.value, Tensor)):
            return _not_empty(leaf, _chunked_length(leaf))
    for leaf in leaves:
        if leaf.marker is None and isinstance(leaf.value, Tensor) and leaf.value.dim() > 0:
            return _not_empty(leaf, leaf.value.size(0))
    return None


def _not_empty(leaf: _Leaf, length: int) -> int:
    if length == 0:
        raise MicrobatchError(f"the batch is empty: {leaf.path} is a {described(leaf.value)}")
    return length


def _chunked_length(leaf: _Leaf) -> int:
    """Entries along the dimension of an explicit TensorChunkSpec."""
    if not isinstance(leaf.value, Tensor):
        raise MicrobatchError(
            f"{leaf.path} has {leaf.marker}, but is {described(leaf.value)}: only tensors can be cut by a spec, "
            "other values by a callable"
        )
    dim = leaf.marker.split_dim
    if not -leaf.value.dim() <= dim < leaf.value.dim():
        raise MicrobatchError(f"{leaf.path} has {leaf.marker}, but is {described(leaf.value)}")
    length: int = leaf.value.size(dim)
    return length


def _fits(leaf: _Leaf, batch_size: int) -> bool:
    """Whether the leaf will be cut."""
    if leaf.marker is not None:
        return marker_kind(leaf.marker) == "chunk" and isinstance(leaf.value, Tensor)
    return isinstance(leaf.value, Tensor) and leaf.value.dim() > 0 and leaf.value.size(0) == batch_size


def _check_label_fits(leaves: list[_Leaf], batch_size: int) -> None:
    """A callable split the inputs: a label with tensors, none of which has their rows, is not to be guessed at."""
    if _batch_size(leaves) is None or any(_fits(leaf, batch_size) for leaf in leaves):
        return
    shapes = ", ".join(f"{leaf.path}: {described(leaf.value)}" for leaf in leaves if isinstance(leaf.value, Tensor))
    raise MicrobatchError(
        f"the first tensors of what split_input returned have {batch_size} rows in all, and no tensor of the label has "
        f"as many ({shapes}); give a split_label callable or spec"
    )


def _cut_all(leaves: list[_Leaf], sizes: list[int], say: _Teller | None) -> list[list[Any]]:
    """For each microbatch its leaves."""
    batch_size, count = sum(sizes), len(sizes)
    columns: list[Sequence[Any]] = []
    whole: list[_Leaf] = []
    for leaf in leaves:
        if marker_kind(leaf.marker) == "chunk" and (leaf.direct or isinstance(leaf.value, Tensor)):
            columns.append(_cut_explicit(leaf, sizes, batch_size))
        elif _fits(leaf, batch_size):
            columns.append(_cut(leaf.value, 0, sizes, leaf.path))
        else:
            columns.append([leaf.value] * count)
            if leaf.marker is None and leaf.value is not None:
                _refuse_block_mask(leaf, count)
                whole.append(leaf)
    if say is not None and count > 1:
        say(whole)
    return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in sizes]


def _cut_explicit(leaf: _Leaf, sizes: list[int], batch_size: int) -> Sequence[Tensor]:
    length = _chunked_length(leaf)
    per_sample, rest = divmod(length, batch_size)
    if per_sample < 1 or rest:
        raise MicrobatchError(
            f"{leaf.path} has {leaf.marker} and {length} entries there, which is no multiple of the batch size "
            f"{batch_size}"
        )
    dim = leaf.marker.split_dim % leaf.value.dim()
    return _cut(leaf.value, dim, [size * per_sample for size in sizes], leaf.path)


def _cut(tensor: Tensor, dim: int, sizes: list[int], path: str) -> Sequence[Tensor]:
    """Views of `tensor`."""
    if len(sizes) == 1:
        return [tensor]
    try:
        if tensor.requires_grad and torch.is_grad_enabled():
            return tensor.split_with_sizes(sizes, dim)  # one graph node: its backward concatenates
        with torch.enable_grad():  # views made without grad mode may not be changed in place by a layer later
            tensor = tensor.detach() if tensor.requires_grad else tensor
            starts = accumulate(sizes[:-1], initial=0)
            return [tensor.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]
    except RuntimeError as error:
        raise MicrobatchError(
            f"{path} ({described(tensor)}) cannot be cut along dimension {dim}; split it with a callable"
        ) from error


def _refuse_block_mask(leaf: _Leaf, count: int) -> None:
    module = sys.modules.get("torch.nn.attention.flex_attention")
    if module is None or count == 1 or not isinstance(leaf.value, module.BlockMask):
        return
    if leaf.value.kv_num_blocks.size(0) > 1:
        raise MicrobatchError(f"{leaf.path} is a BlockMask made for a batch: split it with a callable")


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _replicated(args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> tuple[list[Any], list[Any]]:
    copies = [tree.map_tensors(_same, (args, kwargs)) for _ in range(count)]
    return [copy[0] for copy in copies], [copy[1] for copy in copies]


def _call_split_input(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatch: int) -> SplitInputs:
    result = fn(args, kwargs, num_microbatch)
    if not (isinstance(result, (tuple, list)) and len(result) == 2 and all(map(_is_sequence, result))):
        raise MicrobatchError(
            f"split_input must return (list of args, list of kwargs), one entry a microbatch, not {described(result)}"
        )
    all_args, all_kwargs = result
    if len(all_args) != len(all_kwargs) or not all_args:
        raise MicrobatchError(
            f"split_input returned {len(all_args)} args and {len(all_kwargs)} kwargs; there must be as many of one as "
            "of the other, and at least one"
        )
    for index, (one_args, one_kwargs) in enumerate(zip(all_args, all_kwargs, strict=True)):
        if not isinstance(one_args, (tuple, list)):
            raise MicrobatchError(f"split_input: args of microbatch {index} are no tuple: {described(one_args)}")
        if not isinstance(one_kwargs, Mapping):
            raise MicrobatchError(f"split_input: kwargs of microbatch {index} are no dict: {described(one_kwargs)}")
    rows = [_batch_size(_input_leaves(tuple(a), dict(k), None)) for a, k in zip(all_args, all_kwargs, strict=True)]
    sizes = [row for row in rows if row is not None]
    told = len(sizes) == len(rows)
    return SplitInputs(
        [tuple(one) for one in all_args],
        [dict(one) for one in all_kwargs],
        sizes if told else None,
        sum(sizes) if told else None,
    )


def _call_split_label(fn: Any, label: Any, num_microbatch: int) -> list[Any]:
    result = fn(label, num_microbatch)
    if not _is_sequence(result) or not result:
        raise MicrobatchError(f"split_label must return a list, one label a microbatch, not {described(result)}")
    return list(result)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple))
