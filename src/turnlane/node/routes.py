"""Routes: where the numbers of a producer lie in a queue, so that its acks are in its own numbers.

A queue knows how far its offsets are persisted and delivered; a producer counts its own events. A
route remembers pairs of both, each of which says: all events below this number lie below that
offset. So what it reports may come late, never early, whoever else publishes, and however often
the producer sends something again.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable

from turnlane.queues.contract import AckLevel
from turnlane.queues.holding import HoldingQueue
from turnlane.queues.transport import Progress

MAX_ROUTES = 10_000
"""Routes without a stream that are remembered; a forgotten one costs a late ack, no more."""
MAX_PAIRS = 4096
NEVER = 1 << 63


class Route:
    """One producer's way into one queue. Safe to use from any thread."""

    def __init__(self, queue: HoldingQueue) -> None:
        self.queue = queue
        self.turn = threading.Lock()
        """Held by whoever publishes; a new stream waits here for the one before."""
        self.leave: Callable[[], None] | None = None
        """Has the present stream end."""
        self._lock = threading.Lock()
        self._numbers = [0]
        self._offsets = [0]
        self._wake_at = NEVER

    def reached(self, number: int) -> None:
        """All below ``number`` is in the queue, and so below its end at this moment."""
        with self._lock:
            if number > self._numbers[-1]:
                self._numbers.append(number)
                self._offsets.append(self.queue.end)
                if len(self._numbers) > MAX_PAIRS:
                    self._thin_out()

    def progress(self) -> Progress:
        """How far the producer's events have come."""
        with self.queue.lock:
            persisted = self.queue.watermarks[AckLevel.PERSISTED].position
            delivered = self.queue.watermarks[AckLevel.DELIVERED].position
            with self._lock:
                progress = Progress(
                    self._numbers[-1], self._below(persisted), self._below(delivered)
                )
                self._forget_below(progress.delivered)
                self._wake_at = min(self._next_above(persisted), self._next_above(delivered))
        return progress

    def has_news(self, position: int) -> bool:
        """Whether a watermark's move to ``position`` may matter. Under the queue's lock."""
        return position >= self._wake_at

    def _below(self, offset: int) -> int:
        return self._numbers[bisect_right(self._offsets, offset) - 1]

    def _next_above(self, offset: int) -> int:
        index = bisect_right(self._offsets, offset)
        return self._offsets[index] if index < len(self._offsets) else NEVER

    def _forget_below(self, delivered: int) -> None:
        """Only the last pair of what is delivered is still needed."""
        passed = self._numbers.index(delivered)
        del self._numbers[:passed], self._offsets[:passed]

    def _thin_out(self) -> None:
        """Drop every other pair of the older half: their acks come with the next pair's."""
        half = len(self._numbers) // 2
        for pairs in (self._numbers, self._offsets):
            del pairs[1:half:2]


class Routes:
    """The routes of all producers of a node that have told their names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routes: dict[tuple[str, str], Route] = {}

    def of(self, queue: HoldingQueue, producer: str) -> Route:
        """The route of a producer into a queue."""
        key = queue.name, producer
        with self._lock:
            route = self._routes.pop(key, None)
            if route is None or route.queue is not queue:  # dropped, and made anew
                route = Route(queue)
            self._routes[key] = route
            if len(self._routes) > MAX_ROUTES:
                self._forget_oldest()
            return route

    def _forget_oldest(self) -> None:
        for key, route in self._routes.items():
            if route.leave is None:
                del self._routes[key]
                return
