"""What to do when a sync has failed: trust nothing but what can be read back.

The kernel may have dropped what it could not write and calls it clean, so a second sync would
succeed and mean nothing. The frames in doubt are read back, checked, and written to a new file;
those that do not hold are made anew from what is still in memory.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from turnlane.queues.log.catalog import Catalog, Chunk
from turnlane.queues.log.chunks import WINDOW, Flaw, Whole, chunk_name, scan, schema_frame
from turnlane.queues.log.columns import EMPTY
from turnlane.queues.log.files import Disk
from turnlane.queues.log.frames import Data
from turnlane.queues.log.quarantine import Quarantine

_log = logging.getLogger(__name__)

Lost = list[tuple[int, int]]


class Remade(NamedTuple):
    """A frame of the events ``first`` to ``end - 1``, made from what is in memory."""

    first: int
    end: int
    frame: list[Data]


Remake = Callable[[Chunk, int, int], Iterator[Remade]]
"""Makes a chunk's frames for a range of offsets again, in order, as far as it can."""


def rescue_chunk(
    chunk: Chunk,
    catalog: Catalog,
    disk: Disk,
    quarantine: Quarantine,
    *,
    queue_id: str,
    remake: Remake,
) -> tuple[Chunk, int, Lost]:
    """Move a chunk's unsynced frames to a synced chunk of their own, then cut the former.

    Returns the new chunk, its descriptor, and the offsets that could neither be read back nor
    made anew. Raises ``OSError`` with everything as it was; readers are not disturbed either way.
    """
    rescue = _Rescue(chunk, disk, quarantine, queue_id, remake)
    fd = rescue.run()
    saved = rescue.saved
    catalog.add(saved)
    if saved.first != chunk.first:
        chunk.cut()  # before the file is: a reader that finds bytes gone then knows why
        rescue.cut_former()
    _log.warning(
        "a sync failed; %d bytes of %s were written again to %s",
        saved.size,
        chunk.path.name,
        saved.path.name,
    )
    return saved, fd, rescue.lost


class _Rescue:
    def __init__(
        self, chunk: Chunk, disk: Disk, quarantine: Quarantine, queue_id: str, remake: Remake
    ) -> None:
        self._chunk = chunk
        self._disk = disk
        self._remake = remake
        self._quarantine = quarantine
        self.lost: Lost = []
        first = chunk.synced_end
        path = chunk.path.with_name(chunk_name(first))
        schema = chunk.schema or EMPTY
        self._frame = schema_frame(schema, first, queue_id)
        size = sum(len(piece) for piece in self._frame)
        self.saved = Chunk(first, path, size, chunk.end, schema, size)

    def run(self) -> int:
        """Fill the new file under a temporary name, sync it, give it its own."""
        saved = self.saved
        temporary = saved.path.with_name(saved.path.name + ".new")
        fd = self._disk.open(temporary, create=True)
        try:
            self._fill(fd)
            self._disk.sync(fd)
            self._keep_former()
            self._disk.rename(temporary, saved.path)
            self._disk.sync_directory(saved.path.parent)
        except OSError:
            self._give_up(fd, temporary)
            raise
        saved.synced_size, saved.synced_end = saved.size, saved.end
        return fd

    def _give_up(self, fd: int, temporary: Path) -> None:
        self._disk.close(fd)
        with contextlib.suppress(OSError):
            self._disk.unlink(temporary)

    def _fill(self, fd: int) -> None:
        self._disk.truncate(fd, 0)
        self._disk.write(fd, self._frame, 0)
        chunk = self._chunk
        source = self._disk.open(chunk.path, write=False)  # a new one: it sees what is there
        try:
            start = max(chunk.synced_size, chunk.data_start)
            for region in scan(self._disk, source, start, chunk.synced_end, size=chunk.size):
                if isinstance(region, Whole):
                    self._copy(source, fd, region)
                elif region.length:
                    self._keep_copy(source, region)
                    self._replace(fd, region)
        finally:
            self._disk.close(source)

    def _copy(self, source: int, fd: int, frame: Whole) -> None:
        saved = self.saved
        saved.mark(frame.header.first, saved.size)
        done, length = 0, frame.header.stored
        while done < length:
            piece = self._disk.read(source, min(WINDOW, length - done), frame.byte + done)
            if not len(piece):
                raise OSError(5, "the file became shorter while it was read")
            self._disk.write(fd, [piece], saved.size + done)
            done += len(piece)
        saved.size += length

    def _replace(self, fd: int, flaw: Flaw) -> None:
        """Write what the damaged frames held, if it is still known; otherwise it is lost."""
        chunk, saved = self._chunk, self.saved
        at = chunk.synced_end if flaw.first is None else flaw.first
        end = chunk.end if flaw.end is None else flaw.end
        for first, after, frame in self._remake(chunk, at, end):
            if at < first:
                self.lost.append((at, first))
            saved.mark(first, saved.size)
            self._disk.write(fd, frame, saved.size)
            saved.size += sum(len(piece) for piece in frame)
            at = after
        if at < end:
            self.lost.append((at, end))

    def _keep_copy(self, source: int, flaw: Flaw) -> None:
        chunk = self._chunk
        try:
            self._quarantine.copy(source, flaw.byte, flaw.length, chunk=chunk.first, kind="frame")
        except OSError as error:
            _log.warning("%s keeps bytes that could not be copied: %s", chunk.path, error)
            chunk.unsaved = True

    def _keep_former(self) -> None:
        """Where the new file takes the former's name, keep the former if it has unsaved bytes."""
        if self._chunk.unsaved and self.saved.first == self._chunk.first:
            self._quarantine.move(self._chunk.path)

    def cut_former(self) -> None:
        """Cut the former chunk back to what was synced; harmless if that fails."""
        chunk = self._chunk
        if chunk.unsaved:
            return
        try:
            fd = self._disk.open(chunk.path)
            try:
                self._disk.truncate(fd, chunk.size)
            finally:
                self._disk.close(fd)
        except OSError as error:
            # Readers stop where the next chunk begins, so the repeated frames are never seen.
            _log.warning("%s keeps frames that were written again: %s", chunk.path, error)
