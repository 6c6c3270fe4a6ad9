"""RoundPipe's tutorial (a ResNet in mixed precision) ported: what a script that used RoundPipe has to change.

    python examples/port_from_roundpipe.py

The page trains on CIFAR-100; here it is the digits that ship with scikit-learn, so that nothing is downloaded. Each
place that changed says so in a comment that begins with "ported:". In short: another import, `async def` around the
training, `await` before the calls that wait. What RoundPipe does with the devices, the optimizer's copies and the
background step stays as it was.
"""

import asyncio

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

# ported: `roundpipe` became `roundpipe_async`; Adam is in its `optim` as before. `no_grad` and `prefetch` are new.
from roundpipe_async import DevicePool, GradScaler, OptimizerCtx, RoundPipe, no_grad, prefetch
from roundpipe_async.optim import Adam

# ported: fp16 on the page. A CPU runs fp16 convolutions very slowly, so use bf16 there; on a GPU nothing changes.
DTYPE = torch.float16 if torch.accelerator.is_available() else torch.bfloat16
EPOCHS = 4


# --- 1. the model, as a Sequential: not changed ----------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def make_resnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16, 16),
        Residual(16, 32, stride=2),
        Residual(32, 64, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


# --- 2. the data: not changed ----------------------------------------------------------------------------------------

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
labels = torch.tensor(digits.target)
train_loader = DataLoader(TensorDataset(images[:1437], labels[:1437]), batch_size=64, shuffle=True)
test_loader = DataLoader(TensorDataset(images[1437:], labels[1437:]), batch_size=180)
criterion = nn.CrossEntropyLoss()


# --- 3. evaluation ---------------------------------------------------------------------------------------------------


# ported: a coroutine. `torch.no_grad()` held across an `await` would reach other tasks of the loop; ours does not.
async def evaluate(model: RoundPipe) -> tuple[float, float]:
    model.eval()
    loss_sum, correct, total = 0.0, 0, 0
    with no_grad():
        async for x, y in prefetch(test_loader):  # ported: `for` would do; prefetch loads beside the work
            outputs = await model(x.to(DTYPE))  # ported: await
            loss_sum += criterion(outputs.float(), y).item() * len(y)
            correct += (outputs.argmax(1) == y).sum().item()
            total += len(y)
    return loss_sum / total, correct / total


# --- 4. training -----------------------------------------------------------------------------------------------------


async def main() -> None:  # ported: `await` needs a coroutine; in a notebook the cells may await as they stand
    torch.manual_seed(0)
    pool = DevicePool.default()
    # ported: the page's default, devices + 1, holds here too; the devices need not be CUDA's, so ask the pool.
    num_microbatch = len(pool.devices) + 1

    model = RoundPipe(make_resnet().to(DTYPE), optim_dtype=torch.float32)
    with OptimizerCtx():
        optimizer = Adam(model.parameters())
    scaler = GradScaler()

    def optimizer_step() -> None:
        scaler.step(optimizer)
        optimizer.zero_grad()

    async with model:  # ported: new; waits for what is in flight and lets go of the devices
        for epoch in range(EPOCHS):
            model.train()
            running_loss, correct, total = 0.0, 0, 0
            async for x, y in prefetch(tqdm(train_loader, desc=f"epoch {epoch + 1}/{EPOCHS}", leave=False)):
                loss, outputs = await model.forward_backward(  # ported: await
                    input_args=(x.to(DTYPE),),
                    label=y,
                    # The sum over microbatches is what comes back, so a mean loss is divided by their number: right
                    # for even ones. `RoundPipeRunConfig(loss_reduction="mean")` does it for uneven ones as well.
                    loss_fn=lambda out, lab: scaler.scale(criterion(out.float(), lab)) / num_microbatch,
                    return_outputs=True,
                )
                # ported: read the scale before `update` changes it (the page reads it after).
                loss_item = loss.item() / scaler.get_scale()
                await model.step(optimizer_step)  # ported: await; still returns before the step is done
                await scaler.update()  # ported: await; waits for the step before this one, not for this one

                running_loss += loss_item * len(y)
                correct += (outputs.argmax(1) == y).sum().item()
                total += len(y)

            await model.synchronize()  # ported: await
            test_loss, test_accuracy = await evaluate(model)
            print(
                f"epoch {epoch + 1}: train loss {running_loss / total:.4f}, accuracy {correct / total:.4f}; "
                f"test loss {test_loss:.4f}, accuracy {test_accuracy:.4f}"
            )


if __name__ == "__main__":
    asyncio.run(main())
