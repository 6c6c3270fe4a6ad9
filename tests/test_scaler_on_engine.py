"""The loss scaler on real models: skips, scales and trackers of torch's, with steps and updates in other threads."""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import random
import threading
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe_async import DevicePool, GradScaler, OptimizerCtx, RoundPipe, RoundPipeRunConfig, optim, prefetch
from roundpipe_async.scaling.grad_scaler import SkippedStepsError
from tests.support.late_device import LateRuntime, late_pool
from tests.support.plain import twin

WIDTH = 4
COUNT = 2
INF = float("inf")


@pytest.fixture
async def pool() -> AsyncIterator[DevicePool]:
    async with DevicePool.cpu(2, 1) as pool:
        yield pool


class Scalar(nn.Module):
    """A 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Spoils(torch.autograd.Function):
    """Identity whose gradient is `value` in the last element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.clone()
        gradient.view(-1)[-1] = ctx.value
        return gradient, None


def build(dtype: torch.dtype = torch.float16) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, Scalar(), nn.Linear(WIDTH, WIDTH)).to(dtype)


def squares(out: Tensor, _: Any = None) -> Tensor:
    return out.float().square().mean()


def batch(generator: torch.Generator | None = None) -> Tensor:
    return torch.randn(4, WIDTH, generator=generator).half()


def adam(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, **options)


class Plain:
    """fp16 parameters, fp32 copies for the optimizer, torch's scaler: what a synchronous run must equal bit for bit."""

    def __init__(self, module: nn.Module, scaler: Any, make: Callable[..., torch.optim.Optimizer] = adam) -> None:
        self.module, self.scaler = twin(module), scaler
        self.masters = [nn.Parameter(parameter.detach().float()) for parameter in self.module.parameters()]
        self.optimizer = make(self.masters)

    def backward(self, data: Tensor, loss_fn: Any) -> Tensor:
        total: Any = 0
        for part in data.tensor_split(COUNT):
            loss = self.scaler.scale(loss_fn(self.module(part)))
            loss.backward()
            total = total + loss.detach()
        return total

    def step(self) -> None:
        for master, parameter in zip(self.masters, self.module.parameters(), strict=True):
            if parameter.grad is not None:
                master.grad = parameter.grad.float()
            parameter.grad = None
        self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()

    def publish(self) -> None:
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.module.parameters(), strict=True):
                parameter.copy_(master)


class Trainer:
    """An engine's model with its optimizer and scaler, stepped as the README says."""

    def __init__(self, pool: DevicePool, scaler: GradScaler, module: nn.Sequential | None = None) -> None:
        self.module = build() if module is None else module
        config = RoundPipeRunConfig(num_microbatch=COUNT)
        self.model = RoundPipe(self.module, optim_dtype=torch.float32, devices=pool, model_run_config=config)
        self.scaler = scaler
        with OptimizerCtx():
            self.optimizer = adam(self.model.parameters())

    def copies(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.optim_parameters()]

    async def backward(self, data: Tensor, loss_fn: Any = squares) -> Tensor:
        scaler = self.scaler
        loss: Tensor = await self.model.forward_backward((data,), loss_fn=lambda out, _: scaler.scale(loss_fn(out)))
        return loss

    def step_fn(self) -> None:
        self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()

    async def step(self, is_async: bool = False) -> Any:
        return await self.model.step(self.step_fn, is_async=is_async)


def times(factor: float) -> Callable[[Tensor], Tensor]:
    """A loss whose gradients overflow in fp16 if `factor` times the scale is too large."""
    return lambda out: squares(out) * factor


