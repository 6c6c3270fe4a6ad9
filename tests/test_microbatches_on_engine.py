"""Batches on real models: what goes in is cut, what comes out is put together, and all of it equals plain PyTorch."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer, _Replicate

from roundpipe_async import DevicePool, MicrobatchError, RoundPipe, RoundPipeRunConfig, no_grad
from tests.support.plain import assert_same_gradients, twin

WIDTH = 4


@pytest.fixture
async def pool() -> AsyncIterator[DevicePool]:
    async with DevicePool.cpu(2, 1) as pool:
        yield pool


class Noting(nn.Module):
    """A linear layer that notes what it was called with (in forward: recompute is told by its graph of inputs)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append(((x.detach().clone(), *args), kwargs))
        result: Tensor = self.linear(x)
        return result


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Noting(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def config(count: int | None, **options: Any) -> RoundPipeRunConfig:
    return RoundPipeRunConfig(num_microbatch=count, **options)


def sizes_of(model: Any) -> list[int]:
    return [len(args[0]) for args, _ in model[0].calls]


# ---- cutting --------------------------------------------------------------------------------------------------------


async def test_c01_every_sample_once_in_order(pool: DevicePool) -> None:
    module = network()
    async with RoundPipe(module, devices=pool) as model:
        for rows in range(1, 18):
            data = torch.arange(rows * WIDTH, dtype=torch.float32).view(rows, WIDTH) / 50
            for count in range(1, 9):
                module[0].calls.clear()
                with no_grad():
                    out = await model(data, roundpipe_run_config=config(count))
                parts = data.tensor_split(min(rows, count))
                with torch.no_grad():
                    seen = torch.cat([args[0] for args, _ in module[0].calls])
                    assert torch.equal(out, torch.cat([module(part) for part in parts]))
                assert torch.equal(seen, data)


@pytest.mark.parametrize(
    ("rows", "count", "sizes"),
    [
        (2, 4, [1, 1]),
        (36, 7, [6, 5, 5, 5, 5, 5, 5]),
        (9, 4, [3, 2, 2, 2]),
        (7, None, [3, 2, 2]),  # devices + 1
        (1, None, [1]),
    ],
)
async def test_c02_sizes_of_microbatches(rows: int, count: int | None, sizes: list[int], pool: DevicePool) -> None:
    module = network()
    async with RoundPipe(module, devices=pool) as model:
        data, label = torch.randn(rows, WIDTH), torch.randint(0, 3, (rows,))
        labels: list[Tensor] = []

        def loss_fn(out: Tensor, lab: Tensor) -> Tensor:
            labels.append(lab)
            return F.cross_entropy(out, lab)

        await model.forward_backward((data,), label=label, loss_fn=loss_fn, run_config=config(count))
        assert sizes_of(module)[: len(sizes)] == sizes
        assert sorted(map(len, labels), reverse=True) == sizes


@pytest.mark.parametrize("call", ["forward", "forward_backward"])
async def test_c02_an_empty_batch_is_an_error_and_harms_nothing(call: str, pool: DevicePool) -> None:
    module = network()
    async with RoundPipe(module, devices=pool) as model:
        empty = torch.zeros(0, WIDTH)
        with pytest.raises(ValueError, match="the batch is empty"):
            if call == "forward":
                await model(empty)
            else:
                await model.forward_backward((empty,), loss_fn=lambda out, _: out.sum())
        assert not module[0].calls
        await model.forward_backward((torch.ones(2, WIDTH),), loss_fn=lambda out, _: out.sum())


class Mixed(nn.Module):
    """Takes arguments of all kinds, and gives back what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[dict[str, Any]] = []

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        self.seen.append({"x": x.detach(), "rest": rest, **named})
        result: Tensor = self.linear(x)
        return result


async def test_c02_keyword_arguments_only_and_different_leading_sizes(pool: DevicePool) -> None:
    module = nn.Sequential(Mixed(), nn.Linear(WIDTH, WIDTH))
    async with RoundPipe(module, devices=pool) as model:
        x, bias, table = torch.randn(5, WIDTH), torch.randn(5, 2), torch.randn(7, 3)
        await model.forward_backward(
            input_kwargs={"x": x, "bias": bias, "table": table},
            loss_fn=lambda out, _: out.sum(),
            run_config=config(2),
        )
        first, second = module[0].seen[:2]
        assert torch.equal(torch.cat([first["x"], second["x"]]), x) and len(first["x"]) == 3
        assert torch.equal(torch.cat([first["bias"], second["bias"]]), bias)
        assert torch.equal(first["table"], table) and torch.equal(second["table"], table)
        with no_grad():
            out = await model(x=x, bias=bias, table=table)
        assert len(out) == 5


async def test_c04_the_documented_rule_end_to_end(pool: DevicePool, caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(Mixed(), nn.Linear(WIDTH, WIDTH))
    batch = 4
    positions, weights, same_length = torch.arange(60).view(3, batch, 5), torch.rand(3), torch.rand(batch)
    deep = {"deep": [{"mask": torch.eye(batch)}]}
    rest = (positions, weights, same_length, torch.tensor(2.0), None, 3, "text", [1, 2, 3, 4], deep)
    label = {"target": torch.randint(0, WIDTH, (batch,)), "weights": torch.rand(WIDTH + 1), "name": "x"}
    labels: list[Any] = []

    def loss_fn(out: Tensor, lab: Any) -> Tensor:
        labels.append(lab)
        return F.cross_entropy(out, lab["target"])

    async with RoundPipe(module, devices=pool, name="mixed") as model:
        with caplog.at_level(logging.INFO, "roundpipe_async"):
            for _ in range(2):
                await model.forward_backward(
                    (torch.randn(batch, WIDTH), *rest), label=label, loss_fn=loss_fn, run_config=config(2)
                )
        assert len(caplog.records) == 2  # one of the inputs, one of the label; once
        assert "args[1] (int64 tensor of shape (3, 4, 5))" in caplog.text and "label['weights']" in caplog.text
        for index, seen in enumerate(module[0].seen[:2]):
            part = slice(2 * index, 2 * index + 2)
            assert torch.equal(seen["rest"][0], positions) and torch.equal(seen["rest"][1], weights)
            assert torch.equal(seen["rest"][2], same_length[part]) and seen["rest"][3] == 2.0
            assert seen["rest"][4:8] == (None, 3, "text", [1, 2, 3, 4])
            assert torch.equal(seen["rest"][8]["deep"][0]["mask"], torch.eye(batch)[part])
            assert torch.equal(labels[index]["target"], label["target"][part])
            assert torch.equal(labels[index]["weights"], label["weights"]) and labels[index]["name"] == "x"
        module[0].seen.clear()
        specs = ((TensorChunkSpec(0), TensorChunkSpec(1), None, _Replicate, None, None, None, None, None, None), None)
        label_spec = {"target": TensorChunkSpec(0), "weights": _Replicate}
        await model.forward_backward(
            (torch.randn(batch, WIDTH), *rest),
            label=label,
            loss_fn=loss_fn,
            run_config=config(2, split_input=specs, split_label=label_spec),
        )
        for index, seen in enumerate(module[0].seen[:2]):
            part = slice(2 * index, 2 * index + 2)
            assert torch.equal(seen["rest"][0], positions[:, part])
            assert torch.equal(seen["rest"][2], same_length)


async def test_c04_callables_split_inputs_and_labels(pool: DevicePool) -> None:
    """A list that somebody split already, with labels beside: five microbatches, whatever num_microbatch says."""
    module = network()
    reference = twin(module)
    parts = [torch.randn(n, WIDTH) for n in (3, 1, 2, 2, 1)]
    targets = [torch.randint(0, 3, (len(part),)) for part in parts]
    own = config(
        2,
        split_input=lambda args, kwargs, n: ([(part,) for part in args[0]], [{} for _ in args[0]]),
        split_label=lambda label, n: list(label[:n]),
    )
    async with RoundPipe(module, devices=pool, model_run_config=own) as model:
        loss, out = await model.forward_backward((parts,), label=targets, loss_fn=F.cross_entropy, return_outputs=True)
    total: Any = 0
    for part, target in zip(parts, targets, strict=True):
        one = F.cross_entropy(reference(part), target)
        one.backward()
        total = total + one.detach()
    assert torch.equal(loss, total) and out.shape == (9, 3)
    assert_same_gradients(module, reference)


# ---- losses ---------------------------------------------------------------------------------------------------------


def _mean(out: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(out, label)


def _sum(out: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(out, label, reduction="sum")


def _tuple(out: Tensor, label: Tensor) -> tuple[Tensor, ...]:
    return _mean(out, label), out.square().mean()


def _list(out: Tensor, label: Tensor) -> list[Tensor]:
    return [_sum(out, label), out.detach().sum(), out.abs().mean()]  # the second needs no gradient: it is only summed


LOSSES = (_mean, _sum, _tuple, _list)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("loss_fn", LOSSES)
async def test_c05_one_rule_for_values_and_gradients(
    loss_fn: Callable[..., Any], count: int, reduction: Any, rounds: int, pool: DevicePool
) -> None:
    module = network()
    reference = twin(module)
    async with RoundPipe(module, devices=pool) as model:
        for _ in range(rounds):
            data, label = torch.randn(9, WIDTH), torch.randint(0, 3, (9,))
            loss = await model.forward_backward(
                (data,), label=label, loss_fn=loss_fn, run_config=config(count, loss_reduction=reduction)
            )
            rows: list[list[Tensor]] = []
            for part, target in zip(data.tensor_split(count), label.tensor_split(count), strict=True):
                losses = loss_fn(reference(part), target)
                losses = list(losses) if isinstance(losses, tuple | list) else [losses]
                if reduction == "mean":
                    losses = [one * (len(part) / 9) for one in losses]
                torch.autograd.backward([one for one in losses if one.requires_grad])
                rows.append([one.detach() for one in losses])
            expected = [sum(column) for column in zip(*rows, strict=True)]
            got = loss if isinstance(loss, list) else [loss]
            assert isinstance(loss, list) is (loss_fn in (_tuple, _list))
            assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(got, expected, strict=True))
            assert_same_gradients(module, reference)


@pytest.mark.parametrize("count", [2, 5])
async def test_c05_mean_losses_of_uneven_microbatches_are_the_whole_batchs(count: int, pool: DevicePool) -> None:
    module = network()
    whole = twin(module)
    data, label = torch.randn(9, WIDTH), torch.randint(0, 3, (9,))
    async with RoundPipe(module, devices=pool, model_run_config=config(count, loss_reduction="mean")) as model:
        loss = await model.forward_backward((data,), label=label, loss_fn=F.cross_entropy)
    expected = F.cross_entropy(whole(data), label)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-7)
    for a, b in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


async def test_c06_a_token_mean_with_padding_by_the_documented_recipe(pool: DevicePool) -> None:
    """Microbatches of 3, 40 and 97 valid tokens: the sum, divided by the batch's tokens, which go whole to each."""
    torch.manual_seed(1)
    vocabulary, length = 11, 50
    module = nn.Sequential(nn.Embedding(vocabulary, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, vocabulary))
    whole = twin(module)
    tokens = torch.randint(0, vocabulary, (6, length))
    targets = torch.randint(0, vocabulary, (6, length))
    for row, valid in enumerate((1, 2, 30, 10, 50, 47)):
        targets[row, valid:] = -100

    def loss_fn(logits: Tensor, label: tuple[Tensor, Tensor]) -> Tensor:
        of_part, num_tokens = label
        loss = F.cross_entropy(logits.flatten(0, 1), of_part.flatten(), ignore_index=-100, reduction="sum")
        return loss / num_tokens

    async with RoundPipe(module, devices=pool, model_run_config=config(3)) as model:
        loss = await model.forward_backward((tokens,), label=(targets, (targets != -100).sum()), loss_fn=loss_fn)
    expected = F.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
    expected.backward()
    assert abs(loss.item() - expected.item()) < 1e-6
    for a, b in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-6)


