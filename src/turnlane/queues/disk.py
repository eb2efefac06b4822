"""The ``disk`` kind: an append-only log under the buffer in memory, with group commit.

Publishers append to memory and go on. One thread, the *writer*, writes the gathered events, syncs
as ``durability`` says, and only then reports them as persisted. While it syncs, the next group
gathers: the more publishers wait, the more of them share a sync. A consumer that keeps up is served
from memory and never reads the disk.

A disk that fails or is full makes the queue full, not broken: publishers wait, reading and acks go
on, and the writer tries again until it succeeds. With ``failover_memory``, publishers go on while
the disk fails, as long as memory has room for their events. No ack says more than is true: these
events are accepted, and become persisted when the disk works again.

Threads: only the writer commits to the store and removes segments. Consumers read the log, and
append acks to the journal, which has a lock of its own. What the writer knows of the queue it
learns under the lock of the queue, on whose condition ``work`` it waits; it holds no lock while it
writes or syncs. Durability: a segment is removed only after the acks of its events are synced.

:class:`LogStorage` has everything that :class:`DiskStorage` shares with
:class:`turnlane.queues.disk_assisted.SpillStorage`; a subclass says what to write, and when.
"""

from __future__ import annotations

import abc
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from turnlane.errors import EventsLost, StorageFailed
from turnlane.events import Block
from turnlane.intervals import Span, count_offsets
from turnlane.ledger import Outcome
from turnlane.logs import get_logger
from turnlane.pacing import double_wait
from turnlane.queues.api import AckLevel, Durability, Stats
from turnlane.queues.buffer import BlockRange
from turnlane.queues.settings import QueueSettings
from turnlane.queues.storage_api import Storage, StorageHost, StoredState, TakeBatch
from turnlane.runtime import create_thread
from turnlane.storage.disk_io import Disk
from turnlane.storage.producer_sequences import SequencedRange
from turnlane.storage.reader import UnreadableRange
from turnlane.storage.store import NO_SPACE, Store, StoreSettings

log = get_logger(__name__)

TRANSIENT = (OSError, MemoryError)
"""The errors after which the writer tries again."""
FIRST_RETRY = 0.02
LAST_RETRY = 1.0
"""Seconds between attempts to write to a disk that fails, doubling from one to the other."""

HANG_SECONDS = 10.0
"""How long after ``shutdown_timeout`` a close waits for a disk that does nothing."""

POLL_SECONDS = 0.05
"""How soon a ``done()`` that waits for the writer notices that the disk fails."""

MANY_FAILURES = 3
"""A ``done()`` does not wait for a disk that failed this often in a row. One failure may be a sync,
which the writer can repair."""

JOIN_BYTES = 256 * 1024
"""Frames are joined to a batch up to this size: beyond it copying costs more than another batch."""

TIDY_SECONDS = 1.0
"""How often to tidy up if every write is synced anyway."""

GATHER_SECONDS = 0.005
GATHER_SLICE = 0.0005
"""How long the writer waits for publishers to share a sync, and how often it looks."""

JOB_BYTES = 16 << 20
"""The most that is written at once: publishers that wait for a sync would wait for all of it."""


@dataclass(frozen=True, slots=True)
class WriteJob:
    """What the writer does in one round."""

    ranges: Sequence[BlockRange]
    sync: bool
    tidy: bool
    """Whether to sync the journal and remove segments as well."""
    before: Callable[[], None] | None = None
    """Called first, without the lock."""
    retire: bool = False
    """Whether everything in the log is settled, so that it can start over."""


