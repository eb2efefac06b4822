"""Settling: acks that are taken and not stored yet."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable

from turnlane.table.event import TableEvent
from turnlane.table.store import Store

FULL = 1_000
"""As many acks do not wait for more."""

DELAY = 0.05
"""Seconds for which an ack waits for others, unless somebody waits for it."""


class Waiter:
    """Somebody who waits until all acks before him are stored."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self._error: Exception | None = None

    def tell(self, error: Exception | None = None) -> None:
        """They are stored, or never will be."""
        self._error = error
        self._told.set()

    def wait(self, timeout: float | None) -> bool:
        """Wait; false if the time is over. Raises what :meth:`tell` was given."""
        if not self._told.wait(timeout):
            return False
        if self._error is not None:
            raise self._error
        return True


class Settling:
    """Acks by event id. Kept until the database has them, however long it is away."""

    def __init__(self) -> None:
        self._acks: dict[int, str | None] = {}
        """With their event groups."""
        self._doubtful: set[int] = set()
        """Acks of events that nobody here remembers to have fired."""
        self._since: float | None = None
        self._waiters: list[Waiter] = []

    def __contains__(self, event_id: int) -> bool:
        return event_id in self._acks or event_id in self._doubtful

    def __len__(self) -> int:
        return len(self._acks) + len(self._doubtful)

    @property
    def ids(self) -> Container[int]:
        """Of all events whose acks wait."""
        return self._acks.keys() | self._doubtful if self._doubtful else self._acks.keys()

    def ack(self, events: Iterable[TableEvent], now: float) -> None:
        """Take the acks of events."""
        self._acks.update({event.id: event.group for event in events})
        if self._acks and self._since is None:
            self._since = now

    def ack_unknown(self, event_ids: Iterable[int], now: float) -> None:
        """Take acks of events that may have been fired by an earlier manager, or never."""
        self._doubtful.update(event_ids)
        if self._doubtful and self._since is None:
            self._since = now

    def wait(self, waiter: Waiter) -> None:
        """Tell ``waiter`` when everything taken so far is stored."""
        self._waiters.append(waiter)

    def next_time(self) -> float | None:
        """When to store what there is; monotonic."""
        if self._waiters or len(self) >= FULL:
            return float("-inf")
        return None if self._since is None else self._since + DELAY

    def store(self, store: Store, token: int) -> int:
        """Store the acks; how many. Whatever it raises, they are kept."""
        count = len(self)
        if self._acks:
            groups = {group for group in self._acks.values() if group is not None}
            store.ack(token, list(self._acks), groups)
            self._acks.clear()
        if self._doubtful:
            store.late_ack(token, list(self._doubtful))
            self._doubtful.clear()
        self._since = None
        self._tell(None)
        return count

    def abandon(self, error: Exception) -> None:
        """The acks will not be stored: their events fire again elsewhere."""
        self._acks.clear()
        self._doubtful.clear()
        self._since = None
        self._tell(error)

    def _tell(self, error: Exception | None) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.tell(error)
