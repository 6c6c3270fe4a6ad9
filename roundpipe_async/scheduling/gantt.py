"""A picture of a simulated timeline, drawn as measured ones are: a row a device, a bar an action."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from roundpipe_async.scheduling.simulate import TimedAction, Timeline
from roundpipe_async.tracing.drawing import Bar, Row, draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def gantt(timeline: Timeline, title: str = "", path: str | Path | None = None) -> Figure:
    """Draws the timeline; with `path` also writes it there (the ending gives the format).

    The broad bars are computation, the narrow grey ones below them uploads of parameters. ImportError, saying what to
    install, without matplotlib.
    """
    rows = [
        Row(f"device {device}", [_bar(action) for action in timeline.of_device(device)])
        for device in range(timeline.num_devices)
    ]
    return draw(rows, f"{title}  {100 * timeline.bubble:.2f} % idle".strip(), path)


def _bar(action: TimedAction) -> Bar:
    text = "" if action.microbatch is None else str(action.microbatch)
    return Bar(action.kind, action.start_s, action.end_s, text)
