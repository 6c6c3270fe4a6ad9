"""Grad mode, autocast, inference mode, context variables, train and eval: read at the call, entered where it works."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import roundpipe_async
from roundpipe_async import DevicePool, OptimizerCtx, RoundPipe, RoundPipeRunConfig, doing_recompute
from tests.support.plain import CASES, assert_same_gradients, assert_same_state, plain_forward_backward, twin
from tests.support.plans import PLANS, plan_of

WIDTH = 8
Context = Callable[[], AbstractContextManager[Any]]


@pytest.fixture
async def pool() -> AsyncIterator[DevicePool]:
    async with DevicePool.cpu(2, 1) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Any:
    yield
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not torch.is_autocast_enabled("cpu")


def bf16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def no_bf16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", enabled=False)


class Noting(nn.Module):
    """A linear layer inside `context`, with a note of the modes that it ran in, and of what came of it."""

    def __init__(self, context: Context = nullcontext) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.context = context
        self.notes: list[tuple[Any, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            if not torch.is_autocast_enabled("cpu"):
                x = x.float()
            out: Tensor = self.linear(x).tanh()
            around = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
            self.notes.append((doing_recompute(), torch.is_grad_enabled(), around, out.dtype))
        return out


def noting(*contexts: Context) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Noting(context) for context in contexts))


def squares(out: Tensor, _: Any) -> Tensor:
    return out.float().square().sum()


def plainly(module: nn.Module, data: Tensor, count: int, around: Context, loss_fn: Any = squares) -> Tensor:
    """Each microbatch's forward and loss inside `around`, its backward outside, as torch recommends."""
    total: Any = 0
    for part in data.tensor_split(count):
        with around():
            loss = loss_fn(module(part), None)
        loss.backward()
        total = total + loss.detach()
    return total


# ---- autocast -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("around", [bf16, nullcontext, lambda: torch.autocast("cpu", torch.float16)])
async def test_c09_autocast_is_that_of_the_caller_in_forward_recompute_and_loss(
    around: Context, plan: str, grain: Any, pool: DevicePool
) -> None:
    """One layer without a context of its own, one that enters autocast, one that leaves it, one without again."""
    module = noting(nullcontext, bf16, no_bf16, nullcontext)
    reference = twin(module)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan_of(plan, 4), recompute_grain=grain)
    in_loss: list[bool] = []

    def loss_fn(out: Tensor, _: Any) -> Tensor:
        in_loss.append(torch.is_autocast_enabled("cpu"))
        return squares(out @ out.T, None)

    async with RoundPipe(module, devices=pool, model_run_config=config) as model:
        for _ in range(2):
            data = torch.randn(6, WIDTH)
            with around():
                loss = await model.forward_backward((data,), loss_fn=loss_fn)
                outside = torch.is_autocast_enabled("cpu")
            assert in_loss == [outside] * 3
            assert torch.equal(loss, plainly(reference, data, 3, around, loss_fn))
            assert_same_gradients(module, reference)
            in_loss.clear()
    for mine, plain in zip(module, reference, strict=True):
        assert {note[1:] for note in mine.notes} == {note[1:] for note in plain.notes}
    assert {note[0] for note in module[0].notes} == ({False} if plan == "fused" else {False, True})


async def test_c09_autocast_around_the_loss_function_alone(pool: DevicePool) -> None:
    def loss_fn(out: Tensor, _: Any) -> Tensor:
        with bf16():
            return squares(out @ out.T, None)

    module = noting(nullcontext, nullcontext)
    reference = twin(module)
    async with RoundPipe(module, devices=pool) as model:
        data = torch.randn(6, WIDTH)
        loss = await model.forward_backward((data,), loss_fn=loss_fn)
        assert torch.equal(loss, plainly(reference, data, 3, nullcontext, loss_fn))
        assert_same_gradients(module, reference)


