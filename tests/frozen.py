"""Stop a process as a hung machine would, and wait until it has really stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

PATIENCE = 30.0


def freeze_process(pid: int) -> None:
    """Send SIGSTOP and wait until no thread of the process runs: the signal is asynchronous."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE
    while not all(_is_stopped(stat) for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _is_stopped(stat: Path) -> bool:
    # The state follows the name, which is in parentheses and may contain anything.
    return stat.read_text().rpartition(")")[2].split()[0] == "T"
