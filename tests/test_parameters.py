"""Parameters, copies and optimizers: ties, frozen parameters, schedulers, what was built when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundpipe_async import DevicePool, GradScaler, OptimizerCtx, RoundPipe, RoundPipeRunConfig, optim
from tests.support.plain import CASES, Head, assert_same_gradients, assert_same_state, plain_forward_backward, twin


@pytest.fixture
async def pool() -> AsyncIterator[DevicePool]:
    async with DevicePool.cpu(2, 1) as pool:
        yield pool


async def train_once(model: RoundPipe, reference: nn.Module, rows: int = 6) -> None:
    data, label = CASES[0].data(rows)
    await model.forward_backward((data.clone(),), label=label, loss_fn=F.cross_entropy)
    plain_forward_backward(reference, data.clone(), label, F.cross_entropy, 3)


# ---- ties ----


class TwoNames(nn.Module):
    """One parameter under two names in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 6) * 0.3)
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.first + x @ self.second.T


async def test_b03_a_shared_parameter_is_one_parameter_with_the_sum_of_its_gradients(pool: DevicePool) -> None:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(11, 6), Head(6, 11)
    head.weight = embedding.weight
    module = nn.Sequential(embedding, TwoNames(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), head)
    reference = twin(module)
    async with RoundPipe(module, devices=pool) as model:
        with OptimizerCtx():
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            assert len(list(model.parameters())) == len(list(module.parameters())) == 6
        assert len(optimizer.param_groups[0]["params"]) == 6
        plain = torch.optim.Adam(reference.parameters(), lr=1e-2)
        for _ in range(10):
            data, label = torch.randint(0, 11, (7,)), torch.randint(0, 11, (7,))
            await model.forward_backward((data,), label=label, loss_fn=F.cross_entropy)
            plain_forward_backward(reference, data, label, F.cross_entropy, 3)
            await model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            plain.step()
            plain.zero_grad()
            assert_same_state(module, reference)
        assert module[-1].weight is module[0].weight and module[1].first is module[1].second
        assert {"0.weight", "5.weight", "1.first", "1.second"} <= set(module.state_dict())


async def test_b03_a_parameter_has_one_owner_until_that_one_is_closed(pool: DevicePool) -> None:
    module = CASES[0].build()
    async with RoundPipe(module, name="first", devices=pool):
        with pytest.raises(ValueError, match=r"'2\.0\.weight' belongs to the RoundPipe 'first'"):
            RoundPipe(module[2:], devices=pool)
    async with RoundPipe(module, devices=pool):
        pass
    wrapped = RoundPipe(module, devices=pool)
    del wrapped
    RoundPipe(module, devices=pool)


# ---- frozen ----


def _freeze(module: nn.Sequential, which: str) -> None:
    for name, parameter in module.named_parameters():
        frozen = {
            "first layer": name.startswith("0."),
            "all but adapters": not name.startswith("3."),
            "all but the last bias": name != "6.bias",
            "a whole stage": name.startswith(("2.", "3.")),
        }[which]
        parameter.requires_grad_(not frozen)


@pytest.mark.parametrize("which", ["first layer", "all but adapters", "all but the last bias", "a whole stage"])
async def test_b05_frozen_parameters_have_no_copy_and_no_gradient(which: str, pool: DevicePool) -> None:
    torch.manual_seed(1)
    module = CASES[0].build()
    _freeze(module, which)
    reference = twin(module)
    async with RoundPipe(module, devices=pool) as model:
        with OptimizerCtx():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            await train_once(model, reference)
            assert_same_gradients(module, reference)
            await model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            plain.step()
            plain.zero_grad()
            assert_same_state(module, reference)
        slots = model._store.parameters.slots
        assert all((slot.copy is None) == (not slot.parameter.requires_grad) for slot in slots)


async def test_b05_everything_frozen_is_a_clear_error(pool: DevicePool) -> None:
    module = CASES[0].build().requires_grad_(False)
    async with RoundPipe(module, devices=pool) as model:
        data, label = CASES[0].data(6)
        with pytest.raises((ValueError, RuntimeError), match="grad"):
            await model.forward_backward((data,), label=label, loss_fn=F.cross_entropy)


async def test_b05_unfreezing_and_freezing_between_steps(pool: DevicePool) -> None:
    torch.manual_seed(2)
    module = CASES[0].build()
    _freeze(module, "first layer")
    reference = twin(module)
    async with RoundPipe(module, devices=pool) as model:
        with OptimizerCtx():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1)
        for step in range(9):
            if step == 3:
                module[0].requires_grad_(True)
                reference[0].requires_grad_(True)
                copies = dict(model.optim_named_parameters())
                optimizer.add_param_group({"params": [copies["0.weight"], copies["0.bias"]]})
                plain.add_param_group({"params": list(reference[0].parameters())})
            if step == 6:
                module[0].requires_grad_(False)
                reference[0].requires_grad_(False)
            await train_once(model, reference)
            assert_same_gradients(module, reference)
            await model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            plain.step()
            plain.zero_grad()
            assert_same_state(module, reference)


