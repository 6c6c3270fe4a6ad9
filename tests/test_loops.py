"""D01, D05, D06, D07, D09: several loops, full executors, other engines, the end of the process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from roundpipe_async.devices.pool import DevicePool
from roundpipe_async.errors import ClosedError, WrongLoopError
from roundpipe_async.model import RoundPipe
from roundpipe_async.modes import no_grad
from roundpipe_async.optimizer import OptimizerCtx
from tests.support.aftermath import assert_idle, assert_no_tasks, assert_pool_idle

ROOT = Path(__file__).resolve().parent.parent


def build(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])


def total(out: torch.Tensor, label: Any) -> torch.Tensor:
    return out.sum()


X = torch.randn(6, 4)


async def iteration(model: RoundPipe, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
    loss: torch.Tensor = await model.forward_backward((X,), loss_fn=total)
    if optimizer is not None:
        await model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    return loss


class Gate(nn.Module):
    """Blocks the device in this layer until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.events = [threading.Event(), threading.Event()]  # entered, open
        self.events[1].set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.events[0].set()
        assert self.events[1].wait(60)
        return self.linear(x)

    async def entered(self) -> None:
        while not self.events[0].is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.001)


# ---- D01 -----------------------------------------------------------------------------------------------------------


def test_d01_one_model_in_three_runs_and_in_the_loop_of_another_thread() -> None:
    pool = DevicePool.cpu(2, 1)
    module = build()
    model = RoundPipe(module, devices=pool)
    with OptimizerCtx():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    async def contend() -> None:
        await asyncio.gather(*(iteration(model, optimizer) for _ in range(2)))

    for _ in range(3):
        asyncio.run(contend())
    worker = concurrent.futures.ThreadPoolExecutor(1)
    with worker:
        worker.submit(lambda: asyncio.run(contend())).result()
    asyncio.run(contend())
    asyncio.run(model.synchronize())
    assert model.param_version == 10
    asyncio.run(model.aclose())
    pool.close()


def test_d01_two_loops_at_once_are_told() -> None:
    pool = DevicePool.cpu(2, 1)
    gate = Gate()
    module = nn.Sequential(nn.Linear(4, 4), gate)
    model = RoundPipe(module, devices=pool, name="shared")
    gate.events[1].clear()
    began = threading.Event()

    async def first() -> None:
        call = model.forward_backward((X,), loss_fn=total)  # begun with this
        began.set()
        await call

    async def second() -> None:
        with pytest.raises(WrongLoopError, match="'shared' has 1 calls in flight in another event loop"):
            await iteration(model)
        with pytest.raises(WrongLoopError):
            await model.synchronize()
        gate.events[1].set()

    with concurrent.futures.ThreadPoolExecutor(1) as worker:
        running = worker.submit(lambda: asyncio.run(first()))
        assert began.wait(30)
        asyncio.run(second())
        running.result()
    asyncio.run(iteration(model))
    asyncio.run(model.aclose())
    pool.close()


async def test_d01_a_step_function_that_runs_a_loop_on_its_own_model_is_told() -> None:
    """It would wait for itself, and hang."""
    async with DevicePool.cpu(2, 1) as pool, RoundPipe(build(), devices=pool, name="own") as model:

        async def synchronize() -> None:
            await model.synchronize()

        for begin in (synchronize, lambda: iteration(model)):
            with pytest.raises(RuntimeError, match="model 'own' was called inside a step function of its own"):
                async with asyncio.timeout(30):
                    await model.step(lambda begin=begin: asyncio.run(begin()), is_async=False)
        await iteration(model)


def test_d01_a_call_made_in_one_loop_and_awaited_in_another_is_told() -> None:
    pool = DevicePool.cpu(1, 1)
    model = RoundPipe(build(), devices=pool)
    calls: list[Any] = []

    async def make() -> None:
        calls.append(model.forward_backward((X,), loss_fn=total))
        await model.synchronize()

    async def wait() -> None:
        with pytest.raises(WrongLoopError, match="awaited in another"):
            await calls[0]

    asyncio.run(make())
    asyncio.run(wait())
    asyncio.run(model.aclose())
    pool.close()


def test_d01_made_without_a_loop_a_call_begins_when_awaited() -> None:
    pool = DevicePool.cpu(1, 1)
    model = RoundPipe(build(), devices=pool)
    call = model.forward_backward((X,), loss_fn=total)
    assert not model._store._unsettled
    assert torch.isfinite(asyncio.run(call))
    asyncio.run(model.aclose())
    pool.close()


