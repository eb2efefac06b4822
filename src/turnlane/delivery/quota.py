"""A quota: what one run may send of the rate that its action has."""

from __future__ import annotations

import logging
import math
from typing import Final

from turnlane.clock import Clock
from turnlane.delivery.gate import Gate
from turnlane.errors import RetryLater

log = logging.getLogger(__name__)

ASK_AGAIN: Final = 1.0
"""Seconds: after a claim that came to nothing, another one is made no sooner."""


class Quota:
    """Claims tokens of the gate as they are needed. Used by the run's own thread only."""

    def __init__(self, gate: Gate, clock: Clock) -> None:
        self._gate = gate
        self._clock = clock
        self._claimed = 0
        """Tokens that are ours: from ``_from`` on."""
        self._from = 0.0
        self._ask_at = -math.inf
        self._refused = 0.0

    def wait(self, count: int, until: float) -> float:
        """Seconds until ``count`` events may be sent: 0 if they may now.

        Nothing is claimed that comes only after ``until``.
        """
        now = self._clock.monotonic()
        if count > self._claimed:
            if now < self._ask_at:
                return self._refused
            wait = self._asked(count - self._claimed, until - now)
            if wait > until - now:
                self._ask_at, self._refused = now + ASK_AGAIN, wait
                return wait
            self._claimed = count
            self._from = max(self._from, now + wait)
        return max(0.0, self._from - now)

    def take(self, count: int) -> None:
        """So many are sent, for which there was nothing to wait."""
        self._claimed -= count

    def _asked(self, count: int, within: float) -> float:
        try:
            return self._gate.claim(count, max(0.0, within))
        except RetryLater as error:
            log.warning("no word of how much may be sent, events are kept: %s", error)
            return math.inf
