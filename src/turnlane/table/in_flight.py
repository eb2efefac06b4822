"""Events after they were sent: in flight until they are settled, then acks until they are stored.

The manager's thread owns both structures. Only :class:`Completion` is shared with other threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping

from turnlane.table.event import TableEvent
from turnlane.table.store import TableStore

MAX_BUFFERED_ACKS = 1_000
"""This many acks are stored at once."""

FLUSH_DELAY = 0.05
"""Seconds for which an ack waits for others, unless a thread waits for it."""

LOCKED_RETRY = 0.25
"""Seconds until the next try to store an ack whose row another transaction has locked."""


class InFlightEvents:
    """Events that receivers have and did not settle, by id. Pure: times are monotonic.

    Events are remembered in batches, in the order in which they were sent, so that no search
    through all of them is needed to find the overdue ones. Most events are settled before the first
    check: until then only their ids are remembered, so a settled event leaves the memory at once.
    """

    def __init__(self, ack_timeout: float, check_after: float) -> None:
        self._timeout = ack_timeout
        self._check_after = check_after
        self._events: dict[int, TableEvent] = {}
        self._new: deque[tuple[float, list[int]]] = deque()
        """Batches that were not checked yet, with the times at which they were sent."""
        self._overdue: deque[tuple[float, list[TableEvent]]] = deque()
        """Checked batches, with the times at which they are overdue."""
        self._unchecked: deque[tuple[float, list[TableEvent]]] = deque()
        """Checked batches, with the times of their next checks."""

    def __len__(self) -> int:
        return len(self._events)

    def __contains__(self, event_id: int) -> bool:
        return event_id in self._events

    def __iter__(self) -> Iterator[TableEvent]:
        return iter(self._events.values())

    @property
    def ids(self) -> Container[int]:
        """The ids of all events in flight; a view."""
        return self._events.keys()

    def add(self, events: list[TableEvent], now: float) -> None:
        """Add events that are sent now."""
        for event in events:
            event.sent_at = now
            self._events[event.id] = event
        self._new.append((now, [event.id for event in events]))

    def get(self, event_id: int) -> TableEvent | None:
        """Return the event of this id, if it is in flight."""
        return self._events.get(event_id)

    def pop(self, event_id: int) -> TableEvent | None:
        """Remove an event that is settled or put back."""
        return self._events.pop(event_id, None)

    def find_overdue(self, now: float) -> list[TableEvent]:
        """Return events that were not settled in time, among those already checked.

        Returns them again after a while if they stay.
        """
        found = self._take_until(self._overdue, now)
        if found:
            self._overdue.append((now + self._check_after, found))
        return found

    def find_unchecked(self, now: float) -> list[TableEvent]:
        """Return events whose rows have to be checked: sent, or last checked, a while ago."""
        found = self._take_until(self._unchecked, now)
        while self._new and self._new[0][0] + self._check_after <= now:
            sent_at, ids = self._new.popleft()
            events = (self._events.get(each) for each in ids)
            # An event that was sent again has another time.
            current = [event for event in events if event is not None and event.sent_at == sent_at]
            if current:
                self._overdue.append((sent_at + self._timeout, current))
            found += current
        if found:
            self._unchecked.append((now + self._check_after, found))
        return found

    def get_next_time(self) -> float | None:
        """Return when an event becomes overdue or has to be checked."""
        times = [batches[0][0] for batches in (self._overdue, self._unchecked) if batches]
        if self._new:
            times.append(self._new[0][0] + self._check_after)
        return min(times, default=None)

    def _take_until(
        self, batches: deque[tuple[float, list[TableEvent]]], now: float
    ) -> list[TableEvent]:
        """Remove the batches of past times; returns their events that are still in flight."""
        taken: list[TableEvent] = []
        while batches and batches[0][0] <= now:
            # An event that was sent again is another object.
            taken += [
                event for event in batches.popleft()[1] if self._events.get(event.id) is event
            ]
        return taken


class Completion:
    """A result that the manager's thread reports to a thread that waits for it."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._error: Exception | None = None

    def finish(self, error: Exception | None = None) -> None:
        """Report success, or the error."""
        self._error = error
        self._finished.set()

    def wait(self, timeout: float | None) -> bool:
        """Wait; false if the time is over. Raises the reported error."""
        if not self._finished.wait(timeout):
            return False
        if self._error is not None:
            raise self._error
        return True