async def test_b05_unfrozen_without_telling_the_optimizer_names_the_parameters(pool: DevicePool) -> None:
    module = CASES[0].build()
    _freeze(module, "first layer")
    async with RoundPipe(module, devices=pool) as model:
        with OptimizerCtx():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        module[0].requires_grad_(True)
        await train_once(model, twin(module))
        with pytest.raises(ValueError, match=r"0\.weight, 0\.bias"):
            await model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)


# ---- what was built when ----


@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
async def test_b07_an_optimizer_over_the_models_own_parameters_raises_at_the_first_step(
    when: str, pool: DevicePool
) -> None:
    module = CASES[0].build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    async with RoundPipe(module, devices=pool) as model:
        if when == "after wrapping":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = {name: value.clone() for name, value in module.state_dict().items()}
        await train_once(model, twin(module))
        with pytest.raises(ValueError, match=r"0\.weight, 0\.bias.*OptimizerCtx"):
            await model.step(optimizer.step, is_async=False)
        for name, value in module.state_dict().items():
            assert torch.equal(value, before[name])


async def test_b07_groups_with_their_own_rates_and_an_optimizer_made_after_inference(pool: DevicePool) -> None:
    torch.manual_seed(3)
    module = CASES[0].build()
    reference = twin(module)
    async with RoundPipe(module, devices=pool) as model:
        with torch.no_grad():
            call = model(CASES[0].data(4)[0])
        await call
        copies = dict(model.optim_named_parameters())
        still = [p for name, p in copies.items() if name.startswith("0")]
        moving = [p for name, p in copies.items() if not name.startswith("0")]
        optimizer = torch.optim.SGD([{"params": still, "lr": 0.0}, {"params": moving, "lr": 1.0}])
        plain = torch.optim.SGD(
            [{"params": reference[0].parameters(), "lr": 0.0}, {"params": reference[1:].parameters(), "lr": 1.0}]
        )
        for _ in range(3):
            await train_once(model, reference)
            await model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            plain.step()
            plain.zero_grad()
            assert_same_state(module, reference)


# ---- learning rates ----

SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 0.5**k),
    "MultiplicativeLR": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda k: 0.9),
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("make_optimizer", [optim.AdamW, torch.optim.SGD], ids=["ours", "torch's"])
@pytest.mark.parametrize("name", SCHEDULERS)
async def test_b06_every_scheduler_may_step_while_a_step_is_in_flight(
    name: str, make_optimizer: Any, pool: DevicePool
) -> None:
    module = nn.Sequential(nn.Linear(3, 3))
    plain = make_optimizer(nn.Linear(3, 3).parameters(), lr=0.1)
    used, expected = [], []
    async with RoundPipe(module, devices=pool) as model:
        with OptimizerCtx():
            optimizer = make_optimizer(model.parameters(), lr=0.1)
        scheduler, plain_scheduler = SCHEDULERS[name](optimizer), SCHEDULERS[name](plain)
        # What the step itself sees: the group that torch's step reads from.
        optimizer.register_step_pre_hook(lambda _, args, kwargs: used.append(args[0].param_groups[0]["lr"]))
        for _ in range(5):
            gate = threading.Event()
            await model.forward_backward((torch.randn(4, 3),), loss_fn=lambda out, _: out.square().sum())
            handle = await model.step(lambda gate=gate: (gate.wait(), optimizer.step(), optimizer.zero_grad()))
            scheduler.step()  # no warning that it came before the step, either
            gate.set()
            await handle
            expected.append(plain.param_groups[0]["lr"])
            plain.step()
            plain_scheduler.step()
            assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert used == expected


