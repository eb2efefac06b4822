"""``turnlane queue``: look into a queue's directory, also of a stopped or damaged queue."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer

from turnlane.cli import console
from turnlane.cli.console import (
    Column,
    Count,
    Endpoint,
    ExitCode,
    Json,
    OptionalConfig,
    TlsCa,
    TokenEnv,
    Yes,
    format_count,
    format_value,
    report_errors,
)
from turnlane.cli.targets import connect_nodes
from turnlane.queues import open_buffered_queue
from turnlane.queues.settings import QueueSettings
from turnlane.storage.export import (
    ExportFormat,
    convert_to_rows,
    export,
    export_to_file,
    read_next_events,
)
from turnlane.storage.inspection import (
    QueueRepair,
    RepairResult,
    is_repairable,
    open_inspection,
    open_own_inspection,
)
from turnlane.storage.verify import QueueAccount, VerificationReport
from turnlane.storage.walk import EVERYTHING, EventSlice, InspectableQueue, Selection
from turnlane.units import format_duration

# ── texts for people ──

PEEK_COLUMNS: list[Column] = [
    ("offset", "right"),
    ("time", "left"),
    ("key", "left"),
    ("value", "left"),
    ("settled", "left"),
]
_MILLISECONDS = len("2026-01-01T00:00:00.000")


def format_event_row(piece: EventSlice) -> Iterator[list[str]]:
    """Return the cells of a table's row for each event."""
    keep = [name for name in ("key", "timestamp") if name in piece.block.schema.names]
    values = piece.block.column("value").cast(pa.binary()).to_pylist()
    few = EventSlice(piece.offsets, piece.settled, piece.block.select(keep))
    for row, value in zip(convert_to_rows(few), values, strict=True):
        time = str(row.get("timestamp") or "")[:_MILLISECONDS].replace("T", " ")
        key = format_value(str(row.get("key") or "").encode())
        yield [str(row["offset"]), time, key, format_value(value), "yes" if piece.settled else "no"]


def explain_empty_peek(queue: InspectableQueue, first: int | None, *, everything: bool) -> str:
    """Say why there are no events to show."""
    if first is not None and first >= queue.end:
        return f"offset {first} is beyond the end: the queue ends before offset {queue.end}"
    there = "there are no events" if everything else "nothing is pending"
    return there if first is None else f"{there} from offset {first} on"


def format_summary(report: VerificationReport) -> str:
    """Return what the directory has, in one line."""
    chunks, frames = format_count(report.chunks, "chunk"), format_count(report.frames, "frame")
    events, size = format_count(report.events, "event"), format_count(report.bytes, "byte")
    opened = f", open in process {report.running}" if report.running is not None else ""
    return f"{report.name}: {chunks}, {frames}, {events} ({report.pending} pending), {size}{opened}"


def format_findings(report: VerificationReport) -> Iterator[str]:
    """Return two lines for each finding, then the total."""
    for finding in report.findings:
        label = "FAULT" if finding.fault else "note "
        yield f"{label} {finding.file}, byte {finding.byte}: {finding.what}"
        yield f"      → {finding.todo}"
    if report.clean:
        yield "clean"
    else:
        lost = f", {format_count(report.lost, 'event')} lost" if report.lost else ", no event lost"
        yield f"{format_count(len(report.faults), 'fault')}{lost}"


def format_repair(done: RepairResult | None, *, needed: bool) -> Iterator[str]:
    """Return what a repair has done; ``done`` is ``None`` if it was not run."""
    if done is None:
        yield "nothing was changed" if needed else "there is nothing to repair"
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in done.lost.items())
    lost = f"{sum(done.lost.values())} lost: {reasons}" if reasons else "none lost"
    yield f"repaired: {format_count(done.saved, 'pending event')} saved, {lost}"
    if done.recovered_acks:
        yield f"{format_count(done.recovered_acks, 'ack')} recovered from the damaged journal"
    for name in done.set_aside:
        yield f"kept: {name}"


def format_account(account: QueueAccount) -> Iterator[str]:
    """Return the ledger as a table and as a sum, then what it does not include."""
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
    help="Look into a queue's directory, also of a running or damaged queue; or ask nodes.",
)

_YEAR = 365 * 86_400
_STATS_COLUMNS: list[Column] = [
    ("queue", "left"),
    ("pending", "right"),
    ("full", "right"),
    ("in/s", "right"),
    ("out/s", "right"),
    ("drained in", "right"),
    ("dropped", "right"),
    ("trouble", "left"),
]


@queue.command()
@report_errors
def stats(
    config: OptionalConfig = None,
    *,
    endpoint: Endpoint = None,
    token_env: TokenEnv = None,
    tls_ca: TlsCa = None,
    as_json: Json = False,
) -> None:
    """Show how full the queues of running nodes are, their rates, and when they will be empty."""
    with connect_nodes(config, endpoint, token_env, tls_ca) as nodes:
        found = [(number, node.stats()) for number, node in enumerate(nodes)]
    rows = []
    for number, by_name in found:
        for name, each in sorted(by_name.items()):
            if as_json:
                console.say_json({"node": number, **each})
            else:
                rows.append([name if len(found) == 1 else f"{number}/{name}", *_format_stats(each)])
    if rows:
        console.say_table(_STATS_COLUMNS, rows, elastic="trouble")
    elif not as_json:
        console.say("there are no queues")


