"""The log: blocks of events appended to chunk files, by one thread, and read by others.

Everything that is written here is either whole or cut off again. ``append`` writes, ``sync`` makes
durable, ``rescue`` saves what a failed sync has left in doubt.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Self

import pyarrow as pa

from turnlane.errors import Bug
from turnlane.storage.active_segment import Active
from turnlane.storage.directory import Quarantine
from turnlane.storage.disk_io import Disk
from turnlane.storage.encoder import EMPTY, Encoder, Group, Planned
from turnlane.storage.frames import Compression, Position, Stamp
from turnlane.storage.reader import Fault, Found, LogReader
from turnlane.storage.recovery import Recovered, Recovery, Remade, rescue_chunk
from turnlane.storage.segments import (
    Catalog,
    Chunk,
    ChunkSpan,
    chunk_name,
    create_chunk,
    schema_frame,
)

__all__ = ["ChunkSpan", "Fault", "Found", "Log", "LogReader", "Position", "SyncFailed"]

_log = logging.getLogger(__name__)


WRITE_BYTES = 1 << 20
"""Frames are written as soon as there is this much of them: while they are in the processor's
cache, and so that the device works while the next are made."""


Kept = Callable[[int, int], Iterator[tuple[int, Sequence[pa.RecordBatch], Sequence[Stamp]]]]
"""What is in memory of a range of offsets: runs of blocks with their first offsets and stamps."""


def _nothing() -> None:
    pass


class SyncFailed(OSError):
    """The disk could not promise to keep what was written: ``rescue()`` before anything else."""


class Log:
    """An open log. One thread writes; :meth:`reader` gives others a view of what is published."""

    def __init__(
        self,
        directory: Path,
        disk: Disk,
        found: Recovered,
        *,
        queue_id: str,
        chunk_size: int,
        compression: Compression,
        floor: int,
        durable: bool,
    ) -> None:
        self._directory = directory
        self._disk = disk
        self._queue_id = queue_id
        self._chunk_size = chunk_size
        self._encoder = Encoder(compression)
        self._durable = durable
        self._quarantine = Quarantine(directory, disk)
        self._catalog = Catalog(found.chunks)
        self._end = max(found.end, floor)
        self.synced_end = self._end
        self.torn_bytes = found.torn_bytes
        self.recovered_stamps = found.stamps
        self.recovered_events_bytes = found.events_bytes
        self.rotations = 0
        self._active = Active(disk, durable=durable, written=self._written)
        self._schema = EMPTY
        self._entries_unsynced = False
        self._sync_failed = False
        self._lost: list[tuple[int, int]] = []
        """What a rescue that is not through yet could not read back."""
        self._resumable = -1
        self.on_chunk: Callable[[], None] = _nothing
        """Called when all that is written is synced and another chunk is about to be begun."""
        self._resume(found)

    @classmethod
    def open(
        cls,
        directory: Path,
        disk: Disk,
        *,
        queue_id: str,
        chunk_size: int,
        compression: Compression,
        hint: Position | None = None,
        floor: int = 0,
        durable: bool = True,
    ) -> Self:
        """Recover the log and open it. ``floor`` is the lowest offset that may come next.

        Raises ``NotAQueue`` for an unknown format and ``OSError`` if the directory cannot be read.
        """
        found = Recovery(directory, disk, queue_id).run(hint)
        return cls(
            directory,
            disk,
            found,
            queue_id=queue_id,
            chunk_size=chunk_size,
            compression=compression,
            floor=floor,
            durable=durable,
        )

    def _resume(self, found: Recovered) -> None:
        """Go on in the last chunk, unless its end is in doubt or offsets are skipped after it."""
        if not found.chunks:
            return
        for chunk in found.chunks[:-1]:
            chunk.synced_size, chunk.synced_end = chunk.size, chunk.end
        # What recovery read back may never have been synced: the first sync covers it.
        last = found.chunks[-1]
        last.synced_end = self.synced_end = last.first
        self._schema = last.schema or EMPTY
        if found.appendable and self._end == last.end:
            self._active.take(last, self._disk.open(last.path))

    # What there is

    @property
    def end(self) -> int:
        """The offset that comes next."""
        return self._end

    @property
    def unsynced(self) -> bool:
        """Whether a power cut could yet take back what was written, though it was to last."""
        return self._durable and self.synced_end < self._end

    @property
    def start(self) -> int:
        """The first offset on disk; ``end`` if there is none."""
        chunks = self._catalog.chunks
        return chunks[0].first if chunks else self._end

    @property
    def bytes(self) -> int:
        """The bytes of all chunk files."""
        return sum(chunk.size for chunk in self._catalog.chunks)

    @property
    def position(self) -> Position:
        """Where the log ends: the hint from which the next recovery starts to look."""
        active = self._active.chunk
        if active is None:
            return Position(self._end, 0, self._end)
        return Position(active.first, active.size, self._end)

    @property
    def schema(self) -> pa.Schema:
        """The columns that have had values."""
        return self._schema

    def inactive_chunks(self) -> list[ChunkSpan]:
        """The chunks that may be removed once everything in them is settled."""
        active = self._active.chunk
        return [span for span in self.chunks() if not active or span.first != active.first]

    def chunks(self) -> list[ChunkSpan]:
        """All chunks, oldest first; the last one's end is the log's."""
        return self._catalog.spans(self._end)

    def reader(self) -> LogReader:
        """A new reader, to be used by one thread at a time."""
        return LogReader(self, self._catalog, self._disk, self._quarantine, self._queue_id)

    # Appending

    def append(self, first: int, block: pa.RecordBatch, stamps: Sequence[Stamp] = ()) -> None:
        """Write one block as one frame; ``first`` may leave a gap after ``end``.

        If it raises, nothing has changed and the same call may be made again: ``SchemaMismatch``
        for a column of another type, ``SyncFailed`` when a rotation could not sync, ``OSError``.
        """
        self.append_many(first, [[block]], stamps)

    def append_many(
        self,
        first: int,
        frames: Sequence[Sequence[pa.RecordBatch]],
        stamps: Sequence[Stamp] = (),
    ) -> None:
        """Write several frames, each given as the blocks to join for it, in large writes.

        The stamps go with the last frame: a crash before it means a repeat, never a loss. When it
        raises ``OSError`` some frames may be in (see ``end``); the same call goes on after them.
        """
        self._require_synced()
        if first < self._end and first != self._resumable:
            raise Bug(f"offset {first} was appended before: the log ends at {self._end}")
        self._resumable = first
        try:
            self._append(self._encoder.plan(self._schema, first, frames, stamps, end=self._end))
        finally:
            self._active.finish()
        self._resumable = -1

    def _append(self, frames: Iterator[Planned]) -> None:
        """Make frames, and write them meanwhile as soon as there are enough of them."""
        group = Group()
        for planned in frames:
            frame = self._encoder.frame(planned)
            size = sum(len(piece) for piece in frame)
            if self._needs_chunk(planned.schema, self._active.begun + group.size, size):
                self._active.write(group)
                group = Group()
                self._start_chunk(planned.first, planned.schema)
            group.add(frame, planned.first, planned.block.num_rows)
            if group.size >= WRITE_BYTES and not planned.is_last:
                self._active.begin(group)
                group = Group()
        self._active.write(group)

    def _needs_chunk(self, schema: pa.Schema, pending: int, size: int) -> bool:
        active, known = self._active.chunk, self._catalog.chunks
        if active is None or schema is not self._schema:
            return True
        if not known or known[-1] is not active:
            return True  # a reader found that somebody deleted the file
        used = active.size + pending
        return used > active.data_start and used + size > self._chunk_size

    def _written(self, group: Group) -> None:
        self._encoder.wrote(group.size, group.seconds)
        self._end = group.end

    # Chunks

    def rotate(self) -> None:
        """Start another chunk, so that the former can be removed. Nothing if it has no events."""
        self._require_synced()
        if self._active.chunk is not None and self._active.chunk.first < self._end:
            self._start_chunk(self._end, self._schema)

    def retire(self) -> None:
        """Write no more to the active chunk, so that it can be removed. Needs no space."""
        self._active.retire()

    def remove(self, first: int) -> None:
        """Delete the chunk named ``first``, whose events are all settled; not the active one."""
        chunk = self._catalog.named(first)
        if chunk is None:
            return
        if chunk is self._active.chunk:
            raise Bug("the active chunk cannot be removed; rotate or retire it first")
        if chunk.unsaved:
            self._quarantine.move(chunk.path)
        else:
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(chunk.path)
        self._catalog.discard(chunk)

    def _start_chunk(self, first: int, schema: pa.Schema) -> None:
        if self._durable:
            self.sync()
        self.on_chunk()
        path = self._directory / chunk_name(first)
        frame = schema_frame(schema, first, self._queue_id)
        former = self._catalog.named(first)
        if former is not None and former.unsaved:
            self._quarantine.move(former.path)
        fd = create_chunk(self._disk, path, frame)
        # The next sync covers it: until then nothing in the chunk counts as synced anyway.
        self._entries_unsynced = True
        size = sum(len(piece) for piece in frame)
        chunk = Chunk(first, path, size, first, schema, size, synced_end=first)
        self._switch(chunk, fd)
        self.rotations += 1

    def _switch(self, chunk: Chunk, fd: int) -> None:
        self._catalog.add(chunk)
        self._active.take(chunk, fd)
        self._schema = chunk.schema or EMPTY

    # Durability

    def sync(self) -> None:
        """Return once everything appended is on the device. Raises ``SyncFailed``."""
        self._require_synced()
        end = self._end
        for chunk in self._unsynced():
            started = perf_counter()
            try:
                self._sync_chunk(chunk)
                self._sync_entries()
            except OSError as error:
                self._sync_failed = True
                raise SyncFailed(error.errno, f"sync failed: {error.strerror}") from error
            chunk.synced_size, chunk.synced_end = chunk.size, chunk.end
            self._encoder.wrote(0, perf_counter() - started, synced=True)
        self.synced_end = end

    def _unsynced(self) -> list[Chunk]:
        return [chunk for chunk in self._catalog.chunks if chunk.synced_size < chunk.size]

    def _sync_chunk(self, chunk: Chunk) -> None:
        if chunk is self._active.chunk:
            self._active.sync()
            return
        fd = self._disk.open(chunk.path)
        try:
            self._disk.sync(fd)
        finally:
            self._disk.close(fd)

    def _sync_entries(self) -> None:
        if self._entries_unsynced:
            self._disk.sync_directory(self._directory)
            self._entries_unsynced = False

    def rescue(self, kept: Kept | None = None) -> list[tuple[int, int]]:
        """After ``SyncFailed``: save what was not synced to new chunks, and sync those.

        What cannot be read back is written from what the caller has ``kept``. Returns the offsets
        [first, end) of the rest. Raises ``OSError`` if it did not succeed; then call it again.
        """

        def remake(chunk: Chunk, first: int, end: int) -> Iterator[Remade]:
            schema = chunk.schema or EMPTY
            for at, blocks, stamps in kept(first, end) if kept else ():
                for planned in self._encoder.plan(schema, at, [blocks], stamps, end=at):
                    frame = self._encoder.frame(planned)
                    yield Remade(at, at + planned.block.num_rows, frame)

        for chunk in self._unsynced():
            saved, fd, gone = rescue_chunk(
                chunk,
                self._catalog,
                self._disk,
                self._quarantine,
                queue_id=self._queue_id,
                remake=remake,
            )
            self._lost += gone
            if chunk is self._active.chunk:
                self._switch(saved, fd)
            else:
                self._disk.close(fd)
        self._sync_entries()
        self._sync_failed = False
        self.synced_end = self._end
        lost, self._lost = self._lost, []
        return lost

    def _require_synced(self) -> None:
        if self._sync_failed:
            raise SyncFailed(5, "a sync has failed before: rescue() first")

    def close(self) -> None:
        """Close the files. Syncs nothing."""
        self._active.close()
