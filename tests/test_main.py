"""The command line: the comparison of schedules, a picture, costs from files, and what the machine has."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from roundpipe_async.__main__ import main
from roundpipe_async.scheduling.plan import LayerCost
from roundpipe_async.scheduling.workloads import MEASURED, load_costs
from tests.support.published import WORKLOADS


def test_the_built_in_workloads_are_the_test_data_s() -> None:
    assert {name: (w.costs, w.hop_s) for name, w in MEASURED.items()} == {
        name: (w.costs, w.hop_s) for name, w in WORKLOADS.items()
    }


def test_simulate_compares_the_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--costs", "gpt-oss-20b", "--devices", "4", "--microbatches", "8", "--effort", "0.02"]
    assert main(["simulate", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gpt-oss-20b: 25 layers, 4 devices, 8 microbatches"
    idle = {line[:22].strip(): float(line.split()[-4]) for line in lines if line.startswith(("round", "searched"))}
    assert idle["searched, isolated"] < idle["round robin"]
    assert [line.split()[0] for line in lines[2:6]] == ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"]


def test_simulate_reads_a_file_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    costs = tmp_path / "mine.csv"
    costs.write_text("# my model\nforward_ms,backward_ms,parameter_bytes,count\n1,2,1e6,6\n3,4,2e6,\n")
    picture = tmp_path / "out.png"
    words = ["--costs", str(costs), "--devices", "2", "--microbatches", "3", "--effort", "0.01", "--print"]
    assert main(["simulate", *words, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "mine: 7 layers" in text and "stage 0: forward 0.." in text
    assert "1f1b" in text and "multiple of 2 microbatches" in text


def test_load_costs_says_what_it_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "costs.csv"
    path.write_text("forward_ms,recompute_ms,backward_ms,activation_bytes\n2,1,3,8\n")
    assert load_costs(path).costs == (LayerCost(0.002, 0.001, 0.003, 0, 8),)
    for text, said in (
        ("forward_ms,size\n1,2\n", "the columns are forward_ms, size"),
        ("forward_ms,backward_ms\n1,x\n", "row 1 .* cannot be read"),
        ("forward_ms,backward_ms\n1,-2\n", "not negative"),
        ("forward_ms,backward_ms\n", "no layers"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            load_costs(path)


@pytest.mark.parametrize("words", [["--costs", "nowhere"], ["--costs", "llama3-8b", "--devices", "0"]])
def test_wrong_use_ends_with_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *words])
    assert ended.value.code == 2
    assert "nowhere" in (text := capsys.readouterr().err) or "0 is not at least 1" in text


def test_info_tells_devices_versions_and_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDPIPE_ASYNC_DEVICES", "cpu:3")
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert text.count("device ") == 3 and "torch 2" in text and "GB of memory" in text


def test_the_test_data_are_rows_of_facts() -> None:
    """Guards the files against an edit that would move the pinned figures."""
    with open(Path(__file__).parent / "data" / "published_bubbles.csv", newline="") as file:
        rows = list(csv.reader(line for line in file if not line.startswith("#")))
    assert [len(row) for row in rows] == [7] * 6
