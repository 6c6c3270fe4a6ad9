"""D02: every public await, cancelled at every turn of the event loop at which it can be; nothing is ever lost.

The devices are played by hand and the loop is stepped turn by turn, so each try is the same every time. A call that was
cancelled did not happen, or happened whole; the next one is a fresh engine's.
"""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from roundpipe_async.model import RoundPipe
from roundpipe_async.optimizer import OptimizerCtx
from tests.support.aftermath import Snapshot, assert_idle, assert_no_tasks
from tests.support.faults import CONFIG, FORWARD, Faults, batch, faulty_model, loss_of
from tests.support.manual_device import Hand


@pytest.fixture(scope="module", autouse=True)
def _cheap_collections() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@dataclass
class Rig:
    """A model on manual devices."""

    hand: Hand
    module: torch.nn.Module
    faults: Faults
    model: RoundPipe
    optimizer: torch.optim.Optimizer
    steps_begun: int = 0
    steps_ended: int = 0
    kept: list[Any] = field(default_factory=list)

    @classmethod
    def build(cls, hand: Hand) -> Rig:
        module, faults = faulty_model()
        model = RoundPipe(module, devices=hand.pool, model_run_config=CONFIG)
        with OptimizerCtx():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return cls(hand, module, faults, model, optimizer)

    def step_fn(self) -> str:
        self.steps_begun += 1
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_ended += 1
        return "stepped"

    def train(self, seed: int = 1) -> Coroutine[Any, Any, Any]:
        x, tag = batch(seed)
        self.faults.traces.watch(x, "input")
        return self.model.forward_backward((x, tag), loss_fn=loss_of)

    def infer(self) -> Coroutine[Any, Any, Any]:
        return self.model.forward(*batch(2), roundpipe_run_config=FORWARD)

    def snapshot(self) -> Snapshot:
        return Snapshot.of(self.module, self.model)


# ---- the public awaits ---------------------------------------------------------------------------------------------


async def _train(rig: Rig) -> None:
    await rig.train()


async def _infer(rig: Rig) -> None:
    out, _ = await rig.infer()
    assert not out.requires_grad or out.grad_fn is not None


async def _walk(rig: Rig) -> None:
    out, _ = await rig.infer()
    await rig.model.backward(out.square().sum())


async def _step_async(rig: Rig) -> None:
    handle = await rig.model.step(rig.step_fn)
    assert await handle == "stepped"


async def _step_sync(rig: Rig) -> None:
    assert await rig.model.step(rig.step_fn, is_async=False) == "stepped"


async def _synchronize(rig: Rig) -> None:
    await rig.model.step(rig.step_fn)
    await rig.model.synchronize()


async def _queue(rig: Rig) -> None:
    """Three calls in flight, awaited in another order than made."""
    calls = [rig.train(1), rig.train(2), rig.train(3)]
    await asyncio.gather(calls[2], calls[0], calls[1])


async def _mixed(rig: Rig) -> None:
    """Everything at once."""
    await asyncio.gather(
        rig.train(1), rig.model.step(rig.step_fn), rig.infer(), rig.train(2), rig.model.step(rig.step_fn, False),
        rig.model.synchronize(),
    )  # fmt: skip


async def _task(rig: Rig) -> None:
    """A task of the user's, which may be cancelled before it ever ran."""
    task = asyncio.ensure_future(rig.train())
    try:
        await task
    finally:
        rig.kept.append(task)


async def _wait_for(rig: Rig) -> None:
    await asyncio.wait_for(rig.train(), 1e6)


async def _timeout(rig: Rig) -> None:
    async with asyncio.timeout(1e6):
        await rig.train()


async def _task_group(rig: Rig) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(rig.train(1))
        group.create_task(rig.train(2))


async def _anyio_group(rig: Rig) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(rig.train, 1)
        group.start_soon(rig.train, 2)


AWAITS = [
    _train, _infer, _step_async, _step_sync, _synchronize, _queue, _mixed, _task, _wait_for, _timeout, _task_group,
    _anyio_group,
]  # fmt: skip


def drive(rig: Rig, task: asyncio.Task[Any], threads: bool = False) -> BaseException | None:
    """Go on until the task is done; gives what it raised."""
    try:
        rig.hand.finish(task, threads=threads)
    except (asyncio.CancelledError, Exception) as error:
        return error.with_traceback(None)
    return None


