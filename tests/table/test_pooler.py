"""Queue tables through PgBouncer in transaction mode: every transaction may meet another server."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.conftest import skip_or_fail
from tests.table.database_fixture import (
    TIMEOUT,
    DatabaseFixture,
    eventually,
    payloads,
    settle,
    take,
)
from tests.table.servers import PgbouncerServer, PostgresServer
from turnlane.runtime import Closeable

POOL_SIZE = 3
"""Fewer connections than clients, so that clients share them."""


@pytest.fixture(scope="module")
def pooler(postgres: PostgresServer) -> Iterator[PgbouncerServer]:
    if not PgbouncerServer.available():
        skip_or_fail("pgbouncer is not installed")
    with tempfile.TemporaryDirectory(prefix="turnlane-pooler-") as directory:
        Path(directory).chmod(0o755)
        server = PgbouncerServer(Path(directory), postgres, pool_size=POOL_SIZE)
        with contextlib.closing(server):
            yield server


@pytest.fixture
def pooled(pooler: PgbouncerServer) -> Iterator[DatabaseFixture]:
    with DatabaseFixture(pooler.url, None) as made:
        yield made


def test_two_managers_behind_a_transaction_pooler_deliver_every_event(
    pooled: DatabaseFixture, caplog: pytest.LogCaptureFixture
) -> None:
    queues = [pooled.queue(), pooled.queue()]
    found: list[set[str]] = []

    def deliver(at: int) -> None:
        seen: set[str] = set()
        with queues[at].receive() as receiver:
            for part in range(10):
                rows = [{"user_id": part, "payload": f"{part}-{each}"} for each in range(20)]
                with pooled.transaction() as connection:
                    queues[at].enqueue_many(connection, rows)
                events = take(receiver, 20)
                seen |= set(payloads(events))
                settle(receiver, events)
        found.append(seen)

    threads = [threading.Thread(target=deliver, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert [len(seen) for seen in found] == [200, 200]
    assert all(not sum(queue.counts().values()) for queue in queues)
    assert "table.database_failed" not in caplog.text
    assert caplog.text.count("database.pooler_found") == 1


def test_event_for_an_idle_manager_behind_a_pooler_is_found_by_polling(
    pooled: DatabaseFixture,
) -> None:
    queue = pooled.queue()
    with queue.receive() as receiver:
        eventually(lambda: queue.manager().can_fire)
        listening = f"SELECT listening FROM turnlane_lease WHERE queue = '{queue.name}'"
        eventually(lambda: pooled.execute(listening) == [(1,)])
        pooled.fill(queue, 1)
        settle(receiver, take(receiver, 1))


def test_settings_of_a_manager_do_not_reach_other_clients_of_a_pooler(
    pooled: DatabaseFixture, pooler: PgbouncerServer
) -> None:
    queue = pooled.queue()
    pooled.fill(queue, 1)
    with queue.receive() as receiver:
        settle(receiver, take(receiver, 1))
        with contextlib.ExitStack() as stack:
            others = [stack.enter_context(psycopg.connect(pooler.url)) for _ in range(POOL_SIZE)]
            for other in others:  # each holds a connection to the server, so they are all
                found = other.execute(
                    "SELECT current_setting('enable_seqscan'), "
                    "(SELECT count(*) FROM pg_listening_channels()), "
                    "(SELECT count(*) FROM pg_prepared_statements)"
                )
                assert found.fetchone() == ("on", 0, 0)


def test_direct_connection_keeps_prepared_statements_and_notifications(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    with DatabaseFixture(postgres.url, postgres) as db:
        changed = threading.Event()
        watch = db.dialect.watch("turnlane_test", "it", changed.set)
        assert isinstance(watch, Closeable)
        with watch, contextlib.closing(db.dialect.connect()) as connection:
            assert connection.prepare_threshold is not None
            assert changed.wait(TIMEOUT)
            changed.clear()
            connection.execute("NOTIFY turnlane_test, 'it'")
            assert changed.wait(TIMEOUT)
    assert "pooler" not in caplog.text
