"""When an event that was not acked fires again."""

from __future__ import annotations

from collections.abc import Callable

from turnlane.backoff import doubled

JITTER = 0.25
"""A quarter to either side, so that what failed together does not come back together."""


def backoff(attempts: int, first: float, longest: float, chance: Callable[[], float]) -> float:
    """Seconds to wait after so many attempts; ``chance`` gives numbers from 0 up to 1.

    Doubles with every attempt, up to ``longest``, which the jitter does not exceed either.
    """
    wait = doubled(first, longest, attempts)
    return min(longest, wait * (1 + JITTER * (2 * chance() - 1)))
