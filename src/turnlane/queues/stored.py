"""What the kinds with a disk have in common: a store, and the one thread that writes to it.

A kind says what is to be written and when (:meth:`StoredQueue.next_job`) and what follows from its
having been written (:meth:`StoredQueue.committed`). A disk that fails or is full makes the queue
full, not broken: publishers wait, reading and acks go on, and writing is tried again until it
works.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakSet

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.errors import EventsLost, StorageFailed
from turnlane.events import Block
from turnlane.queues.contract import AckLevel, Durability, Outcome
from turnlane.queues.holding import HoldingQueue
from turnlane.queues.log.files import Disk
from turnlane.queues.log.reader import Found
from turnlane.queues.portion import Portion
from turnlane.queues.settings import QueueSettings
from turnlane.queues.stats import Stats
from turnlane.queues.store import Store

log = logging.getLogger(__name__)

FIRST_RETRY = 0.02
LAST_RETRY = 1.0
"""Seconds between attempts to write to a disk that fails, doubling from one to the other."""


JOIN_BYTES = 256 * 1024
"""Frames are joined to a batch up to this size: beyond it copying costs more than another batch."""


_OPEN: WeakSet[StoredQueue] = WeakSet()


@atexit.register
def _close_all() -> None:
    """A program that ends without closing its queues loses nothing that it published."""
    for queue in list(_OPEN):
        if not queue.closed:
            log.warning("queue %s was not closed; closing it at exit", queue.name)
            try:
                queue.close()
            except EventsLost:
                log.exception("queue %s did not close well", queue.name)


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


class StoredQueue(HoldingQueue):
    """A queue with a directory of its own, which no other process may use meanwhile."""

    def __init__(
        self, settings: QueueSettings, *, clock: Clock = SYSTEM_CLOCK, disk: Disk | None = None
    ) -> None:
        self.disk = disk or Disk()
        self.durability = Durability(settings.durability)
        self.store = Store.open(settings, self.disk)
        positions = self.store.positions()
        super().__init__(
            settings,
            clock=clock,
            positions=positions,
            totals=self.store.totals(positions),
            sequences=self.store.sequences(),
        )
        self.work = threading.Condition(self.lock)
        self.stopping = False
        self.urgent = False
        """A publisher is blocked until something is synced."""
        self.idle = False
        """The writer sleeps until the next event comes."""
        self.tidied_at = time.monotonic()
        self._give_up_at: float | None = None
        self._retry = FIRST_RETRY
        self.troubled = False
        """The last attempt to write has failed."""
        self._retire_at = 0
        self._tidy_again_at = 0.0
        self._drops: Counter[Outcome] = Counter()
        """Turned away at the door; the journal does not know of them yet."""
        self._acks_unsynced = False
        self._flushes = 0
        self._reload(positions.pending)
        self._writer = threading.Thread(
            target=self._run, name=f"turnlane-writer-{settings.name}", daemon=True
        )

    def _reload(self, pending: int) -> None:
        """Take over what the store says was there."""
        self.types.update((field.name, field.type) for field in self.store.log.schema)
        size = self.store.unsettled_bytes()
        for first, end, attempt in self.store.returned():
            share = size * (end - first) // max(1, pending)
            charged = self.storage_is_charged
            with self.lock:
                self.give_back(Portion(first, end, share, None, attempt, charged=charged))

    storage_is_charged = True
    """Whether what is on disk counts against the bounds."""

    def start(self) -> None:
        """Start writing. Apart from construction, so that a kind can finish its own first."""
        with self.lock:
            self._set_retire_at()
        self._writer.start()
        _OPEN.add(self)

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
        except Exception:
            log.exception("the writer of queue %s failed; the queue takes no more", self.name)
            with self.lock:
                self.gate.close()
                self.door.calm()
                self.watermarks[AckLevel.PERSISTED].abandon()

    def _round(self) -> bool:
        """Do one job; false when there will be no more."""
        with self.lock:
            job = self.next_job()
            # A job begun before the queue was closed may leave something unsynced: one more.
            last = self.stopping
        try:
            self._write(job)
        except OSError as error:
            return self._troubled(error)
        more = self._recovered()
        if job.tidy or job.retire:
            self._try_to_tidy(retire=job.retire)
        return more or not last

    def _write(self, job: Job) -> None:
        if job.before is not None:
            job.before()
        self.store.commit(job.portions, sync=job.sync)
        if job.portions:
            self._flushes += 1
            self._leave_hint(job.portions)

    def _try_to_tidy(self, *, retire: bool) -> None:
        """What fails here holds nobody up: it is tried again later."""
        try:
            if retire:
                self.store.log.retire()
            self._tidy()
        except OSError as error:
            self._tidy_again_at = time.monotonic() + LAST_RETRY
            log.warning("queue %s cannot tidy up: %s", self.name, error)
        with self.lock:
            self._set_retire_at()

    def _leave_hint(self, portions: Sequence[Portion]) -> None:
        stamps = [stamp for portion in portions for stamp in portion.stamps]
        self.store.hint(self.gate.bytes, stamps)

    def _recovered(self) -> bool:
        """The job is done; true if there is more to do."""
        self._retry = FIRST_RETRY
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
        for first, end in self.store.lost():
            for start, stop in self.positions.unsettled(first, end):
                lost = self.stored_portion(start, stop)
                self.settle_portion(lost, Outcome.MISSING, *lost.charge)

    def advance_persisted(self) -> None:
        """Tell everybody how far the log is safe. Under the lock."""
        mark = self.watermarks[AckLevel.PERSISTED]
        self.acks.send(mark.advance(min(self.safe_end(), self.positions.end)))

    def safe_end(self) -> int:
        """As far as everything is on disk, as durability says. Under the lock."""
        written = self.store.log
        return written.end if self.durability is Durability.NEVER else written.synced_end

    def _troubled(self, error: OSError) -> bool:
        """The disk fails: be full, make space if there is any to make, try again later."""
        with self.lock:
            if not self.troubled:
                log.warning("queue %s cannot write: %s; publishers wait", self.name, error)
            self.troubled = True
            self.gate.hold(held=self.must_wait(failing=True))
            out_of_time = self._give_up_at is not None and time.monotonic() > self._give_up_at
            if out_of_time:
                return False
        if not self._make_space():
            with self.lock:
                self.work.wait(self._retry)
                self._retry = min(LAST_RETRY, self._retry * 2)
        return True

    def _make_space(self) -> bool:
        """Delete all that is settled, the chunk being written too if nothing in it is needed."""
        with self.lock:
            everything = self.positions.is_settled(self.positions.low, self.store.log.end)
            spared = self.spare()
        try:
            if spared:
                self._leave_hint(spared)
            if everything:
                self.store.log.retire()
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
            self.store.journal.dropped(outcome, events)
            with self.lock:
                self._drops -= Counter({outcome: events})

    def _remove_settled_chunks(self) -> bool:
        with self.lock:
            chunks = self.store.settled_chunks(self.positions)
        if chunks:
            self.store.remove(chunks)
        return bool(chunks)

    def _set_retire_at(self) -> None:
        spans = self.store.log.inactive_chunks()
        self._retire_at = spans[0].end if spans else 1 << 62

    def can_retire(self) -> bool:
        """Whether the oldest chunk is settled. Under the lock."""
        return self.positions.low >= self._retire_at and self.may_tidy()

    def may_tidy(self) -> bool:
        """Whether it is time to try again, if tidying up has failed."""
        return time.monotonic() >= self._tidy_again_at

    def untidy(self) -> bool:
        """Whether there is anything to tidy up. Under the lock."""
        return self._acks_unsynced or bool(self._drops)

    # ── hooks ────────────────────────────────────────────────────────────────────────────────

    def heed(self) -> None:
        super().heed()
        if self.idle:
            self.idle = False
            self.rest_heed()
            self.work.notify()

    def is_restless(self) -> bool:
        return self.idle

    def settled(self) -> None:
        if self.idle or self.troubled or self.can_retire():
            self.work.notify()

    def record_settled(self, portion: Portion, outcome: Outcome) -> None:
        self.store.journal.settled(portion.first, portion.end, portion.size, outcome)
        portion.recorded = True
        if self.durability is Durability.ALWAYS:
            self.store.journal.sync()
        else:
            self._acks_unsynced = True

    def record_returned(self, portion: Portion) -> None:
        try:
            self.store.journal.returned(portion.first, portion.end, portion.attempt)
        except OSError as error:
            # Only the count of attempts suffers, and only if the queue is restarted before the
            # batch is settled.
            log.warning("queue %s: attempt not recorded: %s", self.name, error)

    def dropped_at_door(self, outcome: Outcome, events: int) -> None:
        super().dropped_at_door(outcome, events)
        if events:
            self._drops[outcome] += events

    def fetch(self, portion: Portion) -> Portion | None:
        pieces: list[Block] = []
        at = portion.first
        try:
            while at < portion.end:
                found = self.store.fetch(at, portion.end)
                if isinstance(found, Found):
                    pieces.append(found.block)
                    at += found.block.num_rows
                    if portion.size * (at - portion.first) >= JOIN_BYTES * len(portion):
                        break
                elif pieces:
                    break
                else:
                    self._lose(portion, found.first, min(found.end, portion.end), found.outcome)
                    at = min(found.end, portion.end)
                    portion.head(at - portion.first)
        except BaseException as error:
            with self.lock:
                self.give_back(portion)
            if not isinstance(error, OSError):
                raise
            msg = f"queue {self.name!r} cannot read offset {at}: {error}"
            raise StorageFailed(msg) from error
        return self._cut(portion, at, pieces) if pieces else None

    def _lose(self, portion: Portion, first: int, end: int, outcome: Outcome) -> None:
        """Offsets cannot be read, and never will be: settle what of them was not settled."""
        with self.lock:
            spans = self.positions.unsettled(first, end)
        for start, stop in spans:
            share = portion.size * (stop - start) // len(portion)
            lost = Portion(start, stop, share, None, charged=portion.charged)
            self.record_settled(lost, outcome)
            with self.lock:
                self.settle_portion(lost, outcome, *lost.charge)
            log.error("queue %s: offsets %d to %d are %s", self.name, start, stop - 1, outcome)

    def _cut(self, portion: Portion, at: int, pieces: list[Block]) -> Portion:
        """What was found; the rest of the portion is still to be read."""
        if at < portion.end:
            head = portion.head(at - portion.first)
            with self.lock:
                self.give_back(portion)
            portion = head
        return replace(portion, pieces=pieces)

    def read_stored(self, first: int, end: int) -> tuple[int, Block] | None:
        return self.store.visit(first, end)

    def close_storage(self) -> None:
        with self.lock:
            self.stopping = True
            self._give_up_at = time.monotonic() + self.settings.shutdown_timeout
            self.work.notify()
        self._writer.join()
        with self.lock:
            unwritten = self.left_over() or self._unsynced()
        try:
            self._note_drops()  # the writer may have left before it saw the last of them
            if not self._give_up_rest():
                # Otherwise their producers may send again what was given up.
                self.store.journal.remember(self.sequences)
            self.store.journal.snapshot()
        except OSError as error:
            log.warning("queue %s: journal not tidied on close: %s", self.name, error)
        finally:
            # Whoever is reading from the disk at this moment has been told; let them finish.
            done = self._getting.acquire(timeout=self.settings.shutdown_timeout)
            self.store.close()
            if done:
                self._getting.release()
        if unwritten:
            msg = f"queue {self.name!r} could not write {unwritten} accepted events on close"
            raise EventsLost(msg)

    def _unsynced(self) -> int:
        spans = self.positions.unsettled(self.safe_end(), self.store.log.end)
        return sum(end - first for first, end in spans)

    def _give_up_rest(self) -> bool:
        """Count what is neither settled nor on disk as dropped; true if there is any."""
        with self.lock:
            spans = self.positions.unsettled(self.store.log.end, self.positions.end)
            spans += [
                (batch.portion.first, batch.portion.end)
                for batch in self.out.values()
                if batch.freed and batch.portion.charged and not self.storage_is_charged
            ]
            for first, end in spans:
                self.totals.add(Outcome.CLOSED, self.positions.settle(first, end))
        for first, end in spans:
            self.store.journal.settled(first, end, 0, Outcome.CLOSED)
        return bool(spans)

    def stats(self) -> Stats:
        return replace(super().stats(), disk_available_bytes=self.store.free_bytes(self.disk))

    def describe(self) -> Stats:
        return replace(
            super().describe(),
            disk_bytes=self.store.log.bytes,
            disk_full=self.store.full_total,
            disk_errors=self.store.errors_total,
            syncs=self.store.syncs_total,
            meta_syncs=self.store.journal.syncs,
            rotations=self.store.log.rotations,
            flushes=self._flushes,
            quarantined=self.store.quarantined_total,
        )
