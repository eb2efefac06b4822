"""Is what a Python process of Spark holds left out of searches for garbage, and only there?"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc, importlib.machinery, sys
from turnlane.spark.session import freeze_gc_after
sys.modules["__main__"].__spec__ = importlib.machinery.ModuleSpec({name!r}, None)
counts = []
for kind in ("read", "read", "write"):
    with freeze_gc_after(kind):
        held = [[] for _ in range(1000)]
        counts.append(held)
    print(gc.get_freeze_count())
"""


def frozen(name: str) -> list[int]:
    """How many objects are left out after each of three calls, in a process of this name."""
    program = PROGRAM.format(name=name)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.parametrize("name", ["pyspark.daemon", "turnlane.spark.daemon"])
def test_objects_are_frozen_after_the_first_call_of_each_kind(name: str) -> None:
    first, again, other = frozen(name)
    assert first > 1000
    assert again == first
    assert other > again


@pytest.mark.parametrize("name", ["turnlane", "pyspark"])
def test_nothing_is_frozen_in_other_processes(name: str) -> None:
    assert frozen(name) == [0, 0, 0]
