"""Modules of the user's own, in which transforms are: imported once, and again at a reload."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from pyspark import cloudpickle


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
