"""The durable half of a queue: its directory, journal and log as one thing.

A queue decides *when* to write; the store knows *how*, in which order, and what to do when the
disk does not play along. :meth:`Store.commit` and :meth:`Store.retire` belong to one thread, the
queue's writer; everything else may be called from any.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from turnlane.errors import DirectoryUnusable
from turnlane.events import Block
from turnlane.ledger import Outcome
from turnlane.queues.api import Durability
from turnlane.queues.settings import QueueSettings
from turnlane.queues.storage_api import BlockRange, StoredState
from turnlane.storage.directory import QueueDirectory
from turnlane.storage.disk_io import Disk
from turnlane.storage.frames import Compression, Stamp
from turnlane.storage.journal import Journal
from turnlane.storage.journal_records import JournalState
from turnlane.storage.log import Fault, Found, Log, SyncFailed
from turnlane.storage.producer_sequences import Accepted
from turnlane.storage.reader import LogReader

log = logging.getLogger(__name__)

FRAME_BYTES = 2 << 20
"""Blocks are joined into, or cut into, frames of about this size: larger ones leave the processor's
cache between being read and being summed up, smaller ones cost more calls."""

READ_ATTEMPTS = 4
"""After so many failures in a row a frame counts as corrupt: a bad sector must not be for ever."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Store:
    """A queue's directory, held open."""

    def __init__(
        self,
        directory: QueueDirectory,
        journal: Journal,
        state: JournalState,
        written: Log,
        keep_bytes: int | None,
    ) -> None:
        """Use :meth:`open`."""
        self.log = written
        self.journal = journal
        self._directory = directory
        self.queue_id = directory.queue_id
        self._state = state
        self._reader = written.reader()
        self._visitor = written.reader()
        self._visiting = threading.Lock()
        self._sync_failed = False
        self._unread: dict[LogReader, tuple[int, int]] = {}
        """By reader, an offset that could not be read, and how often."""
        self._keep_bytes = keep_bytes
        self._kept: deque[BlockRange] = deque()
        """Written and not synced: a sync that fails may have destroyed it."""
        self._kept_bytes = 0
        self._lost: list[tuple[int, int]] = []
        self._stamps = _copied(written.recovered_stamps)
        """The numbers of producers that are in the log, where the journal does not know it yet."""
        self._hinted = state.position
        written.on_chunk = self._tell_stamps
        self.full_total = 0
        self.errors_total = 0
        self.syncs_total = 0
        self.quarantined_total = 1 if written.torn_bytes else 0

    @classmethod
    def open(cls, settings: QueueSettings, disk: Disk) -> Self:
        """Lock the directory and recover what is in it, in constant time.

        Raises ``DirectoryUnusable`` if it cannot be read or written.
        """
        assert settings.path is not None, "settings make sure of it"
        try:
            store = cls._open(settings.path, settings, disk)
        except OSError as error:
            raise DirectoryUnusable(f"{settings.path}: {error.strerror or error}") from error
        store.make_up_for_journal()
        if settings.durability is not Durability.NEVER:
            store.sync_found()
        if store.log.recovered_stamps:
            store.hint(store.unsettled_bytes())
        return store

    @classmethod
    def _open(cls, path: Path, settings: QueueSettings, disk: Disk) -> Self:
        with contextlib.ExitStack() as opened:
            directory = opened.enter_context(QueueDirectory.open(path, disk, settings.name))
            journal, state = Journal.open(directory.path, disk, directory.queue_id)
            opened.callback(journal.close)
            written = Log.open(
                directory.path,
                disk,
                queue_id=directory.queue_id,
                chunk_size=settings.chunk_size,
                compression=Compression(settings.compression.value),
                hint=state.position,
                floor=state.floor,
                durable=settings.durability is not Durability.NEVER,
            )
            opened.pop_all()
        keep = None
        if settings.durability is not Durability.NEVER:
            keep = min(settings.memory_bytes, settings.max_bytes or settings.memory_bytes)
        return cls(directory, journal, state, written, keep)

    def make_up_for_journal(self) -> None:
        """Without a journal, what is no longer on disk counts as delivered, from now on too."""
        if not self._state.found and self.log.start:
            try:
                self.journal.settled(0, self.log.start, 0, Outcome.DELIVERED)
            except OSError as error:
                self._note(error)

    def sync_found(self) -> None:
        """What a killed process has left in the page cache is promised from now on."""
        try:
            self.log.sync()
        except OSError as error:
            self._note(error)

    # What was found

    def stored_state(self) -> StoredState:
        """Return what there is, for the queue that is opened."""
        state = self._state
        # From both: the journal may know events that were settled and never written.
        sequences = _copied(state.producers)
        for producer, found in self.log.recovered_stamps.items():
            accepted = sequences.pop(producer, None) or Accepted()
            accepted.update(found)
            sequences[producer] = accepted
        return StoredState(
            queue_id=self.queue_id,
            low=state.low if state.found else self.log.start,
            end=self.log.end,
            settled=state.settled,
            returned=state.returned,
            totals=state.totals,
            sequences=sequences,
            columns={field.name: field.type for field in self.log.schema},
            bytes=self.unsettled_bytes(),
        )

    def unsettled_bytes(self) -> int:
        """What the events on disk count for."""
        return max(0, self._state.bytes + self.log.recovered_events_bytes)

    # Writing: the queue's writer only

    def commit(self, portions: Sequence[BlockRange], *, sync: bool) -> None:
        """Write portions in offset order, and sync if asked to. On ``OSError``: call it again.

        What the log has already is passed over, so that a call that failed half-way is simply
        repeated. What is not synced stays in memory; when that is too much, it is synced unasked.
        """
        try:
            self._mend()
            self._write(portions)
            if (sync or self._keeps_too_much()) and self.log.synced_end < self.log.end:
                self.syncs_total += 1
                self.log.sync()
            self._forget_synced()
        except OSError as error:
            self._note(error)
            raise

    def _mend(self) -> None:
        if self._sync_failed:
            self._lost += self.log.rescue(self._kept_of)
            self._sync_failed = False
            self._forget_synced()

    def _keep(self, portions: Sequence[BlockRange]) -> None:
        """Before they are written. A call that is repeated brings some of them again."""
        if self._keep_bytes is not None:
            end = self._kept[-1].end if self._kept else 0
            fresh = [portion for portion in portions if portion.end > end]
            self._kept += fresh
            self._kept_bytes += sum(portion.size for portion in fresh)

    def _kept_of(
        self, first: int, end: int
    ) -> Iterator[tuple[int, Sequence[Block], Sequence[Stamp]]]:
        for portion in self._kept:
            start, stop = max(first, portion.first), min(end, portion.end)
            if start < stop:
                part = portion.slice(start, stop)
                yield start, part.blocks or (), part.sequences
                first = stop

    def _keeps_too_much(self) -> bool:
        return self._keep_bytes is not None and self._kept_bytes >= self._keep_bytes

    def _forget_synced(self) -> None:
        while self._kept and self._kept[0].end <= self.log.synced_end:
            self._kept_bytes -= self._kept.popleft().size

    def _write(self, portions: Sequence[BlockRange]) -> None:
        # A large block in several frames: one of them fits where all of it would not.
        parts = [part for portion in portions for part in portion.split(FRAME_BYTES)]
        for run in _runs([part for part in parts if part.end > self.log.end]):
            stamps = [stamp for portion in run for stamp in portion.sequences]
            self._keep(run)
            self.log.append_many(run[0].first, frames_of(run), stamps)
            self.remember(stamps)

    def _note(self, error: OSError) -> None:
        if isinstance(error, SyncFailed):
            self._sync_failed = True
        if error.errno in _NO_SPACE:
            self.full_total += 1
        else:
            self.errors_total += 1

    def lost(self) -> list[tuple[int, int]]:
        """Offsets of an earlier process that a failed sync destroyed since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def remember(self, stamps: Sequence[Stamp]) -> None:
        """Keep stamps for the next hint: as soon as their events are in the log, and never back."""
        for producer, next_sequence, first in stamps:
            self._stamps.setdefault(producer, Accepted()).add(first, next_sequence)

    def hint(self, unsettled_bytes: int) -> None:
        """Leave a note where the log ends; losing it costs time at recovery and nothing else.

        Not before all of it is synced, or after a power cut the journal would know of events that
        the log has lost: offsets would seem missing, and what is sent again would seem a repeat.
        """
        position = self.log.position
        if self.log.unsynced or (position == self._hinted and not self._stamps):
            return
        try:
            # Recovery looks for stamps only behind the last note, so none may be left out of it.
            self.journal.advanced(position, unsettled_bytes, self._noted())
        except OSError as error:
            self._note(error)
            log.warning("%s: no hint for recovery: %s", self._directory.path, error)
        else:
            self._stamps.clear()
            self._hinted = position

    def _tell_stamps(self) -> None:
        """Recovery looks for stamps only in the last chunk: those of the others go before it."""
        if self._stamps:
            self.journal.stamped(self._noted())
            self._stamps.clear()

    def _noted(self) -> list[Stamp]:
        return [
            Stamp(producer, end, first)
            for producer, accepted in self._stamps.items()
            for first, end in accepted
        ]

    def find_settled_segments(self, is_settled: Callable[[int, int], bool]) -> list[int]:
        """Return the segments in which everything is settled, without the active one."""
        return [
            span.first for span in self.log.inactive_chunks() if is_settled(span.first, span.end)
        ]

    def remove(self, chunks: Sequence[int]) -> None:
        """Delete chunks. On ``OSError``: call it again."""
        # Cursor first, then unlink: the other way round a crash would look like a loss.
        self.journal.sync()
        for first in chunks:
            self.log.remove(first)

    # Reading

    def fetch(self, first: int, end: int) -> Found | Fault:
        """The events from ``first`` on, for the queue's consumers; raises as :meth:`visit` does."""
        return self._read(self._reader, first, end) or Fault(first, end, Outcome.MISSING)

    def visit(self, first: int, end: int) -> Found | Fault | None:
        """The events from ``first`` on, for readers by offset; ``None`` if there are none yet.

        Raises ``OSError`` a few times for what the device does not read; then it is at fault.
        """
        with self._visiting:
            return self._read(self._visitor, first, end)

    def _read(self, reader: LogReader, first: int, end: int) -> Found | Fault | None:
        try:
            found = reader.read(first, end - first)
        except OSError:
            offset, times = self._unread.get(reader, (first, 0))
            times = times + 1 if offset == first else 1
            self._unread[reader] = first, times
            if times < READ_ATTEMPTS:
                raise
            found = reader.skip(first)
        if isinstance(found, Fault):
            self.quarantined_total += found.outcome is Outcome.CORRUPT
        return found

    # Keeping

    def free_bytes(self, disk: Disk) -> int | None:
        """What the file system has left, if it tells."""
        try:
            return disk.free_bytes(self._directory.path)
        except OSError:
            return None

    def close(self) -> None:
        """Close everything as it is; snapshot the journal first."""
        with contextlib.ExitStack() as closing:
            closing.callback(self._directory.close)
            closing.callback(self.journal.close)
            closing.callback(self.log.close)
            closing.callback(self._reader.close)
            closing.callback(self._visitor.close)


