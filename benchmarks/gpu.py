"""What only an accelerator shows, in one command of under four minutes and without downloads.

    python benchmarks/gpu.py --json gpu.json     # one accelerator
    python benchmarks/gpu.py --dry-run           # the same code on CPU devices with tiny sizes: no figure of it counts

1. correctness: a decoder trained by the engine and by plain PyTorch on the device, the same microbatches: fp32, bf16,
   fp16 with a loss scaler. The figure is the distance between the two results, relative to the way that training went.
2. throughput: tokens/s and peak memory of a decoder whose training state is larger than the share of the device that
   the capped contenders may use. `resident`: plain PyTorch, all on the device, no cap. `offload`: plain PyTorch,
   parameters on the host, each block copied to the device for its forward and its backward, optimizer on the host;
   capped. `ours` and `ours-sync`: the engine, capped, the optimizer one step behind or not. Checkpoints in all.
3. overlap: shares of a traced iteration in which the device computes, copies, and does both.
4. loop: how late a coroutine wakes that asks for it every 10 ms, while `ours` trains; and an event's way to the loop.
5. recovery: after out-of-memory the device's memory is back and the next call works; after Ctrl-C in the middle of
   training the process has ended within seconds, by the signal, and its memory is back.

The device gets work in turns of seconds, so nothing of it is worth more than its second digit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from gpu_contenders import LARGE, SMALL, TINY, Machine, Sizes, decoder, loss_of, microbatches, offload, resident, timed
from torch import Tensor, nn

from roundpipe_async import GradScaler, OptimizerCtx, RoundPipe, RoundPipeRunConfig, optim, trace

Row = dict[str, Any]


# ---- correctness ----------------------------------------------------------------------------------------------------


async def train_ours(machine: Machine, sizes: Sizes, dtype: torch.dtype, batches: list[Any], scaled: bool) -> Any:
    module = decoder(sizes, dtype)
    async with machine.pool() as pool, RoundPipe(module, optim_dtype=torch.float32, devices=pool) as model:
        with OptimizerCtx():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler(init_scale=1024.0, enabled=scaled)
        for data, label in batches:
            await model.forward_backward(
                (data,), label=label, loss_fn=lambda out, lab: scaler.scale(loss_of(out, lab) / sizes.microbatches),
                run_config=RoundPipeRunConfig(num_microbatch=sizes.microbatches),
            )  # fmt: skip
            await model.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()), is_async=False)
            if scaled:
                await scaler.update(is_async=False)
        return [copy.detach().clone() for copy in model.optim_parameters()]


def train_plain(machine: Machine, sizes: Sizes, dtype: torch.dtype, batches: list[Any], scaled: bool) -> Any:
    model = decoder(sizes, dtype).to(machine.device)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    scaler = torch.amp.GradScaler(machine.device.type, init_scale=1024.0, enabled=scaled)
    for data, label in batches:
        for x, y in microbatches(sizes, data, label, machine.device):
            scaler.scale(loss_of(model(x), y) / sizes.microbatches).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    return [master.detach().cpu() for master in masters]


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    return sum(float((a.double() - b.double()).square().sum()) for a, b in zip(one, other, strict=True)) ** 0.5


async def correctness(machine: Machine, sizes: Sizes) -> list[Row]:
    batches = [sizes.batch() for _ in range(8)]
    rows = []
    for name, dtype, scaled in (
        ("fp32", torch.float32, False), ("bf16", torch.bfloat16, False), ("fp16+scaler", torch.float16, True),
    ):  # fmt: skip
        ours = await train_ours(machine, sizes, dtype, batches, scaled)
        plain = await asyncio.to_thread(train_plain, machine, sizes, dtype, batches, scaled)
        start = [p.detach().float() for p in decoder(sizes, dtype).parameters()]
        off = distance(ours, plain) / distance(plain, start)
        rows.append({"what": f"correctness {name}", "difference": off, "ok": off < (1e-3 if name == "fp32" else 0.1)})
    return rows


# ---- throughput ----------------------------------------------------------------------------------------------------


class Ours:
    """The engine, training; what `throughput`, `overlap` and `loop` look at."""

    def __init__(self, sizes: Sizes, model: RoundPipe, is_async: bool) -> None:
        self.sizes, self.model, self.is_async = sizes, model, is_async
        with OptimizerCtx():
            self.optimizer = optim.AdamW(model.parameters(), lr=1e-4)
        self.data, self.label = sizes.batch()
        self.config = RoundPipeRunConfig(num_microbatch=sizes.microbatches)

    async def iterate(self) -> None:
        await self.model.forward_backward((self.data,), label=self.label, loss_fn=loss_of, run_config=self.config)
        await self.model.step(lambda: (self.optimizer.step(), self.optimizer.zero_grad()), self.is_async)

    async def finish(self) -> None:
        await self.model.synchronize()


async def ours(machine: Machine, sizes: Sizes, dtype: torch.dtype, seconds: float, is_async: bool) -> Row:
    async with machine.pool() as pool:
        module = decoder(sizes, dtype)
        async with RoundPipe(module, optim_dtype=torch.float32, devices=pool) as model:
            run = Ours(sizes, model, is_async)
            row: Row = {"iterations_per_s": await timed(seconds, run.iterate, run.finish)}
            if is_async:
                row |= await overlap(run)
                row |= await loop_lag(run, seconds)
            return row | {"statistics": pool.statistics()}


async def overlap(run: Ours) -> Row:
    """Shares of one traced iteration."""
    with trace() as traced:
        await run.iterate()
        await run.finish()
    spans: dict[str, list[tuple[float, float]]] = {"compute": [], "copy": []}
    for record in traced.records:
        if record.device != "host":
            spans["compute" if record.stream.endswith("/compute") else "copy"].append((record.start_s, record.end_s))
    if not spans["compute"]:
        return {}
    begin, end = min(start for start, _ in spans["compute"]), max(stop for _, stop in spans["compute"])
    busy = {name: _union(times) for name, times in spans.items()}
    computing, copying = _length(busy["compute"]), _length(busy["copy"])
    both = computing + copying - _length(_union(busy["compute"] + busy["copy"]))
    return {"computing": computing / (end - begin), "copying": copying / (end - begin),
            "copies_hidden": both / copying if copying else 1.0}  # fmt: skip


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in spans)


async def loop_lag(run: Ours, seconds: float) -> Row:
    late_s: list[float] = []

    async def heartbeat() -> None:
        while True:
            due_s = time.perf_counter() + 0.01
            await asyncio.sleep(0.01)
            late_s.append(time.perf_counter() - due_s)

    beating = asyncio.ensure_future(heartbeat())
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < seconds or len(late_s) < 20:
        await run.iterate()
    await run.finish()
    beating.cancel()
    stream = run.model.device_pool.devices[0].compute
    start_s = time.perf_counter()
    for _ in range(200):
        await stream.submit(_nothing)
    event_us = (time.perf_counter() - start_s) / 200 * 1e6
    late_ms = statistics.quantiles(late_s, n=100)[98] * 1e3
    return {"loop_late_p99_ms": late_ms, "empty_action_to_loop_us": event_us}


def _nothing() -> None:
    pass


async def throughput(machine: Machine, sizes: Sizes, seconds: float, cap_share: float) -> list[Row]:
    dtype = torch.bfloat16
    with torch.device("meta"):
        elements = sum(p.numel() for p in decoder(sizes, dtype).parameters())
    state_bytes = elements * (2 + 2 + 4 + 8)  # parameter, gradient, copy, two moments
    cap_bytes = int(state_bytes * cap_share)
    rows = []
    for name in ("resident", "offload", "ours-sync", "ours"):
        how = machine.cap(None if name == "resident" else cap_bytes)
        machine.start_peak()
        row: Row = {"what": name, "cap": how, "state_gb": state_bytes / 1e9}
        try:
            if name.startswith("ours"):
                row |= await ours(machine, sizes, dtype, seconds, is_async=name == "ours")
            else:
                contender = resident if name == "resident" else offload
                row["iterations_per_s"] = await contender(machine, sizes, dtype, seconds)
            row["tokens_per_s"] = sizes.tokens * row["iterations_per_s"]
        except torch.OutOfMemoryError as error:
            row["error"] = str(error).splitlines()[0]
        row["peak_gb"] = machine.peak_bytes() / 1e9
        rows.append(row)
    machine.cap(None)
    return rows


# ---- recovery -------------------------------------------------------------------------------------------------------


class Greedy(nn.Linear):
    """Asks for a petabyte once."""

    full = True

    def forward(self, x: Tensor) -> Tensor:
        if self.full:
            if x.device.type == "cpu":
                raise torch.OutOfMemoryError("a dry run has no device to fill")
            torch.empty(1 << 50, dtype=torch.uint8, device=x.device)
        return super().forward(x)


async def out_of_memory(machine: Machine) -> Row:
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)), Greedy(256, 256), nn.Linear(256, 256))
    async with machine.pool() as pool, RoundPipe(module, devices=pool) as model:
        before = machine.allocated_bytes()
        raised, kept = False, -1
        try:
            await model.forward_backward((torch.randn(64, 256),), loss_fn=lambda out, _: out.sum())
        except torch.OutOfMemoryError:
            raised = True
            await asyncio.sleep(0.1)
            kept = machine.allocated_bytes() - before
        Greedy.full = False
        await model.forward_backward((torch.randn(64, 256),), loss_fn=lambda out, _: out.sum())
    return {"what": "out of memory", "kept_bytes": kept, "ok": raised and kept <= 0}


def interrupted(machine: Machine) -> Row:
    """Ctrl-C in the middle of another process's training."""
    free = machine.free_bytes()
    command = [sys.executable, os.path.abspath(__file__), "--train-forever", *(["--dry-run"] * machine.dry_run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it trains
        start_s = time.perf_counter()
        child.send_signal(signal.SIGINT)
        try:
            code = child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        took_s = time.perf_counter() - start_s
    time.sleep(0.5)
    kept = free - machine.free_bytes()
    ok = code in (0, 130, -signal.SIGINT) and took_s < 10 and kept < 64 << 20
    return {"what": "Ctrl-C", "exit_code": code, "seconds": took_s, "kept_bytes": kept, "ok": ok}


async def train_forever(machine: Machine) -> None:
    sizes = TINY if machine.dry_run else SMALL
    async with machine.pool() as pool, RoundPipe(decoder(sizes, torch.float32), devices=pool) as model:
        run = Ours(sizes, model, is_async=True)
        await run.iterate()
        print("training", flush=True)
        while True:
            await run.iterate()


# ---- the table ------------------------------------------------------------------------------------------------------


def show(rows: list[Row]) -> None:
    for row in rows:
        cells = [
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in row.items()
            if name not in ("what", "statistics")
        ]
        print(f"{row['what']:<24} {', '.join(cells)}")


async def measure(options: argparse.Namespace, machine: Machine) -> list[Row]:
    small, large = (TINY, TINY) if machine.dry_run else (SMALL, LARGE)
    rows = await correctness(machine, small)
    rows += await throughput(machine, large, options.seconds, options.cap)
    return [*rows, await out_of_memory(machine), await asyncio.to_thread(interrupted, machine)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on CPU devices, with tiny sizes")
    parser.add_argument("--seconds", type=float, default=None, help="a contender's turn (default 15; dry run 0.2)")
    parser.add_argument("--cap", type=float, default=0.5, help="capped contenders' share of the training state's size")
    parser.add_argument("--json", help="file to write everything to")
    parser.add_argument("--train-forever", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.seconds = options.seconds or (0.2 if options.dry_run else 15.0)
    if not options.dry_run and not torch.accelerator.is_available():
        parser.error("torch reports no accelerator here: --dry-run runs this file on CPU devices")
    machine = Machine(options.dry_run)
    if options.train_forever:
        asyncio.run(train_forever(machine))
    start_s = time.perf_counter()
    rows = asyncio.run(measure(options, machine))
    took_s = time.perf_counter() - start_s
    show(rows)
    name = "dry run: no figure above counts" if machine.dry_run else torch.get_device_module().get_device_name(0)
    print(f"{name}, torch {torch.__version__}, {took_s:.0f} s")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"device": name, "torch": torch.__version__, "seconds": took_s, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
