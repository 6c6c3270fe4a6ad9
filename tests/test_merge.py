"""Merging what microbatches give back (cases B13, C01, C05, C06): one rule for one and for many."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer, _Replicate
from torch.nn.utils.rnn import pack_sequence

from roundpipe_async.errors import MicrobatchError
from roundpipe_async.microbatches.split import (
    check_loss,
    loss_weights,
    merge_outputs,
    split_call,
    sum_losses,
    weighted_loss,
)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Output:
    logits: Any
    note: Any = None


@dataclass
class StyleOutput(OrderedDict[str, Any]):
    """An output in Hugging Face's style that nobody registered."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            if getattr(self, item.name) is not None:
                self[item.name] = getattr(self, item.name)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Output):
        return same(one.logits, other.logits) and same(one.note, other.note)
    return bool(one == other)


MAKERS = {
    "none": lambda x: None,
    "int": lambda x: 3,
    "str": lambda x: "text",
    "bool": lambda x: True,
    "tensor": lambda x: x,
    "dict": lambda x: {"a": x, "b": {"n": 1}},
    "tuple": lambda x: (x, (x * 2, [x, "s"])),
    "named tuple": lambda x: Pair(x, Pair(1, x)),
    "dataclass": lambda x: Output(x, {"k": x}),
    "style": lambda x: StyleOutput(logits=(x, x)),
    "scalar": lambda x: torch.tensor(2.5, dtype=torch.float64),
    "counter": lambda x: torch.tensor(7),
    "flag": lambda x: torch.tensor(True),
    "empty": lambda x: ({}, [], ()),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("count", [1, 3])
def test_b13_same_types_and_values_as_plain(kind: str, count: int) -> None:
    """B13: a stage may return anything; merged it is what plain returns for the whole batch."""
    x = torch.arange(15.0).reshape(5, 3)
    merged = merge_outputs([MAKERS[kind](part) for part in x.tensor_split(count)])
    assert same(merged, MAKERS[kind](x))
    if kind == "style":
        assert merged["logits"] is merged.logits and merged.loss is None


values = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=2), st.just("x"), st.just("scalar"), st.just("rows")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Output, inner, inner),
    ),
    max_leaves=6,
)


def fill(template: Any, x: Tensor) -> Any:
    """The template as an output: "x" stands for the rows, "scalar" for a 0-dim tensor."""
    if isinstance(template, (Pair, Output)):
        parts = (template.first, template.second) if isinstance(template, Pair) else (template.logits, template.note)
        return type(template)(*(fill(part, x) for part in parts))
    if isinstance(template, (list, tuple)):
        return type(template)(fill(part, x) for part in template)
    if isinstance(template, dict):
        return {key: fill(part, x) for key, part in template.items()}
    made = {"x": x, "rows": x[:, 0], "scalar": torch.tensor(1.5)}
    return made.get(template, template) if isinstance(template, str) else template


@given(values, st.integers(1, 17), st.integers(1, 8))
@settings(deadline=None)
def test_c01_split_then_merged_is_what_it_was(template: Any, batch: int, count: int) -> None:
    x = torch.arange(2.0 * batch).reshape(batch, 2)
    call = split_call((x,), {}, None, count)
    assert same(merge_outputs([fill(template, args[0]) for args in call.args]), fill(template, x))
    whole = split_call((x, fill(template, x)), {}, None, count)
    assert same(merge_outputs([args[1] for args in whole.args]), fill(template, x))


def test_zero_dim_tensors_are_averaged() -> None:
    losses = [torch.tensor(value, dtype=torch.float16, requires_grad=True) for value in (1.0, 2.0, 6.0)]
    merged = merge_outputs([{"loss": loss} for loss in losses])["loss"]
    assert merged.dtype == torch.float16 and merged.item() == 3.0
    weighted = merge_outputs(losses, sizes=[3, 2, 1])
    assert weighted.dtype == torch.float16 and weighted.item() == pytest.approx(13 / 6, rel=1e-3)
    weighted.backward()
    assert [round(loss.grad.item(), 3) for loss in losses if loss.grad is not None] == [0.5, 0.333, 0.167]
    thousands = [torch.tensor(1000.0, dtype=torch.float16)] * 4
    assert merge_outputs(thousands, sizes=[3, 2, 2, 2]).item() == 1000.0  # ninths have too few digits in fp16
    assert merge_outputs([torch.tensor(1 + 2j), torch.tensor(3 + 0j)]).item() == 2 + 1j
    with pytest.raises(ValueError, match="3 outputs, but sizes of 2 microbatches"):
        merge_outputs(losses, sizes=[1, 2])