def _format_stats(stats: dict[str, Any]) -> list[str]:
    """Return the cells after the name. Rates are unknown in the first seconds of a node."""
    pending, rates = stats["ledger"]["pending"], (stats["rate_in"], stats["rate_out"])
    seconds = stats["drain_seconds"]
    if None in rates:
        drained = "unknown"
    elif seconds is None:
        drained = "never"
    else:
        drained = format_duration(round(seconds)) if seconds < _YEAR else "over a year"
    return [
        str(pending),
        f"{stats['utilization']:.0%}",
        *("" if rate is None else f"{rate:.1f}" for rate in rates),
        drained,
        str(sum(stats["ledger"]["dropped"].values())),
        stats["trouble"],
    ]


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
@report_errors
def peek(
    directory: Directory,
    *,
    count: Count = 10,
    first: From = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Show the next events that are not settled."""
    inspected = open_inspection(directory)
    pieces, unreadable = read_next_events(inspected, Selection(first, settled=everything), count)
    if as_json:
        for piece in pieces:
            for row in convert_to_rows(piece):
                console.say_json(row)
        if first is not None and first >= inspected.end:
            console.warn(explain_empty_peek(inspected, first, everything=everything))
    elif pieces:
        columns = PEEK_COLUMNS if everything else PEEK_COLUMNS[:-1]
        cells = [row for piece in pieces for row in format_event_row(piece)]
        console.say_table(columns, [row[: len(columns)] for row in cells], elastic="value")
    else:
        console.say(explain_empty_peek(inspected, first, everything=everything))
    if unreadable:
        console.warn(f"{unreadable} events among these cannot be read; turnlane queue verify")


@queue.command()
@report_errors
def verify(directory: Directory, *, as_json: Json = False) -> None:
    """Check every byte: name the file and byte of every fault. Exit code 1 if there are any."""
    inspected = open_inspection(directory)
    with console.show_progress("verifying", inspected.size) as advance:
        report = inspected.verify(advance)
    if as_json:
        console.say_json({"path": str(directory), **report.as_dict()})
    else:
        for line in [format_summary(report), *format_findings(report)]:
            console.say(line)
    if not report.clean:
        raise typer.Exit(ExitCode.FAILED)


@queue.command()
@report_errors
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
    with console.show_progress("verifying", size) as advance:
        report = repairing.plan(advance)
    needed = any(map(is_repairable, report.findings))
    if not as_json:
        for line in [format_summary(report), *format_findings(report)]:
            console.say(line)
    done = None
    if needed and not dry_run:
        if sys.stdin.isatty() and not yes:
            typer.confirm("Repair?", abort=True, err=True)
        with console.show_progress("repairing", size) as advance:
            done = repairing.run(advance)
    if as_json:
        result = {"path": str(directory), "dry_run": dry_run, "repaired": done is not None}
        found = [finding.as_dict() for finding in report.findings]
        outcome = done or RepairResult(saved=report.pending)
        console.say_json({**result, **outcome.as_dict(), "findings": found})
    else:
        for line in format_repair(done, needed=needed):
            console.say(line)


@queue.command(name="export")
@report_errors
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
    chosen = _choose_format(target, kind)
    inspected = open_inspection(directory)
    selection = Selection(first, end, everything)
    if str(target) == "-":
        done = export(inspected, selection, sys.stdout.buffer, chosen)
    else:
        with console.show_progress("exporting", inspected.size) as advance:
            done = export_to_file(
                inspected, selection, target, chosen, force=force, advance=advance
            )
    result = {"output": str(target), "format": chosen.value, **done._asdict()}
    if as_json and str(target) != "-":
        console.say_json(result)
    elif str(target) != "-":
        console.say(f"{done.events} events written to {target}")
    if done.unreadable:
        console.warn(f"{done.unreadable} events cannot be read; turnlane queue verify says why")
        raise typer.Exit(ExitCode.FAILED)


def _choose_format(target: Path, kind: ExportFormat | None) -> ExportFormat:
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


@queue.command(name="import")
@report_errors
def import_events(
    directory: Directory,
    target: Annotated[Path, typer.Argument(metavar="NEW", help="The new queue's directory.")],
    *,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Copy a directory's events, also FastQueue's, into a new queue.

    Exit code 1 if some could not be read.
    """
    if target.exists():
        raise typer.BadParameter(f"{target}: exists; give a directory that does not")
    inspected = open_inspection(directory)
    selection, events = Selection(settled=everything), 0
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    settings = QueueSettings.of(
        kind="disk", path=unfinished, name=target.name, max_bytes=1 << 62, durability="interval"
    )
    with console.show_progress("importing", inspected.size) as advance:
        with open_buffered_queue(settings) as copy:
            producer = copy.producer()
            for piece in inspected.slices(selection, advance):
                producer.publish_block(piece.block)
                events += len(piece.offsets)
        unfinished.rename(target)
    unreadable = inspected.unreadable(selection)
    if as_json:
        console.say_json({"output": str(target), "events": events, "unreadable": unreadable})
    else:
        console.say(f"{events} events copied to {target}")
    if unreadable:
        console.warn(f"{unreadable} events cannot be read; turnlane queue verify says why")
        raise typer.Exit(ExitCode.FAILED)


@queue.command()
@report_errors
def ledger(directory: Directory, *, as_json: Json = False) -> None:
    """Show what became of every event. Exit code 1 if that does not add up."""
    inspected = open_own_inspection(directory)
    account = inspected.account()
    if as_json:
        about = {"path": str(directory), "name": inspected.name, "running": inspected.running}
        console.say_json({**about, **account.as_dict()})
    else:
        for line in format_account(account):
            console.say(line)
    if not account.ledger.adds_up:
        raise typer.Exit(ExitCode.FAILED)
