"""Buffers of layers (BatchNorm's statistics, counters) as chains of immutable states.

A microbatch's forward gets its own copy of the state that the microbatch before it left, and what it made of the copy
is the next state. So a call that fails changes nothing, recompute sees what forward saw, and nothing counts twice.
The last state is written to the module when the call has succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from roundpipe_async.replica import Replica

LARGE_BYTES = 1 << 16
"""Larger buffers that a forward left alone (masks, rotary tables) are trusted to stay so, and no longer copied."""

State = list[torch.Tensor | None]
Move = Callable[[torch.Tensor], torch.Tensor]
"""Gives a tensor in the memory of the device that runs the layer."""


class LayerBuffers:
    """The buffers of one layer of a model, and the state that the last successful call left."""

    def __init__(self, layer: nn.Module) -> None:
        self.places: list[list[tuple[nn.Module, str]]] = []
        found: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in layer.modules():
            for name, buffer in module._buffers.items():
                place = (module, name)
                if buffer is not None and id(buffer) in found:
                    found[id(buffer)].append(place)
                else:
                    self.places.append([place])
                    if buffer is not None:
                        found[id(buffer)] = self.places[-1]
        self.constant = [False] * len(self.places)
        self._committed: State = [None] * len(self.places)
        self._seen: list[tuple[int, int] | None] = [None] * len(self.places)
        self._lent = [False] * len(self.places)
        """Whether a chain may have started from the module's own buffer, whose memory has to stay as it is then."""

    def live(self, index: int) -> torch.Tensor | None:
        """The module's own buffer."""
        module, name = self.places[index][0]
        return module._buffers[name]

    def start(self) -> BufferChain:
        """A chain for one call, from what the module holds now."""
        state: State = []
        for index in range(len(self.places)):
            live = self.live(index)
            unchanged = live is not None and self._seen[index] == (id(live), live._version)
            self._lent[index] |= not unchanged
            state.append(self._committed[index] if unchanged else None if live is None else live.detach())
        return BufferChain(self, state)

    def commit(self, chain: BufferChain) -> None:
        """Write a successful call's last state to the module. Torch work: not on the event loop's thread."""
        for index, (old, new) in enumerate(zip(chain.first, chain.state, strict=True)):
            if new is old:
                continue  # never changed
            live = self.live(index)
            if live is not None and new is not None and _overwrite(live, new, self._lent[index]):
                self._lent[index] = False
                self._committed[index] = new if new.device == live.device else live.clone()
                self._seen[index] = (id(live), live._version)
            else:
                home = None if new is None else new.to("cpu" if live is None else live.device)
                for module, name in self.places[index]:
                    module._buffers[name] = home


def _overwrite(live: torch.Tensor, new: torch.Tensor, elsewhere: bool) -> bool:
    """Write `new` into the module's own tensor, which gets other memory if `elsewhere`: a call that changes no buffers
    runs beside others, and the state that it reads must not change under it.

    False where that cannot be done, and nothing was.
    """
    if live.shape != new.shape or live.dtype != new.dtype:
        return False
    try:
        with torch.no_grad():
            if elsewhere:
                live.data = torch.empty_like(live).copy_(new)
            else:
                live.copy_(new)
    except RuntimeError:  # expanded memory, an inference tensor: the module gets the new one
        return False
    return True


class BufferChain:
    """The states of one layer's buffers in the course of one call."""

    def __init__(self, buffers: LayerBuffers, state: State) -> None:
        self.buffers = buffers
        self.first = state
        self.state = state
        self.changed = False
        self._before: dict[int, State] = {}

    @contextmanager
    def forward(self, replica: Replica, microbatch: int, on_device: Move) -> Iterator[None]:
        """Around a microbatch's forward: install a copy of the state, take the next state from it."""
        copies = self._install(replica, self.state, on_device)
        versions = [_version(copy) for copy in copies]
        yield
        self._before[microbatch] = self.state
        state = list(self.state)
        for index, places in enumerate(self.buffers.places):
            module, name = places[0]
            new, old = replica.of(module)._buffers[name], self.state[index]
            if self.buffers.constant[index]:
                unchanged = new is copies[index] and _version(new) == versions[index]
                self.buffers.constant[index] = unchanged
            else:
                # By value: torch's batch norm writes its statistics without counting a version.
                unchanged = _equal(new, old)
                self.buffers.constant[index] = unchanged and new is not None and new.nbytes > LARGE_BYTES
            if not unchanged:
                state[index] = None if new is None else _plain(new)
                self.changed = True
        self.state = state

    @contextmanager
    def recompute(self, replica: Replica, microbatch: int, on_device: Move) -> Iterator[None]:
        """Around a microbatch's recompute: what forward saw, and nothing is kept."""
        self._install(replica, self._before[microbatch], on_device)
        yield

    def _install(self, replica: Replica, state: State, on_device: Move) -> State:
        installed: State = []
        for places, tensor, constant in zip(self.buffers.places, state, self.buffers.constant, strict=True):
            if tensor is not None:
                tensor = on_device(tensor)
                if not constant:
                    tensor = tensor.clone()
            for module, name in places:
                replica.of(module)._buffers[name] = tensor
            installed.append(tensor)
        return installed


def refuse_shared(chains: Mapping[int, BufferChain]) -> None:
    """Raise where several layers (`chains` by index) changed one buffer.

    In plain PyTorch its states would go from layer to layer for one microbatch after another; here a stage runs all of
    its microbatches first, so there is no one state that is right.
    """
    changed: dict[Hashable, int] = {}
    for layer, chain in chains.items():
        for places, old, new in zip(chain.buffers.places, chain.first, chain.state, strict=True):
            if new is old:
                continue
            module, name = places[0]
            live = module._buffers[name]
            other = changed.setdefault((id(module), name) if live is None else id(live), layer)
            if other != layer:
                raise RuntimeError(
                    f"layers {other} and {layer} share the buffer {name!r} of a {type(module).__name__}, and both "
                    "change it: put what shares it into one layer, or give each layer a module of its own"
                )


def _version(tensor: torch.Tensor | None) -> int | None:
    """The count of in-place changes, where torch keeps one."""
    return None if tensor is None or tensor.is_inference() else tensor._version


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A state as the next one may start from it: it outlives the call that makes it, whatever the call's mode."""
    if not tensor.is_inference():
        return tensor.detach()
    with torch.inference_mode(False):
        return tensor.clone()


def _equal(new: torch.Tensor | None, old: torch.Tensor | None) -> bool:
    if new is None or old is None:
        return new is old
    return new.shape == old.shape and new.dtype == old.dtype and torch.equal(new, old.to(new.device))
