"""Our Adam and AdamW are torch's fused ones, without being asked, and never with the wrong numbers."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from roundpipe_async.optim import Adam, AdamW, live_optimizers

PAIRS = pytest.mark.parametrize(("ours", "torchs"), [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)])
Class = type[torch.optim.Optimizer]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (33,), (), (4, 3, 2, 2), (0, 3)]
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)) for shape in shapes]


def train(optimizer: torch.optim.Optimizer, steps: int = 5, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        for p in params:
            noise = torch.randn(p.shape, generator=generator)
            p.grad = torch.empty_like(p).copy_(noise)
        optimizer.step()
    return [p.detach().clone() for p in params]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1},
    {"amsgrad": True, "weight_decay": 0.01},
    {"maximize": True},
    {"lr": torch.tensor(0.02)},
]


@PAIRS
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_numbers_are_those_of_torchs_fused(
    ours: Class, torchs: Class, options: dict[str, Any], dtype: torch.dtype
) -> None:
    own = ours(parameters(dtype), **options)  # type: ignore[call-arg]
    assert own.param_groups[0]["fused"] is True
    assert isinstance(own, torchs)
    fused, loop = (torchs(parameters(dtype), **options, **how) for how in ({"fused": True}, {"foreach": False}))
    result = train(own)
    assert same(result, train(fused))
    if dtype in (torch.float32, torch.float64):
        for left, right in zip(result, train(loop), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("choice", [{"fused": False}, {"foreach": True}, {"foreach": False}, {"capturable": True},
                                    {"differentiable": True}], ids=str)  # fmt: skip
@PAIRS
def test_what_the_user_chose_is_kept(ours: Class, torchs: Class, choice: dict[str, bool]) -> None:
    own, plain = ours(parameters(), **choice), torchs(parameters(), **choice)  # type: ignore[call-arg]
    assert own.param_groups[0]["fused"] is plain.param_groups[0]["fused"]
    assert {**own.defaults} == {**plain.defaults}
    if not {"capturable", "differentiable"} & choice.keys():
        assert same(train(own), train(plain))


@PAIRS
def test_wrong_combinations_raise_as_torchs(ours: Class, torchs: Class) -> None:
    for wrong in ({"fused": True, "foreach": True}, {"fused": True, "differentiable": True}, {"lr": -1.0}):
        with pytest.raises((RuntimeError, ValueError)) as theirs:
            torchs(parameters(), **wrong)  # type: ignore[call-arg]
        with pytest.raises(type(theirs.value)) as mine:
            ours(parameters(), **wrong)  # type: ignore[call-arg]
        assert str(mine.value) == str(theirs.value)


@PAIRS
def test_each_group_is_decided_by_itself(ours: Class, torchs: Class) -> None:
    whole, cut = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4)[:, ::2])
    unreal, off = nn.Parameter(torch.ones(3, dtype=torch.complex64)), nn.Parameter(torch.ones(2))
    groups: list[dict[str, Any]] = [
        {"params": [whole], "lr": 0.5}, {"params": [cut]}, {"params": [unreal]}, {"params": [off], "fused": False},
    ]  # fmt: skip
    own = ours(groups, lr=0.1)  # type: ignore[call-arg]
    own.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]})
    own.add_param_group({"params": [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.cfloat))]})
    assert [group["fused"] for group in own.param_groups] == [True, None, None, False, True, None]
    assert not getattr(own, "_step_supports_amp_scaling", False), "a scaler unscales groups that are not fused"
    train(own)
    assert all(bool((p != 1).all()) for group in own.param_groups for p in group["params"])


# ---- memory layouts -------------------------------------------------------------------------------------------------


@PAIRS
@pytest.mark.parametrize("lay", [lambda t: t.t(), lambda t: t.view(4, 4, 2, 2).to(memory_format=torch.channels_last)])
@pytest.mark.parametrize("explicit", [{}, {"fused": True}], ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_gradient_or_state_laid_out_differently_is_paired_up_rightly(
    ours: Class, torchs: Class, lay: Callable[[Tensor], Tensor], explicit: dict[str, bool], amsgrad: bool
) -> None:
    """torch's fused CPU kernel reads both as flat memory; without our care the update mixes up the elements."""
    start = lay(torch.linspace(-1, 1, 64).reshape(8, 8))
    gradient = torch.linspace(-2, 3, 64).reshape(start.shape)
    results = []
    for make in (lambda p: ours([p], amsgrad=amsgrad, **explicit), lambda p: torchs([p], amsgrad=amsgrad)):  # type: ignore[call-arg]
        p = nn.Parameter(start.clone(memory_format=torch.preserve_format))
        assert p.stride() == start.stride() != gradient.stride()
        optimizer = make(p)
        for _ in range(2):
            p.grad = gradient.clone()
            optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            for name in state.keys() - {"step"}:
                state[name] = state[name].contiguous()
        optimizer.load_state_dict(saved)
        for _ in range(2):
            p.grad = gradient.clone()
            optimizer.step()
        assert p.grad is not None
        assert torch.equal(p.grad, gradient)
        results.append((p.detach().clone(), optimizer.state[p]["exp_avg"]))
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


