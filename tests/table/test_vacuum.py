"""The vacuum frees the space of deleted rows while the queue is busy."""

from __future__ import annotations

import functools
import time

import pytest

from tests.table.database_fixture import DatabaseFixture, eventually, settle, take
from tests.table.servers import PostgresServer
from turnlane.table import leader
from turnlane.table.leader import VACUUM_AFTER_EVENTS, VACUUM_REST_FACTOR, Vacuum
from turnlane.table.queue_sql import PostgresQueueSql
from turnlane.testing import ManualClock


def test_busy_table_is_vacuumed_repeatedly(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "VACUUM_AFTER_EVENTS", 100)
    with DatabaseFixture(postgres.url, postgres) as db:
        queue = db.queue(ack_timeout="10m")
        done = f"SELECT vacuum_count FROM pg_stat_user_tables WHERE relname = '{queue.name}'"

        def vacuumed(times: int) -> bool:
            return bool(db.execute(done)[0][0] >= times)

        with queue.receive() as receiver:
            for times in (1, 2):
                db.fill(queue, 150)
                settle(receiver, take(receiver, 150))
                eventually(functools.partial(vacuumed, times))


def test_vacuum_starts_after_enough_events_and_a_pause(db: DatabaseFixture) -> None:
    clock = ManualClock()
    with Vacuum(db.dialect, db.queue().definition, clock) as cleaner:
        assert not cleaner.run_once(VACUUM_AFTER_EVENTS - 1)
        needed = db.kind == "postgres"  # the other databases free space by themselves
        assert cleaner.run_once(VACUUM_AFTER_EVENTS) is needed
        cleaner.close()
        assert not cleaner.run_once(2 * VACUUM_AFTER_EVENTS - 1)
        assert cleaner.run_once(2 * VACUUM_AFTER_EVENTS) is needed


class SlowClock(ManualClock):
    """Advances by a second with every read."""

    def monotonic(self) -> float:
        self.advance(1.0)
        return super().monotonic()


def test_long_vacuum_is_followed_by_a_longer_pause(postgres: PostgresServer) -> None:
    clock = SlowClock()
    with (
        DatabaseFixture(postgres.url, postgres) as db,
        Vacuum(db.dialect, db.queue().definition, clock) as cleaner,
    ):
        assert cleaner.run_once(VACUUM_AFTER_EVENTS)
        cleaner.close()
        assert not any(
            cleaner.run_once(2 * VACUUM_AFTER_EVENTS) for _ in range(VACUUM_REST_FACTOR - 1)
        )
        assert cleaner.run_once(2 * VACUUM_AFTER_EVENTS)


def test_failed_vacuum_is_logged_and_harmless(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    with DatabaseFixture(postgres.url, postgres) as db:
        queue = db.queue()
        db.database.sql(f"DROP QUEUE {queue.name}")
        with Vacuum(db.dialect, queue.definition, ManualClock()) as cleaner:
            assert cleaner.run_once(VACUUM_AFTER_EVENTS)
            eventually(lambda: "table.vacuum_failed" in caplog.text)


def test_close_does_not_wait_for_the_end_of_a_vacuum(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DatabaseFixture(postgres.url, postgres) as db:
        queue = db.queue()
        slow = (f'SELECT pg_sleep(60) AS "{queue.name}"',)
        monkeypatch.setattr(PostgresQueueSql, "vacuum", lambda *_: slow)
        running = f"SELECT 1 FROM pg_stat_activity WHERE query LIKE '%sleep(60) AS \"{queue.name}%'"
        cleaner = Vacuum(db.dialect, queue.definition, ManualClock())
        assert cleaner.run_once(VACUUM_AFTER_EVENTS)
        eventually(lambda: len(db.execute(f"{running} AND state = 'active'")) > 1)
        began = time.monotonic()
        cleaner.close()
        assert time.monotonic() - began < 30
    assert "table.vacuum_failed" not in caplog.text
