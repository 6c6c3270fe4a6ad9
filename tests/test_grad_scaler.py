"""GradScaler beside torch's, in plain loops: the same numbers, the same errors, the same files, and what we add."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import pickle
import threading
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from roundpipe_async.scaling.grad_scaler import GradScaler, SkippedStepsError, UpdateOutcome
from roundpipe_async.scaling.state import Factor, Rules, ScaleState, advance
from roundpipe_async.steps import Window, current_window
from tests.support.scaler_fakes import INF, NAN, backward, weights


def now(coroutine: Coroutine[Any, Any, UpdateOutcome]) -> UpdateOutcome:
    """The result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        assert isinstance(stop.value, UpdateOutcome)
        return stop.value
    raise AssertionError("it waited")


def update(scaler: Any, new_scale: Any = None) -> Any:
    """A synchronous update of either scaler."""
    return (
        scaler.update(new_scale) if isinstance(scaler, torch.amp.GradScaler) else now(scaler.update(new_scale, False))
    )


def torchs(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **options)


# --- the same numbers ------------------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(
    scale=st.floats(2.0**-100, 2.0**127, width=32),
    tracker=st.integers(0, 5),
    found=st.sampled_from([0.0, 1.0, 2.0]),
    growth=st.floats(1.0, 1e300),
    backoff=st.floats(2.0**-20, 1.0),
    interval=st.integers(1, 6),
)
@example(scale=2.0**16, tracker=0, found=0.0, growth=1e30, backoff=0.5, interval=1)
@example(scale=2.0**100, tracker=0, found=0.0, growth=1e30, backoff=0.5, interval=1)
@example(scale=3.0, tracker=5, found=0.0, growth=2.0, backoff=0.5, interval=2)
def test_arithmetic_is_torchs_to_the_bit(
    scale: float, tracker: int, found: float, growth: float, backoff: float, interval: int
) -> None:
    """fp32 scale times a double, rounded once; growth to inf refused (A04); an interval below the counter."""
    theirs = torch.full((), scale), torch.full((), tracker, dtype=torch.int32)
    torch._amp_update_scale_(*theirs, torch.full((), found), growth, backoff, interval)
    ours = advance(ScaleState(Factor(scale), tracker), Rules(growth, backoff, interval), found, None, 0)
    assert (ours.factor.value, ours.tracker) == (theirs[0].item(), theirs[1].item())
    assert torch.equal(ours.factor.on(torch.device("cpu")), theirs[0])
    assert torch.equal(ours.factor.inverse(torch.device("cpu")), theirs[0].double().reciprocal().float())


SLOPES = st.sampled_from([1.0, -0.37, 3e-5, 1e30, INF, NAN])


@pytest.mark.filterwarnings("ignore:the loss scale fell below 1")
@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(st.tuples(SLOPES, SLOPES, st.booleans(), st.integers(0, 9)), min_size=1, max_size=30),
    init_scale=st.sampled_from([2.0**16, 3.3, 1024, 1e-3]),
    growth=st.sampled_from([2.0, 1.7, 1e30]),
    backoff=st.sampled_from([0.5, 0.3]),
    interval=st.integers(1, 4),
    fused=st.booleans(),
)
def test_any_run_is_torchs_to_the_bit(
    steps: list[tuple[float, float, bool, int]], init_scale: float, growth: float, backoff: float, interval: int,
    fused: bool,
) -> None:  # fmt: skip
    """Scale, tracker, parameters and optimizer state, two optimizers, over any row of finite and infinite gradients.

    With explicit `unscale_`, factors changed on the way, and scales set by hand, too.
    """
    options = {
        "init_scale": init_scale,
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
    }
    runs = []
    for scaler in (GradScaler("cpu", **options), torchs(**options)):
        one, two = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(3))
        optimizers = torch.optim.AdamW([one], fused=fused), torch.optim.SGD([two], lr=0.1, momentum=0.9, foreach=True)
        told = [(scaler.get_scale(), type(scaler.get_scale()))]
        seen_finite = False
        for slope_one, slope_two, unscale, extra in steps:
            for optimizer in optimizers:
                optimizer.zero_grad()
            backward(scaler, one, slope_one)
            backward(scaler, two, slope_two)
            seen_finite = seen_finite or bool(one.grad.isfinite().all())
            if unscale:
                scaler.unscale_(optimizers[1])
            for optimizer in optimizers:
                scaler.step(optimizer)
            if extra == 9:
                scaler.set_backoff_factor(0.7)
                scaler.set_growth_interval(max(1, interval - 1))
            update(scaler, {8: 77.0, 7: torch.tensor(5.5)}.get(extra))
            told.append((scaler.state_dict(), one.detach().clone(), two.detach().clone()))
        state = [tensor for optimizer in optimizers for entry in optimizer.state.values() for tensor in entry.values()]
        runs.append((told, state if seen_finite else []))
    (ours, our_state), (theirs, their_state) = runs
    assert ours[0] == theirs[0]
    for (our_dict, *our_weights), (their_dict, *their_weights) in zip(ours[1:], theirs[1:], strict=True):
        assert our_dict == their_dict
        assert all(torch.equal(a, b) for a, b in zip(our_weights, their_weights, strict=True))
    assert all(a is b or torch.equal(a, b) for a, b in zip(our_state, their_state, strict=True))