def test_merged_outputs_carry_the_graphs_of_their_parts() -> None:
    x = torch.randn(5, 2, requires_grad=True)
    parts = [(args[0] * 2, (args[0] ** 2).mean()) for args in split_call((x,), {}, None, 2).args]
    rows, mean = merge_outputs(parts)
    (rows.sum() + mean).backward()
    assert x.grad is not None
    expected = 2 + torch.cat([2 * part / part.numel() / 2 for part in x.detach().tensor_split(2)])
    assert torch.allclose(x.grad, expected)
    with torch.no_grad():
        assert not merge_outputs(parts)[0].requires_grad


def test_one_microbatch_is_not_copied() -> None:
    rows, scalar = torch.ones(2, 3), torch.tensor(1.0)
    merged = merge_outputs([(rows, scalar)])
    assert merged[0] is rows and merged[1] is scalar


def nan_object() -> float:
    return float("nan")


def test_values_agree_by_value() -> None:
    for make in (nan_object, lambda: np.arange(3), lambda: "a" * 3, lambda: torch.tensor(3), lambda: {1, 2}):
        values = [{"v": make()} for _ in range(3)]
        assert merge_outputs(values)["v"] is values[0]["v"]


class Opaque:
    pass


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (
            [{"n": [1]}, {"n": [2]}],
            r"output\['n'\]\[0\] cannot be merged: int 1 in microbatch 0, int 2 in microbatch 1",
        ),
        ([1, 1, True], "bool True in microbatch 2; such values must agree"),
        ([1.0, 1], "int 1 in microbatch 1"),
        ([None, 0], "int 0 in microbatch 1"),
        ([Opaque(), Opaque()], "Opaque in microbatch 1; .* merge_output"),
        ([np.arange(2), np.arange(3)], "ndarray"),
        ([np.array([1, 2]), np.array([1, 3])], "ndarray"),
        (
            [(torch.tensor(1),), (torch.tensor(2),)],
            r"output\[0\] .*int64 tensor of shape \(\) \(1\) .*\(2\) in microbatch 1",
        ),
        ([torch.tensor(True), torch.tensor(False)], "must agree"),
        ([torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, 3)], r"\(1, 3\) in microbatch 2; they differ in more than"),
        ([torch.ones(2, 1), torch.ones(2)], r"they differ in more than dimension 0"),
        ([torch.ones(2), torch.ones(())], "a 0-dim tensor cannot be concatenated"),
        ([torch.ones(2), torch.ones(2, dtype=torch.float64)], "float64 .* in microbatch 1; the dtypes differ"),
        ([torch.tensor(1.0), torch.tensor(1)], "the dtypes differ"),
        ([torch.ones(2), None], "NoneType in microbatch 1"),
        ([Output(1), Output([1])], r"output\.logits has another structure in microbatch 1 .*: list\(\*\) and \*"),
        ([{"a": 1}, {"a": 1, "b": 2}], "output has another structure in microbatch 1"),
        ([{"a": 1}, {"b": 1}], "output has another structure"),
        ([[1], (1,)], "output has another structure"),
        ([[1, 2], [1]], "output has another structure"),
        ([StyleOutput(loss=1), StyleOutput(logits=1)], "output has another structure"),
        ([pack_sequence([torch.ones(2)])], "output is a PackedSequence"),
    ],
)
def test_b13_what_does_not_agree_names_the_leaf(outputs: list[Any], message: str) -> None:
    with pytest.raises(MicrobatchError, match=message):
        merge_outputs(outputs)


