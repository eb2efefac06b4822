"""Segments: the files of the log, which users see as ``.chunk`` files.

A segment's file name is the offset of its first event. Its first frame holds the schema, and all
other frames hold events. This module has the names, the schema frame, the scan that finds every
valid frame and everything else in a file, and the catalog of the segments of an open log.

The scan, recovery and the readers never allocate memory by a length that only a header claims.
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
    BufferLike,
    FrameHeader,
    FrameKind,
    compute_checksum,
    encode_frame,
    find_header,
    parse_header,
)

FORMAT = b"1"
"""The value of ``turnlane.format`` in the schema frames of this version."""

WINDOW_BYTES = 1 << 20
"""How much of a file is in memory at a time while it is searched, checked or copied."""

MARK_INTERVAL = 256 * 1024
"""Bytes between two marks of a segment: a reader that seeks walks at most this far."""

_FILE_NAME = re.compile(r"([0-9a-f]{16})\.chunk")
_QUEUE_ID = b"turnlane.queue_id"
_FORMAT = b"turnlane.format"

# ── files ────────────────────────────────────────────────────────────────────────────────────────


def format_segment_name(first: int) -> str:
    """Return the file name of the segment that begins with the offset ``first``."""
    return f"{first:016x}.chunk"


def parse_segment_name(name: str) -> int | None:
    """Return the offset in a segment's file name; ``None`` for another file."""
    match = _FILE_NAME.fullmatch(name)
    return int(match[1], 16) if match else None


def list_segments(directory: Path, disk: Disk) -> list[int]:
    """Return the first offsets of the segments in a directory, in order."""
    firsts = map(parse_segment_name, disk.listing(directory))
    return sorted(first for first in firsts if first is not None)


def create_segment_file(disk: Disk, path: Path, schema: list[BufferLike]) -> int:
    """Create a segment file with its schema frame and return its descriptor.

    The file gets its name only after the schema is in it.
    """
    temporary = path.with_name(path.name + ".new")
    fd = disk.open(temporary, create=True)
    try:
        if disk.size(fd):
            # Only if needed: ext4 flushes a file that was cut to nothing when it is closed.
            disk.truncate(fd, 0)
        disk.write(fd, schema, 0)
        disk.rename(temporary, path)
    except OSError:
        disk.close(fd)
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
        raise
    return fd


class SegmentSchema(NamedTuple):
    """The content of a segment's first frame."""

    schema: pa.Schema
    queue_id: str
    stored_size: int
    """The bytes of the schema frame; the first frame with events begins there."""
    first: int
    """The offset with which the segment was created: its name."""

    def is_foreign(self, queue_id: str, name: int) -> bool:
        """Whether the segment is another queue's, or a copy that has another segment's name."""
        return self.queue_id != queue_id or self.first != name


def encode_schema_frame(schema: pa.Schema, first: int, queue_id: str) -> list[BufferLike]:
    """Return the frame that begins a segment."""
    marked = schema.with_metadata({_QUEUE_ID: queue_id.encode(), _FORMAT: FORMAT})
    return encode_frame(FrameKind.SCHEMA, first, 0, [marked.serialize()])


def read_segment_schema(disk: Disk, fd: int) -> SegmentSchema | None:
    """Return the segment's schema; ``None`` if its first frame is damaged.

    Raises ``NotAQueue`` for a format that this version does not know.
    """
    size = disk.size(fd)
    data = disk.read(fd, min(size, 4096), 0)
    header = parse_header(data)
    if header is None or header.kind is not FrameKind.SCHEMA or header.stored_size > size:
        return None
    if header.stored_size > len(data):
        data = disk.read(fd, header.stored_size, 0)
    payload = data.slice(HEADER_SIZE, header.length)
    if compute_checksum([payload]) != header.payload_crc:
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
    return SegmentSchema(schema.remove_metadata(), queue_id, header.stored_size, header.first)


# ── scan ─────────────────────────────────────────────────────────────────────────────────────────


class InvalidRegionKind(enum.StrEnum):
    """Why a region of a segment holds no events."""

    TORN = "torn"
    """The end of the file; neither here nor after it is a valid frame."""
    CORRUPT_PAYLOAD = "corrupt_payload"
    CORRUPT_HEADER = "corrupt_header"
    REPEAT = "repeat"
    """Offsets that came before: an interrupted rewrite leaves them. Harmless."""
    GAP = "gap"
    """Offsets that are in no frame: settled and gone, or lost."""


