"""Settlement: how events in flight end. They are acked, nacked, overdue, or given back.

An event leaves the memory of this module only together with its row: acks are stored first, and a
retry is written into the table before the event can be sent again. An event whose row another
transaction has locked stays in flight until the row is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from turnlane.databases import Row
from turnlane.errors import TurnlaneError
from turnlane.pacing import Backoff
from turnlane.table.definition import MAX_RETRY_SECONDS, TableSettings
from turnlane.table.fetcher import RowFinder
from turnlane.table.leader_state import LeaderState, ReceiverSlot
from turnlane.table.queue_sql import RetryDecision
from turnlane.table.receiver import TableEvent

JITTER = 0.25
"""A quarter to either side, so that events that failed together do not come back together."""

MAX_ERROR_CHARACTERS: Final = 4_000
"""Characters of an error that are stored."""

LATE_ERROR = "not acked in time"

RETRY_MARGIN = 5_000_000
"""Nanoseconds added to the time of a retry in memory, so that it is also due in the table."""


class RetryPolicy:
    """Decides about events that were sent and not acked. Pure, apart from ``chance``."""

    def __init__(self, settings: TableSettings, chance: Callable[[], float]) -> None:
        self._max_attempts = settings.max_attempts
        self._backoff = Backoff.from_jitter(settings.backoff, settings.max_backoff, JITTER)
        self._chance = chance

    def decide(
        self, event_id: int, attempts: int, delay: float | None, error: str, *, is_counted: bool
    ) -> RetryDecision:
        """Fire it again after ``delay`` or its backoff; a dead letter after ``max_attempts``.

        ``is_counted`` says whether its row counts the last attempt.
        """
        text = _make_storable(error)
        uncounted = int(not is_counted)
        if attempts >= self._max_attempts:
            return RetryDecision(event_id, "dead", 0, uncounted, text)
        if delay is None:
            delay = self._backoff.get_wait(attempts, self._chance())
        # max() comes first: it turns NaN into 0.
        wait = min(MAX_RETRY_SECONDS, max(0.0, delay))
        return RetryDecision(event_id, "to_be_fired", round(wait * 1e9), uncounted, text)


def _make_storable(error: str) -> str:
    """Return a receiver's error in a form that every database accepts."""
    return error[:MAX_ERROR_CHARACTERS].replace("\0", "").encode(errors="replace").decode()


