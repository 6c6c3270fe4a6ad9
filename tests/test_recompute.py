"""Recompute sees what forward saw: its draws, through checkpoints inside a layer too, and the data a layer kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from roundpipe_async.recompute import (
    RecomputeScope,
    doing_recompute,
    draw_call_seed,
    get_recompute_data,
    layer_seed,
    recording,
    replaying,
    save_for_recompute,
    seeded,
)
from tests.support.threads import in_threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fixed_ambient_seed() -> None:
    torch.manual_seed(20260427)


P = torch.arange(32).reshape(4, 8) / 32 + 0.01
X = P.clone().requires_grad_()


# ---- recompute, and checkpoints inside a layer ----------------------------------------------------------------------


class Block(nn.Module):
    """A layer that draws and, if told to, checkpoints its two halves itself."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 8), reentrant

    def half(self, linear: nn.Module, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(linear(F.dropout(x, 0.4))), 0.3) + torch.rand_like(x)

    def forward(self, x: Tensor) -> Tensor:
        for linear in (self.first, self.second):
            if self.reentrant is None:
                x = self.half(linear, x)
            else:
                x = checkpoint(self.half, linear, x, use_reentrant=self.reentrant)
            x = F.dropout(x, 0.1)
        return x


def gradients(block: Block, seed: int, *, scope_in_backward: bool = True) -> list[Tensor]:
    """Forward without a graph, recompute, then backward, as the engine does; the gradients of input and parameters."""
    x = P.clone().requires_grad_()
    with torch.no_grad(), seeded(seed, CPU):
        forward = block(x)
    with seeded(seed, CPU):
        again = block(x)
    assert torch.equal(forward, again)
    block.zero_grad()
    with seeded(seed, CPU) if scope_in_backward else nullcontext():
        again.square().sum().backward()
    return [tensor.grad.clone() for tensor in (x, *block.parameters()) if tensor.grad is not None]


@pytest.fixture
def blocks() -> Iterator[Callable[[bool | None], Block]]:
    model = Block(None)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def make(reentrant: bool | None) -> Block:
        block = Block(reentrant)
        block.load_state_dict(state)
        return block

    with torch.random.fork_rng(devices=[]):
        yield make


REENTRANT_WITHOUT_GRAPH = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@REENTRANT_WITHOUT_GRAPH
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("scope_in_backward", [True, False])
def test_a_checkpoint_inside_a_layer_redraws_the_same(
    blocks: Callable[[bool | None], Block], reentrant: bool, scope_in_backward: bool
) -> None:
    expected = gradients(blocks(None), 3)
    assert len(expected) == 5
    block = blocks(reentrant)
    before = torch.get_rng_state()
    got = gradients(block, 3, scope_in_backward=scope_in_backward)
    assert len(got) == len(expected)
    assert all(map(torch.equal, got, expected))
    assert torch.equal(torch.get_rng_state(), before)


@REENTRANT_WITHOUT_GRAPH
def test_checkpoints_inside_layers_of_many_threads_do_not_disturb_each_other(
    blocks: Callable[[bool | None], Block],
) -> None:
    seeds = range(40)
    expected = {seed: gradients(blocks(None), seed) for seed in seeds}
    own = [blocks(bool(number % 2)) for number in range(4)]
    before = torch.get_rng_state()

    def worker(block: Block) -> None:
        for seed in seeds:
            assert all(map(torch.equal, gradients(block, seed), expected[seed]))

    in_threads([lambda block=block: worker(block) for block in own])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_compiled_layers_draw_from_the_scope() -> None:
    layer = torch.compile(lambda x: F.dropout(x * 2, 0.5) + torch.rand(8), backend="aot_eager")
    before = torch.get_rng_state()
    with seeded(3, CPU) as scope:
        first = layer(X)
    with seeded(3, CPU):
        eager = F.dropout(X * 2, 0.5) + torch.rand(8)
    with seeded(3, CPU):
        again = layer(X)
    assert scope.drawn
    assert torch.equal(first, eager)
    assert torch.equal(again, eager)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(layer(X), eager)


# ---- seeds ----------------------------------------------------------------------------------------------------------


def test_layer_seeds_are_distinct_fixed_and_well_mixed() -> None:
    assert layer_seed(0, 0, 0) == layer_seed(0, 0, 0)
    assert layer_seed(1, 2, 3) == 15020427595393229491, "a resumed run goes on with the same numbers in later versions"
    cells = [(call, layer, microbatch) for call in range(10) for layer in range(40) for microbatch in range(20)]
    seeds = [layer_seed(*cell) for cell in cells]
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert len(set(seeds)) == len(cells)
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(cells)
    for bit in range(64):
        ones = sum(seed >> bit & 1 for seed in seeds) / len(seeds)
        assert abs(ones - 0.5) < 0.03, bit
    for flip in range(63):  # one bit of the call's seed flips about half of the result's
        changed = sum(
            (layer_seed(seed, 3, 1) ^ layer_seed(seed ^ (1 << flip), 3, 1)).bit_count() for seed in seeds[:50]
        )
        assert abs(changed / 50 - 32) < 4


def test_a_call_advances_the_generator_by_a_fixed_amount() -> None:
    generator = torch.Generator().manual_seed(1)
    first, second = draw_call_seed(generator), draw_call_seed(generator)
    assert first.value != second.value
    assert 0 <= first.value < 1 << 63
    expected = torch.Generator().manual_seed(1)
    torch.empty(2, dtype=torch.int64).random_(generator=expected)
    assert torch.equal(generator.get_state(), expected.get_state())


