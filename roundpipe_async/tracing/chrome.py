"""Records in the Trace Event Format, which chrome://tracing and https://ui.perfetto.dev open.

One process for each device and one for the host, one thread for each stream, a bar for each action, times in
microseconds from the first start. An arrow follows each microbatch of a call through its passes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from roundpipe_async.tracing.actions import Record
from roundpipe_async.tracing.usage import device_names, natural

_WAY = ("forward", "fused", "backward")
_ORDER = ("compute", "load", "upload", "download")


def chrome_json(records: Sequence[Record]) -> str:
    """The text of a JSON file with these records."""
    return json.dumps({"traceEvents": chrome_events(records), "displayTimeUnit": "ms"}, separators=(",", ":"))


def chrome_events(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The trace events: metadata (`M`), a complete event (`X`) for each record, flows (`s`, `t`, `f`)."""
    zero = min((record.start_s for record in records), default=0.0)
    places = _Places(records)
    events = list(places.metadata())
    for record in records:
        events.append({
            "name": str(record.action), "cat": record.action.kind, "ph": "X",
            "ts": _microseconds(record.start_s - zero), "dur": _microseconds(record.seconds),
            **places.of(record), "args": _arguments(record),
        })  # fmt: skip
    events += _flows(records, places, zero)
    return events


class _Places:
    """The number of each device and stream."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._pids = {device: pid for pid, device in enumerate(device_names(records), 1)}
        streams = {(record.device, record.stream) for record in records}
        ordered = sorted(streams, key=lambda key: (self._pids[key[0]], _rank(key[1]), natural(key[1])))
        self._tids = {key: tid for tid, key in enumerate(ordered, 1)}

    def of(self, record: Record) -> dict[str, int]:
        return {"pid": self._pids[record.device], "tid": self._tids[record.device, record.stream]}

    def metadata(self) -> Iterator[dict[str, Any]]:
        for device, pid in self._pids.items():
            yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": device}}
            yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
        for (device, stream), tid in self._tids.items():
            where = {"ph": "M", "pid": self._pids[device], "tid": tid}
            yield {"name": "thread_name", **where, "args": {"name": stream}}
            yield {"name": "thread_sort_index", **where, "args": {"sort_index": tid}}


def _rank(stream: str) -> int:
    kind = stream.rpartition("/")[2]
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def _arguments(record: Record) -> dict[str, Any]:
    action = record.action
    told: dict[str, Any] = {
        "layers": None if action.layers is None else [*action.layers],
        "microbatch": action.microbatch,
        "bytes": record.num_bytes or None,
        "label": action.label or None,
        "error": record.error or None,
    }
    return {key: value for key, value in told.items() if value is not None}


def _flows(records: Sequence[Record], places: _Places, zero: float) -> Iterator[dict[str, Any]]:
    """Arrows through the middles of a microbatch's passes, in the order of time; recompute, which waits for no other
    stage, is no part of the way. Of labelled actions: without a label nobody knows whose a microbatch is."""
    ways: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        action = record.action
        if action.label and action.microbatch is not None and action.kind in _WAY:
            ways.setdefault((action.label, action.microbatch), []).append(record)
    for number, ((label, microbatch), way) in enumerate(ways.items(), 1):
        way.sort(key=_middle_s)
        for i, record in enumerate(way if len(way) > 1 else ()):
            event = {
                "name": f"{label} mb{microbatch}", "cat": "microbatch", "id": number,
                "ph": "s" if i == 0 else "f" if i == len(way) - 1 else "t",
                "ts": _microseconds(_middle_s(record) - zero), **places.of(record),
            }  # fmt: skip
            yield {**event, "bp": "e"} if event["ph"] == "f" else event


def _middle_s(record: Record) -> float:
    return (record.start_s + record.end_s) / 2


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
