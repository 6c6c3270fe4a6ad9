"""Nested Python values ("pytrees") whose tensors the engine moves, splits and merges.

Layers pass any value to the next one, and the engine has to find the tensors in it at every stage boundary. Torch's
own registry (`torch.utils._pytree`) knows tuples, lists, dicts, named tuples, and whatever a user or a library
registered (Hugging Face's outputs among them). This module adds what users expect and torch leaves out, dataclass
instances, and registers nothing: importing the engine changes nothing for the rest of the process.

What is a node: everything in torch's registry, named tuples, and instances of dataclasses. Of a dataclass, every
field that is set and whatever else lies in the instance's `__dict__` is a child; a copy is made by setting those
attributes, without running `__init__` or `__post_init__`, so frozen and slotted classes and `init=False` fields work.
A dataclass that is also a dict (an output class in Hugging Face's style that was not registered) has its items as
children and is rebuilt by calling the class with them. What is a leaf: everything else, `None`, enum members,
modules and unregistered subclasses of list and dict included; tensors inside of such an object are not seen.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

Build = Callable[[Any, Any], Any]  # (children, context) -> node, as in torch's registry

_HEAP_TYPE = 1 << 9  # CPython's Py_TPFLAGS_HEAPTYPE: set for classes made by a class statement
_UNSET = object()


class Node(NamedTuple):
    """A container, opened: its children and what is needed to build it again with others."""

    kind: Any
    """What the container is: its class (`namedtuple` for every named tuple; the context then holds the class)."""
    context: Any
    """What else tells two containers apart: keys, class, whatever the class's registration says."""
    children: list[Any]
    build: Build

    def rebuild(self, children: Iterable[Any]) -> Any:
        """The same container with other children."""
        return self.build(list(children), self.context)

    def same_container(self, other: Node) -> bool:
        """Whether both are of one class with the same keys and number of children."""
        return (
            self.kind is other.kind
            and len(self.children) == len(other.children)
            and bool(self.context == other.context)
        )


@lru_cache(maxsize=4096)
def _field_names(cls: type) -> tuple[str, ...] | None:
    """The fields of a dataclass whose instances are nodes; None for every other class."""
    if not dataclasses.is_dataclass(cls) or issubclass(cls, (torch.Tensor, torch.nn.Module, enum.Enum)):
        return None
    built_in = any(base is not object and not base.__flags__ & _HEAP_TYPE for base in cls.__mro__)
    if built_in and not issubclass(cls, dict):
        return None  # its state is not all in attributes
    return tuple(field.name for field in dataclasses.fields(cls))


def _open_dataclass(value: Any, fields: tuple[str, ...]) -> Node:
    cls = type(value)
    if isinstance(value, dict):
        return Node(cls, (cls, list(value)), list(value.values()), _build_mapping)
    names, children = [], []
    for name in fields:
        child = getattr(value, name, _UNSET)
        if child is not _UNSET:
            names.append(name)
            children.append(child)
    for name, child in getattr(value, "__dict__", {}).items():
        if name not in fields:
            names.append(name)
            children.append(child)
    return Node(cls, (cls, names), children, _build_dataclass)


def _build_dataclass(children: Any, context: Any) -> Any:
    cls, names = context
    value = object.__new__(cls)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(value, name, child)  # the class's own may be frozen
    return value


def _build_mapping(children: Any, context: Any) -> Any:
    cls, keys = context
    return cls(**dict(zip(keys, children, strict=True)))


def open_node(value: Any) -> Node | None:
    """The container `value`, opened; None for a leaf."""
    cls: Any = type(value)
    handler = _pytree.SUPPORTED_NODES.get(cls)
    kind = cls
    if handler is None:
        if isinstance(value, tuple) and _pytree.is_namedtuple_class(cls):
            handler, kind = _pytree.SUPPORTED_NODES[namedtuple], namedtuple  # type: ignore[index]
        elif (fields := _field_names(cls)) is not None:
            return _open_dataclass(value, fields)
        else:
            return None
    children, context = handler.flatten_fn(value)
    return Node(kind, context, list(children), handler.unflatten_fn)


