"""The log: one thread appends blocks of events to segments, other threads read them.

``append`` writes, ``sync`` makes durable, ``rewrite_after_failed_sync`` saves the events that a
failed sync has put in doubt. The design is described in the docstring of the package.

Only the queue's writer calls the methods that write. ``end``, ``list_segments`` and readers may be
used from any thread: the catalog and the segments' sizes change only after the bytes are written.

:class:`ActiveSegment` is the segment at the end, which is open for writing. A group of frames is
written completely, or the file is cut back to its former end. One group can be written by a second
thread while the writer encodes the next one.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter

import pyarrow as pa

from turnlane.errors import Bug
from turnlane.runtime import start_thread
from turnlane.storage.directory import Quarantine
from turnlane.storage.disk_io import Disk
from turnlane.storage.encoder import (
    EMPTY_SCHEMA,
    CompressionPolicy,
    FrameEncoder,
    FrameGroup,
    PlannedFrame,
)
from turnlane.storage.frames import LogPosition, ProducerSequence
from turnlane.storage.reader import LogReader
from turnlane.storage.recovery import LogRecovery, LostRanges, RebuiltFrame, SegmentRewrite
from turnlane.storage.segments import (
    Segment,
    SegmentCatalog,
    SegmentSpan,
    create_segment_file,
    encode_schema_frame,
    format_segment_name,
)

WRITE_BYTES = 1 << 20
"""Frames are written once there is this much of them: while they are in the processor's cache, and
so that the device works while the next ones are encoded."""

UnsyncedBlocks = Callable[
    [int, int], Iterator[tuple[int, Sequence[pa.RecordBatch], Sequence[ProducerSequence]]]
]
"""Returns the events of a range of offsets that are still in memory: runs of blocks, each with its
first offset and its sequences."""


EARLY_SYNC_BYTES = 1 << 20
"""After a write of this size the device is asked to begin at once: a later sync takes less time."""

MAX_GROUPS_IN_PROGRESS = 2
"""Groups that may be in progress before the writer waits: the device always has a next one."""


class SingleThreadExecutor:
    """Runs one call after the other on a thread of its own. For one calling thread.

    The thread starts with the first call. ``concurrent.futures`` does not serve here: its worker
    keeps a finished call, and so the memory of a written group, until the next one comes, and it
    runs a call late that it could not start a thread for. Here the calling thread then runs it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._results: SimpleQueue[BaseException | None] = SimpleQueue()

    def submit(self, call: Callable[[], None]) -> None:
        """Start a call; :meth:`wait` must follow."""
        self._calls.put(call)
        if self._thread is None:
            self._start()

    def wait(self) -> None:
        """Wait for the oldest call that is not waited for yet; raise the error that it raised."""
        error = self._results.get()
        if error is not None:
            raise error

    def stop(self) -> None:
        """End the thread. A later call starts another one."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _start(self) -> None:
        # A daemon thread, as the queue's writer: all that matters is synced before a close returns.
        try:
            self._thread = start_thread(self._name, self._run)
        except RuntimeError:
            # No thread can start while the interpreter ends, or when the process has too many.
            self._calls.put(None)
            self._run()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001  wait() raises it
                self._results.put(error)
            else:
                del call  # frees the memory of the group before the next one is encoded
                self._results.put(None)


class ActiveSegment:
    """The file to which the log's one writer appends, if there is one.

    ``on_written`` is called on the writer's thread after each group, in order.
    """

    def __init__(
        self, disk: Disk, *, durable: bool, on_written: Callable[[FrameGroup], None]
    ) -> None:
        self.segment: Segment | None = None
        self._disk = disk
        self._fd = -1
        self._durable = durable
        self._on_written = on_written
        self._needs_cut = False
        """The file ends with part of a group that failed."""
        self._write_failed = False
        """A write has failed, so the groups after it are not written: they would follow a gap."""
        self._executor = SingleThreadExecutor("turnlane-disk")
        self._in_progress: deque[FrameGroup] = deque()
        """The groups that are being written, in order."""

    def open(self, segment: Segment, fd: int) -> None:
        """Append to this segment and close the former one."""
        self.close()
        self.segment, self._fd = segment, fd

    def close(self) -> None:
        """Close the file; nothing is appended to it any more."""
        if self._fd >= 0:
            self._disk.close(self._fd)
        self.segment, self._fd, self._needs_cut = None, -1, False

    def stop(self) -> None:
        """Close the file and end the thread."""
        self.close()
        self._executor.stop()

    @property
    def bytes_in_progress(self) -> int:
        """Bytes of groups that are being written and are not in the segment's size yet."""
        return sum(group.size for group in self._in_progress)

    def write(self, group: FrameGroup) -> None:
        """Append a group. ``OSError``: nothing of it is in the file."""
        self.finish()
        if self._prepare(group):
            self._complete(group, lambda: self._write(group))

    def begin(self, group: FrameGroup) -> None:
        """Append a group on the second thread; :meth:`finish` raises the error if it fails."""
        if len(self._in_progress) == MAX_GROUPS_IN_PROGRESS:
            self._finish_oldest()
        if self._prepare(group):
            self._executor.submit(lambda: self._write(group))
            self._in_progress.append(group)

    def finish(self) -> None:
        """Wait for all groups in progress. ``OSError``: some of them are not in the file."""
        while self._in_progress:
            self._finish_oldest()

    def sync(self) -> None:
        """Return once the file's data is on the device."""
        self._disk.sync(self._fd)

    def _finish_oldest(self) -> None:
        self._complete(self._in_progress.popleft(), self._executor.wait)

    def _prepare(self, group: FrameGroup) -> bool:
        """Give the group its place in the file; false if there is nothing to write."""
        if self.segment is None or not group.size:
            return False
        if self._needs_cut:
            self._cut_back(self.segment)
        group.at = self.segment.size + self.bytes_in_progress
        return True

    def _write(self, group: FrameGroup) -> None:
        """Write the group and change nothing else: this may run on the second thread."""
        if self._write_failed:
            return
        started = perf_counter()
        try:
            self._disk.write(self._fd, group.buffers, group.at)
        except OSError:
            self._write_failed = True
            raise
        if self._durable and group.size >= EARLY_SYNC_BYTES:
            self._disk.begin_sync(self._fd, group.at, group.size)
        group.seconds = perf_counter() - started

    def _complete(self, group: FrameGroup, wait_for_write: Callable[[], None]) -> None:
        """Wait until the group is in the file, then let readers see it."""
        segment = self.segment
        assert segment is not None
        try:
            wait_for_write()
        except OSError:
            for _ in self._in_progress:
                self._executor.wait()
            self._in_progress.clear()
            self._write_failed, self._needs_cut = False, True
            with contextlib.suppress(OSError):
                self._cut_back(segment)
            raise
        for offset, byte in group.starts:
            segment.add_mark(offset, group.at + byte)
        # The size first: readers trust the end, so the size must cover all events before it.
        segment.size += group.size
        segment.end = group.end
        self._on_written(group)

    def _cut_back(self, segment: Segment) -> None:
        """Cut off a write that failed; nothing may be written until this succeeds."""
        self._disk.truncate(self._fd, segment.size)
        self._needs_cut = False