def test_signature_is_torchs_and_more() -> None:
    ours, theirs = inspect.signature(GradScaler).parameters, inspect.signature(torch.amp.GradScaler).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name in list(theirs)[1:]:
        assert ours[name].default == theirs[name].default
    assert ours["device"].default is None
    public = {name for name in dir(torch.amp.GradScaler) if not name.startswith("_")}
    assert public <= set(dir(GradScaler))


def test_scale_before_the_first_loss_is_as_given() -> None:
    """torch tells 3.3, and an int as an int, until the scale is a tensor; then it is rounded to fp32."""
    for scaler in (GradScaler(init_scale=3.3), torchs(init_scale=3.3)):
        assert scaler.get_scale() == scaler.state_dict()["scale"] == 3.3
        scaler.scale(torch.ones(()))
        assert scaler.get_scale() == scaler.state_dict()["scale"] == torch.tensor(3.3).item() != 3.3


def test_a03_scale_keeps_what_torch_keeps() -> None:
    """A03: a tensor, list, tuple, nesting and generator; dtypes; 0-dim fp16 becomes fp32, as 65536 does not fit."""
    ours, theirs = GradScaler(), torchs()
    half = torch.ones((), dtype=torch.float16)
    for make in (
        lambda: torch.ones(2), lambda: half, lambda: half.reshape(1), lambda: [half, torch.ones(2)],
        lambda: (half, [torch.ones(1)]), lambda: [], lambda: torch.ones((), dtype=torch.float64),
        lambda: torch.ones(2, dtype=torch.bfloat16),
    ):  # fmt: skip
        a, b = ours.scale(make()), theirs.scale(make())
        assert repr(a) == repr(b)
    for scaler in (ours, theirs):
        lazy = scaler.scale(tensor for tensor in (half, half))
        assert type(lazy) is map and [tensor.item() for tensor in lazy] == [65536.0, 65536.0]
        with pytest.raises(ValueError, match="ensor"):
            scaler.scale(3.0)  # type: ignore[call-overload]


def test_scaling_in_inference_mode_first_does_not_spoil_training() -> None:
    """A constant made in inference mode could not be saved for backward afterwards."""
    scaler = GradScaler()
    parameter, _ = weights(1.0)
    with torch.inference_mode():
        scaler.scale(torch.ones(()))
    backward(scaler, parameter, 1.0)
    assert parameter.grad is not None and parameter.grad.item() == 65536.0


