"""The root of the command tree."""

from __future__ import annotations

from typing import Annotated

import typer

from turnlane import __version__
from turnlane.cli.dead_letters import breaker, dlq
from turnlane.cli.migrate import migrate
from turnlane.cli.pipeline_tools import graph, init, try_cases
from turnlane.cli.queue import queue
from turnlane.cli.run import pipeline, run
from turnlane.cli.serve import serve, validate
from turnlane.cli.table import table

app = typer.Typer(
    name="turnlane",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.command()(init)
app.command()(validate)
app.command()(graph)
app.command("test")(try_cases)
app.command()(run)
app.command()(pipeline)
app.command()(serve)
app.add_typer(queue, name="queue")
app.add_typer(dlq, name="dlq")
app.add_typer(breaker, name="breaker")
app.add_typer(table, name="table")
app.add_typer(migrate, name="migrate")


def _show_version(wanted: bool) -> None:  # noqa: FBT001  typer calls it so
    if wanted:
        typer.echo(f"turnlane {__version__}")
        raise typer.Exit


@app.callback()
def turnlane(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Durable event queues, and pipelines on Spark that deliver their events.

    Exit codes: 0 success, 1 failed or faults found, 2 wrong usage, 75 try again later, 78 wrong
    settings.
    """
    del version
