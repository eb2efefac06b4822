"""A walk through the segments of a directory: every valid frame, and everything else.

It follows the rules of the queue's own reader, but moves, copies and settles nothing, so it can
walk through a queue that another process has open. It reads only the frames that the caller wants.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.errors import NotAQueue
from turnlane.storage.directory import LOCK_FILE
from turnlane.storage.disk_io import Disk
from turnlane.storage.encoder import BaseColumnRestorer
from turnlane.storage.frames import (
    HEADER_SIZE,
    FrameDamaged,
    FrameKind,
    compute_checksum,
    decode_events,
)
from turnlane.storage.segments import (
    InvalidRegion,
    InvalidRegionKind,
    SegmentSchema,
    ValidFrame,
    format_segment_name,
    list_segments,
    read_segment_schema,
    scan_segment,
)

if TYPE_CHECKING:
    from turnlane.storage.verify import VerificationReport

# ── what an inspection offers ────────────────────────────────────────────────────────────────────

Offsets = npt.NDArray[np.int64]

EVERYTHING = 1 << 63
"""An end beyond every offset."""


class EventSlice(NamedTuple):
    """Events with their offsets; all of them settled, or none."""

    offsets: Offsets
    settled: bool
    block: pa.RecordBatch


class Selection(NamedTuple):
    """Which events: offsets ``[first, end)``, and whether to include settled ones."""

    first: int | None = None
    end: int = EVERYTHING
    settled: bool = False


class InspectableQueue(Protocol):
    """What any directory, turnlane's or FastQueue's, can tell. Nothing is ever written."""

    @property
    def name(self) -> str:
        """The queue's name."""

    @property
    def size(self) -> int:
        """The bytes that a look at everything reads."""

    @property
    def schema(self) -> pa.Schema:
        """All columns that any event may have, base columns first."""

    def slices(
        self, selection: Selection, advance: Callable[[int], None] = ...
    ) -> Iterator[EventSlice]:
        """Yield the selected events, oldest first; ``advance`` is called with the bytes read."""

    @property
    def end(self) -> int:
        """The offset after the last event, as far as the last ``slices()`` read."""

    def unreadable(self, selection: Selection) -> int:
        """Return how many events of the selection the last ``slices()`` could not read."""

    def verify(self, advance: Callable[[int], None] = ...) -> VerificationReport:
        """Check every byte."""


def ignore_progress(_bytes: int) -> None:
    """Do nothing: for callers that do not show progress."""


def find_holder(directory: Path) -> int | None:
    """Return the process that has the queue open, as far as the kernel tells.

    The lock itself is not tried: holding it for a moment could make a process fail that is just
    opening the queue. The kernel's table of locks has the answer. Where it cannot be read, the
    queue seems closed, and a segment that is just being written seems to have a torn end.
    """
    try:
        lock = directory / LOCK_FILE
        status = lock.stat()
        named = lock.read_text(errors="replace").strip()
        table = Path("/proc/locks").read_text()
    except OSError:
        return None
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    for line in table.splitlines():
        fields = line.split()
        if fields[1:2] != ["FLOCK"] or len(fields) < 6:
            continue
        where, _, inode = fields[5].rpartition(":")
        # Some file systems have a different device number here than stat() gives. Then the lock
        # file must name the same process as the kernel.
        if inode == str(status.st_ino) and (where == device or fields[4] == named):
            return int(fields[4])
    return None


# ── files ────────────────────────────────────────────────────────────────────────────────────────

NO_LIMIT = 1 << 64


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment file with its size at one moment: later appends are not seen."""

    first: int
    path: Path
    size: int
    schema: SegmentSchema | None
    """``None`` if the schema frame is damaged."""
    foreign: bool = False
    """Whether it is another queue's or misnamed: an opening queue sets it aside."""
    limit: int = NO_LIMIT
    """The first offset of the next segment, where a reader goes on to it."""
    is_last: bool = False
    """Whether an opening queue continues to write here."""
    is_trailing: bool = False
    """Whether it comes after the last one, so that an opening queue sets it aside."""

    @property
    def readable(self) -> bool:
        """Whether events can be read from it."""
        return self.schema is not None and not self.foreign