async def test_b06_the_rate_of_the_moment_of_submission_is_the_one_used(pool: DevicePool) -> None:
    module = nn.Sequential(nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        module[0].weight.fill_(0.0)
    async with RoundPipe(module, devices=pool) as model:
        with OptimizerCtx():
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        weight, expected = next(iter(model.optim_parameters())), 0.0
        for k in range(4):
            gate = threading.Event()
            await model.forward_backward((torch.ones(2, 1),), loss_fn=lambda out, _: out.sum())
            handle = await model.step(lambda gate=gate: (gate.wait(), optimizer.step(), optimizer.zero_grad()))
            scheduler.step()
            gate.set()
            await handle
            expected -= 2 * 0.5**k
            assert weight.item() == expected
        await model.synchronize()
        assert module[0].weight.item() == expected


# ---- changes made by the user ----


async def test_parameters_that_the_user_loads_or_changes_are_trained_from(pool: DevicePool) -> None:
    torch.manual_seed(5)
    module = CASES[0].build()
    other = CASES[0].build()
    reference = twin(module)
    async with RoundPipe(module, optim_dtype=torch.float64, devices=pool) as model:
        with OptimizerCtx():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        async def step() -> None:
            await train_once(model, reference)
            await model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            reference.zero_grad()
            assert_same_state(module, reference)

        await step()
        module.load_state_dict(other.state_dict())
        reference.load_state_dict(other.state_dict())
        await step()
        with torch.no_grad():
            module[0].weight.mul_(0.5)
            reference[0].weight.mul_(0.5)
        await step()
        for which in (module, reference):
            which[2][0].weight.data = torch.ones_like(which[2][0].weight)
        await step()
        for which in (module, reference):
            which.load_state_dict({name: value + 1 for name, value in other.state_dict().items()}, assign=True)
        await step()


async def test_the_wrapper_reads_writes_and_deletes_the_modules_attributes(pool: DevicePool) -> None:
    module = CASES[0].build()
    model = RoundPipe(module, devices=pool)
    model.flag = 3
    assert module.flag == 3 and model.flag == 3  # type: ignore[attr-defined]
    del model.flag
    assert not hasattr(module, "flag") and not hasattr(model, "flag")
    assert model.eval() is model and not module.training
    assert model.state_dict().keys() == module.state_dict().keys()
    original = nn.Linear(1, 1)
    original.config = "config"  # type: ignore[assignment]
    model.set_original_model(original)
    assert model.config == "config"
    await model.aclose()


async def test_parameters_have_the_original_models_names_where_it_holds_them(pool: DevicePool) -> None:
    original = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    async with RoundPipe(nn.Sequential(original["first"], original["second"]), devices=pool) as model:
        assert next(name for name, _ in model.optim_named_parameters()) == "0.weight"
        model.set_original_model(original)
        names = [name for name, _ in original.named_parameters()]
        assert [name for name, _ in model.optim_named_parameters()] == names
        assert [name for name, _ in model.named_parameters()] == names
        model.set_original_model(nn.Linear(1, 1))
        assert next(name for name, _ in model.named_parameters()) == "0.weight"


async def test_being_inside_the_optimizers_context_is_inherited_by_nobody(pool: DevicePool) -> None:
    """Tasks, threads and the engine's workers get a copy of the context of who started them, and are not inside."""
    module = CASES[0].build()
    async with RoundPipe(module, devices=pool) as model:
        copies = {id(copy) for copy in model.optim_parameters()}

        def inside() -> bool:
            return id(next(iter(model.parameters()))) in copies

        async def task() -> bool:
            return inside()

        seen: list[bool] = []

        def loss_fn(out: torch.Tensor, label: Any) -> torch.Tensor:
            seen.append(inside())
            return out.square().sum()

        data, _ = CASES[0].data(3)
        with OptimizerCtx():
            assert inside()
            seen.append(await asyncio.create_task(task()))
            seen.append(await asyncio.to_thread(inside))
            await model.forward_backward((data,), loss_fn=loss_fn)
            assert inside()
        assert seen == [False] * 5 and not inside()


async def test_what_a_step_function_starts_in_the_loop_is_no_part_of_the_step(pool: DevicePool) -> None:
    """A progress report, say: it is scheduled with a copy of the step's context, and outlives the step."""
    module = CASES[0].build()
    loop = asyncio.get_running_loop()
    scaler = GradScaler(init_scale=8.0)
    async with RoundPipe(module, devices=pool) as model:
        own = {id(parameter) for parameter in module.parameters()}

        async def report() -> bool:
            outside = all(id(parameter) in own for parameter in model.parameters())
            await scaler.synchronize()  # waits for steps: refused in a step function
            return outside

        def step_fn() -> Any:
            assert not any(id(parameter) in own for parameter in model.parameters())
            return asyncio.run_coroutine_threadsafe(report(), loop)

        reported = await model.step(step_fn, is_async=False)
        assert await asyncio.wrap_future(reported)


async def test_an_output_device_that_does_not_exist_is_told_before_anything_runs(pool: DevicePool) -> None:
    calls: list[int] = []
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_forward_hook(lambda *_: calls.append(1))
    async with RoundPipe(module, devices=pool) as model:
        config = RoundPipeRunConfig(output_device="cuda:99")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="output_device='cuda:99'"):
            await model(torch.ones(2, 2), roundpipe_run_config=config)
    assert not calls
