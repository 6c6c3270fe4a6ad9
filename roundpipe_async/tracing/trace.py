"""What ran where and when: every stream reports its actions here while somebody records.

Nothing is recorded, and nothing is paid but one look at a module variable, until a `trace()` is entered.
"""

from __future__ import annotations

import base64
import io
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from roundpipe_async.tracing.actions import Action as Action
from roundpipe_async.tracing.actions import Record as Record
from roundpipe_async.tracing.chrome import chrome_json
from roundpipe_async.tracing.drawing import draw, rows_of
from roundpipe_async.tracing.usage import Usage, usage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Entry = tuple[Action, str, str, float, float, int, str]


class trace:
    """Context that records every action of every engine of the process: `with trace() as t: ...`, then `t.table()`.

    It sees the actions that end while it is open, of whatever task, thread, event loop, model and pool; an action that
    began before anybody recorded is left out, since nobody noted when. When an `await` of a call returns, the call's
    actions are recorded. Contexts may nest and overlap, in several threads and tasks; an exception inside ends the
    recording and keeps what there is. Each object is entered once (RuntimeError).

    Recording takes about a microsecond and 200 bytes for each action, for as long as the object lives: trace a few
    iterations, not a day. Devices of the same name in two pools share a row; simulated devices tell virtual times, so
    do not record them together with real ones.

    In a notebook it shows itself as a picture (with matplotlib) and tables.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._state = "new"

    def __enter__(self) -> trace:
        global _open
        with _lock:
            if self._state != "new":
                raise RuntimeError(f"this trace is {self._state}: each is entered once; use `with trace() as t:` again")
            self._state = "open"
            _open = (*_open, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _open
        with _lock:
            self._state = "closed"
            _open = tuple(other for other in _open if other is not self)

    @property
    def records(self) -> list[Record]:
        """What was recorded so far, in the order in which the actions ended; a new list each time."""
        return [Record(*entry) for entry in tuple(self._entries)]

    def table(self) -> Usage:
        """Bubble, transfer overlap and each device's utilisation: numbers to read, and a table to print.

        See `Usage` for what exactly each figure says.
        """
        return usage(self.records)

    def chrome_json(self) -> str:
        """The records as Trace Event Format JSON, for chrome://tracing and https://ui.perfetto.dev.

        A process for each device, a thread for each stream, times in microseconds from the first start, arrows that
        follow the microbatches.
        """
        return chrome_json(self.records)

    def to_chrome(self, path: str | Path) -> None:
        """Write `chrome_json()` to a file."""
        Path(path).write_text(self.chrome_json(), encoding="utf-8")

    def plot(self, path: str | Path | None = None) -> Figure:
        """A matplotlib figure: a row for each device and each stream of the host, a bar for each action.

        With `path` it is written there, too (`.png`, `.svg`, `.pdf`). ImportError, naming what to install, without
        matplotlib.
        """
        records = self.records
        found = usage(records)
        title = f"{100 * found.bubble:.2f} % idle" if found.devices else ""
        return draw(rows_of(records), title, path)

    def _repr_html_(self) -> str:
        picture = ""
        try:
            file = io.BytesIO()
            self.plot().savefig(file, format="png", dpi=100)
            text = base64.b64encode(file.getvalue()).decode("ascii")
            picture = f'<img alt="timeline" src="data:image/png;base64,{text}">'
        except ImportError:
            pass  # the tables will do
        return picture + self.table()._repr_html_()

    def __repr__(self) -> str:
        return f"<trace, {self._state}: {len(self._entries)} actions>"


_open: tuple[trace, ...] = ()
_lock = threading.Lock()


class _Copied(threading.local):
    num_bytes = 0


_copied = _Copied()


# ---- what streams and devices call ----------------------------------------------------------------------------------


def recording() -> bool:
    """Whether anybody records."""
    return bool(_open)


def begin() -> float:
    """Called before an action runs: when it starts, if anybody records, else 0."""
    if not _open:
        return 0.0
    _copied.num_bytes = 0
    return time.perf_counter()


def copied(num_bytes: int) -> None:
    """Called by a device, in the thread that runs (or launches) the action: so much was copied."""
    if _open:
        _copied.num_bytes += num_bytes


def copied_bytes() -> int:
    """What this thread has copied since `begin`."""
    return _copied.num_bytes


def record(
    action: Action, device: str, stream: str, start_s: float, end_s: float, num_bytes: int = 0, error: str = ""
) -> None:
    """Report an action that ran. Call it before the action's event happens."""
    entry = (action, device, stream, start_s, end_s, num_bytes or action.num_bytes, error)
    for open_trace in _open:
        open_trace._entries.append(entry)
