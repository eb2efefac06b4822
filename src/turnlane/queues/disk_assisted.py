"""The ``disk_assisted`` kind: a memory queue that spills its oldest blocks to disk when it fills.

Invariant, from which order follows: of the events not settled, those below the log's end are on
disk and the others in memory. So reading the disk first and the memory after is reading in order,
whatever spilled when.

Three ways into disk assistance: the high watermark is reached (then the oldest go to disk until
the low watermark), data is found on disk at the start, the queue is closed (then everything goes).
One way out: all that is on disk is settled; the files go, and the queue is a memory queue again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.intervals import RangeSet
from turnlane.ledger import Outcome
from turnlane.queues.api import Durability
from turnlane.queues.buffer import BatchState, HeldBatch, Portion
from turnlane.queues.disk import StoredQueue
from turnlane.queues.disk_writer import Job
from turnlane.queues.settings import QueueSettings
from turnlane.storage.disk_io import Disk
from turnlane.storage.journal import Journal

# ── untold ──
# What was settled without ever touching the disk, which the journal has still to be told.
#
# As long as nothing else goes to disk, nobody has to know. Before anything does, the journal
# hears
# of all that came before it, so that it counts every event once and under its first outcome.


class Untold:
    """Settled ranges by outcome. Thread-safe; its lock is taken after a queue's own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[Outcome, RangeSet] = {}

    def add(self, first: int, end: int, outcome: Outcome) -> None:
        """Note that ``[first, end)`` is settled, which it was not before."""
        with self._lock:
            self._ranges.setdefault(outcome, RangeSet()).add(first, end)

    def tell(self, journal: Journal) -> None:
        """Tell the journal everything. On ``OSError``: call it again, for twice is harmless."""
        with self._lock:
            for outcome, ranges in self._ranges.items():
                for first, end in ranges:
                    journal.record_settled(first, end, 0, outcome)
            self._ranges.clear()


log = logging.getLogger(__name__)

SPILL_BYTES = 16 << 20
"""The most that is spilled at once."""