# --- specs and callables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_specs_leaf_by_leaf(count: int) -> None:
    x = torch.arange(12.0).reshape(2, 6)
    table, first = torch.ones(4), torch.zeros(2)
    outputs = [
        {"wide": part, "table": table.clone(), "sum": part.sum(), "rest": (first, 1)}
        for part in x.tensor_split(count, 1)
    ]
    spec = {"wide": TensorChunkSpec(-1), "table": _Replicate, "sum": _CustomReducer(torch.tensor(0.0), torch.add)}
    merged = merge_outputs(outputs, spec)
    assert torch.equal(merged["wide"], x) and torch.equal(merged["table"], table) and merged["sum"] == x.sum()
    assert torch.equal(merged["rest"][0], torch.zeros(2 * count)) and merged["rest"][1] == 1
    subtree = merge_outputs([(torch.ones(2, 1), ["s", torch.ones(3, 1)])] * count, TensorChunkSpec(1))
    assert subtree[0].shape == (2, count) and subtree[1][0] == "s" and subtree[1][1].shape == (3, count)
    assert same(merge_outputs([Output(table, "n")] * count, _Replicate()), Output(table, "n"))


@pytest.mark.parametrize(
    ("outputs", "spec", "message"),
    [
        ([torch.ones(2), torch.zeros(2)], _Replicate, "such values must agree"),
        ([torch.ones(2), torch.ones(3)], _Replicate, "such values must agree"),
        ([torch.ones(()), torch.ones(())], TensorChunkSpec(0), "no dimension 0"),
        ([torch.ones(())], TensorChunkSpec(0), "no dimension 0"),
        ([torch.ones(2, 2)], TensorChunkSpec(2), "no dimension 2"),
        ([1, 1], TensorChunkSpec(0), r"output has TensorChunkSpec\(0\), but is int 1"),
        ([(1, 2)], (None,), "spec of output has 1 entries, but the value has 2"),
        ([{"a": 1}], {"b": _Replicate}, r"names 'b', which is not in the value; it has \['a'\]"),
        ([{"a": 1}], {"a": "cat"}, r"spec of output\['a'\] must be .* it is 'cat'"),
    ],
)
def test_a_spec_that_does_not_fit_names_the_leaf(outputs: list[Any], spec: Any, message: str) -> None:
    with pytest.raises(MicrobatchError, match=message):
        merge_outputs(outputs, spec)


def test_merge_callables() -> None:
    outputs = [torch.ones(1), torch.ones(2)]
    assert merge_outputs(outputs, lambda parts: [type(parts), len(parts)]) == [list, 2]
    assert merge_outputs(outputs, True).shape == (3,)

    def failing(parts: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        merge_outputs(outputs, failing)
    with pytest.raises(ValueError, match="asks not to merge"):
        merge_outputs(outputs, False)
    with pytest.raises(ValueError, match="no outputs"):
        merge_outputs([])


# --- losses ----------------------------------------------------------------------------------------------------------


def test_c05_losses_are_summed_in_order_as_python_does() -> None:
    losses = [torch.tensor(value, requires_grad=True) for value in (1e8, 1.0, -1e8, 1.0)]
    total = sum_losses(losses)
    assert total.item() == sum(losses).item() == 1.0 and not total.requires_grad  # type: ignore[union-attr]
    one = sum_losses(losses[:1])
    assert one.item() == 1e8 and one is not losses[0] and one.untyped_storage() is not losses[0].untyped_storage()
    pair = sum_losses([(losses[0], losses[1]), [losses[2], losses[3]]])
    assert isinstance(pair, list) and [part.item() for part in pair] == [0.0, 2.0]
    assert sum_losses([torch.tensor(1.0, dtype=torch.float16)] * 2).dtype == torch.float16


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8))
def test_c05_the_sum_is_plains_bit_for_bit(numbers: list[float]) -> None:
    losses = [torch.tensor(number) for number in numbers]
    total: Any = 0
    for loss in losses:
        total = total + loss
    assert torch.equal(sum_losses(losses), total)


@pytest.mark.parametrize("batch", [1, 5, 9])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_c05_mean_losses_weighted_by_their_share_are_the_batchs(batch: int, count: int) -> None:
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    x, y = torch.randn(batch, 3, dtype=torch.float64), torch.randn(batch, 1, dtype=torch.float64)
    whole = F.mse_loss(model(x), y)
    expected = torch.autograd.grad(whole, model.weight)[0]
    call = split_call((x,), {}, y, count)
    weights = loss_weights(call.sizes, "mean")
    assert weights is not None and math.isclose(sum(weights), 1.0)
    parts = []
    for args, label, weight in zip(call.args, call.labels, weights, strict=True):
        parts.append(weighted_loss([F.mse_loss(model(args[0]), label)], weight))
        torch.autograd.backward(parts[-1])
    assert torch.allclose(sum_losses(parts)[0], whole, atol=1e-12)
    assert model.weight.grad is not None and torch.allclose(model.weight.grad, expected, atol=1e-12)