# --- finding inf -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a18_one_element_anywhere_is_found(dtype: torch.dtype, bad: float) -> None:
    """A18: the last parameter, a 0-dim one, one element of a large or non-contiguous tensor: nothing is stepped."""
    shapes = [(), (7,), (64, 129), (3, 1, 5)]
    for which, shape in enumerate(shapes):
        count = math.prod(shape)
        for position in sorted({0, count // 2, count - 1}):
            parameters = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
            for parameter in parameters:
                parameter.grad = torch.ones(parameter.shape[::-1], dtype=dtype).permute(
                    tuple(range(parameter.dim()))[::-1]
                )
            grad = parameters[which].grad
            assert grad is not None
            grad[tuple(torch.unravel_index(torch.tensor(position), shape)) if shape else ()] = bad
            optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.9)
            scaler = GradScaler()
            scaler.scale(torch.ones(()))
            assert scaler.step(optimizer) is None
            assert update(scaler) == UpdateOutcome(scale=32768.0, skipped=True, settled=1, good=0)
            assert all(bool((parameter == 1).all()) for parameter in parameters) and not optimizer.state


def test_gradients_that_overflow_in_unscaling_are_found() -> None:
    """With a scale below 1 a finite gradient may become inf by unscaling, which torch's check does not see."""
    parameter, optimizer = weights(1.0)
    scaler = GradScaler(init_scale=2.0**-20)
    scaler.scale(torch.ones(()))
    parameter.grad = torch.tensor([3e38])
    scaler.step(optimizer)
    assert parameter.item() == 1.0 and update(scaler).skipped


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
        lambda params: torch.optim.Adam(params, fused=True),
        lambda params: torch.optim.AdamW(params, fused=True),
        lambda params: torch.optim.AdamW(params, foreach=True),
        lambda params: torch.optim.Adagrad(params, fused=True),
    ],
)
def test_a_skip_leaves_no_bit_changed(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """At the first step, too: torch's fused SGD would make a momentum buffer of garbage there, and go on with it."""
    parameter = torch.nn.Parameter(torch.randn(50))
    optimizer, scaler = make([parameter]), GradScaler()
    for slope in (INF, 1.0, NAN, 2.0):
        optimizer.zero_grad()
        before = copy.deepcopy((parameter.data, optimizer.state_dict()["state"]))
        backward(scaler, parameter, slope)
        scaler.step(optimizer)
        outcome = update(scaler)
        after = (parameter.data, optimizer.state_dict()["state"])
        assert outcome.skipped == (repr(before) == repr(after)) == (not math.isfinite(slope))


def test_a03_inf_in_the_first_of_two_optimizers() -> None:
    """A03: the second's parameters move, the first's do not; one backoff, the tracker is reset once."""
    one, first = weights(1.0)
    two, second = weights(1.0)
    scaler = GradScaler(growth_interval=3)
    for slope in (1.0, INF):
        first.zero_grad(), second.zero_grad()
        backward(scaler, one, slope)
        backward(scaler, two, 1.0)
        scaler.step(first), scaler.step(second)
        outcome = update(scaler)
    assert (one.item(), two.item()) == (0.0, -1.0)
    assert outcome == UpdateOutcome(scale=32768.0, skipped=True, settled=1, good=0)
    assert scaler.state_dict()["_growth_tracker"] == 0 and scaler.skipped_steps == 1


# --- misuse ----------------------------------------------------------------------------------------------------------


def test_a01_an_optimizer_that_no_loss_reached() -> None:
    """A01: AssertionError for the second; the first's update stays; update and the next iteration work."""
    for fused in (False, True):
        one, first = weights(1.0)
        two = torch.nn.Parameter(torch.ones(1))
        second = torch.optim.Adam([two], fused=fused)
        scaler = GradScaler()
        backward(scaler, one, 1.0)
        scaler.step(first)
        with pytest.raises(AssertionError, match="no gradients"):
            scaler.step(second)
        assert one.item() == 0.0
        assert update(scaler).good == 1
        backward(scaler, two, 1.0)
        scaler.step(second)
        assert two.item() < 1.0 and update(scaler).good == 1


def test_a01_alone_the_scaler_is_clean_after_the_failed_update() -> None:
    """torch's stays "unscaled" for ever after this."""
    parameter, optimizer = weights(1.0)
    scaler = GradScaler()
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="no gradients"):
        scaler.step(optimizer)
    with pytest.raises(AssertionError, match="no inf check"):
        update(scaler)
    backward(scaler, parameter, 1.0)
    scaler.step(optimizer)
    assert update(scaler).good == 1 and parameter.item() == 0.0


