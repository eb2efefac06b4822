"""What takes part in the comparison of queue tables, and turnlane's own."""

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
"""Events to a transaction, where a user would batch by hand."""


QUEUE = "CREATE QUEUE {} (user_id BIGINT, payload VARCHAR(256)) SHARD BY (user_id)"


def row(at: int) -> dict[str, Any]:
    """An event of some 100 bytes."""
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
        """When the last one was acked, or stored if that is said; closing takes its own time."""

    @property
    def reached(self) -> bool:
        """Whether that was all."""
        return self._stopped.is_set()

    def add(self, count: int) -> None:
        """So many more."""
        with self._lock:
            self.count += count
            self._tell(self.count)
            if self.count >= self._expected and not self.reached:
                self.ended_at = time.perf_counter()
                self._stopped.set()

    def stored(self) -> None:
        """The acks are stored only now."""
        self.ended_at = time.perf_counter()

    def stop(self) -> None:
        """Let it be all."""
        self._stopped.set()

    def wait(self, seconds: float) -> bool:
        """Wait until that was all, or the time is over."""
        return self._stopped.wait(seconds)


class TableContestant(Closeable, abc.ABC):
    """A queue in a database. Several may be open for the same one, in several processes."""

    label: ClassVar[str]
    events: ClassVar[int]
    """How many events make a measurement of about a second."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abc.abstractmethod
    def reset(self) -> None:
        """Make its tables, empty."""

    @abc.abstractmethod
    def one(self, count: int) -> None:
        """Enqueue events one by one, each committed."""

    @abc.abstractmethod
    def batch(self, first: int, count: int) -> None:
        """Enqueue events in one transaction, the fastest way it has."""

    @abc.abstractmethod
    def consume(self, receivers: int, done: Done) -> None:
        """Receive events and settle them until ``done`` says that it is enough."""


class Turnlane(TableContestant):
    """Ours, on whatever database the address names."""

    label = "turnlane"
    events = 40_000
    name: ClassVar[str] = "bench"
    """Of the queue."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._database = table.connect(url)
        self._connection = self._database.connect()
        self.statements = 0
        """Sent by the manager while it fired for the last :meth:`consume`."""

    @cached_property
    def queue(self) -> table.TableQueue:
        """The queue; :meth:`reset` has made it."""
        return self._database.queue(self.name)

    def reset(self) -> None:
        self._database.sql(f"DROP QUEUE IF EXISTS {self.name}")
        self._database.sql(QUEUE.format(self.name))

    def one(self, count: int) -> None:
        for at in range(count):
            self.queue.enqueue(self._connection, row(at))

    def batch(self, first: int, count: int) -> None:
        with self._database.dialect.transaction(self._connection):
            self.queue.enqueue_many(self._connection, map(row, range(first, first + count)))

    def consume(self, receivers: int, done: Done) -> None:
        with self._database.queue(self.name) as queue:
            received(queue.receive, receivers, done)
            self.statements = queue.manager().store.session.statements

    def close(self) -> None:
        self._connection.close()
        self._database.close()


def received(receive: Callable[[str, int], table.Receiver], receivers: int, done: Done) -> None:
    """Receive and ack with several receivers, a thread for each, until it is enough and stored."""
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
