"""A clock that tests turn by hand."""

from __future__ import annotations

import threading

from turnlane.clock import Clock


class ManualClock(Clock):
    """A clock that stands still until a test moves it. Safe to use from several threads."""

    def __init__(self, time_ns: int = 1_700_000_000_000_000_000, monotonic: float = 1000.0) -> None:
        self._lock = threading.Lock()
        self._wall = time_ns
        self._monotonic = round(monotonic * 1e9)

    def time_ns(self) -> int:
        """Nanoseconds since the epoch, as the test has it."""
        return self._wall

    def monotonic(self) -> float:
        """Seconds that only :meth:`advance` adds to."""
        return self._monotonic / 1e9

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        if seconds < 0:
            raise ValueError("time does not go back; jump() moves the wall clock alone")
        step = round(seconds * 1e9)
        with self._lock:
            self._wall += step
            self._monotonic += step

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward, or back, as an operator or NTP would."""
        with self._lock:
            self._wall += round(seconds * 1e9)
