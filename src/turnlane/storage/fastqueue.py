"""Directories of FastQueue, the disk queue of the proxy metrics-governor, opened for reading only.

A user who moves to turnlane can take the backlog along, also the blocks that FastQueue itself would
not return any more. FastQueue writes::

    queue/
    ├── fastqueue.meta         JSON: reader_offset, writer_offset, version, from version 2 on counts
    ├── 0000000000000000       a chunk, named by the queue position of its first byte, in hex
    └── 0000000020000000       the next; names are multiples of the chunk size, stored nowhere

A chunk is a sequence of blocks: a little-endian word of 8 bytes (bits 0-61 length, bit 63 snappy,
bit 62 clear), then the data, without checksum or padding. A block that would cross the chunk size
starts the next chunk; a block larger than a chunk makes the file longer.

No part can be trusted alone. The metadata is written every second, before the data that it
describes, so it may be ahead of the chunks (256 KiB wait in a buffer) or behind them. FastQueue
seeks to the offsets in the metadata, so after a crash it leaves zeros where data was never written,
or overwrites data. So the chunks are the truth here and the metadata is a hint. A length is
accepted if the file is long enough for it. After a corrupt length only the metadata says where a
block begins. :meth:`FastQueueDirectory.faults` returns everything that is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from turnlane.errors import NotAQueue
from turnlane.events import MAX_BLOCK_BYTES, block_of
from turnlane.runtime import Closeable
from turnlane.storage.disk_io import Disk
from turnlane.storage.frames import FrameDamaged, decompress, parse_snappy_length

# ── chunks ───────────────────────────────────────────────────────────────────────────────────────

WORD = 8
SNAPPY = 1 << 63
RESERVED = 1 << 62
LENGTH = RESERVED - 1

SNAPPY_RATIO = 22
"""The highest ratio of snappy: 3 bytes stand for at most 64."""

HOLE_BYTES = 4096
"""This many zeros are a page that was never written, not hundreds of empty blocks."""


@dataclass(frozen=True, slots=True)
class FastQueueFault:
    """A fault at a byte of a file."""

    file: Path
    byte: int
    message: str


class BlockSpan(NamedTuple):
    """The place of a block in its chunk; it is within the file."""

    at: int
    length: int
    snappy: bool

    @property
    def end(self) -> int:
        return self.at + WORD + self.length


class FastQueueChunkReader(Closeable):
    """An open chunk file. It raises only ``OSError`` and returns everything else as a fault."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path
        self._fd = disk.open(path, write=False)
        self.size = disk.size(self._fd)

    def close(self) -> None:
        self._disk.close(self._fd)

    def spans(
        self, overlap: int, boundaries: Sequence[int]
    ) -> Iterator[BlockSpan | FastQueueFault]:
        """Yield the chunk's blocks, in order.

        ``overlap``: bytes of this chunk that the one before already covers. FastQueue leaves
        zeros there. ``boundaries``: bytes at which a block begins according to the metadata; the
        only places to continue after a corrupt length.
        """
        at = overlap if 0 < overlap <= self._find_end_of_zeros(0) else 0
        while at < self.size:
            span = self._read_span(at)
            if isinstance(span, FastQueueFault):
                yield span
                later = (other for other in boundaries if other > at and self._can_begin(other))
                at = next(later, self.size)
                continue
            hole = 0 if span.length or span.snappy else self._measure_hole(at)
            if hole:
                yield FastQueueFault(self._path, at, f"{hole} bytes of zeros: never written")
                at += hole
            else:
                yield span
                at = span.end

    def read_value(self, span: BlockSpan) -> bytes | FastQueueFault:
        """Return the block's data, decompressed."""
        if span.length > MAX_BLOCK_BYTES:
            message = f"block of {span.length} bytes is larger than an event can be"
            return FastQueueFault(self._path, span.at, message)
        data = self._read(span.at + WORD, span.length)
        if len(data) < span.length:
            return FastQueueFault(self._path, span.at, "the file was truncated while it was read")
        if not span.snappy:
            return data
        claimed = parse_snappy_length(data)
        if claimed is None or claimed > min(SNAPPY_RATIO * len(data), MAX_BLOCK_BYTES):
            return FastQueueFault(self._path, span.at, "snappy data begins with a wrong length")
        try:
            return decompress(data, claimed).to_pybytes()
        except FrameDamaged as error:
            return FastQueueFault(self._path, span.at, f"block cannot be decompressed: {error}")

    def _read_span(self, at: int) -> BlockSpan | FastQueueFault:
        left = self.size - at - WORD
        head = self._read(at, WORD)
        if len(head) < WORD:
            return FastQueueFault(
                self._path, at, f"torn: {len(head)} of {WORD} bytes of a block's length"
            )
        word = int.from_bytes(head, "little")
        length = word & LENGTH
        if word & RESERVED:
            return FastQueueFault(self._path, at, f"corrupt length {word:#018x}: bit 62 is set")
        if length > MAX_BLOCK_BYTES and length > left:
            return FastQueueFault(self._path, at, f"corrupt length {length}: {left} bytes follow")
        if length > left:
            message = (
                f"torn, or its length corrupt: block of {length} bytes, of which {left} follow"
            )
            return FastQueueFault(self._path, at, message)
        return BlockSpan(at, length, bool(word & SNAPPY))

    def _measure_hole(self, at: int) -> int:
        """Return how many zeros from ``at`` on were never written; 0 if they are empty blocks.

        A hole can have any length, so the next block may begin anywhere: the first byte that is not
        zero is one of the 8 bytes of its length.
        """
        end = self._find_end_of_zeros(at)
        empty_blocks = end - at < HOLE_BYTES
        if end == self.size:
            return 0 if empty_blocks else end - at
        if empty_blocks and self._can_begin(end - (end - at) % WORD):
            return 0
        for begin in range(end, max(at, end - WORD), -1):
            if self._can_begin(begin):
                return begin - at
        return 0 if empty_blocks else end - at

    def _can_begin(self, at: int) -> bool:
        """Whether a block can begin here: it decompresses, or another one follows it."""
        if not 0 <= at < self.size:
            return False
        span = self._read_span(at)
        if isinstance(span, FastQueueFault) or span.length == 0:
            return False
        if span.snappy:
            return not isinstance(self.read_value(span), FastQueueFault)
        return span.end == self.size or not isinstance(self._read_span(span.end), FastQueueFault)

    def _find_end_of_zeros(self, at: int) -> int:
        while piece := self._read(at, HOLE_BYTES):
            rest = piece.lstrip(b"\0")
            if rest:
                return at + len(piece) - len(rest)
            at += len(piece)
        return self.size

    def _read(self, at: int, length: int) -> bytes:
        return self._disk.read(self._fd, min(length, max(self.size - at, 0)), at).to_pybytes()


