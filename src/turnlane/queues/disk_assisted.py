"""The ``disk_assisted`` kind: a memory queue that spills its oldest blocks to disk when it fills.

Invariant, from which the order of events follows: of the unsettled events, those below the end of
the log are on disk and the others are in memory. So reading the disk first and the memory after it
is reading in order, at any time.

Three ways into disk assistance: the high watermark is reached (then the oldest events go to disk
until the low watermark), data is found on disk at the start, or the queue is closed (then all of it
goes to disk). One way out: everything on disk is settled. Then the files are removed, and the queue
is a memory queue again.

The journal hears only of events that are on disk. Acks of other events are kept as
:class:`PendingAcks` until events behind them are spilled: then the journal has to know them, or
after a kill it could not tell settled events from lost ones.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

from turnlane.intervals import RangeSet, Span
from turnlane.ledger import Outcome
from turnlane.logs import get_logger
from turnlane.queues.admission import FillLevel
from turnlane.queues.api import Durability
from turnlane.queues.buffer import BlockRange
from turnlane.queues.disk import LogStorage, WriteJob
from turnlane.queues.settings import QueueSettings
from turnlane.queues.storage_api import StorageHost, TakeBatch
from turnlane.storage.disk_io import Disk
from turnlane.storage.journal import Journal

log = get_logger(__name__)

SPILL_BYTES = 16 << 20
"""The most that is spilled at once."""


class PendingAcks:
    """Acks of events that never reached the disk and are not in the journal yet.

    Before anything goes to disk, the journal hears of all of them, so that it counts every event
    once, under its first outcome. Thread-safe; its lock is taken after the lock of the queue.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[Outcome, RangeSet] = {}

    def add(self, first: int, end: int, outcome: Outcome) -> None:
        """Add a range that was not settled before."""
        with self._lock:
            self._ranges.setdefault(outcome, RangeSet()).add(first, end)

    def record(self, journal: Journal) -> None:
        """Record all of them. After an ``OSError`` call it again: twice does no harm."""
        with self._lock:
            for outcome, ranges in self._ranges.items():
                for first, end in ranges:
                    journal.record_settled(first, end, 0, outcome)
            self._ranges.clear()


