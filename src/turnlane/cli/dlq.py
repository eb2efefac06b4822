"""``turnlane dlq``: the dead letters of actions, looked at, sent again, thrown away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from turnlane.cli import output
from turnlane.cli.failure import reported
from turnlane.cli.moments import moment
from turnlane.cli.nodes import reached
from turnlane.cli.options import Endpoint, Json, OptionalConfig, TlsCa, TokenEnv, Yes
from turnlane.errors import ConfigError, NoSuchQueue

if TYPE_CHECKING:
    from turnlane.client.dead_letters import Chosen, DeadLetters
    from turnlane.client.letters import Choice
    from turnlane.client.remote import RemoteNode

dlq = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="The dead letters of actions: what can never be delivered, and why.",
)

_COLUMNS: Final[list[output.Column]] = [
    ("action", "left"),
    ("reason", "left"),
    ("events", "right"),
    ("first", "left"),
    ("last", "left"),
]

_SECONDS: Final = len("2026-01-01T00:00:00")

Action = Annotated[
    str, typer.Argument(metavar="ACTION", help="The action; main for what could not be parsed.")
]
Reason = Annotated[
    str | None, typer.Option(help="Only those with this reason, the class of an error.")
]
Since = Annotated[
    str | None, typer.Option(help="Only those given up since: a time in ISO 8601, or 2h for ago.")
]
Until = Annotated[str | None, typer.Option(help="Only those given up before; likewise.")]
Key = Annotated[str | None, typer.Option(help="Only those with this key.")]
Where = Annotated[
    str | None, typer.Option(help="Only those for which this is true: SQL, as SQLite has it.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many; the oldest ones.")]


@dlq.command(name="list")
@reported
def list_letters(
    config: OptionalConfig = None,
    *,
    endpoint: Endpoint = None,
    token_env: TokenEnv = None,
    tls_ca: TlsCa = None,
    as_json: Json = False,
) -> None:
    """List what there is, by action and reason."""
    from turnlane.client.dead_letters import DeadLetters

    with reached(config, endpoint, token_env, tls_ca) as nodes:
        found = [
            summary
            for node in nodes
            for letters in DeadLetters.all(node)
            for summary in letters.summaries()
        ]
    if as_json:
        for summary in found:
            output.say_json(_plain(asdict(summary)))
    elif found:
        rows = [
            [each.action, each.reason or "", str(each.events), _time(each.first), _time(each.last)]
            for each in found
        ]
        output.say_table(_COLUMNS, rows, elastic="reason")
    else:
        output.say("there are no dead letters")


@dlq.command()
@reported
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
    """Show dead letters, the oldest first: the event, and why it was given up."""
    choice = _choice(reason, since, until, key, where)
    rows: list[dict[str, Any]] = []
    with reached(config, endpoint, token_env, tls_ca) as nodes:
        for letters in _of_action(nodes, action):
            wanted = None if limit is None else limit - len(rows)
            for piece in letters.chosen(choice, wanted):
                rows += _rows(piece)
    if as_json:
        for row in rows:
            output.say_json(row)
        return
    for row in rows:
        for line in _lines(row):
            output.say(line)
    if not rows:
        output.say("there are none")


@dlq.command()
@reported
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

    Whatever is killed meanwhile, no event is lost, and none is sent twice; go on with the same
    command.
    """
    choice = _choice(reason, since, until, key, where)
    target = to or action

    def one(letters: DeadLetters, left: int | None, advance: Callable[[int], None]) -> int:
        return letters.replay(choice, target, left, advance)

    with reached(config, endpoint, token_env, tls_ca) as nodes:
        if to is None and action not in nodes[0].queues():
            message = f"action {action!r} has no queue of its own: say to which they go"
            raise ConfigError("--to", message)
        done = _each(_of_action(nodes, action), "sending again", limit, one)
    if as_json:
        output.say_json({"action": action, "to": target, "events": done})
    else:
        output.say(f"{_letters(done)} sent again, into queue {target}")


@dlq.command()
@reported
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
    """Throw dead letters away for good; the node writes down what, when and by whom."""
    choice = _choice(reason, since, until, key, where)

    def one(letters: DeadLetters, left: int | None, advance: Callable[[int], None]) -> int:
        return letters.purge(choice, left, advance)

    with reached(config, endpoint, token_env, tls_ca) as nodes:
        letters = _of_action(nodes, action)
        count = _counted(letters, choice, limit)
        if count and not yes:
            question = f"Throw {_letters(count)} of {action} away for good ({choice})?"
            typer.confirm(question, abort=True, err=True)
        done = _each(letters, "throwing away", limit, one) if count else 0
    if as_json:
        output.say_json({"action": action, "events": done})
    else:
        output.say(f"{_letters(done)} thrown away")


def _of_action(nodes: list[RemoteNode], action: str) -> list[DeadLetters]:
    from turnlane.client.dead_letters import SUFFIX, DeadLetters
    from turnlane.problems import did_you_mean

    found = [
        letters for node in nodes for letters in DeadLetters.all(node) if letters.action == action
    ]
    if not found:
        known = [letters.action for letters in DeadLetters.all(nodes[0])]
        hint = did_you_mean(action, known) or f"; there are those of {', '.join(known) or 'nobody'}"
        raise NoSuchQueue(f"there is no queue {action}{SUFFIX}{hint}")
    return found


def _each(
    every: list[DeadLetters],
    label: str,
    limit: int | None,
    do: Callable[[DeadLetters, int | None, Callable[[int], None]], int],
) -> int:
    total = sum(letters.count() for letters in every)
    done = 0
    with output.progress(label, min(total, limit or total), of_events=True) as advance:
        for letters in every:
            left = None if limit is None else limit - done
            if left != 0:
                done += do(letters, left, advance)
    return done


def _counted(every: list[DeadLetters], choice: Choice, limit: int | None) -> int:
    pieces = (piece for letters in every for piece in letters.chosen(choice))
    return sum(1 for _ in islice(chain.from_iterable(each.offsets for each in pieces), limit))


# ── words ────────────────────────────────────────────────────────────────────────────────────────


def _choice(
    reason: str | None, since: str | None, until: str | None, key: str | None, where: str | None
) -> Choice:
    from turnlane.client.letters import Choice

    return Choice(reason, moment("--since", since), moment("--until", until), key, where)


def _plain(value: object) -> object:
    from turnlane.queues.inspection.rows import plain

    return plain(value)


def _rows(piece: Chosen) -> Iterator[dict[str, Any]]:
    """Letters as JSON has them, in the way of ``turnlane queue peek``."""
    import numpy as np

    from turnlane.queues.inspection.rows import SETTLED, rows
    from turnlane.queues.inspection.slices import Slice

    for row in rows(Slice(np.array(piece.offsets), settled=False, block=piece.letters)):
        del row[SETTLED]
        yield row


def _letters(count: int) -> str:
    return output.counted(count, "dead letter")


def _time(moment: datetime | None) -> str:
    return "" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S")


def _lines(row: dict[str, Any]) -> list[str]:
    """A letter for people: the reason first, then what there is of the event."""
    time = str(row.get("dead_time") or "")[:_SECONDS].replace("T", " ")
    head = f"{row['offset']}  {time}  {row.get('dead_reason') or ''}"
    why = str(row.get("dead_error") or row.get("parse_error") or "")
    rest = [
        f"  {name}: {output.printable(str(value))}"
        for name, value in row.items()
        if value is not None and name != "offset" and not name.startswith("dead_")
    ]
    return [head.rstrip(), f"  {output.printable(why)}", *rest]
