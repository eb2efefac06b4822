"""The policies a publisher meets on its way in: sampling, shedding, flow control, a full queue.

Everything here runs under the queue's lock, except standing in line.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from turnlane.errors import QueueFull
from turnlane.queues.admission import Gate, Waiter
from turnlane.queues.contract import FlowControl, FullBehavior, Outcome
from turnlane.queues.entries import PublishEntry
from turnlane.queues.settings import QueueSettings

SPILL_SECONDS = 1.0
"""How long a queue that drops when full waits for the disk to take what memory cannot."""


class Door:
    """Applies a queue's settings to what wants in.

    ``evict(events)`` settles that many of the oldest unread events and says whether there were
    any; ``drop(outcome, events)`` counts events that were turned away.
    """

    def __init__(
        self,
        settings: QueueSettings,
        gate: Gate,
        lock: threading.Lock,
        evict: Callable[[int], bool],
        drop: Callable[[Outcome, int], None],
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._lock = lock
        self._calmer = threading.Condition(lock)
        self._evict = evict
        self._drop = drop
        self._seen = 0
        self.full_waits = 0
        """Times a publisher found the queue full."""

    @property
    def blocks(self) -> bool:
        """Whether publishers wait when the queue is full, rather than events being dropped."""
        return self._settings.full_behavior is FullBehavior.BLOCK

    def calm_depth(self, flow: FlowControl) -> int:
        """The depth below which a publisher with this flow control needs no second look."""
        if self._settings.sampling_interval > 1:
            return -1
        marks = self._settings.marks
        bounds = (self._gate.size, marks.discard, marks.high, self._mark(flow))
        return min(bound for bound in bounds if bound is not None)

    def _mark(self, flow: FlowControl) -> int | None:
        if flow is FlowControl.NONE:
            return None
        marks = self._settings.marks
        return marks.light_delay if flow is FlowControl.LIGHT else marks.full_delay

    def screen(self, entry: PublishEntry, flow: FlowControl, timeout: float | None) -> None:
        """Take out of the entry what sampling and load shedding drop; slow its publisher down.

        The entry keeps count of that until it is in the queue, or given up as a whole: one that is
        refused for want of room comes again.
        """
        interval = self._settings.sampling_interval
        if interval > 1:
            seen, self._seen = self._seen, self._seen + entry.events
            entry.screened[Outcome.SAMPLED] = entry.sample(seen, interval)
        severity, mark = self._settings.discard_severity, self._settings.marks.discard
        if severity is not None and mark is not None and self._gate.depth >= mark:
            entry.screened[Outcome.SEVERITY] = entry.shed(severity)
        if entry.events:
            self._slow_down(flow, self._settings.full_timeout if timeout is None else timeout)

    def _slow_down(self, flow: FlowControl, timeout: float | None) -> None:
        mark = self._mark(flow)
        if mark is None:
            return
        light = self._settings.light_delay if flow is FlowControl.LIGHT else None
        limit = min((each for each in (light, timeout) if each is not None), default=None)
        calm = self._calmer.wait_for(lambda: self._gate.depth < mark or self._gate.closed, limit)
        if not calm and flow is FlowControl.FULL:
            msg = f"queue {self._settings.name!r} was above full_delay_mark for {limit:g} s"
            raise QueueFull(msg)

    def calm(self) -> None:
        """There is more room: publishers that were slowed down look again."""
        self._calmer.notify_all()

    def make_room(self, entry: PublishEntry) -> bool:
        """Apply a dropping policy to a full queue; false if the entry may not come in."""
        if self._settings.full_behavior is FullBehavior.DROP_OLDEST:
            self._evict_for(entry)
        if not self._gate.fits(entry.events, entry.size):
            self._drop(Outcome.NEWEST, entry.keep(self._gate.room))
        if not self._gate.fits(entry.events, entry.size):
            self._drop(Outcome.NEWEST, entry.keep(0))
        return entry.events > 0

    def _evict_for(self, entry: PublishEntry) -> None:
        # Nothing is gained by evicting while everybody is kept out: that is not for lack of room.
        while not self._gate.held and not self._gate.has_room(entry.events, entry.size):
            if not self._evict(self._surplus(entry)):
                return

    def _surplus(self, entry: PublishEntry) -> int:
        """How many events have to go, judged by the average size."""
        gate = self._gate
        excess = gate.bytes + entry.size - gate.max_bytes
        by_bytes = -(-excess * gate.depth // max(1, gate.bytes))
        return max(1, gate.depth + entry.events - gate.size, by_bytes)

    def stand_in_line(self, waiter: Waiter, timeout: float | None) -> None:
        """Wait to be let in. Not under the lock."""
        patience = self._settings.full_timeout if self.blocks else SPILL_SECONDS
        limit = patience if timeout is None else timeout
        if not waiter.wait(limit):
            with self._lock:
                if not waiter.woken:
                    self._gate.leave(waiter)
                    msg = f"queue {self._settings.name!r} had no room for {limit:g} s"
                    raise QueueFull(msg)
        if waiter.refused:
            self._gate.check_open(self._settings.name)
