"""A token bucket: no more events in a second than allowed. Pure."""

from __future__ import annotations

from turnlane.delivery.settings import DeliverySettings


def burst_of(settings: DeliverySettings) -> int | None:
    """The most events that may go at once; ``None`` without a rate.

    What comes together in half a task's time, or in a second: it has to go in one task.
    """
    if settings.rate_limit is None:
        return None
    return max(1, int(settings.rate_limit * min(1.0, settings.max_time / 2)))


class Bucket:
    """Fills with ``rate`` tokens a second, up to ``size``. It begins empty.

    An event costs a token. Whoever claims tokens that are still to come has them before all who
    claim later, however few those want.
    """

    def __init__(self, rate: float, size: int, now: float) -> None:
        self._rate = rate
        self._size = size
        self._tokens = 0.0
        self._at = now

    def governed(self, rate: float, size: int, now: float) -> None:
        """Fill at another rate from now on; what was claimed stays claimed."""
        self._fill(now)
        self._rate, self._size = rate, size

    def claim(self, count: int, within: float, now: float) -> float:
        """Seconds until there are ``count`` tokens; they are taken if that is ``within`` limits."""
        self._fill(now)
        wait = max(0.0, (count - self._tokens) / self._rate)
        if wait <= within:
            self._tokens -= count
        return wait

    def _fill(self, now: float) -> None:
        self._tokens = min(self._size, self._tokens + (now - self._at) * self._rate)
        self._at = now
