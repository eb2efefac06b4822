"""When a failed operation is tried again, and how fast events may flow. Pure.

There is one backoff for all of turnlane: the wait doubles, or grows by another factor, with every
failure in a row, up to a longest wait, and a random factor prevents that operations which failed
together are tried again together. There is one rate limiter: a token bucket. Callers pass in the
time, the number of failures and the random number, and do the waiting themselves.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final, Self

MAX_RETRY_AFTER: Final = 86_400.0
"""Seconds. A server that asks for a longer wait is tried again after a day."""
_MAX_GROWTH: Final = 64
"""2.0**5000 does not fit into a float."""
RATE_SECONDS: Final = 60.0
"""Rates of events in and out are averages of this time."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that grow from ``first`` to ``longest`` seconds, times a random factor."""

    first: float
    longest: float
    least_factor: float = 1.0
    most_factor: float = 1.0
    """The wait is multiplied by a random factor between these two."""
    multiplier: float = 2.0
    """By how much the wait grows with every failure."""

    @classmethod
    def from_jitter(
        cls, first: float, longest: float, jitter: float, multiplier: float = 2.0
    ) -> Self:
        """Return a backoff whose waits vary by the share ``jitter`` to either side."""
        return cls(first, longest, 1 - jitter, 1 + jitter, multiplier)

    def get_wait(
        self, failures: int, chance: float = 0.5, retry_after: float | None = None
    ) -> float:
        """Return the seconds to wait after this many failures in a row, at most ``longest``.

        ``chance`` is a random number from 0 to 1. ``retry_after`` is the wait that a server asked
        for, if it did. It is never tried sooner, but at most ``MAX_RETRY_AFTER`` is believed; and a
        server that asks for no wait at all is still given the shortest one.
        """
        if retry_after is not None:
            least = max(min(retry_after, MAX_RETRY_AFTER), self.first * self.least_factor)
            return least * (1 + (self.most_factor - 1) * chance)
        growth = self.multiplier ** min(max(failures - 1, 0), _MAX_GROWTH)
        factor = self.least_factor + (self.most_factor - self.least_factor) * chance
        return min(self.longest, min(self.longest, self.first * growth) * factor)


def double_wait(first: float, longest: float, failures: int) -> float:
    """Return the wait of a :class:`Backoff` without a random factor."""
    return Backoff(first, longest).get_wait(failures)


def scatter_wait(wait: float, chance: float) -> float:
    """Return between half the wait and all of it."""
    return wait * (0.5 + chance / 2)


class TokenBucket:
    """A rate limit with bursts of at most ``size`` tokens. Not safe to use from several threads.

    The bucket starts with ``tokens``, by default with none. It gains ``rate`` tokens per second and
    holds at most ``size`` of them. An event costs one token. A claim may take tokens that the
    bucket does not have yet: the bucket then goes into debt, and later claims wait until the debt
    is paid. So claims are served in the order in which they are made, and small claims never
    overtake a large one. A bucket of size 0 saves nothing: it only spaces claims at the rate.
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


class FlowRates:
    """How many events per second come and go, on average in the last minute. Not thread-safe."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque()

    def add(self, now: float, *counts: int) -> None:
        """Add a sample: the counts of events so far. Samples that are close replace another."""
        samples = self._samples
        if len(samples) > 1 and now - samples[-2][0] < 1.0:
            samples.pop()
        samples.append((now, counts))
        while len(samples) > 2 and samples[1][0] <= now - RATE_SECONDS:
            samples.popleft()

    def get_rates(self) -> tuple[float, ...] | None:
        """Return events per second for each count; ``None`` if less than a second is known."""
        (first, before), (last, now) = self._samples[0], self._samples[-1]
        seconds = last - first
        if seconds < 1.0:
            return None
        return tuple((new - old) / seconds for old, new in zip(before, now, strict=True))


def estimate_drain_seconds(pending: int, rate_in: float, rate_out: float) -> float:
    """Return the seconds until nothing is pending at these rates; infinite if it never ends."""
    if not pending:
        return 0.0
    return pending / (rate_out - rate_in) if rate_out > rate_in else math.inf
