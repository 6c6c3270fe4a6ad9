"""Searched schedules run for real: printed, parsed back and run on CPU devices they give plain PyTorch's gradients.

A stage spread over devices sums its microbatches' gradients run by run, which rounds differently from one after
another: the same bits each time, and plain PyTorch's up to rounding.
"""

from __future__ import annotations

import asyncio
import random
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from roundpipe_async.config import RoundPipeRunConfig
from roundpipe_async.devices.pool import DevicePool
from roundpipe_async.errors import ScheduleError
from roundpipe_async.model import RoundPipe
from roundpipe_async.scheduling.drafts import Clocks, Problem, lay_out, schedule_of
from roundpipe_async.scheduling.plan import LayerCost
from roundpipe_async.scheduling.schedule import Schedule
from roundpipe_async.scheduling.search import change, search
from roundpipe_async.scheduling.seeds import spread_drafts
from roundpipe_async.scheduling.simulate import Links
from tests.support.plain import CASES, Case, assert_same_gradients, assert_same_state, plain_forward_backward, twin

COST = LayerCost(1.0, 1.0, 2.0, 1_000_000)
SPREADABLE = [case for case in CASES if case.name != "conv_batchnorm"]  # batch norm must see microbatches in order


async def runs_like_plain(case: Case, schedule: Schedule, num_devices: int) -> None:
    torch.manual_seed(0)
    module = case.build()
    reference, again = twin(module), twin(module)
    data, label = case.data(schedule.num_microbatch + 1)
    config = RoundPipeRunConfig(num_microbatch=schedule.num_microbatch, schedule=schedule)
    expected = plain_forward_backward(reference, data.clone(), label, case.loss_fn, schedule.num_microbatch)
    async with DevicePool.cpu(num_devices, 1) as pool:
        for made in (module, again):
            async with RoundPipe(made, devices=pool) as model:
                loss = await model.forward_backward(
                    (data.clone(),), label=label, loss_fn=case.loss_fn, run_config=config
                )
                assert torch.equal(loss, expected)
    assert_same_gradients(module, again)
    assert_close_gradients(module, reference)


def assert_close_gradients(one: nn.Module, other: nn.Module) -> None:
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("case", SPREADABLE, ids=lambda case: case.name)
async def test_a_searched_schedule_printed_and_parsed_runs_like_plain_pytorch(case: Case) -> None:
    schedule = search([COST] * len(case.build()), 6, 3, effort=0.01)
    await runs_like_plain(case, Schedule.parse(str(schedule)), 3)


@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_stages_spread_over_devices_change_no_gradient(data: st.DataObject) -> None:
    """Random walks through the search's space: uneven groups, runs of one stage on several devices at once."""
    case = data.draw(st.sampled_from(SPREADABLE), "case")
    num_devices, count = data.draw(st.integers(1, 4), "devices"), data.draw(st.integers(1, 7), "microbatches")
    draw = random.Random(data.draw(st.integers(0, 999), "seed"))
    problem = Problem([COST] * len(case.build()), count, num_devices, Links())
    draft = draw.choice(list(spread_drafts(problem)))
    for _ in range(20):
        draft = change(problem, draft, draw) or draft
    schedule = schedule_of(problem, draft, lay_out(problem, draft, Clocks.zero(num_devices)).devices)
    schedule.validate()
    asyncio.run(runs_like_plain(case, schedule, num_devices))


async def test_the_run_config_s_one_word() -> None:
    case = CASES[0]
    module = case.build()
    reference = twin(module)
    data, label = case.data(8)
    config = RoundPipeRunConfig(num_microbatch=4, schedule="search")
    async with DevicePool.cpu(2, 1) as pool, RoundPipe(module, devices=pool) as model:
        for _ in range(3):
            await model.forward_backward((data.clone(),), label=label, loss_fn=case.loss_fn, run_config=config)
            plain_forward_backward(reference, data.clone(), label, case.loss_fn, 4)
    assert_close_gradients(module, reference)


@pytest.mark.parametrize("word", ["search", "search_steady"])
async def test_one_word_of_the_run_config_searches_and_batch_norm_still_sees_its_microbatches_in_order(
    word: Literal["search", "search_steady"],
) -> None:
    config = RoundPipeRunConfig(num_microbatch=4, schedule=word)
    async with DevicePool.cpu(3, 1) as pool:
        for case in (CASES[0], CASES[2]):
            torch.manual_seed(0)
            module = case.build()
            reference = twin(module)
            async with RoundPipe(module, devices=pool) as model:
                for _ in range(3):
                    data, label = case.data(9)
                    loss = await model.forward_backward(
                        (data.clone(),), label=label, loss_fn=case.loss_fn, run_config=config
                    )
                    assert torch.equal(loss, plain_forward_backward(reference, data, label, case.loss_fn, 4))
                assert_close_gradients(module, reference)
                assert_same_state(module, reference)


async def test_a_schedule_that_spreads_a_layer_whose_buffers_change_is_refused() -> None:
    case = CASES[2]
    schedule = search([COST] * len(case.build()), 6, 3, effort=0.01)
    data, label = case.data(7)
    async with DevicePool.cpu(3, 1) as pool, RoundPipe(case.build(), devices=pool) as model:
        config = RoundPipeRunConfig(num_microbatch=6, schedule=schedule)
        with pytest.raises(ScheduleError, match="round_robin"):
            await model.forward_backward((data,), label=label, loss_fn=case.loss_fn, run_config=config)
        model.eval()
        await model.forward_backward((data,), label=label, loss_fn=case.loss_fn, run_config=config)
