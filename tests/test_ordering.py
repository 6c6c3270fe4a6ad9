"""B02, D12: who reads which parameters and adds to which gradients, exactly; a test for each rule of `store`.

Every layer holds one scalar that starts at 0 and gets the gradient x; SGD with learning rate 1 steps it. So what a
call read is seen in its loss, and layers of two versions in one call would be seen at once.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_async.config import RoundPipeRunConfig
from roundpipe_async.devices.pool import DevicePool
from roundpipe_async.model import RoundPipe
from roundpipe_async.modes import no_grad
from roundpipe_async.optimizer import OptimizerCtx
from roundpipe_async.scheduling.plan import ModelExecutePlan
from tests.support.aftermath import assert_idle
from tests.support.manual_device import Hand

Value = tuple[torch.Tensor, torch.Tensor]


class Scalar(nn.Module):
    """Adds w times x to what came before; writes down the w that it saw, for each x."""

    def __init__(self, reads: dict[float, list[float]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self._reads = [reads]

    def forward(self, value: Value) -> Value:
        total, x = value
        self._reads[0].setdefault(float(x.detach().flatten()[0]), []).append(float(self.weight.detach()))
        return total + self.weight * x, x


class First(Scalar):
    def forward(self, x: torch.Tensor) -> Value:  # type: ignore[override]
        return super().forward((torch.zeros_like(x), x))


LAYERS = 4
ONE = RoundPipeRunConfig(num_microbatch=1)
PLAN = RoundPipeRunConfig(
    num_microbatch=1, execute_plan=ModelExecutePlan([range(0, 1), range(1, 3)], [range(3, 4), range(1, 3), range(0, 1)])
)
EVALUATION = RoundPipeRunConfig(num_microbatch=1, execute_plan=ModelExecutePlan([range(0, 2), range(2, 4)], []))


class Lab:
    """The model, its optimizer, and what its layers saw."""

    def __init__(self, pool: DevicePool, layers: int = LAYERS) -> None:
        self.reads: dict[float, list[float]] = {}
        self.module = nn.Sequential(First(self.reads), *(Scalar(self.reads) for _ in range(layers - 1)))
        self.model = RoundPipe(self.module, devices=pool, model_run_config=PLAN if layers == LAYERS else ONE)
        with OptimizerCtx():
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.took: list[float] = []

    def train(self, x: float) -> Awaitable[torch.Tensor]:
        return self.model.forward_backward((torch.tensor([x]),), loss_fn=lambda out, label: out[0].sum())

    async def evaluate(self, x: float) -> None:
        with no_grad():
            await self.model(torch.tensor([x]), roundpipe_run_config=EVALUATION)

    def step_fn(self, wait: Callable[[], Any] = lambda: None) -> None:
        wait()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = {0.0 if p.grad is None else float(p.grad.detach()) for p in parameters}
        assert len(gradients) == 1, f"layers got different gradients: {gradients}"
        self.took.append(gradients.pop())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, is_async: bool = True, **options: Any) -> Awaitable[Any]:
        return self.model.step(self.step_fn, is_async, **options)

    def weights(self) -> list[float]:
        return [float(p.detach()) for p in self.module.parameters()]


class Contract:
    """What SPEC 5 says, one thing after another."""

    def __init__(self) -> None:
        self.versions = [0.0]
        self.visible = 0
        self.pending = 0.0
        self.reads: dict[float, float] = {}
        self.took: list[float] = []

    def train(self, x: float) -> None:
        self.evaluate(x)
        self.pending += x

    def evaluate(self, x: float) -> None:
        self.reads[x] = self.versions[self.visible]

    def step(self, is_async: bool) -> None:
        self.took.append(self.pending)
        self.versions.append(self.versions[-1] - self.pending)
        self.pending = 0.0
        steps = len(self.versions) - 1
        self.visible = max(self.visible, steps - 1) if is_async else steps

    def check(self, lab: Lab) -> None:
        for x, expected in self.reads.items():
            assert set(lab.reads[x]) == {expected}, f"the call with x={x} read {lab.reads[x]}, not {expected}"
        assert lab.took == self.took


Program = list[tuple[str, float]]


def random_program(chance: random.Random, length: int) -> Program:
    kinds = ["train", "train", "train", "evaluate", "async", "async", "sync"]
    return [(chance.choice(kinds), float(2 ** (i % 20)) + i / 64) for i in range(length)]


def submit(lab: Lab, contract: Contract, program: Program) -> list[Awaitable[Any]]:
    """Make every call of the program, in order, in this moment."""
    calls: list[Awaitable[Any]] = []
    for kind, x in program:
        if kind == "train":
            contract.train(x)
            calls.append(lab.train(x))
        elif kind == "evaluate":
            contract.evaluate(x)
            with no_grad():
                calls.append(lab.model(torch.tensor([x]), roundpipe_run_config=EVALUATION))
        else:
            contract.step(kind == "async")
            calls.append(lab.step(kind == "async"))
    return calls


# ---- D12 -----------------------------------------------------------------------------------------------------------

STORY: Program = [
    ("train", 1.0), ("async", 0), ("train", 2.0), ("evaluate", 3.0), ("async", 0), ("train", 4.0), ("sync", 0),
    ("evaluate", 5.0), ("train", 6.0), ("train", 7.0), ("async", 0), ("async", 0), ("train", 8.0),
]  # fmt: skip


def test_the_contract_itself() -> None:
    """The rule written out by hand for one story."""
    contract = Contract()
    for kind, x in STORY:
        if kind in ("train", "evaluate"):
            getattr(contract, kind)(x)
        else:
            contract.step(kind == "async")
    assert contract.versions == [0.0, -1.0, -3.0, -7.0, -20.0, -20.0]
    assert contract.reads == {1.0: 0.0, 2.0: 0.0, 3.0: 0.0, 4.0: -1.0, 5.0: -7.0, 6.0: -7.0, 7.0: -7.0, 8.0: -20.0}


@pytest.mark.parametrize("own_memory", [False, True])
async def test_d12_each_awaited(own_memory: bool) -> None:
    async with DevicePool.cpu(2, 1, own_memory=own_memory) as pool:
        lab, contract = Lab(pool), Contract()
        for kind, x in STORY:
            await submit(lab, contract, [(kind, x)])[0]
        await lab.model.synchronize()
        contract.check(lab)
        assert lab.weights() == [contract.versions[-1]] * LAYERS
        await lab.model.aclose()


@pytest.mark.parametrize("order", ["gathered", "backwards"])
async def test_d12_all_made_at_once(order: str) -> None:
    """Who awaits in which order changes nothing."""
    async with DevicePool.cpu(2, 1) as pool:
        lab, contract = Lab(pool), Contract()
        calls = submit(lab, contract, STORY)
        await asyncio.gather(*(reversed(calls) if order == "backwards" else calls))
        await lab.model.synchronize()
        contract.check(lab)
        await lab.model.aclose()


async def test_d12_two_tasks() -> None:
    """Two tasks train and step one model: each call reads one version, nothing is lost, nothing counts twice."""
    async with DevicePool.cpu(2, 1) as pool:
        lab = Lab(pool)

        async def task(base: float) -> None:
            for i in range(10):
                await lab.train(base + i)
                await lab.step()

        await asyncio.gather(task(100.0), task(200.0))
        await lab.model.synchronize()
        assert sum(lab.took) == sum(100.0 + i for i in range(10)) + sum(200.0 + i for i in range(10))
        assert all(len(set(reads)) == 1 for reads in lab.reads.values())
        assert lab.weights() == [-sum(lab.took)] * LAYERS
        await lab.model.aclose()


@pytest.mark.parametrize("own_memory", [False, True])
def test_d12_any_program_in_any_order_of_the_devices(own_memory: bool) -> None:
    """Rules 1 to 4 and 6: all at once, the work played in random order."""
    for seed in range(40):
        with Hand(own_memory=own_memory, seed=seed) as hand:
            lab, contract = Lab(hand.pool), Contract()
            program = random_program(random.Random(seed), 12)
            calls = hand.within(lambda lab=lab, contract=contract, program=program: submit(lab, contract, program))
            hand.run(_all(calls))
            hand.run(lab.model.synchronize())
            contract.check(lab)
            assert lab.weights() == [contract.versions[-1]] * LAYERS
            gradients = [p.grad for p in lab.module.parameters()]
            assert [0.0 if g is None else float(g) for g in gradients] == [contract.pending] * LAYERS
            assert_idle(lab.model)


async def _all(calls: list[Awaitable[Any]]) -> None:
    await asyncio.gather(*calls)


# ---- B02 -----------------------------------------------------------------------------------------------------------


async def test_b02_fifty_times_a_step_that_waits_while_the_next_call_runs() -> None:
    """The step reads its gradients only after the next call, with very different data, has run to its end."""
    async with DevicePool.cpu(2, 1) as pool:
        lab, contract = Lab(pool), Contract()
        for i in range(50):
            gate = threading.Event()
            x = float(1 + i)
            contract.train(x)
            await lab.train(x)
            contract.step(True)
            await lab.step(wait=lambda gate=gate: gate.wait(60))
            contract.train(1000.0 + i)
            await lab.train(1000.0 + i)  # ends while the step waits
            assert not lab.took[i * 2 :]
            gate.set()
            contract.step(True)
            await lab.step()
        await lab.model.synchronize()
        contract.check(lab)
        await lab.model.aclose()


# ---- the rules of the store, one by one ----------------------------------------------------------------------------


def play_until(hand: Hand, done: Callable[[], bool]) -> None:
    while not done():
        assert hand.advance(), "stuck"


def test_rule_1_a_call_reads_what_was_admitted_before_it_although_it_runs_after_the_next_step() -> None:
    with Hand() as hand:
        lab = Lab(hand.pool)
        hand.run(lab.train(1.0))
        hand.run(lab.step(is_async=False))
        devices = [stream for stream in hand.streams if stream.name.startswith("manual")]
        hand.held.update(devices)
        late = hand.start(_wait(lambda: lab.train(2.0)))
        hand.settle()  # admitted; its device does not move
        hand.held.clear()
        hand.held.update(devices[:1])
        handle = hand.within(lambda: lab.step(is_async=False))
        stepping = hand.start(_wait(lambda: handle))
        hand.settle()
        assert not late.done() and not stepping.done()
        hand.held.clear()
        hand.finish(late)
        hand.finish(stepping)
        assert set(lab.reads[2.0]) == {-1.0} and lab.weights() == [-3.0] * LAYERS


async def _wait(make: Callable[[], Awaitable[Any]]) -> Any:
    return await make()


def test_rule_1_an_asynchronous_step_is_not_seen_before_the_one_after_it() -> None:
    with Hand() as hand:
        lab = Lab(hand.pool)
        hand.run(lab.train(1.0))
        handle = hand.run(lab.step())
        hand.settle()
        assert handle.done()  # long before the next call
        hand.run(lab.train(2.0))
        hand.run(lab.step())
        hand.run(lab.train(4.0))
        assert (set(lab.reads[2.0]), set(lab.reads[4.0])) == ({0.0}, {-1.0})


class Keep(nn.Module):
    """Gives its input, and has a parameter to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_rule_2_calls_that_train_start_in_order_of_admission() -> None:
    """The first waits for an input that another model is still to make; the second could start, and must not."""
    order: list[str] = []

    def loss_fn(name: str) -> Callable[[Any, Any], torch.Tensor]:
        def loss(out: Value, label: Any) -> torch.Tensor:
            order.append(name)
            return out[0].sum()

        return loss

    with Hand() as hand:
        maker, lab = RoundPipe(nn.Sequential(Keep()), devices=hand.pool), Lab(hand.pool)
        hand.held.add(hand.optimizer)
        stepping = hand.start(_wait(lambda: maker.step(lambda: None, is_async=False)))
        hand.settle()
        config = RoundPipeRunConfig(num_microbatch=1, merge_output=False)
        packed = hand.run(_wait(lambda: maker(torch.tensor([1.0]), roundpipe_run_config=config)))
        first = hand.start(_wait(lambda: lab.model.forward_backward((packed,), loss_fn=loss_fn("first"))))
        hand.settle()
        x = torch.tensor([2.0])
        second = hand.start(_wait(lambda: lab.model.forward_backward((x,), loss_fn=loss_fn("second"))))
        hand.settle()
        assert 2.0 not in lab.reads, "not even its first layer may run"
        assert order == [] and not second.done()
        hand.held.clear()
        for task in (first, second, stepping):
            hand.finish(task, threads=True)  # the walk behind the first one's input has a thread of its own
        hand.settle()
        assert order == ["first", "second"]


