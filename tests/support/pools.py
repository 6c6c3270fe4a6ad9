"""The kinds of devices that the engine runs on: one fixture, so that every test of behaviour runs on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from roundpipe_async.devices import accelerator
from roundpipe_async.devices.pool import DevicePool
from tests.support.late_device import LateRuntime, late_pool

POOL_KINDS = ("cpu", "cpu_own_memory", "late", "accelerator")
LATENCY_S = 0.0005


@dataclass(eq=False)
class PoolKind:
    """A kind of device, and pools of it: `async with pool_kind.make(2) as pool`."""

    name: str
    runtimes: list[LateRuntime] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether results equal plain PyTorch's on the CPU bit for bit; else compare with a tolerance, or on the
        device."""
        return self.name != "accelerator"

    def make(self, num_devices: int = 2, *, seed: int = 0) -> DevicePool:
        """A new pool, with as many devices as there are where there are fewer. `seed` chooses the order of the late."""
        if self.name == "cpu":
            return DevicePool.cpu(num_devices, 1)
        if self.name == "cpu_own_memory":
            return DevicePool.cpu(num_devices, 1, own_memory=True)
        if self.name == "late":
            self.runtimes.append(LateRuntime(num_devices, seed, LATENCY_S))
            return late_pool(self.runtimes[-1])
        count = accelerator.torch_runtime().count()
        return DevicePool.accelerators(range(min(num_devices, count)))


@pytest.fixture(params=[pytest.param(kind, marks=[pytest.mark.gpu] * (kind == "accelerator")) for kind in POOL_KINDS])
def pool_kind(request: pytest.FixtureRequest) -> Iterator[PoolKind]:
    """Each kind of device that this machine has. A late device that lost a copy's source fails the test."""
    if request.param == "accelerator" and not accelerator.available():
        pytest.skip("torch reports no accelerator on this machine")
    kind = PoolKind(request.param)
    yield kind
    for runtime in kind.runtimes:
        assert not runtime.violations, runtime.violations
