"""`wrap_model_to_roundpipe`: what becomes of each kind of model, and that a preset changes no bit of its results."""

from __future__ import annotations

import copy
import logging
from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_async import DevicePool, OptimizerCtx, RoundPipe, RoundPipeRunConfig, no_grad, wrap_model_to_roundpipe


@pytest.fixture
async def pool() -> AsyncIterator[DevicePool]:
    async with DevicePool.cpu(2, intra_op_threads=1) as pool:
        yield pool


class Residual(nn.Module):
    """No Sequential: its forward uses its submodules twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.inner(x))


# --- what becomes of a model -----------------------------------------------------------------------------------------


async def test_a_sequential_is_cut_between_its_children(pool: DevicePool) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    async with wrap_model_to_roundpipe(layers, devices=pool) as model:
        assert isinstance(model, RoundPipe)
        assert len(model.layer_costs()) == 3
        assert "test_wrap.py:" in repr(model), "the name tells where the model was wrapped"


async def test_any_other_module_is_one_layer_and_says_so(pool: DevicePool, caplog: pytest.LogCaptureFixture) -> None:
    module = Residual(64)
    x = torch.randn(6, 64)
    with caplog.at_level(logging.INFO, "roundpipe_async"):
        model = wrap_model_to_roundpipe(module, devices=pool, name="mine", upper_threshold=64 * 65 * 4)
    assert "mine: Residual is no nn.Sequential and has no preset; it runs as one layer" in caplog.messages
    async with model:
        assert len(model.layer_costs()) == 1
        with no_grad():
            assert torch.equal(await model(x), torch.cat([module(part).detach() for part in x.tensor_split(3)]))


@pytest.mark.parametrize(("lower_threshold", "told", "expected"), [(0, None, 3), (1 << 20, None, 1), (1 << 20, 2, 2)])
async def test_a_small_layer_runs_in_one_microbatch(
    pool: DevicePool, lower_threshold: int, told: int | None, expected: int
) -> None:
    seen = []
    module = Residual(4)
    module.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    config = RoundPipeRunConfig(num_microbatch=told)
    async with wrap_model_to_roundpipe(
        module, lower_threshold=lower_threshold, model_run_config=config, devices=pool
    ) as model:
        await model.forward_backward((torch.randn(6, 4),), loss_fn=lambda out, _: out.sum())
    assert sorted(seen) == [6 // expected] * expected


async def test_options_for_the_model_itself_win(pool: DevicePool) -> None:
    module = Residual(4)
    async with wrap_model_to_roundpipe(
        module,
        override_config={module: RoundPipeRunConfig(num_microbatch=2)},
        model_run_config=RoundPipeRunConfig(num_microbatch=5, loss_reduction="mean"),
        optim_dtype=torch.float64,
        devices=pool,
    ) as model:
        losses = []
        await model.forward_backward(
            (torch.ones(6, 4),), loss_fn=lambda out, _: losses.append(out.detach().mean()) or out.mean()
        )
        assert len(losses) == 2
        assert {parameter.dtype for parameter in model.optim_parameters()} == {torch.float64}


def test_what_cannot_be_done_is_refused() -> None:
    """Submodules cannot be awaited from a plain forward, so what asks for that raises instead of being ignored."""
    module = Residual(4)
    with pytest.raises(NotImplementedError, match="skip_modules has 1 modules"):
        wrap_model_to_roundpipe(module, skip_modules=[module.inner])
    with pytest.raises(NotImplementedError, match=r"override_config names submodules \(Linear\)"):
        wrap_model_to_roundpipe(module, override_config={module.inner: RoundPipeRunConfig()})
    with pytest.raises(NotImplementedError, match="80 bytes, more than upper_threshold"):
        wrap_model_to_roundpipe(module, upper_threshold=79)
    with pytest.raises(NotImplementedError, match=r"no preset for Residual; there are for .*LlamaForCausalLM"):
        wrap_model_to_roundpipe(module, use_sequential_preset=True)
    with pytest.raises(TypeError, match="ModuleList has no forward"):
        wrap_model_to_roundpipe(nn.ModuleList([module]))
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, not list"):
        wrap_model_to_roundpipe([module])  # type: ignore[arg-type]


# --- presets ---------------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    return pytest.importorskip("transformers", reason="presets need transformers (the extra hf)")


def gpt2(hf: Any) -> Any:
    config = hf.GPT2Config(
        vocab_size=61, n_positions=32, n_embd=32, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def llama(hf: Any) -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))


def mistral(hf: Any) -> Any:
    return hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=4))


def qwen2_two_kinds_of_masks(hf: Any) -> Any:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=2))


def qwen3_tied(hf: Any) -> Any:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True))


MODELS = [gpt2, llama, mistral, qwen2_two_kinds_of_masks, qwen3_tied]


@pytest.fixture(params=MODELS, ids=lambda make: make.__name__)
def original(request: pytest.FixtureRequest, transformers: ModuleType) -> Any:
    torch.manual_seed(0)
    make: Callable[[Any], Any] = request.param
    return make(transformers).train()


def batch(size: int = 4, length: int = 10) -> dict[str, torch.Tensor]:
    """Tokens with padding on the left of one sample and on the right of another; padding has no loss."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 61, (size, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    mask[2, 6:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


