"""What happens to rows between two looks of a manager: acked, locked, edited by others."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from turnlane.table.sql.dialect import Failure, Row
from turnlane.table.sql.postgres import Postgres

from tests.table.servers import PostgresServer
from tests.table.site import PATIENCE, Site, eventually, payloads, settle, step_until, take
from turnlane.errors import LeadLost, NameTaken
from turnlane.node.tables import TableStream
from turnlane.table.event import TableEvent
from turnlane.table.manager import Manager
from turnlane.table.queue import EventSelection, TableQueue
from turnlane.table.receiver import Receiver
from turnlane.table.shards import KeyRange, keyspace_id
from turnlane.table.store import TableStore

SOON = 20.0
"""Seconds: long on a busy machine, short beside the ack timeout of these tests."""


def _acked(site: Site, queue: TableQueue, event_id: int) -> None:
    site.execute(f"UPDATE {queue.name} SET state = 'acked' WHERE event_id = {event_id}")


def _rows(site: Site, queue: TableQueue) -> list[Row]:
    return site.execute(f"SELECT state, attempts FROM {queue.name} ORDER BY event_id")


def _attached(manager: Manager) -> Receiver:
    receiver = Receiver()
    manager.attach(receiver)
    return receiver


def _received(manager: Manager, receiver: Receiver) -> list[TableEvent]:
    """The next events that come while the manager is stepped by hand."""
    seen: list[TableEvent] = []

    def came() -> bool:
        seen.extend(receiver.take(timeout=0))
        return bool(seen)

    step_until(manager, came, SOON)
    return seen


# ── events that wait for a receiver ──────────────────────────────────────────────────────────────


def test_an_event_acked_by_sql_while_it_waits_at_a_receiver_is_not_given_out(site: Site) -> None:
    queue = site.queue(ack_timeout="60s")
    site.fill(queue, 1)
    with site.manager(queue) as manager:
        receiver = _attached(manager)
        step_until(manager, lambda: manager.in_flight == 1)
        _acked(site, queue, 1)
        step_until(manager, lambda: manager.in_flight == 0)
        assert receiver.take(timeout=0) == []


class AckedBehind(TableStore):
    """Somebody acks what was read, before the manager does anything with it."""

    site: Site

    def read_due(self, *arguments: Any) -> list[Row]:
        rows = super().read_due(*arguments)
        if rows:
            self.site.execute(f"UPDATE {self.definition.name} SET state = 'acked'")
        return rows


def test_an_event_of_an_earlier_leader_is_asked_about_before_it_fires(site: Site) -> None:
    queue = site.queue()
    site.fill(queue, 1)
    site.execute(f"UPDATE {queue.name} SET attempts = 1")  # somebody has it, and may ack it
    store = AckedBehind(site.dialect, queue.definition)
    store.site = site
    with site.manager(queue, store) as manager:
        receiver = _attached(manager)
        step_until(manager, lambda: queue.counts()["acked"] == 1)
        assert manager.counts.fired == 0
        assert receiver.take(timeout=0) == []


def test_what_nobody_took_is_not_counted_as_an_attempt(site: Site) -> None:
    queue = site.queue(ack_timeout="200ms", max_attempts=1)
    site.fill(queue, 1)
    with queue.receive() as receiver:
        manager = queue.manager()
        eventually(lambda: manager.counts.fired == 1 and manager.in_flight == 0, SOON)
        (event,) = take(receiver, 1)
        assert event.attempts == 0
    eventually(lambda: queue.counts()["dead"] == 1)  # it was received once, and not acked


def test_what_a_receiver_never_took_goes_to_another_at_once(site: Site) -> None:
    queue = site.queue(ack_timeout="60s", ordering="key")
    with site.transaction() as connection:
        for payload in ("first", "second"):
            queue.enqueue(connection, {"user_id": 1, "payload": payload})
    with site.manager(queue) as manager:
        receiver = _attached(manager)
        step_until(manager, lambda: _rows(site, queue)[0] == ("fired", 1))
        receiver.close()
        other = _attached(manager)
        seen = _received(manager, other)
        assert payloads(seen) == ["first"]
        assert seen[0].attempts == 0


def test_what_nobody_took_is_as_if_never_fired_when_the_manager_closes(site: Site) -> None:
    queue = site.queue(ack_timeout="60s")
    site.fill(queue, 1)
    with site.manager(queue) as manager:
        _attached(manager)
        step_until(manager, lambda: _rows(site, queue) == [("fired", 1)])
    assert _rows(site, queue) == [("to_be_fired", 0)]


# ── acks that are lost ───────────────────────────────────────────────────────────────────────────


def test_every_thread_hears_of_acks_that_were_lost(site: Site) -> None:
    queue = site.queue(lease="60s", ack_timeout="60s")
    site.fill(queue, 3)
    with queue.receive() as receiver, ThreadPoolExecutor(1) as other:
        stored, lost, both = take(receiver, 3)
        settle(receiver, [stored])
        assert other.submit(receiver.flush, PATIENCE).result()
        _take_the_lead_away(site, queue)
        receiver.ack([lost, both])
        eventually(lambda: queue.manager().lost_acks > 0)
        with pytest.raises(LeadLost):
            receiver.flush(PATIENCE)
        with pytest.raises(LeadLost):
            other.submit(receiver.flush, PATIENCE).result()
        assert receiver.flush(PATIENCE)  # it was told
        assert receiver.flush(PATIENCE, [stored])
        for _ in range(2):
            with pytest.raises(LeadLost):
                receiver.flush(PATIENCE, [stored, lost])


def test_an_ack_over_http_that_was_lost_is_refused_however_often_it_comes(site: Site) -> None:
    queue = site.queue(lease="60s", ack_timeout="60s")
    site.fill(queue, 2)
    with TableStream(queue.name, queue.receive(), queue.definition) as stream:
        sent = 0
        while sent < 2:
            sent += sum(block.num_rows for _, block in stream.take(SOON))
        assert stream.store([(0, 1)], PATIENCE)
        _take_the_lead_away(site, queue)
        for _ in range(2):
            with pytest.raises(LeadLost):
                stream.store([(1, 2)], PATIENCE)
        assert stream.store([(0, 1)], PATIENCE)


def _take_the_lead_away(site: Site, queue: TableQueue) -> None:
    taken = "SET token = token + 1, expires_at = 0"
    site.execute(f"UPDATE turnlane_lease {taken} WHERE queue = '{queue.name}'")


# ── order ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["ack", "sql", "cancel"])
def test_a_key_does_not_wait_for_a_retry_that_was_settled(site: Site, how: str) -> None:
    queue = site.queue(ordering="key", window="1s", ack_timeout="2s")
    with site.transaction() as connection:
        for payload in ("first", "second"):
            queue.enqueue(connection, {"user_id": 1, "payload": payload})
    with queue.receive() as receiver:
        (first,) = take(receiver, 1)
        first.nack(delay=3600)  # far beyond the window
        eventually(lambda: _rows(site, queue)[0] == ("to_be_fired", 1))
        if how == "ack":
            first.ack()
        elif how == "sql":
            _acked(site, queue, first.id)
        else:
            queue.cancel([first.id])
        assert payloads(take(receiver, 1, SOON)) == ["second"]


class NotYet(TableStore):
    """Its clock is a little behind what the manager thinks: the first mark comes too early."""

    early = True

    def mark(self, token: int, ids: Sequence[int]) -> set[int]:
        if self.early:
            self.early = False
            return set()
        return super().mark(token, ids)


def test_an_event_that_is_not_quite_due_keeps_its_place(site: Site) -> None:
    queue = site.queue(ordering="key")
    with site.transaction() as connection:
        for payload in ("first", "second"):
            queue.enqueue(connection, {"user_id": 1, "payload": payload}, delay=1.5)
    store = NotYet(site.dialect, queue.definition)
    with site.manager(queue, store) as manager:
        receiver = _attached(manager)
        seen = _received(manager, receiver)
        assert not store.early
        assert payloads(seen) == ["first"]


# ── rows that others hold, and old ones ──────────────────────────────────────────────────────────


def test_an_ack_in_an_open_transaction_holds_nothing_up(served_site: Site) -> None:
    site = served_site
    queue = site.queue(ack_timeout="2s")
    site.fill(queue, 2)
    with queue.receive() as receiver:
        locked, other = take(receiver, 2)
        with contextlib.suppress(ZeroDivisionError), site.transaction() as connection:
            assert queue.ack(connection, [locked.id]) == 1
            # The other one is marked, retried, received and acked, and so are new ones.
            (again,) = take(receiver, 1, SOON)
            assert again.id == other.id
            settle(receiver, [again])
            site.fill(queue, 1)
            settle(receiver, take(receiver, 1, SOON))
            raise ZeroDivisionError
        (back,) = take(receiver, 1, SOON)
        assert back.id == locked.id
        settle(receiver, [back])
    assert queue.counts()["to_be_fired"] == queue.counts()["fired"] == 0


@pytest.mark.parametrize("retention", ["0s", "1h"])
@pytest.mark.parametrize("group", [None, "g"])
def test_a_row_that_is_locked_holds_up_no_ack_but_its_own(
    served_site: Site, retention: str, group: str | None
) -> None:
    site = served_site
    queue = site.queue(ack_timeout="60s", retention=retention)
    site.fill(queue, 4, event_group=group)
    with queue.receive(prefetch=2) as first, queue.receive(prefetch=2) as second:
        mine, others = take(first, 2), take(second, 2)
        with site.transaction() as connection:
            # As a user does who changes a column of his own.
            change = f"UPDATE {queue.name} SET payload = 'x' WHERE event_id = {mine[0].id}"
            connection.cursor().execute(change)
            first.ack(mine)
            assert not first.flush(0.5), "an ack was confirmed that is not stored"
            settle(second, others)
            unsettled = f"SELECT event_id FROM {queue.name} WHERE state <> 'acked'"
            eventually(lambda: site.execute(unsettled) == [(mine[0].id,)], SOON)
        assert first.flush(SOON)
        assert site.execute(unsettled) == []


def test_an_event_fires_with_the_last_ack_of_its_group(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sweep and no round of the collector is needed for it."""
    monkeypatch.setattr("turnlane.table.fetcher.SWEEP_SECONDS", 600.0)
    monkeypatch.setattr("turnlane.table.leader.COLLECT_SECONDS", 600.0)
    queue = site.queue(ack_timeout="30m", window="1h")
    with queue.receive() as receiver:
        site.fill(queue, 1)
        settle(receiver, take(receiver, 1))  # the first sweep is over
        with site.transaction() as connection:
            for _ in range(2):
                queue.enqueue(connection, {"payload": "member"}, group="g")
            queue.enqueue(connection, {"payload": "last"}, after_group="g")
        for event in take(receiver, 2):
            settle(receiver, [event])
        assert payloads(take(receiver, 1, SOON)) == ["last"]
        with site.transaction() as connection:  # of a group that nobody is a member of
            queue.enqueue(connection, {"payload": "alone"}, after_group="h")
        assert payloads(take(receiver, 1, SOON)) == ["alone"]


