"""Layers of every kind that PyTorch users write: on the engine they compute what they compute in plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from roundpipe_async import (
    DevicePool,
    ModelExecutePlan,
    RoundPipe,
    RoundPipeRunConfig,
    doing_recompute,
    get_recompute_data,
    save_for_recompute,
)
from tests.support.plain import assert_same_gradients, assert_same_state, plain_forward_backward, twin
from tests.support.plans import PLANS, plan_of

WIDTH = 6


@pytest.fixture
async def pool() -> AsyncIterator[DevicePool]:
    async with DevicePool.cpu(2, 1) as pool:
        yield pool


def squares(out: Tensor, _: Any) -> Tensor:
    return (out * out).sum()


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


# ---- the layers -----------------------------------------------------------------------------------------------------


class First(nn.Module):
    """The output of a recurrent layer, without its state."""

    def forward(self, value: tuple[Tensor, Any]) -> Tensor:
        return value[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        attended, weights = self.inner(x, x, x)
        return x + attended * weights.mean()


class HiddenReferences(nn.Module):
    """Submodules and bound methods kept where `nn.Module` does not look for them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.scale = linear(), linear(), nn.Parameter(torch.rand(WIDTH))
        self.steps = [self.one, (self.two,)]
        self.by_name = {"one": self.one, "scale": self.scale}
        self.activate = self._activate

    def _activate(self, x: Tensor) -> Tensor:
        return x.tanh() * self.scale

    def forward(self, x: Tensor) -> Tensor:
        x = self.activate(self.steps[0](x))
        return self.steps[1][0](x) + self.by_name["one"](x) * self.by_name["scale"]


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ModuleList([linear(), nn.Tanh(), linear()])
        self.named = nn.ModuleDict({"gate": linear(), "value": linear()})
        self.scales = nn.ParameterList([torch.rand(WIDTH), torch.rand(WIDTH)])
        self.shifts = nn.ParameterDict({"a": torch.rand(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for module, scale in zip(self.many, [*self.scales, 1.0], strict=True):
            x = module(x) * scale
        return self.named["gate"](x).sigmoid() * self.named["value"](x) + self.shifts["a"]


class Turned(nn.Module):
    """Works on the input turned over: the gradient that it passes back has other strides than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1)  # type: ignore[no-any-return]


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class PassesNoGradient(nn.Module):
    """Its backward gives no gradient at all, which is not one of zeros: parameters before it get none."""

    def forward(self, x: Tensor) -> Tensor:
        return _NoGradient.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Constant(nn.Module):
    """Its output does not depend on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.expand(len(x), WIDTH) * 2


class Unused(nn.Module):
    """Hands on its input, and has a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x


class AddInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1.0).sin_()


class WithSkip(nn.Module):
    """Hands its input on beside what it makes of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x * 2


class SpoilSkip(nn.Module):
    """Changes one of two inputs in place: one that an earlier layer only handed on."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        skip, x = pair
        return skip.mul_(3.0).cos() + x


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(linear(), nn.Dropout(0.5), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant and not x.requires_grad:
            x = x.detach().requires_grad_()
        result: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return result


@dataclass(frozen=True)
class Kind:
    name: str
    build: Callable[[], nn.Sequential]
    shape: tuple[int, ...] = (WIDTH,)


def _shared() -> nn.Sequential:
    twice, act = linear(), nn.Tanh()
    return nn.Sequential(linear(), act, twice, act, linear(), act, twice)


def _frozen_but_the_middle() -> nn.Sequential:
    model = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh(), linear(), linear())
    model.requires_grad_(False)
    model[2].requires_grad_(True)
    return model


SEQUENCE = (4, WIDTH)
KINDS = (
    Kind(
        "lstm",
        lambda: nn.Sequential(linear(), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), First(), linear()),
        SEQUENCE,
    ),
    Kind(
        "gru",
        lambda: nn.Sequential(
            nn.GRU(WIDTH, 3, batch_first=True, bidirectional=True),
            First(),
            nn.GRU(WIDTH, WIDTH, batch_first=True),
            First(),
        ),
        SEQUENCE,
    ),
    Kind("attention", lambda: nn.Sequential(linear(), Attention(), Attention(), linear()), SEQUENCE),
    Kind(
        "encoder_layer",
        lambda: nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True) for _ in range(3))),
        SEQUENCE,
    ),
    Kind(
        "parametrizations",
        lambda: nn.Sequential(
            parametrizations.weight_norm(linear()),
            parametrizations.spectral_norm(linear()),
            parametrizations.orthogonal(linear()),
            parametrizations.spectral_norm(parametrizations.weight_norm(linear())),
        ),
    ),
    Kind(
        "norms_by_hooks",
        lambda: nn.Sequential(linear(), nn.utils.spectral_norm(linear()), nn.utils.spectral_norm(linear()), linear()),
    ),
    Kind("hidden_references", lambda: nn.Sequential(linear(), HiddenReferences(), HiddenReferences(), linear())),
    Kind("containers", lambda: nn.Sequential(Containers(), Containers(), linear())),
    Kind("strides_of_gradients", lambda: nn.Sequential(Turned(), linear(), Turned(), linear(), nn.Tanh()), (3, WIDTH)),
    Kind("gives_no_gradient", lambda: nn.Sequential(linear(), linear(), PassesNoGradient(), linear(), linear())),
    Kind("constant", lambda: nn.Sequential(linear(), nn.Tanh(), Constant(), linear(), linear())),
    Kind("returns_its_input", lambda: nn.Sequential(nn.Identity(), linear(), Unused(), Unused(), linear(), Unused())),
    Kind("frozen_but_the_middle", _frozen_but_the_middle),
    Kind("shared_modules", _shared),
    Kind("in_place", lambda: nn.Sequential(linear(), nn.ReLU(True), linear(), AddInPlace(), linear(), nn.SiLU(True))),
    Kind("in_place_on_a_view", lambda: nn.Sequential(linear(), nn.Flatten(), AddInPlace(), nn.Flatten(), linear())),
    Kind(
        "in_place_on_what_was_handed_on",
        lambda: nn.Sequential(linear(), nn.Identity(), Unused(), AddInPlace(), nn.Identity(), AddInPlace(), linear()),
    ),
    Kind("in_place_on_a_skip", lambda: nn.Sequential(linear(), WithSkip(), nn.Identity(), SpoilSkip(), linear())),
    Kind("in_place_last", lambda: nn.Sequential(linear(), nn.Identity(), linear(), AddInPlace(), nn.Identity())),
)


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_gradients_and_state_are_plain_pytorchs(kind: Kind, plan: str, grain: Any, pool: DevicePool) -> None:
    torch.manual_seed(0)
    module = kind.build()
    reference = twin(module)
    config = RoundPipeRunConfig(num_microbatch=3, recompute_grain=grain, execute_plan=plan_of(plan, len(module)))
    async with RoundPipe(module, devices=pool, model_run_config=config) as model:
        for rows in (7, 3, 6):
            data = torch.randn(rows, *kind.shape)
            loss = await model.forward_backward((data.clone(),), loss_fn=squares)
            assert torch.equal(loss, plain_forward_backward(reference, data.clone(), None, squares, 3))
            assert_same_gradients(module, reference)
            assert_same_state(module, reference)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_evaluation_is_plain_pytorchs(kind: Kind, pool: DevicePool) -> None:
    """`eval` and no graph: torch takes other ways there (fast paths of attention, fixed power iterations)."""
    torch.manual_seed(1)
    module = kind.build()
    reference = twin(module).eval()
    async with RoundPipe(module, devices=pool, model_run_config=RoundPipeRunConfig(num_microbatch=2)) as model:
        model.eval()
        data = torch.randn(5, *kind.shape)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                call = model(data.clone())
                expected = torch.cat([reference(part) for part in data.clone().tensor_split(2)])
            out = await call
            assert torch.equal(out, expected) and not out.requires_grad
            assert out.is_inference() is expected.is_inference()
        assert_same_state(module, reference)


# ---- randomness inside ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
async def test_a_checkpoint_with_dropout_inside_a_layer_draws_the_same_again(reentrant: bool, pool: DevicePool) -> None:
    """Recompute by the engine, and in it recompute by torch: the gradients are those without the former."""
    results = []
    for plan in PLANS:
        torch.manual_seed(2)
        module = nn.Sequential(linear(), Checkpointed(reentrant), Checkpointed(reentrant), linear())
        config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan_of(plan, 4))
        async with RoundPipe(module, devices=pool, model_run_config=config) as model:
            await model.forward_backward((torch.ones(6, WIDTH),), loss_fn=squares)
        results.append([parameter.grad for parameter in module.parameters()])
    for other in results[:-1]:
        for a, b in zip(other, results[-1], strict=True):
            assert a is not None and b is not None and torch.equal(a, b)


async def test_draws_made_in_backward_are_those_of_the_layer_and_microbatch() -> None:
    """Stochastic rounding, noisy gradients: a generator's state in backward depends on no order of execution."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x) + torch.rand(WIDTH)
            if out.requires_grad:
                out.register_hook(lambda gradient: gradient * torch.rand_like(gradient))
            return out

    results = []
    for plan, devices in itertools.product(PLANS, (1, 3)):
        torch.manual_seed(11)
        module = nn.Sequential(Noisy(), Noisy(), linear(), Noisy())
        config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan_of(plan, 4))
        async with DevicePool.cpu(devices, 1) as pool, RoundPipe(module, devices=pool) as model:
            await model.forward_backward((torch.ones(6, WIDTH),), loss_fn=squares, run_config=config)
        results.append([parameter.grad for parameter in module.parameters()])
    for other in results[:-1]:
        for a, b in zip(other, results[-1], strict=True):
            assert a is not None and b is not None and torch.equal(a, b)


async def test_dropout_in_recurrent_and_attention_layers_draws_the_same_again(pool: DevicePool) -> None:
    results = []
    for plan in PLANS:
        torch.manual_seed(3)
        module = nn.Sequential(
            nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.5),
            First(),
            nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.3, batch_first=True),
            linear(),
        )
        config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan_of(plan, 4))
        async with RoundPipe(module, devices=pool, model_run_config=config) as model:
            await model.forward_backward((torch.ones(4, *SEQUENCE),), loss_fn=squares)
        results.append([parameter.grad for parameter in module.parameters()])
    for other in results[:-1]:
        for a, b in zip(other, results[-1], strict=True):
            assert a is not None and b is not None and torch.equal(a, b)


