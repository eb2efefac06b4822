"""The state that the parts of a leader's term share: receivers' slots, counters, cached events.

Only the manager's thread uses it; other threads read the counters.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from turnlane.clock import Clock
from turnlane.databases import Row
from turnlane.table.definition import Definition, TableOrdering, TableSettings
from turnlane.table.event import TableEvent
from turnlane.table.in_flight import AckBuffer, InFlightEvents
from turnlane.table.lease import LeaderLease
from turnlane.table.ordering import KeyOrder
from turnlane.table.receiver import ManagerHandle, Receiver
from turnlane.table.shards import KEYSPACE_SHIFT, WHOLE_KEYSPACE, KeyRange, keyspace_id
from turnlane.table.store import Position, TableStore
from turnlane.table.window import MAX_FIRE_TIME, RangeBacklogs, Window

CHECK_AFTER = 1.0
"""Seconds after which the row of a sent event is marked as fired, or checked again. Most events
are acked before, and cost no mark at all."""

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


class EventCache:
    """All events in a manager's memory, each in exactly one of its structures.

    An event waits in the window, or behind another event of its key; it is in flight; or its ack
    waits to be stored. Other events are in the table only, and the backlogs say where.
    """

    def __init__(self, definition: Definition) -> None:
        timeout = definition.settings.ack_timeout
        self.window = Window()
        self.in_flight = InFlightEvents(timeout, min(CHECK_AFTER, timeout / 3))
        self.ack_buffer = AckBuffer()
        self.key_order = self._make_order(definition)
        self.window_end_limit = MAX_FIRE_TIME
        """The last fire time for which the window has room."""
        self.backlogs = RangeBacklogs()
        self._shard_by = definition.shard_by

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

    def filter_not_cached(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return the rows whose events are not in memory."""
        if self.key_order is not None:
            return [row for row in rows if not self.is_cached(row[0])]
        in_flight, window, acks = self.in_flight.ids, self.window.ids, self.ack_buffer.ids
        return [
            row for row in rows if not (row[0] in in_flight or row[0] in window or row[0] in acks)
        ]

    def release_keys(self, events: Iterable[TableEvent], now: int) -> None:
        """Release the keys of settled events: the next event of each key may fire."""
        if self.key_order is None:
            return
        following = map(self.key_order.release, events)
        self.window.add([event for event in following if event is not None], now)

    def release_keys_of_ids(self, ids: Container[int], now: int) -> None:
        """Release the keys of settled events that are not in memory."""
        if self.key_order is not None:
            self.window.add(self.key_order.release_ids(ids), now)

    def find_busy_not_cached(self) -> list[int]:
        """Return events that make keys busy and are not in memory: their retries are far off."""
        busy = () if self.key_order is None else self.key_order.busy_ids
        return [event_id for event_id in busy if not self.is_cached(event_id)]

    def find_skippable_ranges(self, position: Position) -> Sequence[KeyRange]:
        """Return ranges in which no event due after a position would be kept in memory."""
        if self.key_order is None:
            return ()
        return self.key_order.find_skippable_ranges(position, self.is_cached)

    def leave_in_table(self, events: Iterable[TableEvent]) -> None:
        """Record that events are in the table only: no receiver can take them now."""
        for event in events:
            behind, key_backlog = (
                ([], None) if self.key_order is None else self.key_order.remove(event)
            )
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

    def _make_order(self, definition: Definition) -> KeyOrder | None:
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

                return KeyOrder(get_key, self._get_key_range, max_waiting)

    def _get_key_range(self, event: TableEvent) -> KeyRange:
        """Return the range that contains only the event's key."""
        start = self.get_keyspace_id(event) + KEYSPACE_SHIFT
        return KeyRange(start, start + 1)


@dataclass(frozen=True, slots=True)
class LeaderState:
    """One shard's table during one term of a manager. Used by the manager's thread only."""

    store: TableStore
    lease: LeaderLease
    token: int
    manager: ManagerHandle
    """The manager, which takes the acks of its events."""
    counts: ManagerCounts
    clock: Clock
    cache: EventCache

    @property
    def settings(self) -> TableSettings:
        """The queue's options."""
        return self.store.definition.settings

    def now(self) -> int:
        """Return the database's clock."""
        return self.lease.now()

    def get_window_end(self) -> int:
        """Return the end of the window by the database's clock; nearer while memory is full."""
        now = self.now()
        full_window = now + round(self.settings.window * 1e9)
        return max(now, min(full_window, self.cache.window_end_limit))
