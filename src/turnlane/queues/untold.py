"""What was settled without ever touching the disk, which the journal has still to be told.

As long as nothing else goes to disk, nobody has to know. Before anything does, the journal hears
of all that came before it, so that it counts every event once and under its first outcome.
"""

from __future__ import annotations

import threading

from turnlane.queues.contract import Outcome
from turnlane.queues.log.journal import Journal
from turnlane.queues.ranges import Ranges


class Untold:
    """Settled ranges by outcome. Thread-safe; its lock is taken after a queue's own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[Outcome, Ranges] = {}

    def add(self, first: int, end: int, outcome: Outcome) -> None:
        """Note that ``[first, end)`` is settled, which it was not before."""
        with self._lock:
            self._ranges.setdefault(outcome, Ranges()).add(first, end)

    def tell(self, journal: Journal) -> None:
        """Tell the journal everything. On ``OSError``: call it again, for twice is harmless."""
        with self._lock:
            for outcome, ranges in self._ranges.items():
                for first, end in ranges:
                    journal.settled(first, end, 0, outcome)
            self._ranges.clear()
