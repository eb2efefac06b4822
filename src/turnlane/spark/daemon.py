"""What Spark's Python processes are forked from: what all of them need is imported already.

Spark's own daemon imports next to nothing, so each of its children imports everything anew, about
a second of computing before the first row. Nothing here may start a thread that a child would
miss: modules are imported, and none is used.
"""

from __future__ import annotations

import gc
import importlib
import sys
from typing import Final

from pyspark.daemon import manager

from turnlane.runtime import keep_freed

SHARED: Final = ("turnlane.spark.source",)
"""The modules of ours that each of them needs, whatever it does."""


def main() -> None:
    """Be ``pyspark.daemon``, whose argument is the module that children run."""
    keep_freed()
    for module in (*sys.argv[1:2], *SHARED):
        importlib.import_module(module)
    # Left out of searches for garbage, which would write to, and so copy, what children share.
    gc.collect()
    gc.freeze()
    manager()


if __name__ == "__main__":
    main()