@pytest.mark.parametrize("where", ["queued", "running", "finished"])
def test_d01_a_loop_that_was_closed_with_a_call_in_flight(where: str) -> None:
    """Nobody can wait for that call any more. It gives back what it holds, on the model and on the pool."""
    pool = DevicePool.cpu(2, 1)
    gate = Gate()
    model = RoundPipe(nn.Sequential(nn.Linear(4, 4), gate, nn.Linear(4, 4)), devices=pool)
    other = RoundPipe(build(), devices=pool)
    gate.events[1].clear()
    loop = asyncio.new_event_loop()

    async def leave() -> None:
        loop.create_task(iteration(model))._log_destroy_pending = False  # type: ignore[attr-defined]
        if where != "queued":
            await gate.entered()
        if where == "finished":
            gate.events[1].set()
            for device in pool.devices:
                device.compute.submit(lambda: None).wait(30)

    loop.run_until_complete(leave())
    loop.close()
    gate.events[1].set()
    for each in (other, model, other):
        assert torch.isfinite(asyncio.run(asyncio.wait_for(iteration(each), 60)))
    assert_idle(model)
    assert_pool_idle(pool)
    asyncio.run(model.aclose())
    asyncio.run(other.aclose())
    pool.close()


def test_d01_a_step_in_flight_when_its_loop_ends_is_settled_in_the_next() -> None:
    pool = DevicePool.cpu(2, 1)
    module = build()
    model = RoundPipe(module, devices=pool)
    with OptimizerCtx():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    gate = threading.Event()

    def step() -> None:
        assert gate.wait(60)
        optimizer.step()

    async def first() -> None:
        await iteration(model)
        await model.step(step)

    before = module[0].weight.detach().clone()
    asyncio.run(first())
    gate.set()
    asyncio.run(model.synchronize())
    assert not torch.equal(before, module[0].weight)
    asyncio.run(model.aclose())
    pool.close()


# ---- D06: whose threads --------------------------------------------------------------------------------------------


@pytest.mark.both_loops
async def test_d06_the_default_executor_is_full() -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
    release = threading.Event()
    sleepers = [loop.run_in_executor(None, release.wait, 60) for _ in range(4)]
    async with DevicePool.cpu(2, 1) as pool, RoundPipe(build(), devices=pool) as model:
        with OptimizerCtx():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        await iteration(model, optimizer)
        out = await model(X)
        await model.backward(out.sum())
        await model.step(optimizer.step, is_async=False)
        await model.synchronize()
    release.set()
    await asyncio.gather(*sleepers)


@pytest.mark.both_loops
async def test_d06_two_engines_at_once_and_one_closes() -> None:
    async with DevicePool.cpu(2, 1) as pool:
        one, two = RoundPipe(build(), devices=pool), RoundPipe(build(), devices=pool)
        async with DevicePool.cpu(1, 1) as other_pool, RoundPipe(build(), devices=other_pool) as three:
            losses = await asyncio.gather(*(iteration(model) for model in (one, two, three) for _ in range(3)))
            assert all(torch.allclose(loss, losses[0]) for loss in losses)
        await one.aclose()
        await iteration(two)
        await two.aclose()


# ---- the same suite on every kind of loop --------------------------------------------------------------------------


@pytest.mark.both_loops
@pytest.mark.parametrize("debug", [False, True])
async def test_training_evaluation_failure_and_cancellation(debug: bool) -> None:
    loop = asyncio.get_running_loop()
    loop.set_debug(debug)
    loop.slow_callback_duration = 60
    module = build()
    async with DevicePool.cpu(2, 1) as pool, RoundPipe(module, devices=pool) as model:
        with OptimizerCtx():
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            await iteration(model, optimizer)
        with no_grad():
            assert not (await model(X)).requires_grad
        with pytest.raises(ZeroDivisionError):
            await model.forward_backward((X,), loss_fn=lambda out, label: 1 / 0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await iteration(model)
        task = asyncio.ensure_future(iteration(model))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        out = await model(X)
        await model.backward(out.sum())
        await model.step(optimizer.step, is_async=False)
        assert_idle(model)
    loop.set_debug(False)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
async def test_eager_tasks() -> None:
    loop = asyncio.get_running_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
    async with DevicePool.cpu(2, 1) as pool, RoundPipe(build(), devices=pool) as model:
        await asyncio.gather(iteration(model), iteration(model))
        assert_idle(model)
    loop.set_task_factory(None)


# ---- closing -------------------------------------------------------------------------------------------------------


async def test_d07_use_after_close_is_one_clear_error() -> None:
    async with DevicePool.cpu(1, 1) as pool:
        module = build()
        model = RoundPipe(module, devices=pool, name="gone")
        await iteration(model)
        await model.aclose()
        await model.aclose()
        for act in (
            lambda: iteration(model), lambda: model(X), lambda: model.step(lambda: None),
            lambda: model.backward(X.sum()), model.synchronize, model.__aenter__,
        ):  # fmt: skip
            with pytest.raises(ClosedError, match="'gone' is closed"):
                await act()
        again = RoundPipe(module, devices=pool)
        await iteration(again)
        await again.aclose()
    with pytest.raises(ClosedError, match="pool is closed"):
        RoundPipe(build(), devices=pool)


async def test_d07_the_pool_closed_before_the_model() -> None:
    """The model still publishes its newest parameters, in a thread of its own."""
    module, plain = build(), build()
    async with DevicePool.cpu(1, 1) as pool:
        model = RoundPipe(module, devices=pool)
        with OptimizerCtx():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        await iteration(model, optimizer)
    with pytest.raises(ClosedError):
        await iteration(model)
    await model.aclose()
    for part in X.tensor_split(2):
        plain(part).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    for parameter, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, other)


