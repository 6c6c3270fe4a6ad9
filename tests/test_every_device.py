"""What must hold on every kind of device: `pool_kind` runs each test on those that this machine has.

On the CPU's kinds results equal plain PyTorch's bit for bit; on an accelerator plain PyTorch runs on it, too, and
results are compared with a tolerance.
"""

from __future__ import annotations

import asyncio
import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_async
from roundpipe_async import DevicePool, ModelExecutePlan, OptimizerCtx, RoundPipe, RoundPipeRunConfig
from tests.support.late_device import LateRuntime, late_pool
from tests.support.plain import CASES, Case, plain_forward_backward
from tests.support.pools import PoolKind


class Reference:
    """Plain PyTorch on the memory of the device, and how equal is equal."""

    def __init__(self, kind: PoolKind, pool: DevicePool, model: nn.Module) -> None:
        self.kind = kind
        self.device = pool.devices[0].torch_device
        self.model = copy.deepcopy(model).to(self.device)

    def train(self, data: torch.Tensor, label: torch.Tensor, loss_fn: Any, count: int) -> torch.Tensor:
        data, label = data.clone().to(self.device), label.to(self.device)
        return plain_forward_backward(self.model, data, label, loss_fn, count).cpu()

    def check(self, ours: torch.Tensor | None, theirs: torch.Tensor | None, what: str) -> None:
        assert (ours is None) == (theirs is None), what
        if ours is not None and theirs is not None:
            if self.kind.exact:
                assert torch.equal(ours, theirs), what
            else:
                torch.testing.assert_close(ours, theirs.cpu(), rtol=1e-3, atol=1e-5, msg=lambda text: f"{what}: {text}")

    def check_gradients(self, model: nn.Module) -> None:
        for (name, mine), theirs in zip(model.named_parameters(), self.model.parameters(), strict=True):
            self.check(mine.grad, theirs.grad, name)

    def check_state(self, model: nn.Module) -> None:
        theirs = self.model.state_dict()
        for name, mine in model.state_dict().items():
            assert mine.device.type == "cpu"
            self.check(mine, theirs[name], name)


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_gradients_losses_and_buffers_are_those_of_plain_pytorch(
    case: Case, grain: Any, pool_kind: PoolKind
) -> None:
    torch.manual_seed(0)
    module = case.build()
    for devices in (1, 3):
        async with pool_kind.make(devices, seed=devices) as pool, RoundPipe(module, devices=pool) as model:
            reference = Reference(pool_kind, pool, module)
            for parameter in module.parameters():
                parameter.grad = None
            for rows, count in ((8, 1), (9, 4), (16, 8)):
                data, label = case.data(rows)
                config = RoundPipeRunConfig(num_microbatch=count, recompute_grain=grain)
                loss = await model.forward_backward(
                    (data.clone(),), label=label, loss_fn=case.loss_fn, run_config=config
                )
                reference.check(loss, reference.train(data, label, case.loss_fn, count), "loss")
                reference.check_gradients(module)
            reference.check_state(module)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_training_is_plain_training(case: Case, pool_kind: PoolKind) -> None:
    torch.manual_seed(0)
    module = case.build()
    async with pool_kind.make(2) as pool, RoundPipe(module, devices=pool) as model:
        reference = Reference(pool_kind, pool, module)
        with OptimizerCtx():
            ours = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
        theirs = torch.optim.SGD([p for p in reference.model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
        for _ in range(5):
            data, label = case.data(9)
            await model.forward_backward((data.clone(),), label=label, loss_fn=case.loss_fn,
                                         run_config=RoundPipeRunConfig(num_microbatch=3))  # fmt: skip
            reference.train(data, label, case.loss_fn, 3)
            await model.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
            theirs.step()
            theirs.zero_grad()
            reference.check_state(module)


async def test_forward_with_a_graph_and_outputs_where_they_are_wanted(pool_kind: PoolKind) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)))
    data = torch.randn(8, 6, requires_grad=True)
    async with pool_kind.make(2) as pool, RoundPipe(module, devices=pool) as model:
        reference = Reference(pool_kind, pool, module)
        config = RoundPipeRunConfig(num_microbatch=4, output_device=pool.devices[-1].torch_device)
        out = await model(data, roundpipe_run_config=config)
        assert out.device == pool.devices[-1].torch_device
        await model.backward(out.square().sum())
        twin = data.detach().to(reference.device).requires_grad_()
        expected = torch.cat([reference.model(part) for part in twin.tensor_split(4)])
        expected.square().sum().backward()
        reference.check(out.detach(), expected.detach(), "output")
        assert data.grad is not None
        assert twin.grad is not None
        # One graph over all microbatches: torch adds their shares in another order than a loop over them does.
        for mine, theirs in zip(
            [data, *module.parameters()], [twin, *reference.model.parameters()], strict=True
        ):  # fmt: skip
            assert mine.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(mine.grad, theirs.grad.cpu(), rtol=1e-3, atol=1e-5)