def list_segment_files(directory: Path, disk: Disk, queue_id: str) -> list[SegmentFile]:
    """Return all segments, in order. Raises ``NotAQueue`` for an unknown format."""
    files = []
    for first in list_segments(directory, disk):
        with contextlib.suppress(FileNotFoundError):  # settled and removed since it was listed
            path = directory / format_segment_name(first)
            with disk.open_file(path) as fd:
                try:
                    schema = read_segment_schema(disk, fd)
                except NotAQueue as error:
                    raise NotAQueue(f"{path}: {error}") from None
                is_foreign = schema is not None and schema.is_foreign(
                    queue_id or schema.queue_id, first
                )
                files.append(SegmentFile(first, path, disk.size(fd), schema, is_foreign))
    own = [file for file in files if not file.foreign]
    last = max((at for at, file in enumerate(own) if file.readable), default=-1)
    limits = [own[at + 1].first if at < last else NO_LIMIT for at in range(len(own))]
    placed = {
        file.first: replace(file, limit=limits[at], is_last=at == last, is_trailing=at > last)
        for at, file in enumerate(own)
    }
    return [placed.get(file.first, file) for file in files]


# ── walk ─────────────────────────────────────────────────────────────────────────────────────────


class FindingKind(enum.StrEnum):
    """What a walk through the segments, or a verification of the whole directory, found."""

    # In the segments
    CORRUPT_PAYLOAD = "corrupt_payload"
    CORRUPT_HEADER = "corrupt_header"
    UNDECODABLE = "undecodable"
    """The checksum is right, but Arrow cannot read the payload."""
    TRUNCATED = "truncated"
    """No valid frame from here to the end of the file."""
    SCHEMA = "schema"
    FOREIGN = "foreign"
    MISSING = "missing"
    REPEAT = "repeat"
    # Elsewhere in the directory
    TORN_TAIL = "torn_tail"
    NEVER_WRITTEN = "never_written"
    JOURNAL = "journal"
    IDENTITY = "identity"
    LEFTOVER = "leftover"
    QUARANTINE = "quarantine"
    FASTQUEUE = "fastqueue"


class Damage(NamedTuple):
    """A place without readable events; the offsets ``[first, end)`` should have been there."""

    kind: FindingKind
    file: str
    byte: int
    length: int
    first: int
    end: int
    why: str = ""
    segment: SegmentFile | None = None


class IntactFrame(NamedTuple):
    """A valid frame, and the offsets ``[first, end)`` that no frame before it had."""

    segment: SegmentFile
    byte: int
    stored_size: int
    first: int
    end: int
    block: pa.RecordBatch | None
    """The events, base columns first; ``None`` if the caller did not want them."""


_DAMAGE_KINDS = {
    InvalidRegionKind.TORN: FindingKind.TRUNCATED,
    InvalidRegionKind.CORRUPT_HEADER: FindingKind.CORRUPT_HEADER,
    InvalidRegionKind.REPEAT: FindingKind.REPEAT,
    InvalidRegionKind.GAP: FindingKind.MISSING,
}


