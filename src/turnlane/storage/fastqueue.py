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

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cramjam
import pyarrow as pa

from turnlane.errors import NotAQueue
from turnlane.events import MAX_BLOCK_BYTES, block_of
from turnlane.runtime import Closing
from turnlane.storage.disk_io import Disk

# ── fastqueue_chunk ──
# One chunk file of FastQueue's, read block by block, whatever state it is in.
#
# Blocks have no checksum: a length is believed if the file is long enough for it, and after a
# corrupt
# one there is nothing to go by but what the metadata says.

WORD = 8
SNAPPY = 1 << 63
RESERVED = 1 << 62
LENGTH = RESERVED - 1

SNAPPY_RATIO = 22
"""The most that snappy can expand: a copy of 64 bytes is 3 bytes long."""

HOLE_BYTES = 4096
"""So many zeros are a page that was never written, not hundreds of empty blocks in a row."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong at a byte of a file."""

    file: Path
    byte: int
    what: str


class Span(NamedTuple):
    """Where a block lies in its chunk; known to lie within the file."""

    at: int
    length: int
    snappy: bool

    @property
    def end(self) -> int:
        return self.at + WORD + self.length


class ChunkReader(Closing):
    """One chunk file, open. ``OSError`` passes through; everything else wrong is a fault."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path
        self._fd = disk.open(path, write=False)
        self.size = disk.size(self._fd)

    def close(self) -> None:
        self._disk.close(self._fd)

    def spans(self, overlap: int, boundaries: Sequence[int]) -> Iterator[Span | Fault]:
        """The chunk's blocks, in order.

        ``overlap``: bytes of this chunk that the one before already covers. FastQueue leaves
        zeros there. ``boundaries``: bytes at which the metadata says that a block begins; the only
        places to go on from once a length is corrupt.
        """
        at = overlap if 0 < overlap <= self._end_of_zeros(0) else 0
        while at < self.size:
            span = self._span(at)
            if isinstance(span, Fault):
                yield span
                later = (other for other in boundaries if other > at and self._believable(other))
                at = next(later, self.size)
                continue
            hole = 0 if span.length or span.snappy else self._hole(at)
            if hole:
                yield Fault(self._path, at, f"{hole} bytes of zeros: never written")
                at += hole
            else:
                yield span
                at = span.end

    def value(self, span: Span) -> bytes | Fault:
        """The block's data, decompressed."""
        if span.length > MAX_BLOCK_BYTES:
            what = f"block of {span.length} bytes is larger than an event can be"
            return Fault(self._path, span.at, what)
        data = self._read(span.at + WORD, span.length)
        if len(data) < span.length:
            return Fault(self._path, span.at, "the file was cut while it was read")
        if not span.snappy:
            return data
        claimed = _snappy_length(data)
        if claimed is None or claimed > min(SNAPPY_RATIO * len(data), MAX_BLOCK_BYTES):
            return Fault(self._path, span.at, "snappy data begins with a length that cannot be")
        try:
            return bytes(cramjam.snappy.decompress_raw(data))
        except cramjam.DecompressionError as error:
            return Fault(self._path, span.at, f"block cannot be decompressed: {error}")

    def _span(self, at: int) -> Span | Fault:
        left = self.size - at - WORD
        head = self._read(at, WORD)
        if len(head) < WORD:
            return Fault(self._path, at, f"torn: {len(head)} of {WORD} bytes of a block's length")
        word = int.from_bytes(head, "little")
        length = word & LENGTH
        if word & RESERVED:
            return Fault(self._path, at, f"corrupt length {word:#018x}: bit 62 is set")
        if length > MAX_BLOCK_BYTES and length > left:
            return Fault(self._path, at, f"corrupt length {length}: {left} bytes follow")
        if length > left:
            what = f"torn, or its length corrupt: block of {length} bytes, of which {left} follow"
            return Fault(self._path, at, what)
        return Span(at, length, bool(word & SNAPPY))

    def _hole(self, at: int) -> int:
        """How many zeros from ``at`` on were never written; 0 if they are empty blocks.

        A hole can have any length, so what follows it may begin anywhere: the first byte that is
        not zero is the lowest of its length, or one of those above it.
        """
        end = self._end_of_zeros(at)
        empty_blocks = end - at < HOLE_BYTES
        if end == self.size:
            return 0 if empty_blocks else end - at
        if empty_blocks and self._believable(end - (end - at) % WORD):
            return 0
        for begin in range(end, max(at, end - WORD), -1):
            if self._believable(begin):
                return begin - at
        return 0 if empty_blocks else end - at

    def _believable(self, at: int) -> bool:
        """Whether a block seems to begin here: it decompresses, or another one follows it."""
        if not 0 <= at < self.size:
            return False
        span = self._span(at)
        if isinstance(span, Fault) or span.length == 0:
            return False
        if span.snappy:
            return not isinstance(self.value(span), Fault)
        return span.end == self.size or not isinstance(self._span(span.end), Fault)

    def _end_of_zeros(self, at: int) -> int:
        while piece := self._read(at, HOLE_BYTES):
            rest = piece.lstrip(b"\0")
            if rest:
                return at + len(piece) - len(rest)
            at += len(piece)
        return self.size

    def _read(self, at: int, length: int) -> bytes:
        return self._disk.read(self._fd, min(length, max(self.size - at, 0)), at).to_pybytes()


