"""Recompute sees what forward saw: the same random draws, and whatever a layer chose to keep.

A layer runs up to three times (forward, recompute, and inside backward when it checkpoints parts of itself), in any
thread, beside other layers. Its draws must depend on a seed alone. So each run gets a private generator, and torch's
random operators are led to it by a dispatch key that only the running thread has switched on: kernels are registered
under that key for the operators that take a generator, every other operator falls through it inside torch's
dispatcher and pays nothing. (A Python dispatch mode does the same at about four microseconds an operator; swapping the
state of the default generator needs a lock around every layer.) Operators without a generator argument (`rand`,
dropout, scaled dot product attention, …) are built on those that have one and need no care.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.random
from torch.utils import _pytree as pytree

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_C: Any = torch._C
_random: Any = torch.random
_Library: Any = torch.library.Library
_TLS_KEY = "roundpipe_async.seeded"  # torch carries these objects to the threads of its autograd engine; we must too


# ---- seeds ----------------------------------------------------------------------------------------------------------


def _mix(z: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits in which every bit spreads."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def layer_seed(call_seed: int, layer: int, microbatch: int) -> int:
    """The seed of one layer's run on one microbatch: 64 well-mixed bits of the three numbers, and of nothing else.

    torch's CPU generator keeps the low 32 bits of a seed, so these alone are as well mixed as the whole.
    """
    z = _mix((call_seed + _GOLDEN) & _MASK)
    z = _mix((z ^ (layer & _MASK)) + _GOLDEN & _MASK)
    return _mix((z ^ (microbatch & _MASK)) + _GOLDEN & _MASK)


class CallSeed:
    """One number drawn from a generator, which a failed call can put back.

    `value` has 63 bits. The draw moves the generator by the same amount whatever the call does with it.
    """

    __slots__ = ("_after", "_before", "_generator", "value")

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._before: torch.Tensor | None = generator.get_state()
        self.value = int(torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator))
        self._after: torch.Tensor = generator.get_state()

    def undo(self) -> bool:
        """Move the generator back to before the draw, unless somebody else drew from it since. True if it moved.

        A second undo does nothing.
        """
        before, self._before = self._before, None
        if before is None or not torch.equal(self._generator.get_state(), self._after):
            return False
        self._generator.set_state(before)
        return True


def draw_call_seed(generator: torch.Generator | None = None) -> CallSeed:
    """Draw the seed of one call from `generator`; None is this thread's default CPU generator.

    Inside a `seeded` scope (a layer that trains a model of its own) that is the scope's generator.
    """
    return CallSeed(_ambient_generator() if generator is None else generator)


# ---- the scope ------------------------------------------------------------------------------------------------------


class seeded:
    """Inside, this thread's draws from torch's default generators come from `seed` alone; outside nothing changes.

    Any number of threads may be inside at once, each with its own seed. A scope is entered once, is never held across
    an `await`, and may be nested; the inner one counts. `scope.drawn` tells whether anything used the generator.

    - CPU draws: every operator of torch, with the numbers that `torch.manual_seed(seed)` followed by the same code
      gives. `torch.get_rng_state`, `set_rng_state`, `fork_rng`, `manual_seed`, `seed` and `initial_seed` mean the
      scope's generator. A generator that the user passes explicitly is left alone (its draws differ in recompute, as
      with `torch.utils.checkpoint`), except `torch.default_generator`, which means the scope's.
    - `torch.utils.checkpoint` inside a layer keeps its promise: it reads and sets the state of the scope's generator.
      It recomputes in backward, so walk the graph inside a scope too (any seed): otherwise its `set_rng_state`
      disturbs the process's generator and other threads disturb its draws.
    - An accelerator as `device`: its default generator is seeded and put back at the end, for its fused kernels take
      no other. So one thread at a time may be inside for one accelerator, and nobody else should draw there meanwhile.
    - A draw on an accelerator other than `device` raises RuntimeError: it could not be repeated.

    Not seen: `random`, NumPy, threads that a layer starts, C++ extensions that take torch's default generator by
    themselves.
    """

    __slots__ = (
        "_device_generator",
        "_device_seeded",
        "_device_state",
        "_generator",
        "_guard",
        "_outer",
        "_used",
        "device",
        "seed",
    )

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.device = device
        self._generator: torch.Generator | None = None
        self._device_generator: torch.Generator | None = None
        self._used = False

    @property
    def drawn(self) -> bool:
        """Whether any draw (or a look at the generator's state) happened inside so far."""
        if not self._used and self._device_generator is not None:
            self._used = not torch.equal(self._device_generator.get_state(), self._device_seeded)
        return self._used

    def __enter__(self) -> seeded:
        _kernels.install()
        self._outer: seeded | None = _current()
        if self.device.type not in ("cpu", "meta"):
            generator = _accelerator_generator(self.device)
            self._device_state = generator.get_state()
            generator.manual_seed(self.seed)
            self._device_seeded = generator.get_state()
            self._device_generator = generator
        _proxy.acquire()
        _C._stash_obj_in_tls(_TLS_KEY, self)
        self._guard = _C._IncludeDispatchKeyGuard(_kernels.key)
        self._guard.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._guard.__exit__(kind, error, traceback)
        _C._stash_obj_in_tls(_TLS_KEY, self._outer)
        _proxy.release()
        self._outer = None
        if self._generator is not None:
            _spare.generators.append(self._generator)
            self._generator = None
        if self._device_generator is not None:
            _ = self.drawn
            self._device_generator.set_state(self._device_state)
            self._device_generator = None

    def generator(self) -> torch.Generator:
        """The private CPU generator: seeded at the first use, so that a layer that draws nothing pays nothing."""
        generator = self._generator
        if generator is None:
            spare = _spare.generators
            generator = spare.pop() if spare else torch.Generator()
            generator.manual_seed(self.seed)
            self._generator, self._used = generator, True
        return generator


class _Spare(threading.local):
    """Generators of this thread that no scope is using."""

    def __init__(self) -> None:
        self.generators: list[torch.Generator] = []


_spare = _Spare()


def _current() -> seeded | None:
    if _C._is_key_in_tls(_TLS_KEY):
        scope: seeded | None = _C._get_obj_in_tls(_TLS_KEY)
        return scope
    return None


def _ambient_generator() -> torch.Generator:
    """What "the default CPU generator" means in this thread."""
    scope = _current()
    return torch.default_generator if scope is None else scope.generator()


def _accelerator_generator(device: torch.device) -> torch.Generator:
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", None)
    if not generators:
        raise RuntimeError(f"torch.{device.type} shows no default_generators: draws on {device} cannot be repeated")
    generator: torch.Generator = generators[module.current_device() if device.index is None else device.index]
    return generator


# ---- kernels that lead draws to the scope ---------------------------------------------------------------------------


class _Kernels:
    """Registers, once and at the first scope, a kernel for every operator of torch that draws by itself."""

    _KEY_NAME = "TESTING_ONLY_GenericWrapper"  # above autograd and autocast, and nothing else in torch uses it

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._libraries: list[Any] = []  # their kernels go when they go
        self.led: list[torch._ops.OpOverload] = []
        self.key: Any = None

    def install(self) -> None:
        if self.key is None:
            with self._lock:
                if self.key is None:
                    key = _C._dispatch_key_parse(self._KEY_NAME)
                    self._register(key)
                    self.key = key

    def _register(self, key: Any) -> None:
        below = _C._dispatch_keyset_full_after(key)
        rest = _Library("_", "IMPL", self._KEY_NAME)
        rest.fallback(torch.library.fallthrough_kernel, self._KEY_NAME)
        libraries = {"_": rest}
        for name in _C._dispatch_get_all_op_names():
            namespace, _, path = name.partition("::")
            if namespace in ("rngprims", "inductor_prims"):
                continue  # torch.compile's own: their seeds are arguments
            packet, _, overload = path.partition(".")
            schema = _C._get_schema(f"{namespace}::{packet}", overload)
            takes_generator = any(str(argument.type) == "Optional[Generator]" for argument in schema.arguments)
            if namespace == "aten" and not takes_generator and not packet.startswith(_BARE):
                continue  # cheap: most operators end here
            operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
            if not takes_generator and torch.Tag.nondeterministic_seeded not in operator.tags:
                continue
            if operator.has_kernel_for_dispatch_key(_C.DispatchKey.CompositeImplicitAutograd):
                continue  # made of operators that draw
            if namespace not in libraries:
                libraries[namespace] = _Library(namespace, "IMPL", self._KEY_NAME)
            if takes_generator:
                kernel = _lead(operator, below)
            else:
                kernel = _lend(operator, below, key, always=namespace != "aten")
            libraries[namespace].impl(path, kernel, with_keyset=True)
            self.led.append(operator)
        self._libraries += libraries.values()


_BARE = ("rand", "native_dropout")  # aten's operators that draw on the CPU and have no generator argument


def _lead(operator: torch._ops.OpOverload, below: Any) -> Callable[..., Any]:
    """A kernel for an operator with a generator argument: hand it the scope's, unless the user chose one."""
    arguments = operator._schema.arguments
    place = next(i for i, argument in enumerate(arguments) if argument.name == "generator")
    if arguments[place].kwarg_only:
        place = len(arguments)
    default = torch.default_generator._cdata  # type: ignore[attr-defined]
    redispatch = operator.redispatch

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("generator") if len(args) <= place else args[place]
        if given is None or given._cdata == default:
            scope = _current()
            if scope is not None and args and type(args[0]) is torch.Tensor and args[0].is_cpu:  # nearly always
                generator: torch.Generator | None = scope._generator or scope.generator()
            else:
                generator = _generator_for(operator, args, kwargs)
            if len(args) <= place:
                kwargs["generator"] = generator
            else:
                args = (*args[:place], generator, *args[place + 1 :])
        return redispatch(keyset & below, *args, **kwargs)

    return kernel


_lending = threading.RLock()


def _lend(operator: torch._ops.OpOverload, below: Any, key: Any, always: bool) -> Callable[..., Any]:
    """A kernel for an operator without a generator argument: let the default generator stand in the scope's state.

    torch's own operators are built on those that `_lead` serves, and need this only where Python (a tensor subclass,
    a dispatch mode) comes between the two: the key is off there. Threads with scopes take turns; a thread without one
    that draws in these microseconds disturbs and is disturbed.
    """

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not (always or _C._len_torch_dispatch_stack() or any(map(_is_subclass, args))):
            return operator.redispatch(keyset & below, *args, **kwargs)
        generator = _generator_for(operator, args, kwargs)
        if generator is None:
            return operator.redispatch(keyset & below, *args, **kwargs)
        default = torch.default_generator
        with _lending, _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(key)):
            before = default.get_state()
            default.set_state(generator.get_state())
            try:
                return operator(*args, **kwargs)
            finally:
                generator.set_state(default.get_state())
                default.set_state(before)

    return kernel


