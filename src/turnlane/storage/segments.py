"""Chunk files: their names, their schema frame, and a scan that finds every fault in them.

Recovery, ``verify`` and the reader's search for the next good frame all look at a chunk through
this module. It never asks for memory that only a header vouches for.
"""

from __future__ import annotations

import contextlib
import enum
import re
import threading
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import pyarrow as pa

from turnlane.errors import NotAQueue
from turnlane.storage.disk_io import Disk
from turnlane.storage.frames import (
    HEADER_SIZE,
    Data,
    FrameKind,
    Header,
    checksum,
    encode,
    find_header,
    parse_header,
)

# ── catalog ──
# The chunks of an open log, shared by its one writer and its readers.
#
# The list is replaced, never changed, and a chunk's ``size`` grows only after its bytes are
# written.
# So readers need no lock to see a consistent log; what they see may merely be a moment old.

MARK_EVERY = 256 * 1024
"""Bytes between two marks of a chunk: how far a reader that seeks has to walk at most."""


class ChunkSpan(NamedTuple):
    """A chunk as its owner sees it: offsets ``first`` to ``end - 1``, bytes of its file."""

    first: int
    end: int
    bytes: int


@dataclass(slots=True, eq=False)
class Chunk:
    """One chunk file. Compared by identity: a file replaced under its name is another chunk."""

    first: int
    path: Path
    size: int
    """Readers go no further than this."""
    end: int
    """The offset after its last event, as far as it is known."""
    schema: pa.Schema | None = None
    """Read when it is first needed."""
    data_start: int = 0
    """Where events begin; 0 until the schema is read."""
    synced_size: int = 0
    synced_end: int = 0
    unsaved: bool = False
    """Holds unreadable bytes of which there is no copy: never to be unlinked."""
    marks: list[tuple[int, int]] = field(default_factory=list)
    """Some frames' first offset and byte, in order."""

    def mark(self, offset: int, byte: int) -> None:
        """Remember that the frame at ``byte`` begins with ``offset``; most are not worth it."""
        last = self.marks[-1][1] if self.marks else self.data_start
        if byte >= last + MARK_EVERY:
            self.marks.append((offset, byte))

    def before(self, offset: int) -> tuple[int, int]:
        """An offset and byte of a frame at or before the one that holds ``offset``."""
        marks = self.marks
        at = bisect_right(marks, offset, key=lambda mark: mark[0]) - 1
        # Two threads may have marked out of order: a mark beyond the offset must not be used.
        usable = at >= 0 and marks[at][0] <= offset
        return marks[at] if usable else (self.first, self.data_start)

    def cut(self) -> None:
        """Give up what was not synced."""
        self.size, self.end = self.synced_size, self.synced_end
        self.marks = [mark for mark in self.marks if mark[1] < self.size]


