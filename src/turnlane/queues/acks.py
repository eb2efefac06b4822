"""How far a queue's events have come, and whom to tell.

A :class:`Watermark` stands for one ack level: every event below its position has reached it.
Publishers wait on it or follow it with a callback; both hear in publish order because the
watermark only ever moves forward. Callbacks run on the :class:`Dispatcher`'s own thread, so a slow
one, or one that publishes or closes the queue, holds nobody up.

A watermark belongs to its queue and is only touched under the queue's lock.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from turnlane.intervals import RangeSet
from turnlane.queues.api import Ack, AckCallback, AckLevel, Durability

log = logging.getLogger(__name__)


Watcher = Callable[[int], None]
"""Hears the new position of a watermark."""


@dataclass(slots=True, eq=False)
class Follower:
    """A producer that wants to hear; told apart from others even if they share a callback."""

    callback: AckCallback


class Notice(NamedTuple):
    """An ack on its way to a follower."""

    follower: Follower
    ack: Ack


@dataclass(slots=True)
class _Run:
    """Consecutive offsets published by one follower."""

    follower: Follower
    first: int
    end: int


class Ticket:
    """A publisher waiting for the watermark to reach ``offset``.

    Publishers served together are woken one by another, in a chain. Woken all at once they would
    fight for Python's one interpreter lock, at twice the cost.
    """

    __slots__ = ("_gone", "_next", "_signal", "first", "lost", "offset", "reached")

    def __init__(self, first: int, offset: int) -> None:
        self.first = first
        self.offset = offset
        self.reached = False
        self.lost = False
        """Whether any of the events ``first`` to ``offset - 1`` was dropped instead."""
        self._gone = False
        self._next: Ticket | None = None
        self._signal = threading.Lock()
        self._signal.acquire()

    def wait(self, timeout: float | None) -> bool:
        """Block until reached or given up; true if reached."""
        try:
            self._signal.acquire(timeout=-1 if timeout is None else max(timeout, 0))
        finally:
            self.leave()
        return self.reached

    def leave(self) -> None:
        """Nobody waits here, or not any more: the chain goes on without this one."""
        # Here and in link() each side speaks before it looks: so one of the two always
        # notices that a publisher left early (timeout, Ctrl-C), and the next is woken.
        self._gone = True
        if self.reached and self._next is not None:
            self._next.wake()

    def link(self, following: Ticket | None) -> Ticket | None:
        """Reached: wake ``following`` after this one; returns whom to wake for both."""
        self._next = following
        self.reached = True
        return following if self._gone else self

    def wake(self) -> None:
        """Let the publisher go on."""
        with contextlib.suppress(RuntimeError):  # woken before
            self._signal.release()


class Watermark:
    """The offset below which every event has reached ``level``."""

    def __init__(self, level: AckLevel, durability: Durability, position: int) -> None:
        self.level = level
        self.durability = durability
        self.position = position
        self.lost = RangeSet()
        """Offsets at or above the position that will never arrive: dropped after acceptance."""
        self.served = 0
        """How many publishers the last advance has woken."""
        self._runs: deque[_Run] = deque()
        self._tickets: list[Ticket] = []
        self._watchers: list[Watcher] = []
        self._abandoned = False

    def follow(self, follower: Follower, first: int, end: int) -> None:
        """Tell ``follower`` when its events ``first`` to ``end - 1`` get here.

        In whatever order that is asked for, it hears in the order of the offsets.
        """
        runs = self._runs
        if runs and runs[-1].follower is follower and runs[-1].end == first:
            runs[-1].end = end
        elif runs and first < runs[-1].first:
            insort(runs, _Run(follower, first, end), key=lambda run: run.first)
        else:
            runs.append(_Run(follower, first, end))

    def ticket(self, first: int, offset: int) -> Ticket | None:
        """A ticket to wait for ``first`` to ``offset - 1``; ``None`` if they are here already."""
        if offset <= self.position:
            return None
        ticket = Ticket(first, offset)
        if self._abandoned:
            ticket.wake()
        insort(self._tickets, ticket, key=lambda each: each.offset)
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Nobody waits for this ticket any more."""
        if ticket in self._tickets:
            self._tickets.remove(ticket)

    def watch(self, watcher: Watcher) -> None:
        """Call ``watcher`` whenever the position moves: under the queue's lock, so be brief."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        """Call it no more."""
        self._watchers.remove(watcher)

    @property
    def waiting(self) -> int:
        """How many publishers are blocked until this watermark moves."""
        return len(self._tickets)

    def awaited(self, limit: int) -> int:
        """The furthest position that a publisher waits for, of those up to ``limit``; 0 if none."""
        index = bisect_right(self._tickets, limit, key=lambda each: each.offset)
        return self._tickets[index - 1].offset if index else 0

    def lose(self, first: int, end: int) -> None:
        """Note that these events were dropped; their publisher is told so in its turn."""
        self.lost.add(max(first, self.position), end)

    def advance(self, position: int) -> list[Notice]:
        """Move forward; wakes waiting publishers and returns what followers have to hear."""
        if position <= self.position:
            return []
        self.position = position
        self._wake(position)
        for watcher in self._watchers:
            watcher(position)
        notices = self._collect(position)
        self.lost.drop_below(position)
        return notices

    def _wake(self, position: int) -> None:
        self.served = bisect_right(self._tickets, position, key=lambda each: each.offset)
        first = None
        for ticket in reversed(self._tickets[: self.served]):
            ticket.lost = bool(self.lost) and self.lost.overlap(ticket.first, ticket.offset) > 0
            first = ticket.link(first)
        del self._tickets[: self.served]
        if first is not None:
            first.wake()

    def _collect(self, position: int) -> list[Notice]:
        counts: dict[Follower, list[int]] = {}
        while self._runs and self._runs[0].first < position:
            run = self._runs[0]
            end = min(run.end, position)
            dropped = self.lost.overlap(run.first, end) if self.lost else 0
            tally = counts.setdefault(run.follower, [0, 0, 0])
            tally[0] += end - run.first - dropped
            tally[1] += dropped
            tally[2] = end
            if end == run.end:
                self._runs.popleft()
            else:
                run.first = end
        return [
            Notice(follower, Ack(count, dropped, end, self.level, self.durability))
            for follower, (count, dropped, end) in counts.items()
        ]

    def abandon(self) -> None:
        """Wake every waiting publisher without its event having arrived; forget the followers."""
        self._abandoned = True
        for ticket in self._tickets:
            ticket.wake()
        self._tickets.clear()
        self._runs.clear()


class Dispatcher:
    """Runs ack callbacks on one thread that exists only if somebody wants acks.

    Acks that a follower has not heard yet are added up, so that a slow callback costs memory for
    one ack, however many events pass meanwhile.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._due: dict[Follower, Ack] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def start(self) -> None:
        """Make sure the thread runs, unless it was stopped for good."""
        with self._changed:
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(
                    target=self._run, name=f"turnlane-acks-{self._name}", daemon=True
                )
                self._thread.start()

    def send(self, notices: list[Notice]) -> None:
        """Have followers called back. Never blocks."""
        if not notices:
            return
        with self._changed:
            for follower, ack in notices:
                due = self._due.get(follower)
                self._due[follower] = ack if due is None else _added(due, ack)
            self._changed.notify()

    def stop(self, timeout: float) -> None:
        """Let the callbacks that are due run, then end; one that hangs is left behind.

        From a callback: return at once.
        """
        with self._changed:
            self._stopped = True
            thread = self._thread
            self._changed.notify()
        if thread is not None and not self.is_here():
            thread.join(timeout)

    def is_here(self) -> bool:
        """Whether the caller is a callback."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        while due := self._next():
            for follower, ack in due.items():
                try:
                    follower.callback(ack)
                except BaseException:  # even SystemExit: the acks of others go through here too
                    log.exception("queue %s: an ack callback failed on %s", self._name, ack)

    def _next(self) -> dict[Follower, Ack]:
        """What is due, once there is something; nothing when stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._due or self._stopped)
            due, self._due = self._due, {}
            return due


def _added(one: Ack, other: Ack) -> Ack:
    return Ack(
        one.count + other.count,
        one.dropped + other.dropped,
        max(one.end, other.end),
        other.level,
        other.durability,
    )
