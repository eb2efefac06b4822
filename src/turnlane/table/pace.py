"""The pace of a queue: at most so many events in a second."""

from __future__ import annotations

import math


class Pace:
    """A bucket of a tenth of a second's worth of events. Pure: times are passed in."""

    def __init__(self, per_second: float | None, now: float) -> None:
        self._rate = per_second
        self._size = max(1.0, (per_second or 0) / 10)
        self._tokens = self._size
        self._filled = now

    def allowed(self, wanted: int, now: float) -> int:
        """How many of the events wanted may fire now; they are counted as fired."""
        if self._rate is None:
            return wanted
        self._fill(now, self._rate)
        granted = min(wanted, math.floor(self._tokens))
        self._tokens -= granted
        return granted

    def give_back(self, events: int) -> None:
        """Events that were allowed to fire and did not."""
        self._tokens += events

    def wait(self, now: float) -> float:
        """Seconds until another event may fire."""
        if self._rate is None:
            return 0.0
        self._fill(now, self._rate)
        return max(0.0, (1 - self._tokens) / self._rate)

    def _fill(self, now: float, rate: float) -> None:
        self._tokens = min(self._size, self._tokens + max(0.0, now - self._filled) * rate)
        self._filled = now
