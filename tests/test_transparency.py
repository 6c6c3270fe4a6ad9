"""The engine computes what plain PyTorch computes: bit for bit, whatever the devices, plans and microbatches."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from roundpipe_async.config import RoundPipeRunConfig
from roundpipe_async.devices.pool import DevicePool
from roundpipe_async.model import RoundPipe
from roundpipe_async.modes import no_grad
from roundpipe_async.optimizer import OptimizerCtx
from roundpipe_async.scheduling.plan import ModelExecutePlan
from tests.support.plain import (
    CASES,
    Case,
    assert_same_gradients,
    assert_same_state,
    plain_forward_backward,
    twin,
)


@pytest.fixture(params=[1, 2, 4])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[DevicePool]:
    async with DevicePool.cpu(request.param, 1) as pool:
        yield pool


@pytest.fixture
async def pool2() -> AsyncIterator[DevicePool]:
    async with DevicePool.cpu(2, 1) as pool:
        yield pool


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_gradients_losses_and_buffers_are_those_of_plain_pytorch(
    case: Case, grain: Any, pool: DevicePool
) -> None:
    torch.manual_seed(0)
    module = case.build()
    reference = twin(module)
    async with RoundPipe(module, devices=pool) as model:
        for rows, count in ((8, 1), (9, 4), (3, 3), (16, 8)):
            data, label = case.data(rows)
            config = RoundPipeRunConfig(num_microbatch=count, recompute_grain=grain)
            loss = await model.forward_backward((data.clone(),), label=label, loss_fn=case.loss_fn, run_config=config)
            expected = plain_forward_backward(reference, data.clone(), label, case.loss_fn, count)
            assert torch.equal(loss, expected)
            assert_same_gradients(module, reference)  # accumulated over the calls, too
            assert_same_state(module, reference)


@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_plan_changes_the_gradients(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(CASES), "case")
    devices = data.draw(st.integers(1, 4), "devices")
    count = data.draw(st.integers(1, 8), "microbatches")
    rows = data.draw(st.integers(count, 9), "rows")
    grain = data.draw(st.sampled_from(["stage", "layer"]), "grain")
    torch.manual_seed(data.draw(st.integers(0, 1000), "seed"))
    module = case.build()
    layers = len(module)
    fused = data.draw(st.integers(0, layers - 1), "first fused layer")
    plan = ModelExecutePlan(_cut(data, 0, fused), [range(fused, layers), *reversed(_cut(data, 0, fused))])
    reference = twin(module)
    inputs, label = case.data(rows)

    async def run() -> torch.Tensor:
        config = RoundPipeRunConfig(num_microbatch=count, recompute_grain=grain, execute_plan=plan)
        async with DevicePool.cpu(devices, 1) as pool, RoundPipe(module, devices=pool) as model:
            loss: torch.Tensor = await model.forward_backward(
                (inputs.clone(),), label=label, loss_fn=case.loss_fn, run_config=config
            )
            return loss

    loss = asyncio.run(run())
    expected = plain_forward_backward(reference, inputs.clone(), label, case.loss_fn, count)
    assert torch.equal(loss, expected)
    assert_same_gradients(module, reference)
    assert_same_state(module, reference)


def _cut(data: st.DataObject, start: int, stop: int) -> list[range]:
    if stop <= start:
        return []
    inner = data.draw(st.sets(st.integers(start + 1, stop - 1))) if stop - start > 1 else set()
    edges = [start, *sorted(inner), stop]
    return [range(a, b) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_forward_with_a_graph_and_its_backward(case: Case, pool2: DevicePool) -> None:
    torch.manual_seed(1)
    module = case.build()
    reference = twin(module)
    data, label = case.data(7)
    async with RoundPipe(module, devices=pool2) as model:
        out = await model(data.clone(), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=3))
        expected = torch.cat([reference(part) for part in data.clone().tensor_split(3)])
        assert torch.equal(out, expected)
        await model.backward(case.loss_fn(out, label))
        case.loss_fn(expected, label).backward()
        for a, b in zip(module.parameters(), reference.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7)
        with no_grad():
            assert not (await model(data.clone())).requires_grad
            assert torch.is_grad_enabled()


async def test_inputs_that_require_grad_get_their_gradients_and_the_graph_behind_is_walked(pool2: DevicePool) -> None:
    torch.manual_seed(2)
    embed, module = nn.Linear(4, 6), CASES[0].build()
    embed2, reference = twin(embed), twin(module)
    data, label = torch.randn(6, 4, requires_grad=True), torch.randint(0, 3, (6,))
    data2 = data.detach().clone().requires_grad_()
    async with RoundPipe(module, devices=pool2) as model:
        await model.forward_backward((embed(data),), label=label, loss_fn=F.cross_entropy)
    hidden = embed2(data2)
    cut = hidden.detach().requires_grad_()
    for part, of_part in zip(cut.tensor_split(3), label.tensor_split(3), strict=True):
        F.cross_entropy(reference(part), of_part).backward()
    hidden.backward(cut.grad)
    assert data.grad is not None and data2.grad is not None and torch.equal(data.grad, data2.grad)
    assert_same_gradients(embed, embed2)
    assert_same_gradients(module, reference)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_synchronous_training_is_plain_training_for_20_steps(case: Case, pool2: DevicePool) -> None:
    torch.manual_seed(3)
    module = case.build()
    reference = twin(module)
    async with RoundPipe(module, devices=pool2) as model:
        with OptimizerCtx():
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        plain = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2)
        for step in range(20):
            data, label = case.data(5)
            await model.forward_backward((data.clone(),), label=label, loss_fn=case.loss_fn)
            plain_forward_backward(reference, data.clone(), label, case.loss_fn, 3)
            await model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            plain.step()
            plain.zero_grad()
            assert model.param_version == step + 1
            assert_same_state(module, reference)


@pytest.mark.parametrize("optim_dtype", [None, torch.float64])
async def test_background_training_is_training_with_parameters_one_step_old(
    optim_dtype: torch.dtype | None, pool2: DevicePool
) -> None:
    """The hand-written loop: forward with a copy that is one step behind, step on the newest."""
    torch.manual_seed(4)
    module = CASES[0].build()
    stale, newest = twin(module), twin(module)
    if optim_dtype is not None:
        newest = newest.to(optim_dtype)
    rng = random.Random(0)
    async with RoundPipe(module, optim_dtype=optim_dtype, devices=pool2) as model:
        with OptimizerCtx():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        plain = torch.optim.SGD(newest.parameters(), lr=0.1, momentum=0.9)
        for step in range(20):
            rows = rng.randint(3, 9)
            data, label = CASES[0].data(rows)
            assert model.param_version == max(0, step - 1)
            loss = await model.forward_backward((data.clone(),), label=label, loss_fn=F.cross_entropy)
            assert torch.equal(loss, plain_forward_backward(stale, data.clone(), label, F.cross_entropy, 3))
            await model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            before_step = {name: value.clone() for name, value in newest.state_dict().items()}
            for old, new in zip(stale.parameters(), newest.parameters(), strict=True):
                assert old.grad is not None
                new.grad, old.grad = old.grad.to(new.dtype), None
            plain.step()
            plain.zero_grad()
            stale.load_state_dict(before_step)
        await model.synchronize()
        stale.load_state_dict(newest.state_dict())
        assert_same_state(module, stale)


@pytest.mark.parametrize("kind", ["none", "zero", "never"])
@pytest.mark.parametrize("calls", [1, 2, 3, 7])
async def test_b04_gradients_add_up_over_calls_as_in_plain_pytorch(kind: str, calls: int, pool2: DevicePool) -> None:
    torch.manual_seed(5)
    module = CASES[0].build()
    reference = twin(module)
    async with RoundPipe(module, devices=pool2) as model:
        with OptimizerCtx():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)

        def zero(which: torch.optim.Optimizer) -> None:
            if kind != "never":
                which.zero_grad(set_to_none=kind == "none")

        for _ in range(3):
            for i in range(calls):
                data, label = CASES[0].data(4 + i)
                if i == 1:
                    with pytest.raises(ZeroDivisionError):
                        await model.forward_backward((data.clone(),), label=label, loss_fn=lambda out, lab: 1 / 0)
                await model.forward_backward((data.clone(),), label=label, loss_fn=F.cross_entropy)
                plain_forward_backward(reference, data.clone(), label, F.cross_entropy, 3)
            await model.step(lambda: (optimizer.step(), zero(optimizer)), is_async=False)
            plain.step()
            zero(plain)
            assert_same_state(module, reference)


async def test_b10_dropout_draws_depend_on_seed_call_layer_and_microbatch_alone() -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(6)
        return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.ReLU()) for _ in range(5)])

    async def gradients(devices: int, **options: Any) -> list[torch.Tensor | None]:
        module = build()
        data = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(7)
        config = RoundPipeRunConfig(num_microbatch=4, **options)
        async with DevicePool.cpu(devices, 1) as pool, RoundPipe(module, devices=pool) as model:
            for _ in range(2):
                await model.forward_backward((data,), loss_fn=lambda out, _: out.square().sum(), run_config=config)
                torch.rand(3)
        return [p.grad for p in module.parameters()]

    everything_fused = ModelExecutePlan([], [range(5)])  # no recompute
    one_each = ModelExecutePlan([range(i, i + 1) for i in range(4)], [range(i, i + 1) for i in (4, 3, 2, 1, 0)])
    first = await gradients(1, execute_plan=everything_fused)
    for devices in (1, 2, 4):
        for options in ({}, {"execute_plan": one_each}, {"execute_plan": one_each, "recompute_grain": "layer"}):
            for a, b in zip(first, await gradients(devices, **options), strict=True):
                assert a is not None and b is not None and torch.equal(a, b)


async def test_b09_batchnorm_counts_microbatches_once_and_eval_changes_nothing(pool2: DevicePool) -> None:
    torch.manual_seed(8)
    case = CASES[2]
    module = case.build()
    async with RoundPipe(module, devices=pool2) as model:
        data, label = case.data(8)
        await model.forward_backward(
            (data,), label=label, loss_fn=case.loss_fn, run_config=RoundPipeRunConfig(num_microbatch=4)
        )
        assert int(module[1].num_batches_tracked) == 4
        before = {name: value.clone() for name, value in module.state_dict().items()}
        model.eval()
        await model(data)
        for name, value in module.state_dict().items():
            assert torch.equal(value, before[name])