async def test_c09_what_counts_is_where_the_call_is_made_not_where_it_is_awaited(pool: DevicePool) -> None:
    module = noting(nullcontext, nullcontext)
    async with RoundPipe(module, devices=pool) as model:
        data = torch.randn(6, WIDTH)
        plain = model(data)
        with bf16():
            cast = model(data)
            assert (await plain).dtype == torch.float32
        assert (await cast).dtype == torch.bfloat16


async def test_c09_calls_in_flight_together_keep_their_own_modes(pool: DevicePool) -> None:
    module, other = noting(nullcontext, nullcontext, nullcontext), noting(nullcontext, nullcontext)
    references = twin(module), twin(other)
    async with RoundPipe(module, devices=pool) as model, RoundPipe(other, devices=pool) as second:
        data = torch.randn(6, WIDTH)
        for _ in range(5):
            with bf16():
                calls = [model.forward_backward((data,), loss_fn=squares)]
            calls.append(second.forward_backward((data,), loss_fn=squares))
            with torch.no_grad():
                calls.append(second(data))
            losses = await asyncio.gather(*calls)
            assert torch.equal(losses[0], plainly(references[0], data, 3, bf16))
            assert torch.equal(losses[1], plainly(references[1], data, 3, nullcontext))
            assert losses[2].dtype == torch.float32 and not losses[2].requires_grad
            assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
        assert_same_gradients(module, references[0])
        assert_same_gradients(other, references[1])


async def test_c09_forward_with_a_graph_recomputes_under_the_autocast_of_its_own_call(pool: DevicePool) -> None:
    module = noting(nullcontext, nullcontext, nullcontext)
    reference = twin(module)
    async with RoundPipe(module, devices=pool, model_run_config=RoundPipeRunConfig(num_microbatch=1)) as model:
        data = torch.randn(4, WIDTH)
        with bf16():
            out = await model(data)
            expected = reference(data)
        assert torch.equal(out, expected) and out.dtype == torch.bfloat16
        await model.backward(squares(out, None))
        squares(expected, None).backward()
        assert_same_gradients(module, reference)


# ---- grad mode ------------------------------------------------------------------------------------------------------


async def test_grad_mode_is_read_at_the_call(pool: DevicePool) -> None:
    module = noting(nullcontext, nullcontext)
    async with RoundPipe(module, devices=pool) as model:
        data = torch.randn(4, WIDTH)
        with torch.no_grad():
            without = model(data)
        with_graph = model(data)
        with torch.no_grad():
            assert (await with_graph).requires_grad
            forced = model(data, roundpipe_run_config=RoundPipeRunConfig(requires_grad=True))
        assert not (await without).requires_grad
        assert (await forced).requires_grad
        with roundpipe_async.no_grad():
            inner = model(data)
            assert torch.is_grad_enabled()
        assert not (await inner).requires_grad
        never = RoundPipeRunConfig(requires_grad=False)
        assert not (await model(data, roundpipe_run_config=never)).requires_grad
        with pytest.raises(ValueError, match="needs no gradient"):
            await model.forward_backward((data,), loss_fn=squares, run_config=never)
        with roundpipe_async.no_grad(), pytest.raises(ValueError, match="needs no gradient"):
            await model.forward_backward((data,), loss_fn=squares)


async def test_a_layer_may_switch_grad_mode_on_in_inference(pool: DevicePool) -> None:
    """Forces, gradient penalties: a derivative inside a layer, by its parameter too, while the caller has it off."""

    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = (x * self.weight).sin().sum()
                by_x, by_weight = torch.autograd.grad(energy, (x, self.weight))
            return by_x + by_weight

    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Force(), nn.Linear(WIDTH, WIDTH))
    async with RoundPipe(module, devices=pool, model_run_config=RoundPipeRunConfig(num_microbatch=1)) as model:
        data = torch.randn(4, WIDTH)
        with torch.no_grad():
            assert torch.equal(await model(data), module(data))


