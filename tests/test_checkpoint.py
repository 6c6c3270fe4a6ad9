"""Snapshots beside training: one step boundary for model, optimizer and scaler (case B17)."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_async import DevicePool, GradScaler, OptimizerCtx, RoundPipe, optim, tree
from roundpipe_async.checkpoint import load_snapshot, snapshot


@pytest.fixture
async def pool() -> AsyncIterator[DevicePool]:
    async with DevicePool.cpu(2, intra_op_threads=1) as pool:
        yield pool


@dataclass
class Run:
    """A training run in mixed precision, with buffers that every batch changes."""

    model: RoundPipe
    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    module: nn.Module
    gate: threading.Event
    free: int = 1000
    """How many steps need not wait for the gate."""

    @classmethod
    def make(cls, pool: DevicePool, seed: int = 0) -> Run:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).to(torch.bfloat16)
        module[0].bias.requires_grad_(False)
        model = RoundPipe(module, optim_dtype=torch.float32, devices=pool)
        with OptimizerCtx():
            optimizer = optim.AdamW(model.parameters(), lr=0.1)
        return cls(model, optimizer, GradScaler(init_scale=64.0, growth_interval=2), module, threading.Event())

    def _step(self) -> None:
        self.free -= 1
        if self.free < 0:
            self.gate.wait()
        self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()

    async def iterate(self, index: int, is_async: bool = True) -> torch.Tensor:
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(index)).to(torch.bfloat16)
        loss = await self.model.forward_backward(
            (x,), loss_fn=lambda out, _: self.scaler.scale(out.float().square().mean())
        )
        await self.model.step(self._step, is_async)
        await self.scaler.update(is_async=is_async)
        assert isinstance(loss, torch.Tensor)
        return loss

    async def state(self) -> Any:
        """Everything, settled."""
        await self.model.synchronize()
        await self.scaler.synchronize()
        copies = {name: copy.detach().clone() for name, copy in self.model.optim_named_parameters()}
        return tree.map_tensors(
            lambda tensor: tensor.detach().clone(),
            {
                "model": dict(self.module.state_dict()),
                "copies": copies,
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
            },
        )


def assert_same(ours: Any, theirs: Any) -> None:
    pairs = zip(tree.flatten_with_paths(ours), tree.flatten_with_paths(theirs), strict=True)
    for (path, one), (other_path, other) in pairs:
        assert path == other_path
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert same, path


async def begin(run: Run, iterations: int) -> None:
    for index in range(iterations):
        await run.iterate(index)


async def test_a_snapshot_is_of_one_boundary(pool: DevicePool) -> None:
    """B17: a slow step in flight, the next iteration under way: all is as after the slow step, and shares nothing."""
    run, twin = Run.make(pool), Run.make(pool)
    async with run.model, twin.model:
        run.free = 3
        await begin(run, 4)  # the last step waits at the gate
        taken = snapshot(run.model, run.optimizer, run.scaler)
        after = asyncio.ensure_future(run.iterate(4))
        run.optimizer.param_groups[0]["lr"] = 1.0  # as a scheduler might, before the copies are taken
        run.gate.set()
        state = await taken
        await after

        await begin(twin, 4)
        assert_same(state, await twin.state())
        assert_same((await run.state())["model"].keys(), state["model"].keys())
        live = [*run.module.parameters(), *run.module.buffers(), *run.model.optim_parameters()]
        live += tree.tensors(run.optimizer.state_dict())
        storages = {tensor.untyped_storage().data_ptr() for tensor in live}
        assert not storages & {tensor.untyped_storage().data_ptr() for tensor in tree.tensors(state)}


async def test_training_does_not_notice(pool: DevicePool) -> None:
    """Steps stay one step old, the scaler's updates come into force when they would have."""
    run, twin = Run.make(pool), Run.make(pool)
    async with run.model, twin.model:
        for index in range(5):
            assert torch.equal(await run.iterate(index), await twin.iterate(index))
            await snapshot(run.model, run.optimizer, run.scaler)
            assert run.scaler.get_scale() == twin.scaler.get_scale()
        assert_same(await run.state(), await twin.state())


async def test_a_run_goes_on_from_a_snapshot(pool: DevicePool) -> None:
    """Through a file, into another run that was elsewhere: fp32 copies, moments, counters, scale and tracker."""
    run = Run.make(pool)
    async with run.model:
        await begin(run, 3)
        file = io.BytesIO()
        torch.save(await snapshot(run.model, run.optimizer, run.scaler), file)
        await run.state()  # synchronized there, as the snapshot is
        losses = [await run.iterate(index) for index in range(3, 6)]
        expected = await run.state()

    other = Run.make(pool, seed=1)
    async with other.model:
        await begin(other, 2)
        await other.model.forward_backward((torch.ones(6, 4).bfloat16(),), loss_fn=lambda out, _: out.float().sum())
        file.seek(0)
        loaded = torch.load(file)
        kept = tree.map_tensors(torch.clone, loaded)
        await load_snapshot(loaded, other.model, other.optimizer, other.scaler)
        assert all(parameter.grad is None for parameter in other.module.parameters()), "gradients not taken are dropped"
        for index, loss in enumerate(losses, start=3):
            assert torch.equal(await other.iterate(index), loss)
        assert_same(await other.state(), expected)
        assert_same(loaded, kept)


async def test_only_the_model(pool: DevicePool) -> None:
    run = Run.make(pool)
    async with run.model:
        await run.iterate(0, is_async=False)
        state = await snapshot(run.model)
        assert state["optimizer"] is None and state["scaler"] == {}
        weight = run.module[0].weight.detach().clone()
        await run.iterate(1, is_async=False)
        await load_snapshot(state, run.model)
        assert torch.equal(run.module[0].weight, weight)


async def test_between_step_and_update_there_is_no_boundary(pool: DevicePool) -> None:
    run = Run.make(pool)
    async with run.model:
        await run.iterate(0)
        await run.model.forward_backward(
            (torch.ones(6, 4).bfloat16(),), loss_fn=lambda out, _: run.scaler.scale(out.float().sum())
        )
        await run.model.step(run._step)
        with pytest.raises(AssertionError, match=r"not between step\(\) or unscale_\(\) and update\(\)"):
            await snapshot(run.model, run.optimizer, run.scaler)
        await run.scaler.update()
        await snapshot(run.model, run.optimizer, run.scaler)


async def test_a_snapshot_of_another_model_is_refused(pool: DevicePool) -> None:
    run = Run.make(pool)
    async with run.model, RoundPipe(nn.Sequential(nn.Linear(4, 8)), devices=pool) as other:
        before = (await run.state())["model"]
        with pytest.raises(KeyError, match="of another model; names that differ"):
            await load_snapshot(await snapshot(other), run.model)
        state = await snapshot(run.model)
        with pytest.raises(KeyError, match="no optimizer: none was given"):
            await load_snapshot(state, run.model, run.optimizer)
        state["model"]["3.bias"] = torch.zeros(7)
        with pytest.raises(ValueError, match=r"shapes that differ: \['3.bias'\]"):
            await load_snapshot(state, run.model)
        assert_same((await run.state())["model"], before)


async def test_a_cancelled_snapshot_holds_nothing_up(pool: DevicePool) -> None:
    run = Run.make(pool)
    async with run.model:
        run.free = 0
        await run.iterate(0)
        task = asyncio.ensure_future(snapshot(run.model, run.optimizer, run.scaler))
        await asyncio.wait([task], timeout=0)
        task.cancel()
        run.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await run.iterate(1)
        await snapshot(run.model, run.optimizer, run.scaler)
