"""The ``memory`` kind: bounded, fast, gone with the process, and it says so."""

from __future__ import annotations

from turnlane.ledger import Outcome
from turnlane.queues.consumer import HoldingQueue


class MemoryQueue(HoldingQueue):
    """Events wait in memory only. A ``persisted`` ack comes on delivery, never before."""

    def close_storage(self) -> None:
        with self.lock:
            lost = self.positions.settle(self.positions.low, self.positions.end)
            self.totals.add(Outcome.CLOSED, lost)
