"""The example service, as its clients see it: a real server on the loopback, and httpx."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from roundpipe_async import DevicePool

pytest.importorskip("fastapi", reason="the service needs the extra service")
httpx = pytest.importorskip("httpx", reason="the service needs the extra service")
uvicorn = pytest.importorskip("uvicorn", reason="the service needs the extra service")

TEXT = "the quick brown fox jumps over the lazy dog. " * 20
FOREVER = {"text": TEXT, "steps": 1_000_000}


@pytest.fixture(scope="module")
def service() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "examples" / "service" / "app.py"
    spec = importlib.util.spec_from_file_location("service_app", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["service_app"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def state_path(tmp_path: Path) -> Path:
    return tmp_path / "state.pt"


@asynccontextmanager
async def running(service: ModuleType, state_path: Path) -> AsyncIterator[Any]:
    """A client of a server of its own; leaving shuts the server down as Ctrl-C does."""
    torch.manual_seed(0)
    listener = socket.create_server(("127.0.0.1", 0))  # who connects before the server accepts waits in its queue
    port = listener.getsockname()[1]
    async with DevicePool.cpu(2, intra_op_threads=1) as pool:
        app = service.create_app(service.Settings(layers=2, width=32, context=16, state_path=state_path), pool)
        config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                client.app = app
                yield client
                server.should_exit = True
                await asyncio.shield(serving)
        finally:
            server.should_exit = True
            await serving


@pytest.fixture
async def client(service: ModuleType, state_path: Path) -> AsyncIterator[Any]:
    async with running(service, state_path) as client:
        yield client


async def start(client: Any, **request: Any) -> int:
    response = await client.post("/jobs", json={"text": TEXT, **request})
    assert response.status_code == 201, response.text
    return int(response.json()["id"])


async def events(client: Any, job: int) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("GET", f"/jobs/{job}/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


async def at_step(client: Any, job: int, step: int) -> dict[str, Any]:
    """The first report of the job at `step` or later."""
    stream = events(client, job)
    try:
        async for report in stream:
            if report["step"] >= step:
                return report
    finally:
        await stream.aclose()
    raise AssertionError(f"job {job} ended before step {step}")


async def test_a_job_trains_and_its_progress_is_streamed(client: Any) -> None:
    job = await start(client, steps=30, learning_rate=0.01)
    reports = [report async for report in events(client, job)]
    assert reports[-1] == (await client.get(f"/jobs/{job}")).json()
    assert reports[-1]["status"] == "finished" and reports[-1]["step"] == 30 and reports[-1]["error"] is None
    steps = [report["step"] for report in reports]
    assert steps == sorted(steps)
    losses = [report["loss"] for report in reports if report["loss"] is not None]
    assert losses[-1] < losses[0] - 1.0
    metrics = (await client.get("/metrics")).json()
    assert metrics["jobs"] == {"finished": 1} and metrics["running"] is None and metrics["param_version"] == 30
    answer = (await client.post("/generate", json={"prompt": "the ", "length": 3})).json()
    assert len(answer["text"].encode(errors="replace")) >= 7


async def test_health_and_inference_while_training(client: Any) -> None:
    """The p99 of the health endpoint, client included, and bytes generated meanwhile."""
    job = await start(client, **FOREVER)
    await at_step(client, job, 2)
    generated = asyncio.create_task(client.post("/generate", json={"prompt": "the ", "length": 10}))
    waits_s = []
    for _ in range(200):
        begin_s = time.perf_counter()
        response = await client.get("/health")
        waits_s.append(time.perf_counter() - begin_s)
        assert response.json() == {"status": "ok", "training": True}
    assert statistics.quantiles(waits_s, n=100)[98] < 0.25
    assert (await generated).status_code == 200
    assert (await client.delete(f"/jobs/{job}")).json()["status"] == "cancelled"


async def test_cancel_in_the_middle_of_a_step(client: Any) -> None:
    """What was learned stays, and the next job works; cancelling twice is no error."""
    job = await start(client, **FOREVER)
    await at_step(client, job, 3)
    report = (await client.delete(f"/jobs/{job}")).json()
    assert report["status"] == "cancelled" and report["step"] >= 3
    assert (await client.delete(f"/jobs/{job}")).json() == report
    assert (await client.get("/health")).json() == {"status": "ok", "training": False}
    again = await start(client, steps=2)
    assert [report async for report in events(client, again)][-1]["status"] == "finished"


async def test_a_client_that_disconnects_leaves_the_job_alone(client: Any) -> None:
    job = await start(client, **FOREVER)
    report = await at_step(client, job, 2)  # reads some events, then closes the connection
    await at_step(client, job, report["step"] + 2)
    while (await client.get("/metrics")).json()["streams"]:
        pass  # each request gives the server a turn in which to notice
    assert (await client.get(f"/jobs/{job}")).json()["status"] == "running"
    await client.delete(f"/jobs/{job}")


async def test_of_two_jobs_at_once_one_is_refused(client: Any) -> None:
    first, second = await asyncio.gather(client.post("/jobs", json=FOREVER), client.post("/jobs", json=FOREVER))
    assert sorted([first.status_code, second.status_code]) == [201, 409]
    refused = first if first.status_code == 409 else second
    assert refused.json()["detail"] == "job 1 is running: wait for it, or DELETE /jobs/1"
    await client.delete("/jobs/1")
    assert await start(client, steps=1) == 2


@pytest.mark.filterwarnings("ignore:the loss scale fell below 1")
async def test_a_job_that_fails_is_reported_and_undone(client: Any) -> None:
    """A learning rate that makes everything NaN: the model is put back to where it was before the job."""
    before = (await client.post("/generate", json={"prompt": "the ", "length": 10})).json()["text"]
    job = await start(client, steps=1000, learning_rate=1e30)
    last = [report async for report in events(client, job)][-1]
    assert last["status"] == "failed"
    assert last["error"].startswith("SkippedStepsError: ")
    assert (await client.post("/generate", json={"prompt": "the ", "length": 10})).json()["text"] == before
    again = await start(client, steps=5)
    last = [report async for report in events(client, again)][-1]
    assert last["status"] == "finished" and last["loss"] < 7


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("POST", "/jobs", {"text": "short"}, 422, "text has 5 bytes, and a training window 17"),
        ("POST", "/jobs", {"text": TEXT, "steps": 0}, 422, "greater than 0"),
        ("POST", "/jobs", {"text": TEXT, "learning_rate": -1}, 422, "greater than 0"),
        ("POST", "/jobs", {"text": TEXT, "batch_size": "many"}, 422, "valid integer"),
        ("POST", "/jobs", {"text": TEXT, "lr": 0.1}, 422, "Extra inputs are not permitted"),
        ("POST", "/jobs", {}, 422, "Field required"),
        ("POST", "/generate", {"prompt": ""}, 422, "at least 1 character"),
        ("POST", "/generate", {"prompt": "a", "length": 10**9}, 422, "less than or equal to 1000"),
        ("GET", "/jobs/7", None, 404, "there is no job 7"),
        ("GET", "/jobs/7/events", None, 404, "there is no job 7"),
        ("DELETE", "/jobs/7", None, 404, "there is no job 7"),
        ("GET", "/jobs/first", None, 422, "valid integer"),
        ("PUT", "/jobs", None, 405, "Method Not Allowed"),
    ],
)
async def test_bad_requests(client: Any, method: str, path: str, body: Any, status: int, said: str) -> None:
    response = await client.request(method, path, json=body)
    assert response.status_code == status
    assert said in response.text


async def test_shutdown_with_a_job_running_keeps_the_state(service: ModuleType, state_path: Path) -> None:
    """Also with a client that still listens: the job ends as cancelled, and the next start goes on from its state."""
    async with running(service, state_path) as client:
        job = await start(client, **{**FOREVER, "learning_rate": 0.01})
        stream = events(client, job)
        async for report in stream:
            if report["step"] >= 20:
                break
        trainer = client.app.state.trainer
    await stream.aclose()
    assert trainer.jobs[job].status == "cancelled"
    learned = {name: value.clone() for name, value in trainer.model.state_dict().items()}

    async with running(service, state_path) as client:
        await client.get("/health")
        trainer = client.app.state.trainer
        assert all(torch.equal(value, learned[name]) for name, value in trainer.model.state_dict().items())
        steps = {int(state["step"]) for state in trainer.optimizer.state.values()}
        assert len(steps) == 1 and steps.pop() >= 18  # the scaler may have skipped a few
        job = await start(client, steps=3, learning_rate=0.01)
        last = [report async for report in events(client, job)][-1]
        assert last["loss"] < 4, "training goes on where it was"