def _snappy_length(data: bytes) -> int | None:
    """The length that snappy data claims to have when decompressed: a varint of up to 5 bytes."""
    length = 0
    for place, byte in enumerate(data[:5]):
        length |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:  # the last byte has its top bit clear
            return length
    return None


# ── fastqueue_metadata ──
# FastQueue's metadata file: where reading and writing were, as of a second ago or so.

METADATA_FILE = "fastqueue.meta"
METADATA_BYTES = 1 << 16
"""Far more than the six fields need; a larger file is not metadata."""


@dataclass(frozen=True, slots=True)
class FastQueueMetadata:
    """What ``fastqueue.meta`` says: a hint, up to a second old and not in step with the data."""

    version: int
    reader_offset: int
    """Position of the first block that FastQueue had not handed out."""
    writer_offset: int
    """Position at which FastQueue would have written next."""
    entry_count: int | None = None
    """Blocks waiting, those in memory only included; version 1 does not say."""
    total_bytes: int | None = None
    """Their size before compression; version 1 does not say."""
    name: str = ""


class BadMetadata(Exception):
    """The metadata cannot be used; the message says why."""


def load_metadata(disk: Disk, path: Path) -> FastQueueMetadata:
    """Read the file. Raises ``BadMetadata``."""
    try:
        fd = disk.open(path, write=False)
        try:
            raw = disk.read(fd, METADATA_BYTES, 0).to_pybytes()
        finally:
            disk.close(fd)
        fields = json.loads(raw)
    except FileNotFoundError:
        raise BadMetadata("missing; everything counts as unread") from None
    except OSError as error:
        raise BadMetadata(f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise BadMetadata("is not JSON; everything counts as unread") from None
    return _metadata_from(fields)


def _metadata_from(fields: object) -> FastQueueMetadata:
    if not isinstance(fields, dict):
        raise BadMetadata("is not a JSON object; everything counts as unread")
    reader, writer = _number(fields, "reader_offset"), _number(fields, "writer_offset")
    if reader is None or writer is None:
        raise BadMetadata("has no offsets that make sense; everything counts as unread")
    version = _number(fields, "version") or 1
    # FastQueue leaves a count of 0 out, so from version 2 on a missing count means none.
    unsaid = None if version == 1 else 0
    count, size = _number(fields, "entry_count"), _number(fields, "total_bytes")
    return FastQueueMetadata(
        version=version,
        reader_offset=reader,
        writer_offset=writer,
        entry_count=unsaid if count is None else count,
        total_bytes=unsaid if size is None else size,
        name=str(fields.get("name", "")),
    )


def _number(fields: dict[str, object], name: str) -> int | None:
    value = fields.get(name)
    if type(value) is int and 0 <= value < 1 << 63:
        return value
    return None


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
