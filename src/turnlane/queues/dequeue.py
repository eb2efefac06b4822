"""When the next batch may be taken: the dequeue rate and the dequeue time window."""

from __future__ import annotations

import datetime as dt

from turnlane.clock import Clock
from turnlane.quantities import TimeWindow


class Pace:
    """Decides how long a consumer has to wait, and how much it may take at once."""

    __slots__ = ("_clock", "_not_before", "_rate", "_window")

    def __init__(self, rate: float | None, window: TimeWindow | None, clock: Clock) -> None:
        self._rate = rate
        self._window = window
        self._clock = clock
        self._not_before = 0.0

    def limit(self, events: int) -> int:
        """At most a second's worth, so that a low rate is not one burst and a long silence."""
        return events if self._rate is None else max(1, min(events, int(self._rate)))

    def delay(self) -> float:
        """Seconds until a batch may be taken; 0 if now."""
        return max(self._until_rate(), self._until_window())

    def took(self, events: int) -> None:
        """Events were handed out: the next ones have to wait their share."""
        if self._rate is not None:
            start = max(self._not_before, self._clock.monotonic())
            self._not_before = start + events / self._rate

    def _until_rate(self) -> float:
        return 0.0 if self._rate is None else self._not_before - self._clock.monotonic()

    def _until_window(self) -> float:
        if self._window is None:
            return 0.0
        now = dt.datetime.fromtimestamp(self._clock.time_ns() / 1e9).astimezone()
        return self._window.seconds_until_open(now.time())
