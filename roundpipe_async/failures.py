"""What went wrong in one call: several things may, in several threads, and the caller is told of one exception.

That exception arrives as it was raised, with its own traceback, cause and context, and with one note that says where.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from types import TracebackType

import torch

from roundpipe_async.tracing.trace import Action

OURS = "roundpipe_async: "
"""How all of our notes begin."""


@dataclass(slots=True, frozen=True, eq=False)
class Failure:
    """One thing that went wrong, as it was when it did."""

    number: int
    """Of the stage run, in the schedule's order; -1: before or after the schedule."""
    microbatch: int
    error: BaseException
    traceback: TracebackType | None
    where: str


class Failures:
    """All failures of one call. Any thread."""

    def __init__(self) -> None:
        self._found: list[Failure] = []
        self._places: dict[tuple[int, int], str] = {}

    def place(self, error: BaseException, microbatch: int, where: str) -> None:
        """Say where user code raised `error`, which is about to be `add`ed. One object may be raised in many places."""
        self._places[id(error), microbatch] = where

    def add(self, number: int, microbatch: int, error: BaseException, where: str) -> BaseException:
        """Note an exception that was caught just now; `where` if no `place` is known. Gives what to raise for it."""
        where = self._places.pop((id(error), microbatch), where)
        passable = error
        if isinstance(error, StopIteration):  # coroutines would take it for their own end
            passable = RuntimeError(f"user code raised {error!r}")
            passable.__cause__ = error
        self._found.append(Failure(number, microbatch, passable, error.__traceback__, where))
        return passable

    def __bool__(self) -> bool:
        return bool(self._found)

    def __contains__(self, error: BaseException) -> bool:
        return any(error is failure.error for failure in self._found)

    def first(self) -> BaseException | None:
        """The first in the schedule's order, with a note of each other; forgets all.

        Notes that an earlier call left on the same object are gone.
        """
        distinct: dict[int, Failure] = {}
        for failure in sorted(self._found, key=lambda failure: (failure.number, failure.microbatch)):
            distinct.setdefault(id(failure.error), failure)
        self._found.clear()
        self._places.clear()
        if not distinct:
            return None
        first, *others = distinct.values()
        error = first.error.with_traceback(first.traceback)
        if hasattr(error, "__notes__"):
            error.__notes__ = [note for note in error.__notes__ if not str(note).startswith(OURS)]
        error.add_note(OURS + first.where)
        for other in others:
            error.add_note(f"{OURS}the same call also failed {other.where}: {other.error!r}")
        if isinstance(error, torch.OutOfMemoryError):
            _let_go(error)
        return error


def _let_go(error: BaseException) -> None:
    """After out-of-memory a handler that tries again needs the room: the traceback, which keeps alive whatever the
    failed functions had in hand, becomes text."""
    seen: BaseException | None = error
    done: set[int] = set()
    while seen is not None and id(seen) not in done:  # user code may have made a ring of contexts
        done.add(id(seen))
        if seen.__traceback__ is not None:
            where = "".join(traceback.format_tb(seen.__traceback__)).rstrip()
            seen.add_note(f"{OURS}its traceback, kept as text so that it keeps no memory:\n{where}")
            seen.__traceback__ = None
        seen = seen.__context__


def place_of(action: Action | None, stream_name: str) -> str:
    """Where work failed that no layer and no loss function was part of."""
    what = "work" if action is None else action.kind
    if action is not None and action.layers is not None:
        what += f" of layers {action.layers.start} to {action.layers.stop - 1}"
    if action is not None and action.microbatch is not None:
        what += f", microbatch {action.microbatch}"
    return f"in {what}, stream {stream_name}"


def raise_unchanged(error: BaseException) -> None:
    """Raise an exception with the cause and context that it has."""
    cause, context, suppressed = error.__cause__, error.__context__, error.__suppress_context__
    try:
        raise error
    finally:
        error.__cause__, error.__context__, error.__suppress_context__ = cause, context, suppressed
        del error, cause, context
