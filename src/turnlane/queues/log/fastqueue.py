"""Directories written by metrics-governor's FastQueue, opened for reading only.

So that whoever moves to turnlane takes the backlog along, and finds in it what FastQueue itself
would not give back any more. What it writes::

    queue/
    ├── fastqueue.meta         JSON: reader_offset, writer_offset, version, from version 2 on counts
    ├── 0000000000000000       a chunk, named by the queue position of its first byte, in hex
    └── 0000000020000000       the next; names are multiples of the chunk size, kept nowhere

A chunk is blocks end to end: a little-endian word of 8 bytes (bits 0-61 length, bit 63 snappy, bit
62 clear), then the data, with neither checksum nor padding. A block that would cross the chunk size
starts the next chunk; a block larger than a chunk has the file run on beyond it.

Nothing of it can be trusted on its own. The metadata is written every second, before the data it
speaks of, so it may be ahead of the chunks (256 KiB wait in a buffer) or behind them. FastQueue
seeks to where the metadata says, so after a crash it leaves zeros where data was never written, or
writes over data that was. So the chunks are the truth here and the metadata a hint: every block is
checked against the size of its file before a byte is read, and what is wrong is told by
:meth:`FastQueueDirectory.faults`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from turnlane.errors import NotAQueue
from turnlane.events import block_of
from turnlane.queues.log.fastqueue_chunk import ChunkReader, Fault
from turnlane.queues.log.fastqueue_metadata import (
    METADATA_FILE,
    BadMetadata,
    FastQueueMetadata,
    load_metadata,
)
from turnlane.queues.log.files import Disk

__all__ = ["CHUNK_NAME", "POSITION_HEADER", "FastQueueDirectory", "FastQueueMetadata", "Fault"]

POSITION_HEADER = "fastqueue.position"
"""The header that carries a block's byte position in the queue."""

CHUNK_NAME = re.compile(r"[0-7][0-9a-f]{15}")

KNOWN_VERSIONS = (1, 2)

BATCH_BYTES = 64 << 20
"""A batch is given out at this size, even if it has fewer events than asked for."""


