"""How long a lane has ended no batch, and when to mention it. Pure: it is told the time."""

from __future__ import annotations

from typing import Final

QUIET_SECONDS: Final = 300.0
"""So long a silence is mentioned first, and again each time that it is twice as long."""


class Silence:
    """The time since a query began or was heard of last."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._mention_after = QUIET_SECONDS

    def lasted(self, now: float) -> float | None:
        """Its seconds, if it is time to mention them."""
        seconds = now - self._since
        if seconds < self._mention_after:
            return None
        self._mention_after = 2 * seconds
        return seconds
