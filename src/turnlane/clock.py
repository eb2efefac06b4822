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


class BootClock(Clock):
    """Its monotonic time goes on while the machine sleeps, where the system has such a clock.

    Whoever holds something until a time by somebody else's clock needs it: a machine that was
    asleep for an hour must not think that no time has passed.
    """

    def monotonic(self) -> float:
        return time.clock_gettime(_AWAKE_OR_NOT)


_AWAKE_OR_NOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

SYSTEM_CLOCK = Clock()
BOOT_CLOCK = BootClock()
