"""``turnlane table``: create, inspect and correct queue tables in your databases."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from turnlane.cli import console
from turnlane.cli.console import Column, Count, Json, Yes, parse_moment, report_errors
from turnlane.cli.targets import (
    ShardTable,
    Urls,
    open_databases,
    open_sharded_database,
    open_tables,
    parse_urls,
)
from turnlane.errors import ConfigError, NotSupported
from turnlane.units import format_duration

if TYPE_CHECKING:
    from turnlane.table import Database
    from turnlane.table.queue import EventSelection, QueueStatus
    from turnlane.table.reshard import ReshardProgress

STATES: Final = ("to_be_fired", "fired", "acked", "dead")
STATUS_COLUMNS: Final[list[Column]] = [
    ("queue", "left"),
    ("shard", "left"),
    *((state, "right") for state in STATES),
    ("due", "right"),
    ("lag", "right"),
    ("window", "right"),
    ("leader", "left"),
]
PEEK_COLUMNS: Final[list[Column]] = [
    ("event_id", "right"),
    ("fires", "left"),
    ("state", "left"),
    ("attempts", "right"),
    ("name", "left"),
    ("row", "left"),
]
_APART: Final = {
    "fire_at",
    "event_id",
    "state",
    "attempts",
    "event_name",
    "keyspace_id",
    "priority",
}
"""Columns that have a cell of their own, or are of little use."""


def format_status_row(place: ShardTable, status: QueueStatus) -> list[str]:
    """Return the cells of a queue in one database."""
    counts = [str(status.counts[state]) for state in STATES]
    lag = format_duration(round(status.lag, 1)) if status.due else ""
    numbers = [str(status.due), lag, str(status.window)]
    return [place.queue.name, place.shard, *counts, *numbers, status.leader or "nobody"]


def format_event_row(row: dict[str, Any]) -> list[str]:
    """Return the cells of an event."""
    fires = datetime.fromtimestamp(row["fire_at"] / 1e9, UTC).isoformat(" ", "milliseconds")
    rest = [
        f"{name}={value}"
        for name, value in convert_row(row).items()
        if name not in _APART and value is not None
    ]
    place = [str(row["event_id"]), fires.removesuffix("+00:00"), row["state"]]
    return [*place, str(row["attempts"]), row["event_name"] or "", " ".join(rest)]


def convert_row(row: dict[str, Any]) -> dict[str, object]:
    """Return a row for JSON."""
    from turnlane.storage.export import convert_to_json

    return {name: convert_to_json(value) for name, value in row.items()}


table = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Queue tables: queues inside your own databases.",
)

Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue.")]
State = Annotated[
    list[str] | None,
    typer.Option(help="Only events in this state: to_be_fired, fired, acked or dead."),
]
Id = Annotated[list[int] | None, typer.Option("--id", help="Only the event with this event_id.")]
Name = Annotated[list[str] | None, typer.Option(help="Only the event with this event_name.")]
Key = Annotated[list[str] | None, typer.Option(help="Only events with this key.")]
Since = Annotated[
    str | None,
    typer.Option(help="Only events due since: a time in ISO 8601, 2h for ago, +2h for from now."),
]
Until = Annotated[str | None, typer.Option(help="Only events due before; the same forms.")]


@table.command()
@report_errors
def sql(
    statement: Annotated[
        str,
        typer.Argument(
            metavar="STATEMENT",
            help="CREATE, DROP or SHOW, of QUEUES or SCHEDULES; - reads it from stdin.",
        ),
    ],
    *,
    url: Urls = None,
    only_print: Annotated[
        bool,
        typer.Option("--print", help="Only print the SQL of a CREATE QUEUE."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a statement about queues or schedules, in every given database."""
    from turnlane.table.grammar import ScheduleStatement, parse

    text = sys.stdin.read() if statement == "-" else statement
    if only_print:
        with open_databases(url) as found:
            _print_ddl(_build_ddl(found[0][1], text), as_json=as_json)
        return
    what = "schedule" if isinstance(parse(text), ScheduleStatement) else "queue"
    with open_sharded_database(url) as all_of_them:
        names = all_of_them.sql(text)
    for name in names:
        if as_json:
            console.say_json({what: name})
        else:
            console.say(name)


@table.command()
@report_errors
def ddl(queue: Queue, *, url: Urls = None, as_json: Json = False) -> None:
    """Print the SQL that creates a queue as it is, for a migration tool."""
    with open_databases(url) as found:
        catalog = found[0][1].catalog
        _print_ddl(catalog.build_ddl(catalog.get_definition(queue)), as_json=as_json)


@table.command()
@report_errors
def status(
    queue: Annotated[
        str | None, typer.Argument(metavar="[QUEUE]", help="The queue; default: all.")
    ] = None,
    *,
    url: Urls = None,
    as_json: Json = False,
) -> None:
    """Show how many events are in each state, how late the first is, and who leads."""
    with open_tables(url, queue) as found:
        seen = [(place, place.queue.status()) for place in found]
    if as_json:
        for place, each in seen:
            console.say_json({"queue": place.queue.name, "shard": place.shard, **asdict(each)})
    elif seen:
        console.say_table(
            STATUS_COLUMNS, [format_status_row(*each) for each in seen], elastic="leader"
        )
    else:
        console.say("there are no queues")


