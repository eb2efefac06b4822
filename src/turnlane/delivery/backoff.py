"""Backoff: how long to stay away from a destination that failed. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from turnlane.backoff import doubled
from turnlane.delivery.settings import DeliverySettings

LONGEST_SAID: Final = 86_400.0
"""A destination that says "in a year" is asked again after a day."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double from ``first`` up to ``cap``, each changed by chance by ``jitter``."""

    first: float
    cap: float
    jitter: float

    @classmethod
    def of(cls, settings: DeliverySettings) -> Self:
        """The backoff that the settings describe."""
        return cls(settings.backoff, settings.max_backoff, settings.jitter)

    def wait(self, failures: int, chance: float, said: float | None = None) -> float:
        """Seconds to wait after so many failures in a row; ``chance`` is from 0 to 1.

        ``said`` is when the destination wants to hear from us again, if it said so. It knows best,
        and is never asked sooner; but one that says "at once" over and over is still left alone
        for a while.
        """
        if said is not None:
            least = max(min(said, LONGEST_SAID), self.first * (1 - self.jitter))
            return least * (1 + self.jitter * chance)
        wait = doubled(self.first, self.cap, failures)
        return min(self.cap, wait * (1 + self.jitter * (2 * chance - 1)))
