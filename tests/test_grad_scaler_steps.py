"""GradScaler with steps in another thread: whose factor, which update, when in force, and every cancellation.

Steps are held and let go by hand, coroutines are sent forward one point at a time: nothing here depends on time.
"""

from __future__ import annotations

import asyncio
import collections.abc
import copy
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_async.errors import StepError
from roundpipe_async.scaling.grad_scaler import GradScaler, UpdateOutcome
from roundpipe_async.steps import StepHandle, Window, register, steps_in_flight
from tests.support.scaler_fakes import INF, NAN, FakeModel, backward, weights


@pytest.fixture
def model() -> Iterator[FakeModel]:
    fake = FakeModel()
    yield fake
    fake.close()


@pytest.fixture
def other() -> Iterator[FakeModel]:
    fake = FakeModel()
    yield fake
    fake.close()


class Run:
    """A model of one weight, trained in whole iterations."""

    def __init__(self, model: FakeModel, scaler: GradScaler) -> None:
        self.model, self.scaler = model, scaler
        self.parameter, self.optimizer = weights(0.0)

    def call(self, slope: float) -> float:
        """A forward_backward; gives the factor of its loss. Gradients go to the step by their own way, as a tensor."""
        self.factor = self.model.call(lambda: self.scaler.scale(torch.ones(())).item())
        self.grad = torch.tensor([slope * self.factor])
        return self.factor

    def step(self) -> Any:
        grad = self.grad

        def step_fn() -> Any:
            self.parameter.grad = grad
            return self.scaler.step(self.optimizer), self.parameter.item()

        return self.model.step(step_fn)

    def iterate(self, slope: float) -> Any:
        self.call(slope)
        return self.step()


# --- whose factor ----------------------------------------------------------------------------------------------------


async def test_a19_update_between_losses_and_unscale(model: FakeModel) -> None:
    """A19: the update of step k lands between the losses of step k+1 and its unscale, even between its losses."""
    scaler = GradScaler()
    run = Run(model, scaler)
    await run.iterate(INF)
    assert run.call(3.0) == 65536.0
    assert (await scaler.update(is_async=False)).scale == 32768.0
    assert run.call(3.0) == 65536.0  # the same window: later losses follow the first
    assert scaler.get_scale() == 32768.0
    await run.step()
    assert run.parameter.item() == -3.0
    assert run.call(1.0) == 32768.0


async def test_a_window_scales_as_of_its_first_admission(model: FakeModel) -> None:
    """Whether an update finished before or after the first loss_fn ran makes no difference."""
    scaler = GradScaler()
    run = Run(model, scaler)
    await run.iterate(INF)
    window = model.admit()
    await scaler.update(is_async=False)
    assert model.call(scaler.get_scale, window) == 65536.0 != scaler.get_scale()
    assert model.call(lambda: scaler.scale(torch.ones(())).item(), window) == 65536.0
    assert run.call(1.0) == 65536.0


async def test_scale_and_get_scale_in_a_step_are_those_of_its_gradients(model: FakeModel) -> None:
    scaler = GradScaler()
    run = Run(model, scaler)
    run.call(1.0)
    seen = []
    gate = model.hold()
    held = model.step(lambda: seen.extend([scaler.get_scale(), scaler.scale(torch.ones(())).item()]))
    scaler.load_state_dict(scaler.state_dict() | {"scale": 8.0})
    gate.set()
    await held
    assert seen == [65536.0, 65536.0] and scaler.get_scale() == 8.0


async def test_step_without_a_call_before_it(model: FakeModel) -> None:
    """The factor is that in force when the step was scheduled."""
    scaler = GradScaler()
    run = Run(model, scaler)
    scaler.scale(torch.ones(()))
    run.grad = torch.tensor([65536.0])
    gate = model.hold()
    step = run.step()
    scaler.load_state_dict(scaler.state_dict() | {"scale": 8.0})
    gate.set()
    await step
    assert run.parameter.item() == -1.0


