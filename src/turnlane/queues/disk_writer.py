"""A queue with a store, and the one thread that writes to it.

A kind says what is to be written and when (:meth:`WrittenQueue.next_job`) and what follows from its
having been written (:meth:`WrittenQueue.committed`). A disk that fails or is full makes the queue
full, not broken: publishers wait, reading and acks go on, and writing is tried again until it
works.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.errors import StorageFailed
from turnlane.ledger import Outcome
from turnlane.queues.api import AckLevel, Durability
from turnlane.queues.buffer import Portion
from turnlane.queues.consumer import HoldingQueue
from turnlane.queues.settings import QueueSettings
from turnlane.retry import doubled
from turnlane.storage.disk_io import Disk
from turnlane.storage.store import Store, StoreSettings

log = logging.getLogger(__name__)

TRANSIENT = (OSError, MemoryError)
"""What a writer survives: it tries again."""
FIRST_RETRY = 0.02
LAST_RETRY = 1.0
"""Seconds between attempts to write to a disk that fails, doubling from one to the other."""


@dataclass(frozen=True, slots=True)
class Job:
    """What the writer does in one round."""

    portions: Sequence[Portion]
    sync: bool
    tidy: bool
    """Also sync the journal, note drops and delete chunks."""
    before: Callable[[], None] | None = None
    """To be called first, outside the lock."""
    retire: bool = False
    """Everything in the log is settled: begin anew."""


class WrittenQueue(HoldingQueue):
    """A queue and its writer. :class:`turnlane.queues.disk.StoredQueue` adds reading."""

    def __init__(
        self, settings: QueueSettings, *, clock: Clock = SYSTEM_CLOCK, disk: Disk | None = None
    ) -> None:
        self.disk = disk or Disk()
        self.durability = Durability(settings.durability)
        self.store = Store.open(_get_store_settings(settings), self.disk)
        positions = self.store.restore_positions()
        super().__init__(
            settings,
            clock=clock,
            positions=positions,
            totals=self.store.restore_totals(positions),
            sequences=self.store.restore_sequences(),
            queue_id=self.store.queue_id,
        )
        self.work = threading.Condition(self.lock)
        self.stopping = False
        self.urgent = False
        """A publisher is blocked until something is synced."""
        self.idle = False
        """The writer sleeps until the next event comes."""
        self.tidied_at = time.monotonic()
        self._give_up_at: float | None = None
        self._failures = 0
        """Attempts to write that have failed in a row."""
        self.troubled = False
        """The last attempt to write has failed, or the writer itself."""
        self.trouble = ""
        """How it failed."""
        self._retire_at = 0
        self.tidy_again_at = 0.0
        """Not before this time: tidying up has failed."""
        self._drops: Counter[Outcome] = Counter()
        """Turned away at the door; the journal does not know of them yet."""
        self._acks_unsynced = False
        self._flushes = 0
        self._writer = threading.Thread(
            target=self._run, name=f"turnlane-writer-{settings.name}", daemon=True
        )

    def start(self) -> None:
        """Start writing. Apart from construction, so that a kind can finish its own first."""
        with self.lock:
            self._set_retire_at()
            self.advance_persisted()  # what an earlier process has synced
        self._writer.start()

    # ── for a kind to say ────────────────────────────────────────────────────────────────────

    @abstractmethod
    def next_job(self) -> Job:
        """Wait on ``work`` until there is something to do, and say what. Under the lock."""

    @abstractmethod
    def committed(self) -> None:
        """What was to be written is in the log. Under the lock."""

    @abstractmethod
    def left_over(self) -> int:
        """How many events would be lost if the writer stopped now. Under the lock."""

    @abstractmethod
    def must_wait(self, *, failing: bool) -> bool:
        """Whether publishers have to wait for the writer, or for a failing disk. Under the lock."""

    def spare(self) -> list[Portion]:
        """Give up writing what is settled by now; returns that. Under the lock."""
        return []

    # ── the writer ───────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except Exception as error:
            log.exception("the writer of queue %s failed; the queue takes no more", self.name)
            failure = StorageFailed(f"queue {self.name!r} failed, its writer died of {error!r}")
            failure.__cause__ = error
            with self.lock:
                self._note_trouble(error)
                self.gate.fail(failure)
                self.door.calm()
                self.watermarks[AckLevel.PERSISTED].abandon()

    def _round(self) -> bool:
        """Do one job; false when there will be no more."""
        try:
            with self.lock:
                job = self.next_job()
                # A job begun before the queue was closed may leave something unsynced: one more.
                last = self.stopping
            self._write(job)
        except TRANSIENT as error:
            return self._troubled(error)
        more = self._recovered()
        if job.tidy or job.retire:
            self._try_to_tidy(retire=job.retire)
        return more or not last

    def _write(self, job: Job) -> None:
        if job.before is not None:
            job.before()
        self.store.commit(job.portions, sync=job.sync)
        self._flushes += bool(job.portions)
        self.store.record_position(self.gate.bytes)

    def _try_to_tidy(self, *, retire: bool) -> None:
        """What fails here holds nobody up: it is tried again later."""
        try:
            if retire:
                self.store.log.close_active_segment()
            self._tidy()
        except TRANSIENT as error:
            self.tidy_again_at = time.monotonic() + LAST_RETRY
            log.warning("queue %s cannot tidy up: %s", self.name, error)
        with self.lock:
            self._set_retire_at()

    def _recovered(self) -> bool:
        """The job is done; true if there is more to do."""
        self._failures = 0
        with self.lock:
            self.troubled = False
            self._settle_lost()
            self.advance_persisted()
            self.committed()
            self.gate.hold(held=self.must_wait(failing=False))
            self._set_retire_at()
            self.door.calm()
            return self.left_over() > 0

    def _settle_lost(self) -> None:
        for first, end in self.store.take_lost_ranges():
            self.settle_range(first, end, Outcome.MISSING, recorded=False)

    def advance_persisted(self) -> None:
        """Tell everybody how far the log is safe. Under the lock."""
        mark = self.watermarks[AckLevel.PERSISTED]
        self.acks.send(mark.advance(min(self.safe_end(), self.positions.end)))

    def safe_end(self) -> int:
        """As far as everything is on disk, as durability says. Under the lock."""
        written = self.store.log
        return written.end if self.durability is Durability.NEVER else written.synced_end

    def _note_trouble(self, error: Exception) -> None:
        self.troubled = True
        self.trouble = str(error) or repr(error)

    def _troubled(self, error: Exception) -> bool:
        """The disk fails: be full, make space if there is any to make, try again later."""
        with self.lock:
            known = self.troubled
            self._note_trouble(error)
            if not known:
                log.warning("queue %s cannot write: %s; publishers wait", self.name, self.trouble)
            self.gate.hold(held=self.must_wait(failing=True))
            out_of_time = self._give_up_at is not None and time.monotonic() > self._give_up_at
            if out_of_time:
                return False
        if not self._make_space():
            with self.lock:
                self._failures += 1
                self.work.wait(doubled(FIRST_RETRY, LAST_RETRY, self._failures))
        return True

    def _make_space(self) -> bool:
        """Delete all that is settled, the chunk being written too if nothing in it is needed."""
        with self.lock:
            everything = self.positions.is_settled(self.positions.low, self.store.log.end)
            spared = self.spare()
        try:
            for portion in spared:
                self.store.remember_sequences(portion.sequences)
            self.store.record_position(self.gate.bytes)
            if everything:
                self.store.log.close_active_segment()
            return self._remove_settled_chunks() or bool(spared)
        except OSError as error:
            log.debug("queue %s cannot make space: %s", self.name, error)
            return False

    def _tidy(self) -> None:
        """What need not happen at once: note drops, sync acks, delete chunks."""
        self._note_drops()
        self.sync_acks()
        self._remove_settled_chunks()
        self.tidied_at = time.monotonic()
        # What joining blocks took: Arrow's pool keeps it for this thread, which may now be idle.
        pa.default_memory_pool().release_unused()

    def sync_acks(self) -> None:
        """Make every ``done()`` so far survive a power cut too. Raises ``OSError``."""
        with self.lock:
            acks, self._acks_unsynced = self._acks_unsynced, False
        if acks and self.durability is not Durability.NEVER:
            try:
                self.store.journal.sync()
            except OSError:
                self._acks_unsynced = True
                raise

    def _note_drops(self) -> None:
        with self.lock:
            drops = self._drops.copy()
        for outcome, events in drops.items():
            self.store.journal.record_dropped(outcome, events)
            with self.lock:
                self._drops -= Counter({outcome: events})

    def _remove_settled_chunks(self) -> bool:
        with self.lock:
            chunks = self.store.find_settled_segments(self.positions)
        if chunks:
            self.store.remove_segments(chunks)
        return bool(chunks)

    def _set_retire_at(self) -> None:
        spans = self.store.log.list_inactive_segments()
        self._retire_at = spans[0].end if spans else 1 << 62

    def can_retire(self) -> bool:
        """Whether the oldest chunk is settled. Under the lock."""
        return self.positions.low >= self._retire_at and self.may_tidy()

    def may_tidy(self) -> bool:
        """Whether it is time to try again, if tidying up has failed."""
        return time.monotonic() >= self.tidy_again_at

    def untidy(self) -> bool:
        """Whether there is anything to tidy up. Under the lock."""
        return self._acks_unsynced or bool(self._drops)


def _get_store_settings(settings: QueueSettings) -> StoreSettings:
    assert settings.path is not None, "the settings of a disk queue have a path"
    return StoreSettings(
        path=settings.path,
        name=settings.name,
        segment_size=settings.chunk_size,
        compression=settings.compression.value,
        durable=settings.durability is not Durability.NEVER,
        max_unsynced_bytes=min(settings.memory_bytes, settings.max_bytes or settings.memory_bytes),
    )