class SyncFailed(OSError):
    """The disk did not keep written data: call ``rewrite_after_failed_sync()`` next."""


class Log:
    """An open log. One thread writes; :meth:`create_reader` gives others a view."""

    def __init__(
        self,
        directory: Path,
        disk: Disk,
        *,
        queue_id: str,
        segment_size: int,
        compression: CompressionPolicy,
        hint: LogPosition | None = None,
        floor: int = 0,
        durable: bool = True,
    ) -> None:
        """Recover the log and open it. ``floor`` is the lowest offset that may come next.

        Raises ``NotAQueue`` for an unknown format and ``OSError`` if the directory cannot be read.
        """
        found = LogRecovery(directory, disk, queue_id).run(hint)
        self._directory = directory
        self._disk = disk
        self._queue_id = queue_id
        self._segment_size = segment_size
        self._encoder = FrameEncoder(compression)
        self._durable = durable
        self._quarantine = Quarantine(directory, disk)
        self._catalog = SegmentCatalog(found.segments)
        self._end = max(found.end, floor)
        self.synced_end = self._end
        self.torn_bytes = found.torn_bytes
        self.recovered_sequences = found.sequences
        self.recovered_events_bytes = found.events_bytes
        self.rotations = 0
        self.on_new_segment: Callable[[], None] | None = None
        """Called before a new segment is started, when all that is written is synced."""
        self._active = ActiveSegment(disk, durable=durable, on_written=self._handle_written)
        self._schema = EMPTY_SCHEMA
        self._directory_unsynced = False
        self._sync_failed = False
        self._lost: LostRanges = []
        """Offsets that a rewrite, which is not finished yet, could not read back."""
        self._repeatable = -1
        """The first offset of an append that failed and may be called again."""
        if not found.segments:
            return
        for segment in found.segments[:-1]:
            segment.synced_size, segment.synced_end = segment.size, segment.end
        # The frames that recovery read back may never have been synced: the first sync covers them.
        last = found.segments[-1]
        last.synced_end = self.synced_end = last.first
        self._schema = last.schema or EMPTY_SCHEMA
        if found.appendable and self._end == last.end:
            self._active.open(last, disk.open(last.path))

    def close(self) -> None:
        """Close the files without a sync."""
        self._active.stop()

    # State

    @property
    def end(self) -> int:
        """The offset that comes next."""
        return self._end

    @property
    def has_unsynced(self) -> bool:
        """Whether a power cut could lose events of a durable log."""
        return self._durable and self.synced_end < self._end

    @property
    def start(self) -> int:
        """The first offset on disk; ``end`` if there is none."""
        segments = self._catalog.segments
        return segments[0].first if segments else self._end

    @property
    def bytes(self) -> int:
        """The bytes of all segments."""
        return sum(segment.size for segment in self._catalog.segments)

    @property
    def position(self) -> LogPosition:
        """Where the log ends: the hint at which the next recovery starts."""
        active = self._active.segment
        if active is None:
            return LogPosition(self._end, 0, self._end)
        return LogPosition(active.first, active.size, self._end)

    @property
    def schema(self) -> pa.Schema:
        """The columns that have had values."""
        return self._schema

    def list_segments(self) -> list[SegmentSpan]:
        """Return all segments, oldest first; the last one ends where the log ends."""
        return self._catalog.list_spans(self._end)

    def list_inactive_segments(self) -> list[SegmentSpan]:
        """Return the segments that may be removed once all their events are settled."""
        active = self._active.segment
        return [span for span in self.list_segments() if not active or span.first != active.first]

    def create_reader(self) -> LogReader:
        """Return a new reader, for one thread at a time."""
        return LogReader(self, self._catalog, self._disk, self._quarantine, self._queue_id)

    # Appending

    def append(
        self, first: int, block: pa.RecordBatch, sequences: Sequence[ProducerSequence] = ()
    ) -> None:
        """Append one block as one frame; ``first`` may leave a gap after ``end``.

        If it raises, nothing has changed and the same call may be repeated: ``SchemaMismatch`` for
        a column of a different type, ``SyncFailed`` if a sync before a new segment failed, or
        ``OSError``.
        """
        self.append_frames(first, [[block]], sequences)

    def append_frames(
        self,
        first: int,
        frames: Sequence[Sequence[pa.RecordBatch]],
        sequences: Sequence[ProducerSequence] = (),
    ) -> None:
        """Append several frames, each given as the blocks to join for it, in large writes.

        The sequences go with the last frame: a crash before it causes a repeat, never a loss. After
        ``OSError`` some frames may be in the log (see ``end``); the same call continues after them.
        """
        self._require_good_sync()
        if first < self._end and first != self._repeatable:
            raise Bug(f"offset {first} was appended before: the log ends at {self._end}")
        self._repeatable = first
        planned = self._encoder.plan_frames(self._schema, first, frames, sequences, end=self._end)
        try:
            self._write_frames(planned)
        finally:
            self._active.finish()
        self._repeatable = -1

    def _write_frames(self, frames: Iterator[PlannedFrame]) -> None:
        """Encode frames, and write them on the second thread once there are enough of them."""
        group = FrameGroup()
        for planned in frames:
            frame = self._encoder.encode(planned)
            size = sum(len(piece) for piece in frame)
            if self._needs_new_segment(
                planned.schema, self._active.bytes_in_progress + group.size, size
            ):
                self._active.write(group)
                group = FrameGroup()
                self._start_segment(planned.first, planned.schema)
            group.add(frame, planned.first, planned.block.num_rows)
            if group.size >= WRITE_BYTES and not planned.is_last:
                self._active.begin(group)
                group = FrameGroup()
        self._active.write(group)

    def _needs_new_segment(self, schema: pa.Schema, pending: int, size: int) -> bool:
        active, known = self._active.segment, self._catalog.segments
        if active is None or schema is not self._schema:
            return True
        if not known or known[-1] is not active:
            return True  # a reader found that the file was deleted from outside
        used = active.size + pending
        return used > active.data_start and used + size > self._segment_size

    def _handle_written(self, group: FrameGroup) -> None:
        self._encoder.record_write(group.size, group.seconds)
        self._end = group.end

    # Segments

    def close_active_segment(self) -> None:
        """Stop appending to the active segment, so that it can be removed. Needs no space."""
        self._active.close()

    def remove_segment(self, first: int) -> None:
        """Delete the segment named ``first``, whose events are all settled; not the active one."""
        segment = self._catalog.get(first)
        if segment is None:
            return
        if segment is self._active.segment:
            raise Bug("the active segment cannot be removed: close it first")
        if segment.has_uncopied_damage:
            self._quarantine.move(segment.path)
        else:
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(segment.path)
        self._catalog.remove(segment)

    def _start_segment(self, first: int, schema: pa.Schema) -> None:
        if self._durable:
            self.sync()
        if self.on_new_segment is not None:
            self.on_new_segment()
        path = self._directory / format_segment_name(first)
        frame = encode_schema_frame(schema, first, self._queue_id)
        former = self._catalog.get(first)
        if former is not None and former.has_uncopied_damage:
            self._quarantine.move(former.path)
        fd = create_segment_file(self._disk, path, frame)
        # The next sync covers the name: until then nothing in the segment counts as synced.
        self._directory_unsynced = True
        size = sum(len(piece) for piece in frame)
        self._switch_to(Segment(first, path, size, first, schema, size, synced_end=first), fd)
        self.rotations += 1

    def _switch_to(self, segment: Segment, fd: int) -> None:
        self._catalog.add(segment)
        self._active.open(segment, fd)
        self._schema = segment.schema or EMPTY_SCHEMA

    # Durability

    def sync(self) -> None:
        """Return once everything appended is on the device. Raises ``SyncFailed``."""
        self._require_good_sync()
        end = self._end
        for segment in self._list_unsynced():
            started = perf_counter()
            try:
                if segment is self._active.segment:
                    self._active.sync()
                else:
                    with self._disk.open_file(segment.path, write=True) as fd:
                        self._disk.sync(fd)
                self._sync_directory()
            except OSError as error:
                self._sync_failed = True
                raise SyncFailed(error.errno, f"sync failed: {error.strerror}") from error
            segment.synced_size, segment.synced_end = segment.size, segment.end
            self._encoder.record_write(0, perf_counter() - started, synced=True)
        self.synced_end = end

    def _list_unsynced(self) -> list[Segment]:
        return [segment for segment in self._catalog.segments if segment.synced_size < segment.size]

    def _sync_directory(self) -> None:
        if self._directory_unsynced:
            self._disk.sync_directory(self._directory)
            self._directory_unsynced = False

    def rewrite_after_failed_sync(self, in_memory: UnsyncedBlocks | None = None) -> LostRanges:
        """Write all unsynced events to new segments and sync these, after ``SyncFailed``.

        Events that cannot be read back are taken from ``in_memory``. Returns the offsets
        ``[first, end)`` of the events that are in neither place. Raises ``OSError`` if it did not
        succeed: then call it again.
        """

        def rebuild(segment: Segment, first: int, end: int) -> Iterator[RebuiltFrame]:
            schema = segment.schema or EMPTY_SCHEMA
            for at, blocks, sequences in in_memory(first, end) if in_memory else ():
                frames = self._encoder.plan_frames(schema, at, [blocks], sequences, end=at)
                for planned in frames:
                    end_of_frame = at + planned.block.num_rows
                    yield RebuiltFrame(at, end_of_frame, self._encoder.encode(planned))

        for segment in self._list_unsynced():
            rewrite = SegmentRewrite(segment, self._disk, self._quarantine, self._queue_id, rebuild)
            new, fd = rewrite.run(self._catalog)
            self._lost += rewrite.lost
            if segment is self._active.segment:
                self._switch_to(new, fd)
            else:
                self._disk.close(fd)
        self._sync_directory()
        self._sync_failed = False
        self.synced_end = self._end
        lost, self._lost = self._lost, []
        return lost

    def _require_good_sync(self) -> None:
        if self._sync_failed:
            raise SyncFailed(5, "an earlier sync failed: call rewrite_after_failed_sync() first")