class ValidFrame(NamedTuple):
    """A valid frame at byte ``byte``."""

    byte: int
    header: FrameHeader


class InvalidRegion(NamedTuple):
    """A region without readable events; ``first`` and ``end`` are its offsets if they are known."""

    kind: InvalidRegionKind
    byte: int
    length: int
    first: int | None
    end: int | None


def scan_segment(
    disk: Disk,
    fd: int,
    from_byte: int,
    expected_offset: int,
    *,
    check_payload: bool = True,
    size: int | None = None,
) -> Iterator[ValidFrame | InvalidRegion]:
    """Yield every region of the segment from ``from_byte`` on, in order.

    Payloads are read only with ``check_payload``. ``size`` replaces the file's length.
    """
    size = disk.size(fd) if size is None else size
    byte, expected = from_byte, expected_offset
    while byte < size:
        region = _classify_region(disk, fd, byte, size, expected, check_payload=check_payload)
        if isinstance(region, InvalidRegion):
            yield region
            byte, expected = region.byte + region.length, max(expected, region.end or 0)
            continue
        if region.header.first > expected:
            yield InvalidRegion(InvalidRegionKind.GAP, byte, 0, expected, region.header.first)
        yield region
        byte = region.byte + region.header.stored_size
        expected = max(expected, region.header.end)


def _classify_region(
    disk: Disk, fd: int, byte: int, size: int, expected: int, *, check_payload: bool
) -> ValidFrame | InvalidRegion:
    header = parse_header(disk.read(fd, min(HEADER_SIZE, size - byte), byte))
    if header is None:
        found = find_next_frame(disk, fd, byte + 8, size, expected)
        if found is None:
            return InvalidRegion(InvalidRegionKind.TORN, byte, size - byte, expected, None)
        kind, length = InvalidRegionKind.CORRUPT_HEADER, found.byte - byte
        first, end = expected, found.header.first
    elif byte + header.stored_size > size:
        # Nothing can follow a frame that was never completely written: no search.
        kind, length = InvalidRegionKind.TORN, size - byte
        first, end = header.first, header.end
    elif check_payload and not is_payload_intact(disk, fd, byte, header):
        kind, length = InvalidRegionKind.CORRUPT_PAYLOAD, header.stored_size
        first, end = header.first, header.end
    elif header.kind is FrameKind.EVENTS and header.end <= expected:
        kind, length = InvalidRegionKind.REPEAT, header.stored_size
        first, end = header.first, header.end
    else:
        return ValidFrame(byte, header)
    return InvalidRegion(kind, byte, length, first, end)


def read_header(disk: Disk, fd: int, byte: int, size: int) -> FrameHeader | None:
    """Return the header at ``byte`` if it is valid and its frame ends within ``size`` bytes."""
    if byte + HEADER_SIZE > size:
        return None
    header = parse_header(disk.read(fd, HEADER_SIZE, byte))
    return header if header and byte + header.stored_size <= size else None


def is_payload_intact(disk: Disk, fd: int, byte: int, header: FrameHeader) -> bool:
    """Whether the payload of the frame at ``byte`` has the checksum that its header names."""
    crc, at, end = 0, byte + HEADER_SIZE, byte + HEADER_SIZE + header.length
    while at < end:
        piece = disk.read(fd, min(WINDOW_BYTES, end - at), at)
        if not len(piece):
            return False
        crc = google_crc32c.extend(crc, piece)
        at += len(piece)
    return crc == header.payload_crc


def find_next_frame(disk: Disk, fd: int, byte: int, size: int, expected: int) -> ValidFrame | None:
    """Return the first frame at or after ``byte`` that is valid and can follow ``expected``."""
    at = byte
    while at + HEADER_SIZE <= size:
        data = disk.read(fd, min(WINDOW_BYTES, size - at), at)
        start = 0
        while (found := find_header(data, start)) is not None:
            header = parse_header(data, found)
            if (
                header
                and at + found + header.stored_size <= size
                and header.kind is FrameKind.EVENTS
                and header.first >= expected
            ):
                return ValidFrame(at + found, header)
            start = found + 8
        if at + len(data) >= size or len(data) < WINDOW_BYTES:
            return None
        at += len(data) - (HEADER_SIZE - 8)  # a header may extend over two windows
    return None


