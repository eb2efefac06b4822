"""``turnlane migrate``: convert the configurations of metrics-governor and rsyslog."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnlane.cli import console
from turnlane.cli.console import ExitCode, report_errors

if TYPE_CHECKING:
    from turnlane.migrate.draft import Draft

migrate = typer.Typer(
    no_args_is_help=True,
    help="Convert the configuration of another program.",
    rich_markup_mode=None,
)

Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write; - is stdout.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")]

_STDOUT = Path("-")


@migrate.command("metrics-governor")
@report_errors
def convert_metrics_governor(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="metrics-governor's YAML, or a file with its flags."),
    ] = None,
    *,
    flags: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Flags of its command line; they win over the file."),
    ] = None,
    output: Output = _STDOUT,
    force: Force = False,
) -> None:
    """Convert metrics-governor's queue, from its YAML, its flags, or both.

    The YAML goes to stdout. Settings without a counterpart are listed on stderr, with what to do.
    Exit codes: 0 all settings are converted, 1 some have no counterpart, 2 wrong usage or the
    output exists, 78 the file cannot be read.

    Example: turnlane migrate metrics-governor --flags "-queue-type disk" -o turnlane.yaml
    """
    from turnlane.config import read_text
    from turnlane.migrate.metrics_governor import convert_settings, read_entries, read_flags

    if file is None and flags is None:
        raise typer.BadParameter("give a FILE, or --flags")
    _check_target(output, force=force)
    entries = {} if file is None else read_entries(read_text(file), str(file))
    if flags is not None:
        entries |= read_flags(flags, "--flags")
    name = "--flags" if file is None else str(file)
    _write(convert_settings(entries, name), name, output)


@migrate.command("rsyslog")
@report_errors
def convert_rsyslog(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An rsyslog configuration.")],
    *,
    output: Output = _STDOUT,
    force: Force = False,
) -> None:
    """Convert an rsyslog configuration: inputs, queues, filters and actions.

    The YAML goes to stdout. Statements and parameters without a counterpart are listed on stderr,
    with their lines and what to do. Included files are not read. Exit codes: 0 everything is
    converted, 1 something has no counterpart, 2 wrong usage or the output exists, 78 the file
    cannot be read.

    Example: turnlane migrate rsyslog /etc/rsyslog.conf -o turnlane.yaml
    """
    from turnlane.config import read_text
    from turnlane.migrate.rsyslog import convert_text

    _check_target(output, force=force)
    _write(convert_text(read_text(file), str(file)), str(file), output)


def _check_target(output: Path, *, force: bool) -> None:
    if output != _STDOUT and output.exists() and not force:
        raise typer.BadParameter(f"{output} exists; choose another name, or give --force")


def _write(draft: Draft, name: str, output: Path) -> None:
    """Write the YAML; list the findings. Exit code 1 if a setting has no counterpart."""
    from turnlane.migrate.draft import Verdict

    text = draft.render()
    if output == _STDOUT:
        typer.echo(text, nl=False)
        sys.stdout.flush()  # before the findings, if both go to one terminal
    else:
        output.write_text(text, encoding="utf-8")
    for each in sorted(draft.findings, key=lambda each: each.origin.line or 0):
        line = "" if each.origin.line is None else f":{each.origin.line}"
        console.warn(f"{name}{line}: {each}", prefix="")
    counts = Counter(each.verdict for each in draft.findings)
    where = "" if output == _STDOUT else f"{output} written; next: turnlane validate {output}; "
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    console.warn(f"{where}{told or 'every setting has a counterpart'}")
    if counts[Verdict.MISSING]:
        raise typer.Exit(ExitCode.FAILED)
