"""The caller's torch modes and context variables: read once, at the call, and entered inside the worker.

Grad mode, inference mode and autocast live in the thread. Held across an `await` they would leak into whatever else
the event loop runs, so the engine never does; it notes them and enters them around the work of that call alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

from roundpipe_async import tree

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_grad_override: ContextVar[bool | None] = ContextVar("roundpipe_async_grad", default=None)


@contextmanager
def no_grad() -> Iterator[None]:
    """Inference for the calls made inside: `with roundpipe_async.no_grad(): out = await model(x)`.

    As `torch.no_grad()`, but a property of the task and not of the thread: it may be held across an `await`, and other
    coroutines of the loop keep their gradients. It concerns calls of `RoundPipe` models, not plain torch code.
    """
    token = _grad_override.set(False)
    try:
        yield
    finally:
        _grad_override.reset(token)


def usable_by_autograd(value: T) -> T:
    """The value, with copies of tensors made in inference mode (another task's, perhaps): autograd saves no such."""
    if not any(isinstance(leaf, torch.Tensor) and leaf.is_inference() for leaf in tree.flatten(value)[0]):
        return value
    copied: T = tree.map_tensors(lambda tensor: tensor.clone() if tensor.is_inference() else tensor, value)
    return copied


@dataclass(frozen=True, slots=True)
class Autocast:
    """One device type's autocast as it stood at the call."""

    device_type: str
    dtype: torch.dtype
    cache: bool


@dataclass(frozen=True, slots=True)
class Modes:
    """What a call saw around it."""

    grad: bool
    inference: bool
    autocast: tuple[Autocast, ...]
    context: Context

    @classmethod
    def capture(cls, requires_grad: bool | None, device_types: frozenset[str], trains: bool = False) -> Modes:
        """The modes of the calling thread and task; `requires_grad` of the run config overrides the grad mode.

        A call that `trains` disregards torch's grad mode: what it wants is clear, and `torch.no_grad()` around it may
        be that of another task of the thread, which evaluates and holds it across an `await`.
        """
        inference = torch.is_inference_mode_enabled()
        grad = _grad_override.get()
        if grad is None:
            grad = trains or (torch.is_grad_enabled() and not inference)
        if requires_grad is not None:
            grad = requires_grad
        autocast = tuple(
            Autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in sorted(device_types | {"cpu"})
            if torch.is_autocast_enabled(kind)
        )
        return cls(grad, inference and not grad, autocast, copy_context())

    @contextmanager
    def entered(self, grad: bool) -> Iterator[None]:
        """The modes around a piece of work in a worker's thread."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            else:
                stack.enter_context(torch.set_grad_enabled(grad))
            for cast in self.autocast:
                stack.enter_context(torch.autocast(cast.device_type, cast.dtype, cache_enabled=cast.cache))
            yield

    def run(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `fn` with the caller's context variables; what it sets stays its own."""
        return self.context.copy().run(fn, *args, **kwargs)
