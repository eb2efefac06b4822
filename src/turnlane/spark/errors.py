"""Why something failed, in one line: Spark's errors are pages long, and begin with themselves."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Final, NamedTuple

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # has none
from pyspark import cloudpickle
from pyspark.errors import PySparkException

from turnlane.errors import TurnlaneError

# ── user_code ──
# Modules of the user's own, in which transforms are: imported once, and again at a reload.


class _Stamp(NamedTuple):
    """What tells a file from what it was before."""

    changed_ns: int
    size: int


_seen: dict[str, _Stamp | None] = {}
"""The modules imported here, as their files were; everybody's, like ``sys.modules``."""


def module_of(name: str) -> ModuleType:
    """The module, as it was when it was first asked for, or last renewed. Raises what it raises."""
    found = importlib.import_module(name)
    _seen.setdefault(name, _stamp(found))
    return found


def files() -> set[str]:
    """Where the modules imported here are."""
    found = (getattr(sys.modules.get(name), "__file__", None) for name in _seen)
    return {file for file in found if file is not None}


def changed() -> list[str]:
    """The modules whose files are no longer what was imported."""
    return [
        name
        for name, stamp in list(_seen.items())
        if name in sys.modules and _stamp(sys.modules[name]) != stamp
    ]


@contextmanager
def renewed() -> Iterator[None]:
    """Have modules that have changed imported again by whoever asks for them next.

    If what is done with them raises, they are what they were: a lane that runs on, and is started
    again, is to find the code that it had.
    """
    before = {name: (_forgotten(name), _seen.pop(name)) for name in changed()}
    importlib.invalidate_caches()
    try:
        yield
    except BaseException:
        for name, (module, stamp) in before.items():
            sys.modules[name], _seen[name] = module, stamp
        raise


def _forgotten(name: str) -> ModuleType:
    # Spark's processes may have imported it, too, and stay: from now on functions are sent to them
    # as they are, not by name.
    cloudpickle.register_pickle_by_value(sys.modules[name])  # type: ignore[no-untyped-call]
    return sys.modules.pop(name)


def _stamp(module: ModuleType) -> _Stamp | None:
    """``None`` if there is no such file any more, or the module is of none."""
    file = getattr(module, "__file__", None)
    try:
        found = None if file is None else Path(file).stat()
    except OSError:
        found = None
    if found is None:
        return None
    return _Stamp(found.st_mtime_ns, found.st_size)


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