def test_loss_weights_and_what_they_refuse() -> None:
    assert loss_weights([3, 2], "sum") is None and loss_weights(None, None) is None
    assert loss_weights([3, 2], "mean") == [0.6, 0.4]
    assert weighted_loss("anything", None) == "anything"
    assert weighted_loss(torch.tensor(2.0, dtype=torch.float16), 0.5).dtype == torch.float16
    with pytest.raises(MicrobatchError, match="needs the number of samples"):
        loss_weights(None, "mean")
    with pytest.raises(ValueError, match="not 'none'"):
        loss_weights([1], "none")  # type: ignore[arg-type]


def test_c06_token_mean_over_the_whole_batch() -> None:
    """C06: microbatches with 3, 40 and 97 valid tokens; the recipe of the module's docstring gives the batch's mean."""
    torch.manual_seed(0)
    vocabulary, length, valid = 11, 100, (3, 40, 97)
    logits = torch.randn(3, length, vocabulary, requires_grad=True)
    targets = torch.full((3, length), -100)
    for row, tokens in enumerate(valid):
        targets[row, :tokens] = torch.randint(vocabulary, (tokens,))

    def loss_fn(out: Tensor, label: Any) -> Tensor:
        wanted, num_tokens = label
        loss = F.cross_entropy(out.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum")
        return loss / num_tokens

    call = split_call((logits,), {}, (targets, (targets != -100).sum()), 3)
    losses = [loss_fn(args[0], label) for args, label in zip(call.args, call.labels, strict=True)]
    whole = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert abs(sum_losses(losses).item() - whole.item()) < 1e-6
    mine = torch.autograd.grad(losses, logits)[0]
    assert torch.allclose(mine, torch.autograd.grad(whole, logits)[0], atol=1e-6)
    naive = (
        sum(
            F.cross_entropy(a[0].flatten(0, 1), lab[0].flatten(), ignore_index=-100)
            for a, lab in zip(call.args, call.labels, strict=True)
        )
        / 3
    )
    assert abs(naive.item() - whole.item()) > 1e-3  # type: ignore[union-attr]  # the fault the recipe avoids


def test_c05_losses_that_backward_may_start_from() -> None:
    needing, constant = torch.tensor([1.0], requires_grad=True), torch.tensor(2.0)
    assert check_loss(needing, 0) == [needing]
    assert check_loss((constant, needing), 0) == [needing]


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (None, TypeError, "loss of microbatch 2 must be a tensor.*returned NoneType"),
        (1.5, TypeError, "returned float 1.5"),
        ({"loss": torch.tensor(1.0)}, TypeError, "returned dict"),
        ([torch.tensor(1.0, requires_grad=True), 1.5], TypeError, "returned float 1.5 in a list"),
        ((), ValueError, "microbatch 2 is an empty tuple"),
        (torch.ones(3, requires_grad=True), ValueError, r"microbatch 2 must be a scalar, not a .*\(3,\)"),
        (torch.ones((), requires_grad=True).detach(), ValueError, "microbatch 2 needs no gradient"),
        ([torch.tensor(1.0), torch.tensor(1)], ValueError, "needs no gradient"),
    ],
)
def test_losses_that_cannot_be_walked_name_the_microbatch(loss: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_loss(loss, 2)


def test_losses_of_different_make_name_the_microbatch() -> None:
    one = torch.tensor(1.0)
    with pytest.raises(ValueError, match="one tensor for microbatch 0, but a sequence of 1 for microbatch 1"):
        sum_losses([one, [one]])
    with pytest.raises(ValueError, match="a sequence of 2 for microbatch 0, but a sequence of 1 for microbatch 2"):
        sum_losses([[one, one], (one, one), [one]])
    with pytest.raises(ValueError, match="no losses"):
        sum_losses([])
