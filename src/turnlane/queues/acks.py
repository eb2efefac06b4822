"""How far a queue's events have come, and whom to tell.

A :class:`Watermark` stands for one ack level: every event below its position has reached it.
Publishers wait on it or follow it with a callback; both hear in publish order because the
watermark only ever moves forward. Callbacks run on the :class:`Dispatcher`'s own thread, so a slow
one, or one that publishes or closes the queue, holds nobody up.

A watermark belongs to its queue and is only touched under the queue's lock.
"""

from __future__ import annotations

import logging
import threading
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

from turnlane.queues.contract import Ack, AckCallback, AckLevel, Durability
from turnlane.queues.ranges import Ranges

log = logging.getLogger(__name__)


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


@dataclass(slots=True, order=True)
class Ticket:
    """A publisher waiting for the watermark to reach ``offset``."""

    offset: int
    reached: bool = field(default=False, compare=False)
    _signal: threading.Lock = field(default_factory=threading.Lock, compare=False)

    def __post_init__(self) -> None:
        self._signal.acquire()

    def wait(self, timeout: float | None) -> bool:
        """Block until reached or given up; true if reached."""
        self._signal.acquire(timeout=-1 if timeout is None else max(timeout, 0))
        return self.reached

    def settle(self, *, reached: bool) -> None:
        """Wake the publisher."""
        self.reached = reached
        self._signal.release()


class Watermark:
    """The offset below which every event has reached ``level``."""

    def __init__(self, level: AckLevel, durability: Durability, position: int) -> None:
        self.level = level
        self.durability = durability
        self.position = position
        self.lost = Ranges()
        """Offsets at or above the position that will never arrive: dropped after acceptance."""
        self.served = 0
        """How many publishers the last advance has woken."""
        self._runs: deque[_Run] = deque()
        self._tickets: list[Ticket] = []

    def follow(self, follower: Follower, first: int, end: int) -> None:
        """Tell ``follower`` when its events ``first`` to ``end - 1`` get here."""
        runs = self._runs
        if runs and runs[-1].follower is follower and runs[-1].end == first:
            runs[-1].end = end
        else:
            runs.append(_Run(follower, first, end))

    def ticket(self, offset: int) -> Ticket | None:
        """A ticket to wait for everything below ``offset``; ``None`` if that is here already."""
        if offset <= self.position:
            return None
        ticket = Ticket(offset)
        if not self._tickets or self._tickets[-1].offset <= offset:
            self._tickets.append(ticket)
        else:
            insort(self._tickets, ticket)
        return ticket

    @property
    def waiting(self) -> int:
        """How many publishers are blocked until this watermark moves."""
        return len(self._tickets)

    def lose(self, first: int, end: int) -> None:
        """Note that these events were dropped; their publisher is told so in its turn."""
        self.lost.add(max(first, self.position), end)

    def advance(self, position: int) -> list[Notice]:
        """Move forward; wakes waiting publishers and returns what followers have to hear."""
        if position <= self.position:
            return []
        self.position = position
        self._wake(position)
        notices = self._collect(position)
        self.lost.drop_below(position)
        return notices

    def _wake(self, position: int) -> None:
        tickets = self._tickets
        reached = 0
        while reached < len(tickets) and tickets[reached].offset <= position:
            tickets[reached].settle(reached=True)
            reached += 1
        del tickets[:reached]
        self.served = reached

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
        for ticket in self._tickets:
            ticket.settle(reached=False)
        self._tickets.clear()
        self._runs.clear()


class Dispatcher:
    """Runs ack callbacks, in order, on one thread that exists only if somebody wants acks."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._inbox: SimpleQueue[list[Notice] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        """Make sure the thread runs."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"turnlane-acks-{self._name}", daemon=True
                )
                self._thread.start()

    def send(self, notices: list[Notice]) -> None:
        """Queue acks for their callbacks. Never blocks."""
        if notices:
            self._inbox.put(notices)

    def stop(self) -> None:
        """Let the callbacks that are due run, then end. From a callback: return at once."""
        thread = self._thread
        if thread is not None:
            self._inbox.put(None)
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        while (notices := self._inbox.get()) is not None:
            for notice in notices:
                try:
                    notice.follower.callback(notice.ack)
                except Exception:
                    log.exception("queue %s: an ack callback failed on %s", self._name, notice.ack)