def after(rig: Rig, allowed: list[Snapshot] | None) -> None:
    """The invariants, then one good iteration that must be a fresh engine's."""
    hand = rig.hand
    hand.settle()
    assert rig.steps_begun == rig.steps_ended
    assert_idle(rig.model)
    assert_no_tasks(hand.loop)
    assert len(asyncio.all_tasks(hand.loop)) == 0
    now = rig.snapshot()
    assert allowed is None or any(now.is_same(candidate) for candidate in allowed), "something happened by half"
    rig.faults.traces.assert_gone()
    # The next call works, on what is there, as a fresh engine's would.
    twin, _ = faulty_model()
    twin.load_state_dict(rig.module.state_dict())
    with Hand() as fresh_hand:
        fresh = RoundPipe(twin, devices=fresh_hand.pool, model_run_config=CONFIG)
        outcomes = []
        for hand_, model, module in ((hand, rig.model, rig.module), (fresh_hand, fresh, twin)):
            for parameter in module.parameters():
                parameter.grad = None
            torch.manual_seed(3)
            loss = hand_.run(model.forward_backward(batch(9), loss_fn=loss_of))
            outcomes.append((loss, [p.grad for p in module.parameters()]))
        assert torch.equal(outcomes[0][0], outcomes[1][0])
        for one, other in zip(outcomes[0][1], outcomes[1][1], strict=True):
            assert torch.equal(one, other)


def happened(act: Callable[[Rig], Coroutine[Any, Any, None]]) -> Snapshot:
    """The state that the act leaves when nobody disturbs it."""
    with Hand() as hand:
        rig = Rig.build(hand)
        hand.run(rig.train(0))
        torch.manual_seed(5)
        hand.run(act(rig))
        hand.settle()
        rig.kept.clear()
        return rig.snapshot()


class Point:
    """Cancel a task at one turn of the loop, and again `again` turns later."""

    def __init__(self, turn: int, again: int | None = None) -> None:
        self.turn = turn
        self.again = again
        self.hit = False

    def arm(self, hand: Hand, task: asyncio.Task[Any]) -> None:
        start = hand.turns
        points = {start + self.turn} | (set() if self.again is None else {start + self.turn + self.again})

        def on_turn(turn: int) -> None:
            if turn in points and not task.done():
                self.hit = True
                task.cancel()

        hand.on_turn = on_turn


def attempt(act: Callable[[Rig], Coroutine[Any, Any, None]], point: Point, seed: int | None, own: bool) -> bool:
    """One try; whether the point was reached."""
    with Hand(own_memory=own, seed=seed) as hand:
        rig = Rig.build(hand)
        hand.run(rig.train(0))
        torch.manual_seed(5)
        before = rig.snapshot()
        task = hand.start(act(rig))
        point.arm(hand, task)
        error = drive(rig, task)
        hand.on_turn = lambda turn: None
        if point.hit:
            assert task.cancelled() or error is None, f"{error!r} instead of CancelledError"
        else:
            assert error is None
        rig.kept.clear()
        del task, error
        if act in (_mixed, _queue, _task_group, _anyio_group, _synchronize, _step_async, _step_sync):
            after(rig, None)  # several things, each whole or not at all: test_race looks which
        else:
            if act not in _happened:
                _happened[act] = happened(act)
            after(rig, [before, _happened[act]])
        return point.hit


_happened: dict[Any, Snapshot] = {}


