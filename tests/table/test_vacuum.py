"""Room of rows that are gone: given to new ones, while the queue is busy."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import pytest
from turnlane.table.sql.postgres import Postgres

from tests.table.servers import PostgresServer
from tests.table.site import Site, eventually, settle, take
from turnlane.table import leader
from turnlane.table.definition import Definition
from turnlane.table.leader import VACUUM_AFTER_EVENTS, VACUUM_REST_FACTOR, Vacuum
from turnlane.testing import ManualClock


def test_a_busy_table_is_vacuumed_again_and_again(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "VACUUM_AFTER_EVENTS", 100)
    with Site(postgres.url, postgres) as site:
        queue = site.queue(ack_timeout="10m")
        done = f"SELECT vacuum_count FROM pg_stat_user_tables WHERE relname = '{queue.name}'"

        def vacuumed(times: int) -> bool:
            return bool(site.execute(done)[0][0] >= times)

        with queue.receive() as receiver:
            for times in (1, 2):
                site.fill(queue, 150)
                settle(receiver, take(receiver, 150))
                eventually(functools.partial(vacuumed, times))


def test_a_vacuum_comes_after_enough_events_and_a_rest(site: Site) -> None:
    clock = ManualClock()
    with Vacuum(site.dialect, site.queue().definition, clock) as cleaner:
        assert not cleaner.run_once(VACUUM_AFTER_EVENTS - 1)
        needed = site.kind == "postgres"  # the others give room back by themselves
        assert cleaner.run_once(VACUUM_AFTER_EVENTS) is needed
        cleaner.close()
        assert not cleaner.run_once(2 * VACUUM_AFTER_EVENTS - 1)
        assert cleaner.run_once(2 * VACUUM_AFTER_EVENTS) is needed


class SlowClock(ManualClock):
    """A second goes by with every look."""

    def monotonic(self) -> float:
        self.advance(1.0)
        return super().monotonic()


def test_a_long_vacuum_is_followed_by_a_longer_rest(postgres: PostgresServer) -> None:
    clock = SlowClock()
    with (
        Site(postgres.url, postgres) as site,
        Vacuum(site.dialect, site.queue().definition, clock) as cleaner,
    ):
        assert cleaner.run_once(VACUUM_AFTER_EVENTS)
        cleaner.close()
        assert not any(
            cleaner.run_once(2 * VACUUM_AFTER_EVENTS) for _ in range(VACUUM_REST_FACTOR - 1)
        )
        assert cleaner.run_once(2 * VACUUM_AFTER_EVENTS)


def test_a_vacuum_that_fails_is_told_and_no_harm(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    with Site(postgres.url, postgres) as site:
        queue = site.queue()
        site.database.sql(f"DROP QUEUE {queue.name}")
        with Vacuum(site.dialect, queue.definition, ManualClock()) as cleaner:
            assert cleaner.run_once(VACUUM_AFTER_EVENTS)
            eventually(lambda: "no vacuum" in caplog.text)


class Slow(Postgres):
    """A database whose tables take a minute to vacuum."""

    def vacuum(self, definition: Definition) -> Sequence[str]:
        return (f"SELECT pg_sleep(60) AS {self.identifier(definition.name)}",)


def test_nobody_waits_for_the_end_of_a_vacuum(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    with Site(postgres.url, postgres) as site:
        queue = site.queue()
        running = f"SELECT 1 FROM pg_stat_activity WHERE query LIKE '%sleep(60) AS \"{queue.name}%'"
        cleaner = Vacuum(Slow(postgres.url), queue.definition, ManualClock())
        assert cleaner.run_once(VACUUM_AFTER_EVENTS)
        eventually(lambda: len(site.execute(f"{running} AND state = 'active'")) > 1)
        began = time.monotonic()
        cleaner.close()
        assert time.monotonic() - began < 30
    assert "no vacuum" not in caplog.text
