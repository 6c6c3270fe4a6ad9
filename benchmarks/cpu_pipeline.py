"""Train the same decoder in several ways on two cores, taking turns, and print how fast each was.

    python benchmarks/cpu_pipeline.py                     # fp32 and bf16, 5 rounds
    python benchmarks/cpu_pipeline.py --dtypes bf16 --only plain,ours --rounds 3

Contenders, each in processes of its own so that peak memory is its own too:

    plain       plain PyTorch, 2 intra-op threads, torch.utils.checkpoint around each block; the yardstick
    threads     two Python threads with half the microbatches each (data parallel in shared memory), checkpoint as above
    ours        roundpipe_async on two CPU devices with 1 thread each, the optimizer one step behind
    ours-sync   the same with is_async=False: the numbers of plain PyTorch
    1f1b        torch.distributed.pipelining, Schedule1F1B, 2 gloo processes, checkpoint as above
    fsdp2       torch.distributed.fsdp.fully_shard with CPUOffloadPolicy, 2 gloo processes, checkpoint as above

All start from the same parameters and see the same batches; an iteration is 8 microbatches forward and backward and one
AdamW step. In bf16 all keep fp32 copies for the optimizer. A turn is a few iterations and ends when nothing is in
flight. Rounds alternate the contenders, so a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PROCESSES = {"plain": 1, "threads": 1, "ours": 1, "ours-sync": 1, "1f1b": 2, "fsdp2": 2}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The decoder and the batch."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    length: int = 256
    vocabulary: int = 16_384
    microbatches: int = 8
    rows: int = 2

    @property
    def tokens(self) -> int:
        """Tokens of an iteration."""
        return self.microbatches * self.rows * self.length


class Embedding(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.qkv, self.out = nn.Linear(sizes.width, 3 * sizes.width), nn.Linear(sizes.width, sizes.width)
        self.up, self.down = nn.Linear(sizes.width, 4 * sizes.width), nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def make_decoder(sizes: Sizes, *, checkpointed: bool) -> nn.Sequential:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Block(sizes) for _ in range(sizes.layers)]
    head = nn.Sequential(nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False))
    model = nn.Sequential(Embedding(sizes), *blocks, head)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    if checkpointed:
        model = nn.Sequential(model[0], *(Checkpointed(block) for block in blocks), head)
    return model


def make_batch(sizes: Sizes, iteration: int) -> tuple[Tensor, Tensor]:
    """Tokens that are unevenly distributed, so that there is something to learn; the target is the next token."""
    generator = torch.Generator().manual_seed(1000 + iteration)
    rows = sizes.microbatches * sizes.rows
    uniform = torch.rand(rows, sizes.length + 1, generator=generator)
    tokens = (uniform**4 * sizes.vocabulary).long()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Master:
    """AdamW over fp32 copies of a model's parameters (over the parameters themselves where they are fp32)."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.copies = [
            parameter if parameter.dtype == torch.float32 else nn.Parameter(parameter.detach().float())
            for parameter in self.parameters
        ]
        self.optimizer = torch.optim.AdamW(self.copies, lr=3e-4, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, mine in zip(self.parameters, self.copies, strict=True):
            if mine is not parameter:
                mine.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        for parameter, mine in zip(self.parameters, self.copies, strict=True):
            if mine is not parameter:
                parameter.copy_(mine)


# A contender is an async generator: it sets itself up, then trains what each `asend(iterations)` says and yields the
# last loss.
Turns = AsyncGenerator[float, range]


async def plain(sizes: Sizes, dtype: torch.dtype) -> Turns:
    torch.set_num_threads(2)
    model = make_decoder(sizes, checkpointed=True).to(dtype)
    master = Master(model)
    iterations, loss = (yield 0.0), 0.0
    while True:
        for iteration in iterations:
            loss = 0.0
            tokens, targets = make_batch(sizes, iteration)
            for x, y in zip(tokens.chunk(sizes.microbatches), targets.chunk(sizes.microbatches), strict=True):
                part = token_loss(model(x), y) / sizes.microbatches
                part.backward()
                loss += part.item()
            master.step()
        iterations = yield loss


async def threads(sizes: Sizes, dtype: torch.dtype) -> Turns:
    torch.set_num_threads(2)
    model = make_decoder(sizes, checkpointed=True).to(dtype)
    master = Master(model)
    twin = copy.deepcopy(model)
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        mine.data = theirs.data
    gate = threading.Barrier(2)

    def one_thread() -> None:
        torch.get_num_threads()
        gate.wait()
        torch.set_num_threads(1)
        gate.wait()

    def work(replica: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> float:
        losses: list[Tensor] = []
        for x, y in parts:
            loss = token_loss(replica(x), y) / sizes.microbatches
            loss.backward()
            losses.append(loss.detach())
        return float(sum(losses))

    pool = ThreadPoolExecutor(2, initializer=one_thread)
    iterations, loss = (yield 0.0), 0.0
    while True:
        for iteration in iterations:
            tokens, targets = make_batch(sizes, iteration)
            parts = list(zip(tokens.chunk(sizes.microbatches), targets.chunk(sizes.microbatches), strict=True))
            loss = sum(pool.map(work, (model, twin), (parts[::2], parts[1::2])))
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                assert mine.grad is not None and theirs.grad is not None
                mine.grad += theirs.grad
                theirs.grad = None
            master.step()
        iterations = yield loss


async def ours(sizes: Sizes, dtype: torch.dtype, *, is_async: bool) -> Turns:
    from roundpipe_async import DevicePool, OptimizerCtx, RoundPipe, RoundPipeRunConfig, optim

    torch.set_num_threads(2)
    config = RoundPipeRunConfig(num_microbatch=sizes.microbatches, loss_reduction="mean")
    pool = DevicePool.cpu(2, intra_op_threads=1)
    model = RoundPipe(
        make_decoder(sizes, checkpointed=False).to(dtype),
        optim_dtype=torch.float32,
        model_run_config=config,
        devices=pool,
    )
    with OptimizerCtx():
        optimizer = optim.AdamW(model.parameters(), lr=3e-4)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    iterations, loss = (yield 0.0), torch.zeros(())
    while True:
        for iteration in iterations:
            tokens, targets = make_batch(sizes, iteration)
            loss = await model.forward_backward((tokens,), label=targets, loss_fn=token_loss)
            await model.step(step, is_async=is_async)
        await model.synchronize()
        iterations = yield loss.item()


async def one_forward_one_backward(sizes: Sizes, dtype: torch.dtype) -> Turns:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    rank = dist.get_rank()
    layers = list(make_decoder(sizes, checkpointed=True))
    cut = 1 + round(sizes.layers * 5 / 8)  # the head and the loss weigh about as much as two recomputed blocks
    module = nn.Sequential(*(layers[:cut] if rank == 0 else layers[cut:])).to(dtype)
    master = Master(module)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, sizes.microbatches, loss_fn=token_loss)
    iterations, loss = (yield 0.0), 0.0
    while True:
        for iteration in iterations:
            tokens, targets = make_batch(sizes, iteration)
            losses: list[Tensor] = []
            if rank == 0:
                schedule.step(tokens)
            else:
                schedule.step(target=targets, losses=losses)
            master.step()
            loss = sum(part.item() for part in losses) / sizes.microbatches
        dist.barrier()
        iterations = yield loss


async def fsdp2(sizes: Sizes, dtype: torch.dtype) -> Turns:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))
    model = make_decoder(sizes, checkpointed=True)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    shard = functools.partial(
        fully_shard, mesh=mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False)
    )
    for layer in model:
        shard(layer)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    iterations, loss = (yield 0.0), 0.0
    while True:
        for iteration in iterations:
            tokens, targets = make_batch(sizes, iteration)
            loss = 0.0
            mine = slice(dist.get_rank(), None, 2)
            parts = zip(tokens.chunk(sizes.microbatches)[mine], targets.chunk(sizes.microbatches)[mine], strict=True)
            for index, (x, y) in enumerate(parts):
                model.set_requires_gradient_sync(index == sizes.microbatches // 2 - 1)
                part = token_loss(model(x), y) / (sizes.microbatches // 2)  # fully_shard averages over the ranks
                part.backward()
                loss += part.item()
            optimizer.step()
            optimizer.zero_grad()
        total = torch.tensor(loss)
        dist.all_reduce(total)
        iterations = yield total.item() / 2


CONTENDERS: dict[str, Callable[[Sizes, torch.dtype], Turns]] = {
    "plain": plain,
    "threads": threads,
    "ours": functools.partial(ours, is_async=True),
    "ours-sync": functools.partial(ours, is_async=False),
    "1f1b": one_forward_one_backward,
    "fsdp2": fsdp2,
}


async def work(name: str, rank: int, meeting: str, dtype: torch.dtype, sizes: Sizes) -> None:
    """A contender's process: one line `first last` in, one JSON line out for each turn, until the input ends."""
    if PROCESSES[name] > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=PROCESSES[name])
    contender = CONTENDERS[name](sizes, dtype)
    await anext(contender)
    print(json.dumps({"ready": True}), flush=True)
    while line := sys.stdin.readline():
        first, last = map(int, line.split())
        start_s = time.perf_counter()
        loss = await contender.asend(range(first, last))
        turn_s = time.perf_counter() - start_s
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"turn_s": turn_s, "loss": loss, "peak_bytes": peak_bytes}), flush=True)
    await contender.aclose()
    if dist.is_initialized():
        dist.destroy_process_group()


