"""The host's parameters as numbered versions, and the optimizer's copies of them.

A version is the model's parameters after a number of steps. A call reads one version from beginning to end; the
optimizer works on its own copies meanwhile, and publishing makes the next version from them. Versions never change
while somebody reads them: a version is published into the memory of the one before when nobody reads that any more,
and into other memory (used in turns) otherwise. So a call never waits for readers of older parameters, and sees
layers of one version only.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from roundpipe_async.events import Event


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter of the model, however many names and layers share it."""

    index: int
    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]]
    layers: list[int] = field(default_factory=list)
    copy: nn.Parameter | None = None
    """The optimizer's copy; made when first asked for."""
    handed_out: bool = False
    """Whether somebody (an optimizer) was given the copy."""
    seen_version: int = 0
    """torch's count of in-place changes of `parameter` when we last wrote or read it."""
    stale_copy: bool = False
    """The user changed the parameter; the copy must follow before the next step."""


@dataclass(slots=True, eq=False)
class Version:
    """The parameters after `number` steps. `ready[layer]` happens when the layer's have their values."""

    number: int
    ready: list[Event[None]]
    tensors: list[torch.Tensor] = field(default_factory=list)
    readers: int = 0
    before: Version | None = None
    """The version that this one is made from, until it is published."""

    @property
    def failed(self) -> bool:
        """Whether its publication failed."""
        return any(event.error is not None for event in self.ready)