# ── catalog ──────────────────────────────────────────────────────────────────────────────────────


class SegmentSpan(NamedTuple):
    """A segment as its queue sees it: offsets ``first`` to ``end - 1``, and its file's bytes."""

    first: int
    end: int
    bytes: int


@dataclass(slots=True, eq=False)
class Segment:
    """A segment of an open log. The log's writer changes it; readers add marks.

    Compared by identity: a file that replaces another one of the same name is another segment.
    """

    first: int
    path: Path
    size: int
    """Readers go no further. It grows only after the bytes are written."""
    end: int
    """The offset after its last event, as far as it is known."""
    schema: pa.Schema | None = None
    """``None`` until a reader needs it."""
    data_start: int = 0
    """Where events begin; 0 until the schema is read."""
    synced_size: int = 0
    synced_end: int = 0
    has_uncopied_damage: bool = False
    """It holds unreadable bytes that are not in quarantine, so the file must not be deleted."""
    marks: list[tuple[int, int]] = field(default_factory=list)
    """The first offset and the byte of some frames, in order."""

    def add_mark(self, offset: int, byte: int) -> None:
        """Remember that the frame at ``byte`` begins with ``offset``, if the last mark is far."""
        last = self.marks[-1][1] if self.marks else self.data_start
        if byte >= last + MARK_INTERVAL:
            self.marks.append((offset, byte))

    def find_mark(self, offset: int) -> tuple[int, int]:
        """Return offset and byte of a frame at or before the frame that holds ``offset``."""
        marks = self.marks
        at = bisect_right(marks, offset, key=lambda mark: mark[0]) - 1
        # Two threads may have added marks out of order: never use a mark after the offset.
        is_usable = at >= 0 and marks[at][0] <= offset
        return marks[at] if is_usable else (self.first, self.data_start)

    def discard_unsynced(self) -> None:
        """Forget the frames that were not synced."""
        self.size, self.end = self.synced_size, self.synced_end
        self.marks = [mark for mark in self.marks if mark[1] < self.size]


class SegmentCatalog:
    """The segments of an open log, in order, shared by its one writer and its readers.

    The tuple is replaced and never changed, so readers need no lock. They see a consistent log,
    perhaps a moment old. Changes take the catalog's own lock.
    """

    def __init__(self, segments: list[Segment]) -> None:
        self.segments: tuple[Segment, ...] = tuple(segments)
        self._lock = threading.Lock()

    def add(self, segment: Segment) -> None:
        """Add a segment; it replaces one of the same name."""
        with self._lock:
            others = (other for other in self.segments if other.first != segment.first)
            self.segments = tuple(sorted([*others, segment], key=lambda one: one.first))

    def remove(self, segment: Segment) -> None:
        """Remove a segment, if it is still there."""
        with self._lock:
            self.segments = tuple(other for other in self.segments if other is not segment)

    def get(self, first: int) -> Segment | None:
        """Return the segment that begins with the offset ``first``."""
        return next((segment for segment in self.segments if segment.first == first), None)

    def find(self, offset: int) -> Segment | None:
        """Return the segment in which to look for ``offset``: the last that begins before it."""
        segments = self.segments
        if not segments:
            return None
        at = bisect_right(segments, offset, key=lambda segment: segment.first) - 1
        return segments[max(0, at)]

    def find_next(self, segment: Segment) -> Segment | None:
        """Return the segment after this one."""
        segments = self.segments
        at = bisect_right(segments, segment.first, key=lambda other: other.first)
        return segments[at] if at < len(segments) else None

    def list_spans(self, end: int) -> list[SegmentSpan]:
        """Return all segments; each ends where the next one begins, the last at ``end``."""
        segments = self.segments
        ends = [*(segment.first for segment in segments[1:]), end][: len(segments)]
        return [
            SegmentSpan(segment.first, stop, segment.size)
            for segment, stop in zip(segments, ends, strict=True)
        ]

    def __contains__(self, segment: object) -> bool:
        return any(other is segment for other in self.segments)