def _held_first(hand: Hand, lab: Lab, *, step: bool) -> tuple[Any, Any, Any]:
    """A call whose device does not move, a step behind it (perhaps), and a call that may use the other device."""
    hand.held.add(hand.streams[2])
    first = hand.start(_wait(lambda: lab.train(1.0)))
    hand.settle()
    stepping = hand.start(_wait(lambda: lab.step())) if step else None
    hand.settle()
    second = hand.start(_wait(lambda: lab.train(10.0)))
    hand.settle()
    return first, stepping, second


def test_rule_3_a_step_takes_what_the_calls_before_it_commit_and_nothing_of_those_after_it() -> None:
    with Hand() as hand:
        lab = Lab(hand.pool, layers=1)
        first, stepping, second = _held_first(hand, lab, step=True)
        assert 10.0 in lab.reads and 1.0 not in lab.reads, "the second call has run before the first"
        assert not second.done(), "but it may not commit yet"
        hand.held.clear()
        for task in (first, stepping, second):
            hand.finish(task)
        hand.settle()
        hand.run(lab.step())
        hand.run(lab.model.synchronize())
        assert lab.took == [1.0, 10.0]


def test_rule_3_a_failing_call_before_a_step_gives_it_nothing_and_holds_nobody_up() -> None:
    with Hand() as hand:
        lab = Lab(hand.pool, layers=1)
        first, stepping, second = _held_first(hand, lab, step=True)
        first.cancel()
        hand.held.clear()
        hand.finish(second)
        hand.finish(stepping)
        assert first.cancelled()
        hand.run(lab.step())
        hand.run(lab.model.synchronize())
        assert lab.took == [0.0, 10.0]