# ---- hooks ----------------------------------------------------------------------------------------------------------


def _hooked(module: nn.Sequential) -> None:
    inner = module[2][0]
    module[0].register_forward_pre_hook(lambda layer, args: (args[0] * 0.5,))
    module[1].register_forward_hook(lambda layer, args, out: out + args[0])
    module[3].register_forward_hook(lambda layer, args, kwargs, out: out * 2, with_kwargs=True)
    module[1].register_full_backward_hook(lambda layer, grads_in, grads_out: (grads_in[0] * grads_out[0],))
    module[3].register_full_backward_hook(lambda layer, grads_in, grads_out: (grads_in[0].clamp(-0.1, 0.1),))
    inner.register_full_backward_pre_hook(lambda layer, grads_out: (grads_out[0] * 3,))
    inner.weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    module[4].bias.register_hook(lambda gradient: None)


@pytest.mark.parametrize("plan", PLANS)
async def test_hooks_of_modules_and_parameters_do_what_they_do_in_plain_pytorch(plan: str, pool: DevicePool) -> None:
    torch.manual_seed(4)
    module = nn.Sequential(linear(), nn.Tanh(), nn.Sequential(linear(), nn.Tanh()), linear(), linear())
    reference = twin(module)
    _hooked(module)
    _hooked(reference)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan_of(plan, len(module)))
    async with RoundPipe(module, devices=pool, model_run_config=config) as model:
        for _ in range(2):
            data = torch.randn(6, WIDTH)
            loss = await model.forward_backward((data,), loss_fn=squares)
            assert torch.equal(loss, plain_forward_backward(reference, data, None, squares, 3))
            assert_same_gradients(module, reference)


