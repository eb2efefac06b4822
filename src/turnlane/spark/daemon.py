"""The process from which Spark forks its Python processes, with turnlane imported already.

Spark's own daemon imports almost nothing, so each of its children would import everything again:
about a second of computing before the first row. Threads do not survive a fork, so nothing here may
start one: modules are imported, but not used.
"""

from __future__ import annotations

import gc
import importlib
import sys
from typing import Final

from pyspark.daemon import manager

from turnlane.memory import keep_freed_memory

SHARED: Final = ("turnlane.spark.source",)
"""The modules that every process needs."""


def main() -> None:
    """Run as ``pyspark.daemon``, whose argument is the module that children run."""
    keep_freed_memory()
    for module in (*sys.argv[1:2], *SHARED):
        importlib.import_module(module)
    # The garbage collector writes to objects, which would copy memory that children share.
    gc.collect()
    gc.freeze()
    manager()


if __name__ == "__main__":
    main()
