"""The store: directory, journal and log of a queue as one thing.

A queue decides *when* to write; the store knows how, in which order, and what to do when the disk
fails. :meth:`Store.commit` and the calls of ``store.log`` that write belong to one thread, the
queue's writer. All other methods may be called from any thread.

The store keeps written blocks in memory until they are synced: a sync that fails may have destroyed
them on disk.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

from turnlane.errors import DirectoryUnusable
from turnlane.events import Block
from turnlane.ledger import Outcome
from turnlane.logs import get_logger
from turnlane.storage.directory import QueueDirectory
from turnlane.storage.disk_io import Disk
from turnlane.storage.encoder import CompressionMode, CompressionPolicy
from turnlane.storage.frames import ProducerSequence
from turnlane.storage.journal import Journal
from turnlane.storage.journal_records import JournalState
from turnlane.storage.log import Log, SyncFailed
from turnlane.storage.producer_sequences import AcceptedSequences
from turnlane.storage.reader import LogReader, StoredEvents, UnreadableRange

log = get_logger(__name__)

FRAME_BYTES = 2 << 20
"""Blocks are joined or cut to frames of about this size. Larger frames leave the processor's cache
before their checksum is computed, smaller ones cost more calls."""

READ_ATTEMPTS = 4
"""After this many failures in a row a frame counts as corrupt: a bad sector must not block the
queue."""

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a disk that is full, as opposed to one that fails."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The settings of a store, with the defaults of a queue."""

    path: Path
    name: str | None = None
    """The name of a new queue; by default the directory's."""
    segment_size: int = 64 << 20
    compression: CompressionMode = "auto"
    durable: bool = True
    """Whether the log is synced."""
    max_unsynced_bytes: int = 64 << 20
    """A durable store keeps at most about this much unsynced data in memory."""


class WritableRange(Protocol):
    """A range of events to write: offsets ``first`` to ``end - 1``."""

    @property
    def first(self) -> int:
        """The first offset."""

    @property
    def end(self) -> int:
        """The offset after the last event."""

    @property
    def size(self) -> int:
        """The bytes that the events count for."""

    @property
    def blocks(self) -> Sequence[Block] | None:
        """The events; never ``None`` for a range to write."""

    @property
    def sequences(self) -> Sequence[ProducerSequence]:
        """The sequence numbers of producers that the events complete."""

    def slice(self, first: int, end: int) -> Self:
        """Return the events ``first`` to ``end - 1`` as a range of their own."""

    def split(self, size: int) -> Sequence[Self]:
        """Return the same events in ranges of about this size."""


RangeT = TypeVar("RangeT", bound=WritableRange)


