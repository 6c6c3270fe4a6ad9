"""Two models in a chain, handing on microbatch by microbatch."""

from __future__ import annotations

import asyncio

import pytest
import torch
import torch.nn.functional as F

from roundpipe_async import DevicePool, RoundPipe, RoundPipeRunConfig, no_grad
from roundpipe_async.packed import Microbatches
from tests.support.plain import CASES, assert_same_gradients, twin

PACKED = RoundPipeRunConfig(merge_output=False, num_microbatch=4)


async def test_a_chain_of_two_models_gives_the_gradients_of_one() -> None:
    torch.manual_seed(0)
    first, second = CASES[0].build()[:3], CASES[0].build()
    plain_first, plain_second = twin(first), twin(second)
    data, label = torch.randn(9, 6), torch.randint(0, 3, (9,))
    async with DevicePool.cpu(2, 1) as pool, RoundPipe(first, devices=pool) as a, RoundPipe(second, devices=pool) as b:
        for _ in range(2):
            hidden = await a.forward(data, roundpipe_run_config=PACKED)
            assert isinstance(hidden, Microbatches) and len(hidden) == 4
            loss = await b.forward_backward((hidden,), label=label, loss_fn=F.cross_entropy)
            total = torch.zeros(())
            for part, of_part in zip(data.tensor_split(4), label.tensor_split(4), strict=True):
                plain = F.cross_entropy(plain_second(plain_first(part)), of_part)
                plain.backward()
                total = total + plain.detach()
            assert torch.equal(loss, total)
            assert_same_gradients(first, plain_first)
            assert_same_gradients(second, plain_second)


async def test_packed_outputs_can_be_awaited_and_flow_through_inference() -> None:
    first, second = CASES[0].build()[:3], CASES[0].build()
    data = torch.randn(9, 6)
    async with DevicePool.cpu(2, 1) as pool, RoundPipe(first, devices=pool) as a, RoundPipe(second, devices=pool) as b:
        with no_grad():
            hidden = await a(data, roundpipe_run_config=PACKED)
            out = await b(hidden)
            parts = await hidden
        assert [len(part) for part in parts] == [3, 2, 2, 2]
        assert torch.equal(torch.cat(parts), torch.cat([first(part) for part in data.tensor_split(4)]))
        assert torch.equal(out, torch.cat([second(first(part)) for part in data.tensor_split(4)]))


async def test_what_the_first_model_raises_reaches_whoever_uses_its_outputs() -> None:
    class Fails(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    first, second = torch.nn.Sequential(torch.nn.Linear(6, 6), Fails()), CASES[0].build()
    data, label = torch.randn(9, 6), torch.randint(0, 3, (9,))
    async with DevicePool.cpu(2, 1) as pool, RoundPipe(first, devices=pool) as a, RoundPipe(second, devices=pool) as b:
        hidden = await a.forward(data, roundpipe_run_config=PACKED)
        with pytest.raises(ZeroDivisionError):
            await b.forward_backward((hidden,), label=label, loss_fn=F.cross_entropy)
        with pytest.raises(ZeroDivisionError):
            await hidden
        assert all(p.grad is None for p in second.parameters())
        await b.forward_backward((data,), label=label, loss_fn=F.cross_entropy)


async def test_many_chains_at_once_do_not_wait_for_each_other_forever() -> None:
    torch.manual_seed(0)
    models = [CASES[0].build()[:4] for _ in range(3)]
    data = torch.randn(8, 6)
    async with DevicePool.cpu(2, 1) as pool:
        a, b, c = (RoundPipe(model, devices=pool) for model in models)

        async def chain() -> torch.Tensor:
            hidden = await b(await a(data, roundpipe_run_config=PACKED), roundpipe_run_config=PACKED)
            loss: torch.Tensor = await c.forward_backward((hidden,), loss_fn=lambda out, _: out.square().mean())
            return loss

        losses = await asyncio.gather(*(chain() for _ in range(10)))
        assert all(torch.equal(loss, losses[0]) for loss in losses)
        for model in (a, b, c):
            await model.aclose()