@table.command()
@report_errors
def peek(
    queue: Queue,
    *,
    url: Urls = None,
    count: Count = 10,
    state: State = None,
    event_id: Id = None,
    name: Name = None,
    key: Key = None,
    since: Since = None,
    until: Until = None,
    as_json: Json = False,
) -> None:
    """Show events in the order in which they are due."""
    chosen = _make_selection(state, event_id, name, key, since, until)
    with open_tables(url, queue) as found:
        _check_key(found[0], key)
        rows = [row for place in found for row in place.queue.scan.read_events(chosen, count)]
    rows = sorted(rows, key=lambda row: (row["fire_at"], row["event_id"]))[:count]
    if as_json:
        for row in rows:
            console.say_json(convert_row(row))
    elif rows:
        console.say_table(PEEK_COLUMNS, [format_event_row(row) for row in rows], elastic="row")
    else:
        console.say("there are none")


@table.command()
@report_errors
def retry(
    queue: Queue,
    *,
    url: Urls = None,
    state: State = None,
    event_id: Id = None,
    name: Name = None,
    key: Key = None,
    since: Since = None,
    until: Until = None,
    as_json: Json = False,
) -> None:
    """Fire dead letters again, now; with --state fired, events without an ack."""
    chosen = _make_selection(state or ["dead"], event_id, name, key, since, until)
    with open_tables(url, queue) as found:
        _check_key(found[0], key)
        done = sum(place.queue.retry(place.queue.scan.read_ids(chosen)) for place in found)
    _print_count(queue, done, "to be fired again", as_json=as_json)


@table.command()
@report_errors
def cancel(
    queue: Queue,
    *,
    url: Urls = None,
    event_id: Id = None,
    name: Name = None,
    key: Key = None,
    since: Since = None,
    until: Until = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All events that were not fired.")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete events that were not fired; an event on its way to a receiver may still arrive."""
    if not everything and not any((event_id, name, key, since, until)):
        raise ConfigError("--id", "say which events, or --all")
    chosen = _make_selection(["to_be_fired"], event_id, name, key, since, until)
    with open_tables(url, queue) as found:
        _check_key(found[0], key)
        ids = [(place, place.queue.scan.read_ids(chosen)) for place in found]
        count = sum(len(each) for _, each in ids)
        if count and not yes and sys.stdin.isatty():
            typer.confirm(
                f"Delete {console.format_count(count, 'event')} of {queue}?", abort=True, err=True
            )
        done = sum(place.queue.cancel(each) for place, each in ids)
    _print_count(queue, done, "cancelled", as_json=as_json)


@table.command()
@report_errors
def reshard(
    queue: Queue,
    *,
    url: Urls = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RANGE=URL",
            help="A new shard, again for more; none: continue an interrupted reshard.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Split or merge shards while events come and fire; after a kill, run it again."""
    from turnlane.table.sharded import connect_shards

    with connect_shards(parse_urls(url)) as databases_of_it:
        sharded = databases_of_it.queue(queue)
        printer = _ProgressPrinter(as_json=as_json)
        moved = (
            sharded.reshard(parse_urls(to), printer.print)
            if to
            else sharded.resume_reshard(printer.print)
        )
        shards = sharded.map.shards
    if moved is None:
        raise NotSupported("no reshard was interrupted: name the new shards with --to RANGE=URL")
    if as_json:
        now = [{"range": str(each.key_range), "url": each.address} for each in shards]
        console.say_json({"queue": queue, "moved": moved, "shards": now})
    else:
        console.say(f"{console.format_count(moved, 'event')} moved; the shards of {queue}:")
        for each in shards:
            console.say(f"  {each}")


class _ProgressPrinter:
    """Prints the steps of a reshard."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._step = ""

    def print(self, progress: ReshardProgress) -> None:
        if progress.step == self._step:
            return
        self._step = progress.step
        if self._as_json:
            console.say_json({"step": str(progress.step), "moved": progress.moved})
        else:
            console.warn(
                f"{progress.step}, {console.format_count(progress.moved, 'event')} moved until now"
            )


# ── selections ───────────────────────────────────────────────────────────────────────────────────


def _make_selection(
    states: list[str] | None,
    ids: list[int] | None,
    names: list[str] | None,
    keys: list[str] | None,
    *due: str | None,
) -> EventSelection:
    from turnlane.table.queue import EventSelection

    since, until = map(_parse_time, ("--since", "--until"), due)
    for state in states or ():
        if state not in STATES:
            raise ConfigError("--state", f"is one of {', '.join(STATES)}, not {state!r}")
    return EventSelection(
        states=tuple(states) if states else None,
        ids=tuple(ids) if ids else None,
        names=tuple(names) if names else None,
        keys=tuple(keys) if keys else None,
        fire_from=since,
        fire_until=until,
    )


def _check_key(place: ShardTable, keys: list[str] | None) -> None:
    if keys and place.queue.definition.shard_by is None:
        raise ConfigError("--key", f"{place.queue.name!r} has no SHARD BY column")


def _parse_time(option: str, text: str | None) -> int | None:
    from turnlane.table.queue import convert_to_nanoseconds

    found = parse_moment(option, text)
    return None if found is None else convert_to_nanoseconds(found)


# ── printing ─────────────────────────────────────────────────────────────────────────────────────


def _build_ddl(database: Database, statement: str) -> list[str]:
    try:
        return database.ddl(statement)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--print") from None


def _print_ddl(statements: list[str], *, as_json: bool) -> None:
    for statement in statements:
        if as_json:
            console.say_json({"statement": statement})
        else:
            console.say(f"{statement};\n")


def _print_count(queue: str, count: int, what: str, *, as_json: bool) -> None:
    if as_json:
        console.say_json({"queue": queue, "events": count})
    else:
        console.say(f"{console.format_count(count, 'event')} {what}")
