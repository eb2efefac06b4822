"""Landing: how events that were fired come down: acked, nacked, late, or given back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from turnlane.errors import TurnlaneError
from turnlane.retry import Backoff
from turnlane.table.definition import MAX_RETRY_SECONDS, TableSettings
from turnlane.table.event import TableEvent
from turnlane.table.fetcher import RowFinder
from turnlane.table.leader_state import LeaderState, ReceiverSlot2
from turnlane.table.sql.dialect import Row, Verdict

# ── backoff ──
# When an event that was not acked fires again.

JITTER = 0.25
"""A quarter to either side, so that what failed together does not come back together."""


# ── verdicts ──
# What becomes of an event that was fired and not acked. Pure.

MAX_ERROR_CHARACTERS: Final = 4_000
"""Characters of an error that are kept."""


class RetryPolicy:
    """Decides by a queue's options; ``chance`` gives numbers from 0 up to 1."""

    def __init__(self, settings: TableSettings, chance: Callable[[], float]) -> None:
        self._settings = settings
        self._backoff = Backoff.from_jitter(settings.backoff, settings.max_backoff, JITTER)
        self._chance = chance

    def of(
        self, event_id: int, attempts: int, delay: float | None, error: str, *, more: bool
    ) -> Verdict:
        """Fire it again after ``delay`` seconds or its backoff, unless it had its attempts.

        ``more`` says that the last attempt is not counted in its row yet.
        """
        settings = self._settings
        text = _storable(error)
        if attempts >= settings.max_attempts:
            return Verdict(event_id, "dead", 0, int(more), text)
        if delay is None:
            delay = self._backoff.get_wait(attempts, self._chance())
        # In this order, what is no number is nothing.
        wait = min(MAX_RETRY_SECONDS, max(0.0, delay))
        return Verdict(event_id, "to_be_fired", round(wait * 1e9), int(more), text)


def _storable(error: str) -> str:
    """What a receiver said, as every database takes it: one text must not stop a whole batch."""
    return error[:MAX_ERROR_CHARACTERS].replace("\0", "").encode(errors="replace").decode()


LATE_ERROR = "not acked in time"

RETRY_MARGIN = 5_000_000
"""Nanoseconds added to the time of a retry here, so that it is due in the table as well."""