# ---- states ---------------------------------------------------------------------------------------------------------


@PAIRS
@pytest.mark.parametrize("how", [{}, {"fused": True}, {"foreach": False}], ids=str)
def test_state_dicts_load_both_ways(ours: Class, torchs: Class, how: dict[str, bool]) -> None:
    def save_and_load(state: dict[str, Any]) -> Any:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    own, theirs = ours(parameters(), lr=0.3), torchs(parameters(), lr=0.3, **how)  # type: ignore[call-arg]
    train(own)
    train(theirs)
    assert own.state_dict()["state"].keys() == theirs.state_dict()["state"].keys()
    assert own.state_dict()["param_groups"][0].keys() == theirs.state_dict()["param_groups"][0].keys()

    to_torch, to_ours = torchs(parameters(), lr=1.0), ours(parameters(), lr=1.0)  # type: ignore[call-arg]
    for target, source in ((to_torch, own), (to_ours, theirs)):
        with torch.no_grad():
            for p, q in zip(target.param_groups[0]["params"], source.param_groups[0]["params"], strict=True):
                p.copy_(q)
        saved = save_and_load(source.state_dict())
        keep = copy.deepcopy(saved["param_groups"])
        target.load_state_dict(saved)
        assert saved["param_groups"] == keep, "the caller's dict is not changed"
        assert target.param_groups[0]["lr"] == 0.3
        for left, right in zip(train(target, seed=2), train(source, seed=2), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    chosen = how.get("foreach") is None
    assert to_ours.param_groups[0]["fused"] is (True if chosen else None)
    assert type(to_ours.state[to_ours.param_groups[0]["params"][0]]["step"]) is Tensor


def test_a_state_of_other_groups_is_refused_as_torch_does() -> None:
    own, other = Adam(parameters()), torch.optim.Adam([{"params": [p]} for p in parameters()])
    with pytest.raises(ValueError, match="different number of parameter groups"):
        own.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="doesn't match the size"):
        own.load_state_dict(torch.optim.Adam(parameters()[:2]).state_dict())


@PAIRS
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_clones_go_on_alike(ours: Class, torchs: Class, clone: Callable[[Any], Any]) -> None:
    own = ours(parameters())  # type: ignore[call-arg]
    train(own)
    twin = clone(own)
    assert type(twin) is ours
    assert twin.param_groups[0]["fused"] is True
    assert same(train(twin, seed=3), train(own, seed=3))
    assert twin in live_optimizers()


# ---- torch's surroundings -------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=True),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9)]),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


@PAIRS
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_work_as_with_torchs(ours: Class, torchs: Class, name: str) -> None:
    results = []
    for optimizer in (ours(parameters(), lr=0.1), torchs(parameters(), lr=0.1, fused=True)):  # type: ignore[call-arg]
        scheduler = SCHEDULERS[name](optimizer)
        rates, values = [], []
        for step in range(6):
            values += train(optimizer, 1, seed=step)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Please also save or load|The epoch parameter", UserWarning)
                scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        results.append((rates, values))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


def test_step_hooks_and_closures_run_once() -> None:
    torch.optim.Adam(parameters())  # torch wraps each class's `step` for its hooks at the first instance
    calls: list[str] = []
    own = Adam(parameters())
    own.register_step_pre_hook(lambda *_: calls.append("pre"))
    own.register_step_post_hook(lambda *_: calls.append("post"))
    p = own.param_groups[0]["params"][0]

    def closure() -> float:
        calls.append("closure")
        own.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return float(loss.detach())

    assert isinstance(own.step(closure), float)
    assert calls == ["pre", "closure", "post"]


def test_live_optimizers_are_listed_and_not_kept_alive() -> None:
    before = set(map(id, live_optimizers()))
    own = AdamW(parameters())
    torch.optim.AdamW(parameters())
    assert [optimizer for optimizer in live_optimizers() if id(optimizer) not in before] == [own]
    del own
    gc.collect()
    assert not {id(optimizer) for optimizer in live_optimizers()} - before
