"""The ``disk`` kind: an append-only log under a tail in memory, with group commit.

Publishers put events into memory and go on; the writer writes what has gathered, syncs as
``durability`` says, and only then moves the ``persisted`` watermark. While it syncs, the next group
gathers, so the more publishers wait, the more of them share a sync. A consumer that keeps up is
served from the tail and never reads the disk.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import time
from collections import deque
from dataclasses import replace
from weakref import WeakSet

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.errors import EventsLost, StorageFailed
from turnlane.events import Block
from turnlane.ledger import Outcome
from turnlane.queues.api import AckLevel, Durability, Stats
from turnlane.queues.buffer import Portion
from turnlane.queues.disk_writer import Job, WrittenQueue
from turnlane.queues.settings import QueueSettings
from turnlane.storage.disk_io import Disk
from turnlane.storage.reader import StoredEvents, UnreadableRange
from turnlane.storage.unwritten_sequences import SequencedRange

# ── stored ──
# What the kinds with a disk have in common beside their writer: reading, acks, closing.

log = logging.getLogger(__name__)

HANG_SECONDS = 10.0
"""How long after ``shutdown_timeout`` a disk that does nothing is waited for on close."""

LOOK_SECONDS = 0.05
"""How soon a ``done()`` that waits for the writer finds out that the disk fails."""

MANY_FAILURES = 3
"""A disk that has failed so often in a row is not waited for; once may be a sync to be mended."""

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


os.register_at_fork(after_in_child=_OPEN.clear)  # they are the parent's to close


class StoredQueue(WrittenQueue):
    """A queue with a directory of its own, which no other process may use meanwhile."""

    def __init__(
        self, settings: QueueSettings, *, clock: Clock = SYSTEM_CLOCK, disk: Disk | None = None
    ) -> None:
        super().__init__(settings, clock=clock, disk=disk)
        self._reload(self.positions.pending)

    def _reload(self, pending: int) -> None:
        """Take over what the store says was there."""
        self.types.update((field.name, field.type) for field in self.store.log.schema)
        size = self.store.unsettled_bytes
        for first, end, attempt in self.store.returned_ranges:
            share = size * (end - first) // max(1, pending)
            charged = self.storage_is_charged
            with self.lock:
                self.give_back(Portion(first, end, share, None, attempt, charged=charged))

    storage_is_charged = True
    """Whether what is on disk counts against the bounds."""

    def start(self) -> None:
        super().start()
        _OPEN.add(self)

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
        if not outcome.is_drop:
            self._write_numbered(portion)
        self.store.journal.record_settled(portion.first, portion.end, portion.size, outcome)
        portion.recorded = True
        if self.durability is not Durability.ALWAYS:
            self._acks_unsynced = True

    def _write_numbered(self, portion: Portion) -> None:
        """Have in the log what must be there for these to be settled with all their numbers.

        Otherwise, after a kill, their producer would have to send older ones again, and these with
        them. Not while the disk goes on failing, for acks go on then. Not under the lock.
        """
        mark = self.watermarks[AckLevel.PERSISTED]
        while end := self.store.journal.find_unsafe_end(portion.first, portion.end):
            with self.lock:
                ticket = mark.ticket(end, end) if self._can_write() else None
                if ticket is None:
                    return
                self.urge(mark.level)
            if not ticket.wait(LOOK_SECONDS):
                with self.lock:
                    mark.withdraw(ticket)

    def _can_write(self) -> bool:
        return self._writer.is_alive() and not self.stopping and self._failures < MANY_FAILURES

    def sync_settled(self) -> None:
        if self.durability is Durability.ALWAYS:
            self.store.journal.sync()

    def sync_dropped(self) -> None:
        try:
            self.sync_settled()
        except OSError as error:
            # They were promised to nobody: the writer tries again.
            self._acks_unsynced = True
            log.warning("queue %s: drops are not synced yet: %s", self.name, error)

    def record_returned(self, portion: Portion) -> None:
        try:
            self.store.journal.record_returned(portion.first, portion.end, portion.attempt)
        except OSError as error:
            # Only the count of attempts suffers, and only if the queue is restarted before the
            # batch is settled.
            log.warning("queue %s: attempt not recorded: %s", self.name, error)

    def dropped_at_door(self, outcome: Outcome, events: int) -> None:
        super().dropped_at_door(outcome, events)
        if events:
            self._drops[outcome] += events
            if self.idle:
                self.work.notify()

    def fetch(self, portion: Portion) -> Portion | None:
        pieces: list[Block] = []
        at = portion.first
        try:
            while at < portion.end:
                found = self.store.fetch(at, portion.end)
                if isinstance(found, StoredEvents):
                    end = at + found.block.num_rows
                    large = portion.size * (end - portion.first) >= JOIN_BYTES * len(portion)
                    if large and pieces:
                        break  # the reader still holds this frame: it is the next batch
                    pieces.append(found.block)
                    at = end
                    if large:
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
            self.sync_settled()
            with self.lock:
                for span in self.positions.unsettled(start, stop):
                    part = lost.part(*span)
                    self.settle_portion(part, outcome, *part.charge)
            log.error("queue %s: offsets %d to %d are %s", self.name, start, stop - 1, outcome)

    def _cut(self, portion: Portion, at: int, pieces: list[Block]) -> Portion:
        """What was found; the rest of the portion is still to be read."""
        if at < portion.end:
            head = portion.head(at - portion.first)
            with self.lock:
                # As if it had not been asked for: the next batch need not end where this one would.
                is_fresh = portion.attempt == 1 and self.positions.leave(portion.first, portion.end)
                if not is_fresh:
                    self.give_back(portion)
            portion = head
        portion.pieces = pieces
        return portion

    def read_stored(self, first: int, end: int) -> tuple[int, Block] | None:
        while first < end:
            found = self.store.visit(first, end)
            if not isinstance(found, UnreadableRange):
                return found
            # Nobody ever will read it: whoever waited for it would wait for ever.
            self.settle(first, min(found.end, end), found.outcome)
            first = found.end
        return None

    def close_storage(self) -> None:
        with self.lock:
            self.stopping = True
            self._give_up_at = time.monotonic() + self.settings.shutdown_timeout
            self.work.notify()
        self._await_writer()
        with self.lock:
            unwritten = self.left_over() or self._unsynced()
        try:
            self._note_drops()  # the writer may have left before it saw the last of them
            if not self._give_up_rest() and not unwritten:
                # Otherwise their producers may send again what was given up, or may be lost yet.
                self.store.journal.remember_sequences(self.sequences)
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

    def _await_writer(self) -> None:
        """Let the writer finish, for as long as it gets any further.

        One that hangs in the disk is left behind, and with it the files, open as they are.
        """
        written = self.store.log
        reached = None
        while self._writer.is_alive() and reached != (written.end, written.synced_end):
            reached = (written.end, written.synced_end)
            self._writer.join(self.settings.shutdown_timeout + HANG_SECONDS)
        if self._writer.is_alive():
            with self.lock:
                count = self.left_over() or self._unsynced()
            msg = f"queue {self.name!r} hangs in its disk, with {count} accepted events unwritten"
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
            self.store.journal.record_settled(first, end, 0, Outcome.CLOSED)
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
            trouble=self.trouble if self.troubled else "",
        )


TIDY_SECONDS = 1.0
"""How often to tidy up when every write is synced anyway."""

GATHER_SECONDS = 0.005
GATHER_SLICE = 0.0005
"""How long the writer waits for publishers to share a sync, and in which steps it looks."""

JOB_BYTES = 16 << 20
"""The most that is written at once: more would only make those wait who wait for a sync."""


class DiskQueue(StoredQueue):
    """Everything accepted is written; what is acked ``persisted`` survives any crash."""

    def __init__(
        self, settings: QueueSettings, *, clock: Clock = SYSTEM_CLOCK, disk: Disk | None = None
    ) -> None:
        super().__init__(settings, clock=clock, disk=disk)
        self._unwritten: deque[Portion] = deque()
        self._unwritten_bytes = 0
        self._synced_at = -math.inf
        self._together = 1
        """How many publishers were waiting for the last sync, or came while it ran."""
        self._gathering = False
        pending = self.positions.pending
        self.gate.charge(pending, self.store.unsettled_bytes if pending else 0)
        self.start()

    def sealed(self, portion: Portion) -> None:
        # A copy: consumers cut pieces off the one in the tail.
        self._unwritten.append(portion.copy())
        for stamp in portion.sequences:
            numbered = SequencedRange(portion.first, portion.end, stamp, portion.consecutive)
            self.store.journal.unwritten_sequences.add(numbered)
        self._unwritten_bytes += portion.size
        if self._unwritten_bytes >= self.settings.write_buffer:
            self.work.notify()
            if self.must_wait(failing=False):
                self.gate.hold(held=True)

    def makes_room(self) -> bool:
        return self.gate.held and not self.troubled

    def must_wait(self, *, failing: bool) -> bool:
        return failing or self._unwritten_bytes >= self.settings.memory_bytes

    # ── when and what to write ───────────────────────────────────────────────────────────────

    def next_job(self) -> Job:
        while (pause := self._due_in()) is None or pause > 0:
            self.idle = pause is None
            self.rest_heed()
            self.work.wait(pause)
            self.idle = False
        self.rest_heed()
        if self.urgent:
            self._gather()
        return self._job()

    def _gather(self) -> None:
        """Let those who shared the last sync share the next, as long as they keep coming.

        Without this the first to come back would get a sync of its own, and all others wait for it.
        """
        mark = self.watermarks[AckLevel.PERSISTED]
        until = time.monotonic() + GATHER_SECONDS
        seen = -1
        self._gathering = True
        while seen < mark.waiting < self._together and time.monotonic() < until:
            seen = mark.waiting
            self.work.wait(GATHER_SLICE)
        self._gathering = False

    def urge(self, level: AckLevel) -> None:
        if level is AckLevel.PERSISTED:
            self.urgent = True
            if not self._gathering or self.watermarks[level].waiting >= self._together:
                self.work.notify()

    def _due_in(self) -> float | None:
        """Seconds until there is something to do; ``None`` if nothing is known of."""
        if self.stopping or self.urgent or self.troubled or self.can_retire():
            return 0.0
        if self._unwritten_bytes >= self.settings.write_buffer:
            return 0.0
        due = self._synced_at + self._interval()
        if not self._has_unsynced():
            if not self.untidy():
                return None
            due = max(due, self._tidying_time())
        return max(0.0, due - time.monotonic())

    def _has_unsynced(self) -> bool:
        return self.store.log.has_unsynced or bool(self._unwritten or self.tail.open.values)

    def _interval(self) -> float:
        if self.durability is Durability.ALWAYS:
            return 0.0
        if self.durability is Durability.NEVER:
            return self.settings.stale_flush
        return min(self.settings.sync_interval, self.settings.stale_flush)

    def _job(self) -> Job:
        """Everything gathered, and what belongs to the interval if that is over."""
        due = time.monotonic() >= self._synced_at + self._interval()
        if due or self.urgent or self.stopping:
            self.tail.seal()
        portions: list[Portion] = []
        size = 0
        for portion in self._unwritten:
            if portions and size + portion.size > JOB_BYTES:
                break
            portions.append(portion)
            size += portion.size
        if due:
            self._synced_at = time.monotonic()
        whole = len(portions) == len(self._unwritten)
        sync = self.durability is not Durability.NEVER and (due or self.urgent or self.stopping)
        tidy = self.stopping or self.can_retire() or (due and self._is_tidying_time())
        return Job(portions, sync=sync, tidy=tidy and whole)

    def _is_tidying_time(self) -> bool:
        return time.monotonic() >= self._tidying_time()

    def _tidying_time(self) -> float:
        return max(self.tidied_at + (self._interval() or TIDY_SECONDS), self.tidy_again_at)

    def committed(self) -> None:
        mark = self.watermarks[AckLevel.PERSISTED]
        self.urgent = mark.waiting > 0
        self._together = mark.served + mark.waiting
        end = self.store.log.end
        while self._unwritten and self._unwritten[0].end <= end:
            self._unwritten_bytes -= self._unwritten.popleft().size
        self.store.journal.unwritten_sequences.forget_below(self.safe_end())
        self._evict_tail(end)

    def _evict_tail(self, written: int) -> None:
        """Keep the tail within its bound; what leaves it is on disk."""
        while self.tail.bytes > self.settings.memory_bytes:
            oldest = self.tail.oldest()
            if oldest is None or oldest.end > written:
                return
            self.tail.drop_oldest()

    def spare(self) -> list[Portion]:
        spared: list[Portion] = []
        unwritten = self._unwritten
        while unwritten and self.positions.is_settled(unwritten[0].first, unwritten[0].end):
            spared.append(unwritten.popleft())
            self._unwritten_bytes -= spared[-1].size
        return spared

    def left_over(self) -> int:
        return sum(map(len, self._unwritten)) + len(self.tail.open)