class Sampling(nn.Module):
    """Finds positions once, which makes the host wait for the device, and keeps them for recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.searched = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if roundpipe_async.doing_recompute():
            found, share = roundpipe_async.get_recompute_data()
        else:
            found, share = torch.nonzero(x[:, 0] > 0).flatten(), x.detach().mean()
            roundpipe_async.save_for_recompute(found, share)
        return self.linear(x).index_add(0, found, x[found]) * share


async def test_what_layers_keep_for_recompute_goes_to_the_host_and_to_whatever_device_recomputes(
    pool_kind: PoolKind,
) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(*(Sampling() for _ in range(6)))
    plan = ModelExecutePlan([range(0, 3), range(3, 5)], [range(5, 6), range(4, 5), range(1, 4), range(0, 1)])
    data = torch.randn(12, 6)
    async with pool_kind.make(3) as pool, RoundPipe(module, devices=pool) as model:
        reference = Reference(pool_kind, pool, module)
        for _ in range(3):
            loss = await model.forward_backward(
                (data,), label=data, loss_fn=F.mse_loss,
                run_config=RoundPipeRunConfig(num_microbatch=4, execute_plan=plan),
            )  # fmt: skip
            reference.check(loss, reference.train(data, data, F.mse_loss, 4), "loss")
            reference.check_gradients(module)


async def test_b10_dropout_draws_the_same_whatever_the_number_of_devices(pool_kind: PoolKind) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(5)))
    found = []
    for devices in (1, 2, 4):
        async with pool_kind.make(devices) as pool, RoundPipe(module, devices=pool) as model:
            torch.manual_seed(3)
            loss = await model.forward_backward((torch.ones(8, 8),), loss_fn=lambda out, _: out.square().sum(),
                                                run_config=RoundPipeRunConfig(num_microbatch=4))  # fmt: skip
            found.append([loss, *(p.grad for p in module.parameters())])
            for parameter in module.parameters():
                parameter.grad = None
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


async def test_autocast_of_the_device_type_reaches_the_layers(pool_kind: PoolKind) -> None:
    dtypes = set()

    class Noting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            dtypes.add(out.dtype)
            return out.float()

    module = nn.Sequential(*(Noting(6, 6) for _ in range(4)))
    async with pool_kind.make(2) as pool, RoundPipe(module, devices=pool) as model:
        with torch.autocast(pool.devices[0].torch_device.type, torch.bfloat16):
            pending = model.forward_backward((torch.randn(6, 6),), loss_fn=lambda out, _: out.sum())
        await pending
    assert dtypes == {torch.bfloat16}
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())


class Trap(nn.Module):
    """Raises what it is told to, once, at the given microbatch."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.state = {"error": error, "seen": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state["seen"] += 1
        if self.state["seen"] == 2 and self.state["error"] is not None:
            raise self.state["error"]
        return self.linear(x)


@pytest.mark.parametrize(
    "error", [ValueError("no"), torch.OutOfMemoryError("CUDA out of memory.")], ids=["user", "oom"]
)
@pytest.mark.parametrize("place", [0, 2, 4])
async def test_b14_a_failed_call_leaves_nothing_and_the_next_one_works(
    error: Exception, place: int, pool_kind: PoolKind
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(Trap() for _ in range(5)))
    module[place].state["error"] = error
    data = torch.randn(8, 6)

    def loss_fn(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(out, label)

    async with pool_kind.make(2) as pool, RoundPipe(module, devices=pool) as model:
        reference = Reference(pool_kind, pool, module)
        with pytest.raises(type(error)) as caught:
            await model.forward_backward((data,), label=data, loss_fn=loss_fn)
        assert caught.value is error
        assert any(f"layer {place}" in note and "microbatch 1" in note for note in error.__notes__)
        assert all(p.grad is None for p in module.parameters())
        for layer in [*module, *reference.model]:
            layer.state = {"error": None, "seen": 0}
        config = RoundPipeRunConfig(num_microbatch=2)
        loss = await model.forward_backward((data,), label=data, loss_fn=loss_fn, run_config=config)
        reference.check(loss, reference.train(data, data, loss_fn, 2), "loss")
        reference.check_gradients(module)


async def test_cancelled_calls_are_over_when_they_say_so_and_harm_no_other(pool_kind: PoolKind) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))
    data = torch.randn(16, 32)
    async with pool_kind.make(2) as pool, RoundPipe(module, devices=pool) as model:
        reference = Reference(pool_kind, pool, module)
        config = RoundPipeRunConfig(num_microbatch=8)
        for turns in range(0, 40, 4):
            call = asyncio.ensure_future(
                model.forward_backward((data,), label=data, loss_fn=F.mse_loss, run_config=config)
            )
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert all(p.grad is None for p in module.parameters())
        await model.forward_backward((data,), label=data, loss_fn=F.mse_loss, run_config=config)
        reference.train(data, data, F.mse_loss, 8)
        reference.check_gradients(module)


