"""Two repairs of the log: recovery when it is opened, and the rewrite after a failed sync.

Recovery finds the log's end, sets aside torn or foreign files, and loses nothing. It reads only the
schema of each segment, and the last segment's frames after the journal's hint. The log always
opens.

The rewrite trusts only bytes that can be read back. After a failed sync the kernel may have dropped
the pages that it could not write and call them clean: a second sync would succeed and mean nothing.
So the unsynced frames are read back, checked, and written to a new file. Frames that are damaged
are built again from the events that are still in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from turnlane.logs import get_logger
from turnlane.storage.directory import Quarantine
from turnlane.storage.disk_io import Disk
from turnlane.storage.encoder import EMPTY_SCHEMA
from turnlane.storage.frames import (
    HEADER_SIZE,
    BufferLike,
    FrameDamaged,
    FrameKind,
    LogPosition,
    decode_sequences,
    get_decoded_length,
)
from turnlane.storage.producer_sequences import AcceptedSequences
from turnlane.storage.segments import (
    WINDOW_BYTES,
    InvalidRegion,
    InvalidRegionKind,
    Segment,
    SegmentCatalog,
    ValidFrame,
    encode_schema_frame,
    format_segment_name,
    is_payload_intact,
    list_segments,
    read_header,
    read_segment_schema,
    scan_segment,
)

log = get_logger(__name__)

# ── recovery ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class RecoveredLog:
    """The state of a log after its recovery."""

    segments: list[Segment] = field(default_factory=list)
    end: int = 0
    torn_bytes: int = 0
    sequences: dict[bytes, AcceptedSequences] = field(default_factory=dict)
    """By producer, the numbers in the frames after the hint."""
    events_bytes: int = 0
    """Bytes of the events after the hint, before compression."""
    appendable: bool = False
    """Whether the last segment ends with a valid frame, so that writing can continue there."""


class LogRecovery:
    """The recovery of one log."""

    def __init__(self, directory: Path, disk: Disk, queue_id: str) -> None:
        self._directory = directory
        self._disk = disk
        self._queue_id = queue_id
        self._quarantine = Quarantine(directory, disk)
        self._found = RecoveredLog()

    def run(self, hint: LogPosition | None) -> RecoveredLog:
        """Recover the log. Raises ``NotAQueue`` for an unknown format, before any change."""
        found = self._found
        firsts = list_segments(self._directory, self._disk)
        for first in {*firsts[:1], *firsts[-1:]}:
            with self._disk.open_file(self._directory / format_segment_name(first)) as fd:
                read_segment_schema(self._disk, fd)  # raises for an unknown format
        self._remove_temporary_files()
        for first in firsts:
            path = self._directory / format_segment_name(first)
            with self._disk.open_file(path) as fd:
                segment = Segment(first, path, self._disk.size(fd), first)
                schema = read_segment_schema(self._disk, fd)
            # All of them: a reader stops in a segment where the next one begins by its name.
            if schema is not None and schema.is_foreign(self._queue_id, first):
                rename_foreign_segment(path, self._disk)
            else:
                found.segments.append(segment)
        while found.segments and not self._can_continue_in(found.segments[-1]):
            found.segments.pop()
        if found.segments:
            self._collect_from_earlier_segments(hint)
            self._recover_last_segment(found.segments[-1], hint)
        return found

    def _remove_temporary_files(self) -> None:
        """Remove temporary files that a crash left behind; keep files that hold events."""
        for name in self._disk.listing(self._directory):
            if name.endswith(".chunk.new"):
                path = self._directory / name
                with self._disk.open_file(path) as fd:
                    regions = scan_segment(self._disk, fd, 0, 0, check_payload=False)
                    has_events = any(
                        isinstance(region, ValidFrame) and region.header.kind is FrameKind.EVENTS
                        for region in regions
                    )
                if has_events:
                    self._quarantine.move(path)
                else:
                    self._disk.unlink(path)

    def _can_continue_in(self, segment: Segment) -> bool:
        """Whether the last segment can be read; if not, it is set aside."""
        with self._disk.open_file(segment.path) as fd:
            schema = read_segment_schema(self._disk, fd)
        if schema is not None:
            segment.schema, segment.data_start = schema.schema, schema.stored_size
            return True
        # Torn at its creation, or damaged. Its offsets count: they must not be used again.
        end = segment.first
        with self._disk.open_file(segment.path) as fd:
            for region in scan_segment(self._disk, fd, 0, segment.first, check_payload=False):
                if isinstance(region, ValidFrame):
                    end = max(end, region.header.end)
        self._found.end = max(self._found.end, end)
        self._found.torn_bytes += segment.size
        if segment.size:
            self._quarantine.move(segment.path)
        else:
            self._disk.unlink(segment.path)
        return False

    def _collect_from_earlier_segments(self, hint: LogPosition | None) -> None:
        """Collect the sequences of the frames after the hint in all segments but the last."""
        for segment in self._found.segments[:-1]:
            if hint is None or segment.first < hint.segment:
                continue
            start = hint.byte if segment.first == hint.segment else 0
            if start % 8 or start > segment.size:
                continue
            with self._disk.open_file(segment.path) as fd:
                for region in scan_segment(
                    self._disk, fd, start, segment.first, check_payload=False
                ):
                    if isinstance(region, ValidFrame):
                        self._collect_from_frame(fd, region)

    def _recover_last_segment(self, segment: Segment, hint: LogPosition | None) -> None:
        with self._disk.open_file(segment.path, write=True) as fd:
            good, segment.end = self._find_start(fd, segment, hint)
            for region in scan_segment(self._disk, fd, good, segment.end):
                if isinstance(region, ValidFrame):
                    self._collect_from_frame(fd, region)
                    segment.add_mark(region.header.first, region.byte)
                    good = region.byte + region.header.stored_size
                    segment.end = region.header.end
                elif region.kind is InvalidRegionKind.REPEAT:
                    good = region.byte + region.length
            self._cut_torn_tail(fd, segment, good)
        self._found.end = max(self._found.end, segment.end)

    def _find_start(self, fd: int, segment: Segment, hint: LogPosition | None) -> tuple[int, int]:
        """Return where the scan of the last segment starts: at the hint if it can be true."""
        if hint is None or hint.segment != segment.first or hint.byte % 8:
            return segment.data_start, segment.first
        header = read_header(self._disk, fd, hint.byte, segment.size)
        if hint.byte == segment.size or (header is not None and header.first == hint.end):
            return max(hint.byte, segment.data_start), max(hint.end, segment.first)
        return segment.data_start, segment.first

    def _cut_torn_tail(self, fd: int, segment: Segment, good: int) -> None:
        """Copy the bytes after the last valid frame to quarantine, then cut them off."""
        torn = segment.size - good
        segment.size = good
        self._found.appendable = True
        if not torn:
            return
        self._found.torn_bytes += torn
        try:
            self._quarantine.copy(fd, good, torn, segment=segment.first, kind="torn")
            self._disk.truncate(fd, good)
        except OSError as error:
            # The queue must open on a full disk too. The tail stays; writing starts a new segment.
            log.warning("segment.torn_tail_kept", file=segment.path, bytes=torn, error=error)
            segment.has_uncopied_damage = True
            self._found.appendable = False

    def _collect_from_frame(self, fd: int, frame: ValidFrame) -> None:
        header = frame.header
        at = frame.byte + HEADER_SIZE
        with contextlib.suppress(FrameDamaged):
            beginning = self._disk.read(fd, min(10, header.length), at)
            self._found.events_bytes += get_decoded_length(header, beginning)
            if header.has_sequences and is_payload_intact(self._disk, fd, frame.byte, header):
                payload = self._disk.read(fd, header.length, at)
                for producer, next_sequence, first in decode_sequences(header, payload):
                    known = self._found.sequences.setdefault(producer, AcceptedSequences())
                    known.add(first, next_sequence)


def keep_damaged_bytes(
    quarantine: Quarantine, fd: int, segment: Segment, byte: int, length: int
) -> None:
    """Copy damaged bytes of a segment to quarantine; if that fails, keep the segment.

    It must not stop the caller: on a full disk, only reading frees space.
    """
    try:
        quarantine.copy(fd, byte, length, segment=segment.first, kind="frame")
    except OSError as error:
        hint = "the chunk is kept instead"
        log.warning("quarantine.copy_failed", file=segment.path, error=error, hint=hint)
        segment.has_uncopied_damage = True


def rename_foreign_segment(path: Path, disk: Disk) -> None:
    """Rename a segment that is not this queue's, or misnamed, to a name ending in ``.foreign``."""
    target = path.with_name(path.name + ".foreign")
    number = 0
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.{number}.foreign")
    disk.rename(path, target)
    disk.sync_directory(path.parent)
    hint = "the chunk is another queue's, or a copy under a wrong name"
    log.warning("segment.foreign", file=path, renamed=target.name, hint=hint)