def test_rule_4_gradients_of_calls_without_a_step_between_add_up_in_order() -> None:
    with Hand() as hand:
        lab = Lab(hand.pool, layers=1)
        first, _, second = _held_first(hand, lab, step=False)
        assert 10.0 not in lab.reads, "its backward starts from the first one's gradients"
        hand.held.clear()
        hand.finish(first)
        hand.finish(second)
        assert float(lab.module[0].weight.grad) == 11.0


def test_rule_4_a_call_right_behind_a_step_does_not_wait_for_the_calls_before_it() -> None:
    with Hand() as hand:
        lab = Lab(hand.pool, layers=1)
        first, stepping, second = _held_first(hand, lab, step=True)
        assert 10.0 in lab.reads
        hand.held.clear()
        for task in (first, stepping, second):
            hand.finish(task)
        hand.settle()


def test_rule_5_buffers_are_those_of_one_call_after_the_other() -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
        plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
        plain.load_state_dict(module.state_dict())
        data = [torch.randn(6, 3) for _ in range(4)]
        with Hand(seed=seed) as hand:
            model = RoundPipe(module, devices=hand.pool, model_run_config=RoundPipeRunConfig(num_microbatch=2))

            def make(model: RoundPipe = model, data: list[torch.Tensor] = data) -> list[Awaitable[Any]]:
                return [
                    *(model.forward_backward((x,), loss_fn=lambda out, label: out.sum()) for x in data[:3]),
                    model(data[3]),
                ]

            hand.run(_all(hand.within(make)))
        for x in data:
            for part in x.tensor_split(2):
                plain(part).sum().backward()
        for (name, buffer), other in zip(module.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(buffer, other), name


def test_rule_6_publications_stand_between_the_steps_that_they_follow_and_precede() -> None:
    """The optimizer's stream stands still until everything is admitted, then everything else goes first."""
    for held_last in (True, False):
        with Hand() as hand:
            lab, contract = Lab(hand.pool), Contract()
            hand.held.add(hand.optimizer)
            program: Program = [
                ("train", 1.0), ("async", 0), ("async", 0), ("train", 2.0), ("async", 0), ("train", 4.0), ("sync", 0),
                ("train", 8.0),
            ]  # fmt: skip
            calls = hand.within(lambda lab=lab, c=contract, p=program: submit(lab, c, p))
            done = hand.start(_all(calls))
            hand.settle()
            hand.held.clear()
            if held_last:
                hand.held.update(stream for stream in hand.streams if stream is not hand.optimizer)
                hand.settle()
                hand.held.clear()
            hand.finish(done)
            hand.run(lab.model.synchronize())
            contract.check(lab)
            assert lab.weights() == [contract.versions[-1]] * LAYERS


async def test_gradients_outside_a_step_are_where_plain_pytorch_has_them() -> None:
    async with DevicePool.cpu(2, 1) as pool:
        lab = Lab(pool)
        await asyncio.gather(lab.train(1.0), lab.train(2.0))
        assert [float(p.grad) for p in lab.module.parameters()] == [3.0] * LAYERS
        await lab.step(is_async=False)
        assert [p.grad for p in lab.module.parameters()] == [None] * LAYERS
        await lab.model.aclose()