def test_a02_wrong_orders_have_their_own_sentences() -> None:
    """A02: each a RuntimeError (AssertionError before any scale) in both scalers; one update cleans up."""
    for scaler in (GradScaler(), torchs()):
        parameter, optimizer = weights(1.0)
        parameter.grad = torch.ones(1)
        for call in (scaler.step, scaler.unscale_):
            with pytest.raises(AssertionError):
                call(optimizer)
        with pytest.raises(AssertionError):
            update(scaler)
        sentences = set()
        for calls in (
            ["unscale_", "unscale_"],
            ["step", "step"],
            ["unscale_", "step", "unscale_"],
            ["step", "unscale_"],
        ):
            optimizer.zero_grad()
            backward(scaler, parameter, 1.0)
            for name in calls[:-1]:
                getattr(scaler, name)(optimizer)
            with pytest.raises(RuntimeError) as caught:
                getattr(scaler, calls[-1])(optimizer)
            sentences.add(str(caught.value))
            update(scaler)
        assert len(sentences) == 3
        with pytest.raises(RuntimeError, match=r"[Cc]losure"):
            scaler.step(optimizer, closure=lambda: 0.0)
        optimizer.zero_grad()
        backward(scaler, parameter, 1.0)
        scaler.unscale_(optimizer)
        update(scaler)  # unscaled, not stepped: it counts, as in torch
        with pytest.raises(AssertionError):
            update(scaler)  # an iteration without any backward
        backward(scaler, parameter, 1.0)
        scaler.step(optimizer)
        update(scaler)
        assert scaler.state_dict()["_growth_tracker"] == 6 and scaler.get_scale() == 65536.0


@pytest.mark.parametrize("fused", [False, True])
def test_a10_fp16_gradients_are_refused_untouched(fused: bool) -> None:
    """A10: ValueError; no gradient touched; still "not unscaled"; usable."""
    half = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    single = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([single, half], fused=fused)
    scaler = GradScaler(init_scale=8.0)
    for parameter in (single, half):
        backward(scaler, parameter, 1.0)
    for call in (scaler.unscale_, scaler.step, scaler.unscale_):
        if fused and call == scaler.unscale_:
            continue
        with pytest.raises(ValueError, match=r"(?i)fp16"):
            call(optimizer)
    assert half.grad is not None and single.grad is not None
    assert half.grad.tolist() == single.grad.tolist() == [8.0] * 4
    half.grad = None
    scaler.step(optimizer)
    assert update(scaler).good == 1


def test_a17_construction() -> None:
    """A17: any device name works on any machine, silently; factors that cannot work are refused."""
    for scaler in (GradScaler(), GradScaler("cpu"), GradScaler("cuda", 1024.0)):
        assert scaler.is_enabled()
        parameter, optimizer = weights(1.0)
        backward(scaler, parameter, 1.0)
        scaler.step(optimizer)
        assert update(scaler).good == 1 and parameter.item() == 0.0
    for options in ({"growth_factor": 1.0}, {"growth_factor": NAN}, {"backoff_factor": 1.0}, {"backoff_factor": NAN}):
        with pytest.raises(AssertionError, match="factor"):
            GradScaler(**options)
    for options in (
        {"init_scale": 0.0}, {"init_scale": -1.0}, {"init_scale": INF}, {"init_scale": NAN}, {"init_scale": 1e39},
        {"backoff_factor": 0.0}, {"backoff_factor": -1.0}, {"min_scale": 1e6}, {"max_scale": 2.0}, {"hysteresis": 0},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="must"):
            GradScaler(**options)
    assert not GradScaler(enabled=False, growth_factor=0.5).is_enabled()


