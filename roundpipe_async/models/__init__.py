"""Presets: models of other libraries, cut into an equivalent `nn.Sequential` of their own parts.

Nothing is imported until a model of that library is there: then its library is, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TypeAlias, cast

from torch import nn

Preset: TypeAlias = Callable[[nn.Module], nn.Sequential]

_HUGGING_FACE = {
    "GPT2LMHeadModel": "cut_gpt2_like",
    "LlamaForCausalLM": "cut_llama_like",
    "MistralForCausalLM": "cut_llama_like",
    "Qwen2ForCausalLM": "cut_llama_like",
    "Qwen3ForCausalLM": "cut_llama_like",
}


def preset_names() -> list[str]:
    """The classes that have a preset."""
    return sorted(_HUGGING_FACE)


def find_preset(model: nn.Module) -> Preset | None:
    """The function that cuts `model` into layers; None if there is none for its class.

    Subclasses have none of their own: what they changed in `forward` would be lost.
    """
    kind = type(model)
    if not kind.__module__.startswith("transformers.") or kind.__name__ not in _HUGGING_FACE:
        return None
    module = importlib.import_module("roundpipe_async.models.hugging_face")
    return cast("Preset", getattr(module, _HUGGING_FACE[kind.__name__]))
