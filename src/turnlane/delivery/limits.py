"""How many sends at a time: a fixed number, or as many as the destination can take. Pure.

The adaptive limit grows by one and shrinks by a share, as TCP's window does, and looks at round
trips, as Vector's limit does. It compares them with what a send takes where nothing waits, not with
what sends took lately: a limit that grows makes sends slower little by little, and the recent past
would grow with it.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

from turnlane.delivery.settings import DeliverySettings

PUSHED_BACK: Final = 0.9
"""What is left of the limit when the destination pushes back."""
LEAST_LEFT: Final = 0.5
"""What is left of it at least when sends take much longer."""
ROOM: Final = 0.2
"""While less than this share of a send is waiting, there is room for one more."""
CROWDED: Final = 0.3
"""From this share on there are too many."""
ENOUGH: Final = 8
"""So many sends tell how long one takes; a single one tells little."""
DOWN: Final = 0.3
UP: Final = 0.02
"""How quickly we believe that sends take less, or more, where nothing waits."""


class Concurrency(Protocol):
    """How many sends at a time."""

    limit: int

    def started(self, in_flight: int) -> None:
        """A send has begun; so many are under way now, this one included."""

    def finished(self, now: float, seconds: float | None, *, pushed_back: bool) -> None:
        """A send has ended. Only the ``seconds`` of successes count: failures can be quick."""


def concurrency_of(settings: DeliverySettings, hint: int | None = None) -> Concurrency:
    """What the settings describe; ``hint`` is what did well lately."""
    if isinstance(settings.concurrency, int):
        return Fixed(settings.concurrency)
    return Adaptive(settings.min_concurrency, settings.max_concurrency, hint)


class Fixed:
    """Always the same number."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def started(self, in_flight: int) -> None:
        """Nothing to learn."""

    def finished(self, now: float, seconds: float | None, *, pushed_back: bool) -> None:
        """Nothing to learn."""


class Adaptive:
    """As many as the destination can take, between ``least`` and ``most``."""

    def __init__(self, least: int, most: int, start: int | None = None) -> None:
        self.limit = min(most, max(least, start or least))
        self._least = least
        self._most = most
        self._base: float | None = None
        """Seconds that a send takes where nothing waits."""
        self._next_look = 0.0
        self._reached = False
        self._pushed_back = False
        self._count = 0
        self._total = 0.0

    def started(self, in_flight: int) -> None:
        """A send has begun."""
        self._reached = self._reached or in_flight >= self.limit

    def finished(self, now: float, seconds: float | None, *, pushed_back: bool) -> None:
        """A send has ended."""
        self._pushed_back = self._pushed_back or pushed_back
        if seconds is not None:
            self._count += 1
            self._total += seconds
        enough = self._pushed_back or self._count >= min(ENOUGH, 2 * self.limit)
        if enough and now >= self._next_look:
            self._look(now)

    def _look(self, now: float) -> None:
        """Change the limit by what was seen since the last time: not sooner than a round trip."""
        seen = self._total / self._count if self._count else None
        if self._pushed_back:
            self.limit = max(self._least, int(self.limit * PUSHED_BACK))
        elif seen is not None:
            waiting = self._waiting(seen)
            self._learn(seen, waiting)
            self._change(waiting)
        self._next_look = now + (seen or 0.0)
        self._reached = self._pushed_back = False
        self._count, self._total = 0, 0.0

    def _waiting(self, seen: float) -> float:
        """The share of a send's time that is spent waiting."""
        return 0.0 if self._base is None or seen <= self._base else 1 - self._base / seen

    def _learn(self, seen: float, waiting: float) -> None:
        """What a send takes where nothing waits: at the least limit nothing does."""
        if self._base is None:
            self._base = seen
        elif self.limit <= self._least or seen < self._base:
            self._base += DOWN * (seen - self._base)
        elif waiting < ROOM:
            self._base += UP * (seen - self._base)

    def _change(self, waiting: float) -> None:
        if waiting > CROWDED and self.limit > self._least:
            left = max(LEAST_LEFT, 1 - waiting + ROOM)
            self.limit = max(self._least, min(self.limit - 1, math.ceil(self.limit * left)))
        elif waiting < ROOM and self._reached:
            self.limit = min(self._most, self.limit + 1)


# ── rate ──
# A token bucket: no more events in a second than allowed. Pure.


def burst_of(settings: DeliverySettings) -> int | None:
    """The most events that may go at once; ``None`` without a rate.

    What comes together in half a task's time, or in a second: it has to go in one task.
    """
    if settings.rate_limit is None:
        return None
    return max(1, int(settings.rate_limit * min(1.0, settings.max_time / 2)))


class Bucket:
    """Fills with ``rate`` tokens a second, up to ``size``. It begins empty.

    An event costs a token. Whoever claims tokens that are still to come has them before all who
    claim later, however few those want.
    """

    def __init__(self, rate: float, size: int, now: float) -> None:
        self._rate = rate
        self._size = size
        self._tokens = 0.0
        self._at = now

    def governed(self, rate: float, size: int, now: float) -> None:
        """Fill at another rate from now on; what was claimed stays claimed."""
        self._fill(now)
        self._rate, self._size = rate, size

    def claim(self, count: int, within: float, now: float) -> float:
        """Seconds until there are ``count`` tokens; they are taken if that is ``within`` limits."""
        self._fill(now)
        wait = max(0.0, (count - self._tokens) / self._rate)
        if wait <= within:
            self._tokens -= count
        return wait

    def _fill(self, now: float) -> None:
        self._tokens = min(self._size, self._tokens + (now - self._at) * self._rate)
        self._at = now