# ── rewrite after a failed sync ──────────────────────────────────────────────────────────────────

LostRanges = list[tuple[int, int]]


class RebuiltFrame(NamedTuple):
    """A frame of the events ``first`` to ``end - 1``, encoded again from memory."""

    first: int
    end: int
    frame: list[BufferLike]


RebuildFrames = Callable[[Segment, int, int], Iterator[RebuiltFrame]]
"""Encodes the events of a range of offsets again, in order, as far as they are in memory."""


class SegmentRewrite:
    """Writes a segment's unsynced frames to a new synced segment, then cuts the old one.

    ``lost`` are the offsets that could neither be read back nor rebuilt.
    """

    def __init__(
        self,
        old: Segment,
        disk: Disk,
        quarantine: Quarantine,
        queue_id: str,
        rebuild: RebuildFrames,
    ) -> None:
        self._old = old
        self._disk = disk
        self._rebuild = rebuild
        self._quarantine = quarantine
        self.lost: LostRanges = []
        first = old.synced_end
        path = old.path.with_name(format_segment_name(first))
        schema = old.schema or EMPTY_SCHEMA
        self._schema_frame = encode_schema_frame(schema, first, queue_id)
        size = sum(len(piece) for piece in self._schema_frame)
        self._new = Segment(first, path, size, old.end, schema, size)

    def run(self, catalog: SegmentCatalog) -> tuple[Segment, int]:
        """Return the new segment and its descriptor. Readers are not disturbed.

        Raises ``OSError`` with everything as it was.
        """
        old, new = self._old, self._new
        fd = self._write_file()
        catalog.add(new)
        if new.first != old.first:
            old.discard_unsynced()  # before the file is cut: so readers know why bytes are gone
            self._cut_old_file()
        log.warning(
            "segment.rewritten_after_failed_sync",
            file=old.path.name,
            bytes=new.size,
            new_file=new.path.name,
        )
        return new, fd

    def _write_file(self) -> int:
        """Write the new file under a temporary name, sync it, rename it; return its descriptor."""
        new = self._new
        temporary = new.path.with_name(new.path.name + ".new")
        fd = self._disk.open(temporary, create=True)
        try:
            self._write_frames(fd)
            self._disk.sync(fd)
            if self._old.has_uncopied_damage and new.first == self._old.first:
                self._quarantine.move(self._old.path)  # the new file takes its name
            self._disk.rename(temporary, new.path)
            self._disk.sync_directory(new.path.parent)
        except OSError:
            self._disk.close(fd)
            with contextlib.suppress(OSError):
                self._disk.unlink(temporary)
            raise
        new.synced_size, new.synced_end = new.size, new.end
        return fd

    def _write_frames(self, fd: int) -> None:
        self._disk.truncate(fd, 0)
        self._disk.write(fd, self._schema_frame, 0)
        old = self._old
        with self._disk.open_file(old.path) as source:
            start = max(old.synced_size, old.data_start)
            for region in scan_segment(self._disk, source, start, old.synced_end, size=old.size):
                if isinstance(region, ValidFrame):
                    self._copy_frame(source, fd, region)
                elif region.length:
                    keep_damaged_bytes(self._quarantine, source, old, region.byte, region.length)
                    self._write_rebuilt_frames(fd, region)

    def _copy_frame(self, source: int, fd: int, frame: ValidFrame) -> None:
        new = self._new
        new.add_mark(frame.header.first, new.size)
        done, length = 0, frame.header.stored_size
        while done < length:
            piece = self._disk.read(source, min(WINDOW_BYTES, length - done), frame.byte + done)
            if not len(piece):
                raise OSError(5, "the file became shorter while it was read")
            self._disk.write(fd, [piece], new.size + done)
            done += len(piece)
        new.size += length

    def _write_rebuilt_frames(self, fd: int, region: InvalidRegion) -> None:
        """Write the events of damaged frames from memory; the others are lost."""
        old, new = self._old, self._new
        at = old.synced_end if region.first is None else region.first
        end = old.end if region.end is None else region.end
        for first, after, frame in self._rebuild(old, at, end):
            if at < first:
                self.lost.append((at, first))
            new.add_mark(first, new.size)
            self._disk.write(fd, frame, new.size)
            new.size += sum(len(piece) for piece in frame)
            at = after
        if at < end:
            self.lost.append((at, end))

    def _cut_old_file(self) -> None:
        """Cut the old file back to its synced size; a failure is harmless."""
        old = self._old
        if old.has_uncopied_damage:
            return
        try:
            with self._disk.open_file(old.path, write=True) as fd:
                self._disk.truncate(fd, old.size)
        except OSError as error:
            # Readers stop where the next segment begins, so they never see the repeated frames.
            log.warning("segment.cut_failed", file=old.path, error=error)
