"""Who has a queue open, found out without touching its lock.

Trying the lock, even for a moment, could make the process fail that is just opening the queue. So
the kernel's table of locks is asked instead. Where that cannot be read, nobody seems to hold it:
then a chunk that is just being written looks like one with a torn end.
"""

from __future__ import annotations

import os
from pathlib import Path

from turnlane.queues.log.directory import LOCK

_LOCKS = Path("/proc/locks")


def holder(directory: Path) -> int | None:
    """The process that has the queue open, as far as the kernel tells."""
    try:
        lock = directory / LOCK
        status = lock.stat()
        named = lock.read_text(errors="replace").strip()
        table = _LOCKS.read_text()
    except OSError:
        return None
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    for line in table.splitlines():
        fields = line.split()
        if fields[1:2] != ["FLOCK"] or len(fields) < 6:
            continue
        where, _, inode = fields[5].rpartition(":")
        # Some file systems have another device number here than stat() gives: then the process
        # that the lock file names has to be the one that the kernel names.
        if inode == str(status.st_ino) and (where == device or fields[4] == named):
            return int(fields[4])
    return None
