"""Opening a log: find its end, set aside what is torn or foreign, lose nothing.

Only the last chunk's frames after the journal's hint are read, so opening takes the same time
however much is stored. Whatever is found, the log opens.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from turnlane.storage.directory import Quarantine
from turnlane.storage.disk_io import Disk
from turnlane.storage.encoder import EMPTY
from turnlane.storage.frames import (
    HEADER_SIZE,
    Data,
    FrameDamaged,
    FrameKind,
    Position,
    decode_stamps,
    decoded_length,
)
from turnlane.storage.producer_sequences import Accepted
from turnlane.storage.segments import (
    WINDOW,
    Catalog,
    Chunk,
    ChunkSchema,
    FaultKind,
    Flaw,
    Whole,
    chunk_name,
    header_at,
    list_chunks,
    payload_holds,
    read_schema,
    scan,
    schema_frame,
)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Recovered:
    """What was found in the directory."""

    chunks: list[Chunk] = field(default_factory=list)
    end: int = 0
    torn_bytes: int = 0
    stamps: dict[bytes, Accepted] = field(default_factory=dict)
    events_bytes: int = 0
    appendable: bool = False
    """Whether the last chunk ends with a whole frame and can be written on."""


class Recovery:
    """One opening of a log."""

    def __init__(self, directory: Path, disk: Disk, queue_id: str) -> None:
        self._directory = directory
        self._disk = disk
        self._queue_id = queue_id
        self._quarantine = Quarantine(directory, disk)
        self._found = Recovered()

    def run(self, hint: Position | None) -> Recovered:
        """Recover the log. Raises ``NotAQueue`` for an unknown format, before any change."""
        found = self._found
        firsts = list_chunks(self._directory, self._disk)
        for first in {*firsts[:1], *firsts[-1:]}:
            with self._opened(self._path(first)) as fd:
                read_schema(self._disk, fd)  # refuses an unknown format
        self._tidy()
        found.chunks = [chunk for first in firsts if (chunk := self._chunk(first))]
        while found.chunks and not self._is_ours(found.chunks[-1]):
            found.chunks.pop()
        while len(found.chunks) > 1 and self._is_foreign(found.chunks[0]):
            del found.chunks[0]
        if found.chunks:
            self._between(hint)
            self._last(found.chunks[-1], hint)
        return found

    def _path(self, first: int) -> Path:
        return self._directory / chunk_name(first)

    @contextmanager
    def _opened(self, path: Path, *, write: bool = False) -> Iterator[int]:
        fd = self._disk.open(path, write=write)
        try:
            yield fd
        finally:
            self._disk.close(fd)

    def _tidy(self) -> None:
        """Deal with files that were being written under a temporary name when a crash came."""
        for name in self._disk.listing(self._directory):
            if name.endswith(".chunk.new"):
                path = self._directory / name
                if self._has_events(path):
                    self._quarantine.move(path)
                else:
                    self._disk.unlink(path)

    def _has_events(self, path: Path) -> bool:
        with self._opened(path) as fd:
            regions = scan(self._disk, fd, 0, 0, check_payload=False)
            return any(
                isinstance(region, Whole) and region.header.kind is FrameKind.EVENTS
                for region in regions
            )

    def _chunk(self, first: int) -> Chunk | None:
        path = self._path(first)
        with self._opened(path) as fd:
            return Chunk(first, path, self._disk.size(fd), first)

    def _is_ours(self, chunk: Chunk) -> bool:
        """Whether the last chunk can be read; if not, it is set aside."""
        schema = self._schema(chunk)
        if schema is None:
            self._set_aside(chunk)
            return False
        return not self._is_foreign(chunk, schema)

    def _is_foreign(self, chunk: Chunk, schema: ChunkSchema | None = None) -> bool:
        schema = schema or self._schema(chunk)
        if schema is None:
            return False  # not the last one: the reader deals with it when it comes there
        if schema.queue_id == self._queue_id:
            chunk.schema, chunk.data_start = schema.schema, schema.stored
            return False
        set_foreign(chunk.path, self._disk)
        return True

    def _schema(self, chunk: Chunk) -> ChunkSchema | None:
        with self._opened(chunk.path) as fd:
            return read_schema(self._disk, fd)

    def _set_aside(self, chunk: Chunk) -> None:
        """A last chunk without a schema: torn at its creation, or damaged. Its offsets count."""
        end = chunk.first
        with self._opened(chunk.path) as fd:
            for region in scan(self._disk, fd, 0, chunk.first, check_payload=False):
                if isinstance(region, Whole):
                    end = max(end, region.header.end)
        self._found.end = max(self._found.end, end)
        self._found.torn_bytes += chunk.size
        if chunk.size:
            self._quarantine.move(chunk.path)
        else:
            self._disk.unlink(chunk.path)

    def _between(self, hint: Position | None) -> None:
        """Take the stamps of frames after the hint in chunks before the last."""
        for chunk in self._found.chunks[:-1]:
            if hint is None or chunk.first < hint.chunk:
                continue
            start = hint.byte if chunk.first == hint.chunk else 0
            with self._opened(chunk.path) as fd:
                if start % 8 == 0 and start <= chunk.size:
                    for region in scan(self._disk, fd, start, chunk.first, check_payload=False):
                        if isinstance(region, Whole):
                            self._note(fd, region)

    def _last(self, chunk: Chunk, hint: Position | None) -> None:
        with self._opened(chunk.path, write=True) as fd:
            good, chunk.end = self._start(fd, chunk, hint)
            for region in scan(self._disk, fd, good, chunk.end):
                if isinstance(region, Whole):
                    self._note(fd, region)
                    chunk.mark(region.header.first, region.byte)
                    good = region.byte + region.header.stored
                    chunk.end = region.header.end
                elif region.kind is FaultKind.REPEAT:
                    good = region.byte + region.length
            self._cut(fd, chunk, good)
        self._found.end = max(self._found.end, chunk.end)

    def _start(self, fd: int, chunk: Chunk, hint: Position | None) -> tuple[int, int]:
        """Where to begin in the last chunk: at the hint if it can be true, else at the start."""
        if hint is None or hint.chunk != chunk.first or hint.byte % 8:
            return chunk.data_start, chunk.first
        header = header_at(self._disk, fd, hint.byte, chunk.size)
        follows = header is not None and header.first == hint.end
        if follows or hint.byte == chunk.size:
            return max(hint.byte, chunk.data_start), max(hint.end, chunk.first)
        return chunk.data_start, chunk.first

    def _cut(self, fd: int, chunk: Chunk, good: int) -> None:
        """Keep a copy of the torn tail, then cut it off."""
        torn = chunk.size - good
        chunk.size = good
        self._found.appendable = True
        if not torn:
            return
        self._found.torn_bytes += torn
        try:
            self._quarantine.copy(fd, good, torn, chunk=chunk.first, kind="torn")
            self._disk.truncate(fd, good)
        except OSError as error:
            # A full disk must not keep the queue shut. The tail stays; a new chunk is started.
            _log.warning("the torn end of %s stays where it is: %s", chunk.path, error)
            chunk.unsaved = True
            self._found.appendable = False

    def _note(self, fd: int, frame: Whole) -> None:
        header = frame.header
        at = frame.byte + HEADER_SIZE
        with contextlib.suppress(FrameDamaged):
            beginning = self._disk.read(fd, min(10, header.length), at)
            self._found.events_bytes += decoded_length(header, beginning)
            if header.stamped and payload_holds(self._disk, fd, frame.byte, header):
                payload = self._disk.read(fd, header.length, at)
                for producer, next_sequence, first in decode_stamps(header, payload):
                    known = self._found.stamps.setdefault(producer, Accepted())
                    known.add(first, next_sequence)


def set_foreign(path: Path, disk: Disk) -> None:
    """Put a chunk of another queue out of the way, under a name that is not taken."""
    target = path.with_name(path.name + ".foreign")
    number = 0
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.{number}.foreign")
    disk.rename(path, target)
    disk.sync_directory(path.parent)
    _log.warning("%s belongs to another queue and is now %s", path, target.name)


# ── rescue ──
# What to do when a sync has failed: trust nothing but what can be read back.
#
# The kernel may have dropped what it could not write and calls it clean, so a second sync would
# succeed and mean nothing. The frames in doubt are read back, checked, and written to a new
# file;
# those that do not hold are made anew from what is still in memory.


Lost = list[tuple[int, int]]


class Remade(NamedTuple):
    """A frame of the events ``first`` to ``end - 1``, made from what is in memory."""

    first: int
    end: int
    frame: list[Data]


Remake = Callable[[Chunk, int, int], Iterator[Remade]]
"""Makes a chunk's frames for a range of offsets again, in order, as far as it can."""


