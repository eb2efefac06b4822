"""Chunk files: their names, their schema frame, and a scan that finds every fault in them.

Recovery, ``verify`` and the reader's search for the next good frame all look at a chunk through
this module. It never asks for memory that only a header vouches for.
"""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import pyarrow as pa

from turnlane.errors import NotAQueue
from turnlane.queues.log.files import Disk
from turnlane.queues.log.frames import (
    HEADER_SIZE,
    Data,
    FrameKind,
    Header,
    checksum,
    encode,
    find_header,
    parse_header,
)

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
