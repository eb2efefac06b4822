"""How far the events of a queue have come, and who has to know.

A :class:`Watermark` stands for one ack level: every event below its position has reached the level.
It only moves forward, so publishers that wait on it, and listeners that it tells, hear in publish
order. Callbacks run on the thread of the :class:`AckDispatcher`: a slow callback, or a
callback that publishes or closes the queue, delays no other thread.

The lock of the queue guards the watermarks. The dispatcher has a lock of its own, which is taken
after the lock of the queue and under which nothing else is called.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import NamedTuple

from turnlane.intervals import RangeSet, Span
from turnlane.logs import get_logger
from turnlane.queues.api import Ack, AckCallback, AckLevel, Durability
from turnlane.runtime import start_thread

log = get_logger(__name__)

PositionObserver = Callable[[int], None]
"""Is called with the new position of a watermark, under the lock of the queue."""


@dataclass(slots=True, eq=False)
class AckListener:
    """A producer with a callback. Two of them are different even if they share the callback."""

    callback: AckCallback


class AckEvent(NamedTuple):
    """An ack on its way to a listener."""

    listener: AckListener
    ack: Ack


@dataclass(slots=True)
class _Run:
    """Consecutive offsets published by one listener."""

    listener: AckListener
    first: int
    end: int


class AckWaiter:
    """A publisher that waits until a watermark reaches ``offset``.

    Publishers that reach it together wake each other, one after another, in a chain. If all were
    woken at once, they would compete for the interpreter lock, at twice the cost.
    """

    __slots__ = (
        *("_has_left", "_next", "_signal"),
        *("first", "has_lost", "is_cancelled", "is_reached", "offset"),
    )

    def __init__(self, first: int, offset: int) -> None:
        self.first = first
        self.offset = offset
        self.is_reached = False
        self.has_lost = False
        """Whether one of the events ``first`` to ``offset - 1`` was dropped."""
        self.is_cancelled = False
        """Whether the producer took one of these events back."""
        self._has_left = False
        self._next: AckWaiter | None = None
        self._signal = threading.Lock()
        self._signal.acquire()

    def wait(self, timeout: float | None) -> bool:
        """Block until the offset is reached or the wait is pointless; true if it is reached."""
        try:
            self._signal.acquire(timeout=-1 if timeout is None else max(timeout, 0))
        finally:
            self.leave()
        return self.is_reached

    def leave(self) -> None:
        """Take this waiter out of the chain: its publisher does not wait, or not any more."""
        # Here and in link() each thread first sets its own flag, then reads the flag of the other:
        # so one of the two always sees that a publisher left early (timeout, Ctrl-C) and wakes the
        # next one.
        self._has_left = True
        if self.is_reached and self._next is not None:
            self._next.wake()

    def link(self, following: AckWaiter | None) -> AckWaiter | None:
        """The offset is reached: wake ``following`` after this one; returns whom to wake first."""
        self._next = following
        self.is_reached = True
        return following if self._has_left else self

    def wake(self) -> None:
        """Let the publisher go on."""
        with contextlib.suppress(RuntimeError):  # it was woken before
            self._signal.release()


class Watermark:
    """The offset below which every event has reached ``level``."""

    def __init__(self, level: AckLevel, durability: Durability, position: int) -> None:
        self.level = level
        self.durability = durability
        self.position = position
        self.lost = RangeSet()
        """Offsets at or above the position whose events were dropped after acceptance."""
        self.served = 0
        """How many publishers the last advance has woken."""
        self._runs: deque[_Run] = deque()
        self._waiters: list[AckWaiter] = []
        self.observers: list[PositionObserver] = []
        """Called for every new position, under the lock of the queue."""
        self._is_abandoned = False

    def listen(self, listener: AckListener, first: int, end: int) -> None:
        """Tell ``listener`` when its events ``first`` to ``end - 1`` reach the level.

        Calls may come in any order; the listener hears in the order of the offsets.
        """
        runs = self._runs
        if runs and runs[-1].listener is listener and runs[-1].end == first:
            runs[-1].end = end
        elif runs and first < runs[-1].first:
            insort(runs, _Run(listener, first, end), key=lambda run: run.first)
        else:
            runs.append(_Run(listener, first, end))

    def add_waiter(self, first: int, offset: int) -> AckWaiter | None:
        """Return a waiter for ``first`` to ``offset - 1``; ``None`` if they are there already."""
        if offset <= self.position:
            return None
        waiter = AckWaiter(first, offset)
        if self._is_abandoned:
            waiter.wake()
        insort(self._waiters, waiter, key=lambda each: each.offset)
        return waiter

    def remove_waiter(self, waiter: AckWaiter) -> None:
        """Forget a waiter whose publisher waits no more."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    @property
    def waiters(self) -> int:
        """How many publishers wait for this watermark to move."""
        return len(self._waiters)

    def find_awaited(self, limit: int) -> int:
        """Return the highest offset up to ``limit`` that a publisher waits for; 0 if none."""
        index = bisect_right(self._waiters, limit, key=lambda each: each.offset)
        return self._waiters[index - 1].offset if index else 0

    def list_awaited(self, first: int, end: int) -> Iterator[Span]:
        """Iterate over the parts of a range for which a publisher waits or a listener is due."""
        at = bisect_right(self._runs, first, key=lambda run: run.end)
        runs = ((run.first, run.end) for run in islice(self._runs, at, None))
        at = bisect_right(self._waiters, first, key=lambda each: each.offset)
        waiters = (
            (each.first, each.offset)
            for each in islice(self._waiters, at, None)
            if each.first < each.offset  # or it waits for a position and has no events
        )
        for awaited in (runs, waiters):
            for start, stop in takewhile(lambda span: span[0] < end, awaited):
                yield max(first, start), min(end, stop)

    def lose(self, first: int, end: int) -> None:
        """Note that these events were dropped; their publisher is told when its turn comes."""
        self.lost.add(max(first, self.position), end)

    def cancel(self, first: int, end: int) -> None:
        """Wake the publishers that wait for an event of a range, though it never arrives."""
        for waiter in [each for each in self._waiters if first < each.offset and each.first < end]:
            if waiter.first < waiter.offset:  # or it waits for a position, and has no events
                self._waiters.remove(waiter)
                waiter.is_cancelled = True
                waiter.wake()

    def advance(self, position: int) -> list[AckEvent]:
        """Move forward: wake the waiting publishers and return what listeners have to hear."""
        if position <= self.position:
            return []
        self.position = position
        self._wake(position)
        for observer in self.observers:
            observer(position)
        events = self._collect(position)
        self.lost.drop_below(position)
        return events

    def _wake(self, position: int) -> None:
        self.served = bisect_right(self._waiters, position, key=lambda each: each.offset)
        first = None
        for waiter in reversed(self._waiters[: self.served]):
            waiter.has_lost = bool(self.lost) and self.lost.overlap(waiter.first, waiter.offset) > 0
            first = waiter.link(first)
        del self._waiters[: self.served]
        if first is not None:
            first.wake()

    def _collect(self, position: int) -> list[AckEvent]:
        counts: dict[AckListener, list[int]] = {}
        while self._runs and self._runs[0].first < position:
            run = self._runs[0]
            end = min(run.end, position)
            dropped = self.lost.overlap(run.first, end) if self.lost else 0
            count = counts.setdefault(run.listener, [0, 0, 0])
            count[0] += end - run.first - dropped
            count[1] += dropped
            count[2] = end
            if end == run.end:
                self._runs.popleft()
            else:
                run.first = end
        return [
            AckEvent(listener, Ack(count, dropped, end, self.level, self.durability))
            for listener, (count, dropped, end) in counts.items()
        ]

    def abandon(self) -> None:
        """Wake every waiting publisher though its events did not arrive; forget the listeners."""
        self._is_abandoned = True
        for waiter in self._waiters:
            waiter.wake()
        self._waiters.clear()
        self._runs.clear()


