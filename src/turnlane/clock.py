"""The clock, passed in wherever time matters, so that tests can turn its hands."""

from __future__ import annotations

import time


class Clock:
    """Wall time for timestamps, monotonic time for everything that waits.

    Nothing that decides about durability or delivery looks at the wall clock, so a clock that
    jumps changes timestamps and the dequeue window and nothing else.
    """

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return time.time_ns()

    def monotonic(self) -> float:
        """Seconds from an arbitrary moment, never going back."""
        return time.monotonic()


SYSTEM_CLOCK = Clock()
