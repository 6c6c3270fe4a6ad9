"""The face of the engine: a module wrapped so that its training can be awaited."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextvars import copy_context
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from weakref import ref

import torch
from torch import nn

from roundpipe_async.calls import Begun, call
from roundpipe_async.config import RoundPipeRunConfig
from roundpipe_async.devices.pool import DevicePool
from roundpipe_async.errors import ClosedError
from roundpipe_async.events import Event
from roundpipe_async.modes import Modes
from roundpipe_async.optimizer import in_optimizer_ctx
from roundpipe_async.planner import Planner
from roundpipe_async.runs import Request, Runner
from roundpipe_async.scheduling.plan import LayerCost
from roundpipe_async.store import Store

_owners: dict[int, tuple[ref[nn.Parameter], ref[RoundPipe]]] = {}
"""Which model owns a parameter, by the parameter's id."""

_FLUENT = frozenset({"train", "eval", "requires_grad_", "to", "half", "float", "bfloat16", "double", "apply"})
"""Methods of modules that return the module: on a wrapped model they return the wrapper."""


def _outputs(outputs: Any, label: Any) -> Any:
    """The default loss function: the model computes its own loss."""
    return outputs


class RoundPipe:
    """A module whose forward, backward and optimizer steps run in stages over a pool of devices, and are awaited.

    An `nn.Sequential`'s children are the layers, any other module is one layer. The first layer is called with the
    call's arguments, each later one with what the one before returned (any pytree). Parameters stay on the host; a
    layer runs as a shallow replica that holds copies or aliases of them, so what `forward` stores on `self` is lost.
    Hooks of layers, of modules in them and of parameters run: once for each microbatch, and a forward hook again in
    recompute. Hooks of the Sequential itself cannot run, and are refused.

    Unknown attributes read, write and delete through to the wrapped module (or to `set_original_model`'s).

    Args:
        model: what to wrap. A parameter that another live `RoundPipe` owns is a ValueError.
        optim_dtype: dtype of the optimizer's copies of floating-point parameters; None: the parameter's own.
        name: for logs and traces; default: file and line of the caller.
        model_run_config: defaults for every call.
        pin_model: how the host memory of parameters is pinned for accelerators, which then read it while the host does
            something else. `"alloc"`: by torch's allocator, fast, but it rounds sizes up to powers of two.
            `"register"`: ordinary memory is pinned (CUDA only). `"off"`: not at all, for models larger than memory
            that the system pages in from a file. The first two move the parameters when the model is wrapped. CPU
            devices need none of it.
        devices: a pool, shared with other models if you like; None: the process's default pool.
    """

    _closed: bool
    _model: nn.Module
    _config: RoundPipeRunConfig
    _name: str
    _pool: DevicePool
    _pin_model: str
    _store: Store
    _runner: Runner

    def __init__(
        self,
        model: nn.Module,
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig | None = None,
        pin_model: Literal["alloc", "register", "off"] = "alloc",
        devices: DevicePool | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if pin_model not in ("alloc", "register", "off"):
            raise ValueError(f'pin_model must be "alloc", "register" or "off", not {pin_model!r}')
        if optim_dtype is not None and not optim_dtype.is_floating_point:
            raise ValueError(f"optim_dtype must be a floating-point dtype, not {optim_dtype}")
        pool = devices or DevicePool.default()
        pool.check_open()
        if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
            # not named_children(), which tells a module that stands in two places only once
            layers = [(name, child) for name, child in model._modules.items() if child is not None]
            if not layers:
                raise ValueError("an empty nn.Sequential has no layers to run")
        else:
            layers = [("", model)]
        own = self.__dict__
        own["_closed"] = False
        own["_model"] = model
        own["_original"] = None
        own["_config"] = model_run_config or RoundPipeRunConfig()
        own["_name"] = name or _call_site()
        own["_pool"] = pool
        own["_pin_model"] = pin_model
        store = own["_store"] = Store(layers, optim_dtype, pool, pin_model, self._name)
        planner = Planner(
            store.layer_bytes(), len(pool.devices), all(device.shares_host_memory for device in pool.devices)
        )
        device_types = frozenset(device.torch_device.type for device in pool.devices)
        own["_runner"] = Runner(self._name, pool, store, planner, device_types)
        _claim(self, model)  # last: a constructor that raises leaves nothing claimed

    # ---- training -------------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: Callable[[Any, Any], Any] = _outputs,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Await forward, loss and backward of one batch, microbatch by microbatch.

        Gives the sum of the microbatches' losses, detached and on the host (of a sequence of losses: a list of sums);
        with `return_outputs`, `(loss, merged outputs)`. The gradients are those of plain PyTorch running the same
        microbatches one after another; they add up over calls until a step takes them. `loss_fn(outputs, label)` runs
        on the device of the last stage.

        All or nothing: a call that raises or is cancelled leaves parameters, gradients, buffers and random state as
        they were. An exception of a layer, hook, `loss_fn`, split or merge function arrives as itself, with a note.
        Calls execute in the order in which this method was called, whoever awaits them. Gradients are computed under
        `torch.no_grad()` and `torch.inference_mode()`, too, which may be those of another task of the thread.
        """

        def begin() -> Begun[Any]:
            self._check_open()
            self._check_hooks()
            if not isinstance(input_args, tuple):
                raise TypeError(f"input_args must be a tuple of positional arguments, not {type(input_args).__name__}")
            if input_kwargs is not None and not isinstance(input_kwargs, Mapping):
                raise TypeError(f"input_kwargs must be a mapping, not {type(input_kwargs).__name__}")
            if not callable(loss_fn):
                raise TypeError(f"loss_fn must be callable as loss_fn(outputs, label), not {loss_fn!r}")
            config = self._config.merged(run_config)
            request = Request(input_args, dict(input_kwargs or {}), label, config)
            execution = self._runner.admit(config, loss_fn, return_outputs)  # the last thing that may raise
            return Begun(self._runner.forward_backward(execution, request), execution.forget)

        return call(begin, "forward_backward")

    def forward(
        self, *args: Any, roundpipe_run_config: RoundPipeRunConfig | None = None, **kwargs: Any
    ) -> Coroutine[Any, Any, Any]:
        """Await the outputs of one batch, merged, on the host or on the config's `output_device`.

        With `merge_output=False` the await returns as soon as the microbatches are known, with `Microbatches` to give
        to another model or to await. In grad mode outputs carry a graph: walk it with `await model.backward(loss)`.
        Otherwise this is inference only. May run beside training: it sees one version of the parameters.
        """

        def begin() -> Begun[Any]:
            self._check_open()
            self._check_hooks()
            config = self._config.merged(roundpipe_run_config)
            request = Request(args, kwargs, None, config)
            execution = self._runner.admit(config)
            run = self._runner.forward_packed if config.merge_output is False else self._runner.forward
            return Begun(run(execution, request), execution.forget)

        return call(begin, "forward")

    __call__ = forward

    def backward(self, loss: Any, gradient: Any = None) -> Coroutine[Any, Any, None]:
        """Await the backward of a loss made from this model's outputs: `loss.backward()`, off the event loop.

        `loss` and `gradient` as in `torch.autograd.backward`.
        """

        def begin() -> Begun[None]:
            self._check_open()
            store = self._store
            store.bind_loop(self._name)
            modes = Modes.capture(True, self._runner.device_types)
            ticket = store.admit_call(ordered=True, gradients=True, seeded=False)
            return Begun(self._runner.backward(ticket, loss, gradient, modes), lambda: store.settle(ticket))

        return call(begin, "backward")

    def step(
        self, step_fn: Callable[..., Any], is_async: bool = True, *args: Any, **kwargs: Any
    ) -> Coroutine[Any, Any, Any]:
        """Schedule `step_fn(*args, **kwargs)`, which steps an optimizer, in the pool's optimizer thread.

        It works on the gradients that all earlier calls committed, no others; inside it, `model.parameters()` are the
        optimizer's copies. With `is_async` the await returns as soon as the step is scheduled, a handle whose own
        await gives `step_fn`'s result; the next `forward_backward` uses the parameters of the step before this one:
        one step old, never older or newer. Without, the await gives the result, and the next call uses the new
        parameters.

        A background step that raises does so once: from its handle or, when nobody awaited that, from the next
        `step`, `synchronize`, `GradScaler.update` or `aclose`. A step that has been scheduled happens, whatever is
        cancelled.
        """

        def begin() -> Begun[Any]:
            self._check_open()
            if not callable(step_fn):
                raise TypeError(f"step_fn must be callable, not {step_fn!r}")
            store = self._store
            store.bind_loop(self._name)
            failed = store.failed_step()
            if failed is not None:
                return Begun(_wait_for(()), finish=lambda _: failed.result(), lose=failed.reserve())
            handle = store.admit_step(step_fn, args, kwargs, copy_context(), is_async)
            if is_async:
                return Begun(_wait_for(()), finish=lambda _: handle)
            lose = handle.reserve()
            return Begun(_wait_for([handle.event.settled()]), finish=lambda _: handle.result(), lose=lose)

        return call(begin, "step")

    def synchronize(self) -> Coroutine[Any, Any, None]:
        """Wait for every call and step made so far; then the model's own parameters are the newest.

        Gradients that no step has taken are in `param.grad`. Raises what a background step failed with, if nobody
        has seen it yet.
        """

        def begin() -> Begun[None]:
            self._check_open()
            self._store.bind_loop(self._name)
            return Begun(_wait_for(self._store.in_flight()), finish=self._raise_unseen)

        return call(begin, "synchronize")

    def _raise_unseen(self, _: None) -> None:
        failed = self._store.failed_step()
        if failed is not None:
            failed.result()

    @property
    def param_version(self) -> int:
        """How many steps the parameters have seen that the next call will use."""
        return self._store.parameters.latest.number

    # ---- closing --------------------------------------------------------------------------------------------------

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Wait for everything in flight, publish the newest parameters, and give the parameters free for another
        wrapper. Closing twice is fine; using the model afterwards is a ClosedError. The pool stays open."""

        def begin() -> Begun[None]:
            self._store.bind_loop(self._name)
            self.__dict__["_closed"] = True
            return Begun(self._close(self._store.in_flight()), finish=self._raise_unseen)

        return call(begin, "aclose")

    async def _close(self, events: Sequence[Event[Any]]) -> None:
        await _wait_for(events)
        _release(self)

    async def __aenter__(self) -> RoundPipe:
        self._check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"model {self._name!r} is closed; wrap the module again to go on")
        self._pool.check_open()

    def _check_hooks(self) -> None:
        model = self._model
        if self._store.layers[0].module is not model and any(
            (model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, model._backward_pre_hooks)
        ):
            raise RuntimeError(
                f"hooks are registered on the {type(model).__name__} itself, which is never called as a whole: they "
                "would not run. Register them on its layers (model[0], model[-1])"
            )

    # ---- parameters -----------------------------------------------------------------------------------------------

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The model's parameters; inside `OptimizerCtx()` or a step function, the optimizer's copies."""
        return self.optim_parameters() if in_optimizer_ctx() else self._model.parameters(recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As `parameters`, with names."""
        if in_optimizer_ctx():
            return self.optim_named_parameters(prefix, remove_duplicate)
        return self._namer.named_parameters(prefix, recurse, remove_duplicate)

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """The optimizer's copies of all parameters that require grad: `optim_dtype`, on the host."""
        return (copy for _, copy in self._store.parameters.copies())

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As `optim_parameters`, with the names that the parameters have in the model."""
        copies = {id(slot.parameter): copy for slot, copy in self._store.parameters.copies()}
        for name, parameter in self._namer.named_parameters(prefix, True, remove_duplicate):
            if id(parameter) in copies:
                yield name, copies[id(parameter)]

    def layer_costs(self) -> list[LayerCost]:
        """What is known of each layer's times and sizes, for `ModelExecutePlan.auto`."""
        return self._runner.planner.costs()

    # ---- the wrapped module ---------------------------------------------------------------------------------------

    def set_original_model(self, original_model: nn.Module) -> None:
        """Let unknown attributes be those of `original_model` instead of the wrapped module."""
        self.__dict__["_original"] = original_model

    @property
    def device_pool(self) -> DevicePool:
        """The devices that the model runs on."""
        return self._pool

    @property
    def _target(self) -> nn.Module:
        return self.__dict__["_original"] or self.__dict__["_model"]  # type: ignore[no-any-return]

    @property
    def _namer(self) -> nn.Module:
        """Whose names the parameters have: the original model's, where it holds the same parameters."""
        original = self.__dict__["_original"]
        if original is not None:
            theirs = {id(parameter) for parameter in original.parameters()}
            if all(id(parameter) in theirs for parameter in self._model.parameters()):
                return original  # type: ignore[no-any-return]
        return self._model

    def __getattr__(self, name: str) -> Any:
        if "_model" not in self.__dict__:
            raise AttributeError(name)
        if name == "_name" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        value = getattr(self._target, name)
        if name not in _FLUENT:
            return value

        def fluent(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            return self if result is self._target else result

        return fluent

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self._target, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._target, name)

    def __repr__(self) -> str:
        return f"RoundPipe({self._name!r}, {len(self._store.layers)} layers, {self._pool!r})"


async def _wait_for(events: Sequence[Event[Any]]) -> None:
    """Wait until all events are done, then raise the first exception among theirs."""
    for event in events:
        await event.settled()
    for event in events:
        _ = event.value


def _call_site() -> str:
    frame = sys._getframe(2)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _claim(owner: RoundPipe, model: nn.Module) -> None:
    """Make `owner` the owner of the model's parameters; ValueError if another live model is."""
    mine: ref[RoundPipe] = ref(owner)
    parameters = list(model.named_parameters())
    for name, parameter in parameters:
        known = _owners.get(id(parameter))
        if known is not None and known[0]() is parameter and (other := known[1]()) is not None:
            raise ValueError(
                f"parameter {name!r} belongs to the RoundPipe {other._name!r} already: a parameter has one owner; "
                "close that model first (`await model.aclose()`)"
            )
    for _, parameter in parameters:
        _owners[id(parameter)] = (ref(parameter), mine)


def _release(owner: RoundPipe) -> None:
    for key in [key for key, (_, known) in _owners.items() if known() is owner or known() is None]:
        del _owners[key]