def state_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return copy.deepcopy(list(optimizer.state_dict()["state"].values()))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# ---- equal to torch's -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [1, 3])
async def test_a_synchronous_run_is_torchs_bit_for_bit(windows: int, pool: DevicePool) -> None:
    """Many iterations with overflows here and there: losses, parameters, scale, tracker and skips, at every step."""
    torch.manual_seed(1)
    rng = random.Random(1)
    options: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 5, "growth_factor": 3.0}
    trainer = Trainer(pool, GradScaler(**options))
    plain = Plain(trainer.module, torch.amp.GradScaler("cpu", **options))
    skips = 0
    async with trainer.model:
        for _ in range(90 // windows):
            for _ in range(windows):
                data, factor = batch(), rng.choice([1.0, 1.0, 1.0, 3.7, 1e5, 1e-3])
                loss = await trainer.backward(data, times(factor))
                assert torch.equal(loss, plain.backward(data, times(factor)))
            before = trainer.copies()
            await trainer.step()
            plain.step()
            plain.publish()
            outcome = await trainer.scaler.update(is_async=False)
            was = plain.scaler.get_scale()
            plain.scaler.update()
            assert outcome.scale == trainer.scaler.get_scale() == plain.scaler.get_scale()
            assert trainer.scaler.state_dict() == plain.scaler.state_dict()
            assert outcome.skipped is (plain.scaler.get_scale() < was)
            assert outcome.skipped is same(before, trainer.copies())
            skips += outcome.skipped
            assert same(trainer.copies(), [master.detach() for master in plain.masters])
            assert same(state_of(trainer.optimizer), state_of(plain.optimizer))
        assert trainer.scaler.skipped_steps == skips > 5


async def test_an_asynchronous_run_is_the_documented_rule(pool: DevicePool) -> None:
    """One step old parameters, and a scale that is one update old: the hand-written loop, at every step."""
    torch.manual_seed(2)
    rng = random.Random(2)
    options: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 4, "growth_factor": 4.0}
    trainer = Trainer(pool, GradScaler(**options))
    newest = torch.amp.GradScaler("cpu", **options)  # every update so far
    plain = Plain(trainer.module, newest)
    published = 2.0**10  # every update but the last
    skipped_steps = 0
    last_skipped = False
    async with trainer.model:
        for _ in range(80):
            data, factor = batch(), rng.choice([1.0, 1.0, 1.0, 1e5])
            losses_scale = published
            assert trainer.scaler.get_scale() == losses_scale
            loss = await trainer.backward(data, times(factor))
            total: Any = 0
            for part in data.tensor_split(COUNT):
                scaled = times(factor)(plain.module(part)) * torch.tensor(losses_scale)
                scaled.backward()
                total = total + scaled.detach()
            assert torch.equal(loss, total)
            await trainer.step(is_async=True)
            outcome = await trainer.scaler.update()

            plain.publish()  # the parameters before this step are those of the next forward
            inverse = torch.tensor(losses_scale).double().reciprocal().float()
            gradients = [parameter.grad.float() * inverse for parameter in plain.module.parameters()]
            for master, parameter, gradient in zip(plain.masters, plain.module.parameters(), gradients, strict=True):
                master.grad, parameter.grad = gradient, None
            finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
            if finite:
                plain.optimizer.step()
            plain.optimizer.zero_grad()
            assert outcome.skipped is last_skipped
            published = newest.get_scale()
            assert outcome.scale == published
            newest.scale(torch.zeros(()))  # torch makes its tensors at the first use
            found = torch.tensor(float(not finite))
            torch._amp_update_scale_(newest._scale, newest._growth_tracker, found, 4.0, 0.5, 4)
            last_skipped = not finite
            skipped_steps += last_skipped
        await trainer.model.synchronize()
        await trainer.scaler.synchronize()
        assert same(trainer.copies(), [master.detach() for master in plain.masters])
        assert trainer.scaler.state_dict() == newest.state_dict()
        assert trainer.scaler.skipped_steps == skipped_steps > 5