class AckDispatcher:
    """Runs ack callbacks on one thread, which exists only if a producer has a callback.

    Acks that a listener has not heard yet are added up: a slow callback costs the memory of one
    ack, and not of one ack per event.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._due: dict[AckListener, Ack] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def start(self) -> None:
        """Start the thread unless it runs, or was stopped."""
        with self._changed:
            if self._thread is None and not self._is_stopped:
                self._thread = start_thread(f"turnlane-acks-{self._name}", self._run)

    def send(self, events: list[AckEvent]) -> None:
        """Have listeners called back. Never blocks."""
        if not events:
            return
        with self._changed:
            for listener, ack in events:
                due = self._due.get(listener)
                self._due[listener] = ack if due is None else _add_acks(due, ack)
            self._changed.notify()

    def stop(self, timeout: float) -> None:
        """Run the callbacks that are due, then end; a callback that hangs is left behind.

        A call from a callback returns at once.
        """
        with self._changed:
            self._is_stopped = True
            thread = self._thread
            self._changed.notify()
        if thread is not None and not self.is_current_thread():
            thread.join(timeout)

    def is_current_thread(self) -> bool:
        """Whether the caller is a callback."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._is_stopped)
                due, self._due = self._due, {}
            if not due:
                return  # stopped, and nothing is left
            for listener, ack in due.items():
                try:
                    listener.callback(ack)
                except BaseException:  # even SystemExit: the acks of other producers follow
                    log.exception("queue.ack_callback_failed", queue=self._name, ack=ack)


def _add_acks(one: Ack, other: Ack) -> Ack:
    return Ack(
        one.count + other.count,
        one.dropped + other.dropped,
        max(one.end, other.end),
        other.level,
        other.durability,
    )


class AckTracker:
    """The watermarks of one queue and the dispatcher of its callbacks."""

    def __init__(self, name: str, durability: Durability, position: int) -> None:
        self.persisted = Watermark(AckLevel.PERSISTED, durability, position)
        self.delivered = Watermark(AckLevel.DELIVERED, durability, position)
        self.dispatcher = AckDispatcher(name)

    @property
    def watermarks(self) -> tuple[Watermark, Watermark]:
        """Both watermarks."""
        return self.persisted, self.delivered

    def watermark_of(self, level: AckLevel) -> Watermark | None:
        """Return the watermark of a level; ``None`` for ``accepted``, which is reached at once."""
        if level is AckLevel.ACCEPTED:
            return None
        return self.persisted if level is AckLevel.PERSISTED else self.delivered

    def send_accepted(self, listener: AckListener, first: int, end: int) -> None:
        """Ack the acceptance of events, which has just happened."""
        # Memory, even if the queue persists them later: nothing else has the events yet.
        ack = Ack(end - first, 0, end, AckLevel.ACCEPTED, Durability.MEMORY)
        self.dispatcher.send([AckEvent(listener, ack)])

    def lose(self, first: int, end: int) -> None:
        """Note that these events were dropped after acceptance."""
        for mark in self.watermarks:
            mark.lose(first, end)

    def advance(self, mark: Watermark, position: int) -> None:
        """Move a watermark forward, wake its waiters and call its listeners."""
        self.dispatcher.send(mark.advance(position))