def _generator_for(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Generator | None:
    """The generator that `operator` shall draw from: the scope's on the CPU, else None, the default one."""
    scope = _current()
    if scope is None:
        return None
    tensor = kwargs.get("out")
    if tensor is None:
        tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    device = (kwargs.get("device") or torch.device("cpu")) if tensor is None else tensor.device
    if device.type == "cpu":
        if _is_subclass(tensor) and torch._guards.TracingContext.try_get() is not None:
            return None  # torch.compile is tracing: the draw happens when the compiled code runs
        return scope.generator()
    at = scope.device
    if device.type == "meta" or device == at or (device.type == at.type and None in (device.index, at.index)):
        return None  # the default generator of that device is seeded already
    raise RuntimeError(
        f"{operator} draws random numbers on {device} in a layer that runs on {at}: recompute could not repeat them. "
        f"Draw on {at} or the CPU and move the result, or pass a generator of your own."
    )


def _is_subclass(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter)


_kernels = _Kernels()


class _Proxy:
    """Stands in for `torch.random.default_generator` while any scope is open.

    The functions of `torch.random`, and `torch.utils.checkpoint` through them, read and set the default generator's
    state by that name; no operator is involved that a kernel could lead. In threads without a scope it is the real one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._real: Any = None

    def acquire(self) -> None:
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._real = _random.default_generator
                _random.default_generator = self

    def release(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0 and _random.default_generator is self:
                _random.default_generator = self._real

    def __getattr__(self, name: str) -> Any:
        return getattr(_ambient_generator(), name)


_proxy = _Proxy()


# ---- data that a layer keeps for recompute --------------------------------------------------------------------------


class RecomputeScope:
    """What one layer kept in forward on one microbatch, for its own recompute.

    The engine makes one per layer and microbatch, enters `recording(scope)` around forward and `replaying(scope)`
    around recompute, and drops it with the activations. `saved` may be emptied or moved between devices in between.
    """

    __slots__ = ("saved",)

    def __init__(self) -> None:
        self.saved: list[tuple[Any, ...]] = []


class _Phase(threading.local):
    """Which scope this thread records into or replays from, and how far it has read."""

    def __init__(self) -> None:
        self.recording: RecomputeScope | None = None
        self.replaying: RecomputeScope | None = None
        self.read = 0


_phase = _Phase()


@contextmanager
def recording(scope: RecomputeScope) -> Iterator[RecomputeScope]:
    """Engine: what this thread's layer saves inside goes into `scope`, which starts empty."""
    scope.saved.clear()
    with _phase_of(scope, None):
        yield scope


@contextmanager
def replaying(scope: RecomputeScope) -> Iterator[RecomputeScope]:
    """Engine: this thread's layer is recomputed inside, from the start of what it saved in `scope`."""
    with _phase_of(None, scope):
        yield scope
        if 0 < _phase.read < len(scope.saved):
            raise RuntimeError(
                f"the layer called save_for_recompute {len(scope.saved)} times in forward but get_recompute_data "
                f"{_phase.read} times in recompute: the calls must pair up in order"
            )


@contextmanager
def _phase_of(to_record: RecomputeScope | None, to_replay: RecomputeScope | None) -> Iterator[None]:
    outer = _phase.recording, _phase.replaying, _phase.read
    _phase.recording, _phase.replaying, _phase.read = to_record, to_replay, 0
    try:
        yield
    finally:
        _phase.recording, _phase.replaying, _phase.read = outer


def save_for_recompute(*data: Any) -> None:
    """Keep `data` in forward, for recompute to get back instead of computing it again.

    Worth it for what is small and slow, or makes the host wait for the device (`torch.nonzero`). Tensors, in any
    nesting, are detached; they are not copied, so do not change them in place. A layer may call it several times:
    the data come back in the same order. Where nothing will be recomputed (the fused stage, inference, the layer used
    without the engine, and recompute itself) it does nothing.
    """
    scope = _phase.recording
    if scope is not None:
        scope.saved.append(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, data))


def doing_recompute() -> bool:
    """Whether the layer now running is being recomputed. False outside the engine."""
    return _phase.replaying is not None


def get_recompute_data() -> tuple[Any, ...]:
    """The data of this layer's next `save_for_recompute`, always as a tuple.

    RuntimeError outside recompute, or when forward did not save as often as recompute asks.
    """
    scope = _phase.replaying
    if scope is None:
        raise RuntimeError(
            "get_recompute_data() was called while nothing is recomputed: call it only if doing_recompute() is true"
        )
    if _phase.read >= len(scope.saved):
        raise RuntimeError(
            f"get_recompute_data() was called {_phase.read + 1} times in recompute, but the layer's forward called "
            f"save_for_recompute {len(scope.saved)} times: the calls must pair up in order"
        )
    _phase.read += 1
    return scope.saved[_phase.read - 1]
