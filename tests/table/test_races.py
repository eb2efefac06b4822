"""Rows that others ack, lock or edit between two reads of a manager."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.table.database_fixture import (
    TIMEOUT,
    DatabaseFixture,
    eventually,
    payloads,
    settle,
    step_until,
    take,
)
from tests.table.servers import PostgresServer
from turnlane.databases import ErrorKind, Row, load_dialect
from turnlane.errors import LeadLost, NameTaken
from turnlane.node.tables import TableStream
from turnlane.table.manager import Manager
from turnlane.table.queue import EventSelection, TableQueue
from turnlane.table.receiver import Receiver, TableEvent
from turnlane.table.shards import KeyRange, keyspace_id
from turnlane.table.store import TableStore

SOON = 20.0
"""Seconds: long on a busy machine, short compared with the ack timeout of these tests."""


def _ack_by_sql(db: DatabaseFixture, queue: TableQueue, event_id: int) -> None:
    db.execute(f"UPDATE {queue.name} SET state = 'acked' WHERE event_id = {event_id}")


def _read_rows(db: DatabaseFixture, queue: TableQueue) -> list[Row]:
    return db.execute(f"SELECT state, attempts FROM {queue.name} ORDER BY event_id")


def _attach_receiver(manager: Manager) -> Receiver:
    receiver = Receiver()
    manager.attach(receiver)
    return receiver


def _receive_by_hand(manager: Manager, receiver: Receiver) -> list[TableEvent]:
    """Step the manager by hand until events come; returns them."""
    received: list[TableEvent] = []

    def has_come() -> bool:
        received.extend(receiver.take(timeout=0))
        return bool(received)

    step_until(manager, has_come, SOON)
    return received


# ── events that wait for a receiver ──────────────────────────────────────────────────────────────


def test_event_acked_by_sql_while_it_waits_is_not_sent(db: DatabaseFixture) -> None:
    queue = db.queue(ack_timeout="60s")
    db.fill(queue, 1)
    with db.manager(queue) as manager:
        receiver = _attach_receiver(manager)
        step_until(manager, lambda: manager.in_flight == 1)
        _ack_by_sql(db, queue, 1)
        step_until(manager, lambda: manager.in_flight == 0)
        assert receiver.take(timeout=0) == []


class AckedAfterReadStore(TableStore):
    """A store whose rows are acked by plain SQL right after they were read."""

    db: DatabaseFixture

    def read_due(self, *arguments: Any) -> list[Row]:
        rows = super().read_due(*arguments)
        if rows:
            self.db.execute(f"UPDATE {self.definition.name} SET state = 'acked'")
        return rows


def test_event_of_an_earlier_leader_is_checked_before_it_fires(db: DatabaseFixture) -> None:
    queue = db.queue()
    db.fill(queue, 1)
    db.execute(f"UPDATE {queue.name} SET attempts = 1")  # a receiver has it, and may ack it
    store = AckedAfterReadStore(db.dialect, queue.definition)
    store.db = db
    with db.manager(queue, store) as manager:
        receiver = _attach_receiver(manager)
        step_until(manager, lambda: queue.counts()["acked"] == 1)
        assert manager.counts.fired == 0
        assert receiver.take(timeout=0) == []


def test_event_not_taken_does_not_count_as_an_attempt(db: DatabaseFixture) -> None:
    queue = db.queue(ack_timeout="200ms", max_attempts=1)
    db.fill(queue, 1)
    with queue.receive() as receiver:
        manager = queue.manager()
        eventually(lambda: manager.counts.fired == 1 and manager.in_flight == 0, SOON)
        (event,) = take(receiver, 1)
        assert event.attempts == 0
    eventually(lambda: queue.counts()["dead"] == 1)  # it was received once, and not acked


def test_event_not_taken_goes_to_another_receiver_at_once(db: DatabaseFixture) -> None:
    queue = db.queue(ack_timeout="60s", ordering="key")
    with db.transaction() as connection:
        for payload in ("first", "second"):
            queue.enqueue(connection, {"user_id": 1, "payload": payload})
    with db.manager(queue) as manager:
        receiver = _attach_receiver(manager)
        step_until(manager, lambda: _read_rows(db, queue)[0] == ("fired", 1))
        receiver.close()
        other = _attach_receiver(manager)
        received = _receive_by_hand(manager, other)
        assert payloads(received) == ["first"]
        assert received[0].attempts == 0


def test_event_not_taken_is_unmarked_when_the_manager_closes(db: DatabaseFixture) -> None:
    queue = db.queue(ack_timeout="60s")
    db.fill(queue, 1)
    with db.manager(queue) as manager:
        _attach_receiver(manager)
        step_until(manager, lambda: _read_rows(db, queue) == [("fired", 1)])
    assert _read_rows(db, queue) == [("to_be_fired", 0)]


# ── acks that are lost ───────────────────────────────────────────────────────────────────────────


def test_every_thread_hears_of_lost_acks(db: DatabaseFixture) -> None:
    queue = db.queue(lease="60s", ack_timeout="60s")
    db.fill(queue, 3)
    with queue.receive() as receiver, ThreadPoolExecutor(1) as other:
        stored, lost, both = take(receiver, 3)
        settle(receiver, [stored])
        assert other.submit(receiver.flush, TIMEOUT).result()
        _take_lease_away(db, queue)
        receiver.ack([lost, both])
        eventually(lambda: queue.manager().lost_acks > 0)
        with pytest.raises(LeadLost):
            receiver.flush(TIMEOUT)
        with pytest.raises(LeadLost):
            other.submit(receiver.flush, TIMEOUT).result()
        assert receiver.flush(TIMEOUT)  # this thread knows it already
        assert receiver.flush(TIMEOUT, [stored])
        for _ in range(2):
            with pytest.raises(LeadLost):
                receiver.flush(TIMEOUT, [stored, lost])


def test_lost_ack_over_http_is_refused_every_time(db: DatabaseFixture) -> None:
    queue = db.queue(lease="60s", ack_timeout="60s")
    db.fill(queue, 2)
    with TableStream(queue.name, queue.receive(), queue.definition) as stream:
        sent = 0
        while sent < 2:
            sent += sum(block.num_rows for _, block in stream.take(SOON))
        assert stream.store([(0, 1)], TIMEOUT)
        _take_lease_away(db, queue)
        for _ in range(2):
            with pytest.raises(LeadLost):
                stream.store([(1, 2)], TIMEOUT)
        assert stream.store([(0, 1)], TIMEOUT)


def _take_lease_away(db: DatabaseFixture, queue: TableQueue) -> None:
    taken = "SET token = token + 1, expires_at = 0"
    db.execute(f"UPDATE turnlane_lease {taken} WHERE queue = '{queue.name}'")


# ── order ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["ack", "sql", "cancel"])
def test_settled_retry_releases_its_key(db: DatabaseFixture, how: str) -> None:
    queue = db.queue(ordering="key", window="1s", ack_timeout="2s")
    with db.transaction() as connection:
        for payload in ("first", "second"):
            queue.enqueue(connection, {"user_id": 1, "payload": payload})
    with queue.receive() as receiver:
        (first,) = take(receiver, 1)
        first.nack(delay=3600)  # far after the window
        eventually(lambda: _read_rows(db, queue)[0] == ("to_be_fired", 1))
        if how == "ack":
            first.ack()
        elif how == "sql":
            _ack_by_sql(db, queue, first.id)
        else:
            queue.cancel([first.id])
        assert payloads(take(receiver, 1, SOON)) == ["second"]


class LateClockStore(TableStore):
    """A store whose clock is a little late: the first mark comes too early."""

    early = True

    def mark_fired(self, token: int, ids: Sequence[int]) -> set[int]:
        if self.early:
            self.early = False
            return set()
        return super().mark_fired(token, ids)


def test_event_not_quite_due_keeps_its_key(db: DatabaseFixture) -> None:
    queue = db.queue(ordering="key")
    with db.transaction() as connection:
        for payload in ("first", "second"):
            queue.enqueue(connection, {"user_id": 1, "payload": payload}, delay=1.5)
    store = LateClockStore(db.dialect, queue.definition)
    with db.manager(queue, store) as manager:
        receiver = _attach_receiver(manager)
        received = _receive_by_hand(manager, receiver)
        assert not store.early
        assert payloads(received) == ["first"]


# ── rows that others hold, and old ones ──────────────────────────────────────────────────────────


def test_ack_in_an_open_transaction_blocks_no_other_event(server_db: DatabaseFixture) -> None:
    db = server_db
    queue = db.queue(ack_timeout="2s")
    db.fill(queue, 2)
    with queue.receive() as receiver:
        locked, other = take(receiver, 2)
        with contextlib.suppress(ZeroDivisionError), db.transaction() as connection:
            assert queue.ack(connection, [locked.id]) == 1
            # The other event is marked, retried, received and acked; new ones too.
            (again,) = take(receiver, 1, SOON)
            assert again.id == other.id
            settle(receiver, [again])
            db.fill(queue, 1)
            settle(receiver, take(receiver, 1, SOON))
            raise ZeroDivisionError
        (back,) = take(receiver, 1, SOON)
        assert back.id == locked.id
        settle(receiver, [back])
    assert queue.counts()["to_be_fired"] == queue.counts()["fired"] == 0


@pytest.mark.parametrize("retention", ["0s", "1h"])
@pytest.mark.parametrize("group", [None, "g"])
def test_locked_row_delays_only_its_own_ack(
    server_db: DatabaseFixture, retention: str, group: str | None
) -> None:
    db = server_db
    queue = db.queue(ack_timeout="60s", retention=retention)
    db.fill(queue, 4, event_group=group)
    with queue.receive(prefetch=2) as first, queue.receive(prefetch=2) as second:
        mine, others = take(first, 2), take(second, 2)
        with db.transaction() as connection:
            # Like a user who changes a column.
            change = f"UPDATE {queue.name} SET payload = 'x' WHERE event_id = {mine[0].id}"
            connection.cursor().execute(change)
            first.ack(mine)
            assert not first.flush(0.5), "an ack was confirmed that is not stored"
            settle(second, others)
            unsettled = f"SELECT event_id FROM {queue.name} WHERE state <> 'acked'"
            eventually(lambda: db.execute(unsettled) == [(mine[0].id,)], SOON)
        assert first.flush(SOON)
        assert db.execute(unsettled) == []


def test_last_ack_of_a_group_fires_the_waiting_event(
    db: DatabaseFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs no sweep and no round of the collector."""
    monkeypatch.setattr("turnlane.table.fetcher.SWEEP_SECONDS", 600.0)
    monkeypatch.setattr("turnlane.table.leader.COLLECT_SECONDS", 600.0)
    queue = db.queue(ack_timeout="30m", window="1h")
    with queue.receive() as receiver:
        db.fill(queue, 1)
        settle(receiver, take(receiver, 1))  # the first sweep is over
        with db.transaction() as connection:
            for _ in range(2):
                queue.enqueue(connection, {"payload": "member"}, group="g")
            queue.enqueue(connection, {"payload": "last"}, after_group="g")
        for event in take(receiver, 2):
            settle(receiver, [event])
        assert payloads(take(receiver, 1, SOON)) == ["last"]
        with db.transaction() as connection:  # a group without members
            queue.enqueue(connection, {"payload": "alone"}, after_group="h")
        assert payloads(take(receiver, 1, SOON)) == ["alone"]


