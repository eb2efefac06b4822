"""A database for tests of queue tables, with the usual actions on it."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from tests.table.servers import MariadbServer, PostgresServer
from turnlane import table
from turnlane.runtime import Closeable
from turnlane.table.manager import Manager
from turnlane.table.store import TableStore

TIMEOUT = 60.0
COLUMNS = "user_id BIGINT, payload VARCHAR(256)"


class DatabaseFixture(Closeable):
    """A database, and the queues that a test creates in it."""

    def __init__(self, url: str, server: PostgresServer | MariadbServer | None) -> None:
        self.database = table.connect(url)
        self.url = url
        self.server = server
        self.dialect = self.database.dialect
        self._queues: list[str] = []
        self._cleanup = contextlib.ExitStack()

    @property
    def kind(self) -> str:
        return self.dialect.name

    def queue(self, columns: str = COLUMNS, **options: object) -> table.TableQueue:
        """Create a queue; with short timeouts, unless the options say otherwise."""
        name = f"q_{uuid.uuid4().hex[:12]}"
        given: dict[str, object] = {"lease": "2s", "backoff": "10ms", "max_backoff": "50ms"}
        given |= options
        listed = ", ".join(f"{key} = {value}" for key, value in given.items())
        shard = " SHARD BY (user_id)" if "user_id" in columns else ""
        self.database.sql(f"CREATE QUEUE {name} ({columns}){shard} WITH ({listed})")
        self._queues.append(name)
        return self.database.queue(name)

    def open_again(self, queue: table.TableQueue) -> table.TableQueue:
        """Open the same queue again, like another process."""
        return self._cleanup.enter_context(table.TableQueue(self.dialect, queue.definition))

    def manager(self, queue: table.TableQueue, store: TableStore | None = None) -> Manager:
        """Create a manager that the test steps by hand."""
        return Manager(store or TableStore(self.dialect, queue.definition))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        """Open a transaction; the end of the block commits it."""
        with (
            contextlib.closing(self.dialect.connect()) as connection,
            self.dialect.transaction(connection),
        ):
            yield connection

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Run plain SQL, like any program."""
        with contextlib.closing(self.dialect.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []

    def fill(self, queue: table.TableQueue, count: int, **columns: object) -> None:
        """Commit events with payloads p0, p1, …"""
        with self.transaction() as connection:
            queue.enqueue_many(
                connection, [{"user_id": at, "payload": f"p{at}", **columns} for at in range(count)]
            )

    def now(self) -> int:
        """Return the database's clock."""
        found: int = self.execute(f"SELECT {self.dialect.now}")[0][0]
        return found

    def close(self) -> None:
        self._cleanup.close()
        self.database.close()
        for name in self._queues:
            self.database.sql(f"DROP QUEUE IF EXISTS {name}")
        self.database.catalog.close()


def take(receiver: table.Receiver, count: int, timeout: float = TIMEOUT) -> list[table.TableEvent]:
    """Take exactly ``count`` events."""
    taken: list[table.TableEvent] = []
    until = time.monotonic() + timeout
    while len(taken) < count:
        left = until - time.monotonic()
        assert left > 0, f"{len(taken)} of {count} events came"
        taken += receiver.take(count - len(taken), timeout=left)
    return taken


def payloads(events: list[table.TableEvent]) -> list[str]:
    return [event["payload"] for event in events]


def settle(receiver: table.Receiver, events: list[table.TableEvent]) -> None:
    """Ack events, and wait until the acks are stored."""
    receiver.ack(events)
    assert receiver.flush(TIMEOUT)


def step_until(manager: Manager, done: Callable[[], bool], timeout: float = TIMEOUT) -> None:
    """Step a manager by hand until a condition is true."""
    until = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < until
        time.sleep(min(0.02, manager.run_once()))  # the pause that the manager asks for


def eventually(check: Callable[[], bool], timeout: float = TIMEOUT) -> None:
    until = time.monotonic() + timeout
    while not check():
        assert time.monotonic() < until
        time.sleep(0.01)  # the database gives no signal
