"""Reading a log while it is written, whatever state its files are in.

A reader never fails on bad bytes: it keeps a copy of them in quarantine, says which offsets are
gone, and goes on with the next frame that holds.
"""

from __future__ import annotations

import logging
from typing import NamedTuple, Protocol

import pyarrow as pa

from turnlane.ledger import Outcome
from turnlane.storage.directory import Quarantine
from turnlane.storage.disk_io import Disk
from turnlane.storage.encoder import EMPTY, Restoring
from turnlane.storage.frames import (
    HEADER_SIZE,
    FrameDamaged,
    FrameKind,
    Header,
    checksum,
    decode_events,
    parse_header,
)
from turnlane.storage.recovery import set_foreign
from turnlane.storage.segments import Catalog, Chunk, next_frame, read_schema

_log = logging.getLogger(__name__)

READ_AHEAD = 64 * 1024
"""Small frames are read this much at a time; larger ones together with the next one's header."""

_NOTHING = pa.py_buffer(b"")


class Found(NamedTuple):
    """Events from disk; ``first`` is the offset that was asked for."""

    first: int
    block: pa.RecordBatch


class Fault(NamedTuple):
    """Offsets [first, end) that cannot be read: ``Outcome.CORRUPT`` or ``Outcome.MISSING``."""

    first: int
    end: int
    outcome: Outcome


class _Ending(Protocol):
    @property
    def end(self) -> int: ...


class _Moved(Exception):
    """The chunk was cut, replaced or removed while it was read."""