async def test_two_models_and_inference_share_a_pool(pool_kind: PoolKind) -> None:
    torch.manual_seed(0)
    modules = [nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5))) for _ in range(2)]
    data = torch.randn(12, 8)
    config = RoundPipeRunConfig(num_microbatch=4)

    async def train(model: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(6):
            await model.forward_backward((data,), label=data, loss_fn=F.mse_loss, run_config=config)
            await model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)

    async def infer(model: RoundPipe) -> None:
        for _ in range(10):
            with roundpipe_async.no_grad():
                out = await model(data, roundpipe_run_config=config)
            assert torch.isfinite(out).all()

    async with pool_kind.make(2, seed=5) as pool:
        references = [Reference(pool_kind, pool, module) for module in modules]
        models = [RoundPipe(module, devices=pool) for module in modules]
        with OptimizerCtx():
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        trained = [train(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
        await asyncio.gather(*trained, infer(models[0]), infer(models[1]))
        for module, model, reference in zip(modules, models, references, strict=True):
            theirs = torch.optim.SGD(reference.model.parameters(), lr=0.1)
            for _ in range(6):
                reference.train(data, data, F.mse_loss, 4)
                theirs.step()
                theirs.zero_grad()
            reference.check_state(module)
            await model.aclose()


# ---- only with the late device --------------------------------------------------------------------------------------


@pytest.mark.parametrize("latency_s", [0.0, 0.002])
async def test_b11_nothing_sees_memory_before_its_copy_has_landed(latency_s: float) -> None:
    """Background steps, graphs, losses and results, 100 iterations, copies landing in any order."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), *(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)),
                           nn.BatchNorm1d(16), nn.Linear(16, 3))  # fmt: skip
    runtime = LateRuntime(3, seed=7, latency_s=latency_s)
    async with late_pool(runtime) as pool, RoundPipe(module, devices=pool) as model:
        with OptimizerCtx():
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(100 if not latency_s else 10):
            data, label = torch.randn(12, 6), torch.randint(0, 3, (12,))
            loss, out = await model.forward_backward(
                (data,), label=label, loss_fn=F.cross_entropy, return_outputs=True
            )  # fmt: skip
            assert torch.isfinite(loss)
            assert torch.isfinite(out).all()

            def step() -> None:
                assert all(torch.isfinite(p.grad).all() for p in model.parameters())
                optimizer.step()
                optimizer.zero_grad()

            await model.step(step)
        await model.synchronize()
        assert all(torch.isfinite(tensor).all() for tensor in module.state_dict().values())
    assert not runtime.violations


async def falls_to(runtime: LateRuntime, num_bytes: int) -> bool:
    """Whether no more than that stays on the devices. Patient: threads that are done still have to return."""
    for _ in range(100):
        if runtime.live_bytes <= num_bytes:
            return True
        await asyncio.sleep(0.01)
    return False


async def test_what_a_layer_reads_lives_until_the_device_has_passed_it_and_not_longer() -> None:
    for seed, case in enumerate(CASES):
        torch.manual_seed(0)
        module = case.build()
        runtime = LateRuntime(2, seed, counting=True)
        async with late_pool(runtime) as pool, RoundPipe(module, devices=pool) as model:
            for _ in range(2):
                data, label = case.data(9)
                await model.forward_backward((data,), label=label, loss_fn=case.loss_fn)
            assert not runtime.violations
            buffers = sum(buffer.nbytes for buffer in module.buffers())
            # Their last state may stay: here it is on the host, as far as torch knows.
            assert await falls_to(runtime, buffers)


async def test_out_of_memory_frees_the_device_while_its_handler_still_holds_the_error() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(Trap() for _ in range(5)))
    module[2].state["error"] = torch.OutOfMemoryError("CUDA out of memory.")
    runtime = LateRuntime(2, counting=True)
    async with late_pool(runtime) as pool, RoundPipe(module, devices=pool) as model:
        gc.collect()
        gc.disable()
        try:
            await model.forward_backward((torch.randn(8, 6),), loss_fn=lambda out, _: out.sum())
        except torch.OutOfMemoryError:
            assert await falls_to(runtime, 0)
        else:
            pytest.fail("the layer raised nothing")
        finally:
            gc.enable()
        assert runtime.peak_bytes > 0
