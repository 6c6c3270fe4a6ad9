"""The example notebook in a real kernel: top-level await, and interruption in the middle of training (case D10)."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="the notebook needs the extra notebook")
nbclient = pytest.importorskip("nbclient", reason="the notebook needs the extra notebook")
pytest.importorskip("ipykernel", reason="the notebook needs the extra notebook")
pytest.importorskip("matplotlib", reason="the notebook needs the extra examples")
pytest.importorskip("tqdm", reason="the notebook needs the extra examples")

# Of the notebook machinery, not ours:
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "examples" / "notebook.ipynb"


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The notebook; its kernel is this Python, and finds the package whether it is installed or not."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return nbformat.read(PATH, as_version=4)


@asynccontextmanager
async def kernel(notebook: Any) -> AsyncIterator[Any]:
    client = nbclient.NotebookClient(notebook, timeout=100)
    client.create_kernel_manager().kernel_cmd = [
        sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"
    ]  # fmt: skip
    async with client.async_setup_kernel():
        yield client


async def execute(client: Any, source: str) -> str:
    """Run a cell as if it stood at the end of the notebook; what it printed."""
    cell = nbformat.v4.new_code_cell(source)
    client.nb.cells.append(cell)
    await client.async_execute_cell(cell, len(client.nb.cells) - 1)
    return printed(cell)


def printed(cell: Any, stream: str = "stdout") -> str:
    return "".join(output.text for output in cell.outputs if output.get("name") == stream)


def test_it_is_stored_without_outputs() -> None:
    cells = nbformat.read(PATH, as_version=4).cells
    assert not [cell.id for cell in cells if cell.get("outputs") or cell.get("execution_count")]


async def test_it_runs_from_top_to_bottom(notebook: Any) -> None:
    async with kernel(notebook) as client:
        for index, cell in enumerate(list(notebook.cells)):
            await client.async_execute_cell(cell, index)
    cells = {cell.id: cell for cell in notebook.cells}
    assert "100/100" in printed(cells["train"], "stderr"), "the progress bar"
    assert printed(cells["evaluate"]).startswith("100 steps, loss ")
    assert any("image/png" in output.get("data", {}) for output in cells["timeline"].outputs)
    assert not printed(cells["end"], "stderr")


async def test_interrupted_training_goes_on_in_the_next_cell(notebook: Any) -> None:
    """D10: build in one cell, train in the next, interrupt it in the middle, train again; twice."""
    by_id = {cell.id: cell.source for cell in notebook.cells}
    notebook.cells = []
    async with kernel(notebook) as client:
        await execute(client, by_id["build"])
        await execute(client, by_id["train"].replace("await train(100)", "await train(2)"))
        assert await execute(client, "print(len(losses))") == "2\n"
        for _ in range(2):
            # The cell itself asks for the interruption, when it is well under way: nothing here waits for a clock.
            interrupted = """
import os, signal, threading
done = len(losses)
class Stop(list):
    def append(self, loss):
        super().append(loss)
        if len(self) == done + 3:
            threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGINT)).start()
losses = Stop(losses)
await train(10**6)
"""
            with pytest.raises(nbclient.exceptions.CellExecutionError) as caught:
                await execute(client, interrupted)
            assert caught.value.ename in {"KeyboardInterrupt", "CancelledError"}
            assert await execute(client, "losses = list(losses); print(len(losses) >= done + 3)") == "True\n"
            after = await execute(client, "await train(3)\nawait model.synchronize()\nprint(model.param_version)")
            expected = await execute(client, "print(len(losses))")
            assert int(after) in {int(expected), int(expected) - 1, int(expected) - 2}
        assert await execute(client, by_id["end"] + "\nprint('closed')") == "closed\n"
