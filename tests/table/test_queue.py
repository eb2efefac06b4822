"""The behaviour of a queue table, on every database."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

from tests.table.database_fixture import (
    TIMEOUT,
    DatabaseFixture,
    eventually,
    payloads,
    settle,
    take,
)
from turnlane.errors import NameTaken, NoSuchQueue, QueueClosed, QueueExists
from turnlane.table import Receiver, TableQueue, dispatcher, leader
from turnlane.table.shards import KeyRange, keyspace_id

NOBODY = {"to_be_fired": 0, "fired": 0, "acked": 0, "dead": 0}


def test_queues_are_created_shown_and_dropped(db: DatabaseFixture) -> None:
    queue = db.queue()
    assert queue.name in db.database.sql("SHOW QUEUES")
    with pytest.raises(QueueExists):
        db.database.sql(f"CREATE QUEUE {queue.name} (a TEXT)")
    db.database.sql(f"CREATE QUEUE IF NOT EXISTS {queue.name} (a TEXT)")
    db.database.sql(f"DROP QUEUE {queue.name}")
    assert queue.name not in db.database.sql("SHOW QUEUES")
    with pytest.raises(NoSuchQueue):
        db.database.sql(f"DROP QUEUE {queue.name}")
    db.database.sql(f"DROP QUEUE IF EXISTS {queue.name}")


@pytest.mark.parametrize("db", ["mariadb"], indirect=True)
def test_table_that_a_failed_create_left_is_dropped(db: DatabaseFixture) -> None:
    """MySQL keeps the table that was created before the failure; others roll it back."""
    queue = db.queue()
    db.database.sql(f"DROP QUEUE {queue.name}")
    db.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON turnlane_queue FOR EACH ROW "
        "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no more queues'"
    )
    try:
        with pytest.raises(db.dialect.error, match="no more queues"):
            db.database.catalog.create(queue.definition)
    finally:
        db.execute("DROP TRIGGER refuse")
    db.database.sql(f"DROP QUEUE {queue.name}")
    with pytest.raises(NoSuchQueue):
        db.database.sql(f"DROP QUEUE {queue.name}")
    db.database.catalog.create(queue.definition)


def test_tables_that_are_no_queue_are_not_dropped(db: DatabaseFixture) -> None:
    """DROP QUEUE takes neither a table of the user, nor a copy of a queue that has events."""
    queue = db.queue()
    db.fill(queue, 1)
    own, copy = f"own_{queue.name}", f"copy_{queue.name}"
    db.execute(f"CREATE TABLE {own} (event_id INT)")
    db.execute(f"CREATE TABLE {copy} AS SELECT * FROM {queue.name}")
    try:
        for name in (own, copy):
            with pytest.raises(NoSuchQueue):
                db.database.sql(f"DROP QUEUE {name}")
            db.database.sql(f"DROP QUEUE IF EXISTS {name}")
        assert db.execute(f"SELECT payload FROM {copy}") == [("p0",)]
        assert db.execute(f"SELECT * FROM {own}") == []
    finally:
        db.execute(f"DROP TABLE IF EXISTS {own}")
        db.execute(f"DROP TABLE IF EXISTS {copy}")


def test_plain_insert_enqueues_an_event(db: DatabaseFixture) -> None:
    queue = db.queue()
    db.execute(f"INSERT INTO {queue.name} (user_id, payload) VALUES (10, 'send this')")
    with queue.receive() as receiver:
        (event,) = take(receiver, 1)
        assert event.columns == {"user_id": 10, "payload": "send this"}
        settle(receiver, [event])
    assert queue.counts() == NOBODY


def test_rolled_back_event_never_fires(db: DatabaseFixture) -> None:
    queue = db.queue()
    with contextlib.suppress(ZeroDivisionError), db.transaction() as connection:
        queue.enqueue(connection, {"payload": "never"})
        queue.enqueue_many(connection, [{"payload": "nor this"}])
        raise ZeroDivisionError
    with db.transaction() as connection:
        queue.enqueue(connection, {"payload": "but this"})
    with queue.receive() as receiver:
        events = take(receiver, 1)
        assert payloads(events) == ["but this"]
        settle(receiver, events)
    assert queue.counts() == NOBODY


def test_event_inserted_while_a_receiver_waits_comes_at_once(db: DatabaseFixture) -> None:
    queue = db.queue()
    with queue.receive() as receiver:
        for at in range(5):
            db.fill(queue, 1)
            (event,) = take(receiver, 1)
            lag = (db.now() - event.fire_at) / 1e9
            assert lag < TIMEOUT / 2, at  # well before the next sweep, even on a slow machine
            event.ack()


def test_no_event_fires_before_its_time(db: DatabaseFixture) -> None:
    queue = db.queue()
    due = datetime.now(UTC) + timedelta(seconds=0.6)
    with db.transaction() as connection:
        queue.enqueue(connection, {"payload": "at"}, at=due)
        queue.enqueue(connection, {"payload": "delay"}, delay=0.4)
        queue.enqueue(connection, {"payload": "now"})
    with queue.receive() as receiver:
        for _ in range(3):
            (event,) = take(receiver, 1)
            assert db.now() >= event.fire_at
            event.ack()


def test_event_name_is_unique_while_the_event_exists(db: DatabaseFixture) -> None:
    queue = db.queue()
    with db.transaction() as connection:
        queue.enqueue(connection, {"payload": "first"}, name="only one")
    with (
        pytest.raises(Exception, match=r"event_name|UNIQUE|Duplicate"),
        db.transaction() as again,
    ):
        queue.enqueue(again, {"payload": "second"}, name="only one")
    with queue.receive() as receiver:
        assert payloads(take(receiver, 1)) == ["first"]
        with pytest.raises(NameTaken):
            queue.put([{"payload": "third", "event_name": "only one"}], TIMEOUT)


def test_higher_priority_fires_first(db: DatabaseFixture) -> None:
    queue = db.queue(max_concurrency=1)
    with db.transaction() as connection:
        for priority in (0, 5, -3, 5):
            queue.enqueue(connection, {"payload": str(priority)}, priority=priority)
    with queue.receive(prefetch=1) as receiver:
        received = []
        for _ in range(4):
            (event,) = take(receiver, 1)
            received.append(event["payload"])
            settle(receiver, [event])
    assert received == ["5", "5", "0", "-3"]


@pytest.mark.parametrize("layout", ["time", "keyspace"])
def test_many_rows_arrive_complete_in_both_layouts(db: DatabaseFixture, layout: str) -> None:
    queue = db.queue(layout=layout)
    db.fill(queue, 3_000)
    with queue.receive() as receiver:
        received: list[str] = []
        while len(received) < 3_000:
            events = receiver.take(timeout=TIMEOUT)
            assert events
            received += payloads(events)
            receiver.ack(events)
        assert receiver.flush(TIMEOUT)
    assert sorted(received) == sorted(f"p{at}" for at in range(3_000))
    assert queue.counts() == NOBODY


def test_database_and_python_compute_the_same_keyspace_ids(db: DatabaseFixture) -> None:
    queue = db.queue()
    keys = [0, 1, -1, 2**62, -(2**63)]
    with db.transaction() as connection:
        queue.enqueue_many(connection, [{"user_id": key, "payload": "k"} for key in keys])
    with queue.receive() as receiver:
        for event in take(receiver, len(keys)):
            assert event.keyspace_id in {None, keyspace_id(event["user_id"])}


def test_receivers_get_only_events_of_their_key_range(db: DatabaseFixture) -> None:
    queue = db.queue()
    db.fill(queue, 60)
    low = {f"p{at}" for at in range(60) if KeyRange.parse("-80").contains(keyspace_id(at))}
    with queue.receive("-80") as first:
        assert set(payloads(take(first, len(low)))) == low
        with queue.receive("80-") as second:
            others = payloads(take(second, 60 - len(low)))
            assert not low & set(others)


def test_least_busy_receiver_gets_more_events(db: DatabaseFixture) -> None:
    queue = db.queue()
    with queue.receive(prefetch=40) as first:
        db.fill(queue, 20)
        unacked = take(first, 20)
        with queue.receive(prefetch=40) as second:
            db.fill(queue, 20)
            assert len(take(second, 20)) == 20
            first.ack(unacked)


def test_in_flight_events_stay_within_max_concurrency(db: DatabaseFixture) -> None:
    queue = db.queue(max_concurrency=3)
    db.fill(queue, 10)
    with queue.receive() as receiver:
        received = 0
        while received < 10:
            events = take(receiver, min(3, 10 - received))
            assert receiver.take(timeout=0.05) == []
            settle(receiver, events)
            received += len(events)


def test_events_fire_no_faster_than_max_qps(db: DatabaseFixture) -> None:
    queue = db.queue(max_qps=20)
    db.fill(queue, 12)
    with queue.receive() as receiver:
        started = time.monotonic()
        receiver.ack(take(receiver, 12))
        # The bucket has two tokens at the start; the others come every 50 ms.
        assert time.monotonic() - started > 9 / 20


def test_nacked_event_fires_again_after_its_delay(db: DatabaseFixture) -> None:
    queue = db.queue(backoff="10ms")
    db.fill(queue, 1)
    with queue.receive() as receiver:
        (event,) = take(receiver, 1)
        before = db.now()
        event.nack(delay=0.3, error="try later")
        (again,) = take(receiver, 1)
        assert again.id == event.id
        assert again.attempts == 1
        assert db.now() - before >= 300_000_000
        settle(receiver, [again])
    assert queue.counts() == NOBODY


def test_event_not_acked_in_time_fires_again(db: DatabaseFixture) -> None:
    queue = db.queue(ack_timeout="500ms")
    db.fill(queue, 3)
    with queue.receive() as receiver:
        first = take(receiver, 3)
        second = take(receiver, 3)
        assert {event.id for event in first} == {event.id for event in second}
        assert all(event.attempts == 1 for event in second)
        settle(receiver, second)
    assert queue.counts() == NOBODY


def test_event_is_a_dead_letter_after_max_attempts_and_can_be_retried(db: DatabaseFixture) -> None:
    queue = db.queue(max_attempts=3)
    db.fill(queue, 1)
    with queue.receive() as receiver:
        for _ in range(3):
            (event,) = take(receiver, 1)
            event.nack(error="no good")
        eventually(lambda: queue.counts()["dead"] == 1)
        (dead,) = queue.peek("dead")
        assert dead["last_error"] == "no good"
        assert dead["attempts"] == 3
        assert queue.retry() == 1
        (event,) = take(receiver, 1)
        assert event.attempts == 0
        settle(receiver, [event])
    assert queue.counts() == NOBODY


def test_ack_by_plain_sql_settles_the_event(db: DatabaseFixture) -> None:
    queue = db.queue(max_concurrency=1, ack_timeout="60s")
    db.fill(queue, 2)
    with queue.receive() as receiver:
        (event,) = take(receiver, 1)
        db.execute(f"UPDATE {queue.name} SET state = 'acked' WHERE event_id = {event.id}")
        # The manager notices long before the ack timeout, and fires the next one.
        (other,) = take(receiver, 1)
        assert other.id != event.id
        with db.transaction() as connection:
            assert queue.ack(connection, [other.id]) == 1
    assert queue.counts()["to_be_fired"] == queue.counts()["fired"] == 0


def test_rolled_back_ack_settles_nothing(db: DatabaseFixture) -> None:
    queue = db.queue(ack_timeout="500ms")
    db.fill(queue, 1)
    with queue.receive() as receiver:
        (event,) = take(receiver, 1)
        with contextlib.suppress(ZeroDivisionError), db.transaction() as connection:
            queue.ack(connection, [event.id])
            raise ZeroDivisionError
        (again,) = take(receiver, 1)
        assert again.id == event.id


def test_acked_events_are_kept_for_their_retention(db: DatabaseFixture) -> None:
    queue = db.queue(retention="1h")
    db.fill(queue, 3)
    with queue.receive() as receiver:
        settle(receiver, take(receiver, 3))
    assert queue.counts() == {**NOBODY, "acked": 3}


def test_acked_events_are_deleted_after_their_retention(db: DatabaseFixture) -> None:
    queue = db.queue(retention="100ms", ack_timeout="1s")
    db.fill(queue, 3)
    with queue.receive() as receiver:
        settle(receiver, take(receiver, 3))
        eventually(lambda: queue.counts() == NOBODY)


def test_events_of_a_key_fire_in_order_one_at_a_time(db: DatabaseFixture) -> None:
    queue = db.queue(ordering="key")
    with db.transaction() as connection:
        for at in range(12):
            queue.enqueue(connection, {"user_id": at % 3, "payload": str(at)})
    received: dict[int, list[int]] = {0: [], 1: [], 2: []}
    nacked: set[int] = set()
    with queue.receive() as receiver:
        while sum(map(len, received.values())) < 12:
            events = receiver.take(timeout=TIMEOUT)
            keys = [event["user_id"] for event in events]
            assert len(keys) == len(set(keys)), "two events of a key are out"
            for event in events:
                if event["user_id"] == 1 and event.id not in nacked:
                    nacked.add(event.id)
                    event.nack(delay=0.02)  # a failing event delays only its key
                else:
                    received[event["user_id"]].append(int(event["payload"]))
                    event.ack()
    assert received == {key: [at for at in range(12) if at % 3 == key] for key in received}


def test_ordered_queue_fires_one_event_at_a_time(db: DatabaseFixture) -> None:
    queue = db.queue(ordering="queue")
    db.fill(queue, 8)
    with queue.receive() as receiver:
        received = []
        for _ in range(8):
            (event,) = take(receiver, 1)
            assert receiver.take(timeout=0.01) == []
            received.append(event["payload"])
            settle(receiver, [event])
    assert received == [f"p{at}" for at in range(8)]


def test_event_fires_once_when_its_group_is_done(
    db: DatabaseFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "COLLECT_SECONDS", 0.2)
    queue = db.queue(ack_timeout="60s")
    with db.transaction() as connection:
        for at in range(3):
            queue.enqueue(connection, {"payload": f"m{at}"}, group="g")
        queue.enqueue(connection, {"payload": "all done"}, after_group="g")
    with queue.receive() as receiver:
        members = take(receiver, 3)
        assert all(event["payload"] != "all done" for event in members)
        settle(receiver, members[:2])
        assert receiver.take(timeout=0.1) == []
        # Plain SQL acks the last one: the collector notices.
        db.execute(f"UPDATE {queue.name} SET state = 'acked' WHERE event_id = {members[2].id}")
        (last,) = take(receiver, 1)
        assert last["payload"] == "all done"
        settle(receiver, [last])
        assert receiver.take(timeout=0.1) == []


def test_put_writes_due_events_as_fired(db: DatabaseFixture) -> None:
    queue = db.queue()
    with queue.receive() as receiver:
        eventually(lambda: queue.manager().can_fire)
        db.fill(queue, 1)
        settle(receiver, take(receiver, 1))  # now the manager knows its receiver
        assert queue.put([{"user_id": 1, "payload": "a"}, {"user_id": 2, "payload": "b"}], TIMEOUT)
        events = take(receiver, 2)
        assert queue.counts()["fired"] == 2
        assert payloads(events) == ["a", "b"]
        settle(receiver, events)
        in_an_hour = db.now() + 3_600 * 10**9
        assert queue.put([{"payload": "later", "fire_at": in_an_hour}], TIMEOUT)
    assert queue.counts() == {**NOBODY, "to_be_fired": 1}


def test_cancelled_or_rescheduled_event_does_not_fire(
    db: DatabaseFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "MAX_UNMARKED_AGE", 0.0)
    queue = db.queue(max_concurrency=1, ack_timeout="60s")
    with db.transaction() as connection:
        names = ("first", "cancelled", "moved", "stays")
        ids = [queue.enqueue(connection, {"payload": name}) for name in names]
    with queue.receive() as receiver:
        (first,) = take(receiver, 1)  # the others wait in the window
        assert queue.cancel([ids[1]]) == 1
        db.execute(
            f"UPDATE {queue.name} SET fire_at = fire_at + {3600 * 10**9} WHERE event_id = {ids[2]}"
        )
        settle(receiver, [first])
        events = take(receiver, 1)
        assert payloads(events) == ["stays"]
        settle(receiver, events)
    assert queue.counts() == {**NOBODY, "to_be_fired": 1}


def test_event_cancelled_while_it_waits_in_memory_does_not_fire(
    db: DatabaseFixture,
) -> None:
    queue = db.queue()
    with queue.receive() as receiver:
        db.fill(queue, 1)
        settle(receiver, take(receiver, 1))  # the manager reads new rows at once now
        while not cancel_in_time(db, queue, receiver):
            pass


def cancel_in_time(db: DatabaseFixture, queue: TableQueue, receiver: Receiver) -> bool:
    """Cancel events that are due soon; false if the machine was too slow."""
    delays = {"cancelled": 0.8, "moved": 0.8, "stays": 0.9}
    with db.transaction() as connection:
        due = db.now() + 800_000_000
        ids = {
            name: queue.enqueue(connection, {"payload": name}, delay=delay)
            for name, delay in delays.items()
        }
    eventually(lambda: queue.manager().waiting >= 3 or db.now() > due)
    queue.cancel([ids["cancelled"]])
    later = f"UPDATE {queue.name} SET fire_at = fire_at + {3600 * 10**9}"
    db.execute(f"{later} WHERE event_id = {ids['moved']}")
    in_time = db.now() < due
    received: list[str] = []
    while "stays" not in received:
        events = take(receiver, 1)
        received += payloads(events)
        settle(receiver, events)
    assert received == ["stays"] or not in_time
    return in_time


def test_events_of_a_closed_receiver_go_to_another(db: DatabaseFixture) -> None:
    queue = db.queue(ack_timeout="60s")
    db.fill(queue, 4)
    first = queue.receive()
    unacked = take(first, 2)
    first.close()
    with pytest.raises(QueueClosed):
        first.take()
    with queue.receive() as second:
        events = take(second, 4)
        assert {event.id for event in unacked} <= {event.id for event in events}
        settle(second, events)
    assert queue.counts() == NOBODY


def test_loop_over_a_receiver_ends_when_it_is_closed(db: DatabaseFixture) -> None:
    queue = db.queue()
    db.fill(queue, 5)
    receiver = queue.receive()
    received: list[object] = []
    reader = threading.Thread(
        target=lambda: received.extend(_ack_and_return(event) for event in receiver)
    )
    reader.start()
    eventually(lambda: len(received) == 5)
    receiver.close()
    reader.join(TIMEOUT)
    assert not reader.is_alive()


def test_receiver_closes_with_its_queue(db: DatabaseFixture) -> None:
    queue = db.queue()
    db.fill(queue, 3)
    receiver = queue.receive()
    (event, *_) = take(receiver, 3)
    event.ack()
    queue.close()
    with pytest.raises(QueueClosed):
        receiver.take()
    assert queue.counts()["to_be_fired"] + queue.counts()["fired"] == 2, "the ack was not stored"
    assert receiver.flush(TIMEOUT)


def _ack_and_return(event: object) -> object:
    event.ack()  # type: ignore[attr-defined]
    return event


@pytest.mark.parametrize(
    "name", ['say "hi"', "100%s", "{table}", "sel'ect; --", "`tick`", "Größe ß", "a\\b", "order"]
)
def test_hostile_names_are_quoted(db: DatabaseFixture, name: str) -> None:
    column = f"{name} col"
    quoted, column_quoted = (f'"{each.replace(chr(34), chr(34) * 2)}"' for each in (name, column))
    db.database.sql(f"CREATE QUEUE {quoted} ({column_quoted} TEXT) WITH (backoff = 10ms)")
    try:
        assert name in db.database.sql("SHOW QUEUES")
        with db.database.queue(name) as queue:
            with db.transaction() as connection:
                queue.enqueue(connection, {column: "one"})
                queue.enqueue_many(connection, [{column: "two"}])
            with queue.receive() as receiver:
                events = take(receiver, 2)
                assert [event[column] for event in events] == ["one", "two"]
                events[1].nack()
                settle(receiver, events[:1])
                settle(receiver, take(receiver, 1))
            assert queue.counts() == NOBODY
    finally:
        db.database.sql(f"DROP QUEUE {quoted}")


def test_printed_ddl_creates_the_queue(db: DatabaseFixture) -> None:
    name = db.queue().name
    db.database.sql(f"DROP QUEUE {name}")
    for statement in db.database.ddl(f"CREATE QUEUE {name} (payload TEXT)"):
        db.execute(statement)
    with db.database.queue(name) as queue:
        db.execute(f"INSERT INTO {name} (payload) VALUES ('by hand')")
        with queue.receive() as receiver:
            assert payloads(take(receiver, 1)) == ["by hand"]
