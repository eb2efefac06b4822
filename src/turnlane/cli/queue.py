"""``turnlane queue``: look into a queue's directory, also of a stopped or damaged queue."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from turnlane.cli import output
from turnlane.cli.failure import ExitCode, reported
from turnlane.cli.options import Count, Json, Yes
from turnlane.cli.queue_texts import (
    PEEK_COLUMNS,
    finding_lines,
    ledger_lines,
    nothing_to_peek,
    peek_cells,
    repaired_lines,
    summary,
)
from turnlane.queues.inspection import inspect, inspect_own
from turnlane.queues.inspection.export import Exported, Format, export, export_to_file
from turnlane.queues.inspection.peek import peek as next_events
from turnlane.queues.inspection.repair import Repair, Repaired, is_repairable
from turnlane.queues.inspection.rows import rows
from turnlane.queues.inspection.slices import EVERYTHING, Inspected, Selection

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
    seen = inspect(directory)
    pieces, unreadable = next_events(seen, Selection(first, settled=everything), count)
    if as_json:
        for piece in pieces:
            for row in rows(piece):
                output.say_json(row)
        if first is not None and first >= seen.end:
            output.warn(nothing_to_peek(seen, first, everything=everything))
    elif pieces:
        columns = PEEK_COLUMNS if everything else PEEK_COLUMNS[:-1]
        cells = [row for piece in pieces for row in peek_cells(piece)]
        output.say_table(columns, [row[: len(columns)] for row in cells], elastic="value")
    else:
        output.say(nothing_to_peek(seen, first, everything=everything))
    if unreadable:
        output.warn(f"{unreadable} events among these cannot be read; turnlane queue verify")


@queue.command()
@reported
def verify(directory: Directory, *, as_json: Json = False) -> None:
    """Check every byte: name the file and byte of every fault. Exit code 1 if there are any."""
    seen = inspect(directory)
    with output.progress("verifying", seen.size) as advance:
        report = seen.verify(advance)
    if as_json:
        output.say_json({"path": str(directory), **report.as_dict()})
    else:
        for line in [summary(report), *finding_lines(report)]:
            output.say(line)
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
    size = inspect_own(directory).size
    repairing = Repair(directory)
    with output.progress("verifying", size) as advance:
        report = repairing.plan(advance)
    needed = any(map(is_repairable, report.findings))
    if not as_json:
        for line in [summary(report), *finding_lines(report)]:
            output.say(line)
    done = None
    if needed and not dry_run:
        if sys.stdin.isatty() and not yes:
            typer.confirm("Repair?", abort=True, err=True)
        with output.progress("repairing", size) as advance:
            done = repairing.run(advance)
    if as_json:
        result = {"path": str(directory), "dry_run": dry_run, "repaired": done is not None}
        found = [finding.as_dict() for finding in report.findings]
        outcome = done or Repaired(saved=report.pending)
        output.say_json({**result, **outcome.as_dict(), "findings": found})
    else:
        for line in repaired_lines(done, needed=needed):
            output.say(line)


@queue.command(name="export")
@reported
def export_events(
    directory: Directory,
    *,
    target: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write; - for the standard output.")
    ] = Path("-"),
    kind: Annotated[
        Format | None, typer.Option("--format", help="Default: by the file's extension.")
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
    seen = inspect(directory)
    selection = Selection(first, end, everything)
    if str(target) == "-":
        done = export(seen, selection, sys.stdout.buffer, chosen)
    else:
        done = _export_to_file(seen, selection, target, chosen, force=force)
    result = {"output": str(target), "format": chosen.value, **done._asdict()}
    if as_json and str(target) != "-":
        output.say_json(result)
    elif str(target) != "-":
        output.say(f"{done.events} events written to {target}")
    if done.unreadable:
        output.warn(f"{done.unreadable} events cannot be read; turnlane queue verify says why")
        raise typer.Exit(ExitCode.FAILED)


def _export_to_file(
    seen: Inspected, selection: Selection, target: Path, kind: Format, *, force: bool
) -> Exported:
    with output.progress("exporting", seen.size) as advance:
        return export_to_file(seen, selection, target, kind, force=force, advance=advance)


def _format_of(target: Path, kind: Format | None) -> Format:
    if str(target) == "-":
        if kind is Format.PARQUET:
            raise typer.BadParameter("Parquet needs a file: give --output")
        return Format.JSONL
    if kind is not None:
        return kind
    if target.suffix in {".parquet", ".pq"}:
        return Format.PARQUET
    if target.suffix in {".jsonl", ".ndjson", ".json"}:
        return Format.JSONL
    raise typer.BadParameter(f"{target}: give --format jsonl or --format parquet")


@queue.command()
@reported
def ledger(directory: Directory, *, as_json: Json = False) -> None:
    """Show what became of every event. Exit code 1 if that does not add up."""
    seen = inspect_own(directory)
    account = seen.account()
    if as_json:
        about = {"path": str(directory), "name": seen.name, "running": seen.running}
        output.say_json({**about, **account.as_dict()})
    else:
        for line in ledger_lines(account):
            output.say(line)
    if not account.ledger.adds_up:
        raise typer.Exit(ExitCode.FAILED)