class Catalog:
    """The chunks in order. Reading needs no lock; changing takes the catalog's own."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self.chunks: tuple[Chunk, ...] = tuple(chunks)
        self._lock = threading.Lock()

    def add(self, chunk: Chunk) -> None:
        """Add a chunk; one of the same name is replaced."""
        with self._lock:
            others = (other for other in self.chunks if other.first != chunk.first)
            self.chunks = tuple(sorted([*others, chunk], key=lambda one: one.first))

    def discard(self, chunk: Chunk) -> None:
        """Take a chunk out, if it is still there."""
        with self._lock:
            self.chunks = tuple(other for other in self.chunks if other is not chunk)

    def named(self, first: int) -> Chunk | None:
        """The chunk with this name."""
        return next((chunk for chunk in self.chunks if chunk.first == first), None)

    def at(self, offset: int) -> Chunk | None:
        """The chunk in which to look for ``offset``: the last that begins at or before it."""
        chunks = self.chunks
        if not chunks:
            return None
        return chunks[max(0, bisect_right(chunks, offset, key=lambda chunk: chunk.first) - 1)]

    def after(self, chunk: Chunk) -> Chunk | None:
        """The chunk that follows."""
        chunks = self.chunks
        at = bisect_right(chunks, chunk.first, key=lambda other: other.first)
        return chunks[at] if at < len(chunks) else None

    def spans(self, end: int) -> list[ChunkSpan]:
        """All chunks; each ends where the next begins, the last at ``end``."""
        chunks = self.chunks
        ends = [*(chunk.first for chunk in chunks[1:]), end][: len(chunks)]
        return [
            ChunkSpan(chunk.first, stop, chunk.size)
            for chunk, stop in zip(chunks, ends, strict=True)
        ]

    def __contains__(self, chunk: object) -> bool:
        return any(other is chunk for other in self.chunks)


FORMAT = b"1"
"""What ``turnlane.format`` says in the schema frames of this version."""

WINDOW = 1 << 20
"""How much is held in memory at a time while searching or checking."""

_NAME = re.compile(r"([0-9a-f]{16})\.chunk")
_QUEUE_ID = b"turnlane.queue_id"
_FORMAT = b"turnlane.format"


class FaultKind(enum.StrEnum):
    """What can be wrong with a region of a chunk."""

    TORN = "torn"
    """The end of the file, with no valid frame in it or after it."""
    CORRUPT_PAYLOAD = "corrupt_payload"
    CORRUPT_HEADER = "corrupt_header"
    FOREIGN = "foreign"
    """The chunk belongs to another queue."""
    REPEAT = "repeat"
    """Offsets that came before: left by an interrupted rescue, harmless."""
    GAP = "gap"
    """Offsets that are in no frame: settled and gone, or lost."""


class Whole(NamedTuple):
    """A valid frame, at byte ``byte``."""

    byte: int
    header: Header


class Flaw(NamedTuple):
    """A region that holds no events to be read; ``first`` and ``end`` where they are known."""

    kind: FaultKind
    byte: int
    length: int
    first: int | None
    end: int | None


class ChunkSchema(NamedTuple):
    """What a chunk's first frame says."""

    schema: pa.Schema
    queue_id: str
    stored: int
    """The bytes of the schema frame: events begin there."""


def chunk_name(first: int) -> str:
    """The file name of the chunk that begins with offset ``first``."""
    return f"{first:016x}.chunk"


def first_of(name: str) -> int | None:
    """The offset in a chunk's file name; none if it is not one."""
    match = _NAME.fullmatch(name)
    return int(match[1], 16) if match else None


def list_chunks(directory: Path, disk: Disk) -> list[int]:
    """The first offsets of the chunks in a directory, in order."""
    return sorted(
        first for name in disk.listing(directory) if (first := first_of(name)) is not None
    )


def create_chunk(disk: Disk, path: Path, schema: list[Data]) -> int:
    """Create a chunk under its name only once its schema is in it; returns its descriptor."""
    temporary = path.with_name(path.name + ".new")
    fd = disk.open(temporary, create=True)
    try:
        if disk.size(fd):
            # Not otherwise: ext4 flushes a file that was cut to nothing when it is closed.
            disk.truncate(fd, 0)
        disk.write(fd, schema, 0)
        disk.rename(temporary, path)
    except OSError:
        disk.close(fd)
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
        raise
    return fd


def schema_frame(schema: pa.Schema, first: int, queue_id: str) -> list[Data]:
    """The frame that begins a chunk."""
    marked = schema.with_metadata({_QUEUE_ID: queue_id.encode(), _FORMAT: FORMAT})
    return encode(FrameKind.SCHEMA, first, 0, [marked.serialize()])


def read_schema(disk: Disk, fd: int) -> ChunkSchema | None:
    """The chunk's schema; none if its first frame does not hold.

    Raises ``NotAQueue`` for a format that this version does not know.
    """
    size = disk.size(fd)
    data = disk.read(fd, min(size, 4096), 0)
    header = parse_header(data)
    if header is None or header.kind is not FrameKind.SCHEMA or header.stored > size:
        return None
    if header.stored > len(data):
        data = disk.read(fd, header.stored, 0)
    payload = data.slice(HEADER_SIZE, header.length)
    if checksum([payload]) != header.payload_crc:
        return None
    try:
        schema = pa.ipc.read_schema(payload)
    except (pa.ArrowException, OSError, EOFError, ValueError):
        return None
    metadata = schema.metadata or {}
    if metadata.get(_FORMAT, FORMAT) != FORMAT:
        found = metadata[_FORMAT].decode(errors="replace")
        raise NotAQueue(f"the chunk has format {found}; this version of turnlane reads format 1")
    queue_id = metadata.get(_QUEUE_ID, b"").decode(errors="replace")
    return ChunkSchema(schema.remove_metadata(), queue_id, header.stored)


