"""The accelerator backend without an accelerator: pinned memory, errors, and torch's API by stand-ins.

What only hardware shows is marked `gpu`, and the suite of `test_every_device.py` runs there, too.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_async import DevicePool, OptimizerCtx, RoundPipe
from roundpipe_async.devices import accelerator
from roundpipe_async.devices.accelerator import (
    AcceleratorDevice,
    CudaRuntime,
    PinnedMemory,
    TorchRuntime,
    accelerator_devices,
    registered_like,
)
from roundpipe_async.devices.base import Device
from tests.support.late_device import LateRuntime, late_pool

needs_gpu = pytest.mark.skipif(not accelerator.available(), reason="torch reports no accelerator on this machine")


# ---- pinned memory --------------------------------------------------------------------------------------------------


async def test_versions_live_in_pinned_memory_from_the_wrapping_on(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = LateRuntime()
    given: list[torch.Tensor] = []

    def pinned(like: torch.Tensor, register: bool) -> torch.Tensor:
        given.append(torch.empty_like(like))
        return given[-1]

    monkeypatch.setattr(runtime, "pinned", pinned)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    async with late_pool(runtime) as pool, RoundPipe(module, devices=pool) as model:
        ours = {tensor.data_ptr() for tensor in given}
        assert len(ours) == 4
        assert all(torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))
        with OptimizerCtx():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            await model.forward_backward((torch.randn(4, 3),), loss_fn=lambda out, _: out.sum())
            await model.step(optimizer.step)
        await model.synchronize()
        assert {parameter.data_ptr() for parameter in module.parameters()} <= {t.data_ptr() for t in given}
        assert len(given) <= 8  # two versions in turns, however many steps


@pytest.mark.parametrize("pin_model", ["alloc", "register", "off"])
def test_pin_model_means_what_it_says(pin_model: Any) -> None:
    asked = []

    class Asked(LateRuntime):
        def pinned(self, like: torch.Tensor, register: bool) -> torch.Tensor | None:
            asked.append(register)
            return torch.empty_like(like)

    module = nn.Linear(3, 3)
    addresses = [parameter.data_ptr() for parameter in module.parameters()]
    pool = late_pool(Asked())
    RoundPipe(module, devices=pool, pin_model=pin_model)
    moved = [parameter.data_ptr() for parameter in module.parameters()] != addresses
    assert moved == (pin_model != "off")
    assert asked == {"alloc": [False, False], "register": [True, True], "off": []}[pin_model]
    pool.close()


def test_where_nothing_can_be_pinned_parameters_stay_where_they_are() -> None:
    runtime = LateRuntime()
    runtime.pins = False
    memory = PinnedMemory(runtime, register=False)
    tensor = torch.ones(3)
    assert memory.home(tensor) is tensor
    assert memory.empty_like(tensor).shape == tensor.shape


def test_torch_without_an_accelerator_pins_nothing_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    if accelerator.available():
        pytest.skip("this machine can pin memory")
    runtime = TorchRuntime("cuda")
    with caplog.at_level(logging.WARNING, "roundpipe_async"):
        assert runtime.pinned(torch.ones(3), register=False) is None
        assert runtime.on_host(torch.ones(3)).shape == (3,)
        assert runtime.pinned(torch.ones(3), register=True) is None
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "host memory is not pinned, so transfers are slower and block their thread",
        "pin_model='register' needs CUDA",
    ]


def test_registered_pages_are_given_back_before_they_go() -> None:
    calls: list[tuple[str, int, int]] = []

    def register(address: int, num_bytes: int) -> int:
        calls.append(("register", address, num_bytes))
        return 0

    like = torch.randn(3, 5, 7).permute(2, 0, 1)
    tensor = registered_like(like, register, lambda address: calls.append(("unregister", address, 0)))
    assert isinstance(tensor, torch.Tensor)
    tensor.copy_(like)
    assert torch.equal(tensor, like)
    assert tensor.stride() == like.stride()
    address = tensor.data_ptr()
    view = tensor[1:]
    del tensor
    assert calls == [("register", address, 4096)]
    assert address % 4096 == 0
    del view
    assert calls[1:] == [("unregister", address, 0)]


def test_pages_that_cannot_be_registered_are_not_unregistered() -> None:
    unregistered: list[int] = []
    assert registered_like(torch.ones(3), lambda address, size: 2, unregistered.append) == 2
    assert not unregistered


def test_cuda_falls_back_from_registering_with_a_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Cudart:
        code = 0

        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            return self.code

        def cudaHostUnregister(self, address: int) -> int:
            return 0

    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(TorchRuntime, "pinned", lambda self, like, register: torch.empty_like(like))
    runtime = CudaRuntime("cpu")  # where zeros() works
    registered = runtime.pinned(torch.ones(3), register=True)
    assert registered is not None
    assert registered.data_ptr() % 4096 == 0
    cudart.code = 712
    with caplog.at_level(logging.WARNING, "roundpipe_async"):
        assert runtime.pinned(torch.ones(3), register=True) is not None
    assert "cudaHostRegister failed with 712" in caplog.text


# ---- torch's API, by stand-ins --------------------------------------------------------------------------------------


class FakeTorch:
    """Notes what is asked of torch.accelerator, torch.Stream and torch.Event."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        fake = self

        class Stream:
            def __init__(self, device: torch.device, priority: int = 0) -> None:
                fake.calls.append(("stream", device.index, priority))
                self.name = device.index

            def wait_event(self, event: Any) -> None:
                fake.calls.append(("wait", self.name, event))

        class FakeEvent:
            def __init__(self, device: torch.device, enable_timing: bool = False) -> None:
                self.timing = enable_timing

            def record(self, stream: Any) -> None:
                fake.calls.append(("record", stream.name, self.timing))

            def synchronize(self) -> None:
                fake.calls.append(("synchronize", threading.current_thread().name))

            def elapsed_time(self, other: Any) -> float:
                return 1500.0

        monkeypatch.setattr(torch, "Stream", Stream)
        monkeypatch.setattr(torch, "Event", FakeEvent)
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: self.calls.append(("device", index)))
        monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: self.calls.append(("current", stream.name)))


