"""How long a reader waits until there is enough for a batch. Pure: it is told the time."""

from __future__ import annotations


class BatchWait:
    """A wait for so many events, but no longer than so many seconds from the first of them."""

    def __init__(self, events: int, seconds: float) -> None:
        self._events = events
        self._seconds = seconds
        self._since: float | None = None

    def left(self, events: int, now: float) -> float:
        """The seconds that are left to wait for more; 0 if what there is makes a batch."""
        if not events or events >= self._events:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
        left = self._since + self._seconds - now
        if left <= 0:
            self._since = None
        return max(0.0, left)