async def test_hooks_that_could_not_run_are_refused(pool: DevicePool) -> None:
    """Those of the Sequential itself, which nobody calls; a module that is one layer has hooks like any layer."""
    module, calls = nn.Sequential(linear(), linear()), []
    one = nn.LSTM(WIDTH, WIDTH)
    one.register_forward_hook(lambda *_: calls.append("called"))
    async with RoundPipe(module, devices=pool) as model, RoundPipe(one, devices=pool) as second:
        data = torch.randn(2, WIDTH)
        await model(data)
        handle = model.register_forward_hook(lambda *_: None)
        with pytest.raises(RuntimeError, match="hooks are registered on the Sequential itself"):
            await model(data)
        with pytest.raises(RuntimeError, match="Register them on its layers"):
            await model.forward_backward((data,), loss_fn=squares)
        handle.remove()
        await model.forward_backward((data,), loss_fn=squares)
        with torch.no_grad():
            await second(data, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
        assert calls == ["called"]


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@pytest.mark.parametrize("plan", PLANS)
async def test_a_hook_of_a_shared_parameter_sees_the_sum_of_its_gradients(plan: str, pool: DevicePool) -> None:
    """In plain PyTorch the hook runs once a backward, on what all uses of the parameter add up to."""
    torch.manual_seed(5)
    twice = linear()
    module = nn.Sequential(linear(), twice, nn.Tanh(), twice, nn.Tanh(), linear(), twice)
    reference = twin(module)
    for one in (module, reference):
        one[1].weight.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
        one[1].bias.register_hook(lambda gradient: gradient * gradient)
        one[1].bias.register_post_accumulate_grad_hook(_halve)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan_of(plan, len(module)))
    async with RoundPipe(module, devices=pool, model_run_config=config) as model:
        for _ in range(2):
            data = torch.randn(4, WIDTH)
            loss = await model.forward_backward((data,), loss_fn=squares)
            assert torch.equal(loss, plain_forward_backward(reference, data, None, squares, 2))
            assert_same_gradients(module, reference)