class Contender:
    """The driver's side of a contender: its processes and what they measured."""

    def __init__(self, name: str, arguments: list[str], meeting: str) -> None:
        self.name = name
        self.turns_s: list[float] = []
        self.loss = 0.0
        self.peak_bytes = 0
        ranks = range(PROCESSES[name])
        environment = {"GLOO_SOCKET_IFNAME": "lo"} | os.environ
        command = [sys.executable, __file__, *arguments, "--meeting", meeting, "--worker", name, "--rank"]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            for rank in ranks
        ]
        self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        lines = [process.stdout.readline() for process in self.processes if process.stdout]
        if not all(lines):
            raise SystemExit(f"{self.name} ended early; its error is above")
        return [json.loads(line) for line in lines]

    def turn(self, first: int, last: int, *, measured: bool) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{first} {last}\n")
            process.stdin.flush()
        answers = self._answers()
        if measured:
            self.turns_s.append(max(answer["turn_s"] for answer in answers))
        self.loss = answers[-1]["loss"]
        self.peak_bytes = sum(answer["peak_bytes"] for answer in answers)

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait(60)


def compare(dtype: str, names: list[str], options: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """All rounds of one dtype; prints the table and returns its figures."""
    arguments = ["--dtypes", dtype, "--layers", str(options.layers), "--width", str(options.width)]
    with tempfile.TemporaryDirectory() as folder:
        contenders = [Contender(name, arguments, os.path.join(folder, name)) for name in names]
        turn = options.iterations
        for round_index in range(options.rounds + 1):  # the first round warms up
            for contender in contenders:
                first = round_index * turn
                contender.turn(first, first + turn, measured=round_index > 0)
            print(f"{dtype} round {round_index}/{options.rounds}", file=sys.stderr)
        for contender in contenders:
            contender.close()
    yardstick = contenders[0].turns_s
    figures: dict[str, Any] = {}
    print(f"\n{dtype}: {sizes}\n{options.rounds} rounds of {turn} iterations, {sizes.tokens} tokens each")
    print(f"{'':10}{'tokens/s':>10}{'(min-max)':>14}{'x ' + names[0]:>10}{'peak MB':>10}{'loss':>10}")
    for contender in contenders:
        rates = [turn * sizes.tokens / turn_s for turn_s in contender.turns_s]
        ratio = statistics.median(base / mine for base, mine in zip(yardstick, contender.turns_s, strict=True))
        row = {
            "tokens_per_s": statistics.median(rates),
            "ratio": ratio,
            "peak_bytes": contender.peak_bytes,
            "loss": contender.loss,
        }
        figures[contender.name] = row
        spread = f"{min(rates):.0f}-{max(rates):.0f}"
        print(
            f"{contender.name:10}{row['tokens_per_s']:10.0f}{spread:>14}{ratio:10.2f}"
            f"{contender.peak_bytes / 2**20:10.0f}{contender.loss:10.4f}"
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="fp32,bf16", help="comma-separated, of fp32, bf16 and fp16")
    parser.add_argument("--only", default=",".join(CONTENDERS), help="comma-separated; the first is the yardstick")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=2, help="iterations in a turn")
    parser.add_argument("--layers", type=int, default=Sizes().layers)
    parser.add_argument("--width", type=int, default=Sizes().width)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = Sizes(layers=options.layers, width=options.width)
    if options.worker:
        asyncio.run(work(options.worker, options.rank, options.meeting, DTYPES[options.dtypes], sizes))
        return
    figures = {dtype: compare(dtype, options.only.split(","), options, sizes) for dtype in options.dtypes.split(",")}
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
