"""What a proxy queue holds, which its node has not accepted yet."""

from __future__ import annotations

from turnlane.queues.contract import AckLevel, Outcome
from turnlane.queues.holding import HoldingQueue
from turnlane.queues.spans import count_of


class Held(HoldingQueue):
    """Events on their way to a node; offsets are sequence numbers, shifted."""

    free_returns_events = True

    def awaited(self, limit: int) -> int:
        """Up to where, and not beyond ``limit``, publishers wait for the node to persist events."""
        with self.lock:
            return self.watermarks[AckLevel.PERSISTED].awaited(limit)

    def reached(self, persisted: int, delivered: int) -> None:
        """Everything below these offsets is safe with the node, or has left it."""
        with self.lock:
            self._settle_below(delivered)
            safe = self.positions.settled.end_of_run(min(persisted, self.positions.end))
            low = self.positions.low
            for level, offset in ((AckLevel.PERSISTED, safe), (AckLevel.DELIVERED, low)):
                self.acks.send(self.watermarks[level].advance(offset))

    def entrust(self, offset: int) -> None:
        """Count what the node keeps as delivered, without telling anybody so."""
        with self.lock:
            self._settle_below(offset)

    def _settle_below(self, offset: int) -> None:
        # No further than the end: another client may go by the same producer id.
        end = min(offset, self.positions.end)
        self.totals.add(Outcome.DELIVERED, self.positions.settle(self.positions.low, end))

    def count_from(self, offset: int) -> int:
        """How many events there are from ``offset`` on, what was dropped left aside."""
        with self.lock:
            return count_of(self.positions.unsettled(offset, self.positions.end))

    def fail(self, error: Exception) -> None:
        """Take no more, and tell all publishers why. What is not acked stays so."""
        with self.lock:
            self.gate.fail(error)
            self.door.calm()
            for mark in self.watermarks.values():
                mark.abandon()

    def close_storage(self) -> None:
        with self.lock:
            lost = self.positions.settle(self.positions.low, self.positions.end)
            self.totals.add(Outcome.CLOSED, lost)
