"""A service that trains a small language model and serves it meanwhile, in one process and one event loop.

    pip install -e '.[service]'
    python examples/service/app.py

    python -c "import json; print(json.dumps({'text': open('README.md').read(), 'steps': 300}))" > job.json
    curl -X POST localhost:8000/jobs -H 'content-type: application/json' -d @job.json
    curl -N localhost:8000/jobs/1/events                       # progress, as server-sent events
    curl -X POST localhost:8000/generate -H 'content-type: application/json' -d '{"prompt": "The ", "length": 80}'
    curl localhost:8000/metrics
    curl -X DELETE localhost:8000/jobs/1                       # cancel: what was learned so far stays

There is one model, so there is one job at a time: a second one is answered with 409. A job that fails is reported, and
the model is put back to where the job began. Ctrl-C cancels a running job and saves model, optimizer and scaler to
service_state.pt, from which the next start goes on.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from torch import Tensor, nn

import roundpipe_async
from roundpipe_async import DevicePool, GradScaler, OptimizerCtx, RoundPipe, RoundPipeRunConfig, optim, prefetch
from roundpipe_async.checkpoint import load_snapshot, snapshot


@dataclass(frozen=True)
class Settings:
    layers: int = 4
    width: int = 128
    context: int = 64
    state_path: Path = Path("service_state.pt")


# --- the model: predicts the next byte -------------------------------------------------------------------------------


class Embedding(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, settings.width)
        self.positions = nn.Embedding(settings.context, settings.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def make_model(settings: Settings) -> nn.Sequential:
    blocks = [Block(settings.width) for _ in range(settings.layers)]
    model = nn.Sequential(Embedding(settings), *blocks, nn.LayerNorm(settings.width), nn.Linear(settings.width, 256))
    return model.to(torch.float16)


# --- what clients send -----------------------------------------------------------------------------------------------


class JobRequest(BaseModel, extra="forbid"):
    text: Annotated[str, Field(max_length=10_000_000)]
    steps: Annotated[int, Field(gt=0, le=1_000_000)] = 100
    batch_size: Annotated[int, Field(gt=0, le=1024)] = 16
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3


class GenerateRequest(BaseModel, extra="forbid"):
    prompt: Annotated[str, Field(min_length=1, max_length=10_000)]
    length: Annotated[int, Field(gt=0, le=1000)] = 100


# --- training --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    id: int
    request: JobRequest
    status: Literal["running", "finished", "cancelled", "failed"] = "running"
    step: int = 0
    loss: float | None = None
    error: str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def update(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        self.changed.set()
        self.changed = asyncio.Event()

    def report(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("id", "status", "step", "loss", "error")} | {
            "steps": self.request.steps
        }

    async def watch(self) -> AsyncIterator[dict[str, Any]]:
        """The state now and after each change, until the job is over; who is slow misses steps, and delays nobody."""
        while True:
            changed = self.changed
            yield self.report()
            if self.status != "running":
                return
            await changed.wait()


class Trainer:
    """The model, and the job that trains it."""

    def __init__(self, settings: Settings, pool: DevicePool) -> None:
        self.settings = settings
        self.model = RoundPipe(
            make_model(settings),
            optim_dtype=torch.float32,
            model_run_config=RoundPipeRunConfig(loss_reduction="mean"),
            devices=pool,
        )
        with OptimizerCtx():
            self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = GradScaler(max_consecutive_skips=20)
        self.jobs: dict[int, Job] = {}
        self.task: asyncio.Task[None] | None = None

    def running(self) -> Job | None:
        return next((job for job in self.jobs.values() if job.status == "running"), None)

    def start(self, request: JobRequest) -> Job:
        job = self.jobs[len(self.jobs) + 1] = Job(len(self.jobs) + 1, request)
        self.task = asyncio.create_task(self._run(job))
        return job

    async def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])

    async def _run(self, job: Job) -> None:
        before = None
        try:
            before = await snapshot(self.model, self.optimizer, self.scaler)
            await self._train(job)
            await self.model.synchronize()
            await self.scaler.synchronize()
        except asyncio.CancelledError:
            job.update(status="cancelled")
        except Exception as error:
            with suppress(Exception):  # what it still had in flight is as wrong
                await self.model.synchronize()
            if before is not None:
                await load_snapshot(before, self.model, self.optimizer, self.scaler)
            job.update(status="failed", error=f"{type(error).__name__}: {error}")
        else:
            job.update(status="finished")

    async def _train(self, job: Job) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = job.request.learning_rate
        async with prefetch(self._batches(job.request)) as batches:
            async for windows in batches:
                scaled_loss = await self.model.forward_backward(
                    (windows[:, :-1],),
                    label=windows[:, 1:],
                    loss_fn=lambda logits, targets: self.scaler.scale(
                        F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
                    ),
                )
                job.update(step=job.step + 1, loss=round(scaled_loss.item() / self.scaler.get_scale(), 4))
                # Both take their place in this very line; awaited together, no cancellation comes between them.
                await asyncio.gather(self.model.step(self._optimizer_step), self.scaler.update())

    def _optimizer_step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.optim_parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()

    def _batches(self, request: JobRequest) -> Iterator[Tensor]:
        windows = torch.tensor(list(request.text.encode())).unfold(0, self.settings.context + 1, 1)
        generator = torch.Generator().manual_seed(0)
        for _ in range(request.steps):
            yield windows[torch.randint(len(windows), (request.batch_size,), generator=generator)]

    async def generate(self, prompt: str, length: int) -> str:
        """May run while a job does: each byte comes from the parameters of one step, never of two."""
        tokens = list(prompt.encode())
        with roundpipe_async.no_grad():
            for _ in range(length):
                logits = await self.model(torch.tensor([tokens[-self.settings.context :]]))
                tokens.append(int(logits[0, -1].argmax()))
        return bytes(tokens).decode(errors="replace")

    async def save(self) -> None:
        state = await snapshot(self.model, self.optimizer, self.scaler)
        path = self.settings.state_path

        def write() -> None:  # beside the old file first: whatever happens, one of them is whole
            torch.save(state, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)

        await asyncio.to_thread(write)

    async def load(self) -> None:
        if self.settings.state_path.exists():
            state = await asyncio.to_thread(torch.load, self.settings.state_path)
            await load_snapshot(state, self.model, self.optimizer, self.scaler)


# --- the service -----------------------------------------------------------------------------------------------------


def create_app(settings: Settings | None = None, pool: DevicePool | None = None) -> FastAPI:
    """The application; with a `pool` of yours its devices are used, and left open."""
    settings = settings or Settings()
    counts = {"streams": 0, "generated": 0}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        trainer = app.state.trainer = Trainer(settings, pool or DevicePool.default())
        async with trainer.model:
            await trainer.load()
            yield
            await trainer.cancel()
            await trainer.save()

    app = FastAPI(title="roundpipe_async: train and serve", lifespan=lifespan)

    def trainer() -> Trainer:
        assert isinstance(app.state.trainer, Trainer)
        return app.state.trainer

    def job_of(job_id: int) -> Job:
        job = trainer().jobs.get(job_id)
        if job is None:
            raise HTTPException(404, f"there is no job {job_id}")
        return job

    @app.post("/jobs", status_code=201)
    async def start_job(request: JobRequest) -> dict[str, Any]:
        needed, given = settings.context + 1, len(request.text.encode())
        if given < needed:
            raise HTTPException(422, f"text has {given} bytes, and a training window {needed}")
        if (running := trainer().running()) is not None:
            raise HTTPException(409, f"job {running.id} is running: wait for it, or DELETE /jobs/{running.id}")
        return trainer().start(request).report()

    @app.get("/jobs/{job_id}")
    async def show_job(job_id: int) -> dict[str, Any]:
        return job_of(job_id).report()

    @app.delete("/jobs/{job_id}")
    async def cancel_job(job_id: int) -> dict[str, Any]:
        job = job_of(job_id)
        if job.status == "running":
            await trainer().cancel()
        return job.report()

    @app.get("/jobs/{job_id}/events")
    async def stream_job(job_id: int) -> StreamingResponse:
        job = job_of(job_id)

        async def events() -> AsyncIterator[str]:
            counts["streams"] += 1
            try:
                async for report in job.watch():
                    yield f"data: {json.dumps(report)}\n\n"
            finally:  # also when the client is gone
                counts["streams"] -= 1

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    @app.post("/generate")
    async def generate(request: GenerateRequest) -> dict[str, Any]:
        text = await trainer().generate(request.prompt, request.length)
        counts["generated"] += 1
        return {"text": text, "param_version": trainer().model.param_version}

    @app.get("/metrics")
    async def metrics() -> dict[str, Any]:
        running, jobs = trainer().running(), trainer().jobs.values()
        return {
            **counts,
            "running": None if running is None else running.report(),
            "jobs": {status: sum(job.status == status for job in jobs) for status in {job.status for job in jobs}},
            "param_version": trainer().model.param_version,
            "loss_scale": trainer().scaler.get_scale(),
            "skipped_steps": trainer().scaler.skipped_steps,
        }

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "training": trainer().running() is not None}

    return app


if __name__ == "__main__":
    # Streams end when their job does; at shutdown they are given this long, then the job is cancelled and all is saved.
    uvicorn.run(create_app(), timeout_graceful_shutdown=2)