async def test_forward_then_backward_of_a_scaled_loss(pool: DevicePool) -> None:
    """`await model(x)`, a loss outside of any call, `await model.backward(scaler.scale(loss))`."""
    torch.manual_seed(3)
    trainer = Trainer(pool, GradScaler(init_scale=2.0**8, growth_interval=3))
    plain = Plain(trainer.module, torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3))
    async with trainer.model:
        for factor in (1.0, 1.0, 1e6, 1.0, 1.0, 1.0, 1.0):
            data = batch()
            out = await trainer.model(data, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
            await trainer.model.backward(trainer.scaler.scale(times(factor)(out)))
            plain.scaler.scale(times(factor)(plain.module(data))).backward()
            await trainer.step()
            plain.step()
            plain.publish()
            await trainer.scaler.update(is_async=False)
            plain.scaler.update()
            assert trainer.scaler.state_dict() == plain.scaler.state_dict()
            assert same(trainer.copies(), [master.detach() for master in plain.masters])


async def test_a19_an_update_between_backward_and_step_changes_no_gradient(pool: DevicePool) -> None:
    """The update of step k lands after the losses of step k+1: these are unscaled with the scale that they had."""
    torch.manual_seed(4)
    trainer = Trainer(pool, GradScaler(init_scale=2.0**8, growth_interval=1, growth_factor=8.0))
    reference = twin(trainer.module)
    async with trainer.model:
        for index in range(5):
            data = batch()
            scale = trainer.scaler.get_scale()
            await trainer.backward(data)
            seen: list[list[Tensor]] = []

            def look(seen: list[list[Tensor]] = seen) -> None:
                trainer.scaler.unscale_(trainer.optimizer)
                seen.append([parameter.grad.clone() for parameter in trainer.model.optim_parameters()])
                trainer.step_fn()

            if index:
                await trainer.scaler.update(is_async=False)
                assert trainer.scaler.get_scale() == scale * 8
            await trainer.model.step(look, is_async=False)
            for part in data.tensor_split(COUNT):
                (squares(reference(part)) * torch.tensor(scale)).backward()
            for mine, parameter in zip(seen[0], reference.parameters(), strict=True):
                assert parameter.grad is not None and torch.equal(mine, parameter.grad.float() / scale)
            reference.load_state_dict(trainer.module.state_dict())
            reference.zero_grad()


async def test_the_example_of_the_spec(pool: DevicePool) -> None:
    torch.manual_seed(5)
    num_microbatch = 2
    criterion = nn.CrossEntropyLoss()
    my_sequential = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    samples = torch.randn(16, WIDTH)
    labels = (samples.sum(1) > 0).long()
    losses: list[float] = []

    model = RoundPipe(
        my_sequential.to(torch.float16),
        optim_dtype=torch.float32,
        devices=pool,
        model_run_config=RoundPipeRunConfig(num_microbatch=num_microbatch),
    )
    with OptimizerCtx():
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = GradScaler()

    async for data, label in prefetch([(samples, labels)] * 60):
        loss = await model.forward_backward(
            input_args=(data.to(torch.float16),),
            label=label,
            loss_fn=lambda out, lab: scaler.scale(criterion(out.float(), lab)) / num_microbatch,
        )
        real_loss = loss.item() / scaler.get_scale()
        await model.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()))
        await scaler.update()
        losses.append(real_loss)
    await model.synchronize()

    assert losses[-1] < losses[0] / 2 and all(map(math.isfinite, losses))
    await model.aclose()


# ---- misuse ---------------------------------------------------------------------------------------------------------


