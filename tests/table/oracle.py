"""What must hold, whatever fails: nothing early, nothing lost, nothing acked comes again."""

from __future__ import annotations

import time
from collections import Counter

from tests.table.site import PATIENCE, Site
from turnlane import table
from turnlane.errors import LeadLost


class Oracle:
    """Sees every event that a test's receivers get."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.received: Counter[str] = Counter()
        self.confirmed: set[int] = set()

    def saw(self, events: list[table.TableEvent]) -> None:
        """Events were received."""
        if not events:
            return
        now = self._site.now()
        for event in events:
            assert event.id not in self.confirmed, f"{event} came again after its ack"
            assert event.fire_at <= now, f"{event} came early"
            self.received[event["payload"]] += 1

    def ack(self, receiver: table.Receiver, events: list[table.TableEvent]) -> None:
        """Ack, and take note of what is confirmed; an ack that was refused may come again."""
        receiver.ack(events)
        try:
            stored = receiver.flush(PATIENCE)
        except LeadLost:
            return
        assert stored
        self.confirmed.update(event.id for event in events)

    def drain(self, queue: table.TableQueue, receiver: table.Receiver) -> None:
        """Receive and ack until the queue is empty."""
        until = time.monotonic() + PATIENCE
        while queue.counts()["to_be_fired"] + queue.counts()["fired"]:
            assert time.monotonic() < until, queue.counts()
            events = receiver.take(timeout=0.2)
            self.saw(events)
            self.ack(receiver, events)

    def check(self, payloads: set[str]) -> None:
        """Every committed event was received, and nothing else."""
        assert set(self.received) == payloads
