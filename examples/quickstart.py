"""Train a small GPT on Python's own help texts, in mixed precision, on whatever this machine has.

    python examples/quickstart.py

The weights are fp16 and live in host memory; the optimizer keeps fp32 copies and works in the background, one step
behind; a gradient scaler keeps small fp16 gradients from vanishing. Beside the training, in the same event loop, the
model is evaluated now and then. At the end the model writes some text, and the losses go to quickstart_loss.png.
"""

import asyncio
import math
import pydoc_data.topics

import matplotlib

matplotlib.use("Agg")  # draws to files, needs no screen
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm

import roundpipe_async
from roundpipe_async import GradScaler, OptimizerCtx, RoundPipe, RoundPipeRunConfig, optim, prefetch

LAYERS, WIDTH, HEADS, CONTEXT = 4, 128, 4, 128
STEPS, WARMUP, BATCH, PEAK_LR = 500, 30, 16, 3e-3
EVALUATE_EVERY = 100


# --- the data: the bytes of Python's help topics, cut into windows that overlap by half ------------------------------

text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
data = torch.tensor(list(text.encode()), dtype=torch.long)
train_data, test_data = data.split([len(data) * 9 // 10, len(data) - len(data) * 9 // 10])
train_windows = train_data.unfold(0, CONTEXT + 1, CONTEXT // 2)
test_windows = test_data.unfold(0, CONTEXT + 1, CONTEXT)[:64]


# --- the model: a Sequential, whose children are the layers that the pipeline is cut between -------------------------


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        now, before = self.norm1(x).chunk(2, dim=-1)
        mixed = torch.cat([now, F.pad(before, (0, 0, 1, -1))], dim=-1)  # half the features come from the byte before
        q, k, v = self.qkv(mixed).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def make_gpt() -> nn.Sequential:
    model = nn.Sequential(Embedding(), *(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.2)
    return model


def criterion(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def learning_rate(step: int) -> float:
    """The share of PEAK_LR: a linear warm-up, then half a cosine."""
    return min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))


# --- beside the training ---------------------------------------------------------------------------------------------


async def evaluate(model: RoundPipe) -> float:
    """The loss on text that was not trained on. May run while the model trains: it sees one version of the weights."""
    with roundpipe_async.no_grad():
        logits = await model(test_windows[:, :-1])
    return criterion(logits, test_windows[:, 1:]).item()


async def write(model: RoundPipe, prompt: str, length: int) -> str:
    tokens = list(prompt.encode())
    with roundpipe_async.no_grad():
        for _ in range(length):
            logits = await model(torch.tensor([tokens[-CONTEXT:]]))
            tokens.append(int(torch.multinomial(torch.softmax(logits[0, -1].float() / 0.6, dim=-1), 1)))
    return bytes(tokens).decode(errors="replace")


# --- the training ----------------------------------------------------------------------------------------------------


async def main() -> None:
    torch.manual_seed(0)
    model = RoundPipe(
        make_gpt().to(torch.float16),
        optim_dtype=torch.float32,
        model_run_config=RoundPipeRunConfig(num_microbatch=4, loss_reduction="mean"),
    )
    with OptimizerCtx():  # here, parameters() are the optimizer's fp32 copies; one step old, they like less momentum
        optimizer = optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.8, 0.98), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    scaler = GradScaler()

    def optimizer_step() -> None:  # runs in the optimizer's thread, while the next iteration computes
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.optim_parameters(), 1.0)
        scaler.step(optimizer)
        optimizer.zero_grad()

    sampler = RandomSampler(train_windows, replacement=True, num_samples=STEPS * BATCH)
    loader = DataLoader(train_windows, batch_size=BATCH, sampler=sampler)
    train_losses: list[float] = []
    evaluations: dict[int, asyncio.Task[float]] = {}

    async with model:
        progress = tqdm(total=STEPS, unit="step")
        async for windows in prefetch(loader):
            scaled_loss = await model.forward_backward(
                input_args=(windows[:, :-1],),
                label=windows[:, 1:],
                loss_fn=lambda logits, targets: scaler.scale(criterion(logits, targets)),
            )
            train_losses.append(scaled_loss.item() / scaler.get_scale())  # before update: the scale this loss had
            await model.step(optimizer_step)
            scheduler.step()
            await scaler.update()

            if len(train_losses) % EVALUATE_EVERY == 0:
                evaluations[len(train_losses)] = asyncio.create_task(evaluate(model))
            progress.set_postfix(loss=f"{train_losses[-1]:.3f}", scale=f"{scaler.get_scale():g}", refresh=False)
            progress.update()
        progress.close()

        await model.synchronize()  # the last step is done, the model's weights are the newest
        test_losses = {step: await task for step, task in evaluations.items()}
        test_losses[STEPS] = await evaluate(model)
        print(f"loss on training text: {train_losses[0]:.3f} at the first step, {train_losses[-1]:.3f} at the last")
        print("loss on unseen text:   " + ", ".join(f"{loss:.3f} ({step})" for step, loss in test_losses.items()))
        print(f"\n{await write(model, 'The ', 400)}\n")

    figure, axes = plt.subplots(figsize=(8, 4.5))
    axes.plot(train_losses, linewidth=0.8, label="training text")
    axes.plot(list(test_losses), list(test_losses.values()), "o-", label="unseen text")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="quickstart: a small GPT in fp16")
    axes.legend()
    figure.tight_layout()
    figure.savefig("quickstart_loss.png", dpi=120)
    print("the loss curve is in quickstart_loss.png")


if __name__ == "__main__":
    asyncio.run(main())