class HostMemory:
    """Where the values of versions live: in ordinary memory, the first ones where the user has them."""

    def home(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory of a parameter from now on: its own, or a copy elsewhere."""
        return tensor

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for another version of a parameter."""
        return torch.empty_like(tensor)


class Parameters:
    """All parameters of one model. Methods are for the loop's thread, except where they say otherwise."""

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        optim_dtype: torch.dtype | None,
        memory: HostMemory | None = None,
    ) -> None:
        self._memory = memory or HostMemory()
        self.optim_dtype = optim_dtype
        self.slots: list[Slot] = []
        self.num_layers = len(layers)
        found: dict[int, Slot] = {}
        for layer_index, (layer_name, layer) in enumerate(layers):
            for module_name, module in layer.named_modules(prefix=layer_name):
                for name, parameter in module._parameters.items():
                    if parameter is None:
                        continue
                    slot = found.get(id(parameter))
                    if slot is None:
                        full_name = f"{module_name}.{name}" if module_name else name
                        slot = Slot(len(self.slots), full_name, parameter, [], seen_version=parameter._version)
                        found[id(parameter)] = slot
                        self.slots.append(slot)
                    slot.places.append((module, name))
                    if layer_index not in slot.layers:
                        slot.layers.append(layer_index)
        first = Version(0, [Event.happened(None) for _ in range(self.num_layers)])
        first.tensors = [self._move_home(slot) for slot in self.slots]
        self.latest = first
        """The newest version that was admitted; perhaps not published yet."""
        self._spare: list[list[torch.Tensor]] = []
        self._retired: list[Version] = []
        self._let_go: deque[Version] = deque()
        self._lock = threading.Lock()

    def _move_home(self, slot: Slot) -> torch.Tensor:
        tensor = slot.parameter.detach()
        home = self._memory.home(tensor)
        if home is not tensor:
            slot.parameter.data = home
            slot.seen_version = slot.parameter._version
        return home

    # ---- reading --------------------------------------------------------------------------------------------------

    def read(self) -> Version:
        """The latest version, kept from being overwritten until `release`d."""
        with self._lock:
            self._reclaim()
            self.latest.readers += 1
            return self.latest

    def retain(self, version: Version) -> None:
        """Read a version once more that somebody reads already."""
        with self._lock:
            version.readers += 1

    def release(self, version: Version) -> None:
        """End a `read`. Any thread."""
        with self._lock:
            version.readers -= 1
            assert version.readers >= 0
            self._reclaim()

    def let_go(self, version: Version) -> None:
        """`release` for finalizers: the garbage collector may call them in a thread that holds our lock right now."""
        self._let_go.append(version)
        if self._lock.acquire(blocking=False):
            try:
                self._reclaim()
            finally:
                self._lock.release()

    def _reclaim(self) -> None:
        while self._let_go:
            self._let_go.popleft().readers -= 1
        for version in [version for version in self._retired if not version.readers]:
            self._retired.remove(version)
            self._spare.append(version.tensors)

    def adopt(self) -> None:
        """Notice what the user did to the model's parameters since: changed in place, data or objects replaced.

        Calls from now on read the changed values, and the optimizer's copies follow before the next step. Looks away
        while a publication is under way: whoever changes parameters beside a step has to `synchronize` first.
        """
        latest = self.latest
        if not all(event.done() for event in latest.ready):
            return
        failed = latest.failed  # then some parameters may have other memory than the version, which may have none
        for slot in self.slots:
            module, name = slot.places[0]
            parameter = module._parameters.get(name)
            if parameter is None:
                raise RuntimeError(f"parameter {slot.name!r} was removed from the model after it was wrapped")
            replaced = parameter is not slot.parameter
            replaced |= not failed and parameter.data_ptr() != latest.tensors[slot.index].data_ptr()
            if replaced or parameter._version != slot.seen_version:
                slot.parameter, slot.seen_version, slot.stale_copy = parameter, parameter._version, True
                if replaced and not failed:
                    if latest.readers:
                        latest = self.latest = Version(latest.number, latest.ready, list(latest.tensors))
                    latest.tensors[slot.index] = parameter.detach()

    # ---- the optimizer's side -------------------------------------------------------------------------------------

    def copies(self) -> Iterator[tuple[Slot, nn.Parameter]]:
        """The optimizer's copy of every parameter that requires grad, handed out to the caller."""
        for slot in self.slots:
            if slot.parameter.requires_grad:
                copy = self.copy_of(slot)
                slot.handed_out = True
                yield slot, copy

    def copy_of(self, slot: Slot) -> nn.Parameter:
        """The optimizer's copy of one parameter, made from the parameter at first use. Any thread."""
        with self._lock:
            if slot.copy is None:
                dtype = self.optim_dtype if slot.parameter.is_floating_point() else None
                data = slot.parameter.detach().to(dtype=dtype or slot.parameter.dtype, copy=True)
                slot.copy = nn.Parameter(data, requires_grad=slot.parameter.requires_grad)
                slot.stale_copy = False
            return slot.copy

    def take_stale(self) -> list[Slot]:
        """The slots whose copies have to follow the user's changes before the step that is admitted now."""
        stale = [slot for slot in self.slots if slot.stale_copy and slot.copy is not None]
        for slot in stale:
            slot.stale_copy = False
        return stale

    @staticmethod
    def refresh(stale: Sequence[Slot]) -> None:
        """Let the copies follow the user's changes. The optimizer's thread."""
        for slot in stale:
            assert slot.copy is not None
            try:
                with torch.no_grad():
                    slot.copy.copy_(slot.parameter)
            except BaseException as error:
                for other in stale:
                    other.stale_copy = True
                error.add_note(f"roundpipe_async: in copying the changed parameter {slot.name!r} for the optimizer")
                raise

    def admit(self, number: int) -> Version:
        """Announce version `number`, to be `publish`ed: calls from now on read it."""
        with self._lock:
            self.latest = Version(number, [Event() for _ in range(self.num_layers)], before=self.latest)
            return self.latest

    def publish(self, version: Version, stale: Sequence[Slot] = ()) -> None:
        """Make an announced version from the copies, layer by layer, once those of `stale` follow their parameters.

        The optimizer's thread. Where that fails the version is `failed`, and so are the calls that read it; one made
        after it may succeed.
        """
        try:
            self.refresh(stale)
            with self._lock:
                self._reclaim()
                previous = version.before
                assert previous is not None
                while not previous.tensors:  # its publication failed before it had memory
                    assert previous.before is not None
                    previous = previous.before
                in_place = previous.readers == 0
                if in_place:
                    version.tensors = previous.tensors
                else:
                    version.tensors = self._other_memory(previous.tensors)
                    self._retired.append(previous)
                    self._reclaim()
            for slot in self.slots:  # the user may have replaced a parameter by one of another shape, and back
                if slot.copy is not None and version.tensors[slot.index].shape != slot.copy.shape:
                    version.tensors[slot.index] = torch.empty_like(slot.copy, dtype=slot.parameter.dtype)
            published: set[int] = set()
            for layer in range(self.num_layers):
                for slot in self.slots:
                    if layer in slot.layers and slot.index not in published:
                        published.add(slot.index)
                        self._publish_slot(slot, version.tensors[slot.index])
                version.ready[layer].set(None)
            version.before = None
        except BaseException as error:
            for event in version.ready:
                if not event.done():
                    event.fail(error)
            raise

    def _publish_slot(self, slot: Slot, tensor: torch.Tensor) -> None:
        if slot.copy is None:
            return
        with torch.no_grad():
            tensor.copy_(slot.copy)
            if slot.parameter.data_ptr() != tensor.data_ptr():
                slot.parameter.data = tensor
        slot.seen_version = slot.parameter._version

    def _other_memory(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        spare = self._spare.pop() if self._spare else []
        return [
            tensor
            if slot.copy is None
            else (spare[i] if spare and spare[i].data_ptr() != tensor.data_ptr() else self._memory.empty_like(tensor))
            for i, (slot, tensor) in enumerate(zip(self.slots, tensors, strict=True))
        ]