class SegmentWalk:
    """One walk. ``is_wanted(first, end)`` says which frames are read, checked and decoded."""

    def __init__(
        self, disk: Disk, segments: Sequence[SegmentFile], is_wanted: Callable[[int, int], bool]
    ) -> None:
        self._disk = disk
        self._segments = segments
        self._is_wanted = is_wanted
        self._expected = next((each.first for each in segments if not each.foreign), 0)

    def __iter__(self) -> Iterator[IntactFrame | Damage]:
        for segment in self._segments:
            if segment.foreign:
                yield self._skip_segment(segment, FindingKind.FOREIGN, self._expected)
                continue
            if segment.first > self._expected:
                name = format_segment_name(self._expected)
                yield Damage(FindingKind.MISSING, name, 0, 0, self._expected, segment.first)
                self._expected = segment.first
            yield from self._walk_through(segment)

    def _walk_through(self, segment: SegmentFile) -> Iterator[IntactFrame | Damage]:
        try:
            with self._disk.open_file(segment.path) as fd:
                if segment.readable:
                    yield from self._read_frames(fd, segment)
                else:
                    end = segment.limit
                    if segment.is_trailing:
                        end = self._find_end_by_headers(fd, segment)
                    yield self._skip_segment(segment, FindingKind.SCHEMA, end)
        except FileNotFoundError:
            end = self._expected if segment.is_last else segment.limit
            yield self._skip_segment(segment, FindingKind.MISSING, end)

    def _skip_segment(self, segment: SegmentFile, kind: FindingKind, end: int) -> Damage:
        first, self._expected = self._expected, max(self._expected, end)
        name = segment.path.name
        return Damage(kind, name, 0, segment.size, first, self._expected, segment=segment)

    def _find_end_by_headers(self, fd: int, segment: SegmentFile) -> int:
        """Return the segment's end by the headers of its frames: as recovery counts it."""
        regions = scan_segment(
            self._disk, fd, 0, segment.first, check_payload=False, size=segment.size
        )
        ends = [region.header.end for region in regions if isinstance(region, ValidFrame)]
        return max(ends, default=segment.first)

    def _read_frames(self, fd: int, segment: SegmentFile) -> Iterator[IntactFrame | Damage]:
        assert segment.schema is not None
        restorer = BaseColumnRestorer(segment.schema.schema)
        start = segment.schema.stored_size
        for region in scan_segment(
            self._disk, fd, start, self._expected, check_payload=False, size=segment.size
        ):
            if self._expected >= segment.limit:
                # The rest comes again in the next segment: a rewrite was interrupted.
                rest, at = segment.size - region.byte, self._expected
                yield Damage(FindingKind.REPEAT, segment.path.name, region.byte, rest, at, at)
                return
            if isinstance(region, InvalidRegion):
                yield self._describe_region(segment, region)
            elif region.header.kind is FrameKind.EVENTS:
                yield self._read_frame(fd, segment, region, restorer)

    def _describe_region(self, segment: SegmentFile, region: InvalidRegion) -> Damage:
        first = self._expected
        end = region.end or first
        if region.kind is InvalidRegionKind.TORN and not segment.is_last:
            end = segment.limit
        end = self._expected = max(first, min(end, segment.limit))
        kind, name = _DAMAGE_KINDS[region.kind], segment.path.name
        return Damage(kind, name, region.byte, region.length, first, end, segment=segment)

    def _read_frame(
        self, fd: int, segment: SegmentFile, frame: ValidFrame, restorer: BaseColumnRestorer
    ) -> IntactFrame | Damage:
        assert segment.schema is not None
        header, byte = frame.header, frame.byte
        size, name = header.stored_size, segment.path.name
        first, self._expected = max(header.first, self._expected), header.end
        if not self._is_wanted(first, header.end):
            return IntactFrame(segment, byte, size, first, header.end, None)
        payload = self._disk.read(fd, header.length, byte + HEADER_SIZE)
        if compute_checksum([payload]) != header.payload_crc:
            kind = FindingKind.CORRUPT_PAYLOAD
            return Damage(kind, name, byte, size, first, header.end, segment=segment)
        try:
            block, _ = decode_events(header, payload, segment.schema.schema)
        except FrameDamaged as error:
            kind = FindingKind.UNDECODABLE
            return Damage(kind, name, byte, size, first, header.end, str(error), segment)
        block = restorer.restore(block).slice(first - header.first)
        return IntactFrame(segment, byte, size, first, header.end, block)
