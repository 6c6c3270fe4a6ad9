"""Run configs: what wins, and what is refused when it is written down."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_async.config import RoundPipeRunConfig

GOOD: dict[str, list[Any]] = {
    "requires_grad": [True, False],
    "output_device": [torch.device("cpu"), torch.device("cuda", 1)],
    "preserve_rng_state": [True, False],
    "recompute_grain": ["stage", "layer"],
    "num_microbatch": [1, 7],
    "split_input": [(None, None), (("spec",), {"x": "spec"}), len],
    "split_label": [("spec",), {"a": "spec"}, len],
    "merge_output": [True, False, ("spec",), len],
    "execute_plan": [SimpleNamespace(fwd_plan=[], bwd_plan=[])],
    "loss_reduction": ["sum", "mean"],
    "schedule": ["round_robin", "search", SimpleNamespace(runs=())],
}
options = st.fixed_dictionaries({}, optional={name: st.sampled_from([*good, None]) for name, good in GOOD.items()})


def test_every_field_is_none_by_default_and_tried_here() -> None:
    config = RoundPipeRunConfig()
    assert {field.name for field in fields(config)} == set(GOOD)
    assert all(getattr(config, name) is None for name in GOOD)


@given(options, options)
def test_the_call_wins_where_it_says_something(model: dict[str, Any], call: dict[str, Any]) -> None:
    merged = RoundPipeRunConfig(**model).merged(RoundPipeRunConfig(**call))
    for name in GOOD:
        said = call.get(name)
        assert getattr(merged, name) == (said if said is not None else model.get(name))


def test_false_from_the_call_is_said() -> None:
    model = RoundPipeRunConfig(requires_grad=True, preserve_rng_state=True, merge_output=True)
    call = RoundPipeRunConfig(requires_grad=False, preserve_rng_state=False, merge_output=False)
    assert model.merged(call) == call
    assert model.merged(None) is model
    with pytest.raises(TypeError, match="run_config must be a RoundPipeRunConfig"):
        model.merged({"requires_grad": True})  # type: ignore[arg-type]


BAD: list[tuple[str, Any, type[Exception], str]] = [
    ("requires_grad", 1, TypeError, "requires_grad must be True, False or None, not 1"),
    ("requires_grad", "yes", TypeError, "requires_grad"),
    ("preserve_rng_state", 0, TypeError, "preserve_rng_state"),
    ("output_device", 0, TypeError, "output_device"),
    ("output_device", "gpu7", ValueError, "no device that torch knows: 'gpu7'"),
    ("recompute_grain", "block", ValueError, "recompute_grain must be 'stage', 'layer' or None, not 'block'"),
    ("recompute_grain", True, TypeError, "recompute_grain"),
    ("num_microbatch", 0, ValueError, "at least 1, not 0"),
    ("num_microbatch", -3, ValueError, "at least 1, not -3"),
    ("num_microbatch", True, TypeError, "not True"),
    ("num_microbatch", 2.0, TypeError, "not 2.0"),
    ("num_microbatch", "4", TypeError, "not '4'"),
    ("split_input", ("one",), TypeError, "pair"),
    ("split_input", (None, None, None), TypeError, "pair"),
    ("split_input", [None, None], TypeError, "pair"),
    ("split_input", {"x": None}, TypeError, "pair"),
    ("split_input", True, TypeError, "pair"),
    ("split_label", 3, TypeError, "split_label"),
    ("split_label", False, TypeError, "split_label"),
    ("merge_output", 1, TypeError, "merge_output"),
    ("merge_output", "cat", TypeError, "merge_output"),
    ("execute_plan", [range(2)], TypeError, "ModelExecutePlan"),
    ("loss_reduction", "none", ValueError, "loss_reduction must be 'sum', 'mean' or None, not 'none'"),
    ("loss_reduction", 1, TypeError, "loss_reduction"),
    ("schedule", "1f1b", ValueError, "schedule"),
    ("schedule", 3, TypeError, "schedule"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), BAD)
def test_what_cannot_be_is_refused_at_once(name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RoundPipeRunConfig(**{name: value})


def test_names_of_devices_and_numpys_integers_are_taken() -> None:
    config = RoundPipeRunConfig(output_device="cpu", num_microbatch=np.int64(3))  # type: ignore[arg-type]
    assert config.output_device == torch.device("cpu")
    assert config.num_microbatch == 3 and type(config.num_microbatch) is int


def test_a_config_is_a_value() -> None:
    config = RoundPipeRunConfig(num_microbatch=3, output_device=torch.device("cpu"), split_label=len)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(FrozenInstanceError):
        config.num_microbatch = 4  # type: ignore[misc]
    assert not hasattr(config, "__dict__")
