"""The clock. Code that depends on time gets it as an argument, and tests pass one they control."""

from __future__ import annotations

import time


class Clock:
    """Wall time for timestamps, monotonic time for everything that waits.

    Durability and delivery never depend on the wall clock. A jump of the wall clock changes
    timestamps and the dequeue window, nothing else.
    """

    def time_ns(self) -> int:
        """Return nanoseconds since the epoch."""
        return time.time_ns()

    def monotonic(self) -> float:
        """Return seconds since an arbitrary moment; they never go back."""
        return time.monotonic()


class BootClock(Clock):
    """A clock whose monotonic time also runs while the machine sleeps, if the system has one.

    A lease needs it: its end counts by the clock of another machine, and after an hour of sleep a
    holder must not believe that no time has passed.
    """

    def monotonic(self) -> float:
        return time.clock_gettime(_BOOT_TIME)


_BOOT_TIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

SYSTEM_CLOCK = Clock()
BOOT_CLOCK = BootClock()
