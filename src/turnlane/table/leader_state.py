"""The state that the parts of a leader's term share: receivers' slots, counters, cached events.

An event waits in the window, or behind another event of its key; then it is in flight until it is
settled; then its ack waits until it is stored. Only the manager's thread uses this state. Other
threads read the counters, and wait for the futures that an :class:`AckBuffer` finishes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import attrgetter

from turnlane.clock import Clock
from turnlane.table.definition import Definition, TableOrdering
from turnlane.table.lease import LeaderLease
from turnlane.table.ordering import KeyOrder
from turnlane.table.receiver import ManagerHandle, Receiver, TableEvent
from turnlane.table.shards import KEYSPACE_SHIFT, WHOLE_KEYSPACE, KeyRange, keyspace_id
from turnlane.table.store import TableStore
from turnlane.table.window import MAX_FIRE_TIME, RangeBacklogs, Window

CHECK_AFTER = 1.0
"""Seconds after which the row of a sent event is marked as fired, or checked again. Most events
are acked before, and cost no mark at all."""

MAX_BUFFERED_ACKS = 1_000
"""This many acks are stored at once."""

FLUSH_DELAY = 0.05
"""Seconds for which an ack waits for others, unless a thread waits for it."""

LOCKED_RETRY = 0.25
"""Seconds until the next try to store an ack whose row another transaction has locked."""

_GET_FIRE_AT = attrgetter("fire_at")


@dataclass(slots=True, eq=False)
class ReceiverSlot:
    """A receiver, as its manager sends events to it."""

    capacity: int
    """The most events that it may have."""
    load: int = 0
    """How many events it has and did not settle."""
    key_range: KeyRange = WHOLE_KEYSPACE
    receiver: Receiver | None = None
    stalled_at: int | None = None
    """The receiver's number of ``take`` calls when its events waited for too long."""

    @property
    def room(self) -> int:
        """How many more events it takes; 0 while it does not ask for the events that it has."""
        if self.receiver is not None and self.receiver.take_calls == self.stalled_at:
            return 0
        return max(0, self.capacity - self.load)

    def stall(self) -> None:
        """Send no more events until the receiver asks for some: its events waited for too long."""
        if self.receiver is not None and not self.receiver.waiting_calls:
            self.stalled_at = self.receiver.take_calls


@dataclass(slots=True)
class LagTotal:
    """How late events were, in total: the time after they were due, by the database's clock."""

    events: int = 0
    seconds: float = 0.0

    def add(self, events: Sequence[TableEvent], now: int) -> None:
        """Add events that were sent or acked now."""
        self.events += len(events)
        self.seconds += (now * len(events) - sum(map(_GET_FIRE_AT, events))) / 1e9


@dataclass(slots=True)
class ManagerCounts:
    """The counters of a manager since it was created."""

    fired: int = 0
    acked: int = 0
    retried: int = 0
    """Events that fire again: nacked, or not acked in time."""
    dead: int = 0
    lost_leads: int = 0
    fire_lag: LagTotal = field(default_factory=LagTotal)
    """From due to fired."""
    ack_lag: LagTotal = field(default_factory=LagTotal)
    """From due to acked."""


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
        self._new_waiters: list[tuple[Future[None], object]] = []
        """Each with the slot whose acks it waits for; ``None``: for all."""
        self._waiters: list[tuple[Future[None], set[int]]] = []
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

    def add_waiter(self, waiter: Future[None], slot: object = None) -> None:
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
            waiter.set_exception(error)

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
                waiter.set_result(None)
        self._waiters = [(waiter, ids) for waiter, ids in waiters if ids]


def _split(acks: Mapping[int, TableEvent]) -> tuple[list[int], set[str]]:
    """Return the ids of acked events, and their groups."""
    return list(acks), {event.group for event in acks.values() if event.group is not None}


