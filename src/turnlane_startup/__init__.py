"""Runs when Python starts, by ``turnlane_startup.pth``: lets Spark find ``format("turnlane")``.

Spark looks for data sources with the ``python3`` of PATH. For ``.venv/bin/python job.py`` that is
another Python, which has no turnlane, and the job need not import turnlane. So in a virtual
environment that is not activated, the first import of pyspark sets ``PYSPARK_PYTHON`` to this
Python, unless the user has chosen one. In all other processes nothing happens.
"""

import os
import sys

__all__: list[str] = []

_CHOSEN_BY_USER = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYSPARK_GATEWAY_PORT")
"""The last one is set in programs of ``spark-submit``, which has settings of its own for Python."""


class _PysparkImport:
    """Python asks it first for every module; it waits for pyspark and finds nothing itself."""

    @classmethod
    def find_spec(cls, name: str, _path: object = None, _target: object = None) -> None:
        if name == "pyspark":
            sys.meta_path.remove(cls)
            _set_python()


def _set_python() -> None:
    import shutil

    found = shutil.which("python3") or ""
    is_activated = os.path.dirname(found) == os.path.dirname(sys.executable)  # noqa: PTH120 - a quick import
    if not is_activated and not any(name in os.environ for name in _CHOSEN_BY_USER):
        os.environ["PYSPARK_PYTHON"] = sys.executable


if sys.prefix != sys.base_prefix:
    sys.meta_path.insert(0, _PysparkImport)
