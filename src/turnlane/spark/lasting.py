"""What a Python process of Spark holds from call to call."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

DAEMONS: Final = {"pyspark.daemon", "turnlane.spark.daemon"}
"""The modules that Spark's Python processes run, those that are used again and again."""

_done: set[str] = set()
"""The kinds of calls that this process has had."""


@contextmanager
def lasting(kind: str) -> Iterator[None]:
    """A call of some kind. What there is after the first one, modules mostly, is there to stay.

    Spark has its Python processes look for garbage after every call, among all that they hold,
    which with so many modules takes longer than most calls themselves. What is known to stay is
    left out of that.
    """
    yield
    if kind not in _done and _is_sparks():
        _done.add(kind)
        gc.collect()
        gc.freeze()


def _is_sparks() -> bool:
    """Whether this process is one of those, and nobody's own."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name in DAEMONS