# ── metadata ─────────────────────────────────────────────────────────────────────────────────────

METADATA_FILE = "fastqueue.meta"
METADATA_BYTES = 1 << 16
"""Far more than the six fields need; a larger file is not metadata."""


@dataclass(frozen=True, slots=True)
class FastQueueMetadata:
    """The content of ``fastqueue.meta``: a hint, up to a second older or newer than the data."""

    version: int
    reader_offset: int
    """Position of the first block that FastQueue had not returned to a reader."""
    writer_offset: int
    """Position at which FastQueue would have written next."""
    name: str = ""


class BadMetadata(Exception):
    """The metadata cannot be used; the message says why."""


def load_metadata(disk: Disk, path: Path) -> FastQueueMetadata:
    """Read the metadata file. Raises ``BadMetadata``."""
    try:
        with disk.open_file(path) as fd:
            fields = json.loads(disk.read(fd, METADATA_BYTES, 0).to_pybytes())
    except FileNotFoundError:
        raise BadMetadata("is missing; everything counts as unread") from None
    except OSError as error:
        raise BadMetadata(f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise BadMetadata("is not JSON; everything counts as unread") from None
    return _parse_metadata(fields)


def _parse_metadata(fields: object) -> FastQueueMetadata:
    if not isinstance(fields, dict):
        raise BadMetadata("is not a JSON object; everything counts as unread")
    reader, writer = _get_number(fields, "reader_offset"), _get_number(fields, "writer_offset")
    if reader is None or writer is None:
        raise BadMetadata("has no valid offsets; everything counts as unread")
    version = _get_number(fields, "version") or 1
    return FastQueueMetadata(version, reader, writer, str(fields.get("name", "")))


def _get_number(fields: dict[str, object], name: str) -> int | None:
    value = fields.get(name)
    if type(value) is int and 0 <= value < 1 << 63:
        return value
    return None


# ── directory ────────────────────────────────────────────────────────────────────────────────────

POSITION_HEADER = "fastqueue.position"
"""The header of an event that holds the block's byte position in the queue."""

CHUNK_NAME = re.compile(r"[0-7][0-9a-f]{15}")

KNOWN_VERSIONS = (1, 2)

BATCH_BYTES = 64 << 20
"""A batch is complete at this size, even if it has fewer events than asked for."""


class FastQueueDirectory:
    """A FastQueue directory. It keeps no file open between calls and changes nothing."""

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
        """``None`` if the file is missing or invalid; then everything counts as unread."""
        self._metadata_fault = metadata_fault
        self._chunks = chunks
        self._disk = disk

    @classmethod
    def is_fastqueue(cls, path: Path | str) -> bool:
        """Whether the directory is FastQueue's, by the names of its files."""
        try:
            return _has_fastqueue_names(Disk().listing(Path(path)))
        except OSError:
            return False

    @classmethod
    def open(cls, path: Path | str, *, disk: Disk | None = None) -> FastQueueDirectory:
        """Open a directory, however damaged. Raises ``NotAQueue`` if it is not FastQueue's."""
        path, disk = Path(path), disk or Disk()
        try:
            names = disk.listing(path)
        except OSError as error:
            raise NotAQueue(f"{path}: {error.strerror}") from error
        if not _has_fastqueue_names(names):
            raise NotAQueue(f"{path}: {_explain_why_not(path, names)}")
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
        """Yield every block from position ``start`` on as an event, oldest first, in batches.

        ``start`` is by default the metadata's reader offset, so these are the blocks that
        FastQueue has not returned to a reader; 0 gives all blocks on disk. The data is the event's
        ``value``, the chunk's name its ``source``, and the block's position its header
        ``fastqueue.position``. Faults are skipped: :meth:`faults` returns them.
        """
        if start is None:
            start = self.metadata.reader_offset if self.metadata else 0
        found: list[_Block] = []
        size = 0
        for item in self._scan_chunks(start):
            if isinstance(item, FastQueueFault):
                continue
            if found and (len(found) >= batch_events or size + len(item.value) > BATCH_BYTES):
                yield _build_batch(found)
                found, size = [], 0
            found.append(item)
            size += len(item.value)
        if found:
            yield _build_batch(found)

    def faults(self) -> Iterator[FastQueueFault]:
        """Yield all that is wrong with the directory. Reads every chunk completely."""
        if self._metadata_fault is not None:
            yield FastQueueFault(self.path / METADATA_FILE, 0, self._metadata_fault)
        reader = None
        if self.metadata is not None:
            yield from self._check_metadata(self.metadata)
            reader = self.metadata.reader_offset
        for item in self._scan_chunks(0):
            if isinstance(item, FastQueueFault):
                yield item
            elif reader is not None and item.position < reader < item.end:
                message = f"reader_offset {reader} is within the block at {item.position}"
                yield FastQueueFault(self.path / METADATA_FILE, 0, message)

    def _check_metadata(self, metadata: FastQueueMetadata) -> Iterator[FastQueueFault]:
        reader, writer = metadata.reader_offset, metadata.writer_offset
        ranges = [(chunk.start, chunk.start + self._get_size(chunk)) for chunk in self._chunks]
        end = max((end for _, end in ranges), default=0)
        wrong = []
        if metadata.version not in KNOWN_VERSIONS:
            wrong.append(f"version {metadata.version} is not known; read as version 2")
        if reader > writer:
            wrong.append(f"reader_offset {reader} is ahead of writer_offset {writer}")
        if reader > end:
            wrong.append(f"reader_offset {reader} is ahead of the data, which ends at {end}")
        elif ranges and not any(first <= reader <= last for first, last in ranges):
            wrong.append(f"reader_offset {reader} is in no chunk")
        if writer > end:
            wrong.append(f"writer_offset {writer} is ahead of the data, which ends at {end}")
        elif writer < end:
            wrong.append(f"writer_offset {writer} is behind the data, which ends at {end}")
        for message in wrong:
            yield FastQueueFault(self.path / METADATA_FILE, 0, message)

    def _get_size(self, chunk: _Chunk) -> int:
        try:
            with FastQueueChunkReader(self._disk, chunk.path) as reader:
                return reader.size
        except OSError:
            return 0

    def _scan_chunks(self, start: int) -> Iterator[_Block | FastQueueFault]:
        """Yield the blocks that end after ``start``, and faults, chunk by chunk."""
        covered_end = 0
        for chunk in self._chunks:
            try:
                with FastQueueChunkReader(self._disk, chunk.path) as reader:
                    end = chunk.start + reader.size
                    if end > start:
                        yield from self._scan_chunk(chunk, reader, start, covered_end)
                    covered_end = max(covered_end, end)
            except OSError as error:
                yield FastQueueFault(chunk.path, 0, f"cannot be read: {error.strerror}")

    def _scan_chunk(
        self, chunk: _Chunk, reader: FastQueueChunkReader, start: int, covered_end: int
    ) -> Iterator[_Block | FastQueueFault]:
        hints = {start}
        if self.metadata is not None:
            hints |= {self.metadata.reader_offset, self.metadata.writer_offset}
        boundaries = sorted(hint - chunk.start for hint in hints)
        for span in reader.spans(covered_end - chunk.start, boundaries):
            if isinstance(span, FastQueueFault):
                yield span
                continue
            position, end = chunk.start + span.at, chunk.start + span.end
            if end > start:
                value = reader.read_value(span)
                if isinstance(value, FastQueueFault):
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


def _build_batch(blocks: Sequence[_Block]) -> pa.RecordBatch:
    batch = block_of(
        [block.value for block in blocks],
        headers=[{POSITION_HEADER: str(block.position)} for block in blocks],
        sources=[block.chunk for block in blocks],
    )
    # FastQueue stores no times.
    at = batch.schema.get_field_index("timestamp")
    return batch.set_column(at, batch.schema.field(at), pa.nulls(len(blocks), batch[at].type))


def _has_fastqueue_names(names: Sequence[str]) -> bool:
    return METADATA_FILE in names or any(map(CHUNK_NAME.fullmatch, names))


def _explain_why_not(path: Path, names: Sequence[str]) -> str:
    if "queue.json" in names or any(name.endswith(".chunk") for name in names):
        return "is a turnlane queue, not a FastQueue directory; open it with turnlane.open_queue()"
    why = f"holds neither {METADATA_FILE} nor a chunk named by 16 hex digits"
    for name in names:
        if FastQueueDirectory.is_fastqueue(path / name):
            return f"{why}; did you mean {path / name}?"
    return why
