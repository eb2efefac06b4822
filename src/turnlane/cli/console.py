"""Output of the commands: JSON for programs, tables for people, errors and progress on stderr.

Rich is imported where a table or a progress bar is drawn: most commands end sooner without it.
"""

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
from turnlane.logs import JsonLineFormatter, TerminalFormatter, write_to_stderr
from turnlane.units import parse_duration

if TYPE_CHECKING:
    from rich.progress import Progress

# ── errors ──
# Errors become an exit code and one line on stderr: no tracebacks for mistakes of users.

P = ParamSpec("P")


class ExitCode(enum.IntEnum):
    """Exit codes that scripts can rely on. The parser of the command line has 2, wrong usage."""

    FAILED = 1
    TEMPORARY = 75
    CONFIG = 78
    BROKEN_PIPE = 141
    """The code that a shell reports for a program that SIGPIPE has ended."""


def report_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Make a command print its errors in one line. A closed pipe is not an error."""

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
            warn(_get_message(error), logging.ERROR)
            raise typer.Exit(_get_code(error)) from None

    return run


def _silence_stdout() -> None:
    """Discard the buffered output: otherwise Python complains about it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _get_message(error: TurnlaneError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _get_code(error: TurnlaneError | OSError) -> ExitCode:
    if isinstance(error, RetryLater):
        return ExitCode.TEMPORARY
    return ExitCode.CONFIG if isinstance(error, ConfigError) else ExitCode.FAILED


# ── logs ──


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


_json_messages: JsonLineFormatter | None = None
"""Formats the messages on stderr if the log is JSON, so that stderr has no other lines."""


def log_to_stderr(level: LogLevel, form: LogFormat) -> None:
    """Write the log records of this process to stderr, and messages in the same form."""
    global _json_messages  # noqa: PLW0603 - one stderr for the whole process
    handler = logging.StreamHandler()
    _json_messages = JsonLineFormatter() if form is LogFormat.JSON else None
    handler.setFormatter(_json_messages or TerminalFormatter())
    logging.basicConfig(level=level.value.upper(), handlers=[handler])
    logging.captureWarnings(capture=True)
    if level is not LogLevel.DEBUG:
        for name in ("uvicorn", "py4j"):  # these log every start and stop at level INFO
            logging.getLogger(name).setLevel(logging.WARNING)


# ── times ──


def parse_moment(option: str, text: str | None) -> datetime | None:
    """Parse a time in ISO 8601 (UTC without a zone), ``2h`` for ago, or ``+2h`` for from now.

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
            allowed = "a time such as 2026-01-31T12:00, or how long ago, such as 2h"
            raise ConfigError(option, f"must be {allowed}, not {text!r}") from None
        return datetime.now(UTC) + (span if text.startswith("+") else -span)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


# ── options of several commands ──────────────────────────────────────────────────────────────────

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The configuration, a YAML file.")
]
OptionalConfig = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="The configuration, a YAML file.")
]
Endpoint = Annotated[
    str | None, typer.Option(help="The nodes, turnlane://host:port,…; default: those of CONFIG.")
]
TokenEnv = Annotated[
    str | None, typer.Option(help="Without a CONFIG: the environment variable with the token.")
]
TlsCa = Annotated[
    Path | None, typer.Option(help="Without a CONFIG: the certificates to trust, for TLS.")
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
Count = Annotated[int, typer.Option("--count", "-n", min=1, help="How many events.")]
Level = Annotated[LogLevel, typer.Option(help="The lowest level that is logged.")]
Form = Annotated[LogFormat, typer.Option(help="The form of log lines.")]

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

# ── printing ─────────────────────────────────────────────────────────────────────────────────────

WIDTH_WITHOUT_TERMINAL = 120
Column = tuple[str, Literal["left", "right"]]
_GAP = 2
_MIN_WIDTH = 8
"""Characters between columns, and the least width of the elastic column."""
_MAX_LENGTH = 1000
"""The most characters of a value that are printed: no terminal is wider."""


def say_json(value: object) -> None:
    """Print one JSON object on one line of stdout."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def say(text: str) -> None:
    """Print a line on stdout."""
    typer.echo(text)


def warn(text: str, level: int = logging.INFO, prefix: str = "turnlane: ") -> None:
    """Print a line on stderr; an object with this level if the log is JSON."""
    if _json_messages is None:
        typer.echo(f"{prefix}{text}", err=True)
    else:
        record = logging.LogRecord("turnlane.cli", level, __file__, 0, text, None, None)
        typer.echo(_json_messages.format(record), err=True)


def pass_line_on(line: bytes) -> None:
    """Write a line of another process to stderr; if the log is JSON and the line is not, in JSON.

    Safe on a thread that still runs when Python exits. Raises ``OSError``.
    """
    if _json_messages is not None and not line.startswith(b"{"):
        text = line.decode(errors="replace").rstrip()
        record = logging.LogRecord("spark.stderr", logging.WARNING, __file__, 0, text, None, None)
        line = _json_messages.format(record).encode()
    write_to_stderr(line)


def say_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, elastic: str) -> None:
    """Print a table, cut to the terminal's width; columns are a title and ``left`` or ``right``.

    The column ``elastic`` gets the width that the other columns leave. They are cut only if it
    would be too narrow.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, width=None if known else WIDTH_WITHOUT_TERMINAL)
    titles = [title for title, _ in columns]
    rows = [[escape_unprintable(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, cells)) for cells in zip(titles, *rows, strict=True)]
    at = titles.index(elastic)
    room = console.width - sum(widths[:at] + widths[at + 1 :]) - _GAP * (len(columns) - 1)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for title, side in columns:
        most = max(room, _MIN_WIDTH) if title == elastic else None
        table.add_column(title, justify=side, no_wrap=True, overflow="ellipsis", max_width=most)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def format_count(number: int, noun: str) -> str:
    """Return ``1 event`` or ``2 events``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def escape_unprintable(text: str) -> str:
    """Escape characters that move the cursor or end the line: events may have any character."""
    text = text[:_MAX_LENGTH]
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )


def format_value(value: bytes | None) -> str:
    """Return a value for people: as text if it is printable, else in hex."""
    if value is None:
        return ""
    piece = value[:_MAX_LENGTH]
    try:
        text = piece.decode(errors="strict" if len(piece) == len(value) else "ignore")
    except UnicodeDecodeError:
        return piece.hex()
    shown = text.replace("\\", "\\\\") if any(sign in text for sign in "\n\r\t") else text
    shown = shown.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return shown if shown.isprintable() else piece.hex()


@contextmanager
def show_progress(
    label: str, total: int, *, of_events: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr, in bytes or in events, if stderr is a terminal.

    Yields a function that advances it.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    bar = _make_bar(of_events=of_events)
    with bar:
        task = bar.add_task(label, total=total)
        yield lambda size: bar.advance(task, size)


def _make_bar(*, of_events: bool) -> Progress:
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
