"""Events and receivers: the users' side of a queue table.

A manager *offers* events to a receiver, which keeps them until a thread takes them. Only a taken
event counts as received: the manager can *revoke* the others at any time, for example when they
wait too long or the lease ends. A receiver gives out no event whose manager may not fire at that
moment. One condition guards the waiting events; the managers' threads and the users' threads meet
only there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from turnlane.databases import Row
from turnlane.errors import LeadLost, QueueClosed
from turnlane.runtime import Closeable
from turnlane.table.shards import WHOLE_KEYSPACE, KeyRange

EVENT_COLUMNS: Final = (
    "event_id",
    "fire_at",
    "priority",
    "attempts",
    "keyspace_id",
    "event_group",
    "after_group",
)
"""The first columns of every row that the manager reads; the user's columns follow."""

DEFAULT_PREFETCH = 1_000
"""Events that a receiver may have without settling them."""

SUSPENDED_POLL = 0.05
"""Seconds between checks whether the manager of waiting events may fire again."""


class AckHandler(Protocol):
    """The source of an event, which takes its ack or nack: a manager, or a stream from a node."""

    positions: Mapping[str, int]
    """The positions of the user's columns in a row, by name."""

    def ack(self, events: list[TableEvent]) -> None:
        """Take acks. Does not wait until they are stored."""

    def nack(self, events: list[TableEvent], delay: float | None, error: str | None) -> None:
        """Take nacks. Does not wait."""


class TableEvent:
    """One event. ``event["payload"]`` is a user's column; settle it with ack() or nack().

    The manager's thread owns the attributes below ``fire_at``; receivers only read the row.
    """

    __slots__ = (
        "_row",
        "ack_handler",
        "ack_lost",
        "fire_at",
        "id",
        "is_marked",
        "read_at",
        "sent_at",
        "slot",
    )

    def __init__(self, row: Row, ack_handler: AckHandler, read_at: float) -> None:
        self._row = row
        self.ack_handler = ack_handler
        """The manager that fired it, or the stream that it came on."""
        self.id: int = row[0]
        """The ``event_id`` of its row."""
        self.fire_at: int = row[1]
        """When it was due: nanoseconds since the epoch, by the database's clock."""
        self.read_at = read_at
        """When its row was last read, in monotonic seconds; -inf: read it again before sending."""
        self.is_marked = False
        """Whether its row has the state ``fired``."""
        self.sent_at = 0.0
        """When it was last sent to a receiver, in monotonic seconds; 0: never."""
        self.ack_lost = False
        """Whether the manager took its ack and cannot store it: the event fires again."""
        self.slot: object = None
        """The slot of the receiver that has it."""

    def __getitem__(self, column: str) -> Any:  # noqa: ANN401 - a user's column of any type
        return self._row[self.ack_handler.positions[column]]

    @property
    def columns(self) -> dict[str, Any]:
        """The user's columns, by name."""
        return {name: self._row[at] for name, at in self.ack_handler.positions.items()}

    @property
    def row(self) -> Row:
        """All values, in the order of :data:`EVENT_COLUMNS` and then of the user's columns."""
        return self._row

    @property
    def priority(self) -> int:
        """Events with a higher priority fire first."""
        priority: int = self._row[2]
        return priority

    @property
    def attempts(self) -> int:
        """How often it was fired before, according to its row."""
        attempts: int = self._row[3]
        return attempts

    @property
    def keyspace_id(self) -> int | None:
        """The position of its key in the key space; SQLite does not compute it."""
        found: int | None = self._row[4]
        return found

    @property
    def group(self) -> str | None:
        """The event group that it is a member of."""
        group: str | None = self._row[5]
        return group

    @property
    def after_group(self) -> str | None:
        """The event group that has to be done before it fires."""
        group: str | None = self._row[6]
        return group

    def copy_for_retry(self, fire_at: int, more_attempts: int) -> TableEvent:
        """Return a copy with another fire time; its row is read again before it is sent."""
        row = (self.id, fire_at, self._row[2], self.attempts + more_attempts, *self._row[4:])
        return TableEvent(row, self.ack_handler, float("-inf"))

    def ack(self) -> None:
        """Settle the event: once the ack is stored, it never fires again. Does not wait."""
        self.ack_handler.ack([self])

    def nack(self, delay: float | None = None, error: str | None = None) -> None:
        """Fire the event again, after ``delay`` seconds or after its backoff. Does not wait."""
        self.ack_handler.nack([self], delay, error)

    def __repr__(self) -> str:
        return f"TableEvent({self.id}, {self.columns!r})"


class ManagerHandle(AckHandler, Protocol):
    """A manager, as its events and its receivers use it."""

    lost_acks: int
    """Acks that it took and cannot store."""

    @property
    def can_fire(self) -> bool:
        """Whether its events may be given out now."""

    def detach(self, receiver: Receiver) -> None:
        """Stop sending events to the receiver."""

    def flush(self, timeout: float | None = None, receiver: Receiver | None = None) -> bool:
        """Wait until all present acks, of one receiver or of all, are stored."""


class LostAckCounter:
    """Remembers for each thread how many lost acks it knows: every thread has to learn of them."""

    def __init__(self, known: int = 0) -> None:
        self._known = known
        self._reported = threading.local()

    def has_new_losses(self, count: int) -> bool:
        """Whether the calling thread knew of fewer than ``count`` lost acks; now it knows."""
        reported: int = getattr(self._reported, "count", self._known)
        self._reported.count = count
        return count > reported