# ---- evaluation beside training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, roundpipe_async.no_grad])
async def test_c10_evaluation_beside_training(mode: Any, pool: DevicePool) -> None:
    """The evaluating task holds its mode across awaits, and torch's modes then hold for the whole thread: training,
    whose batches are made under them, trains nevertheless, and exactly as it would alone."""
    torch.manual_seed(2)
    module = CASES[2].build()  # convolutions and batch norm
    reference = twin(module)
    data, label = CASES[2].data(6)
    seen = 0
    stop = False

    async def evaluate() -> None:
        nonlocal seen
        while not stop:
            with mode():
                out = await model(data)
            assert not out.requires_grad and out.is_inference() is (mode is torch.inference_mode)
            seen += 1
            await asyncio.sleep(0)

    async with RoundPipe(module, devices=pool) as model:
        with OptimizerCtx():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        model.eval()  # BatchNorm's statistics: evaluation in training mode would change them
        reference.eval()
        async with asyncio.TaskGroup() as group:
            group.create_task(evaluate())
            while seen < 12 or plain.state_dict()["state"] == {}:
                batch, target = data.clone(), label.clone()
                await model.forward_backward((batch,), label=target, loss_fn=F.cross_entropy)
                await model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
                with torch.inference_mode(False), torch.enable_grad():
                    plain_forward_backward(reference, data.clone(), label, F.cross_entropy, 3)
                    plain.step()
                    plain.zero_grad()
                    assert_same_state(module, reference)
            stop = True


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, roundpipe_async.no_grad])
async def test_c10_buffers_that_an_evaluation_changed_can_be_trained_with(mode: Any, pool: DevicePool) -> None:
    """Batch norm in training mode, without a graph: its statistics advance, and are no inference tensors afterwards."""
    torch.manual_seed(3)
    module = CASES[2].build()
    reference = twin(module)
    data, label = CASES[2].data(6)
    async with RoundPipe(module, devices=pool) as model:
        with mode():
            await model(data)
        with torch.no_grad():
            for part in data.tensor_split(3):
                reference(part)
        assert_same_state(module, reference)
        await model.forward_backward((data,), label=label, loss_fn=F.cross_entropy)
        plain_forward_backward(reference, data, label, F.cross_entropy, 3)
        assert_same_state(module, reference)
        assert_same_gradients(module, reference)
        assert not any(buffer.is_inference() for buffer in module.buffers())


async def test_c10_a_buffer_made_in_inference_mode_can_be_trained_with(pool: DevicePool) -> None:
    class Calibrates(nn.Module):
        scale: Tensor | None

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("scale", None)

        def forward(self, x: Tensor) -> Tensor:
            if self.scale is None:
                self.scale = x.abs().mean(0)
            out: Tensor = self.linear(x) * self.scale
            return out

    module = nn.Sequential(Calibrates(), Calibrates())
    async with RoundPipe(module, devices=pool) as model:
        data = torch.randn(6, WIDTH)
        with torch.inference_mode():
            await model(data)
        assert module[0].scale is not None and torch.equal(module[0].scale, data[:2].abs().mean(0))
        reference = twin(module)
        loss = await model.forward_backward((data,), loss_fn=squares)
        assert torch.equal(loss, plain_forward_backward(reference, data, None, squares, 3))
        assert_same_gradients(module, reference)


async def test_c10_inference_outputs_as_training_inputs(pool: DevicePool) -> None:
    """Features made in inference mode can be trained on: the engine copies what autograd could not save."""
    module = noting(nullcontext, nullcontext)
    reference = twin(module)
    async with RoundPipe(module, devices=pool) as model:
        with torch.inference_mode():
            features = torch.randn(6, WIDTH)
            label = torch.randint(0, WIDTH, (6,))
        loss = await model.forward_backward((features,), label=label, loss_fn=F.cross_entropy)
        expected = plain_forward_backward(reference, features.clone(), label.clone(), F.cross_entropy, 3)
        assert torch.equal(loss, expected)
        assert_same_gradients(module, reference)


# ---- context variables ----------------------------------------------------------------------------------------------

request_id: ContextVar[str] = ContextVar("request_id", default="nobody")


