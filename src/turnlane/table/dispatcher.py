"""The dispatcher: sends due events to receivers, within the queue's limits.

**Marks.** Most events are sent without a write: the row was read a moment ago under the lease, and
is deleted by the ack. A row gets the state ``fired`` first (it is *marked*) if it was read too long
ago, because a user may have changed it; if the event was fired before, because its former receiver
may ack it at any moment; or if the last leader died, because an event may have killed it and an
attempt that is not written down does not count.

**Fairness.** A receiver that is full delays no event of another receiver: its events return to the
window, and the dispatcher goes on with the next ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnlane.databases import Row
from turnlane.errors import DatabaseDown, DatabaseReadOnly
from turnlane.pacing import TokenBucket
from turnlane.table.leader_state import LeaderState, ReceiverSlot
from turnlane.table.receiver import EVENT_COLUMNS, TableEvent

MAX_UNMARKED_AGE = 1.0
"""Seconds for which a row counts as freshly read."""

BURSTS_PER_SECOND = 10
"""With ``max_qps``, at most this fraction of the events of a second is sent at once."""

FULL_RECEIVER_PAUSE = 0.02
"""Seconds until the next try when all receivers of the due events are full and others are not."""

MARK_RETRY = 50_000_000
"""Nanoseconds until the next try with an event that could not be marked."""


# ── who gets which event ─────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Assignment:
    """Which receiver gets which events."""

    sent: list[tuple[ReceiverSlot, list[TableEvent]]] = field(default_factory=list)
    without_room: list[TableEvent] = field(default_factory=list)
    """Events whose receivers are full."""
    without_receiver: list[TableEvent] = field(default_factory=list)
    """Events whose keys lie in no receiver's key range."""


def assign_events(
    events: Sequence[TableEvent],
    slots: Sequence[ReceiverSlot],
    get_keyspace_id: Callable[[TableEvent], int],
) -> Assignment:
    """Assign every event to the least busy receiver whose key range contains it. Pure."""
    result = Assignment()
    if all(slot.key_range.is_whole for slot in slots):
        # Every receiver takes every key: each gets one slice of the events.
        at = 0
        for slot, share in zip(slots, _compute_shares(len(events), slots), strict=True):
            if share:
                result.sent.append((slot, list(events[at : at + share])))
                at += share
        result.without_room = list(events[at:])
        return result
    # One by one: events of different keys have different receivers to choose from.
    sent: list[list[TableEvent]] = [[] for _ in slots]
    for event in events:
        keyspace_id = get_keyspace_id(event)
        covering = [at for at, slot in enumerate(slots) if slot.key_range.contains(keyspace_id)]
        free = [at for at in covering if len(sent[at]) < slots[at].room]
        if free:
            sent[min(free, key=lambda at: slots[at].load + len(sent[at]))].append(event)
        else:
            (result.without_room if covering else result.without_receiver).append(event)
    result.sent = [(slot, mine) for slot, mine in zip(slots, sent, strict=True) if mine]
    return result


def _compute_shares(count: int, slots: Sequence[ReceiverSlot]) -> list[int]:
    """Return how many events each slot gets, so that the loads become as equal as possible."""

    def get_share(slot: ReceiverSlot, level: int) -> int:
        return max(0, min(slot.room, level - slot.load))

    # The highest level to which all slots can be filled.
    low, high = 0, max((slot.load + slot.room for slot in slots), default=0)
    while low < high:
        level = (low + high + 1) // 2
        if sum(get_share(slot, level) for slot in slots) <= count:
            low = level
        else:
            high = level - 1
    shares = [get_share(slot, low) for slot in slots]
    rest = count - sum(shares)
    for at, slot in enumerate(slots):
        if rest and shares[at] < slot.room and slot.load + shares[at] <= low:
            shares[at] += 1
            rest -= 1
    return shares


# ── the dispatcher ───────────────────────────────────────────────────────────────────────────────


