"""``turnlane dlq`` and ``turnlane breaker``: dead letters and circuit breakers of actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from turnlane.cli import console
from turnlane.cli.console import (
    Endpoint,
    Json,
    OptionalConfig,
    TlsCa,
    TokenEnv,
    Yes,
    parse_moment,
    report_errors,
)
from turnlane.cli.targets import connect_nodes
from turnlane.errors import ConfigError, NoSuchQueue
from turnlane.units import format_duration

if TYPE_CHECKING:
    from turnlane.client.dead_letters import DeadLetters, LetterFilter, SelectedLetters
    from turnlane.client.node_client import RemoteNode

# ── turnlane breaker ─────────────────────────────────────────────────────────────────────────────

breaker = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="The circuit breakers of actions: which destinations are down.",
)

_BREAKER_COLUMNS: Final[list[console.Column]] = [
    ("action", "left"),
    ("state", "left"),
    ("failures", "right"),
    ("next try", "right"),
    ("error", "left"),
]


@breaker.command(name="list")
@report_errors
def list_breakers(
    config: OptionalConfig = None,
    *,
    endpoint: Endpoint = None,
    token_env: TokenEnv = None,
    tls_ca: TlsCa = None,
    as_json: Json = False,
) -> None:
    """List the breakers that tasks have used since the node was started."""
    with connect_nodes(config, endpoint, token_env, tls_ca) as nodes:
        found = {action: each for node in nodes[::-1] for action, each in node.breakers().items()}
    if as_json:
        for action, each in sorted(found.items()):
            console.say_json({"action": action, **each})
    elif found:
        rows = [_format_breaker(action, each) for action, each in sorted(found.items())]
        console.say_table(_BREAKER_COLUMNS, rows, elastic="error")
    else:
        console.say("no task has delivered anything yet")


@breaker.command()
@report_errors
def reset(
    action: Annotated[str, typer.Argument(metavar="ACTION", help="The action.")],
    config: OptionalConfig = None,
    *,
    endpoint: Endpoint = None,
    token_env: TokenEnv = None,
    tls_ca: TlsCa = None,
) -> None:
    """Close a breaker by hand, without waiting for a probe: its destination is back."""
    with connect_nodes(config, endpoint, token_env, tls_ca) as nodes:
        having = [node for node in nodes if action in node.breakers([action])]
        for node in having or nodes[:1]:
            node.reset_breaker(action)
    console.say(f"{action}: closed")


def _format_breaker(action: str, each: dict[str, Any]) -> list[str]:
    wait = format_duration(round(each["wait"], 1)) if each["wait"] else ""
    return [action, each["state"], str(each["failures"]), wait, each["error"] or ""]


dlq = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="The dead letters of actions: events that can never be delivered, and why.",
)

_COLUMNS: Final[list[console.Column]] = [
    ("action", "left"),
    ("reason", "left"),
    ("events", "right"),
    ("first", "left"),
    ("last", "left"),
]

_SECONDS: Final = len("2026-01-01T00:00:00")

Action = Annotated[
    str,
    typer.Argument(metavar="ACTION", help="The action; main for events that could not be parsed."),
]
Reason = Annotated[
    str | None, typer.Option(help="Only letters with this reason, the class of an error.")
]
Since = Annotated[
    str | None, typer.Option(help="Only letters since: a time in ISO 8601, or 2h for ago.")
]
Until = Annotated[str | None, typer.Option(help="Only letters before; the same forms.")]
Key = Annotated[str | None, typer.Option(help="Only letters with this key.")]
Where = Annotated[
    str | None,
    typer.Option(help="Only letters for which this is true: a condition in SQLite's SQL."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most this many; the oldest ones.")]


@dlq.command(name="list")
@report_errors
def list_letters(
    config: OptionalConfig = None,
    *,
    endpoint: Endpoint = None,
    token_env: TokenEnv = None,
    tls_ca: TlsCa = None,
    as_json: Json = False,
) -> None:
    """List the dead letters by action and reason."""
    from turnlane.client.dead_letters import DeadLetters
    from turnlane.storage.export import convert_to_json

    with connect_nodes(config, endpoint, token_env, tls_ca) as nodes:
        found = [
            summary
            for node in nodes
            for letters in DeadLetters.all(node)
            for summary in letters.summaries()
        ]
    if as_json:
        for summary in found:
            console.say_json(convert_to_json(asdict(summary)))
    elif found:
        rows = [
            [
                each.action,
                each.reason or "",
                str(each.events),
                _format_time(each.first),
                _format_time(each.last),
            ]
            for each in found
        ]
        console.say_table(_COLUMNS, rows, elastic="reason")
    else:
        console.say("there are no dead letters")


@dlq.command()
@report_errors
def show(
    action: Action,
    config: OptionalConfig = None,
    *,
    endpoint: Endpoint = None,
    token_env: TokenEnv = None,
    tls_ca: TlsCa = None,
    reason: Reason = None,
    since: Since = None,
    until: Until = None,
    key: Key = None,
    where: Where = None,
    limit: Limit = 10,
    as_json: Json = False,
) -> None:
    """Show dead letters, the oldest first: the event, and why it is dead."""
    choice = _make_filter(reason, since, until, key, where)
    rows: list[dict[str, Any]] = []
    with connect_nodes(config, endpoint, token_env, tls_ca) as nodes:
        for letters in _find_letters(nodes, action):
            wanted = None if limit is None else limit - len(rows)
            for piece in letters.chosen(choice, wanted):
                rows += _convert_rows(piece)
    if as_json:
        for row in rows:
            console.say_json(row)
        return
    for row in rows:
        for line in _format_letter(row):
            console.say(line)
    if not rows:
        console.say("there are none")


@dlq.command()
@report_errors
def replay(
    action: Action,
    config: OptionalConfig = None,
    *,
    endpoint: Endpoint = None,
    token_env: TokenEnv = None,
    tls_ca: TlsCa = None,
    to: Annotated[
        str | None, typer.Option(help="The queue that they go to; default: the action's own.")
    ] = None,
    reason: Reason = None,
    since: Since = None,
    until: Until = None,
    key: Key = None,
    where: Where = None,
    limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Send dead letters again: the events go back into the action's queue.

    If a process is killed, no event is lost and none is sent twice; run the same command again.
    """
    choice = _make_filter(reason, since, until, key, where)
    target = to or action

    def process(letters: DeadLetters, left: int | None, advance: Callable[[int], None]) -> int:
        return letters.replay(choice, target, left, advance)

    with connect_nodes(config, endpoint, token_env, tls_ca) as nodes:
        if to is None and action not in nodes[0].queues():
            message = f"action {action!r} has no queue of its own: name the queue"
            raise ConfigError("--to", message)
        done = _process_all(_find_letters(nodes, action), "sending again", limit, process)
    if as_json:
        console.say_json({"action": action, "to": target, "events": done})
    else:
        console.say(f"{_format_letters(done)} sent again, into queue {target}")