async def test_a_preset_changes_no_bit(original: Any, pool: DevicePool) -> None:
    """Loss, logits and gradients are those of the original model on the same microbatches, also after a step."""
    reference = copy.deepcopy(original)
    inputs = batch()
    async with wrap_model_to_roundpipe(
        original, model_run_config=RoundPipeRunConfig(num_microbatch=2), devices=pool
    ) as model:
        assert len(model.layer_costs()) == 6
        with OptimizerCtx():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        for _ in range(2):
            loss, outputs = await model.forward_backward(
                input_kwargs=inputs, loss_fn=lambda out, _: out.loss, return_outputs=True
            )
            await model.step(lambda: (optimizer.step(), optimizer.zero_grad()), False)

            parts = [
                reference(**{name: value[i : i + 2] for name, value in inputs.items()}, use_cache=False) for i in (0, 2)
            ]
            for part in parts:
                part.loss.backward()
            gradients = [parameter.grad.clone() for parameter in reference.parameters()]
            reference_optimizer.step()
            reference_optimizer.zero_grad()
            assert torch.equal(loss, parts[0].loss.detach() + parts[1].loss.detach())
            assert type(outputs) is type(parts[0])
            assert torch.equal(outputs.logits, torch.cat([part.logits.detach() for part in parts]))
            assert any(gradient.count_nonzero() for gradient in gradients)
        await model.synchronize()
        for (name, ours), theirs in zip(original.named_parameters(), reference.parameters(), strict=True):
            assert torch.equal(ours, theirs), name


async def test_the_token_mean_of_the_whole_batch(original: Any, pool: DevicePool) -> None:
    """`num_items_in_batch`, as transformers' own trainer passes it, gives the batch's mean over tokens (case C06)."""
    reference = copy.deepcopy(original)
    inputs = batch(size=5)
    count = int((inputs["labels"][:, 1:] != -100).sum())
    async with wrap_model_to_roundpipe(original, devices=pool) as model:
        loss = await model.forward_backward(
            input_kwargs={**inputs, "num_items_in_batch": count}, loss_fn=lambda out, _: out.loss
        )
        await model.synchronize()
    whole = reference(**inputs, use_cache=False).loss
    whole.backward()
    assert loss == pytest.approx(whole.item(), rel=1e-5)
    for ours, theirs in zip(original.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


async def test_a_preset_model_is_still_itself(original: Any, pool: DevicePool) -> None:
    """Attributes are the original's; positional arguments, logits_to_keep and return_dict work; `eval` reaches all."""
    inputs = batch()
    async with wrap_model_to_roundpipe(original, use_sequential_preset=True, devices=pool) as model:
        assert model.config is original.config
        assert set(model.state_dict()) == set(original.state_dict())
        with no_grad():
            last = await model.eval()(inputs["input_ids"], logits_to_keep=1)
            (as_tuple,) = await model(inputs["input_ids"], return_dict=False)
        assert not original.training
        with torch.no_grad():
            expected = [original(part, use_cache=False).logits for part in inputs["input_ids"].tensor_split(3)]
        assert torch.equal(as_tuple, torch.cat(expected))
        torch.testing.assert_close(last.logits, torch.cat(expected)[:, -1:])


async def test_without_its_preset_a_model_is_one_layer(transformers: ModuleType, pool: DevicePool) -> None:
    original = llama(transformers)
    inputs = batch()
    async with wrap_model_to_roundpipe(original, use_sequential_preset=False, devices=pool) as model:
        assert len(model.layer_costs()) == 1
        loss = await model.forward_backward(
            input_kwargs={**inputs, "use_cache": False},
            loss_fn=lambda out, _: out.loss,
            run_config=RoundPipeRunConfig(num_microbatch=1),
        )
    assert torch.equal(loss, original(**inputs, use_cache=False).loss.detach())


async def test_a_subclass_has_no_preset(transformers: ModuleType, pool: DevicePool) -> None:
    """Its forward may differ from what the preset of its base does."""

    class Mine(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        pass

    async with wrap_model_to_roundpipe(Mine(transformers.LlamaConfig(**SIZES)), devices=pool) as model:
        assert len(model.layer_costs()) == 1


@pytest.mark.parametrize("argument", ["use_cache", "output_hidden_states", "output_attentions"])
async def test_what_layers_cannot_give_is_refused(transformers: ModuleType, pool: DevicePool, argument: str) -> None:
    async with wrap_model_to_roundpipe(llama(transformers), devices=pool) as model:
        with no_grad(), pytest.raises(NotImplementedError, match=argument):
            await model(**batch(), **{argument: True})
