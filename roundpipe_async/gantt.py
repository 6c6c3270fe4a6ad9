"""A picture of a timeline: a row a device, a bar an action. Needs matplotlib, which is imported when it is used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from roundpipe_async.simulate import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"forward": "#4c78a8", "recompute": "#9ecae9", "backward": "#f58518", "fused": "#54a24b"}
UPLOAD_COLOUR = "#bab0ac"


def gantt(timeline: Timeline, title: str = "", path: str | Path | None = None) -> Figure:
    """Draws the timeline; with `path` also writes it there (the ending gives the format).

    The broad bars are computation, the narrow grey ones below them uploads of parameters. ImportError, saying what to
    install, without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(14, 1.2 + 0.5 * timeline.num_devices), layout="constrained")
    axes = figure.add_subplot()
    for device in range(timeline.num_devices):
        actions = timeline.of_device(device)
        for kind, colour in COLOURS.items():
            bars = [(a.start_s, a.end_s - a.start_s) for a in actions if a.kind == kind]
            axes.broken_barh(bars, (device - 0.3, 0.6), facecolors=colour, edgecolors="white", linewidth=0.2)
        uploads = [(a.start_s, a.end_s - a.start_s) for a in actions if a.kind == "upload"]
        axes.broken_barh(uploads, (device + 0.32, 0.12), facecolors=UPLOAD_COLOUR)
    axes.set_ylim(timeline.num_devices - 0.5, -0.5)
    axes.set_yticks(range(timeline.num_devices), [f"device {i}" for i in range(timeline.num_devices)])
    axes.set_xlim(0, timeline.makespan_s)
    axes.set_xlabel("seconds")
    axes.set_title(f"{title}  {100 * timeline.bubble:.2f} % idle".strip())
    legend = [Patch(color=colour, label=kind) for kind, colour in (*COLOURS.items(), ("upload", UPLOAD_COLOUR))]
    figure.legend(handles=legend, loc="outside right upper", frameon=False)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