def test_actions_set_device_and_stream_and_wait_in_their_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTorch(monkeypatch)
    device = AcceleratorDevice(3, TorchRuntime("xpu"))
    assert device.torch_device == torch.device("xpu", 3)
    assert isinstance(device, Device)
    first = device.upload.submit(lambda: 1)
    second = device.compute.submit(lambda: first.value + 1, after=(first,))
    assert second.wait(5)
    assert first.wait(5)  # its own thread tells of it: perhaps later
    assert second.value == 2
    assert fake.calls.count(("device", 3)) == fake.calls.count(("current", 3)) == 2
    assert ("stream", 3, -1) in fake.calls  # transfers of values go before parameters, where the hardware can
    assert ("stream", 3, 0) in fake.calls
    waiters = [call[1] for call in fake.calls if call[0] == "synchronize"]
    assert sorted(waiters) == ["roundpipe_async xpu:3/compute (wait)", "roundpipe_async xpu:3/upload (wait)"]
    device.close()


def test_a_device_type_without_streams_of_its_own_works_in_the_one_that_it_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeTorch(monkeypatch)
    only = torch.Stream(torch.device("mps", 0))

    def none(device: torch.device, priority: int = 0) -> None:
        raise RuntimeError("Backend doesn't support create a new Stream.")

    monkeypatch.setattr(torch, "Stream", none)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: only)
    device = AcceleratorDevice(0, TorchRuntime("mps"))
    with caplog.at_level(logging.WARNING, "roundpipe_async"):
        first = device.upload.submit(lambda: 1)
        second = device.compute.submit(lambda: first.value + 1, after=(first,))
        assert second.wait(5)
        assert first.wait(5)
    assert caplog.text.count("mps makes no streams") == 1
    assert [call[1] for call in fake.calls if call[0] == "record"] == [0, 0]
    device.close()


def test_nothing_is_probed_before_it_is_needed_and_an_absent_accelerator_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"reports no accelerator .*DevicePool\.cpu\(\)"):
        DevicePool.accelerators()
    monkeypatch.setenv("ROUNDPIPE_ASYNC_DEVICES", "accelerator")
    with pytest.raises(RuntimeError, match="reports no accelerator"):
        DevicePool.default()
    monkeypatch.delenv("ROUNDPIPE_ASYNC_DEVICES")
    assert DevicePool.default().devices[0].torch_device.type == "cpu"


