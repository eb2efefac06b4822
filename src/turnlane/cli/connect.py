"""``turnlane validate --connect``: whether the destinations of a configuration can be reached."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import typer

from turnlane.cli.failure import ExitCode
from turnlane.errors import ConfigError, TurnlaneError

if TYPE_CHECKING:
    from turnlane.config import Config
    from turnlane.outputs.contract import OutputSettings


def check_outputs(config: Config) -> int:
    """Try all outputs at once, without delivering anything; how many there are.

    Those that fail are printed with their place in the file and the reason, and the command ends.
    """
    outputs = list(_outputs(config))
    with ThreadPoolExecutor(max(1, len(outputs))) as pool:
        problems = list(pool.map(_problem, (settings for _, settings in outputs)))
    failed = False
    for (place, _), problem in zip(outputs, problems, strict=True):
        if problem is not None:
            failed = True
            typer.echo(str(config.placed(ConfigError(place, problem))), err=True)
    if failed:
        raise typer.Exit(ExitCode.FAILED)
    return len(outputs)


def _outputs(config: Config) -> Iterator[tuple[str, OutputSettings]]:
    """The outputs of all actions, each with its place in the configuration."""
    for number, action in enumerate(config.actions):
        yield f"actions[{number}].output", action.output
        failover = action.delivery.failover
        if failover is not None:
            yield f"actions[{number}].delivery.failover.output", failover.output


def _problem(settings: OutputSettings) -> str | None:
    """Why an output's destination cannot be used now."""
    from turnlane.outputs import registry

    try:
        with registry.load(settings.type)(settings) as output:
            output.check()
    except TurnlaneError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - an output of somebody's own may raise anything
        return f"{type(error).__name__}: {error}"
    return None
