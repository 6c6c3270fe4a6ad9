"""Pictures of timelines, measured or simulated: a row a device, a bar an action.

Needs matplotlib, which is imported when something is drawn. Figures are made without pyplot: no window opens, and
nothing has to be closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roundpipe_async.tracing.actions import COMPUTING, HOST, Record
from roundpipe_async.tracing.usage import device_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "forward": "#4c78a8", "recompute": "#9ecae9", "backward": "#f58518", "fused": "#54a24b", "collect": "#88d27a",
    "upload": "#bab0ac", "download": "#79706e", "step": "#b279a2", "publish": "#d6a5c9", "split": "#eeca3b",
    "merge": "#c9a800", "commit": "#ff9da6",
}  # fmt: skip
OTHER_COLOUR = "#d8b5a5"
NARROW = {"upload": (0.32, 0.12), "download": (-0.44, 0.12)}
"""Where in its row the narrow bar of a transfer lies: its edge and its height; broad bars lie from -0.3 to 0.3."""
MAX_TEXTS = 400
"""Pictures with more broad bars than this have no numbers in them."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One action, in seconds; `text` is written on it if it fits."""

    kind: str
    start_s: float
    end_s: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """What one device did. The bars are drawn in their order: a later one may hide an earlier one."""

    name: str
    bars: Sequence[Bar]


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Rows for records: the devices, then each stream of the host. Times count from the first start. What is lent to
    a device that shares the host's memory is not drawn."""
    zero = min((record.start_s for record in records), default=0.0)
    compute_streams = {record.stream for record in records if record.action.kind in COMPUTING}
    names = [name for name in device_names(records) if name != HOST]
    hosts = sorted({record.stream for record in records if record.device == HOST})
    bars: dict[str, list[Bar]] = {name: [] for name in (*names, *hosts)}
    for record in records:
        action = record.action
        if record.device == HOST:
            place = record.stream
        elif action.kind in NARROW and record.stream in compute_streams:
            continue
        else:
            place = record.device
        text = "" if action.microbatch is None else str(action.microbatch)
        bars[place].append(Bar(action.kind, record.start_s - zero, record.end_s - zero, text))
    return [Row(name, bars[name]) for name in bars]


def draw(rows: Sequence[Row], title: str = "", path: str | Path | None = None) -> Figure:
    """Draws the rows; with `path` also writes the picture there (the ending gives the format).

    Broad bars are computation, the narrow ones below them uploads, above them downloads. ImportError, saying what to
    install, without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "a picture needs matplotlib: pip install 'roundpipe_async[plot]', or matplotlib itself"
        ) from error
    figure = Figure(figsize=(14, 1.2 + 0.5 * max(len(rows), 1)), layout="constrained")
    axes = figure.add_subplot()
    end_s = max((bar.end_s for row in rows for bar in row.bars), default=0.0)
    for index, row in enumerate(rows):
        _draw_row(axes, index, row)
    if sum(bar.kind not in NARROW for row in rows for bar in row.bars) <= MAX_TEXTS:
        _write_texts(axes, rows, end_s)
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_xlim(0, end_s or 1.0)
    axes.set_xlabel("seconds")
    axes.set_title(title)
    kinds = {bar.kind for row in rows for bar in row.bars}
    shown = [kind for kind in COLOURS if kind in kinds] + sorted(kinds - set(COLOURS))
    if shown:
        handles = [Patch(color=_colour(kind), label=kind) for kind in shown]
        figure.legend(handles=handles, loc="outside right upper", frameon=False)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _colour(kind: str) -> str:
    return COLOURS.get(kind, OTHER_COLOUR)


def _draw_row(axes: Axes, index: int, row: Row) -> None:
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for bar in row.bars:
        by_kind.setdefault(bar.kind, []).append((bar.start_s, bar.end_s - bar.start_s))
    for kind, spans in by_kind.items():
        if kind in NARROW:
            edge, height = NARROW[kind]
            axes.broken_barh(spans, (index + edge, height), facecolors=_colour(kind))
        else:
            axes.broken_barh(spans, (index - 0.3, 0.6), facecolors=_colour(kind), edgecolors="white", linewidth=0.2)


def _write_texts(axes: Axes, rows: Sequence[Row], end_s: float) -> None:
    """Write on each broad bar that is wide enough."""
    for index, row in enumerate(rows):
        for bar in row.bars:
            if bar.text and bar.kind not in NARROW and bar.end_s - bar.start_s > 0.006 * len(bar.text) * end_s:
                middle = (bar.start_s + bar.end_s) / 2
                axes.text(middle, index, bar.text, ha="center", va="center", fontsize=7, color="white")
