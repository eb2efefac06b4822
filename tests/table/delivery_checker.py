"""Checks the guarantees of every failure test: no event early, none lost, no acked event again."""

from __future__ import annotations

import time
from collections import Counter

from tests.table.database_fixture import TIMEOUT, DatabaseFixture
from turnlane import table
from turnlane.errors import LeadLost


class DeliveryChecker:
    """Records every event that the receivers of a test get."""

    def __init__(self, db: DatabaseFixture) -> None:
        self._site = db
        self.received: Counter[str] = Counter()
        self.confirmed: set[int] = set()

    def record(self, events: list[table.TableEvent]) -> None:
        """Record events that were received."""
        if not events:
            return
        now = self._site.now()
        for event in events:
            assert event.id not in self.confirmed, f"{event} came again after its ack"
            assert event.fire_at <= now, f"{event} came early"
            self.received[event["payload"]] += 1

    def ack(self, receiver: table.Receiver, events: list[table.TableEvent]) -> None:
        """Ack events and record confirmed ones; after a refused ack, an event may come again."""
        receiver.ack(events)
        try:
            stored = receiver.flush(TIMEOUT)
        except LeadLost:
            return
        assert stored
        self.confirmed.update(event.id for event in events)

    def drain(self, queue: table.TableQueue, receiver: table.Receiver) -> None:
        """Receive and ack until the queue is empty."""
        until = time.monotonic() + TIMEOUT
        while queue.counts()["to_be_fired"] + queue.counts()["fired"]:
            assert time.monotonic() < until, queue.counts()
            events = receiver.take(timeout=0.2)
            self.record(events)
            self.ack(receiver, events)

    def check(self, payloads: set[str]) -> None:
        """Assert that every committed event was received, and no other."""
        assert set(self.received) == payloads
