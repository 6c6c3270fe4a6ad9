"""Layer costs to simulate with, when no model is at hand: five measured workloads, and tables from files."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from roundpipe_async.scheduling.plan import LayerCost

COLUMNS = ("forward_ms", "recompute_ms", "backward_ms", "parameter_bytes", "activation_bytes", "count")


@dataclass(frozen=True, slots=True)
class Workload:
    """A model's layers, one microbatch each, and the time of one activation hop between devices."""

    name: str
    costs: tuple[LayerCost, ...]
    hop_s: float = 0.0


def _measured(
    name: str, num_blocks: int, block_ms: tuple[float, float], head_ms: tuple[float, float], hop_ms: float,
    block_bytes: float, head_bytes: float,
) -> Workload:  # fmt: skip
    forward, backward = (x / 1e3 for x in block_ms)
    head_forward, head_backward = (x / 1e3 for x in head_ms)
    block = LayerCost(forward, forward, backward, int(block_bytes))
    head = LayerCost(head_forward, 0.0, head_backward, int(head_bytes))
    return Workload(name, (block,) * num_blocks + (head,), hop_ms / 1e3)


MEASURED = {
    workload.name: workload
    for workload in (
        _measured("qwen3-1.7b", 28, (7.429, 15.831), (22.0655, 43.707), 1.6, 100.6e6, 622.3e6),
        _measured("llama3-8b", 32, (18.50370313, 41.20659375), (37.2255, 74.501), 3.2, 436.2e6, 1050.7e6),
        _measured("gpt-oss-20b", 24, (21.6445625, 81.780875), (44.2925, 86.264), 2.25, 1740e6, 1158.3e6),
        _measured("qwen3-32b", 64, (40.5610625, 91.17429688), (54.928, 108.294), 4.0, 974e6, 1555.8e6),
        _measured("qwen3-235b-lora", 94, (43.016, 58.376), (42.444, 43.294), 3.2, 4990e6, 1244.7e6),
    )
}
"""Fine-tuning workloads measured on an RTX 4090, from the public artifact of arXiv 2604.27085 (figures only): blocks,
then the head, which is never recomputed. Bytes are of 16-bit parameters, from the public model configurations."""


def load_costs(path: str | Path) -> Workload:
    """Costs from a CSV file with a header: a row for each layer, or for `count` equal layers in a row.

    Columns: `forward_ms` and `backward_ms`, and, if they are there, `recompute_ms` (default: as forward; the last
    layer is never recomputed), `parameter_bytes`, `activation_bytes`, `count`. Lines with `#` are comments. Raises
    ValueError, naming the line, for what it cannot read.
    """
    costs: list[LayerCost] = []
    with open(path, newline="", encoding="utf-8") as file:
        rows = csv.DictReader(_uncommented(file))
        names = rows.fieldnames or ()
        unknown = [name for name in names if name not in COLUMNS]
        if unknown or not {"forward_ms", "backward_ms"} <= set(names):
            raise ValueError(f"{path}: the columns are {', '.join(names)}; wanted: {', '.join(COLUMNS)}")
        for number, row in enumerate(rows, 1):
            try:
                costs += [_cost(row)] * int(row.get("count") or 1)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}: row {number} ({dict(row)}) cannot be read: {error}") from error
    if not costs:
        raise ValueError(f"{path}: there are no layers")
    return Workload(Path(path).stem, tuple(costs))


def _cost(row: dict[str, str]) -> LayerCost:
    forward = float(row["forward_ms"]) / 1e3
    recompute = float(row["recompute_ms"]) / 1e3 if row.get("recompute_ms") else forward
    sizes = (int(float(row.get(name) or 0)) for name in ("parameter_bytes", "activation_bytes"))
    cost = LayerCost(forward, recompute, float(row["backward_ms"]) / 1e3, *sizes)
    if min(cost.forward_s, cost.recompute_s, cost.backward_s, cost.parameter_bytes, cost.activation_bytes) < 0:
        raise ValueError("times and sizes are not negative")
    return cost


def _uncommented(lines: Iterable[str]) -> Iterable[str]:
    return (line for line in lines if line.strip() and not line.startswith("#"))