class FastQueueDirectory:
    """A FastQueue directory. Reads only, holds nothing open between calls, and changes nothing."""

    def __init__(
        self,
        path: Path,
        chunks: Sequence[_Chunk],
        metadata: FastQueueMetadata | None,
        metadata_fault: str | None,
        disk: Disk,
    ) -> None:
        self.path = path
        self.metadata = metadata
        """``None`` if the file is missing or makes no sense; then everything counts as unread."""
        self._metadata_fault = metadata_fault
        self._chunks = chunks
        self._disk = disk

    @classmethod
    def recognises(cls, path: Path | str) -> bool:
        """Whether the directory looks like FastQueue's, by the names of its files."""
        try:
            return _looks_like_fastqueue(Disk().listing(Path(path)))
        except OSError:
            return False

    @classmethod
    def open(cls, path: Path | str, *, disk: Disk | None = None) -> FastQueueDirectory:
        """Open a directory, however damaged; ``NotAQueue`` if it is none of FastQueue's."""
        path, disk = Path(path), disk or Disk()
        try:
            names = disk.listing(path)
        except OSError as error:
            raise NotAQueue(f"{path}: {error.strerror}") from error
        if not _looks_like_fastqueue(names):
            raise NotAQueue(f"{path}: {_why_not(path, names)}")
        chunks = [
            _Chunk(path / name, int(name, 16)) for name in names if CHUNK_NAME.fullmatch(name)
        ]
        try:
            metadata, fault = load_metadata(disk, path / METADATA_FILE), None
        except BadMetadata as error:
            metadata, fault = None, str(error)
        return cls(path, chunks, metadata, fault, disk)

    def blocks(
        self, *, start: int | None = None, batch_events: int = 1024
    ) -> Iterator[pa.RecordBatch]:
        """Every block from position ``start`` on as an event, oldest first, in batches.

        ``start`` defaults to the metadata's reader offset, that is, to what FastQueue has not
        handed out; 0 gives all that is on disk. The data is the event's ``value``, the chunk's
        name its ``source``, the block's position its header ``fastqueue.position``. Faults do not
        stop it: ask :meth:`faults` for them.
        """
        if start is None:
            start = self.metadata.reader_offset if self.metadata else 0
        found: list[_Block] = []
        size = 0
        for item in self._scan(start):
            if isinstance(item, Fault):
                continue
            if found and (len(found) >= batch_events or size + len(item.value) > BATCH_BYTES):
                yield _batch(found)
                found, size = [], 0
            found.append(item)
            size += len(item.value)
        if found:
            yield _batch(found)

    def faults(self) -> Iterator[Fault]:
        """All that is wrong with the directory. Reads every chunk from beginning to end."""
        if self._metadata_fault is not None:
            yield Fault(self.path / METADATA_FILE, 0, self._metadata_fault)
        reader = None
        if self.metadata is not None:
            yield from self._metadata_faults(self.metadata)
            reader = self.metadata.reader_offset
        for item in self._scan(0):
            if isinstance(item, Fault):
                yield item
            elif reader is not None and item.position < reader < item.end:
                what = f"reader_offset {reader} lies within the block at {item.position}"
                yield Fault(self.path / METADATA_FILE, 0, what)

    def _metadata_faults(self, metadata: FastQueueMetadata) -> Iterator[Fault]:
        reader, writer = metadata.reader_offset, metadata.writer_offset
        ranges = [(chunk.start, chunk.start + self._size(chunk)) for chunk in self._chunks]
        end = max((end for _, end in ranges), default=0)
        wrong = []
        if metadata.version not in KNOWN_VERSIONS:
            wrong.append(f"version {metadata.version} is not known; read as version 2")
        if reader > writer:
            wrong.append(f"reader_offset {reader} is ahead of writer_offset {writer}")
        if reader > end:
            wrong.append(f"reader_offset {reader} is ahead of the data, which ends at {end}")
        elif ranges and not any(first <= reader <= last for first, last in ranges):
            wrong.append(f"reader_offset {reader} lies in no chunk")
        if writer > end:
            wrong.append(f"writer_offset {writer} is ahead of the data, which ends at {end}")
        elif writer < end:
            wrong.append(f"writer_offset {writer} is behind the data, which ends at {end}")
        for what in wrong:
            yield Fault(self.path / METADATA_FILE, 0, what)

    def _size(self, chunk: _Chunk) -> int:
        try:
            with ChunkReader(self._disk, chunk.path) as reader:
                return reader.size
        except OSError:
            return 0

    def _scan(self, start: int) -> Iterator[_Block | Fault]:
        """Blocks that end after ``start``, and faults, chunk by chunk."""
        reached = 0
        for chunk in self._chunks:
            try:
                with ChunkReader(self._disk, chunk.path) as reader:
                    end = chunk.start + reader.size
                    if end > start:
                        yield from self._scan_chunk(chunk, reader, start, reached)
                    reached = max(reached, end)
            except OSError as error:
                yield Fault(chunk.path, 0, f"cannot be read: {error.strerror}")

    def _scan_chunk(
        self, chunk: _Chunk, reader: ChunkReader, start: int, reached: int
    ) -> Iterator[_Block | Fault]:
        hints = {start}
        if self.metadata is not None:
            hints |= {self.metadata.reader_offset, self.metadata.writer_offset}
        boundaries = sorted(hint - chunk.start for hint in hints)
        for span in reader.spans(reached - chunk.start, boundaries):
            if isinstance(span, Fault):
                yield span
                continue
            position, end = chunk.start + span.at, chunk.start + span.end
            if end > start:
                value = reader.value(span)
                if isinstance(value, Fault):
                    yield value
                else:
                    yield _Block(chunk.path.name, position, end, value)


class _Chunk(NamedTuple):
    path: Path
    start: int


class _Block(NamedTuple):
    chunk: str
    position: int
    end: int
    value: bytes


def _batch(blocks: Sequence[_Block]) -> pa.RecordBatch:
    batch = block_of(
        [block.value for block in blocks],
        headers=[{POSITION_HEADER: str(block.position)} for block in blocks],
        sources=[block.chunk for block in blocks],
    )
    # When they were published is not known: FastQueue keeps no times.
    at = batch.schema.get_field_index("timestamp")
    return batch.set_column(at, batch.schema.field(at), pa.nulls(len(blocks), batch[at].type))


def _looks_like_fastqueue(names: Sequence[str]) -> bool:
    return METADATA_FILE in names or any(map(CHUNK_NAME.fullmatch, names))


def _why_not(path: Path, names: Sequence[str]) -> str:
    if "queue.json" in names or any(name.endswith(".chunk") for name in names):
        return "is a turnlane queue, not FastQueue's; open it with turnlane.open_queue()"
    why = f"holds neither {METADATA_FILE} nor a chunk named by 16 hex digits"
    for name in names:
        if FastQueueDirectory.recognises(path / name):
            return f"{why}; did you mean {path / name}?"
    return why