@pytest.mark.parametrize("act", AWAITS, ids=lambda act: act.__name__.strip("_"))
def test_d02_cancelled_at_every_turn(act: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
    turn = 0
    while attempt(act, Point(turn), None, own=False):
        turn += 1 if turn < 12 else 3 if act is not _mixed else 8
    assert turn >= 3


@pytest.mark.parametrize("chunk", range(4))
def test_d02_two_hundred_seeds(chunk: int) -> None:
    """Any await, any order of the devices' work, at any turn, once or twice."""
    for seed in range(chunk * 50, chunk * 50 + 50):
        chance = random.Random(seed)
        act = chance.choice(AWAITS)
        again = chance.choice([None, 0, 1, 2, chance.randrange(20)])
        attempt(act, Point(chance.randrange(60), again), seed, own=chance.random() < 0.5)


# ---- ways to cancel that are ways of their own ---------------------------------------------------------------------


def test_anyio_scopes_cancel_again_and_again_and_the_loop_does_not_spin() -> None:
    """A scope cancels at every turn of the loop until its block is left; while the layer that runs now comes to its end
    the loop must sleep, not spin."""
    with Hand() as hand:
        rig = Rig.build(hand)

        async def train() -> bool:
            with anyio.CancelScope() as scope:
                rig.kept.append(scope)
                await rig.train()
            return scope.cancelled_caught

        task = hand.start(train())
        for _ in range(12):
            hand.advance()
        hand.held.update(hand.streams)  # whatever runs now goes on for long
        assert any(stream.jobs for stream in hand.streams)
        hand.loop.call_soon(rig.kept[0].cancel)
        turns = 0
        while not hand.idle():
            hand.turn()
            turns += 1
            assert turns < 50, "the loop spins"
        assert not task.done()
        hand.held.clear()
        assert hand.finish(task)
        rig.kept.clear()
        after(rig, None)


@pytest.mark.parametrize("way", ["move_on_after", "fail_after", "timeout", "wait_for", "wait_for_zero", "task"])
def test_d02_a_deadline_that_has_passed_already(way: str) -> None:
    async def act(rig: Rig) -> None:
        if way == "move_on_after":
            with anyio.move_on_after(0):
                await rig.train()
            return
        with pytest.raises(TimeoutError if way != "task" else asyncio.CancelledError):
            if way == "fail_after":
                with anyio.fail_after(0):
                    await rig.train()
            elif way == "timeout":
                async with asyncio.timeout(0):
                    await rig.train()
            elif way == "wait_for":
                await asyncio.wait_for(rig.train(), 1e-9)
            elif way == "wait_for_zero":
                await asyncio.wait_for(rig.train(), 0)
            else:
                task = asyncio.ensure_future(rig.train())
                task.cancel()  # before it ran
                await task

    with Hand() as hand:
        rig = Rig.build(hand)
        hand.run(rig.train(0))
        torch.manual_seed(5)
        before = rig.snapshot()
        hand.run(act(rig), threads=True)
        before.assert_same(rig.snapshot())
        after(rig, [before])


def test_a_failed_step_is_told_though_the_waiter_was_cancelled_in_that_moment() -> None:
    """The exception was claimed by the call's own task, and went down with the waiter's cancellation."""

    def fails() -> None:
        raise ValueError("step")

    for is_async in (True, False):
        told = 0
        for turn in range(30):
            with Hand() as hand:
                rig = Rig.build(hand)

                async def act(rig: Rig = rig, is_async: bool = is_async) -> None:
                    handle = await rig.model.step(fails, is_async=is_async)
                    if is_async:
                        await handle

                task = hand.start(act())
                point = Point(turn)
                point.arm(hand, task)
                error = drive(rig, task)
                hand.on_turn = lambda turn: None
                hand.settle()
                if not point.hit:
                    assert isinstance(error, ValueError)
                    break
                later = drive(rig, hand.start(rig.model.synchronize()))
                begun = rig.model._store.steps_scheduled
                assert [type(error), type(later)].count(ValueError) == begun, (turn, error, later)
                assert drive(rig, hand.start(rig.model.synchronize())) is None
                told += begun
        assert told


@pytest.mark.parametrize("turn", range(0, 24, 2))
def test_aclose_cancelled_closes_when_called_again(turn: int) -> None:
    with Hand() as hand:
        rig = Rig.build(hand)
        hand.run(rig.train(0))
        training, stepping = hand.start(rig.train(1)), hand.start(rig.model.step(rig.step_fn))
        for _ in range(3):
            hand.turn()
        task = hand.start(rig.model.aclose())
        Point(turn).arm(hand, task)
        drive(rig, task)
        hand.on_turn = lambda turn: None
        hand.run(rig.model.aclose())
        assert training.done() and stepping.done()
        assert_idle(rig.model)
        RoundPipe(rig.module, devices=hand.pool)  # the parameters are free


def test_backward_cancelled_while_the_walk_is_under_way() -> None:
    """The walk has a thread of its own: the turns are not the same every time, the invariants are."""
    for turn in [*range(12), *range(12, 60, 6)]:
        with Hand() as hand:
            rig = Rig.build(hand)
            out, _ = hand.run(rig.infer())
            torch.manual_seed(5)
            before = rig.snapshot()
            task = hand.start(rig.model.backward(out.square().sum()))
            point = Point(turn)
            point.arm(hand, task)
            error = drive(rig, task, threads=True)
            hand.on_turn = lambda turn: None
            assert error is None or task.cancelled()
            if error is not None:
                now = rig.snapshot()
                assert now.is_same(before) or all(g is not None for g in now.gradients.values())
            del out, task, error
            gc.collect()
            after(rig, None)


def test_keyboard_interrupt_stops_the_call_and_the_next_one_works() -> None:
    """Ctrl-C twice, in a process of its own; each time training goes on after it."""
    script = """
        import asyncio, os, signal, threading
        import torch
        from torch import nn
        from roundpipe_async.devices.pool import DevicePool
        from roundpipe_async.model import RoundPipe

        class Layer(nn.Linear):
            def forward(self, x):
                if interrupting:
                    interrupting.pop()
                    os.kill(os.getpid(), signal.SIGINT)
                return super().forward(x)

        interrupting = []
        module = nn.Sequential(*[Layer(4, 4) for _ in range(4)])
        pool = DevicePool.cpu(2, 1)
        model = RoundPipe(module, devices=pool)
        x = torch.randn(6, 4)

        async def train(interrupt):
            if interrupt:
                interrupting.append(1)
            for _ in range(3):
                await model.forward_backward((x,), loss_fn=lambda out, label: out.sum())

        for _ in range(2):
            try:
                asyncio.run(train(True))
            except KeyboardInterrupt:
                print("interrupted")
            assert not model._store._unsettled
            asyncio.run(train(False))
        asyncio.run(model.aclose())
        pool.close()
        print("trained", module[0].weight.grad is not None)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).resolve().parent.parent, check=False,
    )  # fmt: skip
    assert (done.stdout.split(), done.stderr, done.returncode) == (
        ["interrupted", "interrupted", "trained", "True"], "", 0,
    )  # fmt: skip
