"""Losses: who was told that acks were lost. Each thread that waits for acks has to hear of it."""

from __future__ import annotations

import threading


class Losses:
    """Which part of a count that only grows each thread knows."""

    def __init__(self, known: int = 0) -> None:
        self._known = known
        self._told = threading.local()

    def is_news(self, count: int) -> bool:
        """Whether the thread that calls was told of fewer; now it was told of so many."""
        told: int = getattr(self._told, "count", self._known)
        self._told.count = count
        return count > told
