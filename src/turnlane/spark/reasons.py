"""Why something failed, in one line: Spark's errors are pages long, and begin with themselves."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # has none
from pyspark.errors import PySparkException

from turnlane.errors import TurnlaneError
from turnlane.spark.user_code import files

LONGEST: Final = 500
"""Characters of a reason."""

_QUERY: Final = "=== Streaming Query ==="
"""What Spark puts between what is wrong and a description of the query."""
_TRACEBACK: Final = "Traceback (most recent call last):"
_OURS: Final = "turnlane.errors."
_CALLING: Final = "An error occurred while calling"
"""How py4j begins, on a line of its own."""
_FRAME: Final = re.compile(r'\s+File "(.+)", line (\d+)')
_MARGIN: Final = re.compile(r"^\s*\| ?")
"""Of the lines of an exception group."""
_RUN: Final = re.compile(
    r"\[STREAM_FAILED\] Query \[id = [^]]*\] terminated with exception: "
    r"|Job aborted due to stage failure: Task .*? \(TID \d+\) \([^)]*\): "
)
"""Which run failed, and which of its tasks: each time other ones."""
_STATE: Final = re.compile(r"(\s+SQLSTATE: \w{5})+$")


def reason_of(error: BaseException) -> str:
    """What is wrong, the same in every run that fails with it.

    Of Spark's own errors what a Python function raised, or else their first line; of all others
    what they are, and where in the user's own module they came from.
    """
    text = str(error).partition(_QUERY)[0]
    if isinstance(error, TurnlaneError):
        found = _first(text)
    elif isinstance(error, PySparkException | Py4JError):
        found = _ours(text) or _raised_there(text) or _first(text)
    else:
        found = _raised_here(error)
    return (found or type(error).__name__)[:LONGEST]


def _ours(text: str) -> str | None:
    """What turnlane itself says, whatever was made of it on the way."""
    found = [line for line in _lines(text) if line.startswith(_OURS)]
    return found[-1].removeprefix(_OURS) if found else None


def _raised_there(text: str) -> str | None:
    """What ends the last traceback in a text, with its place if it has no message."""
    _, found, after = text.rpartition(_TRACEBACK)
    place = None
    for line in _lines(after) if found else ():
        if not line[0].isspace():
            return line if ":" in line else _placed(line, place)
        place = _FRAME.match(line) or place
    return None


def _placed(name: str, frame: re.Match[str] | None) -> str:
    return name if frame is None else f"{name} ({Path(frame[1]).name}:{frame[2]})"


def _first(text: str) -> str | None:
    lines = (line.strip().removeprefix(": ") for line in _lines(_RUN.sub("", text)))
    return next((line for line in lines if not line.startswith(_CALLING)), None)


def _lines(text: str) -> Iterator[str]:
    """Those that say something, without the frame that exception groups have."""
    for line in text.splitlines():
        plain = _STATE.sub("", _MARGIN.sub("", line))
        if plain.strip():
            yield plain


def _raised_here(error: BaseException) -> str:
    name = type(error).__name__
    words = _first(str(error))
    told = name if words is None else f"{name}: {words}"
    own = files()
    places = [each for each in traceback.extract_tb(error.__traceback__) if each.filename in own]
    return f"{told} ({Path(places[-1].filename).name}:{places[-1].lineno})" if places else told