@pytest.mark.parametrize("plan", PLANS)
async def test_a_post_accumulate_hook_runs_with_the_gradient_so_far(plan: str, pool: DevicePool) -> None:
    torch.manual_seed(6)
    module = nn.Sequential(linear(), nn.Tanh(), linear(), linear())
    reference = twin(module)

    for one in (module, reference):
        one[0].weight.register_post_accumulate_grad_hook(_halve)
        one[3].weight.register_post_accumulate_grad_hook(_halve)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan_of(plan, len(module)))
    async with RoundPipe(module, devices=pool, model_run_config=config) as model:
        for _ in range(2):
            data = torch.randn(6, WIDTH)
            await model.forward_backward((data,), loss_fn=squares)
            plain_forward_backward(reference, data, None, squares, 3)
            assert_same_gradients(module, reference)


async def test_outputs_changed_in_place_before_backward_spoil_no_recompute(pool: DevicePool) -> None:
    """In plain PyTorch autograd refuses; here the user owns what the call gave, also where it is a layer's input."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(WIDTH))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x * x * self.weight

    torch.manual_seed(12)
    module = nn.Sequential(linear(), nn.Tanh(), Beside())
    reference = twin(module)
    whole = ModelExecutePlan([range(2), range(2, 3)], [range(2, 3), range(2)])
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=whole)
    async with RoundPipe(module, devices=pool, model_run_config=config) as model:
        for _ in range(2):
            data = torch.randn(4, WIDTH)
            first, second = await model(data)
            with torch.no_grad():
                first.zero_()
            await model.backward(second.sum())
            reference(data)[1].sum().backward()
            assert_same_gradients(module, reference)


async def test_inputs_changed_in_place_before_backward_are_told(pool: DevicePool) -> None:
    """As in plain PyTorch: a loader that refills one tensor must not turn into wrong gradients."""

    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    torch.manual_seed(14)
    module = nn.Sequential(Square(), linear(), Square(), linear())
    reference = twin(module)
    async with RoundPipe(module, devices=pool, model_run_config=RoundPipeRunConfig(num_microbatch=2)) as model:
        data, mine = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
        for _ in range(2):
            out = await model(data)
            data.normal_()
            with pytest.raises(RuntimeError, match="input of the forward call was changed in place"):
                await model.backward(out.sum())
            out = await model(mine)
            await model.backward(out.sum())
            mine.normal_()  # afterwards it is free
        assert all(parameter.grad is not None for parameter in module.parameters())
        module.zero_grad()
        await model.backward((await model(data)).sum())
        for part in data.tensor_split(2):
            reference(part).sum().backward()
        assert_same_gradients(module, reference)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("view", [False, True])
async def test_a_layer_that_gives_its_parameter_is_safe_from_layers_that_work_in_place(
    view: bool, plan: str, pool: DevicePool
) -> None:
    """Plain PyTorch refuses to change a leaf in place; cut from its graph it is none, and must not be reached."""

    class Gives(nn.Module):
        copies = False

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(2, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            given = self.weight[1:] if view else self.weight
            return given.clone() if self.copies else given

    torch.manual_seed(13)
    module = nn.Sequential(linear(), Gives(), AddInPlace(), linear(), linear())
    reference = twin(module)
    reference[1].copies = True
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan_of(plan, len(module)))
    async with RoundPipe(module, devices=pool, model_run_config=config) as model:
        for _ in range(2):
            data = torch.randn(4, WIDTH)
            loss = await model.forward_backward((data,), loss_fn=squares)
            assert torch.equal(loss, plain_forward_backward(reference, data, None, squares, 2))
            assert_same_gradients(module, reference)
            assert_same_state(module, reference)
        with torch.no_grad():
            await model(data, roundpipe_run_config=RoundPipeRunConfig(execute_plan=ModelExecutePlan([range(5)], [])))
        assert_same_state(module, reference)


async def test_buffers_that_two_layers_share_and_change_are_refused(pool: DevicePool) -> None:
    """Plain PyTorch goes through both layers with one microbatch before the next: stages cannot. Constants are fine."""
    torch.manual_seed(10)
    norm = nn.BatchNorm1d(WIDTH)
    module = nn.Sequential(norm, linear(), nn.Tanh(), norm, linear())
    reference = twin(module)
    async with RoundPipe(module, devices=pool) as model:
        data = torch.randn(6, WIDTH)
        with pytest.raises(RuntimeError, match="layers 0 and 3 share the buffer 'running_mean' of a BatchNorm1d"):
            await model.forward_backward((data,), loss_fn=squares)
        assert_same_gradients(module, reference)
        assert_same_state(module, reference)
        model.eval()
        reference.eval()
        await model.forward_backward((data,), loss_fn=squares)
        plain_forward_backward(reference, data, None, squares, 3)
        assert_same_gradients(module, reference)


# ---- shapes of a model ----------------------------------------------------------------------------------------------


async def test_a_sequential_with_a_forward_of_its_own_is_one_layer(pool: DevicePool) -> None:
    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    torch.manual_seed(7)
    module = Residual(linear(), nn.Tanh(), linear())
    reference = twin(module)
    async with RoundPipe(module, devices=pool) as model:
        data = torch.randn(6, WIDTH)
        loss = await model.forward_backward((data,), loss_fn=squares)
        assert torch.equal(loss, plain_forward_backward(reference, data, None, squares, 3))
        assert_same_gradients(module, reference)


async def test_a_layer_that_begins_to_change_its_input_is_told_once_and_then_served(pool: DevicePool) -> None:
    """What recompute needs is lost by then; training and evaluation are told apart, so dropout is no such layer."""

    class Moody(nn.Module):
        spoils = False

        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1.0) if self.spoils else x + 1.0

    torch.manual_seed(8)
    module = nn.Sequential(linear(), Moody(), nn.Dropout(0.0, inplace=True), linear())
    reference = twin(module)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan_of("one_each", 4))
    whole = RoundPipeRunConfig(execute_plan=ModelExecutePlan([range(4)], [range(4)]))
    async with RoundPipe(module, devices=pool, model_run_config=config) as model:
        data = torch.randn(4, WIDTH)
        model.eval()
        await model.backward((await model(data, roundpipe_run_config=whole)).sum())
        model.train()
        module.zero_grad()
        await model.forward_backward((data,), loss_fn=squares)  # the dropout begins to work in place: no error
        module.zero_grad()
        module[1].spoils = True
        with pytest.raises(RuntimeError, match="changed its input in place"):
            await model.forward_backward((data,), loss_fn=squares)
        await model.forward_backward((data,), loss_fn=squares)
        plain_forward_backward(reference, data, None, squares, 2)
        assert_same_gradients(module, reference)


# ---- data kept for recompute ----------------------------------------------------------------------------------------


class Chooses(nn.Module):
    """Finds the large entries once, with a note of every time that it is called."""

    def __init__(self, seen: list[tuple[bool, int]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        recompute = doing_recompute()
        self.seen.append((recompute, len(x)))
        if recompute:
            mask, note = get_recompute_data()
            (rows,) = get_recompute_data()
            assert note == "note" and rows == len(x)
        else:
            mask = (x > 0.1).float()
            save_for_recompute(mask, "note")
            save_for_recompute(len(x))
        return x * mask * self.weight


@pytest.mark.parametrize("grain", ["stage", "layer"])
async def test_what_a_layer_saves_comes_back_in_recompute(grain: Any, pool: DevicePool) -> None:
    torch.manual_seed(9)
    seen: list[tuple[bool, int]] = []
    module = nn.Sequential(Chooses(seen), linear(), Chooses(seen), linear(), Chooses(seen))
    reference = nn.Sequential(*(twin(layer) for layer in module))
    for rows, plan, recomputed in ((7, "one_each", 2), (5, "two_stages", 2), (6, "fused", 0)):
        config = RoundPipeRunConfig(num_microbatch=3, recompute_grain=grain, execute_plan=plan_of(plan, 5))
        async with RoundPipe(module, devices=pool, model_run_config=config) as model:
            data = torch.randn(rows, WIDTH)
            seen.clear()
            loss = await model.forward_backward((data,), loss_fn=squares)
            assert sum(again for again, _ in seen) == recomputed * 3
            assert sum(not again for again, _ in seen) == 3 * 3
            assert sum(n for again, n in seen if not again) == rows * 3
            assert torch.equal(loss, plain_forward_backward(reference, data, None, squares, 3))
            assert_same_gradients(module, reference)
            seen.clear()
            whole = RoundPipeRunConfig(execute_plan=ModelExecutePlan([range(5)], [range(3, 5), range(3)]))
            out = await model(data, roundpipe_run_config=whole)  # with a graph: every layer will be recomputed
            await model.backward(squares(out, None))
            assert sum(again for again, _ in seen) == 3 * 3
            squares(torch.cat([reference(part) for part in data.tensor_split(3)]), None).backward()
            for a, b in zip(module.parameters(), reference.parameters(), strict=True):
                assert torch.allclose(a.grad, b.grad, rtol=1e-5)
                b.grad = a.grad.clone()  # plain PyTorch walks all microbatches at once: another order of the sums
