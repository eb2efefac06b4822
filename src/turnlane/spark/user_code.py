"""The user's own modules, which contain transforms: imported once, and again after a reload.

A reload of the pipeline must use the new code, but only if the new pipeline starts. A lane of the
old pipeline that is started again has to find the code that it had. The state is global, like
``sys.modules``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from pyspark import cloudpickle


class _FileVersion(NamedTuple):
    """Shows whether a file has changed."""

    changed_ns: int
    size: int


_versions: dict[str, _FileVersion | None] = {}
"""The modules imported here, with the versions of their files."""


def import_user_module(name: str) -> ModuleType:
    """Return the module as it was imported first, or after a reload. Raises its own errors."""
    module = importlib.import_module(name)
    _versions.setdefault(name, _get_version(module))
    return module


def get_user_files() -> set[str]:
    """Return the files of the modules imported here."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in _versions)
    return {file for file in files if file is not None}


def find_changed_modules() -> list[str]:
    """Return the modules whose files have changed since they were imported."""
    return [
        name
        for name, version in list(_versions.items())
        if name in sys.modules and _get_version(sys.modules[name]) != version
    ]


@contextmanager
def reload_changed_modules() -> Iterator[None]:
    """Have changed modules imported again by the next call of :func:`import_user_module`.

    If the body raises, the modules are restored: the lanes that continue need their old code.
    """
    before = {name: (_unload(name), _versions.pop(name)) for name in find_changed_modules()}
    importlib.invalidate_caches()
    try:
        yield
    except BaseException:
        for name, (module, version) in before.items():
            sys.modules[name], _versions[name] = module, version
        raise


def _unload(name: str) -> ModuleType:
    # Spark's Python processes live on and may have imported the old module: functions of the new
    # one are sent to them by value, not by name.
    cloudpickle.register_pickle_by_value(sys.modules[name])  # type: ignore[no-untyped-call]
    return sys.modules.pop(name)


def _get_version(module: ModuleType) -> _FileVersion | None:
    """Return ``None`` if the module has no file, or the file is gone."""
    file = getattr(module, "__file__", None)
    try:
        found = None if file is None else Path(file).stat()
    except OSError:
        found = None
    return None if found is None else _FileVersion(found.st_mtime_ns, found.st_size)