class LeaderState:
    """One shard's table during one term of a manager, and all its events in memory.

    Each event is in exactly one structure: the window, the events that wait behind a key, the
    events in flight, or the ack buffer. Other events are in the table only, and the backlogs say
    where. Used by the manager's thread only.
    """

    def __init__(
        self,
        store: TableStore,
        lease: LeaderLease,
        manager: ManagerHandle,
        counts: ManagerCounts,
        clock: Clock,
    ) -> None:
        assert lease.token is not None
        self.store = store
        self.lease = lease
        self.token = lease.token
        self.manager = manager
        """The manager, which takes the acks of its events."""
        self.counts = counts
        self.clock = clock
        self.settings = store.definition.settings
        timeout = self.settings.ack_timeout
        self.window = Window()
        self.in_flight = InFlightEvents(timeout, min(CHECK_AFTER, timeout / 3))
        self.ack_buffer = AckBuffer()
        self.key_order = self._make_key_order(store.definition)
        self.window_end_limit = MAX_FIRE_TIME
        """The last fire time for which the window has room."""
        self.backlogs = RangeBacklogs()
        self._shard_by = store.definition.shard_by

    def now(self) -> int:
        """Return the database's clock."""
        return self.lease.now()

    def get_window_end(self) -> int:
        """Return the end of the window by the database's clock; nearer while memory is full."""
        now = self.now()
        full_window = now + round(self.settings.window * 1e9)
        return max(now, min(full_window, self.window_end_limit))

    @property
    def waiting_behind_key(self) -> int:
        """How many events wait behind another event of their key."""
        return 0 if self.key_order is None else len(self.key_order)

    @property
    def waiting(self) -> int:
        """How many events wait in memory."""
        return len(self.window) + self.waiting_behind_key

    def is_cached(self, event_id: int) -> bool:
        """Whether an event is in memory."""
        return (
            event_id in self.in_flight
            or event_id in self.window
            or event_id in self.ack_buffer
            or (self.key_order is not None and event_id in self.key_order)
        )

    def release_keys(self, events: Iterable[TableEvent]) -> None:
        """Release the keys of settled events: the next event of each key may fire."""
        if self.key_order is None:
            return
        following = map(self.key_order.release, events)
        self.window.add([event for event in following if event is not None], self.now())

    def leave_in_table(self, events: Iterable[TableEvent]) -> None:
        """Record that events are in the table only: no receiver can take them now."""
        for event in events:
            behind: list[TableEvent] = []
            key_backlog = None
            if self.key_order is not None:
                behind, key_backlog = self.key_order.remove(event)
            for each in (event, *behind):
                self.backlogs.leave(self.find_range(each), each.fire_at, each.id)
            if key_backlog is not None:
                for key_range in self.backlogs.find_overlapping(key_backlog.key_range):
                    self.backlogs.leave(key_range, *key_backlog.first_position)

    def find_range(self, event: TableEvent) -> KeyRange:
        """Return the part of the key space in which an event's key lies."""
        return self.backlogs.find_range(self.get_keyspace_id(event))

    def get_keyspace_id(self, event: TableEvent) -> int:
        """Return the position of an event's key in the key space; SQLite does not compute it."""
        found = event.keyspace_id
        if found is not None:
            return found
        return keyspace_id(event.fire_at if self._shard_by is None else event[self._shard_by])

    def _make_key_order(self, definition: Definition) -> KeyOrder | None:
        # Half of the window: the other half is for events of keys that are not busy.
        max_waiting = definition.settings.window_events // 2
        match definition.settings.ordering:
            case TableOrdering.NONE:
                return None
            case TableOrdering.QUEUE:
                return KeyOrder(lambda _: None, lambda _: WHOLE_KEYSPACE, max_waiting)
            case TableOrdering.KEY:
                column = definition.shard_by
                assert column is not None, "the definition has been checked"

                def get_key(event: TableEvent) -> Hashable:
                    key: Hashable = event[column]
                    return key

                def get_key_range(event: TableEvent) -> KeyRange:
                    start = self.get_keyspace_id(event) + KEYSPACE_SHIFT
                    return KeyRange(start, start + 1)  # only this key

                return KeyOrder(get_key, get_key_range, max_waiting)
