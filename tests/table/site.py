"""A place to test at: a database, queues in it, and what tests do there."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from tests.table.servers import MariadbServer, PostgresServer
from turnlane import table
from turnlane.runtime import Closing
from turnlane.table.manager import Manager
from turnlane.table.store import TableStore

PATIENCE = 60.0
COLUMNS = "user_id BIGINT, payload VARCHAR(256)"


class Site(Closing):
    """A database and the queues that a test makes there."""

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
        """A new queue; short timeouts unless told otherwise."""
        name = f"q_{uuid.uuid4().hex[:12]}"
        given: dict[str, object] = {"lease": "2s", "backoff": "10ms", "max_backoff": "50ms"}
        given |= options
        listed = ", ".join(f"{key} = {value}" for key, value in given.items())
        shard = " SHARD BY (user_id)" if "user_id" in columns else ""
        self.database.sql(f"CREATE QUEUE {name} ({columns}){shard} WITH ({listed})")
        self._queues.append(name)
        return self.database.queue(name)

    def open_again(self, queue: table.TableQueue) -> table.TableQueue:
        """The same queue, as another process would have it."""
        return self._cleanup.enter_context(table.TableQueue(self.dialect, queue.definition))

    def manager(self, queue: table.TableQueue, store: TableStore | None = None) -> Manager:
        """A manager that is stepped by hand."""
        return Manager(store or TableStore(self.dialect, queue.definition))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        """A connection in a transaction, committed at the end."""
        with (
            contextlib.closing(self.dialect.connect()) as connection,
            self.dialect.transaction(connection),
        ):
            yield connection

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Plain SQL, as any driver would send it."""
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
        """The database's clock."""
        found: int = self.execute(f"SELECT {self.dialect.now}")[0][0]
        return found

    def close(self) -> None:
        self._cleanup.close()
        self.database.close()
        for name in self._queues:
            self.database.sql(f"DROP QUEUE IF EXISTS {name}")
        self.database.catalog.close()


def take(
    receiver: table.Receiver, count: int, patience: float = PATIENCE
) -> list[table.TableEvent]:
    """Exactly so many events."""
    taken: list[table.TableEvent] = []
    until = time.monotonic() + patience
    while len(taken) < count:
        left = until - time.monotonic()
        assert left > 0, f"{len(taken)} of {count} events came"
        taken += receiver.take(count - len(taken), timeout=left)
    return taken


def payloads(events: list[table.TableEvent]) -> list[str]:
    return [event["payload"] for event in events]


def settle(receiver: table.Receiver, events: list[table.TableEvent]) -> None:
    """Ack, and wait until that is stored."""
    receiver.ack(events)
    assert receiver.flush(PATIENCE)


def step_until(manager: Manager, done: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Step a manager by hand until something is so."""
    until = time.monotonic() + patience
    while not done():
        assert time.monotonic() < until
        time.sleep(min(0.02, manager.run_once()))  # the manager's own pause


def eventually(check: Callable[[], bool], patience: float = PATIENCE) -> None:
    until = time.monotonic() + patience
    while not check():
        assert time.monotonic() < until
        time.sleep(0.01)  # what the database holds announces itself to nobody
