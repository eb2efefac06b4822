"""What commands print: JSON for programs, tables for people, progress on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

# Rich is imported where something is laid out: most commands end sooner without it.

WIDTH_WITHOUT_TERMINAL = 120
Column = tuple[str, Literal["left", "right"]]
_GAP = 2
_LEAST = 8
"""Characters between columns, and those that the elastic column has at least."""
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