class DiskAssistedQueue(StoredQueue):
    """Bounded in memory, and beyond that by the disk. A kill loses what is in memory, no more."""

    storage_is_charged = False

    def __init__(
        self, settings: QueueSettings, *, clock: Clock = SYSTEM_CLOCK, disk: Disk | None = None
    ) -> None:
        super().__init__(settings, clock=clock, disk=disk)
        marks = settings.marks
        assert marks.high is not None, "settings see to it"
        assert marks.low is not None, "settings see to it"
        self._high, self._low = self.gate.level(marks.high), self.gate.level(marks.low)
        self._spilling = False
        self._spill_end = self.store.log.end
        """Events below this offset are on disk, or being written at this moment."""
        self._untold = Untold()
        self._synced_at = -math.inf
        self.start()

    @property
    def assisted(self) -> bool:
        """Whether there is anything on disk."""
        return self.positions.low < self.store.log.end

    def grown(self) -> None:
        if self.gate.reaches(self._high):
            self.crowded()

    def heed(self) -> None:
        super().heed()
        self.grown()

    def crowded(self) -> None:
        if not self._spilling:
            self._spilling = True
            self.work.notify()

    def makes_room(self) -> bool:
        return not self.troubled

    def must_wait(self, *, failing: bool) -> bool:
        del failing  # a disk that fails leaves a memory queue, which is full when it is full
        return False

    def stored_portion(self, first: int, end: int) -> Portion:
        return Portion(first, end, 0, None, charged=False)

    def evict(self, events: int) -> bool:
        """Drop the oldest unread events in memory: those on disk take no room there."""
        if self.tail.oldest() is None:
            self.tail.seal()
        while (oldest := self.tail.oldest()) is not None and not oldest.charged:
            self.tail.drop_oldest()
        if oldest is None:
            return False
        portion = self.tail.take(oldest.first, min(oldest.end, oldest.first + events))
        return self.drop_oldest(portion)

    # ── when and what to write ───────────────────────────────────────────────────────────────

    def next_job(self) -> Job:
        while (pause := self._due_in()) is None or pause > 0:
            self.work.wait(pause)
        return self._job()

    def _due_in(self) -> float | None:
        if self.stopping or self._spilling or self._can_end() or self.can_retire():
            return 0.0
        if not self.store.log.has_unsynced and not self.untidy():
            return None
        return max(0.0, self._synced_at + self.settings.sync_interval - time.monotonic())

    def _can_end(self) -> bool:
        """Whether disk assistance is over: there are files, and all in them is settled."""
        return bool(self.store.log.list_segments()) and not self.assisted

    def _job(self) -> Job:
        due = time.monotonic() >= self._synced_at + self.settings.sync_interval
        if due:
            self._synced_at = time.monotonic()
        spill = self._spilling or (self.stopping and self.settings.save_on_shutdown)
        portions = self._oldest() if spill else []
        if portions:
            self._spill_end = portions[-1].end
            self._tell_attempts(portions)
        else:
            self._spilling = False
        sync = self.durability is Durability.ALWAYS or due or self.stopping
        return Job(
            portions,
            sync=sync and self.durability is not Durability.NEVER,
            tidy=due or self.stopping or self.can_retire(),
            before=self._tell_journal if portions or self.stopping or self.assisted else None,
            retire=self._can_end(),
        )

    def _surplus(self) -> tuple[int, int]:
        """How many events and bytes are to leave memory: all, if anybody waits for room."""
        if self.stopping or self.gate.line:
            return self.gate.depth, self.gate.bytes
        return self.gate.depth - self._low.events, self.gate.bytes - self._low.bytes

    def _oldest(self) -> list[Portion]:
        """The surplus, from the oldest events in memory on; handed out ones are among them."""
        self.tail.seal()
        surplus, surplus_bytes = self._surplus()
        chosen: list[Portion] = []
        size = 0
        for portion in sorted(self._in_memory(), key=lambda each: each.first):
            if surplus <= 0 and surplus_bytes <= size:
                break
            if chosen and size + portion.size > SPILL_BYTES:
                break
            chosen.append(portion)
            surplus -= len(portion)
            size += portion.size
        return chosen

    def _in_memory(self) -> Iterable[Portion]:
        """Copies of all that is not settled and not on disk."""
        out = (
            batch.portion
            for batch in self.out.values()
            if batch.state in (BatchState.OUT, BatchState.SETTLING) and not batch.freed
        )
        on_disk = self.store.log.end
        for portion in (*out, *self.returned, *self.tail):
            if portion.charged and portion.end > on_disk:
                rest = portion.copy()
                if rest.first < on_disk:
                    rest.head(on_disk - rest.first)
                yield rest

    def _tell_journal(self) -> None:
        self._untold.tell(self.store.journal)

    def _tell_attempts(self, portions: Sequence[Portion]) -> None:
        """Have what was given back come with its attempt after a restart, too. Under the lock."""
        again = [portion for portion in portions if portion.attempt > 1]
        if again:
            self._tell_journal()  # or what was settled before them would seem missing
        for portion in again:
            self.store.journal.record_returned(portion.first, portion.end, portion.attempt)

    def record_returned(self, portion: Portion) -> None:
        # Of what is in memory only, the journal must not know: it could not tell, after a kill,
        # what was settled from what is lost.
        if portion.first < self._spill_end:
            super().record_returned(portion.part(portion.first, min(portion.end, self._spill_end)))

    def record_settled(self, portion: Portion, outcome: Outcome) -> None:
        if portion.first < self._spill_end:
            self._tell_journal()  # parts of it may be settled by offset, otherwise than now
            super().record_settled(portion, outcome)

    def settle_portion(self, portion: Portion, outcome: Outcome, events: int, size: int) -> None:
        if not portion.recorded:
            self._note_untold(portion, outcome)
        super().settle_portion(portion, outcome, events, size)

    def _note_untold(self, portion: Portion, outcome: Outcome) -> None:
        for span in self.positions.unsettled(portion.first, portion.end):
            self._untold.add(*span, outcome)
        if portion.first < self._spill_end:
            # It went to disk between done() and here: without a word it would come again.
            try:
                self._tell_journal()
            except OSError as error:
                log.warning("queue %s: an ack is not recorded yet: %s", self.name, error)

    def safe_end(self) -> int:
        """As far as everything is on disk or settled; what was freed is neither."""
        freed = [
            batch.portion.first
            for batch in self.out.values()
            if batch.freed and batch.portion.charged
        ]
        return min([super().safe_end(), *freed])

    def committed(self) -> None:
        """What is on disk takes no room in memory any more."""
        end = self.store.log.end
        while (oldest := self.tail.oldest()) is not None and oldest.end <= end:
            self.refund(*self.tail.drop_oldest().charge)
        for portion in self.returned:
            if portion.charged and portion.end <= end:
                self.refund(*portion.charge)
                portion.charged, portion.pieces = False, None
        for batch in self.out.values():
            if batch.portion.charged and batch.portion.end <= end and not batch.freed:
                self._uncharge(batch)
        self._spilling = self._spilling and max(self._surplus()) > 0

    def _uncharge(self, batch: HeldBatch) -> None:
        batch.portion.charged = False
        events, size = batch.charged_events, batch.charged_bytes
        batch.charged_events = batch.charged_bytes = 0
        self.refund(events, size)

    def settled(self) -> None:
        super().settled()
        self.advance_persisted()
        if self._can_end():
            self.work.notify()

    def left_over(self) -> int:
        self.tail.seal()
        return sum(map(len, self._in_memory())) if self.settings.save_on_shutdown else 0