@pytest.mark.parametrize(
    ("indices", "error", "words"),
    [
        ([0, 2], ValueError, r"no accelerator 2: torch reports 2 of type 'late'.*CUDA_VISIBLE_DEVICES"),
        ([-1], ValueError, "no accelerator -1"),
        ([], ValueError, "indices is empty"),
        ([1, 1], ValueError, "named twice"),
        ([True], TypeError, "integers, not True"),
        (["0"], TypeError, "integers, not '0'"),
    ],
)
def test_wrong_indices_are_errors_that_say_what_there_is(indices: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        accelerator_devices(indices, LateRuntime(2))


@pytest.fixture
def two_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "available", lambda: True)
    monkeypatch.setattr(accelerator, "torch_runtime", lambda: LateRuntime(2))


@pytest.mark.parametrize(
    ("wish", "names"),
    [
        (None, ["late:0", "late:1"]),
        ("", ["late:0", "late:1"]),
        ("accelerator", ["late:0", "late:1"]),
        ("accelerator:1", ["late:1"]),
        ("accelerator:1,0", ["late:1", "late:0"]),
        ("cpu:3", ["cpu:0", "cpu:1", "cpu:2"]),
        ("cpu", ["cpu:0"]),
    ],
)
@pytest.mark.usefixtures("two_accelerators")
def test_the_default_pool_is_every_accelerator_unless_the_variable_says_else(
    wish: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROUNDPIPE_ASYNC_DEVICES", raising=False)
    if wish is not None:
        monkeypatch.setenv("ROUNDPIPE_ASYNC_DEVICES", wish)
    assert [device.name for device in DevicePool.default().devices] == names


@pytest.mark.usefixtures("two_accelerators")
@pytest.mark.parametrize("wish", ["gpu", "cpu:", "cpu:x", "cpu:1,2", "accelerator:", "accelerator:0;1"])
def test_a_wish_that_is_not_understood_is_refused(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_ASYNC_DEVICES", wish)
    with pytest.raises(ValueError, match="is not understood: use cpu, cpu:N, accelerator or accelerator:I,J"):
        DevicePool.default()


def test_importing_the_module_touches_no_device() -> None:
    probe = (
        "import torch\n"
        "def no(*args, **kwargs): raise SystemExit('probed')\n"
        "for name in ('is_available', 'device_count', 'current_accelerator'): setattr(torch.accelerator, name, no)\n"
        "torch.cuda.is_available = torch.cuda.init = torch.cuda._lazy_init = no\n"
        "import roundpipe_async.devices.accelerator\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


# ---- with an accelerator --------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
async def test_gpu_results_are_there_and_the_users_device_and_stream_untouched() -> None:
    stream, index = torch.accelerator.current_stream(), torch.accelerator.current_device_index()
    async with DevicePool.accelerators([0]) as pool:
        device = pool.devices[0]
        source = torch.randn(1 << 20)
        up = device.load.submit(lambda: device.from_host(source))
        twice = device.compute.submit(lambda: up.value * 2, after=(up,))
        home = device.download.submit(lambda: device.to_host(twice.value), after=(twice,))
        assert torch.equal(await home, source * 2)
        assert home.value.is_pinned()
        assert device.statistics()["peak_bytes"] >= source.nbytes
    assert torch.accelerator.current_stream() == stream
    assert torch.accelerator.current_device_index() == index


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("pin_model", ["alloc", "register", "off"])
async def test_gpu_parameters_are_pinned_as_asked(pin_model: Any) -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    async with DevicePool.accelerators([0]) as pool, RoundPipe(module, devices=pool, pin_model=pin_model) as model:
        assert all(p.is_pinned() == (pin_model != "off") for p in module.parameters())
        await model.forward_backward((torch.randn(8, 64),), loss_fn=lambda out, _: out.sum())


@pytest.mark.gpu
@needs_gpu
async def test_gpu_out_of_memory_gives_the_memory_back() -> None:
    class Greedy(nn.Linear):
        greedy = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.greedy:
                torch.empty(1 << 50, dtype=torch.uint8, device=x.device)
            return super().forward(x)

    module = nn.Sequential(*(Greedy(64, 64) for _ in range(3)))
    async with DevicePool.accelerators([0]) as pool, RoundPipe(module, devices=pool) as model:
        before = pool.statistics()[0]["allocated_bytes"]
        try:
            await model.forward_backward((torch.randn(8, 64),), loss_fn=lambda out, _: out.sum())
        except torch.OutOfMemoryError:
            await asyncio.sleep(0.1)
            assert pool.statistics()[0]["allocated_bytes"] <= before
        else:
            pytest.fail("there is a petabyte of memory")
        Greedy.greedy = False
        await model.forward_backward((torch.randn(8, 64),), loss_fn=lambda out, _: out.sum())
