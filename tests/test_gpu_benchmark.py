"""`benchmarks/gpu.py` waits for a machine with an accelerator: until then its dry run keeps it running."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from roundpipe_async.devices import accelerator

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-W", "error", str(ROOT / "benchmarks" / "gpu.py")]


@pytest.mark.slow
def test_dry_run_goes_through_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    report = tmp_path / "gpu.json"
    done = subprocess.run(
        [*COMMAND, "--dry-run", "--seconds", "0.05", "--json", str(report)],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    rows = {row["what"]: row for row in json.loads(report.read_text())["rows"]}
    for what in ("correctness fp32", "correctness bf16", "correctness fp16+scaler", "out of memory", "Ctrl-C"):
        assert rows[what]["ok"], rows[what]
    assert rows["correctness fp32"]["difference"] == 0
    for what in ("resident", "offload", "ours-sync", "ours"):
        assert rows[what]["tokens_per_s"] > 0
    assert 0 < rows["ours"]["computing"] <= 1
    assert "no figure above counts" in done.stdout


@pytest.mark.skipif(accelerator.available(), reason="this machine has an accelerator to measure")
def test_without_an_accelerator_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "torch reports no accelerator here" in done.stderr