def _copied(producers: Mapping[bytes, Accepted]) -> dict[bytes, Accepted]:
    return {producer: accepted.copy() for producer, accepted in producers.items()}


def _runs(portions: Sequence[BlockRange]) -> list[list[BlockRange]]:
    """Ranges grouped into runs of consecutive offsets.

    A run with stamps is one frame: a crash must not keep events without what tells repeats of them.
    """
    runs: list[list[BlockRange]] = []
    size, stamped, end = 0, False, -1
    for portion in portions:
        size, stamped = size + portion.size, stamped or bool(portion.sequences)
        if portion.first == end and not (stamped and size > FRAME_BYTES):
            runs[-1].append(portion)
        else:
            runs.append([portion])
            size, stamped = portion.size, bool(portion.sequences)
        end = portion.end
    return runs


def frames_of(portions: Sequence[BlockRange]) -> list[list[Block]]:
    """The portions' blocks, gathered for frames of reasonable and much the same size.

    Full ones and a small rest would be nearly twice as many to read.
    """
    total = sum(portion.size for portion in portions)
    step = total / max(1, round(total / FRAME_BYTES))
    frames: list[list[Block]] = []
    size, end = 0, 0.0
    for portion in portions:
        if not frames or size + portion.size / 2 > end:
            frames.append([])
            end = len(frames) * step
        frames[-1].extend(portion.blocks or ())
        size += portion.size
    return frames