def test_new_scale() -> None:
    """Copied at the call; refused where it could not be a scale; the tracker stays, as in torch."""
    scaler = GradScaler()
    with pytest.raises(AssertionError, match="first scale"):
        update(scaler, 4.0)
    scaler.scale(torch.ones(()))
    tensor = torch.tensor([3.3], dtype=torch.float64)
    coroutine = scaler.update(tensor, is_async=False)
    tensor.fill_(-1)
    assert now(coroutine).scale == torch.tensor(3.3).item()
    assert update(scaler, 7).scale == 7.0
    for wrong in (torch.ones(2), torch.ones(1, requires_grad=True)):
        with pytest.raises(AssertionError, match="new_scale"):
            scaler.update(wrong)
    for value in (INF, NAN, -1.0, 0.0, 1e39, torch.tensor(INF)):
        with pytest.raises(ValueError, match="new_scale"):
            scaler.update(value)
    with pytest.raises(TypeError, match="new_scale"):
        scaler.update("8")  # type: ignore[arg-type]
    assert scaler.get_scale() == 7.0


def test_step_in_the_work_of_a_call_is_refused() -> None:
    parameter, optimizer = weights(1.0)
    scaler = GradScaler()
    backward(scaler, parameter, 1.0)
    token = current_window.set(Window())
    try:
        with pytest.raises(RuntimeError, match="step function"):
            scaler.step(optimizer)
    finally:
        current_window.reset(token)
    scaler.step(optimizer)


# --- a loss keeps its factor -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", ["scale", "backward"])
def test_plain_loss_keeps_its_factor_across_an_update(between: str) -> None:
    """Where torch would divide by the new scale: the update comes after scale() or after the backward."""
    parameter, optimizer = weights(0.0)
    scaler = GradScaler()
    loss = scaler.scale((parameter * 3.0).sum())
    if between == "backward":
        loss.backward()
    update(scaler, 4.0)
    if between == "scale":
        loss.backward()
    assert parameter.grad is not None and parameter.grad.item() == 3.0 * 65536.0
    backward(scaler, parameter, 5.0)  # scaled by 4 and brought to the first one's
    assert parameter.grad.item() == 8.0 * 65536.0
    scaler.step(optimizer)
    assert parameter.item() == -8.0
    update(scaler)
    optimizer.zero_grad()
    backward(scaler, parameter, 1.0)
    assert parameter.grad is not None and parameter.grad.item() == 4.0


def test_a20_logged_loss_is_continuous() -> None:
    """A20: loss.item() / get_scale(), divided before update, does not jump at a backoff."""
    parameter, optimizer = weights(10.0)
    scaler, logged = GradScaler(), []
    for iteration in range(8):
        optimizer.zero_grad()
        loss = scaler.scale((parameter**2 / 100).sum())
        loss.backward()
        if iteration == 4:
            assert parameter.grad is not None
            parameter.grad.fill_(INF)
        scaler.step(optimizer)
        logged.append(loss.item() / scaler.get_scale())
        update(scaler)
    assert scaler.get_scale() == 32768.0
    assert logged[4] == logged[5] and all(0.95 < later / sooner <= 1 for sooner, later in pairwise(logged))


# --- optimizers that scale by themselves -----------------------------------------------------------------------------


class Scaling(torch.optim.Optimizer):
    """An optimizer by torch's protocol, which notes what it is given."""

    def __init__(self, params: Any, explode: bool = False) -> None:
        super().__init__(params, {})
        self._step_supports_amp_scaling = True
        self.seen: list[tuple[float | None, float]] = []
        self.explode = explode

    def step(self, closure: Any = None) -> Any:
        grad_scale, found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
        self.seen.append((None if grad_scale is None else grad_scale.item(), found_inf.item()))
        if self.explode:
            raise KeyError("exploded")
        return "stepped"


class Older(Scaling):
    def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:
        found = grad_scaler._check_inf_per_device(self)
        self.seen.append((grad_scaler._get_scale_async().item(), sum(inf.item() for inf in found.values())))
        assert grad_scaler._found_inf_per_device(self) is found and grad_scaler.get_scale() == 65536.0