@pytest.mark.parametrize("factors", [(65536.0, 8.0), (8.0, 65536.0), (100.1, 7.3)])
async def test_outside_losses_keep_their_factor(model: FakeModel, factors: tuple[float, float]) -> None:
    """`scale` outside of calls, `model.backward` later: the window's first factor wins, the other is brought to it."""
    scaler = GradScaler(init_scale=factors[0])
    parameter, optimizer = weights(0.0)
    first = scaler.scale((parameter * 2.0).sum())
    await scaler.update(factors[1], is_async=False)
    second = scaler.scale((parameter * 3.0).sum())
    model.call(first.backward)
    assert parameter.grad is not None
    assert parameter.grad.item() == pytest.approx(2.0 * factors[0])
    model.call(second.backward)
    if factors[0] != 100.1:
        assert parameter.grad.item() == 5.0 * factors[0]
    await model.step(lambda: scaler.step(optimizer))
    assert parameter.item() == pytest.approx(-5.0, rel=1e-6)


async def test_in_call_loss_whose_backward_goes_to_a_later_window(model: FakeModel) -> None:
    """A forward with a graph, a step, then backward: the graph was scaled for another window."""
    scaler = GradScaler()
    parameter, optimizer = weights(0.0)
    losses = model.call(lambda: [scaler.scale((parameter * 1.0).sum()) for _ in range(2)])
    model.call(losses[0].backward)
    await model.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()))
    await scaler.update(4.0, is_async=False)
    model.call(lambda: scaler.scale((parameter * 1.0).sum()).backward())
    model.call(losses[1].backward)
    assert parameter.grad is not None and parameter.grad.item() == 8.0
    await model.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()))
    assert parameter.item() == -3.0


async def test_two_scalers_share_a_window(model: FakeModel) -> None:
    scalers = GradScaler(init_scale=4.0), GradScaler(init_scale=8.0)
    factors = model.call(lambda: [scaler.scale(torch.ones(())).item() for scaler in scalers])
    assert factors == [4.0, 8.0]
    twin = copy.deepcopy(scalers[0])
    twin.load_state_dict(twin.state_dict() | {"scale": 16.0})
    model.window.opened_at = None
    assert model.call(lambda: twin.scale(torch.ones(())).item()) == 16.0


@pytest.mark.parametrize("where", ["step", "call"])
async def test_backward_without_a_window_pins_nothing(model: FakeModel, where: str) -> None:
    """A backward inside a step function, or of a call's loss in a thread without a window, is nobody's gradient.

    Later gradients that are set by hand and stepped outside are divided by the published scale.
    """
    scaler = GradScaler()
    parameter, optimizer = weights(0.0)
    if where == "step":
        loss = scaler.scale((parameter * 1.0).sum())
        await model.step(loss.backward)
    else:
        model.call(lambda: scaler.scale((parameter * 1.0).sum())).backward()
    await scaler.update(4.0, is_async=False)
    parameter.grad = torch.tensor([8.0])
    scaler.step(optimizer)
    assert parameter.item() == -2.0


# --- which update, when in force -------------------------------------------------------------------------------------


async def test_async_update_takes_effect_one_update_later(model: FakeModel) -> None:
    """An overflow skips two steps and backs off twice when steps are one step old."""
    scaler = GradScaler()
    run = Run(model, scaler)
    told = []
    for slope in (1.0, INF, INF, 1.0, 1.0):
        run.iterate(slope)
        told.append(await scaler.update())
    assert [outcome.scale for outcome in told] == [65536.0, 65536.0, 32768.0, 16384.0, 16384.0]
    assert [outcome.skipped for outcome in told] == [False, False, True, True, False]
    assert [outcome.settled for outcome in told] == [0, 1, 1, 1, 1]
    assert [outcome.stepped for outcome in told] == [False, True, False, False, True]
    assert await scaler.synchronize() == UpdateOutcome(scale=16384.0, skipped=False, settled=1, good=1)
    assert scaler.skipped_steps == 2 and run.parameter.item() == -3.0


