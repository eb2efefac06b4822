"""How many sends at a time: a fixed number, or as many as the destination can take. Pure.

The adaptive limit grows by one and shrinks by a share, as TCP's window does, and looks at round
trips, as the limit of Vector does. It compares them with the time that a send takes when nothing
waits, not with recent sends: a growing limit makes sends slower little by little, and the recent
average would grow with it.
"""

from __future__ import annotations

import math
from typing import Final

from turnlane.delivery.settings import DeliverySettings, Ordering

PUSH_BACK_FACTOR: Final = 0.9
"""The limit is multiplied by this when the destination pushes back."""
MIN_FACTOR: Final = 0.5
"""The limit is multiplied by at least this when sends take much longer."""
LOW_WAITING: Final = 0.2
"""Below this share of a send's time spent waiting, there is room for one more send."""
HIGH_WAITING: Final = 0.3
"""Above this share of a send's time spent waiting, there are too many sends."""
SAMPLES: Final = 8
"""The number of sends whose average time counts; a single one says little."""
BASE_FALL: Final = 0.3
BASE_RISE: Final = 0.02
"""How fast the base time follows shorter and longer sends."""


def make_concurrency_limit(settings: DeliverySettings, hint: int | None = None) -> ConcurrencyLimit:
    """Return the limit that the settings describe; ``hint`` is a limit that worked well lately."""
    if settings.ordering is Ordering.STRICT:
        return ConcurrencyLimit(1, 1)
    if isinstance(settings.concurrency, int):
        return ConcurrencyLimit(settings.most_sends, settings.most_sends)
    most = settings.most_sends
    return ConcurrencyLimit(min(settings.min_concurrency, most), most, hint)


class ConcurrencyLimit:
    """As many sends as the destination can take, between ``least`` and ``most``.

    If these are equal, the limit is fixed. Only the thread of a run uses it.
    """

    def __init__(self, least: int, most: int, start: int | None = None) -> None:
        self.limit = min(most, max(least, start or least))
        self._least = least
        self._most = most
        self._base: float | None = None
        """Seconds that a send takes when nothing waits."""
        self._next_change = 0.0
        self._was_reached = False
        self._was_pushed_back = False
        self._count = 0
        self._seconds = 0.0

    def on_start(self, in_flight: int) -> None:
        """Record that a send started; ``in_flight`` sends are in progress, including this one."""
        self._was_reached = self._was_reached or in_flight >= self.limit

    def on_finish(self, now: float, seconds: float | None, *, is_pushed_back: bool) -> None:
        """Record that a send ended, and change the limit if there are enough samples.

        ``seconds`` is the time of a success only, because failures are quick.
        """
        self._was_pushed_back = self._was_pushed_back or is_pushed_back
        if seconds is not None:
            self._count += 1
            self._seconds += seconds
        is_enough = self._was_pushed_back or self._count >= min(SAMPLES, 2 * self.limit)
        if is_enough and now >= self._next_change:
            self._change(now)

    def _change(self, now: float) -> None:
        """Change the limit by the sends since the last change, at most once per round trip."""
        average = self._seconds / self._count if self._count else None
        if self._was_pushed_back:
            self.limit = max(self._least, int(self.limit * PUSH_BACK_FACTOR))
        elif average is not None:
            is_slower = self._base is not None and average > self._base
            waiting = 1 - self._base / average if is_slower and self._base is not None else 0.0
            self._update_base(average, waiting)
            if waiting > HIGH_WAITING and self.limit > self._least:
                factor = max(MIN_FACTOR, 1 - waiting + LOW_WAITING)
                shrunk = min(self.limit - 1, math.ceil(self.limit * factor))
                self.limit = max(self._least, shrunk)
            elif waiting < LOW_WAITING and self._was_reached:
                self.limit = min(self._most, self.limit + 1)
        self._next_change = now + (average or 0.0)
        self._was_reached = self._was_pushed_back = False
        self._count, self._seconds = 0, 0.0

    def _update_base(self, average: float, waiting: float) -> None:
        """Follow the average where nothing waits: at the least limit nothing does."""
        if self._base is None:
            self._base = average
        elif self.limit <= self._least or average < self._base:
            self._base += BASE_FALL * (average - self._base)
        elif waiting < LOW_WAITING:
            self._base += BASE_RISE * (average - self._base)


def get_burst(settings: DeliverySettings) -> int | None:
    """Return the most events that the rate limit lets go at once; ``None`` without a rate limit.

    That is the rate of one second, or of half a task's time if that is shorter: one task must be
    able to send it.
    """
    if settings.rate_limit is None:
        return None
    return max(1, int(settings.rate_limit * min(1.0, settings.max_time / 2)))