# ---- outputs --------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Output:
    logits: Any
    note: Any = None


@dataclass
class StyleOutput(OrderedDict[str, Any]):
    """An output in Hugging Face's style that nobody registered."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) is not None:
                self[item.name] = getattr(self, item.name)


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda x: (x, None),
    "int": lambda x: (x, 3),
    "str": lambda x: (x, "text"),
    "bool": lambda x: (x, True),
    "tensor": lambda x: x,
    "dict": lambda x: {"a": x, "b": {"n": 1, "half": x.detach().half()}},
    "nested tuple": lambda x: (x, (x * 2, [x.detach(), "s"], ())),
    "named tuple": lambda x: Pair(x, Pair(1, x.sin())),
    "dataclass": lambda x: Output(x, {"k": x.argmax(1)}),
    "style": lambda x: StyleOutput(loss=x.detach().new_tensor(2.5), logits=(x, x * 2)),
    "scalar": lambda x: (x, torch.tensor(2.5, dtype=torch.float64)),
    "counter": lambda x: (x, torch.tensor(7), torch.tensor(True)),
    "int tensor": lambda x: (x, x.argmax(1), x > 0),
}


class Makes(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: Tensor) -> Any:
        return OUTPUTS[self.kind](self.linear(x))


class Repeats(nn.Module):
    """The identity, with a gradient, on any value."""

    def forward(self, value: Any) -> Any:
        return value


def first_tensor(value: Any) -> Tensor:
    if isinstance(value, StyleOutput):
        value = value.logits
    if isinstance(value, Output):
        value = value.logits
    while not isinstance(value, Tensor):
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    return value


def agree(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.allclose(one, other, atol=1e-6)
    if isinstance(one, dict):
        return list(one) == list(other) and all(agree(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(agree, one, other))
    if isinstance(one, Output):
        return agree(one.logits, other.logits) and agree(one.note, other.note)
    return bool(one == other)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", OUTPUTS)
async def test_b13_outputs_have_the_types_and_values_of_plain_pytorch(kind: str, count: int, pool: DevicePool) -> None:
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Makes(kind), Repeats())
    reference = twin(module)
    async with RoundPipe(module, devices=pool, model_run_config=config(count)) as model:
        data = torch.randn(7, WIDTH)
        expected = reference(data)
        with no_grad():
            assert agree(await model(data), expected)
        out = await model(data)
        assert agree(out, expected) and first_tensor(out).requires_grad
        await model.backward(first_tensor(out).square().sum())
        first_tensor(expected).square().sum().backward()
        for a, b in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
            a.grad = b.grad = None
        loss, out = await model.forward_backward(
            (data,), loss_fn=lambda out, _: first_tensor(out).square().sum(), return_outputs=True
        )
        assert agree(out, expected) and not first_tensor(out).requires_grad
        torch.testing.assert_close(loss, first_tensor(expected).detach().square().sum())


async def test_b13_the_default_loss_is_what_the_model_returns(pool: DevicePool) -> None:
    class OwnLoss(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.square().mean(), x.abs().mean()

    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), OwnLoss())
    reference = twin(module)
    async with RoundPipe(module, devices=pool, model_run_config=config(2, loss_reduction="mean")) as model:
        data = torch.randn(5, WIDTH)
        losses, outputs = await model.forward_backward((data,), return_outputs=True)
        expected = reference(data)
        torch.autograd.backward(list(expected))
        for a, b, c in zip(losses, expected, outputs, strict=True):
            torch.testing.assert_close(a, b.detach())
            torch.testing.assert_close(c, b.detach())  # 0-dim outputs are averaged by their share of the batch
        for a, b in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


async def test_merge_specs_and_callables(pool: DevicePool) -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"out": x, "transposed": x.T, "rows": len(x), "constant": torch.ones(2)}

    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Counts())
    spec = {
        "transposed": TensorChunkSpec(1),
        "rows": _CustomReducer(0, lambda total, rows: total + rows),
        "constant": _Replicate,
    }
    async with RoundPipe(module, devices=pool, model_run_config=config(3)) as model:
        data = torch.randn(7, WIDTH)
        out = await model(data, roundpipe_run_config=config(None, merge_output=spec))
        assert torch.equal(out["transposed"], out["out"].T) and out["rows"] == 7
        assert torch.equal(out["constant"], torch.ones(2))
        await model.backward(out["transposed"].sum())
        _, rows = await model.forward_backward(
            (data,),
            loss_fn=lambda out, _: out["out"].sum(),
            return_outputs=True,
            run_config=config(None, merge_output=lambda outs: [out["rows"] for out in outs]),
        )
        assert rows == [3, 2, 2]
        unsaid = {"transposed": TensorChunkSpec(1)}
        with pytest.raises(MicrobatchError, match=r"output\['rows'\] cannot be merged: int 3 in microbatch 0, int 2"):
            await model(data, roundpipe_run_config=config(None, merge_output=unsaid))


# ---- errors ---------------------------------------------------------------------------------------------------------


def _raises(*_: Any) -> Any:
    raise ZeroDivisionError("mine")


def _bad_merge(outputs: list[Any]) -> Any:
    raise KeyError("merge")


@pytest.mark.parametrize(
    ("options", "error", "note"),
    [
        ({"split_input": _raises}, ZeroDivisionError, "split"),
        ({"split_label": _raises}, ZeroDivisionError, "split"),
        ({"merge_output": _bad_merge}, KeyError, "merge"),
        ({"split_input": lambda args, kwargs, n: args}, MicrobatchError, "split"),
        ({"split_label": lambda label, n: [label]}, MicrobatchError, "split"),
        ({"split_input": ((TensorChunkSpec(2),), None)}, MicrobatchError, "split"),
        ({"merge_output": {"a": TensorChunkSpec(0)}}, MicrobatchError, "merge"),
    ],
)
async def test_errors_arrive_as_themselves_with_a_note_and_nothing_happened(
    options: dict[str, Any], error: type[Exception], note: str, pool: DevicePool
) -> None:
    module = network()
    reference = twin(module)
    async with RoundPipe(module, devices=pool) as model:
        data, label = torch.randn(6, WIDTH), torch.randint(0, 3, (6,))
        with pytest.raises(error) as caught:
            await model.forward_backward(
                (data,), label=label, loss_fn=F.cross_entropy, return_outputs=True, run_config=config(2, **options)
            )
        assert type(caught.value) is error
        assert len(caught.value.__notes__) == 1 and note in caught.value.__notes__[0]
        assert_same_gradients(module, reference)
        await model.forward_backward((data,), label=label, loss_fn=F.cross_entropy, run_config=config(2))
        for part, target in zip(data.tensor_split(2), label.tensor_split(2), strict=True):
            F.cross_entropy(reference(part), target).backward()
        assert_same_gradients(module, reference)


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (lambda out, _: out, ValueError, "must be a scalar"),
        (lambda out, _: out.detach().sum(), ValueError, "needs no gradient"),
        (lambda out, _: out.sum().item(), TypeError, "must be a tensor"),
        (lambda out, _: [], ValueError, "empty list"),
        (lambda out, _: [out.sum()] * len(out), ValueError, "a sequence of 4 for microbatch 0, but a sequence of 3"),
    ],
)
async def test_wrong_losses_name_the_microbatch(
    loss_fn: Callable[..., Any], error: type[Exception], message: str, pool: DevicePool
) -> None:
    module = network()
    async with RoundPipe(module, devices=pool) as model:
        with pytest.raises(error, match=message) as caught:
            await model.forward_backward((torch.randn(7, WIDTH),), loss_fn=loss_fn, run_config=config(2))
        assert "microbatch" in str(caught.value)
        assert all(parameter.grad is None for parameter in module.parameters())