@dlq.command()
@report_errors
def purge(
    action: Action,
    config: OptionalConfig = None,
    *,
    endpoint: Endpoint = None,
    token_env: TokenEnv = None,
    tls_ca: TlsCa = None,
    reason: Reason = None,
    since: Since = None,
    until: Until = None,
    key: Key = None,
    where: Where = None,
    limit: Limit = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete dead letters for good; the node logs which, when and by whom."""
    choice = _make_filter(reason, since, until, key, where)

    def process(letters: DeadLetters, left: int | None, advance: Callable[[int], None]) -> int:
        return letters.purge(choice, left, advance)

    with connect_nodes(config, endpoint, token_env, tls_ca) as nodes:
        letters = _find_letters(nodes, action)
        count = _count(letters, choice, limit)
        if count and not yes:
            question = f"Throw {_format_letters(count)} of {action} away for good ({choice})?"
            typer.confirm(question, abort=True, err=True)
        done = _process_all(letters, "throwing away", limit, process) if count else 0
    if as_json:
        console.say_json({"action": action, "events": done})
    else:
        console.say(f"{_format_letters(done)} thrown away")


def _find_letters(nodes: list[RemoteNode], action: str) -> list[DeadLetters]:
    from turnlane.client.dead_letters import SUFFIX, DeadLetters
    from turnlane.validation import suggest

    found = [
        letters for node in nodes for letters in DeadLetters.all(node) if letters.action == action
    ]
    if not found:
        known = [letters.action for letters in DeadLetters.all(nodes[0])]
        hint = suggest(action, known) or f"; there are those of {', '.join(known) or 'nobody'}"
        raise NoSuchQueue(f"there is no queue {action}{SUFFIX}{hint}")
    return found


def _process_all(
    every: list[DeadLetters],
    label: str,
    limit: int | None,
    do: Callable[[DeadLetters, int | None, Callable[[int], None]], int],
) -> int:
    total = sum(letters.count() for letters in every)
    done = 0
    with console.show_progress(label, min(total, limit or total), of_events=True) as advance:
        for letters in every:
            left = None if limit is None else limit - done
            if left != 0:
                done += do(letters, left, advance)
    return done


def _count(every: list[DeadLetters], choice: LetterFilter, limit: int | None) -> int:
    pieces = (piece for letters in every for piece in letters.chosen(choice))
    return sum(1 for _ in islice(chain.from_iterable(each.offsets for each in pieces), limit))


# ── printing ─────────────────────────────────────────────────────────────────────────────────────


def _make_filter(
    reason: str | None, since: str | None, until: str | None, key: str | None, where: str | None
) -> LetterFilter:
    from turnlane.client.dead_letters import LetterFilter

    return LetterFilter(
        reason, parse_moment("--since", since), parse_moment("--until", until), key, where
    )


def _convert_rows(piece: SelectedLetters) -> Iterator[dict[str, Any]]:
    """Return letters for JSON, like ``turnlane queue peek``."""
    import numpy as np

    from turnlane.storage.export import SETTLED_COLUMN, convert_to_rows
    from turnlane.storage.walk import EventSlice

    for row in convert_to_rows(
        EventSlice(np.array(piece.offsets), settled=False, block=piece.letters)
    ):
        del row[SETTLED_COLUMN]
        yield row


def _format_letters(count: int) -> str:
    return console.format_count(count, "dead letter")


def _format_time(moment: datetime | None) -> str:
    return "" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S")


def _format_letter(row: dict[str, Any]) -> list[str]:
    """Return the lines of a letter for people: the reason first, then the event."""
    time = str(row.get("dead_time") or "")[:_SECONDS].replace("T", " ")
    head = f"{row['offset']}  {time}  {row.get('dead_reason') or ''}"
    why = str(row.get("dead_error") or row.get("parse_error") or "")
    rest = [
        f"  {name}: {console.escape_unprintable(str(value))}"
        for name, value in row.items()
        if value is not None and name != "offset" and not name.startswith("dead_")
    ]
    return [head.rstrip(), f"  {console.escape_unprintable(why)}", *rest]