class Receiver(Closeable):
    """Takes events from one manager, or from the managers of several shards. Thread-safe.

    Iterate over it for one event at a time, or call :meth:`take` for several. An event counts as
    received when it is returned; an event that only waits here goes back when its time is over.
    """

    def __init__(
        self, key_range: KeyRange = WHOLE_KEYSPACE, prefetch: int = DEFAULT_PREFETCH
    ) -> None:
        if prefetch < 1:
            raise ValueError("prefetch must be at least 1")
        self.key_range = key_range
        self.prefetch = prefetch
        self._managers: list[ManagerHandle] = []
        self._closed_managers: list[ManagerHandle] = []
        """Kept for :meth:`flush`: they may have lost acks."""
        self._lost_acks: dict[int, LostAckCounter] = {}
        """By the id of the manager."""
        self._waiting: deque[tuple[ManagerHandle, TableEvent]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.take_calls = 0
        """How often events were asked for."""
        self.waiting_calls = 0
        """How many calls wait for events now."""

    @property
    def closed(self) -> bool:
        """Whether it takes no more events."""
        return self._closed

    def take(self, most: int | None = None, timeout: float | None = None) -> list[TableEvent]:
        """Take up to ``most`` events, at least one; an empty list if none came in time.

        Raises ``QueueClosed`` once the receiver is closed.
        """
        limit = self.prefetch if most is None else most
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self.take_calls += 1
            self.waiting_calls += 1
            try:
                while True:
                    if self._closed:
                        raise QueueClosed("the receiver is closed")
                    taken = self._pop(limit)
                    left = None if until is None else until - time.monotonic()
                    if taken or (left is not None and left <= 0):
                        return taken
                    # Managers do not announce when they may fire again: check now and then.
                    poll = SUSPENDED_POLL if self._waiting else None
                    waits = [each for each in (left, poll) if each is not None]
                    self._changed.wait(min(waits, default=None))
            finally:
                self.waiting_calls -= 1

    def __iter__(self) -> Iterator[TableEvent]:
        """Yield events one by one until the receiver is closed."""
        while True:
            try:
                taken = self.take(1)
            except QueueClosed:
                return
            yield from taken

    def ack(self, events: Sequence[TableEvent]) -> None:
        """Settle several events at once; as :meth:`TableEvent.ack`."""
        by_handler: dict[AckHandler, list[TableEvent]] = {}
        for event in events:
            by_handler.setdefault(event.ack_handler, []).append(event)
        for handler, mine in by_handler.items():
            handler.ack(mine)

    def flush(
        self, timeout: float | None = None, events: Iterable[TableEvent] | None = None
    ) -> bool:
        """Wait until all present acks are stored on every shard; false if the time is over.

        Raises ``LeadLost`` if a manager lost the lead before it stored them: their events fire
        again elsewhere. With ``events``, it raises only if an ack of these events was lost, at
        every call. Without, each thread hears of every loss once, no matter which thread acked.
        Threads that share their work should pass ``events``.
        """
        managers = [*self._managers, *self._closed_managers]
        stored = [manager.flush(timeout, self) for manager in managers]
        # A list, not any(): every counter has to be updated for this thread.
        lost = [self._lost_acks[id(each)].has_new_losses(each.lost_acks) for each in managers]
        if any(lost) if events is None else any(event.ack_lost for event in events):
            raise LeadLost("acks were not stored: their events fire again elsewhere")
        return all(stored)

    def close(self) -> None:
        """Take no more events; events that were not settled fire elsewhere."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        for manager in list(self._managers):
            manager.detach(self)

    # ── for managers ─────────────────────────────────────────────────────────────────────────────

    def add_manager(self, manager: ManagerHandle) -> None:
        """Expect events from a manager."""
        self._lost_acks[id(manager)] = LostAckCounter(manager.lost_acks)
        self._managers.append(manager)

    def remove_manager(self, manager: ManagerHandle) -> None:
        """Expect no more events from a manager; closes the receiver after the last one."""
        with self._changed:
            if manager in self._managers:
                self._managers.remove(manager)
                self._closed_managers.append(manager)
            was_last = not self._managers
        if was_last:
            self.close()

    def offer(self, manager: ManagerHandle, events: list[TableEvent]) -> None:
        """Add events that a thread may take."""
        with self._changed:
            self._waiting.extend([(manager, event) for event in events])
            self._changed.notify_all()

    def revoke(self, events: set[TableEvent]) -> set[TableEvent]:
        """Take back the events that no thread has taken; returns these."""
        with self._changed:
            found = {event for _, event in self._waiting if event in events}
            if found:
                self._waiting = deque(pair for pair in self._waiting if pair[1] not in found)
            return found

    def _pop(self, most: int) -> list[TableEvent]:
        """Remove and return events whose manager may fire now."""
        taken: list[TableEvent] = []
        can_fire: dict[int, bool] = {}
        suspended: list[tuple[ManagerHandle, TableEvent]] = []
        while self._waiting and len(taken) < most:
            manager, event = self._waiting.popleft()
            if id(manager) not in can_fire:
                can_fire[id(manager)] = manager.can_fire
            if can_fire[id(manager)]:
                taken.append(event)
            else:
                suspended.append((manager, event))
        self._waiting.extendleft(reversed(suspended))
        return taken