@pytest.mark.filterwarnings("ignore:the loss scale fell below 1")
@settings(max_examples=60, deadline=None)
@given(
    slopes=st.lists(st.sampled_from([1.0, INF, NAN]), min_size=1, max_size=25),
    interval=st.integers(1, 3),
    is_async=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_async_run_is_torchs_one_update_late(slopes: list[float], interval: int, is_async: bool, seed: int) -> None:
    """Against torch fed by hand in the documented order, with background steps let go at random moments."""
    chance = random.Random(seed)
    theirs = torch.amp.GradScaler("cpu", growth_interval=interval)
    their_weight, their_optimizer = weights(0.0)
    published, lagging, expected = 65536.0, 65536.0, []
    for slope in slopes:
        theirs.scale(torch.ones(()))
        factor = published
        their_weight.grad = torch.tensor([slope * factor])
        theirs._scale = torch.tensor(factor)  # the scale of the losses, for unscaling alone
        theirs.step(their_optimizer)
        theirs._scale = torch.tensor(lagging)
        theirs.update()
        published, lagging = (lagging if is_async else theirs.get_scale()), theirs.get_scale()
        expected.append((published, their_weight.item()))
    model = FakeModel()
    scaler = GradScaler(growth_interval=interval)
    run = Run(model, scaler)

    async def main() -> None:
        told, steps = [], []
        for slope in slopes:
            gate = model.hold()
            if chance.random() < 0.5:
                gate.set()
            steps.append(run.iterate(slope))
            updating = asyncio.ensure_future(scaler.update(is_async=is_async))
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
            for gate in model._gates[:-1] if is_async else model._gates:
                gate.set()
            await updating
            told.append(scaler.get_scale())
        for gate in model._gates:
            gate.set()
        parameters = [(await step)[1] for step in steps]
        assert list(zip(told, parameters, strict=True)) == expected
        await scaler.synchronize()

    try:
        asyncio.run(main())
    finally:
        model.close()
    assert scaler.state_dict() == theirs.state_dict()


async def test_async_update_waits_for_the_previous_one_only(model: FakeModel) -> None:
    scaler = GradScaler()
    run = Run(model, scaler)
    first = model.hold()
    run.iterate(1.0)
    await scaler.update()  # step 1 is held
    second = model.hold()
    run.iterate(1.0)
    updating = asyncio.ensure_future(scaler.update())
    await asyncio.sleep(0)
    assert not updating.done()
    first.set()
    assert (await updating).good == 1  # step 2 is held
    second.set()
    assert (await scaler.synchronize()).good == 1


async def test_sync_update_waits_for_all_models(model: FakeModel, other: FakeModel) -> None:
    scaler = GradScaler()
    run = Run(model, scaler)
    gate = other.hold()
    slow = other.step(lambda: None)
    await run.iterate(1.0)
    updating = asyncio.ensure_future(scaler.update(is_async=False))
    await asyncio.sleep(0)
    assert not updating.done() and not slow.done()
    gate.set()
    assert (await updating).good == 1 and slow.done()


async def test_two_models_and_one_scaler(model: FakeModel, other: FakeModel) -> None:
    """The found_infs of two streams that run at once make one backoff; the other's weights move."""
    scaler = GradScaler()
    runs = Run(model, scaler), Run(other, scaler)
    gates = model.hold(), other.hold()
    runs[0].iterate(INF), runs[1].iterate(2.0)
    gates[1].set(), gates[0].set()
    outcome = await scaler.update(is_async=False)
    assert outcome == UpdateOutcome(scale=32768.0, skipped=True, settled=1, good=0)
    assert [run.parameter.item() for run in runs] == [0.0, -2.0]


async def test_a14_get_scale_beside_a_held_step(model: FakeModel) -> None:
    """A14: at once, the last awaited value; state_dict (A13) the last settled pair."""
    scaler = GradScaler(growth_interval=1)
    run = Run(model, scaler)
    await run.iterate(1.0)
    await scaler.update(is_async=False)
    gate = model.hold()
    run.iterate(INF)
    updating = asyncio.ensure_future(scaler.update(is_async=False))
    await asyncio.sleep(0)
    assert scaler.get_scale() == scaler.state_dict()["scale"] == 131072.0
    gate.set()
    await updating
    assert scaler.get_scale() == 65536.0


async def test_only_update_publishes(model: FakeModel) -> None:
    scaler = GradScaler()
    run = Run(model, scaler)
    await run.iterate(INF)
    await scaler.update()
    await model.step(lambda: None)
    assert scaler.get_scale() == 65536.0
    await scaler.synchronize()
    assert scaler.get_scale() == 32768.0


async def test_setters_act_in_program_order(model: FakeModel) -> None:
    """One set after update() was called belongs to the next update, even while that one still waits."""
    scaler = GradScaler()
    run = Run(model, scaler)
    gate = model.hold()
    run.iterate(INF)
    scaler.set_backoff_factor(0.25)
    pending = scaler.update(is_async=False)
    scaler.set_backoff_factor(0.125)
    assert scaler.get_backoff_factor() == 0.125
    gate.set()
    assert (await pending).scale == 65536.0 / 4
    run.iterate(INF)
    assert (await scaler.update(is_async=False)).scale == 65536.0 / 32


async def test_load_replaces_a_pending_result(model: FakeModel) -> None:
    scaler = GradScaler()
    run = Run(model, scaler)
    saved = scaler.state_dict() | {"scale": 1024.0, "_growth_tracker": 5}
    gate = model.hold()
    run.iterate(INF)
    await scaler.update()
    waiting = asyncio.ensure_future(scaler.update(2.0, is_async=False))
    await asyncio.sleep(0)
    scaler.load_state_dict(saved)
    gate.set()
    assert (await waiting).scale == 1024.0
    assert scaler.state_dict() == saved
    await scaler.synchronize()
    assert scaler.state_dict() == saved
    await run.iterate(1.0)
    assert run.parameter.item() == -1.0
    assert (await scaler.update(is_async=False)).good == 1 and scaler.state_dict()["_growth_tracker"] == 6


async def test_clone_has_the_newest_state(model: FakeModel) -> None:
    """The pending result, too: the steps in flight are waited for; the original's own timetable is kept."""
    scaler = GradScaler()
    run = Run(model, scaler)
    gate = model.hold()
    run.iterate(INF)
    await scaler.update()
    threading.Timer(0.01, gate.set).start()
    twin = copy.deepcopy(scaler)
    assert (twin.get_scale(), scaler.get_scale()) == (32768.0, 65536.0)
    with pytest.raises(AssertionError, match="inside a step"):
        await model.step(lambda: copy.deepcopy(scaler))
    run.iterate(1.0)
    with pytest.raises(AssertionError, match="between step"):  # even though that step may still be in flight
        copy.deepcopy(scaler)
    await scaler.update()
    assert scaler.get_scale() == 32768.0


async def test_direct_step_waits_for_a_pending_update(model: FakeModel) -> None:
    scaler = GradScaler()
    run = Run(model, scaler)
    gate = model.hold()
    run.iterate(1.0)
    await scaler.update()
    parameter, optimizer = weights(0.0)
    parameter.grad = torch.tensor([65536.0])
    timer = threading.Timer(0.01, gate.set)
    timer.start()
    scaler.step(optimizer)
    assert gate.is_set() and parameter.item() == -1.0 and run.parameter.item() == -1.0
    assert await scaler.update(is_async=False) == UpdateOutcome(scale=65536.0, skipped=False, settled=2, good=2)


# --- nothing to update, and steps that fail --------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
async def test_second_of_two_updates_counts_zero_times(model: FakeModel, is_async: bool) -> None:
    scaler = GradScaler()
    run = Run(model, scaler)
    gate = model.hold()
    run.iterate(INF)
    both = [asyncio.ensure_future(scaler.update(is_async=is_async)) for _ in range(2)]
    await asyncio.sleep(0)
    gate.set()
    first, second = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(first, UpdateOutcome) and isinstance(second, AssertionError)
    assert scaler.get_scale() == (65536.0 if is_async else 32768.0)
    await scaler.synchronize()
    assert scaler.get_scale() == 32768.0
    run.iterate(1.0)
    assert (await scaler.update(is_async=False)).good == 1


async def test_nothing_known_at_the_next_barrier_at_the_latest(model: FakeModel) -> None:
    """A step in flight may still use the scaler: that it did not is told by the barrier that waits for it."""
    scaler = GradScaler()
    scaler.scale(torch.ones(()))
    gate = model.hold()
    model.step(lambda: None)
    assert (await scaler.update()).settled == 0
    gate.set()
    Run(model, scaler).iterate(INF)
    with pytest.raises(AssertionError, match="no inf check"):
        await scaler.update()
    assert (await scaler.synchronize()).scale == 32768.0


async def test_step_twice_without_update(model: FakeModel) -> None:
    """As torch's RuntimeError, from the second step; one update cleans up."""
    scaler = GradScaler()
    run = Run(model, scaler)
    run.iterate(1.0)
    with pytest.raises(RuntimeError, match="before, since the last update"):
        await run.iterate(1.0)
    assert (await scaler.update(is_async=False)).good == 1
    await run.iterate(1.0)
    assert run.parameter.item() == -2.0


async def test_a10_and_a01_in_a_step(model: FakeModel) -> None:
    """A10, A01: the error reaches who awaits the step; call order and update as torch's."""
    scaler = GradScaler()
    half = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    half.grad = torch.ones(2, dtype=torch.float16)
    optimizer = torch.optim.SGD([half], lr=1.0)
    model.call(lambda: scaler.scale(torch.ones(())))
    with pytest.raises(ValueError, match="FP16"):
        await model.step(lambda: scaler.step(optimizer))
    assert half.grad.tolist() == [1.0, 1.0]
    half.grad = None
    with pytest.raises(AssertionError, match="no gradients"):
        await model.step(lambda: scaler.step(optimizer))
    with pytest.raises(AssertionError, match="no inf check"):
        await scaler.update()
    run = Run(model, scaler)
    await run.iterate(1.0)
    assert (await scaler.update(is_async=False)).good == 1


async def test_update_in_a_step_is_refused_at_the_call(model: FakeModel) -> None:
    scaler = GradScaler()
    for call in (scaler.update, scaler.synchronize):
        with pytest.raises(RuntimeError, match="inside a step function"):
            await model.step(call)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_step_error_is_raised_once_and_the_update_is_done(model: FakeModel, is_async: bool) -> None:
    """Failed after it stepped: the next update raises the step's own error; its backoff is done; never again."""
    scaler = GradScaler()
    run = Run(model, scaler)
    run.call(INF)

    def step_fn() -> None:
        run.parameter.grad = run.grad
        scaler.step(run.optimizer)
        raise KeyError("mine")

    handle = model.step(step_fn)
    handle.event.wait()
    with pytest.raises(KeyError, match="mine"):
        await scaler.update(is_async=is_async)
    outcome = await scaler.synchronize()
    assert outcome == UpdateOutcome(scale=32768.0, skipped=True, settled=1, good=0)
    with pytest.raises(StepError):
        await handle


async def test_error_of_a_step_in_flight_comes_from_the_barrier_that_waits_for_it(model: FakeModel) -> None:
    scaler = GradScaler()
    scaler.scale(torch.ones(()))
    gate = model.hold()
    model.step(lambda: 1 / 0)
    assert (await scaler.update()).settled == 0
    gate.set()
    Run(model, scaler).iterate(INF)
    with pytest.raises(ZeroDivisionError):
        await scaler.update()  # not AssertionError, too: the step's error says why nothing was looked at
    assert (await scaler.synchronize()).scale == 32768.0


async def test_error_that_the_handle_told_is_not_told_again(model: FakeModel) -> None:
    scaler = GradScaler()
    scaler.scale(torch.ones(()))
    gate = model.hold()
    handle = model.step(lambda: 1 / 0)
    await scaler.update()
    gate.set()
    with pytest.raises(ZeroDivisionError):
        await handle
    Run(model, scaler).iterate(1.0)
    assert (await scaler.update()).settled == 0
    assert (await scaler.synchronize()).good == 1


async def test_warning_as_error_loses_nothing(model: FakeModel) -> None:
    """The warning below 1 raised as an error: the update is done, its outcome comes next."""
    scaler = GradScaler(init_scale=1.0)
    run = Run(model, scaler)
    run.iterate(INF)
    with pytest.raises(UserWarning, match="below 1"):
        await scaler.update(is_async=False)
    assert scaler.get_scale() == 0.5
    assert await scaler.synchronize() == UpdateOutcome(scale=0.5, skipped=True, settled=1, good=0)


# --- cancellation, loops, threads ------------------------------------------------------------------------------------


def test_update_is_a_coroutine() -> None:
    scaler = GradScaler()
    coroutine = scaler.update()
    assert isinstance(coroutine, collections.abc.Coroutine) and asyncio.iscoroutine(coroutine)
    coroutine.close()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("release", range(6))
async def test_d02_cancelled_at_every_point(model: FakeModel, is_async: bool, turns: int, release: int) -> None:
    """D02: before it began, waiting, while its steps end, just done: CancelledError or done, exactly one backoff."""
    scaler = GradScaler()
    run = Run(model, scaler)
    if is_async:  # then the update below waits for this one
        earlier = model.hold()
        run.iterate(1.0)
        await scaler.update()
    gate = model.hold()
    run.iterate(INF)
    task = asyncio.ensure_future(scaler.update(is_async=is_async))
    for turn in range(turns):
        if turn == release:
            for held in model._gates:
                held.set()
            for step in steps_in_flight():
                step.event.wait()
        await asyncio.sleep(0)
    task.cancel()
    (result,) = await asyncio.gather(task, return_exceptions=True)
    for held in model._gates:
        held.set()
    told = [result] if isinstance(result, UpdateOutcome) else []
    assert told or isinstance(result, asyncio.CancelledError)
    with pytest.raises(AssertionError, match="no inf check"):  # it did happen: nothing is left to update
        await scaler.update(is_async=is_async)
    assert scaler.get_scale() == (65536.0 if is_async else 32768.0)
    told.append(await scaler.synchronize())
    assert scaler.get_scale() == 32768.0
    assert sum(outcome.settled for outcome in told) == 1 + is_async
    assert [outcome.skipped for outcome in told].count(True) == 1
    run.iterate(1.0)
    assert (await scaler.update(is_async=False)).good == 1
    assert gate.is_set() and (not is_async or earlier.is_set())


@pytest.mark.parametrize("how", ["wait_for", "timeout", "twice"])
async def test_d02_cancelled_by_other_means(model: FakeModel, how: str) -> None:
    scaler = GradScaler()
    run = Run(model, scaler)
    gate = model.hold()
    run.iterate(INF)
    if how == "wait_for":
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scaler.update(is_async=False), 0)
    elif how == "timeout":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await scaler.update(is_async=False)
    else:
        task = asyncio.ensure_future(scaler.update(is_async=False))
        await asyncio.sleep(0)
        task.cancel(), task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    gate.set()
    assert (await scaler.synchronize()).scale == 32768.0


