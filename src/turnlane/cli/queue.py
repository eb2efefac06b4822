"""``turnlane queue``: look into a queue's directory, also of a stopped or damaged queue."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer

from turnlane.cli import console
from turnlane.cli.console import Column, Count, ExitCode, Json, Yes, counted, readable, reported
from turnlane.storage.export import (
    ExportFormat,
    ExportResult,
    convert_to_rows,
    export,
    export_to_file,
)
from turnlane.storage.export import read_next_events as next_events
from turnlane.storage.inspection import (
    QueueRepair,
    RepairResult,
    is_repairable,
    open_inspection,
    open_own_inspection,
)
from turnlane.storage.verify import QueueAccount, VerificationReport
from turnlane.storage.walk import EVERYTHING, EventSlice, InspectableQueue, Selection

# ── queue_texts ──
# How ``turnlane queue`` puts things into words for people.

PEEK_COLUMNS: list[Column] = [
    ("offset", "right"),
    ("time", "left"),
    ("key", "left"),
    ("value", "left"),
    ("settled", "left"),
]
_MILLISECONDS = len("2026-01-01T00:00:00.000")


def peek_cells(piece: EventSlice) -> Iterator[list[str]]:
    """The cells of a row for each event."""
    keep = [name for name in ("key", "timestamp") if name in piece.block.schema.names]
    values = piece.block.column("value").cast(pa.binary()).to_pylist()
    few = EventSlice(piece.offsets, piece.settled, piece.block.select(keep))
    for row, value in zip(convert_to_rows(few), values, strict=True):
        time = str(row.get("timestamp") or "")[:_MILLISECONDS].replace("T", " ")
        key = readable(str(row.get("key") or "").encode())
        yield [str(row["offset"]), time, key, readable(value), "yes" if piece.settled else "no"]


def nothing_to_peek(queue: InspectableQueue, first: int | None, *, everything: bool) -> str:
    """Why there are no events to show."""
    if first is not None and first >= queue.end:
        return f"offset {first} is beyond the end: the queue ends before offset {queue.end}"
    there = "there are no events" if everything else "nothing is pending"
    return there if first is None else f"{there} from offset {first} on"


def summary(report: VerificationReport) -> str:
    """What was looked at."""
    held = f", open in process {report.running}" if report.running is not None else ""
    return (
        f"{report.name}: {counted(report.chunks, 'chunk')}, {counted(report.frames, 'frame')}, "
        f"{counted(report.events, 'event')} ({report.pending} pending), "
        f"{counted(report.bytes, 'byte')}{held}"
    )


def finding_lines(report: VerificationReport) -> Iterator[str]:
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


def repaired_lines(done: RepairResult | None, *, needed: bool) -> Iterator[str]:
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


def ledger_lines(account: QueueAccount) -> Iterator[str]:
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


queue = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look into a queue's directory; also of a running, stopped or damaged queue.",
)

Directory = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", exists=True, file_okay=False, readable=False, help="The queue's directory."
    ),
]
All = Annotated[
    bool,
    typer.Option("--all/--pending", help="Also settled events that are still on disk, or not."),
]
From = Annotated[int | None, typer.Option("--from", min=0, help="Begin with this offset.")]


@queue.command()
@reported
def peek(
    directory: Directory,
    *,
    count: Count = 10,
    first: From = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Show the next events that are not settled."""
    seen = open_inspection(directory)
    pieces, unreadable = next_events(seen, Selection(first, settled=everything), count)
    if as_json:
        for piece in pieces:
            for row in convert_to_rows(piece):
                console.say_json(row)
        if first is not None and first >= seen.end:
            console.warn(nothing_to_peek(seen, first, everything=everything))
    elif pieces:
        columns = PEEK_COLUMNS if everything else PEEK_COLUMNS[:-1]
        cells = [row for piece in pieces for row in peek_cells(piece)]
        console.say_table(columns, [row[: len(columns)] for row in cells], elastic="value")
    else:
        console.say(nothing_to_peek(seen, first, everything=everything))
    if unreadable:
        console.warn(f"{unreadable} events among these cannot be read; turnlane queue verify")