def child_names(value: Any, node: Node) -> list[str]:
    """How each child of `value` (opened as `node`) is written after it: `[0]`, `['logits']` or `.logits`."""
    if node.build is _build_dataclass:
        return [f".{name}" for name in node.context[1]]
    handler = _pytree.SUPPORTED_NODES.get(node.kind)
    if handler is not None and handler.flatten_with_keys_fn is not None:
        names = [str(key) for key, _ in handler.flatten_with_keys_fn(value)[0]]
    elif isinstance(value, Mapping) and len(value) == len(node.children):
        names = [f"[{key!r}]" for key in value]
    else:
        names = []
    return names if len(names) == len(node.children) else [f"[{index}]" for index in range(len(node.children))]


class Structure:
    """A nested value without its leaves. Compares equal to the structure of every value of the same shape."""

    __slots__ = ("_build", "_children", "_context", "_kind", "num_leaves")
    __hash__ = None  # type: ignore[assignment]  # contexts are lists

    def __init__(self, kind: Any, context: Any, children: tuple[Structure, ...], build: Build | None) -> None:
        self._kind = kind
        self._context = context
        self._children = children
        self._build = build
        self.num_leaves: int = sum(child.num_leaves for child in children) if build is not None else 1

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """The value of this structure with these leaves, in the order of `flatten`; ValueError for a wrong number."""
        if self._build is None:
            (value,) = _exactly(leaves, 1)
            return value
        return self._assemble(iter(_exactly(leaves, self.num_leaves)))

    def _assemble(self, leaves: Iterator[Any]) -> Any:
        if self._build is None:
            return next(leaves)
        return self._build([child._assemble(leaves) for child in self._children], self._context)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure):
            return NotImplemented
        return (
            self._kind is other._kind
            and (self._build is None) is (other._build is None)
            and bool(self._context == other._context)
            and self._children == other._children
        )

    def __repr__(self) -> str:
        if self._build is None:
            return "*"
        cls, keys = self._context if isinstance(self._context, tuple) else (self._kind, self._context)
        if self._kind is namedtuple:
            cls, keys = self._context, getattr(self._context, "_fields", None)
        if not isinstance(keys, (list, tuple)) or len(keys) != len(self._children):
            keys = None
        inner = ", ".join(
            f"{key}={child!r}" if keys is not None else repr(child)
            for key, child in zip(keys or self._children, self._children, strict=True)
        )
        return f"{getattr(cls, '__name__', cls)}({inner})"


def _exactly(leaves: Iterable[Any], count: int) -> list[Any]:
    found = list(leaves)
    if len(found) != count:
        raise ValueError(f"{len(found)} leaves were given for a structure of {count}")
    return found


_LEAF = Structure(None, None, (), None)


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of `value` in a fixed order, and the structure that `unflatten`s them (or others) again."""
    if isinstance(value, torch.Tensor):
        return [value], _LEAF
    leaves: list[Any] = []
    return leaves, _flatten_into(value, leaves)


def _flatten_into(value: Any, leaves: list[Any]) -> Structure:
    node = None if isinstance(value, torch.Tensor) else open_node(value)
    if node is None:
        leaves.append(value)
        return _LEAF
    children = tuple([_flatten_into(child, leaves) for child in node.children])
    return Structure(node.kind, node.context, children, node.build)


def map_tensors(fn: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """`value` with every tensor replaced by `fn(tensor)`, in order; containers are new, other leaves are the same."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    node = open_node(value)
    if node is None:
        return value
    return node.build([map_tensors(fn, child) for child in node.children], node.context)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in `value`, in the order of `flatten`; one that occurs twice is listed twice."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif (node := open_node(value)) is not None:
        for child in node.children:
            _collect(child, found)


def flatten_with_paths(value: Any) -> list[tuple[str, Any]]:
    """Every leaf with the expression that leads to it, as `['logits'][0].scores`; the path of a bare leaf is empty."""
    node = None if isinstance(value, torch.Tensor) else open_node(value)
    if node is None:
        return [("", value)]
    return [
        (name + path, leaf)
        for name, child in zip(child_names(value, node), node.children, strict=True)
        for path, leaf in flatten_with_paths(child)
    ]
