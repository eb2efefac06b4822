"""How ``turnlane queue`` puts things into words for people."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from turnlane.cli.output import Column, counted, readable
from turnlane.queues.inspection.account import Account
from turnlane.queues.inspection.findings import Report
from turnlane.queues.inspection.repair import Repaired
from turnlane.queues.inspection.rows import rows
from turnlane.queues.inspection.slices import Inspected, Slice

PEEK_COLUMNS: list[Column] = [
    ("offset", "right"),
    ("time", "left"),
    ("key", "left"),
    ("value", "left"),
    ("settled", "left"),
]
_MILLISECONDS = len("2026-01-01T00:00:00.000")


def peek_cells(piece: Slice) -> Iterator[list[str]]:
    """The cells of a row for each event."""
    keep = [name for name in ("key", "timestamp") if name in piece.block.schema.names]
    values = piece.block.column("value").cast(pa.binary()).to_pylist()
    few = Slice(piece.offsets, piece.settled, piece.block.select(keep))
    for row, value in zip(rows(few), values, strict=True):
        time = str(row.get("timestamp") or "")[:_MILLISECONDS].replace("T", " ")
        key = readable(str(row.get("key") or "").encode())
        yield [str(row["offset"]), time, key, readable(value), "yes" if piece.settled else "no"]


def nothing_to_peek(queue: Inspected, first: int | None, *, everything: bool) -> str:
    """Why there are no events to show."""
    if first is not None and first >= queue.end:
        return f"offset {first} is beyond the end: the queue ends before offset {queue.end}"
    there = "there are no events" if everything else "nothing is pending"
    return there if first is None else f"{there} from offset {first} on"


def summary(report: Report) -> str:
    """What was looked at."""
    held = f", open in process {report.running}" if report.running is not None else ""
    return (
        f"{report.name}: {counted(report.chunks, 'chunk')}, {counted(report.frames, 'frame')}, "
        f"{counted(report.events, 'event')} ({report.pending} pending), "
        f"{counted(report.bytes, 'byte')}{held}"
    )


def finding_lines(report: Report) -> Iterator[str]:
    """Every finding in two lines, and what they come to."""
    for finding in report.findings:
        label = "FAULT" if finding.fault else "note "
        yield f"{label} {finding.file}, byte {finding.byte}: {finding.what}"
        yield f"      → {finding.todo}"
    if report.clean:
        yield "clean"
    else:
        lost = f", {counted(report.lost, 'event')} lost" if report.lost else ", no event lost"
        yield f"{counted(len(report.faults), 'fault')}{lost}"


def repaired_lines(done: Repaired | None, *, needed: bool) -> Iterator[str]:
    """What a repair has done, if it was done."""
    if done is None:
        yield "nothing was changed" if needed else "there is nothing to repair"
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in done.lost.items())
    lost = f"{sum(done.lost.values())} lost: {reasons}" if reasons else "none lost"
    yield f"repaired: {counted(done.saved, 'pending event')} saved, {lost}"
    if done.recovered_acks:
        yield f"{counted(done.recovered_acks, 'ack')} recovered from the damaged journal"
    for name in done.set_aside:
        yield f"kept: {name}"


def ledger_lines(account: Account) -> Iterator[str]:
    """The ledger as a table, as a sum, and what it does not include."""
    ledger = account.ledger
    entries = [("accepted", ledger.accepted), ("delivered", ledger.delivered)]
    entries.append(("dead", ledger.dead))
    entries += [(f"dropped, {why}", count) for why, count in ledger.dropped.items()]
    entries.append(("pending", ledger.pending))
    if account.unaccounted:
        entries.append(("unaccounted", account.unaccounted))
    width = max(len(name) for name, _ in entries)
    digits = max(len(str(count)) for _, count in entries)
    for name, count in entries:
        yield f"{name:<{width}}  {count:>{digits}}"
    yield str(ledger)
    yield from account.notes
    yield f"not included: {account.not_included}"