class Store:
    """The directory of a queue, held open."""

    def __init__(
        self,
        directory: QueueDirectory,
        journal: Journal,
        state: JournalState,
        written: Log,
        max_unsynced_bytes: int | None,
    ) -> None:
        """Use :meth:`open`."""
        self.log = written
        self.journal = journal
        self._directory = directory
        self.queue_id = directory.queue_id
        self.recovered = state
        """The journal's state when it was opened."""
        self._reader = written.create_reader()
        self._visitor = written.create_reader()
        self._visitor_lock = threading.Lock()
        self._sync_failed = False
        self._read_failures: dict[LogReader, tuple[int, int]] = {}
        """By reader, an offset that could not be read, and how often."""
        self._max_unsynced_bytes = max_unsynced_bytes
        self._unsynced: deque[WritableRange] = deque()
        """Written and not synced: a sync that fails may have destroyed it."""
        self._unsynced_bytes = 0
        self._lost: list[tuple[int, int]] = []
        self._sequences = _copy_all(written.recovered_sequences)
        """By producer, the numbers that are in the log and not in the journal yet."""
        self._recorded_position = state.position
        self._has_position_failed = False
        """Whether the last attempt to record the position failed."""
        written.on_new_segment = self._record_sequences
        self.full_total = 0
        self.errors_total = 0
        self.syncs_total = 0
        self.quarantined_total = 1 if written.torn_bytes else 0

    @classmethod
    def open(cls, settings: StoreSettings, disk: Disk) -> Self:
        """Lock the directory and recover its content, in constant time.

        Raises ``DirectoryUnusable`` if the directory cannot be read or written.
        """
        try:
            with contextlib.ExitStack() as opened:
                directory = opened.enter_context(
                    QueueDirectory.open(settings.path, disk, settings.name)
                )
                journal, state = Journal.open(directory.path, disk, directory.queue_id)
                opened.callback(journal.close)
                written = Log(
                    directory.path,
                    disk,
                    queue_id=directory.queue_id,
                    segment_size=settings.segment_size,
                    compression=CompressionPolicy(settings.compression),
                    hint=state.position,
                    floor=state.floor,
                    durable=settings.durable,
                )
                opened.pop_all()
        except OSError as error:
            raise DirectoryUnusable(f"{settings.path}: {error.strerror or error}") from error
        limit = settings.max_unsynced_bytes if settings.durable else None
        store = cls(directory, journal, state, written, limit)
        store.take_over(sync=settings.durable)
        return store

    def take_over(self, *, sync: bool) -> None:
        """Bring journal and log up to date after recovery. Called by :meth:`open`."""
        try:
            if not self.recovered.found and self.log.start:
                # Without a journal, events that are no longer on disk count as delivered.
                self.journal.record_settled(0, self.log.start, 0, Outcome.DELIVERED)
        except OSError as error:
            self._count_error(error)
        if sync:
            try:
                # From now on the queue also promises events that a killed process left unsynced.
                self.log.sync()
            except OSError as error:
                self._count_error(error)
        if self.log.recovered_sequences:
            self.record_position(self.unsettled_bytes)

    def close(self) -> None:
        """Close everything as it is; call ``journal.snapshot()`` first."""
        with contextlib.ExitStack() as closing:
            closing.callback(self._directory.close)
            closing.callback(self.journal.close)
            closing.callback(self.log.close)
            closing.callback(self._reader.close)
            closing.callback(self._visitor.close)

    # The state when the store was opened

    def restore_sequences(self) -> dict[bytes, AcceptedSequences]:
        """Return the sequence numbers that the queue has of every producer."""
        # From both: the journal may have numbers of events that were settled and never written.
        known = _copy_all(self.recovered.producers)
        for producer, found in self.log.recovered_sequences.items():
            accepted = known.pop(producer, None) or AcceptedSequences()
            accepted.update(found)
            known[producer] = accepted
        return known

    @property
    def unsettled_bytes(self) -> int:
        """The bytes that the unsettled events on disk count for."""
        return max(0, self.recovered.bytes + self.log.recovered_events_bytes)

    # Writing: only the queue's writer

    def commit(self, ranges: Sequence[RangeT], *, sync: bool) -> None:
        """Write ranges in offset order, and sync if asked to. After ``OSError``: call it again.

        Ranges that the log already has are skipped, so a call that failed half-way is simply
        repeated. If too much unsynced data is in memory, this syncs unasked.
        """
        try:
            if self._sync_failed:
                self._lost += self.log.rewrite_after_failed_sync(self._find_unsynced)
                self._sync_failed = False
                self._forget_synced()
            self._write(ranges)
            limit = self._max_unsynced_bytes
            must_sync = sync or (limit is not None and self._unsynced_bytes >= limit)
            if must_sync and self.log.synced_end < self.log.end:
                self.syncs_total += 1
                self.log.sync()
            self._forget_synced()
        except OSError as error:
            self._count_error(error)
            raise

    def _write(self, ranges: Sequence[RangeT]) -> None:
        # A large block becomes several frames: one of them may fit where all of it would not.
        parts = [part for each in ranges for part in each.split(FRAME_BYTES)]
        for run in _group_into_runs([part for part in parts if part.end > self.log.end]):
            sequences = [sequence for part in run for sequence in part.sequences]
            if self._max_unsynced_bytes is not None:
                # Before they are written. A repeated call brings some of them again.
                end = self._unsynced[-1].end if self._unsynced else 0
                new = [part for part in run if part.end > end]
                self._unsynced += new
                self._unsynced_bytes += sum(part.size for part in new)
            self.log.append_frames(run[0].first, group_into_frames(run), sequences)
            self.remember_sequences(sequences)

    def _find_unsynced(
        self, first: int, end: int
    ) -> Iterator[tuple[int, Sequence[Block], Sequence[ProducerSequence]]]:
        for each in self._unsynced:
            start, stop = max(first, each.first), min(end, each.end)
            if start < stop:
                part = each.slice(start, stop)
                yield start, part.blocks or (), part.sequences
                first = stop

    def _forget_synced(self) -> None:
        while self._unsynced and self._unsynced[0].end <= self.log.synced_end:
            self._unsynced_bytes -= self._unsynced.popleft().size

    def _count_error(self, error: OSError) -> None:
        if isinstance(error, SyncFailed):
            self._sync_failed = True
        if error.errno in NO_SPACE:
            self.full_total += 1
        else:
            self.errors_total += 1

    def take_lost_ranges(self) -> list[tuple[int, int]]:
        """Return offsets of an earlier process that a failed sync destroyed since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def remember_sequences(self, sequences: Sequence[ProducerSequence]) -> None:
        """Keep sequences of events that are in the log for the next :meth:`record_position`."""
        for producer, next_sequence, first in sequences:
            self._sequences.setdefault(producer, AcceptedSequences()).add(first, next_sequence)

    def record_position(self, unsettled_bytes: int) -> None:
        """Record where the log ends; losing this record costs only time at recovery.

        No effect before all of the log is synced: otherwise, after a power cut, the journal would
        know of events that the log has lost. Their offsets would seem missing, and when they are
        sent again they would seem to be repeats.
        """
        position = self.log.position
        is_recorded = position == self._recorded_position and not self._sequences
        if self.log.has_unsynced or is_recorded:
            return
        try:
            # Recovery looks for sequences only after the recorded position, so all go with it.
            self.journal.record_position(position, unsettled_bytes, self._list_sequences())
        except OSError as error:
            self._count_error(error)
            if not self._has_position_failed:
                log.warning(
                    "journal.position_not_recorded",
                    directory=self._directory.path,
                    error=error,
                    hint="the next start takes longer",
                )
            self._has_position_failed = True
        else:
            self._sequences.clear()
            self._recorded_position = position
            self._has_position_failed = False

    def _record_sequences(self) -> None:
        """Record the sequences of earlier segments: recovery looks only in the last one."""
        if self._sequences:
            self.journal.record_sequences(self._list_sequences())
            self._sequences.clear()

    def _list_sequences(self) -> list[ProducerSequence]:
        return [
            ProducerSequence(producer, end, first)
            for producer, accepted in self._sequences.items()
            for first, end in accepted
        ]

    def find_settled_segments(self, is_settled: Callable[[int, int], bool]) -> list[int]:
        """Return the segments whose events are all settled, without the active one."""
        return [
            span.first
            for span in self.log.list_inactive_segments()
            if is_settled(span.first, span.end)
        ]

    def remove_segments(self, segments: Sequence[int]) -> None:
        """Delete segments. After ``OSError``: call it again."""
        # The journal first: in the other order a crash would look like a loss.
        self.journal.sync()
        for first in segments:
            self.log.remove_segment(first)

    # Reading

    def fetch(self, first: int, end: int) -> StoredEvents | UnreadableRange:
        """Return the events from ``first`` on, for consumers; raises as :meth:`visit` does."""
        found = self._read(self._reader, first, end)
        return found or UnreadableRange(first, end, Outcome.MISSING)

    def visit(self, first: int, end: int) -> StoredEvents | UnreadableRange | None:
        """Return the events from ``first`` on, for readers by offset; ``None`` if none are there.

        When the device fails to read, this raises ``OSError`` a few times; then the range counts as
        unreadable.
        """
        with self._visitor_lock:
            return self._read(self._visitor, first, end)

    def _read(
        self, reader: LogReader, first: int, end: int
    ) -> StoredEvents | UnreadableRange | None:
        try:
            found = reader.read(first, end - first)
        except OSError:
            offset, failures = self._read_failures.get(reader, (first, 0))
            failures = failures + 1 if offset == first else 1
            self._read_failures[reader] = first, failures
            if failures < READ_ATTEMPTS:
                raise
            found = reader.skip(first)
        if isinstance(found, UnreadableRange):
            self.quarantined_total += found.outcome is Outcome.CORRUPT
        return found

    def free_bytes(self, disk: Disk) -> int | None:
        """Return the bytes that the file system has left; ``None`` if it does not say."""
        try:
            return disk.free_bytes(self._directory.path)
        except OSError:
            return None


def _copy_all(producers: Mapping[bytes, AcceptedSequences]) -> dict[bytes, AcceptedSequences]:
    return {producer: accepted.copy() for producer, accepted in producers.items()}


def _group_into_runs(parts: Sequence[RangeT]) -> list[list[RangeT]]:
    """Group ranges into runs of consecutive offsets.

    A run with sequences is one frame: after a crash, the events must not be there without the
    numbers by which repeats are recognised.
    """
    runs: list[list[RangeT]] = []
    size, has_sequences, end = 0, False, -1
    for part in parts:
        size, has_sequences = size + part.size, has_sequences or bool(part.sequences)
        if part.first == end and not (has_sequences and size > FRAME_BYTES):
            runs[-1].append(part)
        else:
            runs.append([part])
            size, has_sequences = part.size, bool(part.sequences)
        end = part.end
    return runs


def group_into_frames(ranges: Sequence[WritableRange]) -> list[list[Block]]:
    """Return the blocks of the ranges, grouped for frames of about ``FRAME_BYTES`` each.

    The frames have about the same size: full ones and a small rest would be more to read.
    """
    total = sum(each.size for each in ranges)
    step = total / max(1, round(total / FRAME_BYTES))
    frames: list[list[Block]] = []
    size, end = 0, 0.0
    for each in ranges:
        if not frames or size + each.size / 2 > end:
            frames.append([])
            end = len(frames) * step
        frames[-1].extend(each.blocks or ())
        size += each.size
    return frames
