"""What ran where and when: every stream reports its actions here while somebody records.

Nothing is recorded, and nothing is paid but one look at a module variable, until `trace()` is entered.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import TracebackType


@dataclass(frozen=True, slots=True)
class Action:
    """What a piece of work on a stream is for. `kind` is one of `forward`, `fused`, `recompute`, `backward`,
    `upload`, `download`, `collect`, `split`, `merge`, `commit`, `publish`, `step`."""

    kind: str
    layers: range | None = None
    microbatch: int | None = None
    num_bytes: int = 0
    label: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """One action that ran: where, from when to when (`time.perf_counter` seconds)."""

    action: Action
    device: str
    stream: str
    start_s: float
    end_s: float


@dataclass(eq=False)
class trace:  # noqa: N801 - a context manager that reads as a verb
    """Context that records every action of every engine of the process: `with trace() as t: ...; t.records`.

    Contexts may nest and overlap; each sees what ran while it was open.
    """

    records: list[Record] = field(default_factory=list)

    def __enter__(self) -> trace:
        global _open
        with _lock:
            _open = (*_open, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _open
        with _lock:
            _open = tuple(other for other in _open if other is not self)


_open: tuple[trace, ...] = ()
_lock = threading.Lock()


def recording() -> bool:
    """Whether anybody records."""
    return bool(_open)


def record(action: Action, device: str, stream: str, start_s: float, end_s: float) -> None:
    """Report an action that ran."""
    entry = Record(action, device, stream, start_s, end_s)
    for open_trace in _open:
        open_trace.records.append(entry)
