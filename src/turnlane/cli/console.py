"""What commands print: JSON for programs, tables for people, progress on stderr."""

from __future__ import annotations

import enum
import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, ParamSpec

import typer

from turnlane.errors import Bug, ConfigError, RetryLater, TurnlaneError
from turnlane.logs import JsonLineFormatter, TerminalFormatter
from turnlane.units import parse_duration

if TYPE_CHECKING:
    from rich.progress import Progress

# ── failure ──
# From errors to exit codes and one line on stderr: no tracebacks for what users can put right.

P = ParamSpec("P")


class ExitCode(enum.IntEnum):
    """What scripts can rely on; usage errors (2) are the parser's."""

    FAILED = 1
    TEMPORARY = 75
    CONFIG = 78
    BROKEN_PIPE = 141
    """As the shell reports a program that SIGPIPE has ended."""


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """Run the command and print its errors in one line; a closed pipe is no error."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:
            _silence_stdout()
            raise typer.Exit(ExitCode.BROKEN_PIPE) from None
        except Bug:
            raise
        except (TurnlaneError, OSError) as error:
            typer.echo(f"turnlane: {_message(error)}", err=True)
            raise typer.Exit(_code(error)) from None

    return run


def _silence_stdout() -> None:
    """Discard the buffered output: otherwise Python complains about it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _message(error: TurnlaneError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _code(error: TurnlaneError | OSError) -> ExitCode:
    if isinstance(error, RetryLater):
        return ExitCode.TEMPORARY
    return ExitCode.CONFIG if isinstance(error, ConfigError) else ExitCode.FAILED


# ── logs ──
# The options ``--log-level`` and ``--log-format``, and logging to stderr as they say.


class LogFormat(enum.StrEnum):
    """The form of log lines."""

    TEXT = "text"
    JSON = "json"


class LogLevel(enum.StrEnum):
    """The lowest level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def log_to_stderr(level: LogLevel, form: LogFormat) -> None:
    """Write the log records of this process to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLineFormatter() if form is LogFormat.JSON else TerminalFormatter())
    logging.basicConfig(level=level.value.upper(), handlers=[handler])
    if level is not LogLevel.DEBUG:
        for name in ("uvicorn", "py4j"):  # these log every start and stop at level INFO
            logging.getLogger(name).setLevel(logging.WARNING)


# ── moments ──
# Moments as people write them: a time, or a duration before or after now.


def moment(option: str, text: str | None) -> datetime | None:
    """A moment: itself, ``2h`` ago, or ``+2h`` from now. Without a zone it is UTC.

    Raises ``ConfigError``, which names the option.
    """
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        try:
            span = timedelta(seconds=parse_duration(text.removeprefix("+")))
        except ValueError:
            message = "is a time such as 2026-01-31T12:00, or how long ago, such as 2h"
            raise ConfigError(option, f"{message}: not {text!r}") from None
        return datetime.now(UTC) + (span if text.startswith("+") else -span)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


# ── options ──
# The arguments and options that several commands have, each with the same words everywhere.

# ── the configuration, and the nodes ─────────────────────────────────────────────────────────────

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The configuration, a YAML file.")
]
OptionalConfig = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="The configuration, a YAML file.")
]
Endpoint = Annotated[
    str | None, typer.Option(help="The nodes, turnlane://host:port,…; default: what CONFIG says.")
]
TokenEnv = Annotated[
    str | None, typer.Option(help="Without a CONFIG: the environment variable with the token.")
]
TlsCa = Annotated[
    Path | None, typer.Option(help="Without a CONFIG: the certificates to trust, for TLS.")
]

# ── printing and logging ─────────────────────────────────────────────────────────────────────────

Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
Count = Annotated[int, typer.Option("--count", "-n", min=1, help="How many events.")]
Level = Annotated[LogLevel, typer.Option(help="What is logged.")]
Form = Annotated[LogFormat, typer.Option(help="How it is logged.")]

# ── questions ────────────────────────────────────────────────────────────────────────────────────

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


# Rich is imported where something is laid out: most commands end sooner without it.

WIDTH_WITHOUT_TERMINAL = 120
Column = tuple[str, Literal["left", "right"]]
_GAP = 2
_LEAST = 8
"""Characters between columns, and the least width of the elastic column."""
_LONGEST = 1000
"""Characters of a value that are laid out at all: no terminal is wider."""


def say_json(value: object) -> None:
    """One JSON object on one line of stdout."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def say(text: str) -> None:
    """A line on stdout."""
    typer.echo(text)


def warn(text: str) -> None:
    """A line on stderr."""
    typer.echo(f"turnlane: {text}", err=True)


def say_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, elastic: str) -> None:
    """A table, cut to the terminal's width; columns are a title and ``left`` or ``right``.

    The column ``elastic`` gets what the others leave; they are cut only if that is too little.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, width=None if known else WIDTH_WITHOUT_TERMINAL)
    titles = [title for title, _ in columns]
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, cells)) for cells in zip(titles, *rows, strict=True)]
    at = titles.index(elastic)
    room = console.width - sum(widths[:at] + widths[at + 1 :]) - _GAP * (len(columns) - 1)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for title, side in columns:
        most = max(room, _LEAST) if title == elastic else None
        table.add_column(title, justify=side, no_wrap=True, overflow="ellipsis", max_width=most)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def counted(number: int, noun: str) -> str:
    """``1 event``, ``2 events``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(text: str) -> str:
    """A text that moves no cursor and ends no line: what events and peers say may hold anything."""
    text = text[:_LONGEST]
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )


def readable(value: bytes | None) -> str:
    """A value for people: as text if it is printable, else in hex."""
    if value is None:
        return ""
    piece = value[:_LONGEST]
    try:
        text = piece.decode(errors="strict" if len(piece) == len(value) else "ignore")
    except UnicodeDecodeError:
        return piece.hex()
    shown = text.replace("\\", "\\\\") if any(sign in text for sign in "\n\r\t") else text
    shown = shown.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return shown if shown.isprintable() else piece.hex()


@contextmanager
def progress(label: str, total: int, *, of_events: bool = False) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if that is a terminal, in bytes or in events.

    Yields what moves it on.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    bar = _bar(of_events=of_events)
    with bar:
        task = bar.add_task(label, total=total)
        yield lambda size: bar.advance(task, size)


def _bar(*, of_events: bool) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn() if of_events else DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
