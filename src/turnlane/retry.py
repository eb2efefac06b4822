"""How long to wait before a failed operation is tried again. Pure.

There is one rule for all of turnlane: the wait doubles with every failure in a row, up to a longest
wait, and a random factor keeps those that failed together from coming back together. Callers pass
in the number of failures and the random number; they do the waiting themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

MAX_RETRY_AFTER: Final = 86_400.0
"""Seconds. A server that asks for a longer wait is tried again after a day."""
_MAX_DOUBLINGS: Final = 64
"""2.0**5000 does not fit into a float."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double from ``first`` to ``longest`` seconds, times a random factor."""

    first: float
    longest: float
    least_factor: float = 1.0
    most_factor: float = 1.0
    """The wait is multiplied by a random factor between these two."""

    @classmethod
    def from_jitter(cls, first: float, longest: float, jitter: float) -> Self:
        """Return a backoff whose waits vary by the share ``jitter`` to either side."""
        return cls(first, longest, 1 - jitter, 1 + jitter)

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
        doublings = min(max(failures - 1, 0), _MAX_DOUBLINGS)
        factor = self.least_factor + (self.most_factor - self.least_factor) * chance
        return min(self.longest, min(self.longest, self.first * 2.0**doublings) * factor)


def doubled(first: float, longest: float, failures: int) -> float:
    """Return the wait of a :class:`Backoff` without a random factor."""
    return Backoff(first, longest).get_wait(failures)


def scattered(wait: float, chance: float) -> float:
    """Return between half the wait and all of it."""
    return wait * (0.5 + chance / 2)