def header_at(disk: Disk, fd: int, byte: int, size: int) -> Header | None:
    """The header at ``byte`` if it holds and its frame ends within ``size`` bytes."""
    if byte + HEADER_SIZE > size:
        return None
    header = parse_header(disk.read(fd, HEADER_SIZE, byte))
    return header if header and byte + header.stored <= size else None


def payload_holds(disk: Disk, fd: int, byte: int, header: Header) -> bool:
    """Whether the payload of the frame at ``byte`` has the checksum that its header says."""
    crc, at, end = 0, byte + HEADER_SIZE, byte + HEADER_SIZE + header.length
    while at < end:
        piece = disk.read(fd, min(WINDOW, end - at), at)
        if not len(piece):
            return False
        crc = google_crc32c.extend(crc, piece)
        at += len(piece)
    return crc == header.payload_crc


def next_frame(disk: Disk, fd: int, byte: int, size: int, expected: int) -> Whole | None:
    """The first frame at or after ``byte`` whose header holds and that can follow ``expected``."""
    at = byte
    while at + HEADER_SIZE <= size:
        data = disk.read(fd, min(WINDOW, size - at), at)
        start = 0
        while (found := find_header(data, start)) is not None:
            header = parse_header(data, found)
            if header and _plausible(header, at + found, size, expected):
                return Whole(at + found, header)
            start = found + 8
        if at + len(data) >= size or len(data) < WINDOW:
            return None
        at += len(data) - (HEADER_SIZE - 8)  # a header may lie across two windows
    return None


def _plausible(header: Header, byte: int, size: int, expected: int) -> bool:
    within = byte + header.stored <= size
    return within and header.kind is FrameKind.EVENTS and header.first >= expected


def scan(
    disk: Disk,
    fd: int,
    from_byte: int,
    expected_offset: int,
    *,
    check_payload: bool = True,
    queue_id: str | None = None,
    size: int | None = None,
) -> Iterator[Whole | Flaw]:
    """Every region of the chunk from ``from_byte`` on, in order, as frame or fault.

    With a ``queue_id`` and from byte 0, a chunk of another queue is one ``FOREIGN`` fault. Payloads
    are read and checked only with ``check_payload``. ``size`` stands in for the file's length.
    """
    size = disk.size(fd) if size is None else size
    if queue_id is not None and from_byte == 0:
        found = read_schema(disk, fd)
        if found and found.queue_id != queue_id:
            yield Flaw(FaultKind.FOREIGN, 0, size, None, None)
            return
    byte, expected = from_byte, expected_offset
    while byte < size:
        for region in _region(disk, fd, byte, size, expected, check_payload=check_payload):
            yield region
            byte, expected = _after(region, expected)


def _after(region: Whole | Flaw, expected: int) -> tuple[int, int]:
    if isinstance(region, Whole):
        return region.byte + region.header.stored, max(expected, region.header.end)
    return region.byte + region.length, max(expected, region.end or 0)


def _region(
    disk: Disk, fd: int, byte: int, size: int, expected: int, *, check_payload: bool
) -> Iterator[Whole | Flaw]:
    header = parse_header(disk.read(fd, min(HEADER_SIZE, size - byte), byte))
    if header is None:
        yield _damaged(disk, fd, byte, size, expected)
    elif byte + header.stored > size:
        # Nothing can follow a frame that was never written to its end: no search.
        yield Flaw(FaultKind.TORN, byte, size - byte, header.first, header.end)
    elif check_payload and not payload_holds(disk, fd, byte, header):
        yield Flaw(FaultKind.CORRUPT_PAYLOAD, byte, header.stored, header.first, header.end)
    elif header.kind is FrameKind.EVENTS and header.end <= expected:
        yield Flaw(FaultKind.REPEAT, byte, header.stored, header.first, header.end)
    else:
        if header.first > expected:
            yield Flaw(FaultKind.GAP, byte, 0, expected, header.first)
        yield Whole(byte, header)


def _damaged(disk: Disk, fd: int, byte: int, size: int, expected: int) -> Flaw:
    found = next_frame(disk, fd, byte + 8, size, expected)
    if found is None:
        return Flaw(FaultKind.TORN, byte, size - byte, expected, None)
    length = found.byte - byte
    return Flaw(FaultKind.CORRUPT_HEADER, byte, length, expected, found.header.first)
