"""A walk through all chunks: every frame that holds, and everything that does not.

The same rules as the queue's own reader has, but nothing is moved, copied or settled, so that it
can go through a queue that another process has open. Frames are read only where they are wanted.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.errors import NotAQueue
from turnlane.storage.directory import LOCK
from turnlane.storage.disk_io import Disk
from turnlane.storage.encoder import Restoring
from turnlane.storage.frames import (
    HEADER_SIZE,
    FrameDamaged,
    FrameKind,
    Header,
    checksum,
    decode_events,
)
from turnlane.storage.segments import (
    ChunkSchema,
    FaultKind,
    Flaw,
    Whole,
    chunk_name,
    list_chunks,
    read_schema,
    scan,
)

if TYPE_CHECKING:
    from turnlane.storage.verify import Report

# ── holder ──
# Who has a queue open, found out without touching its lock.
#
# Trying the lock, even for a moment, could make the process fail that is just opening the queue.
# So
# the kernel's table of locks is asked instead. Where that cannot be read, nobody seems to hold
# it:
# then a chunk that is just being written looks like one with a torn end.

_LOCKS = Path("/proc/locks")


def holder(directory: Path) -> int | None:
    """The process that has the queue open, as far as the kernel tells."""
    try:
        lock = directory / LOCK
        status = lock.stat()
        named = lock.read_text(errors="replace").strip()
        table = _LOCKS.read_text()
    except OSError:
        return None
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    for line in table.splitlines():
        fields = line.split()
        if fields[1:2] != ["FLOCK"] or len(fields) < 6:
            continue
        where, _, inode = fields[5].rpartition(":")
        # Some file systems have another device number here than stat() gives: then the process
        # that the lock file names has to be the one that the kernel names.
        if inode == str(status.st_ino) and (where == device or fields[4] == named):
            return int(fields[4])
    return None


# ── slices ──
# Events as an inspection hands them out: a block, each one's offset, whether it is settled.

Offsets = npt.NDArray[np.int64]

EVERYTHING = 1 << 63
"""Beyond every offset."""


class Slice(NamedTuple):
    """Events with their offsets; all of them settled, or none."""

    offsets: Offsets
    settled: bool
    block: pa.RecordBatch


class Selection(NamedTuple):
    """Which events: offsets ``[first, end)``, and whether also those that are settled."""

    first: int | None = None
    end: int = EVERYTHING
    settled: bool = False


class Inspected(Protocol):
    """What can be asked of any directory, turnlane's or FastQueue's. Nothing is ever written."""

    @property
    def name(self) -> str:
        """What the queue is called."""

    @property
    def size(self) -> int:
        """The bytes that a look at everything has to go through."""

    @property
    def schema(self) -> pa.Schema:
        """All columns that any event may have, base columns first."""

    def slices(self, selection: Selection, advance: Callable[[int], None] = ...) -> Iterator[Slice]:
        """The events selected, oldest first; ``advance`` hears of bytes gone through."""

    @property
    def end(self) -> int:
        """Beyond the last event, as far as the last ``slices()`` has seen."""

    def unreadable(self, selection: Selection) -> int:
        """How many events of the selection the last ``slices()`` could not read."""

    def verify(self, advance: Callable[[int], None] = ...) -> Report:
        """Check every byte."""


def ignore(_bytes: int) -> None:
    """For those who do not want to hear how far it has come."""


# ── survey ──
# The chunk files of a directory at one moment, opened by nobody, changed by nothing here.

NO_LIMIT = 1 << 64


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A chunk, as long as it was when it was looked at: what is appended later is not seen."""

    first: int
    path: Path
    size: int
    schema: ChunkSchema | None
    """None if the schema frame is damaged."""
    foreign: bool = False
    limit: int = NO_LIMIT
    """The first offset of the next chunk, at which a reader changes over."""
    is_last: bool = False
    """Whether this is the one that an opening queue writes on."""
    is_trailing: bool = False
    """Whether it comes after that one, so that an opening queue sets it aside."""

    @property
    def readable(self) -> bool:
        """Whether events can be read from it."""
        return self.schema is not None and not self.foreign


@contextmanager
def opened(disk: Disk, path: Path) -> Iterator[int]:
    """A descriptor to read from."""
    fd = disk.open(path, write=False)
    try:
        yield fd
    finally:
        disk.close(fd)


def survey(directory: Path, disk: Disk, queue_id: str) -> list[ChunkFile]:
    """All chunks, in order. Raises ``NotAQueue`` for one of an unknown format."""
    found = []
    for first in list_chunks(directory, disk):
        with contextlib.suppress(FileNotFoundError):  # settled and removed since it was listed
            found.append(_look(directory / chunk_name(first), first, disk, queue_id))
    return _placed(found)


def _look(path: Path, first: int, disk: Disk, queue_id: str) -> ChunkFile:
    with opened(disk, path) as fd:
        try:
            schema = read_schema(disk, fd)
        except NotAQueue as error:
            raise NotAQueue(f"{path}: {error}") from None
        foreign = schema is not None and bool(queue_id) and schema.queue_id != queue_id
        return ChunkFile(first, path, disk.size(fd), schema, foreign)


def _placed(chunks: Sequence[ChunkFile]) -> list[ChunkFile]:
    last = max((at for at, chunk in enumerate(chunks) if chunk.readable), default=-1)
    return [
        replace(
            chunk,
            limit=chunks[at + 1].first if at < last else NO_LIMIT,
            is_last=at == last,
            is_trailing=at > last,
        )
        for at, chunk in enumerate(chunks)
    ]


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
