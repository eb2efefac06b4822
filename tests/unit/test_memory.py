"""Freed memory is used again, without new pages from the system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PAGES = """
import resource
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def again(use, times=50):
    use(), use()
    before = faults()
    for _ in range(times):
        use()
    return (faults() - before) / times
"""
BLOCKS = """
import turnlane
import numpy as np
import pyarrow as pa
def use():
    buffers = [pa.allocate_buffer(2 << 20) for _ in range(4)]
    for each in buffers:
        np.frombuffer(each, np.uint8)[::4096] = 1
    del each, buffers
    pa.default_memory_pool().release_unused()
print(again(use))
"""
C_CODE = """
from turnlane.memory import keep_freed_memory
keep_freed_memory()
def use():
    [bytearray(8 << 20) for _ in range(4)]
print(again(use))
"""
TOUCHED = {BLOCKS: 4 * 512, C_CODE: 4 * 2048}
"""Pages that each of them uses."""


def _faults(program: str, **variables: str) -> float:
    """Pages that the system has to hand out for each time that it is done again."""
    environment = {**os.environ, **variables}
    if not variables:
        environment.pop("MIMALLOC_PURGE_DECOMMITS", None)
    command = [sys.executable, "-c", PAGES + program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout)


@pytest.mark.parametrize("program", [BLOCKS, C_CODE], ids=["blocks", "what C code uses"])
def test_freed_memory_is_reused(program: str) -> None:
    assert _faults(program) < TOUCHED[program] / 20


def test_environment_variable_of_the_user_wins() -> None:
    # However large its pages are, there is one at least for each block.
    assert _faults(BLOCKS, MIMALLOC_PURGE_DECOMMITS="1") >= 4
