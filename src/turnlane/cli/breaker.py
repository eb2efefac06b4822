"""``turnlane breaker``: how the destinations of actions are, and closing a breaker by hand."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from turnlane.cli import output
from turnlane.cli.failure import reported
from turnlane.cli.nodes import reached
from turnlane.cli.options import Endpoint, Json, OptionalConfig, TlsCa, TokenEnv
from turnlane.quantities import format_duration

breaker = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="The circuit breakers of actions: which destinations are away.",
)

_COLUMNS: Final[list[output.Column]] = [
    ("action", "left"),
    ("state", "left"),
    ("failures", "right"),
    ("next try", "right"),
    ("error", "left"),
]


@breaker.command(name="list")
@reported
def list_breakers(
    config: OptionalConfig = None,
    *,
    endpoint: Endpoint = None,
    token_env: TokenEnv = None,
    tls_ca: TlsCa = None,
    as_json: Json = False,
) -> None:
    """List the breakers that tasks have asked since the node was started."""
    with reached(config, endpoint, token_env, tls_ca) as nodes:
        found = {action: each for node in nodes[::-1] for action, each in node.breakers().items()}
    if as_json:
        for action, each in sorted(found.items()):
            output.say_json({"action": action, **each})
    elif found:
        rows = [_cells(action, each) for action, each in sorted(found.items())]
        output.say_table(_COLUMNS, rows, elastic="error")
    else:
        output.say("no task has delivered anything yet")


@breaker.command()
@reported
def reset(
    action: Annotated[str, typer.Argument(metavar="ACTION", help="The action.")],
    config: OptionalConfig = None,
    *,
    endpoint: Endpoint = None,
    token_env: TokenEnv = None,
    tls_ca: TlsCa = None,
) -> None:
    """Close a breaker: its destination is back, and there is no need to wait for a probe."""
    with reached(config, endpoint, token_env, tls_ca) as nodes:
        having = [node for node in nodes if action in node.breakers([action])]
        for node in having or nodes[:1]:
            node.reset_breaker(action)
    output.say(f"{action}: closed")


def _cells(action: str, each: dict[str, Any]) -> list[str]:
    wait = format_duration(round(each["wait"], 1)) if each["wait"] else ""
    return [action, each["state"], str(each["failures"]), wait, each["error"] or ""]
