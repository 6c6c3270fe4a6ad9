"""How well devices were used, from records of what they did: bubble, transfer overlap, utilisation.

All figures come from unions of time intervals, so that two things at once on one device count once. The *span* is the
time from the first start to the last end of anything on any device (uploads and downloads too, the host's work not).
A device that did nothing at all is in no record: these figures know nothing of it.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from roundpipe_async.tracing.actions import COMPUTING, HOST, OPTIMIZER, TRANSFERS, Record

Intervals = list[tuple[float, float]]
"""Disjoint, in ascending order."""


def union(spans: Iterable[tuple[float, float]]) -> Intervals:
    """The union of time spans."""
    merged: Intervals = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(left: Intervals, right: Intervals) -> Intervals:
    """The times that are in both."""
    both: Intervals = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            both.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return both


def length(intervals: Intervals) -> float:
    """Seconds in all."""
    return math.fsum(end - start for start, end in intervals)


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which `cpu:2` comes before `cpu:10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def device_names(records: Iterable[Record]) -> list[str]:
    """The devices that did something, in order; the host, if it did, last."""
    return sorted({record.device for record in records}, key=lambda name: (name == HOST, natural(name)))


@dataclass(frozen=True, slots=True)
class KindUsage:
    """What the actions of one kind took together."""

    kind: str
    count: int
    seconds: float
    """The sum of their durations, whether or not some ran at once."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """What one device did."""

    device: str
    computing_s: float
    """Seconds in which at least one action of its computation ran: forward, fused, recompute, backward, collect."""
    utilisation: float
    """`computing_s` over the span, 0 to 1."""
    transfer_s: float
    """Seconds in which at least one upload or download ran, on a stream that does not compute. (A CPU device that
    shares the host's memory lends it in its compute stream: that is no transfer.)"""
    overlapped_s: float
    """The part of `transfer_s` in which the same device computed."""
    uploaded_bytes: int
    downloaded_bytes: int

    @property
    def overlap(self) -> float:
        """The share of the transfer time that computation hid, 0 to 1; nan without transfers."""
        return _share(self.overlapped_s, self.transfer_s)


@dataclass(frozen=True, slots=True)
class Usage:
    """How the devices were used. `str` prints it as a table, a notebook shows it as one; the shares are 0 to 1."""

    devices: tuple[DeviceUsage, ...]
    kinds: tuple[KindUsage, ...]
    span_s: float
    """Seconds from the first start to the last end of anything on any device."""
    optimizer_s: float
    """Seconds in which steps ran or published."""
    optimizer_overlapped_s: float
    """The part of it in which some device computed."""

    @property
    def bubble(self) -> float:
        """The share of device time in which nothing is computed: 1 - sum of `computing_s` / (devices * `span_s`).

        nan where nothing ran. Waiting between two calls counts; trace a single call to leave it out.
        """
        return 1 - _share(math.fsum(device.computing_s for device in self.devices), len(self.devices) * self.span_s)

    @property
    def overlap(self) -> float:
        """The share of all devices' transfer time in which the same device computed; nan without transfers."""
        return _share(
            math.fsum(device.overlapped_s for device in self.devices),
            math.fsum(device.transfer_s for device in self.devices),
        )

    @property
    def optimizer_overlap(self) -> float:
        """The share of the optimizer's time in which some device computed; nan without steps."""
        return _share(self.optimizer_overlapped_s, self.optimizer_s)

    def __str__(self) -> str:
        if not self.kinds:
            return "nothing was recorded"
        return "\n".join([self._summary(), *(line for rows in self._tables() for line in ("", *_aligned(rows)))])

    def _repr_html_(self) -> str:
        if not self.kinds:
            return "<p>nothing was recorded</p>"
        tables = []
        for head, *rows in self._tables():
            lines = [_html_row("th", head), *(_html_row("td", row) for row in rows)]
            tables.append(f"<table>{''.join(lines)}</table>")
        return f"<p>{html.escape(self._summary())}</p>{''.join(tables)}"

    def _summary(self) -> str:
        return (
            f"{self.span_s:.6g} s, bubble {_percent(self.bubble)}, transfers overlapped {_percent(self.overlap)}, "
            f"optimizer overlapped {_percent(self.optimizer_overlap)}"
        )

    def _tables(self) -> list[list[list[str]]]:
        devices = [["device", "computing s", "%", "transfer s", "overlapped", "MB up", "MB down"]]
        for device in self.devices:
            devices.append([
                device.device, f"{device.computing_s:.6f}", f"{100 * device.utilisation:.2f}",
                f"{device.transfer_s:.6f}", _percent(device.overlap),
                f"{device.uploaded_bytes / 1e6:.3f}", f"{device.downloaded_bytes / 1e6:.3f}",
            ])  # fmt: skip
        kinds = [["action", "count", "seconds", "mean ms", "MB"]]
        for kind in self.kinds:
            kinds.append([
                kind.kind, str(kind.count), f"{kind.seconds:.6f}", f"{1e3 * kind.seconds / kind.count:.3f}",
                f"{kind.num_bytes / 1e6:.3f}",
            ])  # fmt: skip
        return [devices, kinds] if len(devices) > 1 else [kinds]


def usage(records: Sequence[Record]) -> Usage:
    """What these records say; see `Usage` for the definitions."""
    names = [name for name in device_names(records) if name != HOST]
    on_devices = [record for record in records if record.device != HOST]
    first = min((record.start_s for record in on_devices), default=0.0)
    span = max((record.end_s for record in on_devices), default=0.0) - first
    by_device: dict[str, list[Record]] = {name: [] for name in names}
    for record in on_devices:
        by_device[record.device].append(record)
    computing = union(_spans(on_devices, COMPUTING))
    optimizer = union(_spans((record for record in records if record.device == HOST), OPTIMIZER))
    return Usage(
        devices=tuple(_device_usage(name, of_device, span) for name, of_device in by_device.items()),
        kinds=_kinds(records),
        span_s=span,
        optimizer_s=length(optimizer),
        optimizer_overlapped_s=length(intersection(optimizer, computing)),
    )


def _device_usage(name: str, records: Sequence[Record], span_s: float) -> DeviceUsage:
    computing = union(_spans(records, COMPUTING))
    compute_streams = {record.stream for record in records if record.action.kind in COMPUTING}
    moves = [record for record in records if record.stream not in compute_streams]
    transfers = union(_spans(moves, TRANSFERS))
    return DeviceUsage(
        device=name,
        computing_s=length(computing),
        utilisation=_share(length(computing), span_s),
        transfer_s=length(transfers),
        overlapped_s=length(intersection(transfers, computing)),
        uploaded_bytes=sum(record.num_bytes for record in moves if record.action.kind == "upload"),
        downloaded_bytes=sum(record.num_bytes for record in moves if record.action.kind == "download"),
    )


def _kinds(records: Sequence[Record]) -> tuple[KindUsage, ...]:
    by_kind: dict[str, list[Record]] = {}
    for record in records:
        by_kind.setdefault(record.action.kind, []).append(record)
    return tuple(
        KindUsage(kind, len(same), math.fsum(record.seconds for record in same), sum(r.num_bytes for r in same))
        for kind, same in sorted(by_kind.items(), key=lambda item: -math.fsum(record.seconds for record in item[1]))
    )


def _spans(records: Iterable[Record], kinds: frozenset[str]) -> Iterable[tuple[float, float]]:
    return ((record.start_s, record.end_s) for record in records if record.action.kind in kinds)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.2f} %"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _html_row(tag: str, row: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
