"""The ``disk`` kind: an append-only log under a tail in memory, with group commit.

Publishers put events into memory and go on; the writer writes what has gathered, syncs as
``durability`` says, and only then moves the ``persisted`` watermark. While it syncs, the next group
gathers, so the more publishers wait, the more of them share a sync. A consumer that keeps up is
served from the tail and never reads the disk.
"""

from __future__ import annotations

import math
import time
from collections import deque

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.queues.contract import AckLevel, Durability
from turnlane.queues.log.files import Disk
from turnlane.queues.log.unstamped import Numbered
from turnlane.queues.portion import Portion
from turnlane.queues.settings import QueueSettings
from turnlane.queues.stored import StoredQueue
from turnlane.queues.written import Job

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
        self.gate.charge(pending, self.store.unsettled_bytes() if pending else 0)
        self.start()

    def sealed(self, portion: Portion) -> None:
        # A copy: consumers cut pieces off the one in the tail.
        self._unwritten.append(portion.copy())
        for stamp in portion.stamps:
            numbered = Numbered(portion.first, portion.end, stamp, portion.consecutive)
            self.store.journal.unstamped.add(numbered)
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
        return self.store.log.unsynced or bool(self._unwritten or self.tail.open.values)

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
        self.store.journal.unstamped.forget_below(self.safe_end())
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