class Settlement:
    """Settles events and retries them. Called by a reign."""

    def __init__(self, realm: LeaderState, chance: Callable[[], float], reader: RowFinder) -> None:
        self._realm = realm
        self._stock = realm.stock
        self._judge = RetryPolicy(realm.settings, chance)
        self._reader = reader

    # ── what receivers say ───────────────────────────────────────────────────────────────────────

    def ack(self, events: Sequence[TableEvent]) -> None:
        """Take acks of events that were received, in this reign or before."""
        landed, elsewhere = [], []
        for event in events:
            out = self._land(event.id)
            if out is None:
                # Not out any more, and yet it was fired: somebody has the event itself.
                self._forget(event)
            else:
                landed.append(out)
                if out is not event:
                    elsewhere.append(out)  # it was fired again in the meantime
        self._stock.settling.ack(events, self._realm.clock.monotonic())
        self._stock.over(landed, self._realm.now())
        self._realm.counts.ack_lag.add(landed, self._realm.now())
        self._revoke(elsewhere)

    def ack_ids(self, ids: Sequence[int]) -> None:
        """Take acks by id; those of events that were never fired change nothing."""
        landed = [event for event in map(self._land, ids) if event is not None]
        self._stock.settling.ack(landed, self._realm.clock.monotonic())
        self._stock.over(landed, self._realm.now())
        self._revoke(landed)
        known = {event.id for event in landed}
        unknown = [each for each in ids if each not in known and self._was_fired(each)]
        if unknown:
            self._stock.settling.ack_unknown(unknown, self._realm.clock.monotonic())

    def nack(self, events: Sequence[TableEvent], delay: float | None, error: str | None) -> None:
        """Have events fired again that are out."""
        out = [event for event in events if self._stock.flights.get(event.id) is event]
        self._retry(out, delay, error or "nacked")

    def detach(self, place: ReceiverSlot2) -> None:
        """A receiver is gone: what it never took goes back, what it had is fired again."""
        held = [event for event in self._stock.flights if event.seat is place]
        waiting = self._revoke(held)
        self._offer_again(waiting)
        self._retry([e for e in held if e not in waiting], 0.0, "the receiver went away")

    # ── what time says ───────────────────────────────────────────────────────────────────────────

    def store_acks(self, now: float) -> None:
        """Store the acks that were taken, if it is time to."""
        due = self._stock.settling.next_time()
        if due is not None and due <= now:
            self._store_acks()

    def look_after(self, now: float) -> None:
        """See to events that are out for a while."""
        late = self._stock.flights.late(now)
        if late:
            waiting = self._revoke(late)
            for event in waiting:
                if isinstance(event.seat, ReceiverSlot2):
                    event.seat.stall()
            self._offer_again(waiting)
            self._retry([event for event in late if event not in waiting], None, LATE_ERROR)
        unseen = self._stock.flights.unseen(now)
        if unseen:
            self._look_at_rows(unseen)

    def next_time(self) -> float:
        """When one of these two has something to do; monotonic."""
        times = (self._stock.settling.next_time(), self._stock.flights.next_time())
        return min((when for when in times if when is not None), default=float("inf"))

    def collected(self, rows: Sequence[Row]) -> None:
        """Retry events that an earlier manager fired."""
        verdicts = [self._judge.of(row[0], row[1], None, LATE_ERROR, more=False) for row in rows]
        self._realm.store.put_back(self._realm.token, verdicts)
        self._reader.sweep_soon()

    # ── the end ──────────────────────────────────────────────────────────────────────────────────

    def finish(self) -> None:
        """Store what acks there are and give back what is out, before the lead is given up."""
        self._store_acks()
        events = list(self._stock.flights)
        waiting = self._revoke(events)
        self._offer_again(waiting)
        self._retry([event for event in events if event not in waiting], None, "the manager closed")

    def abandon(self, error: TurnlaneError) -> None:
        """The lead is lost: nobody receives what is not received yet, no ack is stored."""
        self._revoke(list(self._stock.flights))
        self._stock.settling.abandon(error)

    # ── how ──────────────────────────────────────────────────────────────────────────────────────

    def _store_acks(self) -> None:
        now = self._realm.clock.monotonic()
        stored, released = self._stock.settling.store(self._realm.store, self._realm.token, now)
        self._realm.counts.acked += stored
        self._reader.ask(released)

    def _land(self, event_id: int) -> TableEvent | None:
        """Take an event out of the air."""
        event = self._stock.flights.pop(event_id)
        if event is not None and isinstance(event.seat, ReceiverSlot2):
            event.seat.load -= 1
        return event

    def _forget(self, event: TableEvent) -> None:
        """Let an event that waits for its retry, here or in the table, fire no more."""
        self._stock.window.discard(event.id)
        self._stock.over([event], self._realm.now())

    def _was_fired(self, event_id: int) -> bool:
        """Whether an event that is not out may have been; the table knows it for certain."""
        waiting = self._stock.window.get(event_id)
        if waiting is None:
            return True
        if waiting.attempts:
            self._forget(waiting)
        return waiting.attempts > 0

    def _look_at_rows(self, events: list[TableEvent]) -> None:
        """Mark rows of fired events, and notice those that were acked by plain SQL."""
        store = self._realm.store
        unmarked = [event.id for event in events if not event.marked]
        marked = store.mark(self._realm.token, unmarked) if unmarked else set()
        others = [event.id for event in events if event.id not in marked]
        standing = marked | (store.standing(others) if others else set())
        settled = [event for event in events if event.id not in standing]
        for event in events:
            event.marked = event.marked or event.id in marked
        for event in settled:
            self._land(event.id)
        self._revoke(settled)
        self._stock.over(settled, self._realm.now())
        self._realm.counts.acked += len(settled)

    def _offer_again(self, events: set[TableEvent]) -> None:
        """Have events that nobody took go to another receiver: it was no attempt."""
        marked = {event.id for event in events if event.marked}
        unmarked = self._realm.store.unmark(self._realm.token, list(marked)) if marked else set()
        held = self._held(marked - unmarked)
        now = self._realm.now()
        for event in events:
            if event.id in held:
                continue
            self._land(event.id)
            if event.marked and event.id not in unmarked:
                self._stock.over([event], now)
            else:
                self._stock.window.add([event.moved(event.fire_at, 0)], now)

    def _retry(self, events: list[TableEvent], delay: float | None, error: str) -> None:
        """Put events back into the table, to fire again or as dead letters."""
        if not events:
            return
        verdicts = {
            event.id: self._judge.of(
                event.id, event.attempts + 1, delay, error, more=not event.marked
            )
            for event in events
        }
        standing = self._realm.store.put_back(self._realm.token, list(verdicts.values()))
        held = self._held(set(verdicts) - standing)
        counts, now, horizon = self._realm.counts, self._realm.now(), self._realm.horizon()
        for event in events:
            if event.id in held:
                continue
            self._land(event.id)
            verdict = verdicts[event.id]
            if event.id not in standing or verdict.state == "dead":
                counts.dead += event.id in standing
                self._stock.over([event], now)
                continue
            counts.retried += 1
            again = event.moved(now + verdict.delay + RETRY_MARGIN, 1)
            if again.fire_at <= horizon:
                self._stock.window.add([again], now)

    def _held(self, ids: set[int]) -> set[int]:
        """Those that could not be changed because somebody else is about to: they stay out."""
        return self._realm.store.standing(list(ids)) if ids else set()

    def _revoke(self, events: Iterable[TableEvent]) -> set[TableEvent]:
        """Take back from the receivers what nobody has taken there yet."""
        by_place: dict[ReceiverSlot2, set[TableEvent]] = {}
        for event in events:
            if isinstance(event.seat, ReceiverSlot2):
                by_place.setdefault(event.seat, set()).add(event)
        back: set[TableEvent] = set()
        for place, mine in by_place.items():
            assert place.receiver is not None
            back |= place.receiver.revoke(mine)
        return back