class LogReader:
    """A view of a log, for one thread at a time. Reads only what the writer has published."""

    def __init__(
        self, log: _Ending, catalog: Catalog, disk: Disk, quarantine: Quarantine, queue_id: str
    ) -> None:
        self._log = log
        self._catalog = catalog
        self._disk = disk
        self._quarantine = quarantine
        self._queue_id = queue_id
        self._chunk: Chunk | None = None
        self._fd = -1
        self._byte = 0
        self._offset = 0
        self._window = _NOTHING
        self._window_at = 0
        self._held: Found | None = None
        self._restoring = Restoring(EMPTY)

    def read(self, offset: int, max_events: int) -> Found | Fault | None:
        """The events from ``offset`` on, ``max_events`` at most; never of two frames.

        ``Fault`` says that offsets from ``offset`` on cannot be read: go on at its end. ``None``:
        the log ends here for now. Raises ``OSError`` when the device fails to read.
        """
        while True:
            end = self._log.end
            if offset >= end:
                return None
            if self._held and 0 <= offset - self._held.first < self._held.block.num_rows:
                return self._slice(offset, max_events)
            try:
                fault = self._advance(offset, end)
            except _Moved:
                self._forget()
            else:
                if fault is not None:
                    return fault

    def skip(self, offset: int) -> Fault:
        """Pass over what the device does not read: the frame at ``offset``, or the whole chunk.

        The chunk is kept when everything in it is settled: somebody may yet read it elsewhere.
        """
        chunk = self._chunk or self._catalog.at(offset)
        if chunk is None:
            return Fault(offset, self._log.end, Outcome.MISSING)
        chunk.unsaved = True
        header = self._readable_header(chunk) if chunk is self._chunk else None
        if header is not None and header.first <= offset < header.end:
            self._pass(header)
            return Fault(offset, header.end, Outcome.CORRUPT)
        following = self._catalog.after(chunk)
        end = self._log.end if following is None else following.first
        self._forget()
        return Fault(offset, end, Outcome.CORRUPT)

    def _readable_header(self, chunk: Chunk) -> Header | None:
        try:
            return self._header(chunk, self._byte)
        except OSError:
            return None

    def close(self) -> None:
        """Close the reader's file."""
        self._forget()

    def _slice(self, offset: int, max_events: int) -> Found:
        held = self._held
        assert held is not None
        if offset == held.first and held.block.num_rows <= max_events:
            return held
        return Found(offset, held.block.slice(offset - held.first, max_events))

    def _advance(self, offset: int, end: int) -> Fault | None:
        """Hold the frame with ``offset``, or say why there is none."""
        chunk = self._seek(offset)
        while chunk is not None:
            following = self._catalog.after(chunk)
            limit = end if following is None else following.first
            if self._chunk is not chunk and (fault := self._enter(chunk, offset, limit)):
                return fault
            while self._byte < chunk.size and self._offset < limit:
                fault = self._take(chunk, offset, limit)
                if fault or self._held:
                    return fault
            if chunk not in self._catalog:
                raise _Moved
            chunk = following
        return Fault(offset, end, Outcome.MISSING)

    def _seek(self, offset: int) -> Chunk | None:
        """The chunk to go on with; where in it, if it is the one that is open."""
        self._held = None
        if self._chunk is not None and offset == self._offset and self._chunk in self._catalog:
            return self._chunk
        chunk = self._catalog.at(offset)
        if chunk is not None and chunk is self._chunk:
            self._offset, self._byte = chunk.before(offset)
        return chunk

    def _enter(self, chunk: Chunk, offset: int, limit: int) -> Fault | None:
        """Open a chunk. One without a schema, or of another queue, is set aside."""
        self._forget()
        try:
            self._fd = self._disk.open(chunk.path, write=False)
        except FileNotFoundError:
            return self._lost(chunk, offset, limit, Outcome.MISSING)
        if chunk.schema is None:
            schema = read_schema(self._disk, self._fd)
            if schema is None:
                return self._lost(chunk, offset, limit, Outcome.CORRUPT)
            if schema.queue_id != self._queue_id:
                return self._lost(chunk, offset, limit, Outcome.MISSING, foreign=True)
            chunk.schema, chunk.data_start = schema.schema, schema.stored
        self._chunk, self._restoring = chunk, Restoring(chunk.schema)
        self._offset, self._byte = chunk.before(offset)
        return None

    def _lost(
        self, chunk: Chunk, offset: int, limit: int, outcome: Outcome, *, foreign: bool = False
    ) -> Fault:
        if chunk not in self._catalog:
            raise _Moved
        if foreign:
            set_foreign(chunk.path, self._disk)
        elif outcome is Outcome.CORRUPT:
            self._quarantine.move(chunk.path)
        else:
            _log.warning("%s has gone from the directory", chunk.path)
        self._catalog.discard(chunk)
        self._forget()
        return Fault(offset, max(limit, offset + 1), outcome)

    def _take(self, chunk: Chunk, offset: int, limit: int) -> Fault | None:
        """Look at the next frame: hold it, pass over it, or find it at fault."""
        byte = self._byte
        header = self._header(chunk, byte)
        if header is None:
            return self._damaged(chunk, byte, offset, limit)
        if header.kind is FrameKind.EVENTS:
            chunk.mark(header.first, byte)
        if header.end <= offset:
            self._pass(header)
            return None
        if header.first > offset:
            self._offset = header.first
            return Fault(offset, min(header.first, max(limit, offset + 1)), Outcome.MISSING)
        try:
            self._hold(chunk, header, self._payload(chunk, header, byte))
        except FrameDamaged as error:
            self._set_aside(chunk, byte, header.stored, str(error))
            self._pass(header)
            return Fault(offset, header.end, Outcome.CORRUPT)
        return None

    def _pass(self, header: Header) -> None:
        self._byte += header.stored
        self._offset = max(self._offset, header.end)

    def _hold(self, chunk: Chunk, header: Header, payload: pa.Buffer) -> None:
        if checksum([payload]) != header.payload_crc:
            raise FrameDamaged("checksum")
        block, _ = decode_events(header, payload, chunk.schema or pa.schema([]))
        self._held = Found(header.first, self._restoring.restored(block))
        self._pass(header)

    def _damaged(self, chunk: Chunk, byte: int, offset: int, limit: int) -> Fault | None:
        """No valid header here: keep the bytes up to the next one, and count what is lost."""
        size = chunk.size
        if byte >= size:
            raise _Moved  # the writer has cut the file since the caller looked
        found = next_frame(self._disk, self._fd, byte + 8, size, self._offset)
        end = found.header.first if found and found.header.first < limit else limit
        stop = found.byte if found else size
        self._set_aside(chunk, byte, stop - byte, "no valid header")
        self._byte, self._offset = stop, max(end, self._offset)
        return Fault(offset, end, Outcome.CORRUPT) if end > offset else None

    def _set_aside(self, chunk: Chunk, byte: int, length: int, why: str) -> None:
        if chunk not in self._catalog or not byte < byte + length <= chunk.size:
            raise _Moved  # what looked like damage was the writer cutting the file
        _log.warning("%s is damaged at byte %d: %s", chunk.path, byte, why)
        try:
            self._quarantine.copy(self._fd, byte, length, chunk=chunk.first, kind="frame")
        except OSError as error:
            # A full disk must not stop the reading that frees it: keep the chunk itself instead.
            _log.warning("no copy could be made, so the chunk will be kept: %s", error)
            chunk.unsaved = True

    def _header(self, chunk: Chunk, byte: int) -> Header | None:
        at = byte - self._window_at
        if not 0 <= at <= len(self._window) - HEADER_SIZE:
            self._fill(byte, READ_AHEAD, chunk)
            at = 0
        header = parse_header(self._window, at)
        return header if header and byte + header.stored <= chunk.size else None

    def _fill(self, byte: int, length: int, chunk: Chunk) -> None:
        # No hint to the device of what comes next: the kernel reads ahead by itself, in larger
        # pieces than for a hint, which made reading from the device slower by a third.
        self._window = _NOTHING  # its memory can be used again by this very read
        self._window = self._disk.read(self._fd, max(0, min(length, chunk.size - byte)), byte)
        self._window_at = byte

    def _payload(self, chunk: Chunk, header: Header, byte: int) -> pa.Buffer:
        at = byte - self._window_at
        if at + header.stored > len(self._window):
            # One read brings the frame and the next one's header, so there is one read a frame.
            self._fill(byte, max(header.stored + HEADER_SIZE, READ_AHEAD), chunk)
            at = 0
        if len(self._window) - at < header.stored:
            raise FrameDamaged("the file is shorter than it was")
        return self._window.slice(at + HEADER_SIZE, header.length)

    def _forget(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
        self._chunk, self._fd, self._held = None, -1, None
        self._window, self._window_at = _NOTHING, 0
