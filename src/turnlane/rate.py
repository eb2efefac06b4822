"""The token bucket that limits rates everywhere in turnlane. Pure: callers pass the time in.

The bucket gains ``rate`` tokens per second and holds at most ``size`` of them. An event costs one
token. A claim may take tokens that the bucket does not have yet: the bucket then goes into debt,
and later claims wait until the debt is paid. So claims are served in the order in which they are
made, and a large claim is never overtaken by small ones.

A bucket of size 0 saves nothing: it only spaces claims at the rate.
"""

from __future__ import annotations

import math


class TokenBucket:
    """A rate limit with bursts of at most ``size`` tokens. Not safe to use from several threads.

    It starts with ``tokens``, by default with none.
    """

    __slots__ = ("_rate", "_size", "_tokens", "_updated")

    def __init__(self, rate: float, size: float, now: float, tokens: float = 0.0) -> None:
        self._rate = rate
        self._size = size
        self._tokens = tokens
        self._updated = now

    def claim(self, count: float, within: float, now: float) -> float:
        """Return the seconds until ``count`` tokens are there, and take them if it is soon enough.

        The tokens are taken if the wait is at most ``within`` seconds.
        """
        wait = self.seconds_until(count, now)
        if wait <= within:
            self._tokens -= count
        return wait

    def take_available(self, wanted: int, now: float) -> int:
        """Take as many of the wanted tokens as are there now; return how many."""
        self._refill(now)
        taken = min(wanted, math.floor(self._tokens))
        self._tokens -= taken
        return taken

    def give_back(self, count: float) -> None:
        """Return tokens that were taken and not used."""
        self._tokens += count

    def seconds_until(self, count: float, now: float) -> float:
        """Return the seconds until ``count`` tokens are there; 0 if they are there now."""
        self._refill(now)
        return max(0.0, (count - self._tokens) / self._rate)

    def set_rate(self, rate: float, size: float, now: float) -> None:
        """Change the rate and the size. Tokens that were claimed stay claimed."""
        self._refill(now)
        self._rate, self._size = rate, size

    def _refill(self, now: float) -> None:
        gained = max(0.0, now - self._updated) * self._rate
        self._tokens = min(self._size, self._tokens + gained)
        self._updated = now
