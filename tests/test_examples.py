"""What the README and the examples show runs as it stands there, silently (warnings are errors)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ROUNDPIPE_ASYNC_DEVICES": "cpu:2"}


def run(code: str, folder: Path) -> str:
    """The output of a program in a process of its own."""
    script = folder / "script.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=folder, capture_output=True, text=True, timeout=110, check=False, env=os.environ | ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(name: str, **constants: str) -> str:
    """An example's source with some of its constants replaced, so that it ends soon."""
    source = (ROOT / "examples" / name).read_text(encoding="utf-8")
    for line, replacement in constants.items():
        source, count = re.subn(rf"^{line}\b.*$", f"{line}{replacement}", source, flags=re.MULTILINE)
        assert count == 1, line
    return source


def test_the_tour_of_the_readme(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    losses = [float(line) for line in run(blocks[0], tmp_path).split()]
    assert len(losses) == 20


@pytest.mark.slow
def test_quickstart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    source = example("quickstart.py", LAYERS=", WIDTH, HEADS, CONTEXT = 2, 32, 2, 32", EVALUATE_EVERY=" = 3")
    source = source.replace("STEPS, WARMUP, BATCH, PEAK_LR = 500", "STEPS, WARMUP, BATCH, PEAK_LR = 8")
    output = run(source, tmp_path)
    assert "loss on unseen text" in output
    assert "(3)" in output and "(6)" in output and "(8)" in output
    assert (tmp_path / "quickstart_loss.png").stat().st_size > 1000


@pytest.mark.slow
def test_port_from_roundpipe(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("tqdm")
    output = run(example("port_from_roundpipe.py", EPOCHS=" = 1"), tmp_path)
    assert re.search(r"epoch 1: train loss \d\.\d+", output)