class SpillStorage(LogStorage):
    """Bounded in memory, and beyond that by the disk. A kill loses only the events in memory."""

    charges_stored = False
    can_cancel = True

    def __init__(self, settings: QueueSettings, disk: Disk | None = None) -> None:
        super().__init__(settings, disk)
        self._high_level: FillLevel
        self._low_level: FillLevel
        self._is_spilling = False
        self._spill_end = self.store.log.end
        """Events below this offset are on disk, or are being written at this moment."""
        self._pending_acks = PendingAcks()
        self._synced_at = -math.inf

    def start(self, host: StorageHost, take: TakeBatch) -> None:
        marks = self._settings.marks
        high, low = host.admission.level_of(marks.high), host.admission.level_of(marks.low)
        assert high is not None, "the settings of this kind have both watermarks"
        assert low is not None, "the settings of this kind have both watermarks"
        self._high_level, self._low_level = high, low
        super().start(host, take)

    def _has_stored(self) -> bool:
        """Whether the queue is disk-assisted: unsettled events are on disk."""
        return self._host.positions.low < self.store.log.end

    def _can_end(self) -> bool:
        """Whether disk assistance is over: there are files, and everything in them is settled."""
        return bool(self.store.log.list_segments()) and not self._has_stored()

    # ── events from the queue ───────────────────────────────────────────────────────────────────

    def on_growth(self) -> None:
        fill = self._host.admission
        if fill.events >= self._high_level.events or fill.bytes >= self._high_level.bytes:
            self._start_spilling()

    def _start_spilling(self) -> None:
        if not self._is_spilling:
            self._is_spilling = True
            self._work.notify()

    def find_unstored(self) -> int:
        return self._spill_end

    def make_room(self) -> bool:
        self._start_spilling()
        return not self.failure

    def _must_publishers_wait(self, *, failing: bool) -> bool:
        del failing  # without its disk the queue is a memory queue, which is full when it is full
        return False

    def on_settled(self, settled: BlockRange, fresh: Sequence[Span], outcome: Outcome) -> None:
        if not settled.is_recorded:
            for first, end in fresh:
                self._pending_acks.add(first, end, outcome)
            if settled.first < self._spill_end:
                # It went to disk between done() and here: without a record it would come again.
                try:
                    self._record_pending_acks()
                except OSError as error:
                    log.warning("queue.ack_not_recorded", queue=self._name, error=error)
        super().on_settled(settled, fresh, outcome)
        self._report_persisted()
        if self._can_end():
            self._work.notify()

    # ── acks ────────────────────────────────────────────────────────────────────────────────────

    def _record_pending_acks(self) -> None:
        self._pending_acks.record(self.store.journal)

    def settle(self, settled: BlockRange, outcome: Outcome) -> None:
        if settled.first < self._spill_end:
            self._record_pending_acks()  # parts may be settled by offset, with another outcome
            super().settle(settled, outcome)

    def give_back(self, returned: BlockRange) -> None:
        if returned.first < self._spill_end:
            super().give_back(returned.slice(returned.first, min(returned.end, self._spill_end)))

    def _find_safe_end(self) -> int:
        """Return how far everything is on disk or settled; freed events are neither."""
        freed = [first for first, _ in self._host.in_flight.list_freed_ranges()]
        return min([super()._find_safe_end(), *freed])

    # ── when and what to write ──────────────────────────────────────────────────────────────────

    def _next_job(self) -> WriteJob:
        while (pause := self._due_in()) is None or pause > 0:
            self._work.wait(pause)
        return self._make_job()

    def _due_in(self) -> float | None:
        """Return the seconds until there is something to do; ``None`` if nothing is known."""
        is_now = self._is_stopping or self._is_spilling or self._can_end()
        if is_now or self._can_remove_segment():
            return 0.0
        if not self.store.log.has_unsynced and not self._is_untidy():
            return None
        return max(0.0, self._synced_at + self._settings.sync_interval - time.monotonic())

    def _make_job(self) -> WriteJob:
        is_due = time.monotonic() >= self._synced_at + self._settings.sync_interval
        if is_due:
            self._synced_at = time.monotonic()
        spill = self._is_spilling or (self._is_stopping and self._settings.save_on_shutdown)
        ranges = self._choose_oldest() if spill else []
        if ranges:
            self._spill_end = ranges[-1].end
            self._record_attempts(ranges)
        else:
            self._is_spilling = False
        sync = self.durability is Durability.ALWAYS or is_due or self._is_stopping
        has_acks_to_record = ranges or self._is_stopping or self._has_stored()
        return WriteJob(
            ranges,
            sync=sync and self.durability is not Durability.NEVER,
            tidy=is_due or self._is_stopping or self._can_remove_segment(),
            before=self._record_pending_acks if has_acks_to_record else None,
            retire=self._can_end(),
        )

    def _surplus(self) -> tuple[int, int]:
        """Return how many events and bytes leave memory: down to the low watermark.

        More if the first publisher in line needs more room, and all if the queue is closed.
        """
        fill = self._host.admission
        if self._is_stopping:
            return fill.events, fill.bytes
        events, size = fill.needed_room
        return (
            fill.events - min(self._low_level.events, fill.max_events - events),
            fill.bytes - min(self._low_level.bytes, fill.max_bytes - size),
        )

    def _choose_oldest(self) -> list[BlockRange]:
        """Return the surplus, from the oldest events in memory on; batches in flight included."""
        surplus, surplus_bytes = self._surplus()
        chosen: list[BlockRange] = []
        size = 0
        for events in self._host.list_ranges_in_memory(self.store.log.end):
            if surplus <= 0 and surplus_bytes <= size:
                break
            if chosen and size + events.size > SPILL_BYTES:
                break
            by_bytes = -(-(surplus_bytes - size) * len(events) // max(1, events.size))
            wanted = max(surplus, by_bytes)
            if wanted < len(events) and self._can_cut(events):
                self._host.buffer.cut_at(events.first + wanted)
                chosen.append(events.cut_head(wanted))
            else:
                chosen.append(events)
            surplus -= len(chosen[-1])
            size += chosen[-1].size
        return chosen

    def _can_cut(self, events: BlockRange) -> bool:
        """Whether a part of a range can go to disk, so that the spill ends at the low watermark.

        Not if a consumer holds it, or if the sequence numbers of the part are not known.
        """
        is_numbered = bool(events.sequences) and not events.is_consecutive
        return events.first >= self._host.buffer.first and not is_numbered

    def _record_attempts(self, ranges: Sequence[BlockRange]) -> None:
        """Record how often ranges were handed out, so that a restart does not forget it."""
        again = [each for each in ranges if each.attempt > 1]
        if again:
            self._record_pending_acks()  # or events settled before them would seem missing
        for each in again:
            self.store.journal.record_returned(each.first, each.end, each.attempt)

    def _on_committed(self) -> None:
        """Events on disk take no room in memory any more."""
        self._host.release_memory(self.store.log.end)
        self._is_spilling = self._is_spilling and max(self._surplus()) > 0

    def _count_unwritten(self) -> int:
        if not self._settings.save_on_shutdown:
            return 0
        return sum(map(len, self._host.list_ranges_in_memory(self.store.log.end)))
