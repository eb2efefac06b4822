"""Directories that this process needs as long as it lives, and that are gone after it.

``atexit`` alone is not enough: a process that ends at once, threads or not (``os._exit``), never
comes there, and has to clear up itself.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Final

_made: Final[list[Path]] = []


def scratch(prefix: str) -> Path:
    """A new directory, for this process only."""
    _made.append(Path(tempfile.mkdtemp(prefix=prefix)))
    return _made[-1]


@atexit.register
def clear() -> None:
    """Delete all of them; nobody uses them any more."""
    while _made:
        shutil.rmtree(_made.pop(), ignore_errors=True)