class LogStorage(Storage):
    """A store, the thread that writes to it, and reading and acks.

    The fields are guarded by the lock of the queue, except where a comment says otherwise.
    """

    can_cancel = False

    def __init__(self, settings: QueueSettings, disk: Disk | None = None) -> None:
        self._settings = settings
        self._name = settings.name
        self._disk = disk or Disk()
        self.durability = Durability(settings.durability)
        self.store = Store.open(_store_settings(settings), self._disk)
        self.failure = ""
        """How the last attempt to write failed; empty if it succeeded."""
        self.wants_next_event = False
        """Whether the writer sleeps until the next event comes."""
        self._work: threading.Condition
        self._is_stopping = False
        self._is_urgent = False
        """Whether a publisher waits for a sync."""
        self._tidied_at = time.monotonic()
        self._tidy_not_before = 0.0
        """Tidying up failed: the time of the next attempt."""
        self._give_up_at: float | None = None
        self._failures = 0
        """Attempts to write that failed in a row."""
        self._oldest_segment_end = 0
        """The end of the oldest segment that may be removed."""
        self._drops: Counter[Outcome] = Counter()
        """Events that policies dropped and the journal does not count yet."""
        self._recording_drops = threading.Lock()
        """Held while drops are recorded, so that no drop is counted twice. It is taken before the
        lock of the queue."""
        self._has_unsynced_acks = False
        self._flushes = 0
        self._fetching = threading.Lock()
        """Held while a consumer reads: a close lets it finish before it closes the files."""
        self._is_closed = False
        self._writer = create_thread(f"turnlane-writer-{settings.name}", self._run)

    # ── what a kind decides ─────────────────────────────────────────────────────────────────────

    @abc.abstractmethod
    def _next_job(self) -> WriteJob:
        """Wait on ``_work`` until there is something to do, and return it. Under the lock."""

    @abc.abstractmethod
    def _on_committed(self) -> None:
        """The ranges of a job are in the log. Under the lock."""

    @abc.abstractmethod
    def _count_unwritten(self) -> int:
        """Return how many events would be lost if the writer stopped now. Under the lock."""

    @abc.abstractmethod
    def _must_publishers_wait(self, *, failing: bool) -> bool:
        """Whether publishers wait for the writer, or for a failing disk. Under the lock."""

    def _drop_settled_unwritten(self) -> list[BlockRange]:
        """Forget ranges that are settled and need not be written; returns them. Under the lock."""
        return []

    def _on_failed(self, error: Exception) -> None:
        """The writer could not write, and tries again. Under the lock."""

    def _describe_failure_mode(self) -> str:
        """Return what publishers do while the disk fails, for the log. Under the lock."""
        return "publishers wait"

    def _record_evictions(self) -> None:
        """Record drops of events that have an offset and were never written. ``OSError``."""

    # ── opening ─────────────────────────────────────────────────────────────────────────────────

    def recover(self) -> StoredState:
        store, state = self.store, self.store.recovered
        return StoredState(
            queue_id=store.queue_id,
            low=state.low if state.found else store.log.start,
            end=store.log.end,
            settled=state.settled,
            returned=state.returned,
            totals=state.totals,
            sequences=store.restore_sequences(),
            columns={field.name: field.type for field in store.log.schema},
            bytes=store.unsettled_bytes,
        )

    def start(self, host: StorageHost, take: TakeBatch) -> None:
        super().start(host, take)
        self._work = threading.Condition(host.lock)
        with host.lock:
            self._update_oldest_segment()
            self._report_persisted()  # what an earlier process has synced
        self._writer.start()

    # ── the writer ──────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while self._run_job():
                pass
        except Exception as error:
            log.exception("queue.writer_died", queue=self._name, error=error)
            failure = StorageFailed(f"queue {self._name!r} failed, its writer died of {error!r}")
            failure.__cause__ = error
            with self._host.lock:
                self.failure = str(error) or repr(error)
                self._host.fail(failure, AckLevel.PERSISTED)

    def _run_job(self) -> bool:
        """Do one job; false when there will be no more."""
        try:
            with self._host.lock:
                job = self._next_job()
                # A job that began before the close may leave something unsynced: one more follows.
                is_last = self._is_stopping
            if job.before is not None:
                job.before()
            self._record_drops()  # first: the journal has room even if the disk is full
            self._record_evictions()
            self.store.commit(job.ranges, sync=job.sync)
            self._flushes += bool(job.ranges)
            self.store.record_position(self._host.admission.bytes)
        except TRANSIENT as error:
            return self._handle_failure(error)
        has_more = self._handle_success()
        if job.tidy or job.retire:
            self._try_to_tidy(retire=job.retire)
        return has_more or not is_last

    def _handle_success(self) -> bool:
        """Report what the job wrote; true if there is more to write."""
        self._failures = 0
        with self._host.lock:
            self.failure = ""
            for first, end in self.store.take_lost_ranges():
                self._host.lose(first, end)
            self._report_persisted()
            self._on_committed()
            self._host.admission.hold(hold=self._must_publishers_wait(failing=False))
            self._update_oldest_segment()
            return self._count_unwritten() > 0

    def _handle_failure(self, error: Exception) -> bool:
        """Keep publishers out, make space if possible, wait; false to give up at a close."""
        with self._host.lock:
            is_first = not self.failure
            self.failure = str(error) or repr(error)
            self._on_failed(error)
            self._host.admission.hold(hold=self._must_publishers_wait(failing=True))
            if is_first:
                hint = self._describe_failure_mode()
                log.warning("queue.write_failed", queue=self._name, error=error, hint=hint)
            if self._give_up_at is not None and time.monotonic() > self._give_up_at:
                return False
        if not self._make_space():
            with self._host.lock:
                self._failures += 1
                self._work.wait(double_wait(FIRST_RETRY, LAST_RETRY, self._failures))
        return True

    def _make_space(self) -> bool:
        """Remove everything that is settled, even the active segment if nothing in it is needed."""
        host = self._host
        with host.lock:
            is_all_settled = host.positions.is_settled(host.positions.low, self.store.log.end)
            spared = self._drop_settled_unwritten()
        try:
            for each in spared:
                self.store.remember_sequences(each.sequences)
            self.store.record_position(host.admission.bytes)
            if is_all_settled:
                self.store.log.close_active_segment()
            return self._remove_settled_segments() or bool(spared)
        except OSError as error:
            log.debug("queue.make_space_failed", queue=self._name, error=error)
            return False

    def _report_persisted(self) -> None:
        """Report how far the log is safe. Under the lock."""
        self._host.mark_persisted(self._find_safe_end())

    def _find_safe_end(self) -> int:
        """Return how far everything is on disk, as durability defines it. Under the lock."""
        written = self.store.log
        return written.end if self.durability is Durability.NEVER else written.synced_end

    # ── tidying up ──────────────────────────────────────────────────────────────────────────────

    def _try_to_tidy(self, *, retire: bool) -> None:
        """Do the work that can wait. After a failure the writer tries it again later."""
        try:
            if retire:
                self.store.log.close_active_segment()
            self._sync_acks()
            self._remove_settled_segments()
            self._tidied_at = time.monotonic()
            # Arrow's pool keeps what joining blocks took for this thread, which may now be idle.
            pa.default_memory_pool().release_unused()
        except TRANSIENT as error:
            self._tidy_not_before = time.monotonic() + LAST_RETRY
            log.warning("queue.tidy_failed", queue=self._name, error=error)
        with self._host.lock:
            self._update_oldest_segment()

    def _record_drops(self) -> None:
        with self._recording_drops:
            with self._host.lock:
                drops = self._drops.copy()
            for outcome, events in drops.items():
                self.store.journal.record_dropped(outcome, events)
                with self._host.lock:
                    self._drops -= Counter({outcome: events})
                    self._has_unsynced_acks = True

    def _sync_acks(self) -> None:
        with self._host.lock:
            is_needed, self._has_unsynced_acks = self._has_unsynced_acks, False
        if is_needed and self.durability is not Durability.NEVER:
            self._sync_journal()

    def _remove_settled_segments(self) -> bool:
        with self._host.lock:
            segments = self.store.find_settled_segments(self._host.positions.is_settled)
        if segments:
            self.store.remove_segments(segments)
        return bool(segments)

    def _update_oldest_segment(self) -> None:
        spans = self.store.log.list_inactive_segments()
        self._oldest_segment_end = spans[0].end if spans else 1 << 62

    def _can_remove_segment(self) -> bool:
        """Whether the oldest segment is settled. Under the lock."""
        is_settled = self._host.positions.low >= self._oldest_segment_end
        return is_settled and time.monotonic() >= self._tidy_not_before

    def _is_untidy(self) -> bool:
        """Whether there is something to tidy up. Under the lock."""
        return self._has_unsynced_acks or bool(self._drops)

    # ── events from the queue ───────────────────────────────────────────────────────────────────

    def on_growth(self) -> None:
        if self.wants_next_event:
            self.wants_next_event = False
            self._host.update_threshold()
            self._work.notify()

    def on_settled(self, settled: BlockRange, fresh: Sequence[Span], outcome: Outcome) -> None:
        del settled, fresh, outcome
        if self.wants_next_event or self.failure or self._can_remove_segment():
            self._work.notify()

    def on_refused(self, outcome: Outcome, events: int) -> None:
        if not self._drops and not self.failure:
            self._work.notify()
        self._drops[outcome] += events

    # ── acks ────────────────────────────────────────────────────────────────────────────────────

    def settle(self, settled: BlockRange, outcome: Outcome) -> None:
        if not outcome.is_drop:
            self._await_written_sequences(settled)
        self.store.journal.record_settled(settled.first, settled.end, settled.size, outcome)
        settled.is_recorded = True
        if self.durability is not Durability.ALWAYS:
            self._has_unsynced_acks = True

    def _await_written_sequences(self, settled: BlockRange) -> None:
        """Wait until the log has the numbered events that must be in it before these are settled.

        Otherwise a producer would have to send older events again after a kill, and these with
        them. Not while the disk keeps failing, because acks go on then.
        """
        host = self._host
        while end := self.store.journal.find_unsafe_end(settled.first, settled.end):
            with host.lock:
                is_failing = self._failures >= MANY_FAILURES
                can_write = self._writer.is_alive() and not self._is_stopping and not is_failing
                if not can_write or end <= host.persisted.position:
                    return
            host.wait_level(AckLevel.PERSISTED, end, POLL_SECONDS)

    def sync_settled(self, *, now: bool = False) -> None:
        if now:
            self._sync_acks()
        elif self.durability is Durability.ALWAYS:
            self._sync_journal()

    def keep_drops(self, *, now: bool) -> None:
        if now or self.durability is Durability.ALWAYS:
            self._record_drops()
            if self.durability is not Durability.NEVER:
                self._sync_journal()

    def _sync_journal(self) -> None:
        try:
            self.store.journal.sync()
        except OSError:
            self._has_unsynced_acks = True  # the writer tries again
            raise

    def give_back(self, returned: BlockRange) -> None:
        try:
            self.store.journal.record_returned(returned.first, returned.end, returned.attempt)
        except OSError as error:
            # Only the count of attempts is wrong, and only if the queue is opened again before
            # the batch is settled.
            log.warning("queue.attempt_not_recorded", queue=self._name, error=error)

    # ── reading ─────────────────────────────────────────────────────────────────────────────────

    def fetch(self, wanted: BlockRange) -> list[Block] | UnreadableRange:
        blocks: list[Block] = []
        at = wanted.first
        with self._fetching:
            while at < wanted.end and not self._is_closed:
                found = self.store.fetch(at, wanted.end)
                if isinstance(found, UnreadableRange):
                    if blocks:
                        break
                    return found
                end = at + found.block.num_rows
                is_large = wanted.size * (end - wanted.first) >= JOIN_BYTES * len(wanted)
                if is_large and blocks:
                    break  # the reader still has this frame: it is the next batch
                blocks.append(found.block)
                at = end
                if is_large:
                    break
        return blocks

    def read(self, first: int, end: int) -> tuple[int, Block] | UnreadableRange | None:
        return self.store.visit(first, end)

    # ── closing ─────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        limit = self._settings.shutdown_timeout
        with self._host.lock:
            self._is_stopping = True
            self._give_up_at = time.monotonic() + limit
            self._work.notify()
        self._await_writer()
        with self._host.lock:
            unwritten = self._count_unwritten() or self._count_unsynced()
        try:
            self._record_drops()  # the writer may have ended before it saw the last of them
            with self._host.lock:
                dropped = self._host.drop_unstored(self.store.log.end)
            self._record_evictions()
            for first, end in dropped:
                self.store.journal.record_settled(first, end, 0, Outcome.CLOSED)
            if not dropped and not unwritten:
                # Otherwise producers may have to send events again that were dropped or lost.
                self.store.journal.remember_sequences(self._host.sequences)
            self.store.journal.snapshot()
        except OSError as error:
            log.warning("queue.journal_not_tidied", queue=self._name, error=error)
        finally:
            has_finished = self._fetching.acquire(timeout=limit)
            self._is_closed = True
            self.store.close()
            if has_finished:
                self._fetching.release()
        if unwritten:
            raise EventsLost(
                f"queue {self._name!r} could not write {unwritten} accepted events on close"
            )

    def _await_writer(self) -> None:
        """Let the writer finish, as long as it makes progress.

        A writer that hangs in the disk is left behind, and the files stay open.
        """
        written = self.store.log
        reached = None
        while self._writer.is_alive() and reached != (written.end, written.synced_end):
            reached = (written.end, written.synced_end)
            self._writer.join(self._settings.shutdown_timeout + HANG_SECONDS)
        if self._writer.is_alive():
            with self._host.lock:
                count = self._count_unwritten() or self._count_unsynced()
            raise EventsLost(
                f"queue {self._name!r} hangs in its disk, with {count} accepted events unwritten"
            )

    def _count_unsynced(self) -> int:
        return count_offsets(
            self._host.positions.find_unsettled(self._find_safe_end(), self.store.log.end)
        )

    def describe(self, stats: Stats) -> Stats:
        store = self.store
        return replace(
            stats,
            disk_bytes=store.log.bytes,
            disk_available_bytes=store.free_bytes(self._disk),
            disk_full=store.full_total,
            disk_errors=store.errors_total,
            syncs=store.syncs_total,
            meta_syncs=store.journal.syncs,
            rotations=store.log.rotations,
            flushes=self._flushes,
            quarantined=store.quarantined_total,
            trouble=self.failure,
        )


