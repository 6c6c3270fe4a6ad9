"""The five workloads of arXiv 2604.27085 as layer costs, with the figures published for them (tests/data)."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from roundpipe_async.scheduling.plan import LayerCost, ModelExecutePlan
from roundpipe_async.scheduling.schedule import Schedule, round_robin
from roundpipe_async.scheduling.simulate import Links

DATA = Path(__file__).parent.parent / "data"
NUM_DEVICES = 8
NUM_MICROBATCH = 16


def _rows(name: str) -> dict[str, dict[str, str]]:
    with open(DATA / name, newline="") as file:
        return {row["model"]: row for row in csv.DictReader(line for line in file if not line.startswith("#"))}


def _counts(text: str) -> list[int]:
    """'3*2,4' is 3, 3, 4."""
    parts = [part.split("*") for part in text.split(",")]
    return [int(part[0]) for part in parts for _ in range(int(part[1]) if len(part) == 2 else 1)]


def _ranges(counts: list[int]) -> list[range]:
    return [range(a, b) for a, b in pairwise(accumulate(counts, initial=0))]


@dataclass(frozen=True)
class Workload:
    """One model: its blocks, then its head as the last layer, which no schedule recomputes."""

    name: str
    costs: tuple[LayerCost, ...]
    hop_s: float
    bubbles: dict[str, float]
    plan: ModelExecutePlan
    device_stages: list[range]
    interleaved_stages: list[range]

    @property
    def links(self) -> Links:
        """25 GB/s of uploads to each device."""
        return Links(25e9, self.hop_s)

    @property
    def free_uploads(self) -> Links:
        return Links(math.inf, self.hop_s)

    def paper_schedule(self) -> Schedule:
        """Two rounds of 8 microbatches, as published."""
        return round_robin(self.plan, "fused", len(self.costs), NUM_MICROBATCH, NUM_DEVICES, round_size=NUM_DEVICES)


def _workload(name: str, row: dict[str, str]) -> Workload:
    ms = {key: float(row[key]) / 1e3 for key in row if key.endswith("_ms")}
    block = LayerCost(ms["fwd_ms"], ms["fwd_ms"], ms["bwd_ms"], int(float(row["layer_bytes"])))
    head = LayerCost(ms["head_fwd_ms"], 0.0, ms["head_bwd_ms"], int(float(row["head_bytes"])))
    bubbles = {key: float(text) for key, text in _rows("published_bubbles.csv")[name].items() if key != "model"}
    parts = _rows("roundpipe_partitions.csv")[name]
    backward = _counts(parts["backward"])
    backward[0] += 1
    plan = ModelExecutePlan(_ranges(_counts(parts["forward"])), _ranges(backward[::-1])[::-1])
    others = _rows("baseline_partitions.csv")[name]
    stages = []
    for key in ("one_stage_a_device", "interleaved"):
        counts = _counts(others[key])
        counts[-1] += 1
        stages.append(_ranges(counts))
    costs = (block,) * int(row["num_layers"]) + (head,)
    return Workload(name, costs, ms["comm_ms"], bubbles, plan, stages[0], stages[1])


WORKLOADS = {name: _workload(name, row) for name, row in _rows("layer_costs_rtx4090.csv").items()}
