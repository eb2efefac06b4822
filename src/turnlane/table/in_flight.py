"""Settling: acks that are taken and not stored yet."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping

from turnlane.table.event import TableEvent
from turnlane.table.store import TableStore

# ── flights ──
# Flights: events that were fired and are not settled.


class InFlightEvents:
    """Events in the hands of receivers, by id. Pure: times are passed in, monotonic.

    Fired events are remembered batch by batch, in the order of time, so that nobody has to look
    through all of them to find the late ones. Most are settled before the first look: until then
    only their ids are remembered, and they are gone from memory when they are settled.
    """

    def __init__(self, ack_timeout: float, look_after: float) -> None:
        self._timeout = ack_timeout
        self._look_after = look_after
        self._events: dict[int, TableEvent] = {}
        self._new: deque[tuple[float, list[int]]] = deque()
        """With the times at which they were fired."""
        self._late: deque[tuple[float, list[TableEvent]]] = deque()
        self._unseen: deque[tuple[float, list[TableEvent]]] = deque()

    def __len__(self) -> int:
        return len(self._events)

    def __contains__(self, event_id: int) -> bool:
        return event_id in self._events

    @property
    def ids(self) -> Container[int]:
        """Of all events that are out; a view."""
        return self._events.keys()

    def __iter__(self) -> Iterator[TableEvent]:
        return iter(self._events.values())

    def add(self, events: list[TableEvent], now: float) -> None:
        """Events that are given to a receiver now."""
        for event in events:
            event.fired = now
            self._events[event.id] = event
        self._new.append((now, [event.id for event in events]))

    def get(self, event_id: int) -> TableEvent | None:
        """The event of this id, if it is out."""
        return self._events.get(event_id)

    def pop(self, event_id: int) -> TableEvent | None:
        """Take an event out: it is settled, or fired again."""
        return self._events.pop(event_id, None)

    def late(self, now: float) -> list[TableEvent]:
        """Events whose time to be settled is over; again after a while, if they stay.

        Of those that :meth:`unseen` has named before.
        """
        found = self._over(self._late, now)
        if found:
            self._late.append((now + self._look_after, found))
        return found

    def unseen(self, now: float) -> list[TableEvent]:
        """Events whose rows should be looked at: out for a while, or for another while."""
        found = self._over(self._unseen, now)
        while self._new and self._new[0][0] + self._look_after <= now:
            fired, ids = self._new.popleft()
            # One that was fired again has another time.
            known = [event for each in ids if (event := self._events.get(each)) is not None]
            out = [event for event in known if event.fired == fired]
            if out:
                self._late.append((fired + self._timeout, out))
            found += out
        if found:
            self._unseen.append((now + self._look_after, found))
        return found

    def next_time(self) -> float | None:
        """When :meth:`late` or :meth:`unseen` will have something to say."""
        times = [line[0][0] for line in (self._late, self._unseen) if line]
        if self._new:
            times.append(self._new[0][0] + self._look_after)
        return min(times, default=None)

    def _over(self, line: deque[tuple[float, list[TableEvent]]], now: float) -> list[TableEvent]:
        over: list[TableEvent] = []
        while line and line[0][0] <= now:
            over += self._still_out(line.popleft()[1])
        return over

    def _still_out(self, events: Iterable[TableEvent]) -> list[TableEvent]:
        """An event that was fired again is another object."""
        return [event for event in events if self._events.get(event.id) is event]


MAX_BUFFERED_ACKS = 1_000
"""As many acks do not wait for more."""

FLUSH_DELAY = 0.05
"""Seconds for which an ack waits for others, unless somebody waits for it."""

LOCKED_RETRY = 0.25
"""Seconds until another try with an ack whose row somebody else is about to change."""


class Completion:
    """Somebody who waits until all acks before him are stored."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self._error: Exception | None = None

    def tell(self, error: Exception | None = None) -> None:
        """They are stored, or never will be."""
        self._error = error
        self._told.set()

    def wait(self, timeout: float | None) -> bool:
        """Wait; false if the time is over. Raises what :meth:`tell` was given."""
        if not self._told.wait(timeout):
            return False
        if self._error is not None:
            raise self._error
        return True