@pytest.mark.parametrize("count", [1, 5_000])
def test_what_a_long_transaction_committed_fires_within_seconds(
    served_site: Site, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its events were due an hour ago, and their ids are long passed by."""
    site = served_site
    monkeypatch.setattr("turnlane.table.id_gaps.STALE_AFTER", 0.0)
    queue = site.queue(retention="1h")
    an_hour_ago = site.now() - 3600 * 10**9
    with queue.receive() as receiver:
        site.fill(queue, 1)  # so that the manager leads, and misses ids from here on
        settle(receiver, take(receiver, 1))
        with site.transaction() as connection:
            slow = [{"user_id": at, "fire_at": an_hour_ago} for at in range(count)]
            queue.enqueue_many(connection, slow)
            for _ in range(3):
                site.fill(queue, 1)
                settle(receiver, take(receiver, 1))
            queue.enqueue(connection, {"user_id": -1, "fire_at": an_hour_ago})
            lapsed = queue.manager()._reign.reader._gaps.lapsed  # type: ignore[union-attr]
            eventually(lambda: bool(lapsed))
        seen = 0
        while seen <= count:
            events = receiver.take(timeout=SOON)
            assert events, f"{seen} came"
            settle(receiver, events)
            seen += len(events)


def test_what_was_rolled_back_is_asked_for_only_while_it_may_appear(
    served_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = served_site
    monkeypatch.setattr("turnlane.table.id_gaps.STALE_AFTER", 0.0)
    monkeypatch.setattr("turnlane.table.fetcher.STALE_POLL", 0.05)
    queue = site.queue()
    with queue.receive() as receiver:
        site.fill(queue, 1)
        settle(receiver, take(receiver, 1))
        with contextlib.suppress(ZeroDivisionError), site.transaction() as connection:
            queue.enqueue(connection, {"payload": "never"})
            raise ZeroDivisionError
        site.fill(queue, 1)
        settle(receiver, take(receiver, 1))
        lapsed = queue.manager()._reign.reader._gaps.lapsed  # type: ignore[union-attr]
        eventually(lambda: bool(lapsed.ids) or site.dialect.running is not None, SOON)
        # MySQL does not say which transactions are open: there the last ones are kept.
        eventually(lambda: not lapsed.ids or site.dialect.running is None, SOON)


def test_a_transaction_that_is_older_than_the_lead_is_not_overlooked(
    postgres: PostgresServer,
) -> None:
    with Site(postgres.url, postgres) as site:
        queue = site.queue(retention="1h")
        with site.transaction() as connection:
            row = {"payload": "slow", "fire_at": site.now() - 3600 * 10**9}
            queue.enqueue_many(connection, [row])
            site.fill(queue, 1)  # the manager will begin above it
            receiver = queue.receive()
            settle(receiver, take(receiver, 1))
        assert payloads(take(receiver, 1, SOON)) == ["slow"]
        receiver.close()


def test_old_events_that_no_receiver_covered_come_to_one_that_does(site: Site) -> None:
    queue = site.queue()
    site.fill(queue, 20, fire_at=site.now() - 3600 * 10**9)
    with queue.receive("-80") as receiver:
        lower = take(receiver, _share(queue, "-80"))
        settle(receiver, lower)
        with queue.receive("80-") as other:
            settle(other, take(other, 20 - len(lower), SOON))


def test_a_full_receiver_holds_up_no_other_key_range(site: Site) -> None:
    queue = site.queue(ack_timeout="60s")
    site.fill(queue, 400)
    upper = _share(queue, "80-")
    with queue.receive("-80", prefetch=1) as full, queue.receive("80-", prefetch=5) as receiver:
        take(full, 1)  # and it is never acked
        for _ in range(upper):
            settle(receiver, take(receiver, 1, SOON))


def _share(queue: TableQueue, key_range: str) -> int:
    return len(queue.scan.ids(EventSelection(key_range=KeyRange.parse(key_range))))


# ── events through the manager ───────────────────────────────────────────────────────────────────


class LostThen(TableStore):
    """Another manager takes the lead right after events were written."""

    def insert_fired(self, token: int, columns: Sequence[str], rows: Sequence[Row]) -> list[int]:
        ids = super().insert_fired(token, columns, rows)
        self.lost = True
        return ids

    lost = False

    def renew(self, token: int, seconds: float) -> int:
        if self.lost:
            self.lost = False
            raise LeadLost("another manager leads")
        return super().renew(token, seconds)


def test_what_was_stored_before_the_lead_was_lost_is_not_stored_twice(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = site.queue()
    store = LostThen(site.dialect, queue.definition)
    with site.manager(queue, store) as manager:
        _attached(manager)
        step_until(manager, lambda: manager.fires and manager.receivers == 1)
        monkeypatch.setattr("turnlane.table.lease.WRITE_PROOF_SECONDS", 0.0)
        assert not manager.enqueue([{"payload": "once"}], timeout=0)
        step_until(manager, lambda: manager.counts.lost_leads == 1)
        monkeypatch.undo()
        step_until(manager, lambda: manager.fires)
        assert sum(queue.counts().values()) == 1


def test_a_manager_of_a_queue_that_was_made_anew_changes_nothing(site: Site) -> None:
    queue = site.queue()
    store = TableStore(site.dialect, queue.definition)
    old = store.acquire("old", 60.0)
    site.database.catalog.drop(queue.name)
    site.database.catalog.create(queue.definition)
    site.fill(queue, 1)
    new = store.acquire("new", 60.0)
    assert old is not None
    assert new is not None
    with pytest.raises(LeadLost):
        store.ack(old.token, [1])
    assert queue.counts()["to_be_fired"] == 1
    store.close()


@pytest.mark.parametrize("column", ["fire_at", "priority", "attempts"])
def test_a_row_that_is_no_event_is_refused(site: Site, column: str) -> None:
    queue = site.queue()
    site.fill(queue, 1)
    for statement in (
        f"INSERT INTO {queue.name} (payload, {column}) VALUES ('x', 'soon')",
        f"UPDATE {queue.name} SET {column} = 'soon'",
    ):
        with pytest.raises(site.dialect.error):
            site.execute(statement)
    with queue.receive() as receiver:
        settle(receiver, take(receiver, 1))


UNREADABLE = {
    "sqlite": ("payload TEXT", "payload", "CAST(x'ff' AS TEXT)"),
    "postgres": ("day DATE, moment TIMESTAMP", "day", "'infinity'"),
}
"""What a database takes and its driver cannot give: columns, one of them, and a value."""


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_row_that_cannot_be_read_stops_no_other(site: Site, when: str) -> None:
    if site.kind == "mysql":
        return  # its driver reads all that it takes
    columns, column, value = UNREADABLE[site.kind]
    queue = site.queue(f"user_id BIGINT, {columns}")
    insert = f"INSERT INTO {queue.name} (user_id, {column}) VALUES (%s, {value})"
    good = [{"user_id": at} for at in range(20)]
    with contextlib.ExitStack() as opened:
        receiver = None if when == "before" else opened.enter_context(queue.receive())
        with site.transaction() as connection:
            for at in (100, 101):
                queue.enqueue_many(connection, good[10 * (at - 100) :][:10])
                connection.cursor().execute(insert % at)
        receiver = receiver or opened.enter_context(queue.receive())
        events = take(receiver, 20)
        assert sorted(event["user_id"] for event in events) == list(range(20))
        settle(receiver, events)
        assert queue.manager().store.unreadable == 2
        assert queue.manager().counts.lost_leads == 0
        dead = queue.peek("dead")
        assert ["cannot be read" in row["last_error"] for row in dead] == [True, True]
        site.execute(f"UPDATE {queue.name} SET {column} = NULL")
        assert queue.retry() == 2
        assert sorted(event["user_id"] for event in take(receiver, 2)) == [100, 101]


def test_a_key_that_cannot_be_read_stops_no_other(tmp_path: Path) -> None:
    with Site(f"sqlite:///{tmp_path}/queue.db", None) as site:
        queue = site.queue("user_id TEXT")
        with site.transaction() as connection:
            connection.execute(f"INSERT INTO {queue.name} (user_id) VALUES (CAST(x'ff' AS TEXT))")
            queue.enqueue_many(connection, [{"user_id": str(at)} for at in range(20)])
        with queue.receive("-80") as lower, queue.receive("80-") as upper:
            share = sum(KeyRange.parse("-80").contains(keyspace_id(str(at))) for at in range(20))
            take(lower, share, SOON)
            take(upper, 20 - share, SOON)
        assert queue.counts()["dead"] == 1


def test_no_number_of_attempts_stops_the_manager(site: Site) -> None:
    queue = site.queue(ack_timeout="1s")
    site.fill(queue, 3)
    site.execute(f"UPDATE {queue.name} SET attempts = 2147483647 WHERE event_id = 1")
    site.execute(f"UPDATE {queue.name} SET attempts = -2147483648 WHERE event_id = 2")
    with queue.receive() as receiver:
        events = take(receiver, 3)
        settle(receiver, [event for event in events if event.id != 1])
        eventually(lambda: queue.counts()["dead"] == 1)
        assert queue.manager().counts.lost_leads == 0


def test_a_fired_event_of_any_time_is_collected(site: Site) -> None:
    queue = site.queue(ack_timeout="200ms")
    site.fill(queue, 1)
    site.execute(f"UPDATE {queue.name} SET fire_at = -1, state = 'fired', attempts = 1")
    with queue.receive() as receiver:
        settle(receiver, take(receiver, 1, SOON))


def test_every_event_that_the_last_leader_may_have_died_of_is_marked_first(site: Site) -> None:
    queue = site.queue(window_events=10, ack_timeout="60s")
    store = TableStore(site.dialect, queue.definition)
    assert store.acquire("dies", 0.0) is not None
    store.close()
    site.fill(queue, 40)
    with site.manager(queue) as manager:
        receiver = _attached(manager)
        seen = 0
        while seen < 40:
            events = _received(manager, receiver)
            rows = dict(site.execute(f"SELECT event_id, state FROM {queue.name}"))
            assert {rows[event.id] for event in events} == {"fired"}
            receiver.ack(events)
            seen += len(events)


def test_groups_that_wait_cost_no_statement_each(site: Site) -> None:
    queue = site.queue()
    store = TableStore(site.dialect, queue.definition)
    with site.transaction() as connection:
        for at in range(20):
            queue.enqueue(connection, {"user_id": at}, group=f"g{at}")
            queue.enqueue(connection, {"user_id": at}, after_group=f"g{at}")
    grant = store.acquire("me", 60.0)
    assert grant is not None
    site.execute(f"UPDATE {queue.name} SET state = 'acked' WHERE event_group = 'g7'")
    before = store.session.statements
    assert store.release_groups(grant.token) == 1
    assert store.session.statements - before < 10
    store.close()


def test_what_a_database_refuses_is_told_in_our_words(site: Site) -> None:
    queue = site.queue()
    with pytest.raises(NameTaken):
        queue.insert([{"payload": "p", "event_name": "once"}] * 2)
    assert queue.counts()["to_be_fired"] == 0


@pytest.mark.parametrize("delay", [None, 1e12, float("inf"), float("nan")])
def test_no_nack_stops_the_manager(site: Site, delay: float | None) -> None:
    queue = site.queue(retention="1h")
    site.fill(queue, 2)
    with queue.receive() as receiver:
        event, other = take(receiver, 2)
        event.nack(delay, "a\0b\ud800" + "x" * 100_000)
        eventually(lambda: queue.manager().counts.retried == 1, SOON)
        settle(receiver, [other])
        assert queue.manager().counts.lost_leads == 0


def test_a_value_that_postgresql_cannot_have_is_no_failure_of_the_database() -> None:
    dialect = Postgres("postgresql://nowhere/none")
    assert dialect.failure(psycopg.DataError("text cannot contain NUL")) is Failure.OTHER
    assert dialect.failure(psycopg.OperationalError("connection refused")) is Failure.DISCONNECTED
