"""Inside `seeded` every use of torch's generators draws from the seed alone, in its own thread alone."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from roundpipe_async import recompute
from roundpipe_async.recompute import (
    layer_seed,
    seeded,
)
from tests.support.threads import in_threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fixed_ambient_seed() -> None:
    torch.manual_seed(20260427)


def plain(seed: int, draw: Callable[[], Tensor]) -> Tensor:
    """What the default generator gives after `torch.manual_seed(seed)`; leaves it as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return draw()


# ---- every way to draw ----------------------------------------------------------------------------------------------

X = (torch.arange(32).reshape(4, 8) / 32 + 0.01).requires_grad_()
P = X.detach()
Q = torch.linspace(-1, 1, 256).reshape(2, 2, 8, 8).requires_grad_()
IMAGE = torch.linspace(-1, 1, 96).reshape(2, 3, 4, 4)
SEQUENCE = torch.linspace(-1, 1, 80).reshape(2, 5, 8)


def module(make: Callable[[], nn.Module], *inputs: Tensor) -> Callable[[], Tensor]:
    def draw() -> Tensor:
        output = made(*inputs)
        return output[0] if isinstance(output, tuple) else output

    with torch.random.fork_rng(devices=[]):
        made = make()
    return draw


def jagged_dropout() -> Tensor:
    nested = torch.nested.nested_tensor([P[0], P[1, :3]], layout=torch.jagged)
    return F.dropout(nested, 0.5).values()