async def test_closing_waits_for_what_is_in_flight_and_for_all_tasks() -> None:
    async with DevicePool.cpu(2, 1) as pool:
        model = RoundPipe(build(), devices=pool)
        calls = [asyncio.ensure_future(iteration(model)) for _ in range(3)]
        await asyncio.sleep(0)
        await model.aclose()
        await asyncio.gather(*calls)
        assert_idle(model)


@pytest.mark.parametrize("fault", ["module", "dtype", "pin", "empty", "compiled", "owned"])
async def test_d07_a_constructor_that_fails_leaves_nothing_claimed(fault: str) -> None:
    async with DevicePool.cpu(1, 1) as pool:
        module = build(2)
        owner = None
        wrong: dict[str, Any] = {"model": module, "devices": pool}
        if fault == "module":
            wrong["model"] = "a module"
        elif fault == "dtype":
            wrong["optim_dtype"] = torch.int32
        elif fault == "pin":
            wrong["pin_model"] = "maybe"
        elif fault == "empty":
            wrong["model"] = nn.Sequential()
        elif fault == "compiled":
            with pytest.warns():
                scripted = torch.jit.script(nn.ReLU())
            wrong["model"] = nn.Sequential(*module, scripted)
        else:
            owned = build(1)
            owner = RoundPipe(owned, devices=pool)
            wrong["model"] = nn.Sequential(*module, owned)
        try:
            RoundPipe(**wrong)
        except (TypeError, ValueError) as error:
            kept = error  # its traceback keeps the failed object alive
            model = RoundPipe(module, devices=pool)
            await iteration(model)
            await model.aclose()
            assert kept is not None
        else:
            pytest.fail("the constructor accepted it")
        if owner is not None:
            await owner.aclose()


async def test_d09_a_background_step_with_every_reference_dropped_happens() -> None:
    done = []
    async with DevicePool.cpu(1, 1) as pool:
        model = RoundPipe(build(), devices=pool)
        for index in range(5):
            await model.step(lambda index=index: done.append(index))
            gc.collect()
        await model.aclose()
        assert done == list(range(5))
        assert_no_tasks(asyncio.get_running_loop())


async def test_d07_models_and_pools_that_nobody_holds_go() -> None:
    before = threading.active_count()
    pool = DevicePool.cpu(2, 1)
    model = RoundPipe(build(), devices=pool)
    with OptimizerCtx():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    await iteration(model, optimizer)
    await model.synchronize()
    del optimizer
    gone = [ref(model), ref(model._model), ref(model._store), ref(pool)]
    del model, pool
    deadline = time.monotonic() + 10
    while (any(r() is not None for r in gone) or threading.active_count() > before) and time.monotonic() < deadline:
        gc.collect()
        await asyncio.sleep(0.01)
    assert [r() for r in gone] == [None] * 4
    assert threading.active_count() <= before


# ---- D07: the end of the process -----------------------------------------------------------------------------------

PRELUDE = """
import asyncio, os, signal, sys, threading, time
import torch
from torch import nn
from roundpipe_async.devices.pool import DevicePool
from roundpipe_async.model import RoundPipe
from roundpipe_async.optimizer import OptimizerCtx
torch.set_num_threads(1)

class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x)

pool = DevicePool.cpu(2, 1)
module = nn.Sequential(Slow(4, 4), Slow(4, 4), nn.Linear(4, 4))
model = RoundPipe(module, devices=pool)
with OptimizerCtx():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(6, 4)

def train():
    return model.forward_backward((x,), loss_fn=lambda out, label: out.sum())
"""

