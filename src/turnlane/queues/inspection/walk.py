"""A walk through all chunks: every frame that holds, and everything that does not.

The same rules as the queue's own reader has, but nothing is moved, copied or settled, so that it
can go through a queue that another process has open. Frames are read only where they are wanted.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from turnlane.queues.inspection.survey import ChunkFile, opened
from turnlane.queues.log.chunks import FaultKind, Flaw, Whole, chunk_name, scan
from turnlane.queues.log.columns import Restoring
from turnlane.queues.log.files import Disk
from turnlane.queues.log.frames import (
    HEADER_SIZE,
    FrameDamaged,
    FrameKind,
    Header,
    checksum,
    decode_events,
)


class DamageKind(enum.StrEnum):
    """What can be wrong with a place in the chunks."""

    CORRUPT_PAYLOAD = "corrupt_payload"
    CORRUPT_HEADER = "corrupt_header"
    UNDECODABLE = "undecodable"
    """The checksum holds, but Arrow cannot read it."""
    TRUNCATED = "truncated"
    """No valid frame from here to the end of the file."""
    SCHEMA = "schema"
    FOREIGN = "foreign"
    MISSING = "missing"
    REPEAT = "repeat"


class Damage(NamedTuple):
    """A place that holds no events to be read; offsets ``[first, end)`` should have been there."""

    kind: DamageKind
    file: str
    byte: int
    length: int
    first: int
    end: int
    why: str = ""
    chunk: ChunkFile | None = None


class Stretch(NamedTuple):
    """A frame that holds, and the offsets ``[first, end)`` that no frame before it had."""

    chunk: ChunkFile
    byte: int
    stored: int
    first: int
    end: int
    block: pa.RecordBatch | None
    """The events, base columns first; none if they were not wanted."""


Wanted = Callable[[int, int], bool]

_KINDS = {
    FaultKind.TORN: DamageKind.TRUNCATED,
    FaultKind.CORRUPT_HEADER: DamageKind.CORRUPT_HEADER,
    FaultKind.REPEAT: DamageKind.REPEAT,
    FaultKind.GAP: DamageKind.MISSING,
}


class Walk:
    """One walk. ``wanted(first, end)`` says which frames are to be read, checked and decoded."""

    def __init__(self, disk: Disk, chunks: Sequence[ChunkFile], wanted: Wanted) -> None:
        self._disk = disk
        self._chunks = chunks
        self._wanted = wanted
        self._expected = chunks[0].first if chunks else 0

    def __iter__(self) -> Iterator[Stretch | Damage]:
        for chunk in self._chunks:
            if chunk.foreign and chunk.is_trailing:
                yield self._unusable(chunk, DamageKind.FOREIGN, self._expected)
                continue
            if chunk.first > self._expected:
                name = chunk_name(self._expected)
                yield Damage(DamageKind.MISSING, name, 0, 0, self._expected, chunk.first)
                self._expected = chunk.first
            yield from self._through(chunk)

    def _through(self, chunk: ChunkFile) -> Iterator[Stretch | Damage]:
        try:
            with opened(self._disk, chunk.path) as fd:
                if chunk.readable:
                    yield from self._frames(fd, chunk)
                elif chunk.foreign:
                    yield self._unusable(chunk, DamageKind.FOREIGN, chunk.limit)
                else:
                    end = self._headers_end(fd, chunk) if chunk.is_trailing else chunk.limit
                    yield self._unusable(chunk, DamageKind.SCHEMA, end)
        except FileNotFoundError:
            end = self._expected if chunk.is_last else chunk.limit
            yield self._unusable(chunk, DamageKind.MISSING, end)

    def _unusable(self, chunk: ChunkFile, kind: DamageKind, end: int) -> Damage:
        first, self._expected = self._expected, max(self._expected, end)
        name = chunk.path.name
        return Damage(kind, name, 0, chunk.size, first, self._expected, chunk=chunk)

    def _headers_end(self, fd: int, chunk: ChunkFile) -> int:
        """How far the chunk goes, by its frames' headers: as recovery counts it."""
        regions = scan(self._disk, fd, 0, chunk.first, check_payload=False, size=chunk.size)
        ends = [region.header.end for region in regions if isinstance(region, Whole)]
        return max(ends, default=chunk.first)

    def _frames(self, fd: int, chunk: ChunkFile) -> Iterator[Stretch | Damage]:
        assert chunk.schema is not None
        restoring = Restoring(chunk.schema.schema)
        start = chunk.schema.stored
        for region in scan(
            self._disk, fd, start, self._expected, check_payload=False, size=chunk.size
        ):
            if self._expected >= chunk.limit:
                # What is left comes again in the next chunk: a rescue that was interrupted.
                rest, at = chunk.size - region.byte, self._expected
                yield Damage(DamageKind.REPEAT, chunk.path.name, region.byte, rest, at, at)
                return
            if isinstance(region, Flaw):
                yield self._flaw(chunk, region)
            elif region.header.kind is FrameKind.EVENTS:
                yield self._frame(fd, chunk, region, restoring)

    def _flaw(self, chunk: ChunkFile, flaw: Flaw) -> Damage:
        first = self._expected
        end = flaw.end or first
        if flaw.kind is FaultKind.TORN and not chunk.is_last:
            end = chunk.limit
        end = max(first, min(end, chunk.limit))
        self._expected = end
        name = chunk.path.name
        return Damage(_KINDS[flaw.kind], name, flaw.byte, flaw.length, first, end, chunk=chunk)

    def _frame(
        self, fd: int, chunk: ChunkFile, frame: Whole, restoring: Restoring
    ) -> Stretch | Damage:
        header, byte = frame.header, frame.byte
        first, self._expected = max(header.first, self._expected), header.end
        if not self._wanted(first, header.end):
            return Stretch(chunk, byte, header.stored, first, header.end, None)
        payload = self._disk.read(fd, header.length, byte + HEADER_SIZE)
        name, size = chunk.path.name, header.stored
        if checksum([payload]) != header.payload_crc:
            kind = DamageKind.CORRUPT_PAYLOAD
            return Damage(kind, name, byte, size, first, header.end, chunk=chunk)
        try:
            block = _decoded(header, payload, chunk)
        except FrameDamaged as error:
            kind, why = DamageKind.UNDECODABLE, str(error)
            return Damage(kind, name, byte, size, first, header.end, why, chunk)
        block = restoring.restored(block).slice(first - header.first)
        return Stretch(chunk, byte, header.stored, first, header.end, block)


def _decoded(header: Header, payload: pa.Buffer, chunk: ChunkFile) -> pa.RecordBatch:
    assert chunk.schema is not None
    return decode_events(header, payload, chunk.schema.schema)[0]
