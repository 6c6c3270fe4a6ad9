"""What must hold after a call has ended, however it ended."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn

from roundpipe_async import calls
from roundpipe_async.devices.pool import DevicePool
from roundpipe_async.model import RoundPipe


def assert_idle(model: RoundPipe) -> None:
    """No call of the model is under way and nothing that a call holds is held."""
    store = model._store
    assert not store._unsettled, f"calls not settled: {list(store._unsettled)}"
    assert not store._gradients and not store._training
    assert store._line._free == 1 and not store._line._waiting
    assert store.parameters.latest.readers == 0
    assert not store.parameters._retired, "a version that nobody reads is kept"
    assert_pool_idle(model.device_pool)


def assert_pool_idle(pool: DevicePool) -> None:
    """All places of all devices are free."""
    for room, turn in zip(pool.rooms, pool.turns, strict=True):
        assert (room._free, turn._free) == (2, 1)
        assert not room._waiting and not turn._waiting


def assert_no_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """The engine has no task left in the loop."""
    left = [task for task in calls._tasks if task.get_loop() is loop and not task.done()]
    assert not left, f"tasks left: {left}"


@dataclass
class Snapshot:
    """Everything of a model that a call may change."""

    state: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    version: int
    random: torch.Tensor

    @classmethod
    def of(cls, module: nn.Module, model: RoundPipe) -> Snapshot:
        """As it is now."""
        return cls(
            {name: value.clone() for name, value in module.state_dict().items()},
            {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()},
            model.param_version,
            torch.get_rng_state(),
        )

    def assert_same(self, other: Snapshot, *, random: bool = True) -> None:
        """Nothing changed, bit for bit."""
        for name, value in self.state.items():
            assert torch.equal(value, other.state[name]), f"{name} changed"
        for name, gradient in self.gradients.items():
            now = other.gradients[name]
            assert (gradient is None) == (now is None), f"gradient of {name} came or went"
            assert gradient is None or now is None or torch.equal(gradient, now), f"gradient of {name} changed"
        assert self.version == other.version
        assert not random or torch.equal(self.random, other.random), "the random state moved"

    def is_same(self, other: Snapshot) -> bool:
        """Whether nothing but the random state differs."""
        try:
            self.assert_same(other, random=False)
        except AssertionError:
            return False
        return True


class Traces:
    """Weak references to tensors that a call made or was given: they must not outlive it."""

    def __init__(self) -> None:
        self._refs: list[tuple[str, ref[Any]]] = []

    def watch(self, tensor: torch.Tensor, label: str = "") -> torch.Tensor:
        """Note a tensor; gives it back."""
        self._refs.append((label, ref(tensor)))
        return tensor

    def __len__(self) -> int:
        return len(self._refs)

    def assert_gone(self) -> None:
        """Nothing that was noted is alive."""
        gc.collect()
        alive = [(label, found) for label, weak in self._refs if (found := weak()) is not None]
        assert not alive, f"{len(alive)} of {len(self._refs)} tensors are alive: {[label for label, _ in alive]}"
        self._refs.clear()


async def quiet(pool: DevicePool) -> None:
    """Wait until each worker has left the frame of its last action: its event happens a moment before that."""
    for stream in pool._streams():
        await stream.submit(lambda: None)
