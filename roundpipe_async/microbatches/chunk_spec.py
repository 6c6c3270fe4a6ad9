"""Reading the specs with which users say how a value is split or merged.

The specs are those of `torch.distributed.pipelining.microbatch`. Importing that module is slow and pulls in
`torch.distributed`, so it is never imported here: whoever holds a spec has loaded it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from roundpipe_async import tree
from roundpipe_async.errors import MicrobatchError

_SPECS = "torch.distributed.pipelining.microbatch"


def marker_kind(spec: Any) -> Literal["chunk", "replicate", "reduce"] | None:
    """What a spec asks for; None for everything that is no spec."""
    module = sys.modules.get(_SPECS)
    if module is None:
        return None
    if isinstance(spec, module.TensorChunkSpec):
        return "chunk"
    if spec is module._Replicate or isinstance(spec, module._Replicate):
        return "replicate"
    return "reduce" if isinstance(spec, module._CustomReducer) else None


def is_callable(spec: Any) -> bool:
    """Whether the user gave a function instead of specs (`_Replicate` is a class, and so callable)."""
    return callable(spec) and marker_kind(spec) is None


def child_specs(spec: Any, node: tree.Node, names: list[str], path: str) -> list[Any]:
    """What `spec` says for each child of a container. One spec, or None, holds for all; a dict goes by name."""
    if spec is None or marker_kind(spec) is not None:
        return [spec] * len(node.children)
    if isinstance(spec, Mapping):
        by_name = {name: index for index, name in enumerate(names)}
        specs: list[Any] = [None] * len(node.children)
        for key, child in spec.items():
            index = by_name.get(f"[{key!r}]", by_name.get(f".{key}"))
            if index is None:
                has = ", ".join(names) if names else "no entries"
                raise MicrobatchError(f"the spec of {path} names {key!r}, which is not in the value; it has {has}")
            specs[index] = child
        return specs
    spec_node = tree.open_node(spec)
    if spec_node is None:
        raise no_spec(spec, path)
    if len(spec_node.children) != len(node.children):
        raise MicrobatchError(
            f"the spec of {path} has {len(spec_node.children)} entries, but the value has {len(node.children)}"
        )
    return spec_node.children


def no_spec(spec: Any, path: str) -> MicrobatchError:
    """The error for a spec that cannot be one where it stands."""
    return MicrobatchError(
        f"the spec of {path} must be one of torch.distributed.pipelining.microbatch or None, or follow the structure "
        f"of the value; it is {spec!r}"
    )


def refuse_packed(value: Any, path: str) -> None:
    """Raise for a value whose tensors' rows are no samples although they look so."""
    if isinstance(value, PackedSequence):
        raise MicrobatchError(f"{path} is a PackedSequence, whose rows are no samples: handle it with a callable")


def described(value: Any) -> str:
    """A value in few words, for messages."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    text = repr(value) if isinstance(value, (int, float, str)) else ""
    return f"{type(value).__name__} {text[:40]}".strip()