class TwoHalves(nn.Module):
    """Two linear layers of which the loss touches one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


class Halves:
    """One model, two optimizers over disjoint layers."""

    def __init__(self, pool: DevicePool) -> None:
        torch.manual_seed(6)
        self.module = TwoHalves().half()
        config = RoundPipeRunConfig(num_microbatch=COUNT)
        self.model = RoundPipe(self.module, optim_dtype=torch.float32, devices=pool, model_run_config=config)
        named = dict(self.model.optim_named_parameters())
        self.groups = [[named[f"{half}.{name}"] for name in ("weight", "bias")] for half in ("first", "second")]
        self.optimizers = [torch.optim.SGD(group, lr=0.5, momentum=0.9) for group in self.groups]
        self.scaler = GradScaler(init_scale=16.0, growth_interval=3)

    def values(self, half: int) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.groups[half]]

    async def backward(self, *factors: float) -> None:
        def loss_fn(outs: tuple[Tensor, ...], _: Any) -> Tensor:
            pairs = zip(outs, factors, strict=False)
            return self.scaler.scale(sum((squares(out) * factor for out, factor in pairs), torch.zeros(())))

        await self.model.forward_backward((batch(),), loss_fn=loss_fn)

    def step_both(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        for optimizer in self.optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize("is_async", [False, True])
async def test_a01_the_loss_touches_only_the_first_of_two_optimizers(is_async: bool, pool: DevicePool) -> None:
    halves = Halves(pool)
    async with halves.model:
        before = halves.values(0), halves.values(1)
        await halves.backward(1.0)
        with pytest.raises(AssertionError, match="found no gradients to look for inf in"):
            result = await halves.model.step(halves.step_both, is_async=is_async)
            await result
        assert not same(halves.values(0), before[0]) and same(halves.values(1), before[1])
        await halves.scaler.update(is_async=is_async)
        for optimizer in halves.optimizers:
            optimizer.zero_grad()
        await halves.backward(1.0, 1.0)
        await halves.model.step(halves.step_both, is_async=False)
        assert not same(halves.values(1), before[1])
        assert (await halves.scaler.update(is_async=False)).good == (2 if is_async else 1)
        assert halves.scaler.state_dict()["_growth_tracker"] == 2


async def test_a03_inf_in_the_first_of_two_optimizers_only(pool: DevicePool) -> None:
    halves = Halves(pool)
    async with halves.model:
        await halves.backward(1.0, 1.0)
        await halves.model.step(halves.step_both, is_async=False)
        await halves.scaler.update(is_async=False)
        before = halves.values(0), halves.values(1), state_of(halves.optimizers[0])
        await halves.backward(1e6, 1.0)
        await halves.model.step(halves.step_both, is_async=False)
        outcome = await halves.scaler.update(is_async=False)
        assert same(halves.values(0), before[0]) and same(state_of(halves.optimizers[0]), before[2])
        assert not same(halves.values(1), before[1])
        assert outcome.skipped and outcome.scale == 8.0
        assert halves.scaler.state_dict()["_growth_tracker"] == 0 and halves.scaler.skipped_steps == 1


@pytest.mark.parametrize("kind", [tuple, list, iter])
async def test_a03_losses_in_sequences(kind: Any, pool: DevicePool) -> None:
    """`scale` of a tuple, list or generator in `loss_fn`: the same gradients as of the sum."""
    trainer = Trainer(pool, GradScaler(init_scale=64.0))
    plain = Plain(trainer.module, torch.amp.GradScaler("cpu", init_scale=64.0))

    def loss_fn(out: Tensor, _: Any) -> Any:
        scaled = trainer.scaler.scale(kind([squares(out), out.float().abs().mean()]))
        return scaled if isinstance(scaled, list | tuple) else list(scaled)

    async with trainer.model:
        data = batch()
        losses = await trainer.model.forward_backward((data,), loss_fn=loss_fn)
        assert isinstance(losses, list) and len(losses) == 2
        for part in data.tensor_split(COUNT):
            out = plain.module(part)
            torch.autograd.backward(list(plain.scaler.scale([squares(out), out.float().abs().mean()])))
        await trainer.step()
        plain.step()
        assert same(trainer.copies(), [master.detach() for master in plain.masters])


@pytest.mark.parametrize("is_async", [False, True])
async def test_a02_one_update_always_brings_the_scaler_back(is_async: bool, pool: DevicePool) -> None:
    trainer = Trainer(pool, GradScaler(init_scale=64.0))
    scaler, optimizer, model = trainer.scaler, trainer.optimizer, trainer.model

    async def fails(step_fn: Callable[[], Any], kind: type[Exception], sentence: str) -> None:
        await trainer.backward(batch())
        with pytest.raises(kind, match=sentence):
            await (await model.step(step_fn, is_async=True))
        optimizer.zero_grad()
        await scaler.update(is_async=is_async)

    async with model:
        with pytest.raises(AssertionError, match="before the scaler's first scale"):
            await model.step(trainer.step_fn, is_async=False)
        step, unscale = (lambda: scaler.step(optimizer)), (lambda: scaler.unscale_(optimizer))
        both: list[tuple[list[Callable[[], Any]], str]] = [
            ([unscale, unscale], r"unscale_\(\) was called on this optimizer before"),
            ([step, step], r"step\(\) was called on this optimizer before"),
            ([step, unscale], r"unscale_\(\) came after step\(\)"),
        ]
        for calls, sentence in both:
            await fails(lambda calls=calls: [call() for call in calls], RuntimeError, sentence)
            await trainer.backward(batch())  # the next iteration is fine
            await trainer.step()
            await scaler.update(is_async=is_async)
        # unscale, then no step
        await trainer.backward(batch())
        await model.step(lambda: (unscale(), optimizer.zero_grad()), is_async=False)
        await scaler.update(is_async=is_async)
        # an iteration without any backward: nothing to do, which is an error that counts zero times
        tracker = (await scaler.synchronize(), scaler.state_dict())[1]["_growth_tracker"]
        with pytest.raises(AssertionError, match="found no inf check"):
            await scaler.update(is_async=is_async)
        await trainer.backward(batch())
        await trainer.step()
        await scaler.update(is_async=False)
        assert scaler.state_dict()["_growth_tracker"] == tracker + 1


async def test_a10_an_optimizer_over_raw_fp16_parameters(pool: DevicePool) -> None:
    """Without `optim_dtype` the copies are fp16, too: refused with nothing touched, and the engine goes on."""
    module = build()
    scaler = GradScaler(init_scale=64.0)
    async with RoundPipe(module, devices=pool, model_run_config=RoundPipeRunConfig(num_microbatch=COUNT)) as model:
        with OptimizerCtx():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = batch()
        await model.forward_backward((data,), loss_fn=lambda out, _: scaler.scale(squares(out)))
        seen: list[list[Tensor]] = []

        def look() -> None:
            seen.append([parameter.grad.clone() for parameter in model.parameters()])

        def twice() -> None:
            look()
            for call in (scaler.unscale_, scaler.step, scaler.unscale_):  # each time "not unscaled" still
                with pytest.raises(ValueError, match=r"fp16|FP16"):
                    call(optimizer)
            look()
            scaler.step(optimizer)

        before = [parameter.detach().clone() for parameter in model.optim_parameters()]
        with pytest.raises(ValueError, match=r"fp16|FP16"):
            await model.step(twice, is_async=False)
        assert same(seen[0], seen[1])
        assert same(before, [parameter.detach() for parameter in model.optim_parameters()])
        optimizer.zero_grad()
        await model.forward_backward((data,), loss_fn=lambda out, _: squares(out))
        await model.step(optimizer.step, is_async=False)


# ---- the scale over time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
async def test_a04_a_scale_that_would_become_infinite_stays_finite(is_async: bool, pool: DevicePool) -> None:
    trainer = Trainer(pool, GradScaler(init_scale=1.0, growth_factor=1e30, growth_interval=1), build(torch.float32))
    async with trainer.model:
        for _ in range(6):
            before = trainer.copies()
            loss = await trainer.backward(batch().float() * 1e-3)
            assert loss.isfinite()
            await trainer.step(is_async)
            outcome = await trainer.scaler.update(is_async=is_async)
            assert math.isfinite(outcome.scale)
            await trainer.model.synchronize()
            assert trainer.scaler.skipped_steps or not same(before, trainer.copies())


@pytest.mark.parametrize("is_async", [False, True])
async def test_a05_400_overflows_in_a_row(is_async: bool, pool: DevicePool) -> None:
    trainer = Trainer(pool, GradScaler(init_scale=4.0))
    bounded = GradScaler(init_scale=1024.0, min_scale=128.0, growth_interval=1)
    halves = [trainer, Trainer(pool, bounded)]
    for each in halves:
        async with each.model:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                for _ in range(400 if each is trainer else 20):
                    await each.backward(batch(), times(INF))
                    await each.step(is_async)
                    outcome = await each.scaler.update(is_async=is_async)
                    assert outcome.scale > 0
            await each.scaler.synchronize()
            assert len([w for w in told if "fell below 1" in str(w.message)]) == (1 if each is trainer else 0)
            if each is not trainer:
                assert bounded.get_scale() == 128.0
            assert each.scaler.skipped_steps == (400 if each is trainer else 20)
            for _ in range(2):
                await each.backward(batch())
                await each.step()
                assert (await each.scaler.update(is_async=False)).good == 1
    assert bounded.get_scale() == 512.0  # recovers


@pytest.mark.parametrize("is_async", [False, True])
async def test_a06_nan_losses_are_told_counted_and_end_training_if_asked(is_async: bool, pool: DevicePool) -> None:
    late = 1 if is_async else 0
    trainer = Trainer(pool, GradScaler(init_scale=256.0, max_consecutive_skips=5))
    async with trainer.model:
        await trainer.backward(batch())
        await trainer.step(is_async)
        await trainer.scaler.update(is_async=is_async)
        for index in range(5 + late):
            loss = await trainer.backward(batch(), times(math.nan))
            assert loss.isnan()
            await trainer.step(is_async)
            outcome = await trainer.scaler.update(is_async=is_async)
            assert outcome.skipped is (index >= late)
        assert trainer.scaler.skipped_steps == 5
        await trainer.backward(batch(), times(math.nan))
        await trainer.step(is_async)
        with pytest.raises(SkippedStepsError, match=r"256"):
            await trainer.scaler.update(is_async=is_async)


@pytest.mark.parametrize("options", [{}, {"min_scale": 2.0**16}, {"hysteresis": 3}])
@pytest.mark.parametrize("is_async", [False, True])
async def test_a08_a_schedule_gated_by_outcomes_moves_once_for_each_good_step(
    is_async: bool, options: dict[str, Any], pool: DevicePool
) -> None:
    """The first step overflows; warnings are errors. Comparing scales would miss skips that leave it as it is."""
    trainer = Trainer(pool, GradScaler(init_scale=2.0**16, growth_interval=1000, **options))
    schedule = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda position: 0.5**position)
    good = 0
    async with trainer.model:
        for overflow in (True, False, False, True, False, True, True, False):
            await trainer.backward(batch(), times(INF if overflow else 1e-6))
            await trainer.step(is_async)
            outcome = await trainer.scaler.update(is_async=is_async)
            for _ in range(outcome.good):
                schedule.step()
            good += not overflow
        outcome = await trainer.scaler.synchronize()
        for _ in range(outcome.good):
            schedule.step()
        assert schedule.last_epoch == good == 4
        assert trainer.scaler.skipped_steps == 4


@pytest.mark.parametrize("into", ["fresh", "used", "torch"])
async def test_a12_saved_and_loaded_in_the_middle_is_as_uninterrupted(into: str, pool: DevicePool) -> None:
    options: dict[str, Any] = {"init_scale": 2.0**9, "growth_interval": 3}
    factors = [1.0, 1.0, 1e6, 1.0, 1.0, 1.0, 1.0, 1e6, 1.0, 1.0, 1.0, 1.0, 1.0]

    async def run(trainer: Trainer, factors: list[float], generator: torch.Generator) -> list[Any]:
        history = []
        for factor in factors:
            await trainer.backward(batch(generator), times(factor))
            await trainer.step()
            outcome = await trainer.scaler.update(is_async=False)
            history.append((outcome.scale, outcome.skipped, trainer.scaler.state_dict()["_growth_tracker"]))
        return history

    whole = Trainer(pool, GradScaler(**options))
    async with whole.model:
        expected = await run(whole, factors, torch.Generator().manual_seed(7))
    first = Trainer(pool, GradScaler(**options))
    async with first.model:
        generator = torch.Generator().manual_seed(7)
        history = await run(first, factors[:5], generator)
        saved = first.scaler.state_dict()
        assert saved["scale"] != 2.0**9 and saved["_growth_tracker"] != 0
        if into == "torch":
            between = torch.amp.GradScaler("cpu")
            between.load_state_dict(saved)
            saved = between.state_dict()
        elif into == "used":
            first.scaler = GradScaler(init_scale=4.0, growth_interval=1)
            await first.backward(batch())
            await first.model.step(lambda: (first.scaler.unscale_(first.optimizer), first.optimizer.zero_grad()), False)
            await first.scaler.update(is_async=False)
        else:
            first.scaler = GradScaler()
        first.scaler.load_state_dict(saved)
        history += await run(first, factors[5:], generator)
    assert history == expected
    assert same(first.copies(), whole.copies())


async def test_a14_get_scale_answers_at_once_beside_a_long_step(pool: DevicePool) -> None:
    trainer = Trainer(pool, GradScaler(init_scale=512.0))
    entered, opened = threading.Event(), threading.Event()

    def long_step() -> None:
        entered.set()
        assert opened.wait(60)
        trainer.step_fn()

    async with trainer.model:
        await trainer.backward(batch(), times(INF))
        handle = await trainer.model.step(long_step)
        await trainer.scaler.update()
        await asyncio.to_thread(entered.wait, 60)
        for _ in range(100):
            assert trainer.scaler.get_scale() == 512.0
            assert trainer.scaler.state_dict()["scale"] == 512.0
            assert trainer.scaler.scale(torch.ones(())) == 512.0
        loss = await trainer.backward(batch())  # so does the next iteration
        assert loss.isfinite() and not handle.done()
        opened.set()
        await handle
        assert trainer.scaler.get_scale() == 512.0  # only an awaited update changes it
        assert (await trainer.scaler.synchronize()).scale == 256.0


@pytest.mark.parametrize("is_async", [False, True])
async def test_a20_the_logged_loss_is_continuous_across_a_backoff(is_async: bool, pool: DevicePool) -> None:
    trainer = Trainer(pool, GradScaler(init_scale=1024.0))
    data = batch()
    logged, scales = [], []
    async with trainer.model:
        for group in trainer.optimizer.param_groups:
            group["lr"] = 0.0
        for index in range(10):
            # the loss itself is fine; a gradient is not
            loss_fn = (lambda out: squares(Spoils.apply(out, INF))) if index == 5 else squares
            loss = await trainer.backward(data, loss_fn)
            scales.append(trainer.scaler.get_scale())
            logged.append(loss.item() / scales[-1])
            await trainer.step(is_async)
            await trainer.scaler.update(is_async=is_async)
    assert len(set(scales)) == 2
    assert len(set(logged)) == 1


# ---- inf wherever it is ---------------------------------------------------------------------------------------------

PLACES = ("last parameter", "0-dim parameter", "last microbatch", "large tensor", "late layer")


@pytest.mark.parametrize("value", [INF, -INF, math.nan])
@pytest.mark.parametrize("place", PLACES)
async def test_a18_one_bad_element_is_always_found_and_nothing_is_stepped(place: str, value: float) -> None:
    """In the last bias, in a 0-dim parameter, in the last microbatch's gradient, among 100000 elements, and in the
    layer whose gradients arrive last."""
    torch.manual_seed(8)
    wide = nn.Sequential(nn.Linear(WIDTH, 100, bias=False), nn.Linear(100, 1000), nn.Linear(1000, WIDTH, bias=False))
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), wide, Scalar(), nn.Linear(WIDTH, WIDTH))
    target = {
        "last parameter": module[-1].bias,
        "0-dim parameter": module[2].gain,
        "last microbatch": module[0].weight,
        "large tensor": wide[1].weight,
        "late layer": module[0].weight,
    }[place]
    armed: list[int] = []

    def spoil(gradient: Tensor) -> Tensor | None:
        if not armed or armed.pop() > 1:  # the last of the microbatches
            return None
        gradient = gradient.clone()
        gradient.view(-1)[-1] = value
        return gradient

    target.register_hook(spoil)
    runtime = LateRuntime(2, 0, 0.02)
    pool = late_pool(runtime) if place == "late layer" else DevicePool.cpu(2, 1)
    async with pool:
        trainer = Trainer(pool, GradScaler(init_scale=2.0, growth_interval=1), module)
        async with trainer.model:
            await trainer.backward(batch().float())
            await trainer.step()
            await trainer.scaler.update(is_async=False)
            before, state = trainer.copies(), state_of(trainer.optimizer)
            armed[:] = [1, 2] if place == "last microbatch" else [1, 1]
            await trainer.backward(batch().float())
            await trainer.step(is_async=True)
            outcome = await trainer.scaler.update(is_async=False)
            assert outcome.skipped and outcome.scale == 2.0
            assert same(before, trainer.copies()) and same(state, state_of(trainer.optimizer))
            await trainer.backward(batch().float())
            await trainer.step()
            assert not (await trainer.scaler.update(is_async=False)).skipped
            assert not same(before, trainer.copies())
    assert not runtime.violations


# ---- several models, loops ------------------------------------------------------------------------------------------


async def test_two_models_and_two_pools_share_a_scaler(pool: DevicePool) -> None:
    """One `update` waits for the steps of both; the inf of one backs off the scale of both, once."""
    scaler = GradScaler(init_scale=64.0, growth_interval=2)
    async with DevicePool.cpu(1, 1) as other_pool:
        trainers = [Trainer(pool, scaler), Trainer(other_pool, scaler)]
        held = threading.Event()
        async with trainers[0].model, trainers[1].model:
            for index in range(6):
                before = [trainer.copies() for trainer in trainers]
                await asyncio.gather(
                    trainers[0].backward(batch(), times(1e6 if index == 2 else 1.0)), trainers[1].backward(batch())
                )
                await trainers[0].step(is_async=True)
                await trainers[1].model.step(lambda: (held.wait(60), trainers[1].step_fn()))
                update = asyncio.create_task(scaler.update(is_async=False))
                held.set()
                outcome = await update
                held.clear()
                assert same(before[0], trainers[0].copies()) is (index == 2)
                assert not same(before[1], trainers[1].copies())
                assert outcome.skipped is (index == 2)
            assert scaler.skipped_steps == 1
            assert scaler.state_dict()["scale"] == 128.0  # two good: 128, bad: 64, two good: 128, one good
            assert scaler.state_dict()["_growth_tracker"] == 1


def test_a_scaler_made_at_import_time_serves_loop_after_loop() -> None:
    scaler = GradScaler(init_scale=64.0, growth_interval=2)
    module = build()
    scales = []

    async def train(steps: int) -> None:
        async with DevicePool.cpu(1, 1) as pool:
            trainer = Trainer(pool, scaler, module)
            async with trainer.model:
                for _ in range(steps):
                    await trainer.backward(batch())
                    await trainer.step(is_async=True)
                    scales.append((await scaler.update()).scale)

    for steps in (3, 1, 2):
        asyncio.run(train(steps))
    assert scales == [64.0, 64.0, 128.0, 128.0, 256.0, 256.0]
    scales.append(asyncio.run(_synchronized(scaler)))
    assert scales[-1] == 512.0


async def _synchronized(scaler: GradScaler) -> float:
    return (await scaler.synchronize()).scale


async def test_accumulated_calls_keep_one_scale_though_an_update_lands_between_them(pool: DevicePool) -> None:
    """Two calls of one window around an `update` that doubles the scale: their gradients add up as unscaled ones do."""
    trainer = Trainer(pool, GradScaler(init_scale=32.0, growth_interval=1), build(torch.float32))
    reference = twin(trainer.module)
    data = [batch().float() for _ in range(3)]
    seen: list[Tensor] = []

    def step_fn() -> None:
        assert trainer.scaler.get_scale() == 32.0  # that of the gradients that this step works on
        trainer.scaler.unscale_(trainer.optimizer)
        seen.extend(parameter.grad.clone() for parameter in trainer.model.optim_parameters())
        trainer.step_fn()

    async with trainer.model:
        for group in trainer.optimizer.param_groups:
            group["lr"] = 0.0
        await trainer.backward(data[0])
        await trainer.step()
        await trainer.backward(data[1])
        assert (await trainer.scaler.update(is_async=False)).scale == 64.0
        await trainer.backward(data[2])
        assert trainer.scaler.get_scale() == 64.0
        out = await trainer.model(data[2], roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
        await trainer.model.backward(trainer.scaler.scale(squares(out)))  # made with 64, flows into a window of 32
        await trainer.model.step(step_fn, is_async=False)
    for part in itertools.chain(data[1].tensor_split(COUNT), data[2].tensor_split(COUNT), [data[2]]):
        squares(reference(part)).backward()
    for mine, parameter in zip(seen, reference.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ours": lambda parameters: optim.Adam(parameters, lr=1e-2),
    "ours decayed": lambda parameters: optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "fused momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, fused=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("when", ["at the first step", "later"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
async def test_a_skip_leaves_parameters_state_and_counters_bit_for_bit(kind: str, when: str, pool: DevicePool) -> None:
    trainer = Trainer(pool, GradScaler(init_scale=64.0))
    trainer.optimizer = OPTIMIZERS[kind](trainer.model.optim_parameters())
    async with trainer.model:
        if when == "later":
            for _ in range(2):
                await trainer.backward(batch())
                await trainer.step()
                await trainer.scaler.update(is_async=False)
        before, state = trainer.copies(), copy.deepcopy(trainer.optimizer.state_dict())
        module = {name: value.clone() for name, value in trainer.module.state_dict().items()}
        await trainer.backward(batch(), lambda out: squares(Spoils.apply(out, INF)))
        await trainer.step()
        assert (await trainer.scaler.update(is_async=False)).skipped
        assert same(before, trainer.copies()) and same(state, trainer.optimizer.state_dict())
        assert same(module, dict(trainer.module.state_dict()))
        await trainer.backward(batch())
        await trainer.step()
        assert not (await trainer.scaler.update(is_async=False)).skipped
        assert not same(before, trainer.copies())


async def test_clipping_works_on_unscaled_gradients(pool: DevicePool) -> None:
    trainer = Trainer(pool, GradScaler(init_scale=1024.0))
    norms: list[Tensor] = []

    def step_fn() -> None:
        trainer.scaler.unscale_(trainer.optimizer)
        norms.append(nn.utils.clip_grad_norm_(list(trainer.model.parameters()), 1e-3))
        norms.append(nn.utils.get_total_norm([p.grad for p in trainer.model.parameters() if p.grad is not None]))
        trainer.step_fn()

    async with trainer.model:
        await trainer.backward(batch())
        await trainer.model.step(step_fn, is_async=False)
        await trainer.scaler.update(is_async=False)
    assert 1e-2 < norms[0] < 10 and norms[1] == pytest.approx(1e-3, rel=1e-3)


async def test_a_disabled_scaler_changes_nothing(pool: DevicePool) -> None:
    trainer = Trainer(pool, GradScaler(enabled=False), build(torch.float32))
    plain = Plain(trainer.module, torch.amp.GradScaler("cpu", enabled=False))
    async with trainer.model:
        for _ in range(3):
            data = batch().float()
            assert torch.equal(await trainer.backward(data), plain.backward(data, squares))
            await trainer.step()
            plain.step()
            plain.publish()
            assert (await trainer.scaler.update(is_async=False)).good == 1
            assert same(trainer.copies(), [master.detach() for master in plain.masters])
        assert trainer.scaler.state_dict() == {} and trainer.scaler.get_scale() == 1.0


async def test_update_in_a_step_function_or_layer_is_refused(pool: DevicePool) -> None:
    trainer = Trainer(pool, GradScaler())
    async with trainer.model:
        await trainer.backward(batch())
        with pytest.raises(RuntimeError, match="inside a step function"):
            await trainer.model.step(trainer.scaler.update, is_async=False)
        with pytest.raises(RuntimeError, match="in the work of a call"):
            await trainer.backward(batch(), lambda out: (trainer.scaler.step(trainer.optimizer), squares(out))[1])
        trainer.optimizer.zero_grad()
        await trainer.backward(batch())
        await trainer.step()
        assert (await trainer.scaler.update(is_async=False)).good == 1
