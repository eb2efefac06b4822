"""Receivers: who gets the events of a queue table."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from turnlane.errors import LeadLost, QueueClosed
from turnlane.runtime import Closing
from turnlane.table.event import AckHandler, TableEvent
from turnlane.table.shards import WHOLE_KEYSPACE, KeyRange

# ── losses ──
# Losses: who was told that acks were lost. Each thread that waits for acks has to hear of it.


class LostAckCounter:
    """Which part of a count that only grows each thread knows."""

    def __init__(self, known: int = 0) -> None:
        self._known = known
        self._told = threading.local()

    def is_news(self, count: int) -> bool:
        """Whether the thread that calls was told of fewer; now it was told of so many."""
        told: int = getattr(self._told, "count", self._known)
        self._told.count = count
        return count > told


DEFAULT_PREFETCH = 1_000
"""Events that a receiver may have and not have settled."""

LOOK = 0.05
"""Seconds between looks at whether events that are held up may be given out."""


class ManagerHandle(Protocol):
    """A manager, as its receivers see it."""

    lost_acks: int
    """Acks that it took and will not store."""

    @property
    def fires(self) -> bool:
        """Whether its events may be given out."""

    def detach(self, receiver: Receiver) -> None:
        """Stop sending events to the receiver."""

    def flush(self, timeout: float | None = None, receiver: Receiver | None = None) -> bool:
        """Wait until all acks taken so far are stored, or those of one receiver."""


class Receiver(Closing):
    """Takes events from one manager, or from those of several shards. Safe to use from any thread.

    Iterate over it for one event at a time, or call :meth:`take` for several. An event counts as
    received when one of them returns it; what only waits here goes back when its time is over.
    """

    def __init__(
        self, key_range: KeyRange = WHOLE_KEYSPACE, prefetch: int = DEFAULT_PREFETCH
    ) -> None:
        if prefetch < 1:
            raise ValueError("prefetch must be at least 1")
        self.key_range = key_range
        self.prefetch = prefetch
        self._sources: list[ManagerHandle] = []
        self._gone: list[ManagerHandle] = []
        """Managers that are closed: what they did not store must not be taken for stored."""
        self._losses: dict[int, LostAckCounter] = {}
        """Of each manager: how many of its lost acks who was told of."""
        self._waiting: deque[tuple[ManagerHandle, TableEvent]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.asked = 0
        """How often events were asked for."""
        self.asks = 0
        """How many wait for events at this moment."""

    @property
    def closed(self) -> bool:
        """Whether it takes no more events."""
        return self._closed

    def take(self, most: int | None = None, timeout: float | None = None) -> list[TableEvent]:
        """Take up to ``most`` events, at least one; none if none came in time.

        Raises ``QueueClosed`` once the receiver is closed.
        """
        limit = self.prefetch if most is None else most
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self.asked += 1
            self.asks += 1
            try:
                return self._await(limit, until)
            finally:
                self.asks -= 1

    def _await(self, limit: int, until: float | None) -> list[TableEvent]:
        while True:
            if self._closed:
                raise QueueClosed("the receiver is closed")
            taken = self._pop(limit)
            left = None if until is None else until - time.monotonic()
            if taken or (left is not None and left <= 0):
                return taken
            # Held up events are not announced again: look now and then.
            held_up = LOOK if self._waiting else None
            waits = [each for each in (left, held_up) if each is not None]
            self._changed.wait(min(waits, default=None))

    def __iter__(self) -> Iterator[TableEvent]:
        """Events, one by one, until the receiver is closed."""
        while True:
            try:
                taken = self.take(1)
            except QueueClosed:
                return
            yield from taken

    def ack(self, events: Sequence[TableEvent]) -> None:
        """Settle several events at once; as :meth:`TableEvent.ack`."""
        by_home: dict[AckHandler, list[TableEvent]] = {}
        for event in events:
            by_home.setdefault(event.home, []).append(event)
        for home, mine in by_home.items():
            home.ack(mine)

    def flush(
        self, timeout: float | None = None, events: Iterable[TableEvent] | None = None
    ) -> bool:
        """Wait until the acks so far are stored, on every shard; false if the time is over.

        Raises ``LeadLost`` if a manager lost the lead before: the events fire again elsewhere. If
        ``events`` are given, only if acks of theirs were lost, as often as it is called; else each
        thread hears once of any loss, whoever acked. Threads that share their work give events.
        """
        sources = [*self._sources, *self._gone]
        stored = [source.flush(timeout, self) for source in sources]
        news = [source for source in sources if self._losses[id(source)].is_news(source.lost_acks)]
        if news if events is None else any(event.lost for event in events):
            raise LeadLost("acks were not stored: their events fire again elsewhere")
        return all(stored)

    def close(self) -> None:
        """Take no more events; those that were not settled fire elsewhere."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        for source in list(self._sources):
            source.detach(self)

    # ── for managers ─────────────────────────────────────────────────────────────────────────────

    def attached(self, source: ManagerHandle) -> None:
        """A manager will send events."""
        self._losses[id(source)] = LostAckCounter(source.lost_acks)
        self._sources.append(source)

    def left(self, source: ManagerHandle) -> None:
        """A manager will send no more; after the last one the receiver is closed."""
        with self._changed:
            if source in self._sources:
                self._sources.remove(source)
                self._gone.append(source)
            over = not self._sources
        if over:
            self.close()

    def offer(self, source: ManagerHandle, events: list[TableEvent]) -> None:
        """Take events in."""
        with self._changed:
            self._waiting.extend([(source, event) for event in events])
            self._changed.notify_all()

    def revoke(self, events: set[TableEvent]) -> set[TableEvent]:
        """Give back those of the events that nobody has received; returns them."""
        with self._changed:
            found = {event for _, event in self._waiting if event in events}
            if found:
                kept = [pair for pair in self._waiting if pair[1] not in found]
                self._waiting = deque(kept)
            return found

    def _pop(self, most: int) -> list[TableEvent]:
        """Events whose manager may fire them at this moment."""
        taken: list[TableEvent] = []
        fires: dict[int, bool] = {}
        held_up: list[tuple[ManagerHandle, TableEvent]] = []
        while self._waiting and len(taken) < most:
            source, event = self._waiting.popleft()
            if id(source) not in fires:
                fires[id(source)] = source.fires
            if fires[id(source)]:
                taken.append(event)
            else:
                held_up.append((source, event))
        self._waiting.extendleft(reversed(held_up))
        return taken