def test_a_failed_call_puts_its_draw_back_unless_somebody_drew_since() -> None:
    before = torch.get_rng_state()
    call = draw_call_seed()
    assert not torch.equal(torch.get_rng_state(), before)
    assert call.undo()
    assert torch.equal(torch.get_rng_state(), before)
    assert not call.undo()
    assert draw_call_seed().value == call.value
    assert not call.undo(), "an undone call does not undo the next one's draw"
    late = draw_call_seed()
    torch.rand(1)
    now = torch.get_rng_state()
    assert not late.undo()
    assert torch.equal(torch.get_rng_state(), now)
    outer, inner = draw_call_seed(), draw_call_seed()
    assert not outer.undo(), "a later call drew"
    assert inner.undo()


def test_a_call_inside_a_layer_draws_from_the_layers_generator() -> None:
    before = torch.get_rng_state()
    with seeded(8, CPU) as scope:
        value = draw_call_seed().value
        assert draw_call_seed().undo()
    assert scope.drawn
    assert value == draw_call_seed(torch.Generator().manual_seed(8)).value
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_as_often_as_it_should_and_not_the_same_in_two_layers(p: float) -> None:
    ones = torch.ones(500)
    masks = []
    for layer in range(20):
        for microbatch in range(10):
            with seeded(layer_seed(123, layer, microbatch), CPU):
                masks.append(F.dropout(ones, p) > 0)
    kept = torch.stack(masks).double()
    sigma = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 5 * sigma
    correlation = torch.corrcoef(kept).fill_diagonal_(0)
    assert correlation.abs().max() < 6 / 500**0.5


# ---- data that a layer keeps ----------------------------------------------------------------------------------------


class Nonzero(nn.Module):
    """Counts how often it really looks for the nonzero elements."""

    def __init__(self) -> None:
        super().__init__()
        self.searches = 0

    def forward(self, x: Tensor) -> Tensor:
        if doing_recompute():
            (mask,) = get_recompute_data()
        else:
            self.searches += 1
            mask = torch.nonzero(x)
            save_for_recompute(mask)
        return x[mask[:, 0], mask[:, 1]].sum()


def test_recompute_gets_what_forward_saved() -> None:
    layer, scope = Nonzero(), RecomputeScope()
    with recording(scope):
        forward = layer(X)
    for _ in range(2):  # a second recompute starts again
        with replaying(scope):
            assert doing_recompute()
            again = layer(X)
        assert torch.equal(forward, again)
    assert layer.searches == 1
    assert not doing_recompute()
    with recording(scope):
        layer(X)
    assert len(scope.saved) == 1, "a forward that is run again starts anew"


def test_without_the_engine_saving_does_nothing() -> None:
    layer = Nonzero()
    layer(X)
    save_for_recompute(1)
    assert not doing_recompute()
    with pytest.raises(RuntimeError, match="while nothing is recomputed"):
        get_recompute_data()
    with recording(RecomputeScope()), pytest.raises(RuntimeError, match="while nothing is recomputed"):
        get_recompute_data()


def test_saved_tensors_are_detached_in_any_nesting_and_the_order_is_kept() -> None:
    scope = RecomputeScope()
    with recording(scope):
        save_for_recompute({"x": [X]}, 3, None)
        save_for_recompute()
        save_for_recompute("last")
    with replaying(scope):
        save_for_recompute("ignored")
        nested, three, none = get_recompute_data()
        assert not nested["x"][0].requires_grad
        assert nested["x"][0].data_ptr() == X.data_ptr()
        assert (three, none) == (3, None)
        assert get_recompute_data() == ()
        assert get_recompute_data() == ("last",)
        with pytest.raises(RuntimeError, match=r"called 4 times in recompute.*save_for_recompute 3 times"):
            get_recompute_data()


def test_calls_that_do_not_pair_up_are_an_error() -> None:
    scope = RecomputeScope()
    with recording(scope):
        save_for_recompute(1)
        save_for_recompute(2)
    with pytest.raises(RuntimeError, match=r"2 times in forward but get_recompute_data 1 times"), replaying(scope):
        get_recompute_data()
    with replaying(scope):
        pass  # a layer may compute everything again
    with pytest.raises(KeyError), replaying(scope):
        get_recompute_data()
        raise KeyError  # the layer's own error is not hidden


def test_another_thread_is_in_no_scope_of_this_one() -> None:
    def look() -> None:
        assert not doing_recompute()
        save_for_recompute("elsewhere")

    with recording(scope := RecomputeScope()):
        in_threads([look])
    assert scope.saved == []
    with replaying(scope):
        in_threads([look])


def test_threads_and_inner_scopes_keep_their_data_apart() -> None:
    scopes = [RecomputeScope() for _ in range(4)]

    def worker(number: int) -> None:
        for _ in range(50):
            with recording(scopes[number]):
                save_for_recompute(number)
                with recording(inner := RecomputeScope()):
                    save_for_recompute("inner")
                save_for_recompute(-number)
            assert inner.saved == [("inner",)]
            with replaying(scopes[number]):
                assert get_recompute_data() == (number,)
                with replaying(inner):
                    assert get_recompute_data() == ("inner",)
                assert get_recompute_data() == (-number,)

    in_threads([lambda number=number: worker(number) for number in range(4)])