class AckBuffer:
    """Acks by event id. Kept until the database has them, however long it is away."""

    def __init__(self) -> None:
        self._acks: dict[int, TableEvent] = {}
        self._twins: list[TableEvent] = []
        """Events that were fired and acked again before their first acks were stored."""
        self._doubtful: set[int] = set()
        """Acks of events that nobody here remembers to have fired."""
        self._held: dict[int, TableEvent] = {}
        """Acks of events whose rows somebody else is about to change: they are tried again."""
        self._since: float | None = None
        self._again: float | None = None
        self._waiters: list[tuple[Completion, object]] = []
        """Each with the seat whose acks he waits for; nothing: for all."""
        self._patient: list[tuple[Completion, set[int]]] = []
        """Those who wait for acks that are held."""

    def __contains__(self, event_id: int) -> bool:
        return event_id in self._acks or event_id in self._doubtful or event_id in self._held

    def __len__(self) -> int:
        return len(self._acks) + len(self._doubtful) + len(self._held)

    @property
    def ids(self) -> Container[int]:
        """Of all events whose acks wait."""
        if not self._doubtful and not self._held:
            return self._acks.keys()
        return self._acks.keys() | self._doubtful | self._held.keys()

    def ack(self, events: Iterable[TableEvent], now: float) -> None:
        """Take the acks of events."""
        taken = {event.id: event for event in events}
        if not self._acks.keys().isdisjoint(taken):
            self._twins += [self._acks[each] for each in taken if each in self._acks]
        self._acks.update(taken)
        if self._acks and self._since is None:
            self._since = now

    def ack_unknown(self, event_ids: Iterable[int], now: float) -> None:
        """Take acks of events that may have been fired by an earlier manager, or never."""
        self._doubtful.update(event_ids)
        if self._doubtful and self._since is None:
            self._since = now

    def wait(self, waiter: Completion, seat: object = None) -> None:
        """Tell ``waiter`` when everything taken so far is stored, of one seat or of all."""
        self._waiters.append((waiter, seat))

    def next_time(self) -> float | None:
        """When to store what there is; monotonic."""
        if self._waiters or len(self._acks) + len(self._doubtful) >= MAX_BUFFERED_ACKS:
            return float("-inf")
        fresh = None if self._since is None else self._since + FLUSH_DELAY
        return min((when for when in (fresh, self._again) if when is not None), default=None)

    def store(self, store: TableStore, token: int, now: float) -> tuple[int, list[int]]:
        """Store the acks; how many, and what waited for a group that is done by that.

        Whatever it raises, they are kept.
        """
        before = len(self)
        released: list[int] = []
        if self._again is not None and self._again <= now:
            stored = store.ack(token, *_named(self._held), wary=True)
            self._again = None
            self._held = {each: self._held[each] for each in stored.held}
            released += stored.released
        if self._acks:
            stored = store.ack(token, *_named(self._acks))
            self._held.update({each: self._acks[each] for each in stored.held})
            self._acks.clear()
            self._twins.clear()
            released += stored.released
        if self._doubtful:
            stored = store.late_ack(token, list(self._doubtful))
            self._doubtful = stored.held
            released += stored.released
        self._plan(now)
        self._tell_who_can_go()
        return before - len(self), released

    def abandon(self, error: Exception) -> None:
        """The acks will not be stored: their events fire again elsewhere."""
        for event in (*self._acks.values(), *self._held.values(), *self._twins):
            event.lost = True
        self._acks.clear()
        self._twins.clear()
        self._doubtful.clear()
        self._held.clear()
        self._plan(0.0)
        waiters = [*self._waiters, *self._patient]
        self._waiters, self._patient = [], []
        for waiter, _ in waiters:
            waiter.tell(error)

    def _plan(self, now: float) -> None:
        self._since = None
        if not self._held and not self._doubtful:
            self._again = None
        elif self._again is None:
            self._again = now + LOCKED_RETRY

    def _tell_who_can_go(self) -> None:
        """Others wait on for what is held of theirs; what is doubtful is everybody's."""
        for waiter, seat in self._waiters:
            held = {each for each, event in self._held.items() if seat in (None, event.seat)}
            self._patient.append((waiter, held | self._doubtful))
        self._waiters = []
        left = self._held.keys() | self._doubtful
        self._patient = [(waiter, ids & left) for waiter, ids in self._patient]
        for waiter, ids in self._patient:
            if not ids:
                waiter.tell()
        self._patient = [(waiter, ids) for waiter, ids in self._patient if ids]


def _named(acks: Mapping[int, TableEvent]) -> tuple[list[int], set[str]]:
    """The ids of events, and their groups."""
    return list(acks), {event.group for event in acks.values() if event.group is not None}