def test_protocol_of_optimizers_that_scale() -> None:
    """The same given by torch's scaler, and nothing stays behind, even after an error."""
    for scaler in (GradScaler(), torchs()):
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = Scaling([parameter])
        for slope, unscale in ((1.0, False), (INF, False), (1.0, True)):
            optimizer.zero_grad()
            backward(scaler, parameter, slope)
            if unscale:
                scaler.unscale_(optimizer)
            assert scaler.step(optimizer) == "stepped"
            update(scaler)
        assert optimizer.seen == [(65536.0, 0.0), (65536.0, 1.0), (None, 0.0)]
        assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
        backward(scaler, parameter, 1.0)
        optimizer.grad_scale = torch.tensor(3.0)  # type: ignore[attr-defined]
        scaler.step(optimizer)
        assert optimizer.seen[-1] == (3 * 32768.0, 0.0)


def test_nothing_stays_behind_on_an_optimizer_that_raised() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = Scaling([parameter], explode=True), GradScaler()
    backward(scaler, parameter, 1.0)
    with pytest.raises(KeyError, match="exploded"):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
    assert update(scaler).settled == 1


def test_protocol_of_optimizers_that_take_a_scaler() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = Older([parameter]), GradScaler()
    backward(scaler, parameter, INF)
    scaler.step(optimizer)
    assert optimizer.seen == [(65536.0, 1.0)]
    assert update(scaler) == UpdateOutcome(scale=32768.0, skipped=True, settled=1, good=0)


# --- extremes --------------------------------------------------------------------------------------------------------


def test_a04_growth_stays_finite() -> None:
    """A04: growth by 1e30 at every step; fp32's end is not passed."""
    scaler = GradScaler(growth_interval=1, growth_factor=1e30)
    parameter, optimizer = weights(1.0)
    for _ in range(5):
        optimizer.zero_grad()
        backward(scaler, parameter, 1e-6)
        scaler.step(optimizer)
        assert math.isfinite(update(scaler).scale)
    assert scaler.get_scale() == torch.tensor(65536e30).item() and parameter.item() < 1.0


def overflow(scaler: GradScaler, times: int) -> list[UpdateOutcome]:
    parameter, optimizer = weights(1.0)
    outcomes = []
    for _ in range(times):
        optimizer.zero_grad()
        backward(scaler, parameter, NAN)
        scaler.step(optimizer)
        outcomes.append(update(scaler))
    assert parameter.item() == 1.0
    return outcomes


def test_a05_a06_overflow_without_end() -> None:
    """A05, A06: 400 times NaN: each told, all counted, one warning, and the scale never reaches 0."""
    scaler = GradScaler()
    with pytest.warns(UserWarning, match="fell below 1") as caught:
        outcomes = overflow(scaler, 400)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert all(outcome.skipped and not outcome.good for outcome in outcomes) and scaler.skipped_steps == 400
    assert scaler.get_scale() == 2.0**-126
    parameter, optimizer = weights(1.0)
    backward(scaler, parameter, 1.0)
    scaler.step(optimizer)
    assert parameter.item() == 0.0 and update(scaler).good == 1


def test_a05_the_warning_is_given_once() -> None:
    """Also when the scale recovers and falls again; a scale set by hand below 1 is the user's will."""
    scaler = GradScaler(init_scale=1.0)
    with pytest.warns(UserWarning, match="fell below 1"):
        overflow(scaler, 1)
    update(scaler, 1.0)
    overflow(scaler, 1)
    assert scaler.get_scale() == 0.5
    fresh = GradScaler()
    fresh.scale(torch.ones(()))
    assert update(fresh, 0.5).scale == 0.5


def test_a05_min_scale_and_recovery() -> None:
    """A05: never below, and it grows again."""
    scaler = GradScaler(min_scale=128, max_scale=300, init_scale=256, growth_interval=1)
    assert [outcome.scale for outcome in overflow(scaler, 3)] == [128.0] * 3
    parameter, optimizer = weights(1.0)
    for expected in (256.0, 300.0, 300.0):
        optimizer.zero_grad()
        backward(scaler, parameter, 1.0)
        scaler.step(optimizer)
        assert update(scaler).scale == expected
    with pytest.raises(ValueError, match="min_scale"):
        scaler.update(5.0)


