"""Sharded queues for tests, and a checker of their guarantees."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.table.database_fixture import COLUMNS, TIMEOUT
from turnlane import table
from turnlane.errors import LeadLost
from turnlane.runtime import Closeable
from turnlane.table.queue_sql import load_queue_dialect
from turnlane.table.shard_directory import ShardDirectory

OPTIONS = "lease = 10s, backoff = 10ms, max_backoff = 50ms, window = 1s"


class ShardedFixture(Closeable):
    """One database for each shard, and a queue in all of them."""

    def __init__(
        self, shards: Sequence[tuple[str, str]], options: str = OPTIONS, columns: str = COLUMNS
    ) -> None:
        self.shards = list(shards)
        self.name = f"q_{uuid.uuid4().hex[:8]}"
        self._opened = contextlib.ExitStack()
        self.database = self._opened.enter_context(table.connect_shards(shards))
        self.database.sql(
            f"CREATE QUEUE {self.name} ({columns}) SHARD BY (user_id) WITH ({options})"
        )

    def queue(self) -> table.ShardedQueue:
        """Open the queue again, like another process."""
        database = self._opened.enter_context(table.connect_shards(self.shards))
        return database.queue(self.name)

    def directory(self) -> ShardDirectory:
        """Open the databases without a thread that follows the map."""
        definition = self.database._databases[0].catalog.get_definition(self.name)
        urls = [url for url, _ in self.shards]
        return self._opened.enter_context(ShardDirectory(definition, urls))

    def execute(self, url: str, statement: str) -> list[tuple[Any, ...]]:
        """Run plain SQL in one database."""
        with contextlib.closing(load_queue_dialect(url).connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []

    def rows(self, url: str) -> int:
        """Return how many events one database has."""
        found: int = self.execute(url, f"SELECT COUNT(*) FROM {self.name}")[0][0]
        return found

    def close(self) -> None:
        self._opened.close()


@contextlib.contextmanager
def open_sqlite_shards(
    directory: Path, *ranges: str, options: str = OPTIONS
) -> Iterator[ShardedFixture]:
    """Create shards in SQLite files."""
    with ShardedFixture([(sqlite_url(directory, each), each) for each in ranges], options) as db:
        yield db


def sqlite_url(directory: Path, name: str) -> str:
    return f"sqlite:///{directory}/shard{name}.db"


class ShardDeliveryChecker:
    """Records received events: none may be lost, or come again after a confirmed ack."""

    def __init__(self) -> None:
        self.received: Counter[str] = Counter()
        self.confirmed: set[str] = set()

    def take(self, receiver: table.Receiver, timeout: float = 0.1) -> int:
        """Receive and ack events; a refused ack does not count as confirmed."""
        events = receiver.take(100, timeout=timeout)
        names = [event["payload"] for event in events]
        again = self.confirmed.intersection(names)
        assert not again, f"came again after their acks: {sorted(again)}"
        self.received.update(names)
        receiver.ack(events)
        try:
            stored = receiver.flush(TIMEOUT)
        except LeadLost:
            return len(names)
        assert stored
        self.confirmed.update(names)
        return len(names)

    def drain(self, receiver: table.Receiver, expected: set[str]) -> None:
        """Receive until all events are confirmed, and a while longer."""
        until = time.monotonic() + TIMEOUT
        while not expected <= self.confirmed:
            assert time.monotonic() < until, sorted(expected - self.confirmed)[:20]
            self.take(receiver)
        while self.take(receiver, 0.3):
            assert time.monotonic() < until
        assert set(self.received) == expected