def _store_settings(settings: QueueSettings) -> StoreSettings:
    assert settings.path is not None, "the settings of a disk queue have a path"
    return StoreSettings(
        path=settings.path,
        name=settings.name,
        segment_size=settings.chunk_size,
        compression=settings.compression.value,
        durable=settings.durability is not Durability.NEVER,
        max_unsynced_bytes=min(settings.memory_bytes, settings.max_bytes or settings.memory_bytes),
    )


class DiskStorage(LogStorage):
    """Everything accepted is written; events acked as ``persisted`` survive any crash."""

    def __init__(self, settings: QueueSettings, disk: Disk | None = None) -> None:
        super().__init__(settings, disk)
        self._unwritten: deque[BlockRange] = deque()
        self._unwritten_bytes = 0
        self._synced_at = -math.inf
        self._group_size = 1
        """How many publishers waited for the last sync, or came while it ran."""
        self._is_gathering = False
        self._is_disk_full = False
        """Whether the last write failed for lack of space: then publishers wait."""
        self._evicted: list[BlockRange] = []
        """Dropped from the memory that replaces the disk, without contents, and not recorded."""

    def on_sealed(self, sealed: BlockRange) -> None:
        # A copy: consumers cut pieces off the range in the buffer.
        self._unwritten.append(sealed.copy())
        for numbers in sealed.sequences:
            numbered = SequencedRange(sealed.first, sealed.end, numbers, sealed.is_consecutive)
            self.store.journal.unwritten_sequences.add(numbered)
        self._unwritten_bytes += sealed.size
        if self._unwritten_bytes >= self._settings.write_buffer or self.failure:
            if not self.failure:  # else the writer pauses before it tries again
                self._work.notify()
            if self._must_publishers_wait(failing=bool(self.failure)):
                self._host.admission.hold(hold=True)

    def make_room(self) -> bool:
        return self._host.admission.is_held and not self.failure

    def _must_publishers_wait(self, *, failing: bool) -> bool:
        if not failing:
            return self._unwritten_bytes >= self._settings.memory_bytes
        limit = self._settings.failover_memory
        return limit is None or self._is_disk_full or self._unwritten_bytes >= limit

    # ── memory in place of a failing disk ───────────────────────────────────────────────────────

    def _on_failed(self, error: Exception) -> None:
        self._is_disk_full = isinstance(error, OSError) and error.errno in NO_SPACE

    def _describe_failure_mode(self) -> str:
        if self._settings.failover_memory is None or self._is_disk_full:
            return super()._describe_failure_mode()
        return "new events wait in memory, up to failover_memory: they are lost if the process ends"

    def drop_unwritten(self) -> bool:
        if not self.failure or self._settings.failover_memory is None or self._is_disk_full:
            return False
        self._host.buffer.seal()
        # A range that is partly in the log, or that a consumer has read, stays.
        start = max(self.store.log.end, self._host.positions.frontier)
        at = next((at for at, each in enumerate(self._unwritten) if each.first >= start), None)
        if at is None:
            return False
        oldest = self._unwritten[at]
        del self._unwritten[at]
        self._unwritten_bytes -= oldest.size
        if not self._evicted:
            log.error(
                "queue.failover_full",
                queue=self._name,
                hint="the disk fails and failover_memory is full: the oldest events are dropped",
            )
        self._remember_eviction(oldest)
        self._host.lose(oldest.first, oldest.end, Outcome.OLDEST)
        self._host.admission.hold(hold=self._must_publishers_wait(failing=True))
        return True

    def _remember_eviction(self, dropped: BlockRange) -> None:
        """Keep what has to be recorded, joined with the range before: there may be millions."""
        kept = list(dropped.sequences)
        last = self._evicted[-1] if self._evicted else None
        first = dropped.first
        if last is not None and last.end == first:
            first = self._evicted.pop().first
            newer = {each.producer: each.first for each in kept}
            kept = [
                each
                for each in last.sequences
                if each.first < newer.get(each.producer, each.next_sequence)
            ] + kept
        self._evicted.append(BlockRange(first, dropped.end, 0, None, sequences=kept))

    def _record_evictions(self) -> None:
        with self._host.lock:
            evicted, self._evicted = self._evicted, []
        for number, each in enumerate(evicted):
            try:
                self.store.journal.record_settled(each.first, each.end, 0, Outcome.OLDEST)
            except OSError:
                with self._host.lock:
                    self._evicted = evicted[number:] + self._evicted
                raise
            self.store.remember_sequences(each.sequences)

    # ── when and what to write ──────────────────────────────────────────────────────────────────

    def urge(self, level: AckLevel) -> None:
        if level is AckLevel.PERSISTED:
            self._is_urgent = True
            if self.failure:
                return  # the writer pauses before it tries again
            if not self._is_gathering or self._host.persisted.waiters >= self._group_size:
                self._work.notify()

    def _next_job(self) -> WriteJob:
        while (pause := self._due_in()) is None or pause > 0:
            self.wants_next_event = pause is None
            self._host.update_threshold()
            self._work.wait(pause)
            self.wants_next_event = False
        self._host.update_threshold()
        if self._is_urgent:
            self._gather_publishers()
        return self._make_job()

    def _gather_publishers(self) -> None:
        """Let the publishers that shared the last sync share the next, while they keep coming.

        Otherwise the first that comes back would get a sync of its own, and all others would wait
        for it.
        """
        host = self._host
        until = time.monotonic() + GATHER_SECONDS
        seen = -1
        self._is_gathering = True
        while seen < host.persisted.waiters < self._group_size and time.monotonic() < until:
            seen = host.persisted.waiters
            self._work.wait(GATHER_SLICE)
        self._is_gathering = False

    def _due_in(self) -> float | None:
        """Return the seconds until there is something to do; ``None`` if nothing is known."""
        if self._is_stopping or self._is_urgent or self.failure or self._can_remove_segment():
            return 0.0
        if self._unwritten_bytes >= self._settings.write_buffer:
            return 0.0
        due = self._synced_at + self._interval()
        has_unsynced = self.store.log.has_unsynced or self._unwritten or len(self._host.buffer.open)
        if not has_unsynced:
            if not self._is_untidy():
                return None
            due = max(due, self._tidying_time())
        return max(0.0, due - time.monotonic())

    def _interval(self) -> float:
        if self.durability is Durability.ALWAYS:
            return 0.0
        if self.durability is Durability.NEVER:
            return self._settings.stale_flush
        return min(self._settings.sync_interval, self._settings.stale_flush)

    def _tidying_time(self) -> float:
        return max(self._tidied_at + (self._interval() or TIDY_SECONDS), self._tidy_not_before)

    def _make_job(self) -> WriteJob:
        """Return everything that has gathered, and the work of the interval if that is over."""
        now = time.monotonic()
        is_due = now >= self._synced_at + self._interval()
        must_sync = is_due or self._is_urgent or self._is_stopping
        if must_sync:
            self._host.buffer.seal()
        ranges: list[BlockRange] = []
        size = 0
        for each in self._unwritten:
            if ranges and size + each.size > JOB_BYTES:
                break
            ranges.append(each)
            size += each.size
        if is_due:
            self._synced_at = now
        tidy = (
            self._is_stopping
            or self._can_remove_segment()
            or (is_due and now >= self._tidying_time())
        )
        return WriteJob(
            ranges,
            sync=must_sync and self.durability is not Durability.NEVER,
            tidy=tidy and len(ranges) == len(self._unwritten),
        )

    def _on_committed(self) -> None:
        host = self._host
        self._is_urgent = host.persisted.waiters > 0
        self._group_size = host.persisted.served + host.persisted.waiters
        end = self.store.log.end
        while self._unwritten and self._unwritten[0].end <= end:
            self._unwritten_bytes -= self._unwritten.popleft().size
        self.store.journal.unwritten_sequences.forget_below(self._find_safe_end())
        host.buffer.trim(end, self._settings.memory_bytes)

    def _drop_settled_unwritten(self) -> list[BlockRange]:
        dropped: list[BlockRange] = []
        unwritten = self._unwritten
        while unwritten and self._host.positions.is_settled(unwritten[0].first, unwritten[0].end):
            dropped.append(unwritten.popleft())
            self._unwritten_bytes -= dropped[-1].size
        return dropped

    def _count_unwritten(self) -> int:
        return sum(map(len, self._unwritten)) + len(self._host.buffer.open)
