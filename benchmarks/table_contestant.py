"""The contestants of the comparison of queue tables: their interface, and turnlane."""

from __future__ import annotations

import abc
import contextlib
import threading
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

from turnlane import table
from turnlane.runtime import Closeable

BATCH = 1_000
"""The events of a transaction if the user makes the batches."""


QUEUE = "CREATE QUEUE {} (user_id BIGINT, payload VARCHAR(256)) SHARD BY (user_id)"


def make_row(at: int) -> dict[str, Any]:
    """Return an event of about 100 bytes."""
    return {"user_id": at, "payload": f"{at:0100}"}


class Done:
    """Counts the events that are received and acked. Safe to use from any thread."""

    def __init__(self, expected: float, tell: Callable[[int], None] = lambda _: None) -> None:
        self._expected = expected
        self._tell = tell
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.count = 0
        self.ended_at = 0.0
        """When the last event was acked, or its ack stored; closing does not count."""

    @property
    def reached(self) -> bool:
        """Whether all events are acked, or :meth:`stop` was called."""
        return self._stopped.is_set()

    def add(self, count: int) -> None:
        """Count further events."""
        with self._lock:
            self.count += count
            self._tell(self.count)
            if self.count >= self._expected and not self.reached:
                self.ended_at = time.perf_counter()
                self._stopped.set()

    def stored(self) -> None:
        """Note that the acks are stored now."""
        self.ended_at = time.perf_counter()

    def stop(self) -> None:
        """End the measurement."""
        self._stopped.set()

    def wait(self, seconds: float) -> bool:
        """Wait until the end, at most ``seconds``; returns whether it was reached."""
        return self._stopped.wait(seconds)


class TableContestant(Closeable, abc.ABC):
    """A queue in a database. Several processes may open the same queue."""

    label: ClassVar[str]
    events: ClassVar[int]
    """The events of a measurement; it takes about a second."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abc.abstractmethod
    def reset(self) -> None:
        """Create its tables, or empty them."""

    @abc.abstractmethod
    def one(self, count: int) -> None:
        """Enqueue events one by one, each in a transaction."""

    @abc.abstractmethod
    def batch(self, first: int, count: int) -> None:
        """Enqueue events in one transaction, in the fastest way that the queue has."""

    @abc.abstractmethod
    def consume(self, receivers: int, done: Done) -> None:
        """Receive and settle events until ``done`` is reached."""


class Turnlane(TableContestant):
    """A queue table of turnlane on the database of the address."""

    label = "turnlane"
    events = 40_000
    name: ClassVar[str] = "bench"
    """The name of the queue."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._database = table.connect(url)
        self._connection = self._database.connect()
        self.statements = 0
        """The statements of the manager during the last :meth:`consume`."""

    @cached_property
    def queue(self) -> table.TableQueue:
        """The queue, which :meth:`reset` has created."""
        return self._database.queue(self.name)

    def reset(self) -> None:
        self._database.sql(f"DROP QUEUE IF EXISTS {self.name}")
        self._database.sql(QUEUE.format(self.name))

    def one(self, count: int) -> None:
        for at in range(count):
            self.queue.enqueue(self._connection, make_row(at))

    def batch(self, first: int, count: int) -> None:
        with self._database.dialect.transaction(self._connection):
            self.queue.enqueue_many(self._connection, map(make_row, range(first, first + count)))

    def consume(self, receivers: int, done: Done) -> None:
        with self._database.queue(self.name) as queue:
            receive_all(queue.receive, receivers, done)
            self.statements = queue.manager().store.session.statements

    def close(self) -> None:
        self._connection.close()
        self._database.close()


def receive_all(receive: Callable[[str, int], table.Receiver], receivers: int, done: Done) -> None:
    """Receive and ack with a thread for each receiver, until ``done`` and all acks are stored."""
    with contextlib.ExitStack() as stack:
        prefetch = max(BATCH, 4 * BATCH // receivers)
        opened = [stack.enter_context(receive("-", prefetch)) for _ in range(receivers)]
        threads = [threading.Thread(target=_receive, args=(each, done)) for each in opened]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        opened[0].flush()
        done.stored()


def _receive(receiver: table.Receiver, done: Done) -> None:
    while not done.reached:
        events = receiver.take(timeout=0.05)
        receiver.ack(events)
        done.add(len(events))