async def test_dropped_update_happens(model: FakeModel) -> None:
    """Called and never awaited: it keeps its place, and the next barrier puts it in force."""
    scaler = GradScaler()
    run = Run(model, scaler)
    run.iterate(INF)
    scaler.update(is_async=False).close()
    run.iterate(1.0)
    outcome = await scaler.update(is_async=False)
    assert outcome == UpdateOutcome(scale=32768.0, skipped=True, settled=2, good=1)


async def test_updates_apply_in_the_order_of_their_calls(model: FakeModel) -> None:
    """Awaited in the other order, contending: the first called is still the first."""
    scaler = GradScaler()
    run = Run(model, scaler)
    gate = model.hold()
    run.iterate(INF)
    first = scaler.update(is_async=False)
    run.iterate(1.0)
    second = scaler.update(8.0, is_async=False)
    run.iterate(INF)
    third = scaler.update(is_async=False)
    tasks = [asyncio.ensure_future(update) for update in (third, second, first)]
    await asyncio.sleep(0)
    gate.set()
    outcomes = await asyncio.gather(*tasks)
    assert scaler.get_scale() == 4.0
    assert sum(outcome.settled for outcome in outcomes) == 3 and sum(outcome.good for outcome in outcomes) == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_d01_loop_closed_in_the_middle(model: FakeModel, is_async: bool) -> None:
    """D01: an update waits for a step when its loop ends; the next loop settles it."""
    scaler = GradScaler()
    run = Run(model, scaler)

    async def begin() -> None:
        run.iterate(1.0)
        await scaler.update()
        task = asyncio.ensure_future(scaler.update(2.0, is_async=is_async))
        await asyncio.sleep(0)
        assert not task.done()  # and asyncio.run cancels it

    async def go_on() -> UpdateOutcome:
        run.iterate(1.0)
        return await scaler.update(is_async=False)

    gate = model.hold()
    asyncio.run(begin())
    gate.set()
    outcome = asyncio.run(go_on())
    assert outcome == UpdateOutcome(scale=2.0, skipped=False, settled=3, good=2)
    assert scaler.state_dict()["_growth_tracker"] == 2