@pytest.mark.parametrize("count", [1, 5_000])
def test_events_of_a_long_transaction_fire_within_seconds(
    server_db: DatabaseFixture, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its events were due an hour ago, and their ids are far below the highest one."""
    db = server_db
    monkeypatch.setattr("turnlane.table.fetcher.STALE_AFTER", 0.0)
    queue = db.queue(retention="1h")
    an_hour_ago = db.now() - 3600 * 10**9
    with queue.receive() as receiver:
        db.fill(queue, 1)  # now the manager leads, and higher ids can be missing
        settle(receiver, take(receiver, 1))
        with db.transaction() as connection:
            slow = [{"user_id": at, "fire_at": an_hour_ago} for at in range(count)]
            queue.enqueue_many(connection, slow)
            for _ in range(3):
                db.fill(queue, 1)
                settle(receiver, take(receiver, 1))
            queue.enqueue(connection, {"user_id": -1, "fire_at": an_hour_ago})
            stale_gaps = queue.manager()._term.finder._gaps.stale  # type: ignore[union-attr]
            eventually(lambda: bool(stale_gaps))
        received = 0
        while received <= count:
            events = receiver.take(timeout=SOON)
            assert events, f"{received} events came"
            settle(receiver, events)
            received += len(events)


def test_rolled_back_ids_are_read_only_while_they_may_appear(
    server_db: DatabaseFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = server_db
    monkeypatch.setattr("turnlane.table.fetcher.STALE_AFTER", 0.0)
    monkeypatch.setattr("turnlane.table.fetcher.STALE_POLL", 0.05)
    queue = db.queue()
    with queue.receive() as receiver:
        db.fill(queue, 1)
        settle(receiver, take(receiver, 1))
        with contextlib.suppress(ZeroDivisionError), db.transaction() as connection:
            queue.enqueue(connection, {"payload": "never"})
            raise ZeroDivisionError
        db.fill(queue, 1)
        settle(receiver, take(receiver, 1))
        stale_gaps = queue.manager()._term.finder._gaps.stale  # type: ignore[union-attr]
        eventually(lambda: bool(stale_gaps.ids) or db.dialect.snapshot_query is not None, SOON)
        # MySQL does not say which transactions are open: there the last ids stay.
        eventually(lambda: not stale_gaps.ids or db.dialect.snapshot_query is None, SOON)


def test_transaction_older_than_the_lease_is_not_missed(
    postgres: PostgresServer,
) -> None:
    with DatabaseFixture(postgres.url, postgres) as db:
        queue = db.queue(retention="1h")
        with db.transaction() as connection:
            row = {"payload": "slow", "fire_at": db.now() - 3600 * 10**9}
            queue.enqueue_many(connection, [row])
            db.fill(queue, 1)  # the manager begins above it
            receiver = queue.receive()
            settle(receiver, take(receiver, 1))
        assert payloads(take(receiver, 1, SOON)) == ["slow"]
        receiver.close()


def test_old_events_reach_a_receiver_that_covers_them_later(db: DatabaseFixture) -> None:
    queue = db.queue()
    db.fill(queue, 20, fire_at=db.now() - 3600 * 10**9)
    with queue.receive("-80") as receiver:
        lower = take(receiver, _count_in_range(queue, "-80"))
        settle(receiver, lower)
        with queue.receive("80-") as other:
            settle(other, take(other, 20 - len(lower), SOON))


def test_full_receiver_does_not_delay_other_key_ranges(db: DatabaseFixture) -> None:
    queue = db.queue(ack_timeout="60s")
    db.fill(queue, 400)
    upper = _count_in_range(queue, "80-")
    with queue.receive("-80", prefetch=1) as full, queue.receive("80-", prefetch=5) as receiver:
        take(full, 1)  # it is never acked
        for _ in range(upper):
            settle(receiver, take(receiver, 1, SOON))


def _count_in_range(queue: TableQueue, key_range: str) -> int:
    return len(queue.scan.read_ids(EventSelection(key_range=KeyRange.parse(key_range))))


# ── events through the manager ───────────────────────────────────────────────────────────────────


class LeaseLostAfterInsertStore(TableStore):
    """A store whose lease is taken by another manager right after an insert."""

    def insert_fired(self, token: int, columns: Sequence[str], rows: Sequence[Row]) -> list[int]:
        ids = super().insert_fired(token, columns, rows)
        self.lost = True
        return ids

    lost = False

    def renew_lease(self, token: int, seconds: float) -> int:
        if self.lost:
            self.lost = False
            raise LeadLost("another manager leads")
        return super().renew_lease(token, seconds)


def test_event_stored_before_the_lease_was_lost_is_not_stored_twice(
    db: DatabaseFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = db.queue()
    store = LeaseLostAfterInsertStore(db.dialect, queue.definition)
    with db.manager(queue, store) as manager:
        _attach_receiver(manager)
        step_until(manager, lambda: manager.can_fire and manager.receivers == 1)
        monkeypatch.setattr("turnlane.table.lease.WRITE_PROOF_SECONDS", 0.0)
        assert not manager.enqueue([{"payload": "once"}], timeout=0)
        step_until(manager, lambda: manager.counts.lost_leads == 1)
        monkeypatch.undo()
        step_until(manager, lambda: manager.can_fire)
        assert sum(queue.counts().values()) == 1


def test_manager_of_a_recreated_queue_changes_nothing(db: DatabaseFixture) -> None:
    queue = db.queue()
    store = TableStore(db.dialect, queue.definition)
    old = store.acquire_lease("old", 60.0)
    db.database.catalog.drop(queue.name)
    db.database.catalog.create(queue.definition)
    db.fill(queue, 1)
    new = store.acquire_lease("new", 60.0)
    assert old is not None
    assert new is not None
    with pytest.raises(LeadLost):
        store.store_acks(old.token, [1])
    assert queue.counts()["to_be_fired"] == 1
    store.close()


@pytest.mark.parametrize("column", ["fire_at", "priority", "attempts"])
def test_invalid_row_is_refused(db: DatabaseFixture, column: str) -> None:
    queue = db.queue()
    db.fill(queue, 1)
    for statement in (
        f"INSERT INTO {queue.name} (payload, {column}) VALUES ('x', 'soon')",
        f"UPDATE {queue.name} SET {column} = 'soon'",
    ):
        with pytest.raises(db.dialect.error):
            db.execute(statement)
    with queue.receive() as receiver:
        settle(receiver, take(receiver, 1))


UNREADABLE = {
    "sqlite": ("payload TEXT", "payload", "CAST(x'ff' AS TEXT)"),
    "postgres": ("day DATE, moment TIMESTAMP", "day", "'infinity'"),
}
"""Values that a database stores and its driver cannot read: columns, one column, a value."""


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_unreadable_row_does_not_stop_others(db: DatabaseFixture, when: str) -> None:
    if db.kind == "mysql":
        return  # its driver reads every value
    columns, column, value = UNREADABLE[db.kind]
    queue = db.queue(f"user_id BIGINT, {columns}")
    insert = f"INSERT INTO {queue.name} (user_id, {column}) VALUES (%s, {value})"
    good = [{"user_id": at} for at in range(20)]
    with contextlib.ExitStack() as opened:
        receiver = None if when == "before" else opened.enter_context(queue.receive())
        with db.transaction() as connection:
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
        db.execute(f"UPDATE {queue.name} SET {column} = NULL")
        assert queue.retry() == 2
        assert sorted(event["user_id"] for event in take(receiver, 2)) == [100, 101]


def test_unreadable_key_does_not_stop_others(tmp_path: Path) -> None:
    with DatabaseFixture(f"sqlite:///{tmp_path}/queue.db", None) as db:
        queue = db.queue("user_id TEXT")
        with db.transaction() as connection:
            connection.execute(f"INSERT INTO {queue.name} (user_id) VALUES (CAST(x'ff' AS TEXT))")
            queue.enqueue_many(connection, [{"user_id": str(at)} for at in range(20)])
        with queue.receive("-80") as lower, queue.receive("80-") as upper:
            share = sum(KeyRange.parse("-80").contains(keyspace_id(str(at))) for at in range(20))
            take(lower, share, SOON)
            take(upper, 20 - share, SOON)
        assert queue.counts()["dead"] == 1


def test_any_number_of_attempts_is_accepted(db: DatabaseFixture) -> None:
    queue = db.queue(ack_timeout="1s")
    db.fill(queue, 3)
    db.execute(f"UPDATE {queue.name} SET attempts = 2147483647 WHERE event_id = 1")
    db.execute(f"UPDATE {queue.name} SET attempts = -2147483648 WHERE event_id = 2")
    with queue.receive() as receiver:
        events = take(receiver, 3)
        settle(receiver, [event for event in events if event.id != 1])
        eventually(lambda: queue.counts()["dead"] == 1)
        assert queue.manager().counts.lost_leads == 0


def test_forgotten_fired_event_with_any_fire_time_is_collected(db: DatabaseFixture) -> None:
    queue = db.queue(ack_timeout="200ms")
    db.fill(queue, 1)
    db.execute(f"UPDATE {queue.name} SET fire_at = -1, state = 'fired', attempts = 1")
    with queue.receive() as receiver:
        settle(receiver, take(receiver, 1, SOON))


def test_events_that_may_have_killed_the_last_leader_are_marked_first(db: DatabaseFixture) -> None:
    queue = db.queue(window_events=10, ack_timeout="60s")
    store = TableStore(db.dialect, queue.definition)
    assert store.acquire_lease("dies", 0.0) is not None
    store.close()
    db.fill(queue, 40)
    with db.manager(queue) as manager:
        receiver = _attach_receiver(manager)
        received = 0
        while received < 40:
            events = _receive_by_hand(manager, receiver)
            rows = dict(db.execute(f"SELECT event_id, state FROM {queue.name}"))
            assert {rows[event.id] for event in events} == {"fired"}
            receiver.ack(events)
            received += len(events)


def test_waiting_groups_cost_no_statement_each(db: DatabaseFixture) -> None:
    queue = db.queue()
    store = TableStore(db.dialect, queue.definition)
    with db.transaction() as connection:
        for at in range(20):
            queue.enqueue(connection, {"user_id": at}, group=f"g{at}")
            queue.enqueue(connection, {"user_id": at}, after_group=f"g{at}")
    grant = store.acquire_lease("me", 60.0)
    assert grant is not None
    db.execute(f"UPDATE {queue.name} SET state = 'acked' WHERE event_group = 'g7'")
    before = store.session.statements
    assert store.release_groups(grant.token) == 1
    assert store.session.statements - before < 10
    store.close()


def test_refused_insert_raises_a_turnlane_error(db: DatabaseFixture) -> None:
    queue = db.queue()
    with pytest.raises(NameTaken):
        queue.insert([{"payload": "p", "event_name": "once"}] * 2)
    assert queue.counts()["to_be_fired"] == 0


@pytest.mark.parametrize("delay", [None, 1e12, float("inf"), float("nan")])
def test_any_nack_delay_is_accepted(db: DatabaseFixture, delay: float | None) -> None:
    queue = db.queue(retention="1h")
    db.fill(queue, 2)
    with queue.receive() as receiver:
        event, other = take(receiver, 2)
        event.nack(delay, "a\0b\ud800" + "x" * 100_000)
        eventually(lambda: queue.manager().counts.retried == 1, SOON)
        settle(receiver, [other])
        assert queue.manager().counts.lost_leads == 0


def test_value_that_postgresql_refuses_is_not_a_database_failure() -> None:
    dialect = load_dialect("postgresql://nowhere/none")
    assert (
        dialect.classify_error(psycopg.DataError("text cannot contain NUL"))
        is ErrorKind.REFUSED_DATA
    )
    assert (
        dialect.classify_error(psycopg.OperationalError("connection refused"))
        is ErrorKind.UNAVAILABLE
    )