def rescue_chunk(
    chunk: Chunk,
    catalog: Catalog,
    disk: Disk,
    quarantine: Quarantine,
    *,
    queue_id: str,
    remake: Remake,
) -> tuple[Chunk, int, Lost]:
    """Move a chunk's unsynced frames to a synced chunk of their own, then cut the former.

    Returns the new chunk, its descriptor, and the offsets that could neither be read back nor
    made anew. Raises ``OSError`` with everything as it was; readers are not disturbed either way.
    """
    rescue = _Rescue(chunk, disk, quarantine, queue_id, remake)
    fd = rescue.run()
    saved = rescue.saved
    catalog.add(saved)
    if saved.first != chunk.first:
        chunk.cut()  # before the file is: a reader that finds bytes gone then knows why
        rescue.cut_former()
    _log.warning(
        "a sync failed; %d bytes of %s were written again to %s",
        saved.size,
        chunk.path.name,
        saved.path.name,
    )
    return saved, fd, rescue.lost


class _Rescue:
    def __init__(
        self, chunk: Chunk, disk: Disk, quarantine: Quarantine, queue_id: str, remake: Remake
    ) -> None:
        self._chunk = chunk
        self._disk = disk
        self._remake = remake
        self._quarantine = quarantine
        self.lost: Lost = []
        first = chunk.synced_end
        path = chunk.path.with_name(chunk_name(first))
        schema = chunk.schema or EMPTY
        self._frame = schema_frame(schema, first, queue_id)
        size = sum(len(piece) for piece in self._frame)
        self.saved = Chunk(first, path, size, chunk.end, schema, size)

    def run(self) -> int:
        """Fill the new file under a temporary name, sync it, give it its own."""
        saved = self.saved
        temporary = saved.path.with_name(saved.path.name + ".new")
        fd = self._disk.open(temporary, create=True)
        try:
            self._fill(fd)
            self._disk.sync(fd)
            self._keep_former()
            self._disk.rename(temporary, saved.path)
            self._disk.sync_directory(saved.path.parent)
        except OSError:
            self._give_up(fd, temporary)
            raise
        saved.synced_size, saved.synced_end = saved.size, saved.end
        return fd

    def _give_up(self, fd: int, temporary: Path) -> None:
        self._disk.close(fd)
        with contextlib.suppress(OSError):
            self._disk.unlink(temporary)

    def _fill(self, fd: int) -> None:
        self._disk.truncate(fd, 0)
        self._disk.write(fd, self._frame, 0)
        chunk = self._chunk
        source = self._disk.open(chunk.path, write=False)  # a new one: it sees what is there
        try:
            start = max(chunk.synced_size, chunk.data_start)
            for region in scan(self._disk, source, start, chunk.synced_end, size=chunk.size):
                if isinstance(region, Whole):
                    self._copy(source, fd, region)
                elif region.length:
                    self._keep_copy(source, region)
                    self._replace(fd, region)
        finally:
            self._disk.close(source)

    def _copy(self, source: int, fd: int, frame: Whole) -> None:
        saved = self.saved
        saved.mark(frame.header.first, saved.size)
        done, length = 0, frame.header.stored
        while done < length:
            piece = self._disk.read(source, min(WINDOW, length - done), frame.byte + done)
            if not len(piece):
                raise OSError(5, "the file became shorter while it was read")
            self._disk.write(fd, [piece], saved.size + done)
            done += len(piece)
        saved.size += length

    def _replace(self, fd: int, flaw: Flaw) -> None:
        """Write what the damaged frames held, if it is still known; otherwise it is lost."""
        chunk, saved = self._chunk, self.saved
        at = chunk.synced_end if flaw.first is None else flaw.first
        end = chunk.end if flaw.end is None else flaw.end
        for first, after, frame in self._remake(chunk, at, end):
            if at < first:
                self.lost.append((at, first))
            saved.mark(first, saved.size)
            self._disk.write(fd, frame, saved.size)
            saved.size += sum(len(piece) for piece in frame)
            at = after
        if at < end:
            self.lost.append((at, end))

    def _keep_copy(self, source: int, flaw: Flaw) -> None:
        chunk = self._chunk
        try:
            self._quarantine.copy(source, flaw.byte, flaw.length, chunk=chunk.first, kind="frame")
        except OSError as error:
            _log.warning("%s keeps bytes that could not be copied: %s", chunk.path, error)
            chunk.unsaved = True

    def _keep_former(self) -> None:
        """Where the new file takes the former's name, keep the former if it has unsaved bytes."""
        if self._chunk.unsaved and self.saved.first == self._chunk.first:
            self._quarantine.move(self._chunk.path)

    def cut_former(self) -> None:
        """Cut the former chunk back to what was synced; harmless if that fails."""
        chunk = self._chunk
        if chunk.unsaved:
            return
        try:
            fd = self._disk.open(chunk.path)
            try:
                self._disk.truncate(fd, chunk.size)
            finally:
                self._disk.close(fd)
        except OSError as error:
            # Readers stop where the next chunk begins, so the repeated frames are never seen.
            _log.warning("%s keeps frames that were written again: %s", chunk.path, error)
