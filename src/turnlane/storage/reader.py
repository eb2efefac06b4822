"""Reading a log while it is written, even if its files are damaged.

A reader never fails on damaged bytes. It copies them to quarantine, returns the offsets that are
lost, and continues with the next valid frame. The writer may cut, replace or remove a segment at
any moment; the reader then starts again from the catalog.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import pyarrow as pa

from turnlane.ledger import Outcome
from turnlane.logs import get_logger
from turnlane.storage.directory import Quarantine
from turnlane.storage.disk_io import Disk
from turnlane.storage.encoder import EMPTY_SCHEMA, BaseColumnRestorer
from turnlane.storage.frames import (
    HEADER_SIZE,
    FrameDamaged,
    FrameHeader,
    FrameKind,
    compute_checksum,
    decode_events,
    parse_header,
)
from turnlane.storage.recovery import keep_damaged_bytes, rename_foreign_segment
from turnlane.storage.segments import Segment, SegmentCatalog, find_next_frame, read_segment_schema

log = get_logger(__name__)

READ_AHEAD = 64 * 1024
"""Small frames are read in pieces of this size, larger ones together with the next header."""

_EMPTY_BUFFER = pa.py_buffer(b"")


class StoredEvents(NamedTuple):
    """Events from the disk; ``first`` is the offset of the first one."""

    first: int
    block: pa.RecordBatch


class UnreadableRange(NamedTuple):
    """Offsets ``[first, end)`` that cannot be read: ``Outcome.CORRUPT`` or ``Outcome.MISSING``."""

    first: int
    end: int
    outcome: Outcome


class _HasEnd(Protocol):
    @property
    def end(self) -> int: ...


class _SegmentChanged(Exception):
    """The segment was cut, replaced or removed while it was read."""


class LogReader:
    """A reader of a log, for one thread at a time. It reads only events before the log's end."""

    def __init__(
        self,
        written: _HasEnd,
        catalog: SegmentCatalog,
        disk: Disk,
        quarantine: Quarantine,
        queue_id: str,
    ) -> None:
        self._written = written
        self._catalog = catalog
        self._disk = disk
        self._quarantine = quarantine
        self._queue_id = queue_id
        self._segment: Segment | None = None
        self._fd = -1
        self._byte = 0
        self._offset = 0
        self._window = _EMPTY_BUFFER
        self._window_at = 0
        self._frame: StoredEvents | None = None
        """The events of the last frame, perhaps for further reads."""
        self._restorer = BaseColumnRestorer(EMPTY_SCHEMA)

    def read(self, offset: int, max_events: int) -> StoredEvents | UnreadableRange | None:
        """Return the events from ``offset`` on, at most ``max_events``, never of two frames.

        ``UnreadableRange`` begins at ``offset``: continue at its end. ``None``: the log ends here
        for now. Raises ``OSError`` when the device fails to read.
        """
        while True:
            end = self._written.end
            if offset >= end:
                return None
            frame = self._frame
            if frame and 0 <= offset - frame.first < frame.block.num_rows:
                if offset == frame.first and frame.block.num_rows <= max_events:
                    return frame
                block = frame.block.slice(offset - frame.first, max_events)
                return StoredEvents(offset, block)
            try:
                unreadable = self._advance(offset, end)
            except _SegmentChanged:
                self._close_segment()
            else:
                if unreadable is not None:
                    return unreadable

    def skip(self, offset: int) -> UnreadableRange:
        """Skip what the device fails to read: the frame at ``offset``, or the whole segment.

        The segment's file is kept even when all its events are settled: people may be able to read
        it elsewhere.
        """
        segment = self._segment or self._catalog.find(offset)
        if segment is None:
            return UnreadableRange(offset, self._written.end, Outcome.MISSING)
        segment.has_uncopied_damage = True
        header = None
        if segment is self._segment:
            try:
                header = self._read_header(segment, self._byte)
            except OSError:
                header = None
        if header is not None and header.first <= offset < header.end:
            self._pass_frame(header)
            return UnreadableRange(offset, header.end, Outcome.CORRUPT)
        following = self._catalog.find_next(segment)
        end = self._written.end if following is None else following.first
        self._close_segment()
        return UnreadableRange(offset, end, Outcome.CORRUPT)

    def close(self) -> None:
        """Close the reader's file."""
        self._close_segment()

    # Finding the frame

    def _advance(self, offset: int, end: int) -> UnreadableRange | None:
        """Load the frame that holds ``offset``, or return the range that cannot be read."""
        segment = self._seek(offset)
        while segment is not None:
            following = self._catalog.find_next(segment)
            limit = end if following is None else following.first
            if self._segment is not segment and (
                unreadable := self._open_segment(segment, offset, limit)
            ):
                return unreadable
            while self._byte < segment.size and self._offset < limit:
                unreadable = self._read_frame(segment, offset, limit)
                if unreadable or self._frame:
                    return unreadable
            if segment not in self._catalog:
                raise _SegmentChanged
            segment = following
        return UnreadableRange(offset, end, Outcome.MISSING)

    def _seek(self, offset: int) -> Segment | None:
        """Return the segment to continue with; seek in it if it is already open."""
        self._frame = None
        is_next = self._segment is not None and offset == self._offset
        if is_next and self._segment in self._catalog:
            return self._segment
        segment = self._catalog.find(offset)
        if segment is not None and segment is self._segment:
            self._offset, self._byte = segment.find_mark(offset)
        return segment

    def _open_segment(self, segment: Segment, offset: int, limit: int) -> UnreadableRange | None:
        """Open a segment. One without a schema, or of another queue, is set aside."""
        self._close_segment()
        try:
            self._fd = self._disk.open(segment.path, write=False)
        except FileNotFoundError:
            return self._give_up_segment(segment, offset, limit, Outcome.MISSING)
        if segment.schema is None:
            schema = read_segment_schema(self._disk, self._fd)
            if schema is None:
                return self._give_up_segment(segment, offset, limit, Outcome.CORRUPT)
            if schema.is_foreign(self._queue_id, segment.first):
                return self._give_up_segment(
                    segment, offset, limit, Outcome.MISSING, is_foreign=True
                )
            segment.schema, segment.data_start = schema.schema, schema.stored_size
        self._segment, self._restorer = segment, BaseColumnRestorer(segment.schema)
        self._offset, self._byte = segment.find_mark(offset)
        return None

    def _give_up_segment(
        self,
        segment: Segment,
        offset: int,
        limit: int,
        outcome: Outcome,
        *,
        is_foreign: bool = False,
    ) -> UnreadableRange:
        if segment not in self._catalog:
            raise _SegmentChanged
        if is_foreign:
            rename_foreign_segment(segment.path, self._disk)
        elif outcome is Outcome.CORRUPT:
            self._quarantine.move(segment.path)
        else:
            log.warning("segment.missing", file=segment.path)
        self._catalog.remove(segment)
        self._close_segment()
        return UnreadableRange(offset, max(limit, offset + 1), outcome)

    def _close_segment(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
        self._segment, self._fd, self._frame = None, -1, None
        self._window, self._window_at = _EMPTY_BUFFER, 0

    # Reading a frame

    def _read_frame(self, segment: Segment, offset: int, limit: int) -> UnreadableRange | None:
        """Look at the next frame: load it, pass it, or return the range that it should hold."""
        byte = self._byte
        header = self._read_header(segment, byte)
        if header is None:
            return self._skip_damage(segment, byte, offset, limit)
        if header.kind is FrameKind.EVENTS:
            segment.add_mark(header.first, byte)
        if header.end <= offset:
            self._pass_frame(header)
            return None
        if header.first > offset:
            self._offset = header.first
            end = min(header.first, max(limit, offset + 1))
            return UnreadableRange(offset, end, Outcome.MISSING)
        try:
            payload = self._read_payload(segment, header, byte)
            if compute_checksum([payload]) != header.payload_crc:
                raise FrameDamaged("the checksum is wrong")  # noqa: TRY301 - handled as the others
            block, _ = decode_events(header, payload, segment.schema or EMPTY_SCHEMA)
        except FrameDamaged as error:
            self._quarantine_bytes(segment, byte, header.stored_size, str(error))
            self._pass_frame(header)
            return UnreadableRange(offset, header.end, Outcome.CORRUPT)
        self._frame = StoredEvents(header.first, self._restorer.restore(block))
        self._pass_frame(header)
        return None

    def _pass_frame(self, header: FrameHeader) -> None:
        self._byte += header.stored_size
        self._offset = max(self._offset, header.end)

    def _skip_damage(
        self, segment: Segment, byte: int, offset: int, limit: int
    ) -> UnreadableRange | None:
        """Copy the bytes up to the next valid header, and return the offsets that are lost."""
        size = segment.size
        if byte >= size:
            raise _SegmentChanged  # the writer has cut the file since the caller looked
        found = find_next_frame(self._disk, self._fd, byte + 8, size, self._offset)
        end = found.header.first if found and found.header.first < limit else limit
        stop = found.byte if found else size
        self._quarantine_bytes(segment, byte, stop - byte, "no valid header")
        self._byte, self._offset = stop, max(end, self._offset)
        return UnreadableRange(offset, end, Outcome.CORRUPT) if end > offset else None

    def _quarantine_bytes(self, segment: Segment, byte: int, length: int, error: str) -> None:
        if segment not in self._catalog or not byte < byte + length <= segment.size:
            raise _SegmentChanged  # it looked like damage because the writer cut the file
        log.warning("segment.damaged", file=segment.path, byte=byte, error=error)
        keep_damaged_bytes(self._quarantine, self._fd, segment, byte, length)

    # Reading bytes

    def _read_header(self, segment: Segment, byte: int) -> FrameHeader | None:
        at = byte - self._window_at
        if not 0 <= at <= len(self._window) - HEADER_SIZE:
            self._load_window(byte, READ_AHEAD, segment)
            at = 0
        header = parse_header(self._window, at)
        return header if header and byte + header.stored_size <= segment.size else None

    def _read_payload(self, segment: Segment, header: FrameHeader, byte: int) -> pa.Buffer:
        at = byte - self._window_at
        if at + header.stored_size > len(self._window):
            # One read brings the frame and the next one's header, so there is one read per frame.
            self._load_window(byte, max(header.stored_size + HEADER_SIZE, READ_AHEAD), segment)
            at = 0
        if len(self._window) - at < header.stored_size:
            raise FrameDamaged("the file became shorter while it was read")
        return self._window.slice(at + HEADER_SIZE, header.length)

    def _load_window(self, byte: int, length: int, segment: Segment) -> None:
        # No hint to the kernel about the next bytes: by itself it reads ahead in larger pieces. A
        # hint made reading from the device slower by a third.
        self._window = _EMPTY_BUFFER  # so that this read can reuse its memory
        self._window = self._disk.read(self._fd, max(0, min(length, segment.size - byte)), byte)
        self._window_at = byte