def test_d01_loop_abandoned_in_the_middle(model: FakeModel) -> None:
    """The loop is closed without cancelling anything, the step ends when it is gone."""
    scaler = GradScaler()
    run = Run(model, scaler)
    gate = model.hold()
    run.iterate(INF)
    coroutine = scaler.update(is_async=False)
    loop = asyncio.new_event_loop()

    async def drive() -> None:
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
        await coroutine

    task = loop.create_task(drive())
    loop.run_forever()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    gate.set()

    async def settle() -> UpdateOutcome:
        return await scaler.synchronize()

    assert asyncio.run(settle()).scale == 32768.0
    task._coro.close()  # type: ignore[attr-defined]


def test_d01_a_second_threads_loop(model: FakeModel, other: FakeModel) -> None:
    """Two loops in two threads at once, a model each, one scaler: every step counts once."""
    scaler = GradScaler(growth_interval=10_000)

    def loop(fake: FakeModel) -> None:
        async def main() -> None:
            run = Run(fake, scaler)
            for _ in range(50):
                try:
                    await run.iterate(1.0)
                    await scaler.update(is_async=False)
                except (AssertionError, RuntimeError):
                    pass  # the other loop's update took this step along
            assert run.parameter.item() == -50.0

        asyncio.run(main())

    threads = [threading.Thread(target=loop, args=(fake,)) for fake in (model, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)

    async def settle() -> None:
        await scaler.synchronize()

    asyncio.run(settle())
    assert 50 <= scaler.state_dict()["_growth_tracker"] <= 100 and scaler.get_scale() == 65536.0


@pytest.mark.parametrize("seed", range(200))
def test_d02_random_cancellations(seed: int) -> None:
    """D02: updates cancelled at random points of a random run: scale, tracker, skips as in the uncancelled run."""
    chance = random.Random(seed)
    slopes = [chance.choice([1.0, 1.0, INF]) for _ in range(12)]
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    weight, optimizer = weights(0.0)
    for slope in slopes:
        theirs.scale(torch.ones(()))
        weight.grad = torch.tensor([slope])
        theirs.step(optimizer)
        theirs.update()
    model, scaler = FakeModel(), GradScaler(growth_interval=3)
    run, told = Run(model, scaler), []

    async def main() -> None:
        for slope in slopes:
            gate = model.hold()
            run.iterate(slope)
            task = asyncio.ensure_future(scaler.update(is_async=chance.random() < 0.7))
            events = ["cancel", "release", "turn", "turn"]
            chance.shuffle(events)
            for event in events:
                if event == "cancel" and chance.random() < 0.6:
                    task.cancel()
                elif event == "release":
                    gate.set()
                else:
                    await asyncio.sleep(0)
            gate.set()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(result, UpdateOutcome):
                told.append(result)
            else:
                assert isinstance(result, asyncio.CancelledError)
        told.append(await scaler.synchronize())

    try:
        asyncio.run(main())
    finally:
        model.close()
    assert scaler.state_dict() == theirs.state_dict()
    assert scaler.skipped_steps == slopes.count(INF)
    assert sum(outcome.settled for outcome in told) == len(slopes)
    assert sum(outcome.good for outcome in told) == slopes.count(1.0)
    assert run.parameter.item() == -float(slopes.count(1.0))


async def test_d12_scale_by_program_order(model: FakeModel) -> None:
    """D12: the factor of each call depends on the order of the calls alone, not on when steps finish."""
    scaler = GradScaler(growth_interval=1)
    run = Run(model, scaler)
    factors = []
    for slope in (1.0, 1.0, INF, 1.0, 1.0):
        gate = model.hold()
        factors.append(run.call(slope))
        run.step()
        update = asyncio.ensure_future(scaler.update())
        await asyncio.sleep(0)
        for held in model._gates[:-1]:
            held.set()
        await update
        assert not gate.is_set()
    model._gates[-1].set()
    await scaler.synchronize()
    assert factors == [65536.0, 65536.0, 131072.0, 262144.0, 131072.0]


async def test_disabled_is_the_same_barrier(model: FakeModel) -> None:
    scaler = GradScaler(enabled=False)
    _, optimizer = weights(0.0)
    gate = model.hold()
    model.step(lambda: scaler.step(optimizer))
    assert (await scaler.update()).settled == 0
    updating = asyncio.ensure_future(scaler.update(is_async=False))
    await asyncio.sleep(0)
    assert not updating.done()
    gate.set()
    assert await updating == UpdateOutcome(scale=1.0, skipped=False, settled=2, good=2)


async def test_memory_stays_flat(model: FakeModel) -> None:
    """Nothing of an iteration is kept once its outcome is told."""
    scaler = GradScaler(growth_interval=1, growth_factor=1.0001)
    for _ in range(30):
        run = Run(model, scaler)
        run.iterate(1.0)
        await scaler.update()
    await scaler.synchronize()
    ledger = scaler._ledger
    assert not ledger._closed and not ledger._untold and not ledger._open.records
    assert len(ledger._history) == 31


def test_fake_gradients_flow(model: FakeModel) -> None:
    """The fakes themselves: a scaled loss in a call, its gradient in the step."""
    scaler = GradScaler()
    parameter, optimizer = weights(0.0)
    model.call(lambda: backward(scaler, parameter, 2.0))
    model.step(lambda: scaler.step(optimizer)).event.wait()
    assert parameter.item() == -2.0


def test_d01_updates_contend_for_the_lock_of_their_own_loop() -> None:
    """asyncio's locks bind to the loop in which they are first contended: a scaler outlives its loops."""
    scaler = GradScaler(init_scale=4.0, growth_interval=1)

    async def contend() -> list[float]:
        scaler.scale(torch.ones(()))
        handle = StepHandle(1, Window())
        register(handle)
        updates = [asyncio.ensure_future(scaler.update(new_scale, is_async=False)) for new_scale in (2.0, 8.0, 16.0)]
        await asyncio.sleep(0)
        assert not any(update.done() for update in updates)
        handle.event.set(None)
        return [outcome.scale for outcome in await asyncio.gather(*updates)]

    for _ in range(3):
        assert asyncio.run(contend())[-1] == 16.0 == scaler.get_scale()
