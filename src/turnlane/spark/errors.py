"""Describes failures in one line. Spark's errors are pages long, with the cause at the end.

The description is the same in every run that fails for the same reason, so that a lane that fails
again and again is reported once.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # has none
from pyspark.errors import PySparkException

from turnlane.errors import TurnlaneError
from turnlane.spark.transforms import get_user_files

MAX_REASON_LENGTH: Final = 500

_QUERY: Final = "=== Streaming Query ==="
"""The line of Spark between the error and a description of the query."""
_TRACEBACK: Final = "Traceback (most recent call last):"
_OWN_ERRORS: Final = "turnlane.errors."
_CALLING: Final = "An error occurred while calling"
"""The first line of py4j's errors."""
_FRAME: Final = re.compile(r'\s+File "(.+)", line (\d+)')
_GROUP_MARGIN: Final = re.compile(r"^\s*\| ?")
"""The margin of the lines of an exception group."""
_RUN: Final = re.compile(
    r"\[STREAM_FAILED\] Query \[id = [^]]*\] terminated with exception: "
    r"|Job aborted due to stage failure: Task .*? \(TID \d+\) \([^)]*\): "
)
"""The ids of the run and of the task, which differ each time."""
_SQL_STATE: Final = re.compile(
    r"(?:\s+SQLSTATE: \w{5})+(?:(?:;| \()\s*line (\d+),? pos (\d+)[;)]?)?$"
)
"""A code for programs, and the position in an expression."""


def describe_failure(error: BaseException) -> str:
    """Return a description of the error in one line.

    For an error of Spark this is the exception of a Python function in it, or else its first line.
    For any other error it is the error itself, and the line of the user's module that raised it.
    """
    text = str(error).partition(_QUERY)[0]
    if isinstance(error, TurnlaneError):
        found = _get_first_line(text)
    elif isinstance(error, PySparkException | Py4JError):
        own = [line for line in _list_lines(text) if line.startswith(_OWN_ERRORS)]
        found = own[-1].removeprefix(_OWN_ERRORS) if own else _find_last_exception(text)
        found = found or _get_first_line(text)
    else:
        message = _get_first_line(str(error))
        found = ": ".join([type(error).__name__] + ([message] if message else []))
        stack = traceback.extract_tb(error.__traceback__)
        frames = [each for each in stack if each.filename in get_user_files()]
        if frames:
            found += f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
    return (found or type(error).__name__)[:MAX_REASON_LENGTH]


def has_own_error(error: BaseException) -> bool:
    """Whether an error of Spark comes from turnlane itself: a node is away, or refuses."""
    own = ("turnlane.", "pyarrow._flight.")
    return any(line.startswith(own) for line in _list_lines(str(error)))


def _find_last_exception(text: str) -> str | None:
    """Return the exception of the last traceback in a text; its line, if it has no message."""
    _, found, after = text.rpartition(_TRACEBACK)
    frame = None
    for line in _list_lines(after) if found else ():
        if not line[0].isspace():
            if ":" in line or frame is None:
                return line
            return f"{line} ({Path(frame[1]).name}:{frame[2]})"
        frame = _FRAME.match(line) or frame
    return None


def _get_first_line(text: str) -> str | None:
    lines = (line.strip().removeprefix(": ") for line in _list_lines(_RUN.sub("", text)))
    return next((line for line in lines if not line.startswith(_CALLING)), None)


def _list_lines(text: str) -> Iterator[str]:
    """Yield lines that are not empty, without the margin of exception groups."""
    for line in text.splitlines():
        plain = _SQL_STATE.sub(_keep_position, _GROUP_MARGIN.sub("", line))
        if plain.strip():
            yield plain


def _keep_position(found: re.Match[str]) -> str:
    return f" (line {found[1]}, position {found[2]})" if found[1] else ""