class AckBuffer:
    """Acks that are not stored yet, by event id. It keeps them while the database is away."""

    def __init__(self) -> None:
        self._acks: dict[int, TableEvent] = {}
        self._replaced: list[TableEvent] = []
        """Acked events that were sent and acked again before their first ack was stored."""
        self._unconfirmed: set[int] = set()
        """Ids of acks whose events this manager does not know to have been fired."""
        self._locked: dict[int, TableEvent] = {}
        """Acks of events whose rows another transaction has locked: they are tried again."""
        self._since: float | None = None
        """When the first ack that was not tried yet came."""
        self._retry_at: float | None = None
        self._new_waiters: list[tuple[Completion, object]] = []
        """Each with the slot whose acks it waits for; ``None``: for all."""
        self._waiters: list[tuple[Completion, set[int]]] = []
        """Each with the ids of acks that were tried and are not stored."""

    def __contains__(self, event_id: int) -> bool:
        return event_id in self._acks or event_id in self._unconfirmed or event_id in self._locked

    def __len__(self) -> int:
        return len(self._acks) + len(self._unconfirmed) + len(self._locked)

    @property
    def ids(self) -> Container[int]:
        """The ids of all events whose acks wait."""
        if not self._unconfirmed and not self._locked:
            return self._acks.keys()
        return self._acks.keys() | self._unconfirmed | self._locked.keys()

    def add(self, events: Iterable[TableEvent], now: float) -> None:
        """Add acks of events."""
        added = {event.id: event for event in events}
        if not self._acks.keys().isdisjoint(added):
            self._replaced += [self._acks[each] for each in added if each in self._acks]
        self._acks.update(added)
        if self._acks and self._since is None:
            self._since = now

    def add_unconfirmed(self, event_ids: Iterable[int], now: float) -> None:
        """Add acks of events that an earlier manager may have fired; the table knows."""
        self._unconfirmed.update(event_ids)
        if self._unconfirmed and self._since is None:
            self._since = now

    def add_waiter(self, waiter: Completion, slot: object = None) -> None:
        """Finish ``waiter`` when all present acks, of one slot or of all, are stored."""
        self._new_waiters.append((waiter, slot))

    def get_next_time(self) -> float | None:
        """Return when to store the acks, in monotonic seconds."""
        if self._new_waiters or len(self._acks) + len(self._unconfirmed) >= MAX_BUFFERED_ACKS:
            return float("-inf")
        flush_at = None if self._since is None else self._since + FLUSH_DELAY
        times = (time for time in (flush_at, self._retry_at) if time is not None)
        return min(times, default=None)

    def store(self, store: TableStore, token: int, now: float) -> tuple[int, list[int]]:
        """Store the acks; returns how many, and the ids that waited for a group now done.

        If it raises, it keeps all acks.
        """
        before = len(self)
        released: list[int] = []
        if self._retry_at is not None and self._retry_at <= now:
            result = store.store_acks(token, *_split(self._locked), likely_locked=True)
            self._retry_at = None
            self._locked = {each: self._locked[each] for each in result.locked}
            released += result.released
        if self._acks:
            result = store.store_acks(token, *_split(self._acks))
            self._locked.update({each: self._acks[each] for each in result.locked})
            self._acks.clear()
            self._replaced.clear()
            released += result.released
        if self._unconfirmed:
            result = store.store_late_acks(token, list(self._unconfirmed))
            self._unconfirmed = result.locked
            released += result.released
        self._plan_retry(now)
        self._finish_waiters()
        return before - len(self), released

    def discard(self, error: Exception) -> None:
        """Drop all acks, which cannot be stored, and report the error: their events fire again."""
        for event in (*self._acks.values(), *self._locked.values(), *self._replaced):
            event.ack_lost = True
        self._acks.clear()
        self._replaced.clear()
        self._unconfirmed.clear()
        self._locked.clear()
        self._plan_retry(0.0)
        waiters = [*self._new_waiters, *self._waiters]
        self._new_waiters, self._waiters = [], []
        for waiter, _ in waiters:
            waiter.finish(error)

    def _plan_retry(self, now: float) -> None:
        self._since = None
        if not self._locked and not self._unconfirmed:
            self._retry_at = None
        elif self._retry_at is None:
            self._retry_at = now + LOCKED_RETRY

    def _finish_waiters(self) -> None:
        """Finish the waiters whose acks are stored; unconfirmed acks concern every waiter."""
        for waiter, slot in self._new_waiters:
            locked = {each for each, event in self._locked.items() if slot in (None, event.slot)}
            self._waiters.append((waiter, locked | self._unconfirmed))
        self._new_waiters = []
        unstored = self._locked.keys() | self._unconfirmed
        waiters = [(waiter, ids & unstored) for waiter, ids in self._waiters]
        for waiter, ids in waiters:
            if not ids:
                waiter.finish()
        self._waiters = [(waiter, ids) for waiter, ids in waiters if ids]


def _split(acks: Mapping[int, TableEvent]) -> tuple[list[int], set[str]]:
    """Return the ids of acked events, and their groups."""
    return list(acks), {event.group for event in acks.values() if event.group is not None}