class Settlement:
    """Settles events and retries them. Owned by a leader's term."""

    def __init__(self, state: LeaderState, chance: Callable[[], float], finder: RowFinder) -> None:
        self._state = state
        self._policy = RetryPolicy(state.settings, chance)
        self._finder = finder

    # ── requests of receivers ────────────────────────────────────────────────────────────────────

    def ack(self, events: Sequence[TableEvent]) -> None:
        """Take acks of events that were received, in this term or before."""
        settled, sent_again = [], []
        for event in events:
            current = self._remove_from_flight(event.id)
            if current is None:
                # It is not in flight any more, but it was: a receiver has the event itself.
                self._discard(event)
            else:
                settled.append(current)
                if current is not event:
                    sent_again.append(current)
        self._state.ack_buffer.add(events, self._state.clock.monotonic())
        self._state.release_keys(settled)
        self._state.counts.ack_lag.add(settled, self._state.now())
        self._revoke(sent_again)

    def ack_ids(self, ids: Sequence[int]) -> None:
        """Take acks by id; acks of events that were never fired change nothing."""
        settled = [event for event in map(self._remove_from_flight, ids) if event is not None]
        self._state.ack_buffer.add(settled, self._state.clock.monotonic())
        self._state.release_keys(settled)
        self._revoke(settled)
        known = {event.id for event in settled}
        unknown = [each for each in ids if each not in known and self._may_have_fired(each)]
        if unknown:
            self._state.ack_buffer.add_unconfirmed(unknown, self._state.clock.monotonic())

    def nack(self, events: Sequence[TableEvent], delay: float | None, error: str | None) -> None:
        """Retry the events that are in flight; ignore the others."""
        in_flight = [event for event in events if self._state.in_flight.get(event.id) is event]
        self._retry(in_flight, delay, error or "nacked")

    def release_slot(self, slot: ReceiverSlot) -> None:
        """Take the events of a receiver that is gone: retry the received, give back the others."""
        events = [event for event in self._state.in_flight if event.slot is slot]
        self._return_events(events, 0.0, "the receiver went away")

    # ── periodic work ────────────────────────────────────────────────────────────────────────────

    def store_due_acks(self, now: float) -> None:
        """Store the buffered acks, if it is time to."""
        due = self._state.ack_buffer.get_next_time()
        if due is not None and due <= now:
            self._store_acks()

    def check_in_flight(self, now: float) -> None:
        """Retry overdue events, and check the rows of events that are in flight for a while."""
        overdue = self._state.in_flight.find_overdue(now)
        if overdue:
            self._return_events(overdue, None, LATE_ERROR, stall=True)
        unchecked = self._state.in_flight.find_unchecked(now)
        if unchecked:
            self._check_rows(unchecked)

    def get_next_time(self) -> float:
        """Return when there are acks to store or events to check, in monotonic seconds."""
        times = (self._state.ack_buffer.get_next_time(), self._state.in_flight.get_next_time())
        return min((time for time in times if time is not None), default=float("inf"))

    def retry_forgotten(self, rows: Sequence[Row]) -> None:
        """Retry events that an earlier manager fired; rows of id and attempts."""
        decisions = [
            self._policy.decide(row[0], row[1], None, LATE_ERROR, is_counted=True) for row in rows
        ]
        self._state.store.apply_decisions(self._state.token, decisions)
        self._finder.sweep_soon()

    # ── the end of a term ────────────────────────────────────────────────────────────────────────

    def finish(self) -> None:
        """Store the acks and put the events in flight back, before the lease is released."""
        self._store_acks()
        self._return_events(list(self._state.in_flight), None, "the manager closed")

    def abandon(self, error: TurnlaneError) -> None:
        """Revoke events and discard acks: the lease is lost, and nothing can be written."""
        self._revoke(list(self._state.in_flight))
        self._state.ack_buffer.discard(error)

    # ── helpers ──────────────────────────────────────────────────────────────────────────────────

    def _store_acks(self) -> None:
        state = self._state
        now = state.clock.monotonic()
        stored, released = state.ack_buffer.store(state.store, state.token, now)
        state.counts.acked += stored
        self._finder.request(released)

    def _remove_from_flight(self, event_id: int) -> TableEvent | None:
        event = self._state.in_flight.pop(event_id)
        if event is not None and isinstance(event.slot, ReceiverSlot):
            event.slot.load -= 1
        return event

    def _discard(self, event: TableEvent) -> None:
        """Cancel the retry of an event that waits for it, in memory or in the table."""
        self._state.window.discard(event.id)
        self._state.release_keys([event])

    def _may_have_fired(self, event_id: int) -> bool:
        """Whether an event that is not in flight may have been; the table knows for certain."""
        waiting = self._state.window.get(event_id)
        if waiting is None:
            return True
        if waiting.attempts:
            self._discard(waiting)
        return waiting.attempts > 0

    def _check_rows(self, events: list[TableEvent]) -> None:
        """Mark the rows of events in flight, and find events that a user acked by plain SQL."""
        store = self._state.store
        unmarked = [event.id for event in events if not event.is_marked]
        marked = store.mark_fired(self._state.token, unmarked) if unmarked else set()
        others = [event.id for event in events if event.id not in marked]
        open_ids = marked | (store.find_open(others) if others else set())
        settled = [event for event in events if event.id not in open_ids]
        for event in events:
            event.is_marked = event.is_marked or event.id in marked
        for event in settled:
            self._remove_from_flight(event.id)
        self._revoke(settled)
        self._state.release_keys(settled)
        self._state.counts.acked += len(settled)

    def _return_events(
        self, events: list[TableEvent], delay: float | None, error: str, *, stall: bool = False
    ) -> None:
        """Give back the events that no thread took, and retry the others."""
        not_taken = self._revoke(events)
        for event in not_taken if stall else ():
            if isinstance(event.slot, ReceiverSlot):
                event.slot.stall()
        self._give_back(not_taken)
        self._retry([event for event in events if event not in not_taken], delay, error)

    def _give_back(self, events: set[TableEvent]) -> None:
        """Put events that no thread took back into the window: this was not an attempt."""
        marked = {event.id for event in events if event.is_marked}
        token = self._state.token
        unmarked = self._state.store.unmark_fired(token, list(marked)) if marked else set()
        locked = self._find_locked(marked - unmarked)
        now = self._state.now()
        for event in events:
            if event.id in locked:
                continue
            self._remove_from_flight(event.id)
            if event.is_marked and event.id not in unmarked:
                self._state.release_keys([event])
            else:
                self._state.window.add([event.copy_for_retry(event.fire_at, 0)], now)

    def _retry(self, events: list[TableEvent], delay: float | None, error: str) -> None:
        """Put events back into the table, to fire again or as dead letters."""
        if not events:
            return
        state = self._state
        decisions = {
            event.id: self._policy.decide(
                event.id, event.attempts + 1, delay, error, is_counted=event.is_marked
            )
            for event in events
        }
        open_ids = state.store.apply_decisions(state.token, list(decisions.values()))
        locked = self._find_locked(set(decisions) - open_ids)
        now, window_end = state.now(), state.get_window_end()
        for event in events:
            if event.id in locked:
                continue
            self._remove_from_flight(event.id)
            decision = decisions[event.id]
            if event.id not in open_ids or decision.state == "dead":
                state.counts.dead += event.id in open_ids
                state.release_keys([event])
                continue
            state.counts.retried += 1
            again = event.copy_for_retry(now + decision.delay + RETRY_MARGIN, 1)
            if again.fire_at <= window_end:
                state.window.add([again], now)

    def _find_locked(self, ids: set[int]) -> set[int]:
        """Return the open events among ids that could not be changed: their rows are locked."""
        return self._state.store.find_open(list(ids)) if ids else set()

    def _revoke(self, events: Iterable[TableEvent]) -> set[TableEvent]:
        """Take back from receivers the events that no thread has taken; returns these."""
        by_slot: dict[ReceiverSlot, set[TableEvent]] = {}
        for event in events:
            if isinstance(event.slot, ReceiverSlot):
                by_slot.setdefault(event.slot, set()).add(event)
        revoked: set[TableEvent] = set()
        for slot, mine in by_slot.items():
            assert slot.receiver is not None
            revoked |= slot.receiver.revoke(mine)
        return revoked
