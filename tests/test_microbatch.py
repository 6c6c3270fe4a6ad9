"""Cutting a batch (cases C01, C02, C04): every sample once, in order, and nothing cut in silence."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer, _Replicate
from torch.nn.utils.rnn import pack_sequence

from roundpipe_async.errors import MicrobatchError
from roundpipe_async.microbatches import split as microbatch

batches = st.integers(1, 17)
counts = st.integers(1, 8)


class Batch(NamedTuple):
    ids: Tensor
    names: list[str]


@dataclass(frozen=True, slots=True)
class Sample:
    ids: Tensor
    note: Any


def rows(batch: int, *shape: int) -> Tensor:
    """A tensor whose rows are all different, and hold their number in the first entry."""
    return torch.arange(batch * max(1, torch.Size(shape).numel()), dtype=torch.float32).reshape(batch, *shape)


# --- C01, C02: the rule ----------------------------------------------------------------------------------------------


@given(batches, counts)
def test_c01_every_sample_once_and_in_order(batch: int, count: int) -> None:
    x, mask = rows(batch, 2), rows(batch)
    split = microbatch.split_inputs((x,), {"mask": mask}, count)
    expected = x.tensor_split(min(count, batch))
    assert split.sizes == [len(part) for part in expected] and split.batch_size == batch
    assert max(split.sizes) - min(split.sizes) <= 1
    for args, kwargs, part in zip(split.args, split.kwargs, expected, strict=True):
        assert torch.equal(args[0], part) and torch.equal(kwargs["mask"], part[:, 0] / 2)
    assert torch.equal(torch.cat([args[0] for args in split.args]), x)


@pytest.mark.parametrize(
    ("batch", "count", "sizes"),
    [(2, 4, [1, 1]), (36, 7, [6, 5, 5, 5, 5, 5, 5]), (9, 4, [3, 2, 2, 2]), (1, 8, [1]), (8, 1, [8])],
)
def test_c02_sizes(batch: int, count: int, sizes: list[int]) -> None:
    """`torch.chunk` would cut 36 rows for 7 microbatches into 6 chunks; one device would idle."""
    assert microbatch.split_inputs((rows(batch),), {}, count).sizes == sizes
    assert microbatch.chunk_sizes(batch, count) == sizes


@pytest.mark.parametrize(
    ("args", "kwargs", "where"),
    [
        ((torch.empty(0, 3),), {}, r"args\[0\]"),
        ((1, None), {"x": torch.empty(0)}, r"kwargs\['x'\]"),
        ((torch.tensor(1.0), [torch.empty(0, 2)], torch.ones(3)), {}, r"args\[1\]\[0\]"),
    ],
)
def test_c02_an_empty_batch_is_an_error(args: Any, kwargs: Any, where: str) -> None:
    with pytest.raises(ValueError, match=f"batch is empty: {where}"):
        microbatch.split_call(args, kwargs, None, 3)


def test_c02_an_empty_label_of_a_call_without_input_tensors_is_an_error() -> None:
    with pytest.raises(ValueError, match="batch is empty: label"):
        microbatch.split_call((1,), {}, torch.empty(0), 3)
    with pytest.raises(ValueError, match="0 samples"):
        microbatch.chunk_sizes(0, 3)


def test_c02_keyword_arguments_only() -> None:
    call = microbatch.split_call((), {"b": "text", "x": rows(5)}, rows(5), 2)
    assert call.sizes == [3, 2] and call.args == [(), ()]
    assert [kwargs["b"] for kwargs in call.kwargs] == ["text", "text"]
    assert [label.tolist() for label in call.labels] == [[0, 1, 2], [3, 4]]


def test_c02_the_first_tensor_decides_between_leading_sizes() -> None:
    split = microbatch.split_inputs((torch.tensor(3.0), rows(4), rows(6)), {"z": rows(4)}, 2)
    assert split.batch_size == 4
    assert [len(args[1]) for args in split.args] == [2, 2] and [len(args[2]) for args in split.args] == [6, 6]
    assert [len(kwargs["z"]) for kwargs in split.kwargs] == [2, 2]


def test_c04_what_is_cut_and_what_is_given_whole(caplog: pytest.LogCaptureFixture) -> None:
    """Position ids [3, B, S], class weights of length C == B and C != B, and every kind of bystander."""
    batch = 4
    positions, same_length, other_length = torch.zeros(3, batch, 5), rows(batch), rows(7)
    nested = {
        "deep": [rows(batch, 2), {"n": 1}],
        "sample": Sample(rows(batch), "note"),
        "batch": Batch(rows(batch), []),
    }
    args = (
        rows(batch, 5),
        positions,
        same_length,
        other_length,
        torch.tensor(2.0),
        None,
        3,
        "text",
        [1, 2, 3, 4],
        nested,
    )
    with caplog.at_level(logging.INFO, "roundpipe_async"):
        call = microbatch.split_call(args, {}, None, 2, name="net", logged=set())
    for index, one in enumerate(call.args):
        part = slice(2 * index, 2 * index + 2)
        assert torch.equal(one[0], args[0][part])
        assert one[1] is positions and one[3] is other_length and one[4] is args[4]
        assert torch.equal(one[2], same_length[part])  # C == B looks like samples: say _Replicate for it
        assert one[5:9] == (None, 3, "text", [1, 2, 3, 4])
        assert torch.equal(one[9]["deep"][0], nested["deep"][0][part]) and one[9]["deep"][1] == {"n": 1}
        assert type(one[9]["sample"]) is Sample and torch.equal(one[9]["sample"].ids, rows(batch)[part])
        assert type(one[9]["batch"]) is Batch and torch.equal(one[9]["batch"].ids, rows(batch)[part])
    assert call.labels == [None, None]
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert message.startswith(
        "net: given whole to every microbatch: args[1] (float32 tensor of shape (3, 4, 5)), args[3]"
    )
    assert "args[7] (str 'text')" in message and "args[9]['deep'][1]['n']" in message
    assert "args[0]" not in message and "args[2]" not in message and "args[5]" not in message


def test_c04_what_is_given_whole_is_said_once_for_each_path(caplog: pytest.LogCaptureFixture) -> None:
    logged: set[str] = set()
    with caplog.at_level(logging.INFO, "roundpipe_async"):
        for extra in ({}, {}, {"a b": 1}):
            microbatch.split_call((rows(4), 1), extra, torch.tensor(1), 2, logged=logged)
        assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
            "args[1] (int 1)",
            "label (int64 tensor of shape ())",
            "kwargs['a b'] (int 1)",
        ]
        caplog.clear()
        microbatch.split_call((rows(4), 1), {}, None, 1)  # one microbatch: nothing is given to several
        assert not caplog.records


def test_c04_lists_already_split_are_not_guessed_at() -> None:
    """Two chunks in a list are two arguments of 3 rows, cut like any others."""
    split = microbatch.split_inputs(([rows(3), rows(3)],), {}, 2)
    assert [[len(part) for part in args[0]] for args in split.args] == [[2, 2], [1, 1]]


def test_containers_given_whole_are_not_shared_between_microbatches() -> None:
    """A layer that pops a key must not take it from the other microbatches, or from the caller."""
    options = {"k": 1}
    for args, kwargs, count in [((rows(4), options), {}, 2), ((options,), {}, 1)]:
        call = microbatch.split_call(args, kwargs, None, count)
        call.args[0][-1].clear()
        assert options == {"k": 1} and all(one[-1] == {"k": 1} for one in call.args[1:])
    label = {"k": 1}
    call = microbatch.split_call((rows(2),), {}, label, 2)
    assert call.labels == [label, label] and call.labels[0] is not call.labels[1] and call.labels[0] is not label
    labels = microbatch.split_label(label, 2, None)
    assert labels == [label, label] and labels[0] is not labels[1] and labels[0] is not label


def test_the_label_decides_where_inputs_hold_no_tensor() -> None:
    call = microbatch.split_call((3,), {}, rows(5), 2)
    assert call.args == [(3,), (3,)] and [len(label) for label in call.labels] == [3, 2] and call.sizes == [3, 2]
    nothing = microbatch.split_call((3,), {"x": torch.tensor(1)}, "label", 4)
    assert nothing.args == [(3,)] and nothing.labels == ["label"] and nothing.sizes == [1]
    called = microbatch.split_call((3,), {}, "ab", 4, label_spec=lambda label, count: list(label))
    assert called.args == [(3,), (3,)] and called.labels == ["a", "b"]


def test_a_label_on_its_own() -> None:
    assert [len(label) for label in microbatch.split_label(rows(5), 2, 5)] == [3, 2]
    assert [len(label) for label in microbatch.split_label(rows(5), 2, 5, sizes=[1, 4])] == [1, 4]
    assert [len(label) for label in microbatch.split_label(rows(5), 2, None)] == [3, 2]
    assert microbatch.split_label(None, 3, None) == [None, None, None]
    with pytest.raises(MicrobatchError, match="2 rows, too few for the 3 microbatches"):
        microbatch.split_label(rows(2), 3, None)
    with pytest.raises(ValueError, match="num_microbatch must be at least 1, not 0"):
        microbatch.split_call((rows(2),), {}, None, 0)


# --- views and gradients ---------------------------------------------------------------------------------------------


@given(batches, counts, st.booleans())
def test_chunks_are_views(batch: int, count: int, requires_grad: bool) -> None:
    x = rows(batch, 3).requires_grad_(requires_grad)
    for args in microbatch.split_inputs((x,), {}, count).args:
        assert args[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@given(batches, counts)
@settings(deadline=None)
def test_gradients_flow_through_the_chunks(batch: int, count: int) -> None:
    x = torch.randn(batch, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    parts = [args[0] for args in microbatch.split_inputs((x * 1,), {}, count).args]
    torch.autograd.backward([(part**2).sum() for part in parts])
    assert x.grad is not None and torch.equal(x.grad, 2 * x)


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_layer_may_change_its_input_in_place(grad_mode: bool, requires_grad: bool) -> None:
    """Views made without grad mode refuse to be changed under it; the split is not to bring that on the user."""
    x = rows(4, 2).requires_grad_(requires_grad)
    with torch.set_grad_enabled(grad_mode):
        (first, *_), *_ = microbatch.split_inputs((x,), {}, 2).args
    assert first.requires_grad is (requires_grad and grad_mode)
    if not first.requires_grad:
        first.mul_(torch.ones(2, requires_grad=True))
        assert first.requires_grad


# --- specs -----------------------------------------------------------------------------------------------------------


@given(batches, counts)
def test_c04_specs_leaf_by_leaf(batch: int, count: int) -> None:
    positions, weights = torch.zeros(3, batch, 2), rows(batch)
    spec = ((TensorChunkSpec(1), _Replicate, None), {"mask": TensorChunkSpec(-1)})
    split = microbatch.split_inputs((positions, weights, rows(batch)), {"mask": torch.zeros(2, batch)}, count, spec)
    sizes = microbatch.chunk_sizes(batch, count)
    assert split.sizes == sizes
    assert [args[0].shape for args in split.args] == [(3, size, 2) for size in sizes]
    assert all(args[1] is weights for args in split.args)
    assert [len(args[2]) for args in split.args] == sizes
    assert [kwargs["mask"].shape for kwargs in split.kwargs] == [(2, size) for size in sizes]


def test_c04_one_spec_for_a_subtree_and_dicts_with_keys_left_out(caplog: pytest.LogCaptureFixture) -> None:
    args = ({"a": rows(4), "b": [torch.zeros(2, 4), torch.zeros(3, 4), "s"]}, Sample(rows(4), "n"))
    spec = (({"b": TensorChunkSpec(1)}, {"ids": _Replicate()}), None)
    with caplog.at_level(logging.INFO, "roundpipe_async"):
        split = microbatch.split_inputs(args, {}, 2, spec)
    first = split.args[0]
    assert first[0]["b"][0].shape == (2, 2) and first[0]["b"][1].shape == (3, 2) and first[0]["b"][2] == "s"
    assert len(first[0]["a"]) == 2 and first[1].ids is args[1].ids
    whole = microbatch.split_inputs(args, {}, 2, _Replicate)
    assert whole.sizes == [1] and whole.args[0][0]["a"] is args[0]["a"]


def test_c04_a_sample_may_have_several_rows() -> None:
    """Beams or patches: 12 rows for 4 samples are cut between samples."""
    spec = ((TensorChunkSpec(0), TensorChunkSpec(0)), None)
    split = microbatch.split_inputs((rows(5), rows(15)), {}, 2, spec)
    assert [(len(args[0]), len(args[1])) for args in split.args] == [(3, 9), (2, 6)]


def test_c04_specs_of_labels() -> None:
    label = (rows(4), torch.zeros(3, 4), 7)
    parts = microbatch.split_label(label, 2, 4, (_Replicate, TensorChunkSpec(1), _Replicate))
    assert all(part[0] is label[0] and part[1].shape == (3, 2) and part[2] == 7 for part in parts)
    call = microbatch.split_call((1,), {}, torch.zeros(3, 4), 2, label_spec=TensorChunkSpec(1))
    assert [part.shape for part in call.labels] == [(3, 2), (3, 2)]
    whole = microbatch.split_call((rows(4),), {}, rows(4), 2, label_spec=_Replicate)
    assert all(part is whole.labels[0] for part in whole.labels)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (((TensorChunkSpec(0),), None), "spec of args has 1 entries, but the value has 3"),
        (((None, TensorChunkSpec(0), None), None), r"args\[1\] has TensorChunkSpec\(0\), but is list"),
        (((None, None, TensorChunkSpec(0)), None), r"args\[2\] has .*, but is int 3"),
        (((TensorChunkSpec(2), None, None), None), r"args\[0\] has .*\(2\), but is float32 tensor of shape \(4, 6\)"),
        (((None, {"x": None}, None), None), r"spec of args\[1\] names 'x', which is not in the value; it has \[0\]"),
        (((None, None, "cut"), None), r"spec of args\[2\] must be .* it is 'cut'"),
        (((None, "cut", None), None), r"spec of args\[1\] must be .* it is 'cut'"),
        (((None, None, _CustomReducer(0, max)), None), r"spec of args\[2\] must be"),
        ((None, {"y": _Replicate}), "spec of kwargs names 'y'"),
        (((TensorChunkSpec(1), None, None), {"m": TensorChunkSpec(0)}), r"4 entries there, .* batch size 6"),
        (["cut"], "split_input must be"),
    ],
)
def test_c04_a_spec_that_does_not_fit_names_the_leaf(spec: Any, message: str) -> None:
    if spec[0] and len(spec[0]) > 1 and spec[0][1] is not None and isinstance(spec[0][1], TensorChunkSpec):
        args: Any = (rows(4, 6), _opaque(), 3)
    else:
        args = (rows(4, 6), ["s"], 3)
    with pytest.raises(MicrobatchError, match=message):
        microbatch.split_inputs(args, {"m": rows(4)}, 2, spec)


def _opaque() -> Any:
    class Shut(list[int]):
        """An unregistered subclass of list is no container."""

        def __repr__(self) -> str:
            return "shut"

    Shut.__name__ = "list"
    return Shut([1])


@pytest.mark.parametrize("count", [1, 3])
def test_a_spec_is_checked_with_one_microbatch_as_with_many(count: int) -> None:
    with pytest.raises(MicrobatchError, match="label has"):
        microbatch.split_call((rows(4),), {}, torch.tensor(1), count, label_spec=TensorChunkSpec(0))


def test_values_that_only_look_like_samples_are_refused() -> None:
    packed = pack_sequence([rows(3), rows(2)])
    with pytest.raises(MicrobatchError, match=r"args\[0\]\['p'\] is a PackedSequence"):
        microbatch.split_inputs(({"p": packed},), {}, 2)
    whole = microbatch.split_inputs((packed, rows(2)), {}, 2, ((_Replicate, None), None))
    assert torch.equal(whole.args[1][0].data, packed.data)
    sparse = torch.eye(4).to_sparse()
    with pytest.raises(MicrobatchError, match=r"args\[1\] .* cannot be cut along dimension 0"):
        microbatch.split_inputs(
            (rows(4), torch.nested.nested_tensor([rows(i + 1) for i in range(4)], layout=torch.jagged)), {}, 2
        )
    assert len(microbatch.split_inputs((sparse,), {}, 1).args) == 1


def test_a_block_mask_made_for_a_batch_is_refused() -> None:
    attention = pytest.importorskip("torch.nn.attention.flex_attention")

    def mask(batch: int | None) -> Any:
        return attention.create_block_mask(lambda b, h, q, k: q >= k, batch, None, 128, 128, device="cpu")

    shared = mask(None)
    assert all(args[1] is shared for args in microbatch.split_inputs((rows(4), shared), {}, 2).args)
    with pytest.raises(MicrobatchError, match=r"args\[1\] is a BlockMask made for a batch"):
        microbatch.split_inputs((rows(4), mask(4)), {}, 2)


# --- callables -------------------------------------------------------------------------------------------------------


def test_c04_split_callables() -> None:
    def by_weight(args: Any, kwargs: Any, count: int) -> Any:
        assert count == 4
        return [[args[0][:1]], (args[0][1:],)], [kwargs, kwargs]

    call = microbatch.split_call((rows(5),), {"k": 1}, rows(5), 4, by_weight)
    assert call.sizes == [1, 4] and call.args[0][0].tolist() == [0]
    assert [label.tolist() for label in call.labels] == [[0], [1, 2, 3, 4]]  # cut where the inputs were cut
    assert call.kwargs == [{"k": 1}, {"k": 1}] and call.kwargs[0] is not call.kwargs[1]
    labelled = microbatch.split_call((rows(5),), {}, "ab", 4, by_weight, lambda label, count: tuple(label))
    assert labelled.labels == ["a", "b"]


def test_c04_a_label_that_does_not_follow_a_callable_is_not_guessed_at() -> None:
    def packing(args: Any, kwargs: Any, count: int) -> Any:
        return [(part.reshape(1, -1),) for part in args[0].chunk(2)], [{}, {}]

    with pytest.raises(
        MicrobatchError, match=r"2 rows in all, and no tensor of the label .*label: .*\(4,\).*split_label"
    ):
        microbatch.split_call((rows(4, 3),), {}, rows(4), 2, packing)
    call = microbatch.split_call((rows(4, 3),), {}, rows(4), 2, packing, lambda label, count: label.chunk(count))
    assert [len(label) for label in call.labels] == [2, 2]
    scalar = microbatch.split_call((rows(4, 3),), {}, torch.tensor(1.0), 2, packing)
    assert len(scalar.labels) == 2
    silent = microbatch.split_call((1,), {}, rows(5), 9, lambda args, kwargs, count: ([(1,), (2,)], [{}, {}]))
    assert silent.sizes is None and [len(label) for label in silent.labels] == [3, 2]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "must return .* not NoneType"),
        ([(1,), (2,), (3,)], "must return"),
        (([(1,)], {}), "must return"),
        (([(1,)], []), "returned 1 args and 0 kwargs"),
        (([], []), "returned 0 args and 0 kwargs"),
        (([torch.ones(2)], [{}]), r"args of microbatch 0 are no tuple: float32 tensor of shape \(2,\)"),
        (([(1,), (2,)], [{}, None]), "kwargs of microbatch 1 are no dict: NoneType"),
    ],
)
def test_c04_what_split_input_returns_is_checked(returned: Any, message: str) -> None:
    with pytest.raises(MicrobatchError, match=message):
        microbatch.split_call((rows(2),), {}, None, 2, lambda args, kwargs, count: returned)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.ones(2), "must return a list, one label a microbatch, not float32 tensor"),
        ([], "must return a list"),
        ([1, 2, 3], "returned 3 labels for 2 microbatches"),
    ],
)
def test_c04_what_split_label_returns_is_checked(returned: Any, message: str) -> None:
    with pytest.raises(MicrobatchError, match=message):
        microbatch.split_call((rows(2),), {}, None, 2, None, lambda label, count: returned)


def test_what_a_callable_raises_passes() -> None:
    def failing(*_: Any) -> Any:
        raise KeyError("mine")

    for specs in ((failing, None), (None, failing)):
        with pytest.raises(KeyError, match="mine"):
            microbatch.split_call((rows(2),), {}, None, 2, *specs)