def test_a06_max_consecutive_skips() -> None:
    """A06: raised at the barrier, names the last scale with finite gradients; the update itself is done."""
    scaler = GradScaler(max_consecutive_skips=2)
    parameter, optimizer = weights(1.0)
    backward(scaler, parameter, 1.0)
    scaler.step(optimizer)
    update(scaler)
    overflow(scaler, 2)
    with pytest.raises(SkippedStepsError, match=r"3 updates .* last scale with finite gradients was 65536\.0"):
        overflow(scaler, 1)
    assert scaler.get_scale() == 8192.0
    assert now(scaler.synchronize()) == UpdateOutcome(scale=8192.0, skipped=True, settled=1, good=0)
    optimizer.zero_grad()
    backward(scaler, parameter, 1.0)
    scaler.step(optimizer)
    assert update(scaler).good == 1


def test_hysteresis() -> None:
    """The first n - 1 overflows of a row leave the scale, a good step begins a new row."""
    scaler = GradScaler(hysteresis=3)
    assert [outcome.scale for outcome in overflow(scaler, 5)] == [65536.0, 65536.0, 32768.0, 16384.0, 8192.0]
    parameter, optimizer = weights(1.0)
    backward(scaler, parameter, 1.0)
    scaler.step(optimizer)
    update(scaler)
    assert [outcome.scale for outcome in overflow(scaler, 3)] == [8192.0, 8192.0, 4096.0]
    assert scaler.state_dict()["_consecutive_skips"] == 3