@queue.command()
@reported
def verify(directory: Directory, *, as_json: Json = False) -> None:
    """Check every byte: name the file and byte of every fault. Exit code 1 if there are any."""
    seen = open_inspection(directory)
    with console.progress("verifying", seen.size) as advance:
        report = seen.verify(advance)
    if as_json:
        console.say_json({"path": str(directory), **report.as_dict()})
    else:
        for line in [summary(report), *finding_lines(report)]:
            console.say(line)
    if not report.clean:
        raise typer.Exit(ExitCode.FAILED)


@queue.command()
@reported
def repair(
    directory: Directory,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what there is to repair.")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Make a damaged queue verify as clean; keep in quarantine what cannot be read."""
    size = open_own_inspection(directory).size
    repairing = QueueRepair(directory)
    with console.progress("verifying", size) as advance:
        report = repairing.plan(advance)
    needed = any(map(is_repairable, report.findings))
    if not as_json:
        for line in [summary(report), *finding_lines(report)]:
            console.say(line)
    done = None
    if needed and not dry_run:
        if sys.stdin.isatty() and not yes:
            typer.confirm("Repair?", abort=True, err=True)
        with console.progress("repairing", size) as advance:
            done = repairing.run(advance)
    if as_json:
        result = {"path": str(directory), "dry_run": dry_run, "repaired": done is not None}
        found = [finding.as_dict() for finding in report.findings]
        outcome = done or RepairResult(saved=report.pending)
        console.say_json({**result, **outcome.as_dict(), "findings": found})
    else:
        for line in repaired_lines(done, needed=needed):
            console.say(line)


@queue.command(name="export")
@reported
def export_events(
    directory: Directory,
    *,
    target: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write; - for the standard output.")
    ] = Path("-"),
    kind: Annotated[
        ExportFormat | None, typer.Option("--format", help="Default: by the file's extension.")
    ] = None,
    everything: All = False,
    first: From = None,
    end: Annotated[
        int, typer.Option("--to", min=0, show_default=False, help="End before this offset.")
    ] = EVERYTHING,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Write events as JSON lines or Parquet. Exit code 1 if some could not be read."""
    if (first or 0) > end:
        raise typer.BadParameter(f"--from {first} is beyond --to {end}")
    chosen = _format_of(target, kind)
    seen = open_inspection(directory)
    selection = Selection(first, end, everything)
    if str(target) == "-":
        done = export(seen, selection, sys.stdout.buffer, chosen)
    else:
        done = _export_to_file(seen, selection, target, chosen, force=force)
    result = {"output": str(target), "format": chosen.value, **done._asdict()}
    if as_json and str(target) != "-":
        console.say_json(result)
    elif str(target) != "-":
        console.say(f"{done.events} events written to {target}")
    if done.unreadable:
        console.warn(f"{done.unreadable} events cannot be read; turnlane queue verify says why")
        raise typer.Exit(ExitCode.FAILED)


def _export_to_file(
    seen: InspectableQueue, selection: Selection, target: Path, kind: ExportFormat, *, force: bool
) -> ExportResult:
    with console.progress("exporting", seen.size) as advance:
        return export_to_file(seen, selection, target, kind, force=force, advance=advance)


def _format_of(target: Path, kind: ExportFormat | None) -> ExportFormat:
    if str(target) == "-":
        if kind is ExportFormat.PARQUET:
            raise typer.BadParameter("Parquet needs a file: give --output")
        return ExportFormat.JSONL
    if kind is not None:
        return kind
    if target.suffix in {".parquet", ".pq"}:
        return ExportFormat.PARQUET
    if target.suffix in {".jsonl", ".ndjson", ".json"}:
        return ExportFormat.JSONL
    raise typer.BadParameter(f"{target}: give --format jsonl or --format parquet")


@queue.command()
@reported
def ledger(directory: Directory, *, as_json: Json = False) -> None:
    """Show what became of every event. Exit code 1 if that does not add up."""
    seen = open_own_inspection(directory)
    account = seen.account()
    if as_json:
        about = {"path": str(directory), "name": seen.name, "running": seen.running}
        console.say_json({**about, **account.as_dict()})
    else:
        for line in ledger_lines(account):
            console.say(line)
    if not account.ledger.adds_up:
        raise typer.Exit(ExitCode.FAILED)
