"""A token bucket: no more events in a second than allowed. Pure."""

from __future__ import annotations


class Bucket:
    """Fills with ``rate`` tokens a second, up to ``seconds``' worth. It begins empty.

    An event costs a token. Since it begins empty, one bucket after another gives no more than one
    bucket would.
    """

    def __init__(self, rate: float, now: float, seconds: float = 1.0) -> None:
        self.rate = rate
        self.size = max(1.0, rate * seconds)
        """The most events that can go at once."""
        self._tokens = 0.0
        self._at = now

    def wait(self, count: int, now: float) -> float:
        """Seconds until there are ``count`` tokens, which are no more than the bucket's size."""
        self._fill(now)
        return max(0.0, (count - self._tokens) / self.rate)

    def take(self, count: int, now: float) -> None:
        """Take tokens that are there."""
        self._fill(now)
        self._tokens -= count

    def _fill(self, now: float) -> None:
        self._tokens = min(self.size, self._tokens + (now - self._at) * self.rate)
        self._at = now