@pytest.mark.parametrize("options", [{}, {"min_scale": 65536.0}, {"hysteresis": 3}])
@pytest.mark.parametrize("is_async", [False, True])
def test_a08_learning_rate_schedule_by_outcome(options: dict[str, float], is_async: bool) -> None:
    """A08: warnings are errors, the first step overflows; the schedule stands at the number of good steps."""
    scaler = GradScaler(**options)  # type: ignore[arg-type]
    parameter, optimizer = weights(1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    slopes = [INF, 1.0, 1.0, NAN, 1.0, INF, INF]

    def follow(outcome: UpdateOutcome) -> None:
        for _ in range(outcome.good):
            schedule.step()

    for slope in slopes:
        optimizer.zero_grad()
        backward(scaler, parameter, slope)
        scaler.step(optimizer)
        follow(now(scaler.update(is_async=is_async)))
    follow(now(scaler.synchronize()))
    assert schedule.last_epoch == 3 and scaler.skipped_steps == 4


# --- saving ----------------------------------------------------------------------------------------------------------


def advance_run(scaler: Any, slopes: list[float]) -> list[Any]:
    parameter, optimizer = weights(1.0)
    told = []
    for slope in slopes:
        optimizer.zero_grad()
        backward(scaler, parameter, slope)
        scaler.step(optimizer)
        update(scaler)
        told.append((scaler.state_dict(), parameter.item()))
    return told


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("source", [GradScaler, torchs])
@pytest.mark.parametrize("target", [GradScaler, torchs])
def test_a12_state_goes_both_ways(source: Any, target: Any, used: bool) -> None:
    """A12: into a fresh or a used scaler of either class, the run goes on as if never interrupted."""
    options = {"init_scale": 100.1, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 3}
    head, tail = [1.0, INF, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, INF, 1.0, 1.0, 1.0, NAN]
    whole = torchs(**options)
    advance_run(whole, head)
    expected = advance_run(whole, tail)
    first = source(**options)
    advance_run(first, head)
    second = target()
    if used:
        advance_run(second, [1.0, 1.0])
    saved = first.state_dict()
    assert set(saved) == set(torchs().state_dict())
    second.load_state_dict(saved)
    assert second.state_dict() == saved
    assert advance_run(second, tail) == expected


def test_a13_disabled() -> None:
    """A13: everything passes through; an empty dict is refused by an enabled one."""
    scaler = GradScaler(enabled=False)
    parameter, optimizer = weights(1.0)
    loss = (parameter * 1.0).sum()
    assert scaler.scale(loss) is loss and scaler.scale("anything") == "anything"  # type: ignore[call-overload]
    assert scaler.get_scale() == 1.0 and scaler.state_dict() == {} and not scaler.is_enabled()
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert parameter.item() == 0.0
    assert update(scaler) == UpdateOutcome(scale=1.0, skipped=False, settled=1, good=1)
    scaler.load_state_dict({})
    assert pickle.loads(pickle.dumps(scaler)).is_enabled() is False
    enabled = GradScaler()
    with pytest.raises(RuntimeError, match="empty"):
        enabled.load_state_dict({})


def test_loading_is_all_or_nothing() -> None:
    scaler = GradScaler()
    before = scaler.state_dict()
    good = {"scale": 2.0, "growth_factor": 3.0, "backoff_factor": 0.1, "growth_interval": 7, "_growth_tracker": 3}
    for name in good:
        with pytest.raises(KeyError):
            scaler.load_state_dict({key: value for key, value in good.items() if key != name})
        assert scaler.state_dict() == before
    for scale in (INF, NAN, -2.0, 0.0):
        with pytest.raises(ValueError, match="state dict"):
            scaler.load_state_dict(good | {"scale": scale})
        assert scaler.state_dict() == before
    scaler.load_state_dict(good)
    assert scaler.state_dict() == good


@pytest.mark.parametrize("clone", [copy.deepcopy, copy.copy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a13_clones(clone: Callable[[GradScaler], GradScaler]) -> None:
    """A13: between iterations it is independent and goes on alike; between step and update it raises."""
    scaler = GradScaler(growth_interval=3, hysteresis=2, init_scale=3.3)
    assert clone(scaler).get_scale() == 3.3
    advance_run(scaler, [1.0, 1.0, 1.0, 1.0, INF])
    twin = clone(scaler)
    assert twin.state_dict() == scaler.state_dict() and twin.skipped_steps == 1
    tail = [INF, 1.0, 1.0, 1.0, NAN]
    assert advance_run(twin, tail) == advance_run(scaler, tail)
    parameter, optimizer = weights(1.0)
    backward(scaler, parameter, 1.0)
    scaler.step(optimizer)
    with pytest.raises(AssertionError, match="between step"):
        clone(scaler)
    update(scaler)
    clone(scaler)


def test_setters_tell_the_last_value() -> None:
    scaler = GradScaler()
    for name, value in (("growth_factor", 3.0), ("backoff_factor", 0.1), ("growth_interval", 5)):
        getattr(scaler, f"set_{name}")(value)
        assert getattr(scaler, f"get_{name}")() == scaler.state_dict()[name] == value


def test_scale_from_many_threads() -> None:
    """A first scale() in several threads at once, as device threads do it."""
    scaler, gate = GradScaler(init_scale=3.3), threading.Barrier(4)
    results: list[float] = []

    def work() -> None:
        gate.wait()
        results.extend(scaler.scale(torch.ones(())).item() for _ in range(200))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(results) == {torch.tensor(3.3).item()} and len(results) == 800


def test_no_tensor_operation_in_an_update() -> None:
    """SPEC 11: the loop's thread does no torch compute; an update is arithmetic on Python numbers."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.count += 1
            return func(*args, **(kwargs or {}))

    scaler = GradScaler()
    parameter, optimizer = weights(1.0)
    for slope in (1.0, INF):
        optimizer.zero_grad()
        backward(scaler, parameter, slope)
        scaler.step(optimizer)
        with Count():
            update(scaler)
            scaler.get_scale(), scaler.state_dict()
    assert Count.count == 0 and scaler.get_scale() == 32768.0


def test_a_run_of_three_loops_at_module_scope() -> None:
    """D01: made outside of any loop, used by three asyncio.run in a row, each with two tasks contending."""
    parameter, optimizer = weights(1.0)

    async def contend() -> None:
        async def one() -> None:
            optimizer.zero_grad()
            backward(SCALER, parameter, 1.0)
            SCALER.step(optimizer)
            await SCALER.update()

        await asyncio.gather(one(), one())

    for _ in range(3):
        asyncio.run(contend())
    asyncio.run(settled(SCALER))
    assert SCALER.state_dict()["_growth_tracker"] == 6


async def settled(scaler: GradScaler) -> UpdateOutcome:
    return await scaler.synchronize()


SCALER = GradScaler()