class EventDispatcher:
    """Sends events of the window to receivers. Owned by a leader's term."""

    def __init__(self, state: LeaderState) -> None:
        self._state = state
        rate = state.settings.max_qps
        burst = max(1.0, (rate or 0) / BURSTS_PER_SECOND)
        now = state.clock.monotonic()
        self._rate = None if rate is None else TokenBucket(rate, burst, now, tokens=burst)
        self.doubtful_until = 0
        """Events up to this id are marked before they are sent: one may have killed a leader."""
        self._not_before = float("-inf")

    def get_next_time(self, slots: Sequence[ReceiverSlot], now: float) -> float:
        """Return when to send again, in monotonic seconds."""
        if not self._state.lease.can_fire:
            return float("inf")
        database_now = self._state.now()
        if self._state.window.has_due(database_now) and self._get_room(slots) > 0:
            wait = 0.0 if self._rate is None else self._rate.seconds_until(1, now)
            return max(self._not_before, now + wait)
        due = self._state.window.get_next_time()
        return float("inf") if due is None else now + max(0, due - database_now) / 1e9

    def send_due(self, slots: Sequence[ReceiverSlot]) -> None:
        """Send the events that are due, as many as the limits allow."""
        state, window = self._state, self._state.window
        now = state.clock.monotonic()
        if now < self._not_before or not window.has_due(state.now()) or not self._confirm_lease():
            return
        fired_before = state.counts.fired
        without_room: list[TableEvent] = []
        try:
            while self._send_some(slots, now, without_room):
                pass
        finally:
            window.put_back(without_room)
        if without_room and state.counts.fired == fired_before:
            self._not_before = now + FULL_RECEIVER_PAUSE

    def _send_some(
        self, slots: Sequence[ReceiverSlot], now: float, without_room: list[TableEvent]
    ) -> bool:
        """Send the next due events; adds those without room to the list. Whether to go on."""
        state = self._state
        allowed = max(0, self._get_room(slots))
        if self._rate is not None:
            allowed = self._rate.take_available(allowed, now)
        due = state.window.take(allowed, state.now())
        if state.key_order is not None:
            due = state.key_order.admit(due)
        assignment = assign_events(due, slots, state.get_keyspace_id)
        without_room += assignment.without_room
        state.leave_in_table(assignment.without_receiver)
        sent = self._mark_and_send(assignment, now)
        if self._rate is not None:
            self._rate.give_back(allowed - sent)
        return bool(assignment.without_room) and state.lease.can_fire

    def send_new(self, rows: Sequence[Mapping[str, Any]], slots: Sequence[ReceiverSlot]) -> bool:
        """Insert events as fired and send them, without reading them from the table.

        False, and nothing is done, if that is not possible: events have to be due at once and to
        have the same columns, no other event may wait before them, and no receiver may have to be
        chosen by key.
        """
        columns = tuple(rows[0]) if rows else ()
        if any(tuple(row) != columns or "fire_at" in row or "after_group" in row for row in rows):
            return False
        state = self._state
        now = state.clock.monotonic()
        if (
            not state.lease.can_fire
            or state.key_order is not None
            or self._get_room(slots) < len(rows)
            or state.window.has_due(state.now())
            or not all(slot.key_range.is_whole for slot in slots)
        ):
            return False
        if self._rate is not None and self._rate.seconds_until(len(rows), now) > 0:
            return False
        values = [tuple(row.values()) for row in rows]
        ids = state.store.insert_fired(state.token, columns, values)
        # The events are stored. send_due() sends them in this step; if it fails, it tries again.
        state.window.add(self._make_events(columns, ids, values, now), state.now())
        return True

    def _make_events(
        self, columns: Sequence[str], ids: Sequence[int], rows: Sequence[Row], now: float
    ) -> list[TableEvent]:
        """Make events of inserted rows, as if they had been read."""
        names = (*EVENT_COLUMNS, *self._state.store.definition.column_names)
        defaults = {"fire_at": self._state.now(), "priority": 0, "attempts": 0}
        events = []
        for event_id, row in zip(ids, rows, strict=True):
            values = {**defaults, **dict(zip(columns, row, strict=True)), "event_id": event_id}
            event = TableEvent(tuple(map(values.get, names)), self._state.manager, now)
            event.is_marked = True
            events.append(event)
        return events

    def _get_room(self, slots: Sequence[ReceiverSlot]) -> int:
        """Return how many more events may be in flight, apart from the rate limit."""
        room = sum(slot.room for slot in slots)
        limit = self._state.settings.max_concurrency
        return room if limit is None else min(room, limit - len(self._state.in_flight))

    def _confirm_lease(self) -> bool:
        """Whether the lease is still ours after slow calls of the database; renews it if due."""
        lease = self._state.lease
        try:
            lease.renew_if_due(needs_write_proof=True)
        except (DatabaseDown, DatabaseReadOnly):
            lease.suspend()
        return lease.can_fire

    # ── sending ──────────────────────────────────────────────────────────────────────────────────

    def _mark_and_send(self, assignment: Assignment, now: float) -> int:
        """Mark the events that need it, then send; returns how many were sent."""
        state = self._state
        chosen = [event for _, events in assignment.sent for event in events]
        unmarkable = self._mark_where_needed(chosen, now)
        if not self._confirm_lease():
            state.window.put_back([event for event in chosen if event not in unmarkable])
            return 0
        sent = 0
        for slot, mine in assignment.sent:
            assert slot.receiver is not None
            events = [event for event in mine if event not in unmarkable] if unmarkable else mine
            for event in events:
                event.slot = slot
            state.in_flight.add(events, state.clock.monotonic())
            slot.load += len(events)
            state.counts.fired += len(events)
            state.counts.fire_lag.add(events, state.now())
            slot.receiver.offer(state.manager, events)
            sent += len(events)
        return sent

    def _mark_where_needed(self, events: list[TableEvent], now: float) -> set[TableEvent]:
        """Mark events that need a mark; returns the events that must not be sent."""
        stale = [
            event
            for event in events
            if event.read_at < now - MAX_UNMARKED_AGE
            or ((event.id <= self.doubtful_until or event.attempts) and not event.is_marked)
        ]
        if not stale:
            return set()
        store = self._state.store
        try:
            unmarked = [event.id for event in stale if not event.is_marked]
            open_ids = store.mark_fired(self._state.token, unmarked) if unmarked else set()
            marked = [event.id for event in stale if event.is_marked]
            open_ids |= store.find_open(marked)
            now = self._state.clock.monotonic()
            for event in stale:
                if event.id in open_ids:
                    event.is_marked, event.read_at = True, now
            unmarkable = {event for event in stale if event.id not in open_ids}
            if unmarkable:
                self._read_again(unmarkable)
        except BaseException:
            self._state.window.put_back(events)
            raise
        return unmarkable

    def _read_again(self, events: set[TableEvent]) -> None:
        """Read why events could not be marked: they are gone, moved, not quite due, or locked.

        The estimate of the database's clock may be a moment ahead for a single row.
        """
        state = self._state
        rows = state.store.read_ids(state.token, [event.id for event in events])
        found = {row[0] for row in rows}
        now, window_end = state.now(), state.get_window_end()
        state.release_keys([event for event in events if event.id not in found])
        again = [TableEvent(row, state.manager, 0.0) for row in rows if row[1] <= window_end]
        state.window.add(
            [event.copy_for_retry(max(event.fire_at, now + MARK_RETRY), 0) for event in again], now
        )