async def test_context_variables_of_the_caller_are_visible_wherever_its_code_runs(pool: DevicePool) -> None:
    seen: dict[str, set[str]] = {}

    def note(where: str) -> None:
        seen.setdefault(where, set()).add(request_id.get())

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            note("recompute" if doing_recompute() else "forward")
            request_id.set("a layer's own")  # stays in there
            out: Tensor = self.linear(x)
            out.register_hook(lambda gradient: note("tensor hook"))
            return out

    module = nn.Sequential(Reads(), Reads(), Reads())
    module[1].register_forward_hook(lambda *_: note("after the layer"))
    module[1].register_full_backward_hook(lambda *_: note("backward hook"))
    module[1].linear.weight.register_hook(lambda gradient: note("parameter hook"))
    module[0].linear.bias.register_post_accumulate_grad_hook(lambda parameter: note("accumulate hook"))

    def loss_fn(out: Tensor, _: Any) -> Tensor:
        note("loss_fn")
        return squares(out, None)

    def split(args: Any, kwargs: Any, count: int) -> Any:
        note("split_input")
        return [(part,) for part in args[0].tensor_split(count)], [{} for _ in range(count)]

    def merge(outputs: list[Tensor]) -> Tensor:
        note("merge_output")
        return torch.cat(outputs)

    config = RoundPipeRunConfig(num_microbatch=2, split_input=split, merge_output=merge)
    config = config.merged(RoundPipeRunConfig(execute_plan=plan_of("one_each", 3)))
    everywhere = {"split_input", "forward", "recompute", "loss_fn", "tensor hook", "backward hook", "parameter hook"}
    everywhere |= {"accumulate hook", "merge_output", "step_fn"}

    async with RoundPipe(module, devices=pool) as model:
        list(model.optim_parameters())

        async def train(name: str) -> None:
            request_id.set(name)
            await model.forward_backward(
                (torch.randn(4, WIDTH),), loss_fn=loss_fn, return_outputs=True, run_config=config
            )
            await model.step(lambda: note("step_fn"), is_async=False)
            assert request_id.get() == name

        await asyncio.create_task(train("one"))
        assert seen.pop("after the layer") == {"a layer's own"}  # set in the layer's own call, as in plain PyTorch
        assert set(seen) == everywhere and all(names == {"one"} for names in seen.values()), seen
        seen.clear()
        await asyncio.create_task(train("two"))
        assert all(names == {"two"} for where, names in seen.items() if where != "after the layer"), seen


# ---- train and eval -------------------------------------------------------------------------------------------------


class Gate(nn.Module):
    """Says that it was entered, and waits for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.opened = threading.Event(), threading.Event()

    def __deepcopy__(self, memo: Any) -> nn.Module:
        return nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.entered.set()
        assert self.opened.wait(60)
        return x


@pytest.mark.parametrize("training", [True, False])
async def test_train_and_eval_while_a_call_is_in_flight_do_not_matter_to_it(training: bool, pool: DevicePool) -> None:
    torch.manual_seed(4)
    gate = Gate()
    module = nn.Sequential(gate, nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(1.0), nn.Linear(WIDTH, 2))
    reference = twin(module).train(training)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan_of("one_each", 5))
    async with RoundPipe(module, devices=pool, model_run_config=config) as model:
        model.train(training)
        data = torch.randn(6, WIDTH)
        call = asyncio.create_task(model.forward_backward((data,), loss_fn=squares))
        await asyncio.to_thread(gate.entered.wait, 60)
        model.train(not training)
        gate.opened.set()
        loss = await call
        assert torch.equal(loss, plain_forward_backward(reference, data, None, squares, 2))
        assert_same_gradients(module, reference)
        assert_same_state(module, reference)
        assert module.training is not training
        await model.forward_backward((data,), loss_fn=squares)
        plain_forward_backward(reference.train(not training), data, None, squares, 2)
        assert_same_gradients(module, reference)
        assert_same_state(module, reference)
