"""The chunk at the log's end, open for writing: what goes there goes whole, or is cut off again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from time import perf_counter

from turnlane.queues.log.catalog import Chunk
from turnlane.queues.log.encoding import Group
from turnlane.queues.log.files import Disk

EARLY_BYTES = 1 << 20
"""From so much on the device is asked to begin at once: a sync that follows then takes less long.
"""


class Active:
    """The file that the log's one writer writes to, if there is one."""

    def __init__(self, disk: Disk, *, durable: bool, written: Callable[[Group], None]) -> None:
        self.chunk: Chunk | None = None
        self._disk = disk
        self._fd = -1
        self._durable = durable
        self._written = written
        self._uncut = False

    def take(self, chunk: Chunk, fd: int) -> None:
        """Write to this chunk from now on."""
        self.retire()
        self.chunk, self._fd = chunk, fd

    def retire(self) -> None:
        """Write no more to the chunk."""
        if self._fd >= 0:
            self._disk.close(self._fd)
        self.chunk, self._fd, self._uncut = None, -1, False

    def write(self, group: Group) -> None:
        """Write a group at the end. ``OSError``: none of it is in."""
        chunk = self.chunk
        if chunk is None or not group.size:
            return
        if self._uncut:
            self._cut_back(chunk)
        started = perf_counter()
        try:
            self._disk.write(self._fd, group.buffers, chunk.size)
        except OSError:
            self._failed(chunk)
            raise
        if self._durable and group.size >= EARLY_BYTES:
            self._disk.begin_sync(self._fd, chunk.size, group.size)
        group.seconds = perf_counter() - started
        self._wrote(group, chunk)

    def _failed(self, chunk: Chunk) -> None:
        self._uncut = True
        with contextlib.suppress(OSError):
            self._cut_back(chunk)

    def _cut_back(self, chunk: Chunk) -> None:
        """Cut off a write that failed; until that works nothing may be written after it."""
        self._disk.truncate(self._fd, chunk.size)
        self._uncut = False

    def _wrote(self, group: Group, chunk: Chunk) -> None:
        """A group is in the file: let readers see it."""
        for offset, byte in group.starts:
            chunk.mark(offset, chunk.size + byte)
        # Readers look at the log's end first: it must never promise what the size does not cover.
        chunk.size += group.size
        chunk.end = group.end
        self._written(group)

    def sync(self) -> None:
        """Return once the file's data is on the device."""
        self._disk.sync(self._fd)