ENDS: dict[str, tuple[str, int, list[str]]] = {
    "without closing": ("async def main():\n    await train()\nasyncio.run(main())", 0, []),
    "with closing": (
        "async def main():\n    await train()\n    await model.aclose()\n    await pool.aclose()\nasyncio.run(main())",
        0, [],
    ),
    "a step in flight": (
        "async def main():\n    await train()\n    await model.step(lambda: (time.sleep(0.5), print('stepped')))\n"
        "asyncio.run(main())",
        0, [],
    ),
    "a long step in flight": (
        "async def main():\n    await train()\n    await model.step(lambda: time.sleep(30))\nasyncio.run(main())",
        0, [],
    ),
    "steps queued behind it": (
        "async def main():\n    await train()\n"
        "    for _ in range(50):\n        await model.step(lambda: time.sleep(0.2))\nasyncio.run(main())",
        0, [],
    ),
    "an exception": (
        "async def main():\n    await train()\n    raise KeyError('mine')\nasyncio.run(main())", 1, ["KeyError"],
    ),
    "an exception with calls in flight": (
        "async def main():\n    task = asyncio.ensure_future(train())\n    await asyncio.sleep(0.02)\n"
        "    raise KeyError('mine')\nasyncio.run(main())",
        1, ["KeyError"],
    ),
    "sys.exit in a task": (
        "async def main():\n    async def leave():\n        await asyncio.sleep(0.02)\n        sys.exit(7)\n"
        "    await asyncio.gather(train(), leave())\nasyncio.run(main())",
        7, [],
    ),
    "sys.exit in a layer": (
        "module[1].register_forward_pre_hook(lambda *_: sys.exit(8))\nasyncio.run(train())", 8, [],
    ),
    "ctrl-c": (
        "async def main():\n    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    while True:\n        await train()\nasyncio.run(main())",
        -signal.SIGINT, ["KeyboardInterrupt"],
    ),
    "a constructor that fails": ("RoundPipe(nn.Sequential(), devices=pool)", 1, ["ValueError"]),
    "the engine collected": (
        "import gc\nasyncio.run(train())\ndel model, optimizer, train, pool\ngc.collect()", 0, [],
    ),
    "run ending while a call is made": (
        "async def main():\n    tasks.append(asyncio.ensure_future(train()))\ntasks = []\nasyncio.run(main())", 0, [],
    ),
    "a loop left open": (
        "loop = asyncio.new_event_loop()\nloop.run_until_complete(train())\n", 0, ["ResourceWarning"],
    ),
    "a loop closed with a call in flight": (
        "loop = asyncio.new_event_loop()\n"
        "async def main():\n    made.append(train())\n    await asyncio.sleep(0.02)\nmade = []\n"
        "loop.run_until_complete(main())\nloop.close()", 0, [],
    ),
    "a non-daemon thread": (
        "thread = threading.Thread(target=lambda: asyncio.run(train()))\nthread.start()", 0, [],
    ),
    "torch after the end": (
        "import atexit\natexit.register(lambda: torch.ones(3).sum())\nasyncio.run(train())", 0, [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", ENDS)
def test_d07_the_process_ends(how: str, tmp_path: Path) -> None:
    """The right exit code, soon, and nothing on stderr but what Python itself says of the user's own mistake."""
    body, code, told = ENDS[how]
    script = tmp_path / "end.py"
    stamp = tmp_path / "stamp"
    script.write_text(
        PRELUDE + f"from pathlib import Path\ntry:\n    exec({body!r})\n"
        f"finally:\n    Path({str(stamp)!r}).write_text(str(time.time()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", str(script)],
        capture_output=True, text=True, timeout=100, cwd=ROOT, check=False,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""},
    )  # fmt: skip
    ended_s = time.time() - float(stamp.read_text())
    assert done.returncode == code, done.stderr
    if told:
        assert any(word in done.stderr for word in told), done.stderr
    else:
        assert done.stderr == ""
    for word in ("Task was destroyed", "never retrieved", "Exception ignored", "Fatal", "GeneratorExit"):
        assert word not in done.stderr, done.stderr
    assert ended_s < 5 * max(1.0, _load()), f"{ended_s} s"


def _load() -> float:
    return os.getloadavg()[0] / (os.cpu_count() or 1)


# ---- D05 -----------------------------------------------------------------------------------------------------------


async def test_d05_the_loop_is_not_held_up() -> None:
    """A coroutine that wakes every 10 ms beside training, big steps, state_dict, the constructor, the first call."""
    gaps: list[float] = []

    async def heart() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.01)
            now = time.perf_counter()
            gaps.append(now - last - 0.01)
            last = now

    module = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    x = torch.randn(64, 512)
    async with DevicePool.cpu(2, 1) as pool:
        beat = asyncio.ensure_future(heart())
        await asyncio.sleep(0.05)
        async with RoundPipe(module, devices=pool) as model:
            with OptimizerCtx():
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            end = time.monotonic() + 2
            while time.monotonic() < end:
                await model.forward_backward((x,), loss_fn=lambda out, label: out.square().mean())
                await model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            module.state_dict()
        beat.cancel()
    gaps.sort()
    assert gaps[len(gaps) // 2] < 0.1 * max(1.0, _load()), "the loop is held up all the time"
    assert gaps[-1] < 1.0 * max(1.0, _load())
