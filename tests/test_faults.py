"""B01, B14, B16: what raises reaches its caller as itself, once, with a note; nothing of the failed call stays."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from roundpipe_async import runs
from roundpipe_async.config import RoundPipeRunConfig
from roundpipe_async.devices.pool import DevicePool
from roundpipe_async.errors import PlanError, StepError
from roundpipe_async.model import RoundPipe
from roundpipe_async.optimizer import OptimizerCtx
from roundpipe_async.scheduling.plan import ModelExecutePlan
from roundpipe_async.versions import Parameters
from tests.support.aftermath import Snapshot, assert_idle, assert_no_tasks, quiet
from tests.support.faults import CONFIG, FORWARD, MICROBATCHES, Faults, batch, faulty_model, loss_of


@pytest.fixture(scope="module", autouse=True)
def _cheap_collections() -> Iterator[None]:
    """These tests collect garbage often: leave out what is there for good."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Oops(Exception):
    """An exception of the user's own."""


class Worse(BaseException):
    """One that `except Exception` does not catch."""


def notes(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", []) if note.startswith("roundpipe_async:")]


class Bench:
    """A model that fails on demand, beside a twin on an engine that never saw a failure."""

    def __init__(self, pool: DevicePool, fresh_pool: DevicePool) -> None:
        self.module, self.faults = faulty_model()
        self.fresh_module, _ = faulty_model()
        self.pool = pool
        self.model = RoundPipe(self.module, devices=pool, model_run_config=CONFIG)
        self.fresh = RoundPipe(self.fresh_module, devices=fresh_pool, model_run_config=CONFIG)
        with OptimizerCtx():
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
            self.fresh_optimizer = torch.optim.AdamW(self.fresh.parameters(), lr=0.01)

    async def call(self, seed: int = 1, model: RoundPipe | None = None, **options: Any) -> torch.Tensor:
        """One training call."""
        x, tag = batch(seed)
        self.faults.traces.watch(x, "input")
        options.setdefault("loss_fn", loss_of)
        loss: torch.Tensor = await (model or self.model).forward_backward((x, tag), **options)
        return loss

    async def both(self, seed: int, step: bool = False) -> None:
        """The same call on both engines, and the same outcome, bit for bit."""
        snapshots, losses = [], []
        for module, model, optimizer in (
            (self.module, self.model, self.optimizer),
            (self.fresh_module, self.fresh, self.fresh_optimizer),
        ):
            torch.manual_seed(seed)
            losses.append(await self.call(seed, model))
            if step:
                await model.step(lambda optimizer=optimizer: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            snapshots.append(Snapshot.of(module, model))
        assert torch.equal(*losses)
        snapshots[0].assert_same(snapshots[1])

    async def fails(self, wanted: type[BaseException], act: Callable[[], Any] | None = None) -> BaseException:
        """`act` raises, changes nothing, and keeps nothing alive. Gives the exception without its traceback."""
        torch.manual_seed(11)
        before = Snapshot.of(self.module, self.model)
        found: BaseException
        try:
            await (act or self.call)()
        except wanted as error:
            found = error
        else:
            pytest.fail("nothing was raised")
        before.assert_same(Snapshot.of(self.module, self.model))
        assert_idle(self.model)
        assert_no_tasks(asyncio.get_running_loop())
        found.__traceback__ = None
        for other in (found.__cause__, found.__context__):
            if other is not None:
                other.__traceback__ = None
        await quiet(self.pool)
        self.faults.traces.assert_gone()
        return found

    async def close(self) -> None:
        await self.model.aclose()
        await self.fresh.aclose()


@pytest.fixture
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    own = getattr(request, "param", False)
    async with DevicePool.cpu(2, 1, own_memory=own) as pool, DevicePool.cpu(2, 1, own_memory=own) as fresh_pool:
        bench = Bench(pool, fresh_pool)
        await bench.both(0, step=True)  # one good iteration before
        await bench.both(1)  # and gradients that a failure must not touch
        yield bench
        await bench.both(2, step=True)  # whatever happened, the next call is a fresh engine's
        await bench.both(3, step=True)
        await bench.close()


# ---- B01: whatever user code raises --------------------------------------------------------------------------------

PLACES = [
    ("forward", 0, 0, "forward"),
    ("forward", 1, 2, "forward"),
    ("forward", 3, 1, "forward"),
    ("forward", 5, 0, "forward"),  # in the fused stage
    ("recompute", 0, 1, "recompute"),
    ("recompute", 3, 0, "recompute"),
    ("backward", 5, 1, "backward"),
    ("backward", 2, 2, "backward"),
    ("backward", 0, 0, "backward"),
]


@pytest.mark.parametrize("bench", [False, True], ids=["shared", "own_memory"], indirect=True)
@pytest.mark.parametrize(("phase", "layer", "microbatch", "told"), PLACES)
async def test_b01_a_layer_that_raises_is_named(
    bench: Bench, phase: str, layer: int, microbatch: int, told: str
) -> None:
    original = Oops(phase)
    bench.faults.arm(phase, layer, microbatch, original)
    error = await bench.fails(Oops)
    assert error is original
    (note,) = notes(error)
    kind = type(bench.module[layer]).__name__
    for part in (f"layer {layer} ('{layer}': {kind})", told, f"microbatch {microbatch}", "device cpu:"):
        assert part in note, note


ERRORS: list[BaseException] = [
    ValueError("v"),
    torch.OutOfMemoryError("no memory left"),
    MemoryError(),
    Worse(),
    SystemExit(3),
    KeyboardInterrupt(),
    asyncio.CancelledError("raised by a layer"),
    GeneratorExit(),
    ExceptionGroup("g", [ValueError("inner")]),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("phase", "layer"), [("forward", 1), ("recompute", 1), ("backward", 4)])
async def test_b01_any_class_of_exception_arrives_as_itself(
    bench: Bench, phase: str, layer: int, error: BaseException
) -> None:
    original = type(error)(*error.args)
    bench.faults.arm(phase, layer, 1, original)
    found = await bench.fails(type(error))
    assert found is original
    (where,) = [note for note in notes(found) if "microbatch" in note and "device" in note and "Traceback" not in note]
    assert f"layer {layer}" in where


async def test_b01_an_exception_group_of_one_is_not_unwrapped(bench: Bench) -> None:
    bench.faults.arm("forward", 0, 0, group := ExceptionGroup("mine", [ValueError()]))
    assert await bench.fails(ExceptionGroup) is group


async def test_stop_iteration_cannot_pass_through_a_coroutine_and_becomes_the_cause(bench: Bench) -> None:
    bench.faults.arm("forward", 2, 1, original := StopIteration("done"))
    error = await bench.fails(RuntimeError)
    assert error.__cause__ is original and "StopIteration" in str(error)
    assert "layer 2" in notes(error)[0]


async def test_b01_loss_function(bench: Bench) -> None:
    def loss_fn(out: Any, label: Any) -> torch.Tensor:
        if int(out[1][0]) == 3:
            raise original
        return loss_of(out, label)

    original = Oops("loss")
    error = await bench.fails(Oops, lambda: bench.call(loss_fn=loss_fn))
    assert error is original
    (note,) = notes(error)
    assert "loss_fn" in note and "microbatch 1" in note and "device cpu:" in note


async def test_b01_backward_of_the_loss_function(bench: Bench) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise Oops("in the loss's backward")

    error = await bench.fails(
        Oops,
        lambda: bench.call(loss_fn=lambda out, label: Fails.apply(loss_of(out, label))),  # type: ignore[no-untyped-call]
    )
    first, *others = notes(error)  # each microbatch raises one of its own
    assert "backward of loss_fn, microbatch 0" in first
    assert all("also failed" in note for note in others)


@pytest.mark.parametrize("kind", ["parameter", "module", "pre", "forward", "forward_pre"])
async def test_b01_hooks(bench: Bench, kind: str) -> None:
    def hook(*args: Any) -> None:
        raise original

    original = Oops(kind)
    layer = bench.module[2]
    handle = {
        "parameter": lambda: layer.linear.weight.register_hook(hook),
        "module": lambda: layer.linear.register_full_backward_hook(hook),
        "pre": lambda: layer.linear.register_full_backward_pre_hook(hook),
        "forward": lambda: layer.linear.register_forward_hook(hook),
        "forward_pre": lambda: layer.register_forward_pre_hook(hook),
    }[kind]()
    try:
        error = await bench.fails(Oops)
    finally:
        handle.remove()
    assert error is original
    (note,) = notes(error)
    assert "layer 2 ('2': FaultyLayer)" in note and ("backward" in note) == (not kind.startswith("forward"))


async def test_b01_split_and_merge_functions(bench: Bench) -> None:
    def fails(*args: Any) -> Any:
        raise original

    original = Oops("callable")
    cases: dict[str, dict[str, Any]] = {
        "split_input": {"run_config": RoundPipeRunConfig(split_input=fails)},
        "split_label": {"run_config": RoundPipeRunConfig(split_label=fails), "label": torch.zeros(9)},
        "merge_output": {"run_config": RoundPipeRunConfig(merge_output=fails), "return_outputs": True},
    }
    for name, options in cases.items():
        original = Oops(name)
        error = await bench.fails(Oops, lambda options=options: bench.call(**options))
        assert error is original
        (note,) = notes(error)
        assert name.split("_")[0] in note


async def test_b01_wrong_use_is_told_before_anything_is_held(bench: Bench) -> None:
    await bench.fails(TypeError, lambda: bench.model.forward_backward(batch(0), input_kwargs=5))  # type: ignore[arg-type]
    await bench.fails(TypeError, lambda: bench.model.forward_backward([1]))  # type: ignore[arg-type]
    await bench.fails(TypeError, lambda: bench.call(loss_fn=None))
    await bench.fails(TypeError, lambda: bench.call(run_config="fast"))
    await bench.fails(TypeError, lambda: bench.model.step(None))  # type: ignore[arg-type]
    await bench.fails(ValueError, lambda: bench.model.forward_backward((torch.zeros(0, 5), torch.zeros(0))))
    wrong = RoundPipeRunConfig(execute_plan=ModelExecutePlan([range(0, 2)], [range(3, 6), range(0, 2)]))
    await bench.fails(PlanError, lambda: bench.call(run_config=wrong))
    await bench.fails(ValueError, lambda: bench.call(loss_fn=lambda out, label: out[0].detach().sum()))


async def test_two_failures_at_once_the_first_in_the_schedule_is_raised_and_tells_the_other(bench: Bench) -> None:
    """Layer 0 of microbatch 2 and layer 2 of microbatch 0 run side by side; both meet before they raise."""
    barrier = threading.Barrier(2, timeout=20)
    first = Oops("layer 0")

    def raise_first() -> None:
        barrier.wait()
        raise first

    def raise_second() -> None:
        barrier.wait()
        raise Oops("layer 2")

    bench.faults.arm("forward", 0, 2, raise_first)
    bench.faults.arm("forward", 2, 0, raise_second)
    error = await bench.fails(Oops)
    assert error is first
    own, other = notes(error)
    assert "layer 0" in own and "microbatch 2" in own
    assert "also failed in layer 2" in other and "Oops" in other


async def test_one_exception_object_raised_again_and_again_has_one_note_a_call(bench: Bench) -> None:
    original = Oops("the same object every time")
    for _ in range(3):
        bench.faults.arm("forward", 1, 0, original)
        assert await bench.fails(Oops) is original
        assert len(notes(original)) == 1


# ---- the engine's own work -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["from_host", "to_host"])
@pytest.mark.parametrize("at", [0, 7, 13])
async def test_b01_a_copy_between_host_and_device_fails(way: str, at: int) -> None:
    async with DevicePool.cpu(2, 1, own_memory=True) as pool, DevicePool.cpu(2, 1, own_memory=True) as fresh_pool:
        bench = Bench(pool, fresh_pool)
        await bench.both(0)
        original, left = torch.OutOfMemoryError("copy"), [at]
        lock = threading.Lock()
        device: Any = pool.devices[1]
        good = getattr(device, way)

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            with lock:
                left[0] -= 1
                if left[0] == -1:
                    raise original
            return good(tensor)  # type: ignore[no-any-return]

        setattr(device, way, copy)
        error = await bench.fails(torch.OutOfMemoryError)
        assert error is original
        setattr(device, way, good)
        await bench.both(1, step=True)
        await bench.both(2, step=True)
        await bench.close()


async def test_a_commit_that_fails_commits_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    original = MemoryError("fold")

    def fold(*args: Any) -> Any:
        raise original

    monkeypatch.setattr(runs, "fold", fold)
    assert await bench.fails(MemoryError) is original
    monkeypatch.undo()


async def test_a_commit_cannot_fail_half_way_among_the_buffers() -> None:
    """A buffer that cannot be written in place is replaced: the buffers before it are written already."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("calls", torch.zeros(1).expand(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return self.linear(x)

    module = nn.Sequential(nn.BatchNorm1d(2), Counts(), nn.BatchNorm1d(2))
    async with DevicePool.cpu(2, 1) as pool, RoundPipe(module, devices=pool) as model:
        for _ in range(2):
            await model.forward_backward((torch.randn(6, 2),), loss_fn=lambda out, label: out.sum())
    assert module.get_buffer("1.calls").tolist() == [6.0] * 4
    assert module.get_buffer("0.num_batches_tracked") == module.get_buffer("2.num_batches_tracked") == 6


def stepping(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("layer", [0, 5])
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("reading", [True, False], ids=["read", "unread"])
async def test_a_publication_that_fails_is_told_and_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, layer: int, is_async: bool, reading: bool
) -> None:
    """The calls that were to read it fail with its exception; the optimizer's step is not lost."""
    original, good = MemoryError("publication"), Parameters._publish_slot
    broken = True
    victim = bench.model._store.layers[layer].slots[0]
    held = None
    if reading:  # somebody holds the version, so that the publication needs other memory
        held = await bench.model(*batch(4), roundpipe_run_config=FORWARD)

    def publish(self: Parameters, slot: Any, tensor: torch.Tensor) -> None:
        if broken and slot.index == victim and self is bench.model._store.parameters:
            raise original
        good(self, slot, tensor)

    monkeypatch.setattr(Parameters, "_publish_slot", publish)
    step = stepping(bench.optimizer)
    if is_async:
        await bench.model.step(step)
        with pytest.raises(MemoryError):
            await bench.model.synchronize()
    else:
        with pytest.raises(MemoryError):
            await bench.model.step(step, is_async=False)
    with pytest.raises(MemoryError) as caught:
        await bench.call()
    assert caught.value is original
    with pytest.raises(MemoryError):
        await bench.model.synchronize()
    broken = False
    del held
    gc.collect()
    await bench.model.synchronize()
    # The twin makes the same step.
    if reading:
        await bench.fresh(*batch(4), roundpipe_run_config=FORWARD)
    await bench.fresh.step(stepping(bench.fresh_optimizer), is_async=False)
    torch.manual_seed(0)
    bench.fresh_module.load_state_dict(
        {k: v for k, v in bench.module.state_dict().items() if "norm.running" in k or "batches" in k}, strict=False
    )
    Snapshot.of(bench.module, bench.model).assert_same(Snapshot.of(bench.fresh_module, bench.fresh))
    monkeypatch.undo()


async def test_a_publication_without_memory_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    original, good = torch.OutOfMemoryError("no other memory"), Parameters._other_memory
    held = await bench.model(*batch(4), roundpipe_run_config=FORWARD)

    def other_memory(self: Parameters, tensors: Any) -> Any:
        raise original

    monkeypatch.setattr(Parameters, "_other_memory", other_memory)
    with pytest.raises(torch.OutOfMemoryError):
        await bench.model.step(stepping(bench.optimizer), is_async=False)
    for _ in range(3):  # while the memory is short every call says so
        with pytest.raises(torch.OutOfMemoryError):
            await bench.call()
    monkeypatch.setattr(Parameters, "_other_memory", good)
    del held
    await bench.model.synchronize()
    await bench.fresh(*batch(4), roundpipe_run_config=FORWARD)
    await bench.fresh.step(stepping(bench.fresh_optimizer), is_async=False)
    torch.manual_seed(0)
    for parameter, other in zip(bench.module.parameters(), bench.fresh_module.parameters(), strict=True):
        assert torch.equal(parameter, other)
    bench.fresh_module.load_state_dict(bench.module.state_dict())


async def test_a_parameter_replaced_by_another_shape_is_told_and_not_waited_for() -> None:
    """The publication that should have followed the user's change failed silently, and every later call hung."""
    async with DevicePool.cpu(2, 1) as pool:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        async with RoundPipe(module, devices=pool) as model:
            with OptimizerCtx():
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(4, 3)
            await model.forward_backward((x,), loss_fn=lambda out, label: out.sum())
            await model.step(stepping(optimizer))
            good = module[1].bias
            module[1].bias = nn.Parameter(torch.zeros(7))
            with pytest.raises(RuntimeError):
                await model.synchronize()
            with pytest.raises(RuntimeError):
                await model.forward_backward((x,), loss_fn=lambda out, label: out.sum())
            module[1].bias = good
            await model.synchronize()
            await model.forward_backward((x,), loss_fn=lambda out, label: out.sum())


# ---- steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_b01_a_step_function_that_raises_does_so_at_its_await(bench: Bench, error: BaseException) -> None:
    original = type(error)(*error.args)

    def step() -> None:
        raise original

    with pytest.raises(type(error)) as caught:
        await bench.model.step(step, is_async=False)
    assert caught.value is original
    handle = await bench.model.step(lambda: 5)
    assert await handle == 5
    # The gradients went to the step that failed; the optimizer's copies have them, as after a plain step that raised.
    bench.optimizer.zero_grad()
    await bench.fresh.step(lambda: bench.fresh_optimizer.zero_grad(), is_async=False)
    await bench.fresh.step(lambda: 5)
    await bench.fresh.synchronize()
    await bench.model.synchronize()


@pytest.mark.parametrize("error", [Oops("s"), Worse(), SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_d04_a_background_step_that_raises_is_raised_exactly_once(bench: Bench, error: BaseException) -> None:
    def step() -> None:
        raise type(error)(*error.args)

    async def told(act: Callable[[], Any]) -> bool:
        try:
            await act()
        except type(error):
            return True
        return False

    model = bench.model
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    for first in (model.synchronize, lambda: model.step(nothing), lambda: model.step(nothing, is_async=False)):
        handle = await model.step(step)
        assert await told(lambda: bench.call(5)) is False  # only steps and barriers tell
        await handle.event.settled()
        assert await told(first)
        assert not await told(model.synchronize)
        with pytest.raises(StepError):
            await handle
        assert not await told(model.synchronize)
    handle = await model.step(step)
    assert await told(lambda: handle)
    assert not await told(model.synchronize)
    # Each of two that failed is told.
    gate = threading.Event()
    await model.step(gate.wait)
    await model.step(step)
    await model.step(step)
    gate.set()
    assert await told(model.synchronize) and await told(model.synchronize) and not await told(model.synchronize)
    bench.optimizer.zero_grad()
    await bench.model.step(lambda: bench.optimizer.zero_grad(), is_async=False)
    await bench.fresh.step(lambda: bench.fresh_optimizer.zero_grad(), is_async=False)
    bench.fresh_module.load_state_dict(bench.module.state_dict())
    bench.fresh._store.steps_scheduled = bench.model._store.steps_scheduled
    await bench.fresh.step(lambda: None, is_async=False)
    await bench.model.step(lambda: None, is_async=False)


async def test_d04_the_body_raises_and_a_background_step_failed_too() -> None:
    """Both are seen: the step's exception is raised by `aclose`, chained to the body's."""
    async with DevicePool.cpu(2, 1) as pool:
        module, _ = faulty_model()
        body, in_step = Oops("body"), Oops("step")

        def step() -> None:
            raise in_step

        with pytest.raises(Oops) as caught:
            async with RoundPipe(module, devices=pool) as model:
                await model.step(step)
                raise body
        assert caught.value is in_step and caught.value.__context__ is body
        await model.aclose()  # told once


# ---- B14 and B16: again and again ----------------------------------------------------------------------------------


async def test_b14_out_of_memory_on_the_second_microbatch_then_half_the_batch(bench: Bench) -> None:
    bench.faults.arm("forward", 3, 1, torch.OutOfMemoryError("CUDA out of memory"))
    await bench.fails(torch.OutOfMemoryError)
    x, tag = batch(6)
    outcomes = []
    for model in (bench.model, bench.fresh):
        torch.manual_seed(5)
        outcomes.append(await model.forward_backward((x[:6], tag[:6]), loss_fn=loss_of))
    assert torch.equal(*outcomes)


async def test_other_calls_and_other_models_go_on(bench: Bench) -> None:
    """Of three calls in flight the second fails; the pool serves another model meanwhile."""
    bench.faults.arm("forward", 1, 1, lambda: None)
    module, _ = faulty_model(3)
    other = RoundPipe(module, devices=bench.pool, model_run_config=CONFIG)
    x, tag = batch(8)
    failing = {"run_config": RoundPipeRunConfig(split_input=lambda args, kwargs, n: 1 / 0)}
    outcomes = await asyncio.gather(
        bench.call(5), bench.call(6, **failing), bench.call(7), other.forward_backward((x, tag), loss_fn=loss_of),
        return_exceptions=True,
    )  # fmt: skip
    assert [type(outcome) for outcome in outcomes] == [torch.Tensor, ZeroDivisionError, torch.Tensor, torch.Tensor]
    await other.aclose()
    await bench.model.step(lambda: bench.optimizer.zero_grad(), is_async=False)
    await bench.fresh.step(lambda: bench.fresh_optimizer.zero_grad(), is_async=False)
    bench.fresh_module.load_state_dict(bench.module.state_dict())


async def test_b16_two_hundred_iterations_every_tenth_raising() -> None:
    async with DevicePool.cpu(2, 1) as pool:
        module, faults = faulty_model()
        async with RoundPipe(module, devices=pool, model_run_config=CONFIG) as model:
            with OptimizerCtx():
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            counts: list[tuple[int, int, int, int]] = []
            process = psutil.Process()
            for iteration in range(200):
                if iteration % 10 == 9:
                    phase = ("forward", "recompute", "backward")[iteration // 10 % 3]
                    faults.arm(phase, iteration % 4, iteration % MICROBATCHES, Oops(str(iteration)))
                    with pytest.raises(Oops):
                        await model.forward_backward(batch(iteration), loss_fn=loss_of)
                else:
                    await model.forward_backward(batch(iteration), loss_fn=loss_of)
                    await model.step(stepping(optimizer))
                faults.visits.clear()
                if iteration in (60, 199):
                    await model.synchronize()
                    await quiet(pool)
                    faults.traces.assert_gone()
                    gc.collect()
                    tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
                    hooks = sum(len(m._forward_hooks) + len(m._backward_hooks) for m in module.modules())
                    tasks, threads = len(asyncio.all_tasks()), threading.active_count()
                    counts.append((tensors, hooks, tasks, threads))
                    counts_rss = process.memory_info().rss
                    if iteration == 60:
                        rss = counts_rss
            assert counts[0] == counts[1]
            assert counts_rss - rss < 30e6
            assert_idle(model)


def test_faults_are_told_apart() -> None:
    """The bench itself: a fault fires once, where it was armed."""
    faults = Faults()
    faults.arm("forward", 1, 2, Oops())
    faults.visit("forward", 1, 1)
    with pytest.raises(Oops):
        faults.visit("forward", 1, 2)
    faults.visit("forward", 1, 2)
