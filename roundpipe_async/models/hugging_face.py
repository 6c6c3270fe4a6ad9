"""Decoder-only language models of transformers as embedding, blocks and head.

Nothing of a model's forward is written again here. What happens before the first block (positions, masks, rotary
tables) is found out by running the model's own forward with blocks that only note what they are called with; what
happens after the last one, by running it with a body that is only the final norm. So the preset of an architecture is
nothing but the names of its parts, and it follows the installed version of transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from roundpipe_async import tree


class Parts(NamedTuple):
    """Where a model keeps its parts: attributes of the model (`body`) and of its body."""

    body: str
    blocks: str
    norm: str


LLAMA_LIKE = Parts("model", "layers", "norm")
GPT2_LIKE = Parts("transformer", "h", "ln_f")


def cut_llama_like(model: nn.Module) -> nn.Sequential:
    """Llama and the many models built like it."""
    return cut(model, LLAMA_LIKE)


def cut_gpt2_like(model: nn.Module) -> nn.Sequential:
    """GPT-2."""
    return cut(model, GPT2_LIKE)


def cut(model: nn.Module, parts: Parts) -> nn.Sequential:
    """The model's own modules as layers; called with the model's arguments, they give the model's output.

    There is no cache of keys and values, which training has no use for: `use_cache=True`, a given cache, and asking
    for all hidden states or attentions are refused at the call.
    """
    body = getattr(model, parts.body)
    blocks = list(getattr(body, parts.blocks))
    return nn.Sequential(
        Embedding(model, parts), *(Block(block, index) for index, block in enumerate(blocks)), Head(model, parts)
    )


@dataclass
class Carry:
    """What one layer hands to the next."""

    hidden_states: torch.Tensor
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    """The distinct sets of further arguments that blocks are called with, each once: they cross stage boundaries."""
    call_of: tuple[int, ...]
    """Which of `calls` each block gets."""
    head: dict[str, Any]
    """Arguments for the head: labels, what the loss takes, which logits are wanted."""


_noted: ContextVar[list[tuple[tuple[Any, ...], dict[str, Any]]]] = ContextVar("roundpipe_async_noted")


class _Note(nn.Module):
    """Stands in for a block: notes the arguments and hands the hidden states on."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        _noted.get().append((args, kwargs))
        return hidden_states


class Embedding(nn.Module):
    """Everything before the first block."""

    def __init__(self, model: nn.Module, parts: Parts) -> None:
        super().__init__()
        body = getattr(model, parts.body)
        notes = nn.ModuleList(_Note() for _ in getattr(body, parts.blocks))
        self.body = _shell(body, {parts.blocks: notes, parts.norm: nn.Identity()})
        self._arguments = inspect.signature(type(model).forward)
        self._of_body = frozenset(inspect.signature(type(body).forward).parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Carry:
        """As the model's own forward; gives the embedded tokens and what the other layers need."""
        bound = self._arguments.bind(None, *args, **kwargs).arguments
        bound.pop(next(iter(self._arguments.parameters)))
        further = bound.pop("kwargs", {})
        _refuse({**bound, **further}, self.body)
        for_body = {name: value for name, value in bound.items() if name in self._of_body}
        for_head = {name: value for name, value in bound.items() if name not in self._of_body}
        seen = {name: value for name, value in further.items() if name != "return_dict"}
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        token = _noted.set(calls)
        try:
            outputs = self.body(**{**for_body, **seen, "use_cache": False})
        finally:
            _noted.reset(token)
        distinct, call_of = _distinct(calls)
        return Carry(outputs.last_hidden_state, distinct, call_of, {**for_head, **further})


class Block(nn.Module):
    """One decoder block."""

    def __init__(self, block: nn.Module, index: int) -> None:
        super().__init__()
        self.block = block
        self._index = index

    def forward(self, carry: Carry) -> Carry:
        """The block's own forward, with the arguments that the model would give it."""
        args, kwargs = carry.calls[carry.call_of[self._index]]
        outputs = self.block(carry.hidden_states, *args, **kwargs)
        hidden_states = outputs[0] if isinstance(outputs, tuple) else outputs
        return Carry(hidden_states, carry.calls, carry.call_of, carry.head)


class _Body(nn.Module):
    """Stands in for the model's body: all of it that comes after the last block."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> Any:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.norm(inputs_embeds))


class Head(nn.Module):
    """The final norm, the logits and, if there are labels, the loss."""

    def __init__(self, model: nn.Module, parts: Parts) -> None:
        super().__init__()
        self.model = _shell(model, {parts.body: _Body(getattr(getattr(model, parts.body), parts.norm))})

    def forward(self, carry: Carry) -> Any:
        """The output of the model's own forward."""
        return self.model(inputs_embeds=carry.hidden_states, use_cache=False, **carry.head)


def _shell(module: nn.Module, replaced: Mapping[str, nn.Module]) -> Any:
    """`module` with other submodules, without a copy of anything; the original is left as it is."""
    shell = module.__new__(type(module))
    shell.__dict__.update(module.__dict__)
    shell.__dict__["_parameters"] = dict(module._parameters)
    shell.__dict__["_buffers"] = dict(module._buffers)
    shell.__dict__["_modules"] = {**module._modules, **replaced}
    return shell


def _refuse(arguments: Mapping[str, Any], body: Any) -> None:
    for name in ("cache", "past_key_values", "use_cache"):
        if arguments.get(name):
            raise NotImplementedError(f"{name}={arguments[name]!r}: a model cut into layers keeps no cache")
    for name in ("output_hidden_states", "output_attentions"):
        wanted = arguments.get(name)
        if wanted if wanted is not None else getattr(body.config, name, False):
            raise NotImplementedError(f"{name}: a model cut into layers gives its final output only")
    if arguments.get("encoder_hidden_states") is not None:
        raise NotImplementedError("encoder_hidden_states: only decoders without cross-attention have a preset")


def _distinct(
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]],
) -> tuple[list[tuple[tuple[Any, ...], dict[str, Any]]], tuple[int, ...]]:
    """The different ones among `calls`, and for each call which of them it is."""
    distinct: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    leaves_of: list[list[Any]] = []
    call_of = []
    for call in calls:
        leaves, structure = tree.flatten(call)
        for index, known in enumerate(distinct):
            if tree.flatten(known)[1] == structure and all(map(_same, leaves, leaves_of[index])):
                call_of.append(index)
                break
        else:
            call_of.append(len(distinct))
            distinct.append(call)
            leaves_of.append(leaves)
    return distinct, tuple(call_of)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return isinstance(one, (bool, int, float, str)) and type(one) is type(other) and one == other
