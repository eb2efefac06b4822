"""The policies a publisher meets on its way in: sampling, shedding, flow control, a full queue.

Everything here runs under the queue's lock, except standing in line.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from turnlane.errors import QueueFull
from turnlane.ledger import Outcome
from turnlane.queues.admission import Calm, Gate, Level, PublishEntry, Waiter
from turnlane.queues.api import FlowControl, FullBehavior
from turnlane.queues.settings import QueueSettings

# ── patience ──
# How long a publisher waits, over all that it waits for in turn.


class Patience(NamedTuple):
    """So many seconds from its making on; ``None`` is for ever."""

    seconds: float | None
    until: float | None

    @classmethod
    def of(cls, seconds: float | None) -> Patience:
        """The patience that begins now."""
        return FOR_EVER if seconds is None else cls(seconds, time.monotonic() + seconds)

    @property
    def left(self) -> float | None:
        """The seconds that are left of it, 0 at least."""
        return None if self.until is None else max(0.0, self.until - time.monotonic())


FOR_EVER: Final = Patience(None, None)


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
        self._evict = evict
        self._drop = drop
        self._seen = 0
        self.full_waits = 0
        """Times a publisher found the queue full."""
        marks = settings.marks
        self._discard = self._level(marks.discard)
        self._delays = {
            FlowControl.NONE: None,
            FlowControl.LIGHT: self._level(marks.light_delay),
            FlowControl.FULL: self._level(marks.full_delay),
        }
        self._delayed: dict[FlowControl, deque[threading.Condition]]
        self._delayed = {flow: deque() for flow in FlowControl}
        """Who was slowed down and waits, first come first."""
        self._calms = {flow: self._make_calm(flow) for flow in FlowControl}

    @property
    def blocks(self) -> bool:
        """Whether publishers wait when the queue is full, rather than events being dropped."""
        return self._settings.full_behavior is FullBehavior.BLOCK

    def calm_for(self, flow: FlowControl) -> Calm:
        """Below which a publisher with this flow control needs no second look."""
        return self._calms[flow]

    def _make_calm(self, flow: FlowControl) -> Calm:
        if self._settings.sampling_interval > 1:
            return Calm(-1, -1)
        levels = (self._discard, self._delays[flow], self._level(self._settings.marks.high))
        return self._gate.calm([level for level in levels if level is not None])

    def _level(self, mark: int | None) -> Level | None:
        return None if mark is None else self._gate.level(mark)

    def screen(self, entry: PublishEntry, flow: FlowControl, patience: Patience) -> None:
        """Take out of the entry what sampling and load shedding drop; slow its publisher down.

        The entry keeps count of that until it is in the queue, or given up as a whole: one that is
        refused for want of room comes again.
        """
        interval = self._settings.sampling_interval
        if interval > 1:
            seen, self._seen = self._seen, self._seen + entry.events
            entry.screened[Outcome.SAMPLED] = entry.sample(seen, interval)
        severity, level = self._settings.discard_severity, self._discard
        if severity is not None and level is not None and self._gate.reaches(level):
            entry.screened[Outcome.SEVERITY] = entry.shed(severity)
        if entry.events:
            self._slow_down(flow, patience)

    def _slow_down(self, flow: FlowControl, patience: Patience) -> None:
        """Wait until the queue is below the mark, first come first served."""
        level, line, gate = self._delays[flow], self._delayed[flow], self._gate
        if level is None or not (line or gate.reaches(level)):
            return
        limits = [self._settings.light_delay] if flow is FlowControl.LIGHT else []
        limits += [] if patience.left is None else [patience.left]
        turn = threading.Condition(self._lock)
        line.append(turn)
        gate.delay(1)
        try:
            calm = turn.wait_for(
                lambda: gate.closed or (line[0] is turn and not gate.reaches(level)),
                min(limits, default=None),
            )
        finally:
            line.remove(turn)
            gate.delay(-1)
            self.calm()  # the next looks once this one is in the queue
        if not calm and flow is FlowControl.FULL:
            name = self._settings.name
            msg = f"queue {name!r} was above full_delay_mark for {patience.seconds:g} s"
            raise QueueFull(msg)

    def calm(self) -> None:
        """There is more room: the publishers that were slowed down first look again."""
        for line in self._delayed.values():
            for turn in line:
                turn.notify()
                if not self._gate.closed:
                    break

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

    def stand_in_line(self, waiter: Waiter, patience: Patience) -> None:
        """Wait to be let in. Not under the lock."""
        if not self.blocks and patience.seconds is None:
            patience = Patience.of(SPILL_SECONDS)
        if not waiter.wait(patience.left):
            with self._lock:
                if not waiter.woken:
                    self._gate.leave(waiter)
                    name = self._settings.name
                    msg = f"queue {name!r} had no room for {patience.seconds:g} s"
                    raise QueueFull(msg)
        if waiter.refused:
            self._gate.check_open(self._settings.name)
