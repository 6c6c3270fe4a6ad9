"""Any model, wrapped the best way known: RoundPipe's entry point for models that are no `nn.Sequential` yet.

RoundPipe wraps the submodules of a model it does not know one by one and lets the model's own forward call them. Here a
wrapped module's forward is awaited, and a plain `forward` that calls it cannot await. So a model is cut into layers if
it is an `nn.Sequential` or has a preset (`roundpipe_async.models`), and is one layer otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from roundpipe_async import models
from roundpipe_async.config import RoundPipeRunConfig
from roundpipe_async.model import RoundPipe, _call_site

_logger = logging.getLogger("roundpipe_async")


def wrap_model_to_roundpipe(
    model: nn.Module,
    use_sequential_preset: bool | None = None,
    lower_threshold: int = 16 * 1024,
    upper_threshold: int | None = None,
    skip_modules: Collection[nn.Module] = (),
    override_config: Mapping[nn.Module, RoundPipeRunConfig] | None = None,
    model_run_config: RoundPipeRunConfig | None = None,
    name: str | None = None,
    **roundpipe_kwargs: Any,
) -> RoundPipe:
    """A `RoundPipe` of `model`: cut into layers where that is known to change nothing, else as one layer.

    An `nn.Sequential` is wrapped as it is. A model with a preset becomes the `nn.Sequential` of its parts: the same
    modules and parameters, called with the model's own arguments and giving its own kind of output; attributes are
    those of `model`, as after `set_original_model`. Anything else is one layer, which a log line says: its stages
    cannot be spread over devices, its microbatches can.

    Args:
        model: what to wrap.
        use_sequential_preset: False: do not look for a preset; True: NotImplementedError if there is none; None: use
            one if there is one, and log it.
        lower_threshold: bytes; a model that becomes one layer and is smaller runs in one microbatch, unless its config
            says how many.
        upper_threshold: bytes; a model that would become one layer larger than this is a NotImplementedError, because
            it would have to be split. None: no limit.
        skip_modules: not supported, for submodules are never wrapped on their own: NotImplementedError if not empty.
        override_config: options by module. Only the one for `model` itself has a meaning; NotImplementedError for
            others.
        model_run_config: options for every call; `override_config[model]` wins over them.
        name: for logs and traces; default: file and line of the caller.
        **roundpipe_kwargs: as for `RoundPipe`: `optim_dtype`, `pin_model`, `devices`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if len(skip_modules):
        raise NotImplementedError(
            f"skip_modules has {len(skip_modules)} modules, but submodules are never wrapped on their own, so none can "
            "be skipped: leave it out, or cut the model into an nn.Sequential yourself"
        )
    config = _config(model, model_run_config, override_config or {})
    name = name or _call_site()
    kind = type(model).__name__
    preset = None if use_sequential_preset is False else models.find_preset(model)
    if use_sequential_preset and preset is None:
        raise NotImplementedError(f"there is no preset for {kind}; there are for {', '.join(models.preset_names())}")
    if preset is not None:
        layers = preset(model)
        (_logger.info if use_sequential_preset is None else _logger.debug)(
            "%s: %s is cut into %d layers by its preset", name, kind, len(layers)
        )
        wrapped = RoundPipe(layers, name=name, model_run_config=config, **roundpipe_kwargs)
        wrapped.set_original_model(model)
        return wrapped
    if not isinstance(model, nn.Sequential):
        config = _one_layer(model, config, name, lower_threshold, upper_threshold)
    return RoundPipe(model, name=name, model_run_config=config, **roundpipe_kwargs)


def _config(
    model: nn.Module, model_run_config: RoundPipeRunConfig | None, overrides: Mapping[nn.Module, RoundPipeRunConfig]
) -> RoundPipeRunConfig:
    others = sorted({type(module).__name__ for module in overrides if module is not model})
    if others:
        raise NotImplementedError(
            f"override_config names submodules ({', '.join(others)}), but only the model itself has calls to configure"
        )
    return (model_run_config or RoundPipeRunConfig()).merged(overrides.get(model))


def _one_layer(
    model: nn.Module, config: RoundPipeRunConfig, name: str, lower_threshold: int, upper_threshold: int | None
) -> RoundPipeRunConfig:
    """The options of a model that becomes one layer; refuse what cannot."""
    kind = type(model).__name__
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        raise TypeError(f"{kind} has no forward to call: wrap an nn.Sequential of its modules")
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    if upper_threshold is not None and size > upper_threshold:
        raise NotImplementedError(
            f"{kind} has {size} bytes, more than upper_threshold ({upper_threshold}), and no preset: a plain forward "
            "cannot await its submodules, so they cannot be wrapped on their own; make it an nn.Sequential"
        )
    _logger.info("%s: %s is no nn.Sequential and has no preset; it runs as one layer", name, kind)
    if size < lower_threshold and config.num_microbatch is None:
        return config.merged(RoundPipeRunConfig(num_microbatch=1))
    return config
