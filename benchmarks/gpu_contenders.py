"""What `gpu.py` measures with: a decoder, the machine, and the plain PyTorch that the engine is compared with."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from roundpipe_async import DevicePool


@dataclass(frozen=True, slots=True)
class Sizes:
    """A decoder and its batch."""

    layers: int
    width: int
    length: int
    vocabulary: int
    rows: int
    microbatches: int

    @property
    def tokens(self) -> int:
        """Tokens of an iteration."""
        return self.rows * self.microbatches * self.length

    def batch(self) -> tuple[Tensor, Tensor]:
        """Random tokens and labels."""
        shape = (self.rows * self.microbatches, self.length)
        return torch.randint(self.vocabulary, shape), torch.randint(self.vocabulary, shape)


SMALL = Sizes(layers=4, width=256, length=128, vocabulary=1024, rows=4, microbatches=4)
LARGE = Sizes(layers=16, width=2048, length=1024, vocabulary=32_768, rows=8, microbatches=8)
TINY = Sizes(layers=4, width=32, length=16, vocabulary=64, rows=2, microbatches=3)


class Embedding(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(sizes.vocabulary, sizes.width),
            nn.Embedding(sizes.length, sizes.width),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def decoder(sizes: Sizes, dtype: torch.dtype) -> nn.Sequential:
    """The same parameters every time; all blocks begin alike, for drawing billions of numbers takes minutes."""
    torch.manual_seed(0)
    block = Block(sizes.width)
    blocks = [copy.deepcopy(block) for _ in range(sizes.layers)]
    head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
    return nn.Sequential(Embedding(sizes), *blocks, nn.LayerNorm(sizes.width), head).to(dtype)


def loss_of(out: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1).float(), label.flatten())


class Machine:
    """The device that is measured, and what can be asked of it; a CPU stands in for it in a dry run."""

    def __init__(self, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.device = torch.device("cpu") if dry_run else torch.device(torch.accelerator.current_accelerator().type, 0)

    def pool(self) -> DevicePool:
        return DevicePool.cpu(2, 1, own_memory=True) if self.dry_run else DevicePool.accelerators([0])

    def settle(self) -> None:
        if not self.dry_run:
            torch.accelerator.synchronize()

    def total_bytes(self) -> int:
        return 1 << 30 if self.dry_run else torch.accelerator.get_memory_info(0)[1]

    def free_bytes(self) -> int:
        return 1 << 30 if self.dry_run else torch.accelerator.get_memory_info(0)[0]

    def start_peak(self) -> None:
        gc.collect()
        if not self.dry_run:
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats(0)

    def peak_bytes(self) -> int:
        return 0 if self.dry_run else torch.accelerator.max_memory_allocated(0)

    def allocated_bytes(self) -> int:
        return 0 if self.dry_run else torch.accelerator.memory_allocated(0)

    def cap(self, num_bytes: int | None) -> str:
        """Let the process have no more of the device than that; says how."""
        if self.dry_run or self.device.type != "cuda":
            return "none: only CUDA has a memory fraction"
        fraction = 1.0 if num_bytes is None else min(1.0, num_bytes / self.total_bytes())
        torch.cuda.set_per_process_memory_fraction(fraction, 0)
        return f"{fraction:.3f} of the device"


def microbatches(sizes: Sizes, data: Tensor, label: Tensor, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    parts = zip(data.tensor_split(sizes.microbatches), label.tensor_split(sizes.microbatches), strict=True)
    return [(x.to(device, non_blocking=True), y.to(device, non_blocking=True)) for x, y in parts]


# ---- throughput -----------------------------------------------------------------------------------------------------


class Masters:
    """fp32 copies of a plain model's parameters, where these are, and AdamW on them."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.copies = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.copies, lr=1e-4, fused=True)

    def step(self) -> None:
        for master, parameter in zip(self.copies, self.parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.copies)


async def timed_plain(machine: Machine, seconds: float, step: Callable[[], None]) -> float:
    async def iterate() -> None:
        step()

    async def finish() -> None:
        machine.settle()

    return await timed(seconds, iterate, finish)


async def timed(seconds: float, iterate: Callable[[], Awaitable[None]], finish: Callable[[], Awaitable[None]]) -> float:
    """Iterations per second, after two to warm up."""
    for _ in range(2):
        await iterate()
    await finish()
    start_s, count = time.perf_counter(), 0
    while time.perf_counter() - start_s < seconds or count < 2:
        await iterate()
        count += 1
    await finish()
    return count / (time.perf_counter() - start_s)


async def resident(machine: Machine, sizes: Sizes, dtype: torch.dtype, seconds: float) -> float:
    """Plain PyTorch with parameters, fp32 copies and AdamW's state on the device."""
    model = decoder(sizes, dtype).to(machine.device)
    masters = Masters(model)
    data, label = sizes.batch()

    def step() -> None:
        for x, y in microbatches(sizes, data, label, machine.device):
            for layer in model[:-1]:
                x = checkpoint(layer, x, use_reentrant=False)
            loss_of(model[-1](x), y).backward()
        masters.step()

    return await timed_plain(machine, seconds, step)


class _OnDevice(torch.autograd.Function):
    """A block whose parameters are on the device only while it runs: forward, then recompute and backward."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, moved: nn.Module, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.layer, ctx.moved = layer, moved
        ctx.save_for_backward(x)
        _fill(moved, layer)
        return moved(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        _fill(ctx.moved, ctx.layer)
        with torch.enable_grad():
            root = x.detach().requires_grad_(x.is_floating_point())
            out = ctx.moved(root)
        out.backward(gradient)
        for home, parameter in zip(ctx.layer.parameters(), ctx.moved.parameters(), strict=True):
            share = parameter.grad.to("cpu")
            home.grad = share if home.grad is None else home.grad.add_(share)
            parameter.grad = None
        return None, None, root.grad, None


def _fill(moved: nn.Module, layer: nn.Module) -> None:
    with torch.no_grad():
        for target, source in zip(moved.parameters(), layer.parameters(), strict=True):
            target.data = source.to(target.device, non_blocking=True)


async def offload(machine: Machine, sizes: Sizes, dtype: torch.dtype, seconds: float) -> float:
    """Plain PyTorch with parameters in (pinned) host memory, one block at a time on the device."""
    model = decoder(sizes, dtype)
    if not machine.dry_run:
        for parameter in model.parameters():
            parameter.data = parameter.data.pin_memory()
    shells = [copy.deepcopy(layer).to(machine.device) for layer in (model[0], model[1], model[-2], model[-1])]
    moved = [shells[0], *[shells[1]] * sizes.layers, *shells[2:]]  # one set of memory for all blocks
    masters = Masters(model)
    data, label = sizes.batch()
    anchor = torch.zeros((), requires_grad=True)

    def step() -> None:
        for x, y in microbatches(sizes, data, label, machine.device):
            for layer, shell in zip(model, moved, strict=True):
                x = _OnDevice.apply(layer, shell, x, anchor)
            loss_of(x, y).backward()
        masters.step()

    return await timed_plain(machine, seconds, step)