DRAWS: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(X, 0.3),
    "dropout_": lambda: F.dropout(X * 1, 0.3, inplace=True),
    "dropout_bf16": lambda: F.dropout(X.bfloat16(), 0.3),
    "native_dropout": lambda: torch.native_dropout(X, 0.3, True)[0],
    "native_dropout_out": lambda: torch.ops.aten.native_dropout.out(
        P, 0.3, True, out0=torch.empty(4, 8), out1=torch.empty(4, 8, dtype=torch.bool)
    )[0],
    "jagged_dropout": jagged_dropout,
    "alpha_dropout": lambda: F.alpha_dropout(X, 0.3, True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(IMAGE, 0.3, True),
    "dropout1d": lambda: F.dropout1d(IMAGE[0], 0.5),
    "dropout2d": lambda: F.dropout2d(IMAGE, 0.5),
    "dropout3d": lambda: F.dropout3d(IMAGE[None], 0.5),
    "rrelu": lambda: F.rrelu(-X, training=True),
    "rrelu_": lambda: F.rrelu_(-X * 1, training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(X, hard=True),
    "attention": lambda: F.scaled_dot_product_attention(Q, Q, Q, dropout_p=0.3),
    "attention_causal": lambda: F.scaled_dot_product_attention(Q, Q, Q, dropout_p=0.3, is_causal=True),
    "fractional_max_pool": lambda: F.fractional_max_pool2d(IMAGE, 2, output_size=2),
    "bernoulli": lambda: torch.bernoulli(P),
    "bernoulli_p": lambda: torch.bernoulli(P, 0.3),
    "bernoulli_tensor_": lambda: torch.empty(8).bernoulli_(P[0]),
    "rand": lambda: torch.rand(3, 4),
    "rand_out": lambda: torch.rand(3, out=torch.empty(3)),
    "rand_default_generator": lambda: torch.rand(3, generator=torch.default_generator),
    "rand_like": lambda: torch.rand_like(X),
    "randn": lambda: torch.randn(3, 4),
    "randn_complex": lambda: torch.randn(3, dtype=torch.complex64),
    "randn_out": lambda: torch.randn(3, out=torch.empty(3)),
    "randn_like": lambda: torch.randn_like(X),
    "randint": lambda: torch.randint(9, (50,)),
    "randint_low": lambda: torch.randint(2, 9, (50,)),
    "randint_out": lambda: torch.randint(9, (50,), out=torch.empty(50, dtype=torch.long)),
    "randint_like": lambda: torch.randint_like(X, 1000),
    "randint_like_low": lambda: torch.randint_like(X, 2, 1000),
    "randperm": lambda: torch.randperm(50),
    "randperm_out": lambda: torch.randperm(50, out=torch.empty(50, dtype=torch.long)),
    "normal": lambda: torch.normal(0.0, 1.0, (3,)),
    "normal_tensors": lambda: torch.normal(P, P),
    "normal_mean": lambda: torch.normal(P),
    "normal_std": lambda: torch.normal(0.0, P),
    "multinomial": lambda: torch.multinomial(P, 3),
    "multinomial_replacement": lambda: torch.multinomial(P, 30, True),
    "exponential_": lambda: torch.empty(4).exponential_(),
    "cauchy_": lambda: torch.empty(4).cauchy_(),
    "geometric_": lambda: torch.empty(40).geometric_(0.3),
    "log_normal_": lambda: torch.empty(4).log_normal_(),
    "uniform_": lambda: torch.empty(4).uniform_(),
    "normal_": lambda: torch.empty(4).normal_(),
    "random_": lambda: torch.empty(4).random_(),
    "random_to": lambda: torch.empty(40).random_(9),
    "random_from": lambda: torch.empty(40).random_(2, 9),
    "poisson": lambda: torch.poisson(P * 9),
    "binomial": lambda: torch.binomial(torch.full((40,), 20.0), torch.full((40,), 0.3)),
    "gamma": lambda: torch.distributions.Gamma(P, 1.0).rsample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(P).rsample(),
    "beta": lambda: torch.distributions.Beta(P, P).sample(),
    "von_mises": lambda: torch.distributions.VonMises(P, P).sample(),
    "parameters": lambda: nn.Linear(3, 4).weight,
    "svd_lowrank": lambda: torch.svd_lowrank(P, 2)[1],
    "vmap": lambda: torch.vmap(lambda row: F.dropout(row, 0.5), randomness="different")(X),
    "vmap_same": lambda: torch.vmap(lambda row: F.dropout(row, 0.5), randomness="same")(X),
    "func_grad": lambda: torch.func.grad(lambda x: F.dropout(x, 0.5).sum())(X),
    "lstm": module(lambda: nn.LSTM(8, 8, 3, dropout=0.5), SEQUENCE),
    "gru": module(lambda: nn.GRU(8, 8, 3, dropout=0.5), SEQUENCE),
    "rnn": module(lambda: nn.RNN(8, 8, 3, dropout=0.5), SEQUENCE),
    "encoder": module(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.3), SEQUENCE),
    "decoder": module(lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.3), SEQUENCE, SEQUENCE),
    "multihead_attention": module(lambda: nn.MultiheadAttention(8, 2, 0.3), SEQUENCE, SEQUENCE, SEQUENCE),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_scope_draws_what_the_seed_alone_gives_and_leaves_the_default_generator_alone(name: str) -> None:
    draw = DRAWS[name]
    expected = plain(11, draw)
    before = torch.get_rng_state()
    with seeded(11, CPU) as scope:
        first = draw()
        later = draw()
    assert scope.drawn
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    with seeded(11, CPU):
        again = draw()
    assert torch.equal(first, expected)
    assert torch.equal(again, expected)
    if name not in ("func_grad", "multinomial", "fractional_max_pool", "gumbel_softmax", "dropout1d"):
        assert not torch.equal(later, first), "draws inside one scope go on, they do not start again"


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_the_same_where_a_dispatch_mode_stands_between(name: str) -> None:
    if "vmap" in name or name in ("func_grad", "jagged_dropout"):
        pytest.skip("torch does not run this one under a dispatch mode")
    expected = plain(11, DRAWS[name])
    before = torch.get_rng_state()
    with FlopCounterMode(display=False), seeded(11, CPU):
        inside = DRAWS[name]()
    with seeded(11, CPU), FlopCounterMode(display=False):
        outside = DRAWS[name]()
    assert torch.equal(inside, expected)
    assert torch.equal(outside, expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_operator_of_torch_that_draws_on_the_cpu_is_forgotten() -> None:
    """A new torch with a new random operator fails here, not in somebody's gradients."""
    recompute._kernels.install()
    led = set(map(str, recompute._kernels.led))
    elsewhere = ("_cudnn", "_lstm_mps", "miopen", "_efficient", "_flash", "_fill_mem_eff", "_triton", "_nested_tensor",
                 "_fused_sdp_choice", "_scaled_dot_product")  # fmt: skip  # accelerators only, or draw nothing
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    forgotten = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, path = name.partition("::")
        packet, _, overload = path.partition(".")
        if namespace == "aten" and not packet.startswith(elsewhere) and hasattr(torch.ops.aten, packet):
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            draws = torch.Tag.nondeterministic_seeded in operator.tags
            if draws and not operator.has_kernel_for_dispatch_key(composite) and str(operator) not in led:
                forgotten.append(str(operator))
    assert not forgotten


def test_draws_of_an_operator_written_in_python_and_of_one_that_takes_the_generator_itself() -> None:
    """The second stands for a C++ extension that asks for torch's default generator and says so with its tag."""
    program = """
import torch
from roundpipe_async.recompute import seeded

@torch.library.custom_op("testing::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)

lib = torch.library.Library("testing2", "DEF")
lib.define("own(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
def own(x):
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(1)
    return state[:16].clone()
lib.impl("own", own, "CPU")

x = torch.zeros(4)
for op in (noise, torch.ops.testing2.own):
    torch.manual_seed(11)
    expected = op(x), torch.rand(2)
    before = torch.get_rng_state()
    with seeded(11, torch.device("cpu")):
        got = op(x), torch.rand(2)
    assert torch.equal(before, torch.get_rng_state())
    assert all(map(torch.equal, expected, got)), (op, expected, got)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=100)


def test_nothing_drawn_is_told_and_costs_no_generator() -> None:
    with seeded(1, CPU) as scope:
        (X @ X.T).relu().sum()
        F.dropout(X, 0.5, training=False)
    assert not scope.drawn
    assert scope._generator is None


# ---- generators and seeds that the user names -----------------------------------------------------------------------


def test_a_generator_of_the_users_own_is_left_alone() -> None:
    own = torch.Generator().manual_seed(3)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(3))
    with seeded(1, CPU) as scope:
        assert torch.equal(torch.rand(4, generator=own), expected)
        assert torch.empty(3).bernoulli_(0.5, generator=own).numel() == 3
    assert not scope.drawn


def test_the_functions_of_torch_random_mean_the_scopes_generator() -> None:
    before = torch.get_rng_state()
    real = torch.random.default_generator
    with seeded(5, CPU) as scope:
        assert torch.initial_seed() == 5
        state = torch.get_rng_state()
        first = torch.rand(3)
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(9)
            assert torch.equal(torch.rand(3), plain(9, lambda: torch.rand(3)))
        torch.seed()
    assert scope.drawn
    assert torch.random.default_generator is real is torch.default_generator
    assert torch.equal(torch.get_rng_state(), before)


def test_scopes_nest_and_an_exception_leaves_nothing_behind() -> None:
    expected = plain(1, lambda: torch.rand(6))
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), seeded(1, CPU):
        outer = [torch.rand(2)]
        with seeded(2, CPU):
            assert torch.equal(torch.rand(2), expected_of(2))
        outer.append(torch.rand(2))
        with pytest.raises(KeyError), seeded(3, CPU):
            raise KeyError
        outer.append(torch.rand(2))
        raise ZeroDivisionError
    assert torch.equal(torch.cat(outer), expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.rand(3), plain(20260427, lambda: torch.rand(3)))


def expected_of(seed: int) -> Tensor:
    return torch.rand(2, generator=torch.Generator().manual_seed(seed))


def test_autocast_and_inference_mode_keep_the_draws() -> None:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(4, lambda: layer(P))
        with seeded(4, CPU):
            got = layer(P)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, expected)
    with torch.inference_mode(), seeded(4, CPU):
        assert torch.equal(F.dropout(P, 0.5), dropped(4))


def dropped(seed: int) -> Tensor:
    mask = torch.empty_like(P).bernoulli_(0.5, generator=torch.Generator().manual_seed(seed))
    return P * mask / 0.5


# ---- threads --------------------------------------------------------------------------------------------------------


def draw_a_layer() -> Tensor:
    x = F.dropout(P, 0.5) + torch.rand_like(P) + torch.randn(8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        x = x + torch.rand(8)
    return x + F.scaled_dot_product_attention(x, x, x, dropout_p=0.2)


def test_eight_threads_in_any_order_draw_what_one_draws_and_do_not_disturb_the_others() -> None:
    seeds = [layer_seed(1, layer, microbatch) for layer in range(20) for microbatch in range(10)]
    expected = {}
    for seed in seeds:
        with seeded(seed, CPU):
            expected[seed] = draw_a_layer()
    ambient_expected = plain(20260427, lambda: torch.stack([torch.rand(4) for _ in range(300)]))
    shuffled = random.Random(0)
    got: list[tuple[int, Tensor]] = []
    ambient: list[Tensor] = []

    def worker(own: list[int]) -> None:
        for seed in own:
            with seeded(seed, CPU) as scope:
                got.append((seed, draw_a_layer()))
            assert scope.drawn

    orders = [shuffled.sample(seeds, len(seeds)) for _ in range(8)]
    in_threads([
        *(lambda own=own: worker(own) for own in orders),
        lambda: ambient.extend(torch.rand(4) for _ in range(300)),
    ])  # fmt: skip
    assert len(got) == 8 * len(seeds)
    assert all(torch.equal(value, expected[seed]) for seed, value in got)
    assert torch.equal(torch.stack(ambient), ambient_expected)
    assert torch.random.default_generator is torch.default_generator


def test_threads_under_dispatch_modes_take_turns_at_the_default_generator() -> None:
    expected = plain(7, lambda: torch.cat([torch.rand(1000) for _ in range(20)]))
    before = torch.get_rng_state()

    def worker() -> None:
        for _ in range(10):
            with FlopCounterMode(display=False), seeded(7, CPU):
                assert torch.equal(torch.cat([torch.rand(1000) for _ in range(20)]), expected)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads([worker] * 4)
    finally:
        sys.setswitchinterval(interval)
    assert torch.equal(torch.get_rng_state(), before)


# ---- accelerators ---------------------------------------------------------------------------------------------------


def test_an_accelerators_generator_is_seeded_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device = torch.Generator().manual_seed(77)
    module = SimpleNamespace(default_generators=(None, on_device), current_device=lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    before = on_device.get_state()
    for device in (torch.device("cuda", 1), torch.device("cuda")):
        with seeded(5, device) as quiet:
            host = torch.rand(2)
        assert torch.equal(host, expected_of(5))
        with seeded(5, device) as scope:
            assert not scope.drawn
            assert torch.equal(torch.rand(2, generator=on_device), expected_of(5))
        assert scope.drawn
        assert quiet.drawn
        with pytest.raises(KeyError), seeded(5, device) as untouched:
            raise KeyError
        assert not untouched.drawn
        assert torch.equal(on_device.get_state(), before)


def test_an_accelerator_without_generators_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    with pytest.raises(RuntimeError, match="default_generators"), seeded(5, torch.device("cuda", 0)):
        pass
    assert torch.random.default_generator is torch.default_generator
    assert recompute._current() is None


@pytest.mark.parametrize("draw", [lambda x: x.bernoulli_(0.5), torch.rand_like, lambda x: F.dropout(x, 0.5)])
def test_a_draw_elsewhere_is_refused(draw: Callable[[Tensor], Tensor]) -> None:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, device="cuda")
        with seeded(5, CPU), pytest.raises(RuntimeError, match="on cuda:0 in a layer that runs on cpu"):
            draw(x)
    with seeded(5, CPU):
        assert F.dropout(torch.empty(3, device="meta"), 0.5).is_meta
