"""What a queue table does, on every database."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

from tests.table.site import PATIENCE, Site, eventually, payloads, settle, take
from turnlane.errors import NameTaken, NoSuchQueue, QueueClosed, QueueExists
from turnlane.table import Receiver, TableQueue, dispatcher, leader
from turnlane.table.shards import KeyRange, keyspace_id

NOBODY = {"to_be_fired": 0, "fired": 0, "acked": 0, "dead": 0}


def test_queues_are_made_shown_and_dropped(site: Site) -> None:
    queue = site.queue()
    assert queue.name in site.database.sql("SHOW QUEUES")
    with pytest.raises(QueueExists):
        site.database.sql(f"CREATE QUEUE {queue.name} (a TEXT)")
    site.database.sql(f"CREATE QUEUE IF NOT EXISTS {queue.name} (a TEXT)")
    site.database.sql(f"DROP QUEUE {queue.name}")
    assert queue.name not in site.database.sql("SHOW QUEUES")
    with pytest.raises(NoSuchQueue):
        site.database.sql(f"DROP QUEUE {queue.name}")
    site.database.sql(f"DROP QUEUE IF EXISTS {queue.name}")


def test_a_plain_insert_enqueues(site: Site) -> None:
    queue = site.queue()
    site.execute(f"INSERT INTO {queue.name} (user_id, payload) VALUES (10, 'send this')")
    with queue.receive() as receiver:
        (event,) = take(receiver, 1)
        assert event.columns == {"user_id": 10, "payload": "send this"}
        settle(receiver, [event])
    assert queue.counts() == NOBODY


def test_what_is_rolled_back_never_fires(site: Site) -> None:
    queue = site.queue()
    with contextlib.suppress(ZeroDivisionError), site.transaction() as connection:
        queue.enqueue(connection, {"payload": "never"})
        queue.enqueue_many(connection, [{"payload": "nor this"}])
        raise ZeroDivisionError
    with site.transaction() as connection:
        queue.enqueue(connection, {"payload": "but this"})
    with queue.receive() as receiver:
        events = take(receiver, 1)
        assert payloads(events) == ["but this"]
        settle(receiver, events)
    assert queue.counts() == NOBODY


def test_events_inserted_while_a_receiver_waits_come_at_once(site: Site) -> None:
    queue = site.queue()
    with queue.receive() as receiver:
        for at in range(5):
            site.fill(queue, 1)
            (event,) = take(receiver, 1)
            lag = (site.now() - event.fire_at) / 1e9
            assert lag < PATIENCE / 2, at  # well before any sweep, but machines are slow
            event.ack()


def test_nothing_fires_before_its_time(site: Site) -> None:
    queue = site.queue()
    due = datetime.now(UTC) + timedelta(seconds=0.6)
    with site.transaction() as connection:
        queue.enqueue(connection, {"payload": "at"}, at=due)
        queue.enqueue(connection, {"payload": "delay"}, delay=0.4)
        queue.enqueue(connection, {"payload": "now"})
    with queue.receive() as receiver:
        for _ in range(3):
            (event,) = take(receiver, 1)
            assert site.now() >= event.fire_at
            event.ack()


def test_a_name_is_unique_while_its_event_is_there(site: Site) -> None:
    queue = site.queue()
    with site.transaction() as connection:
        queue.enqueue(connection, {"payload": "first"}, name="only one")
    with (
        pytest.raises(Exception, match=r"event_name|UNIQUE|Duplicate"),
        site.transaction() as again,
    ):
        queue.enqueue(again, {"payload": "second"}, name="only one")
    with queue.receive() as receiver:
        assert payloads(take(receiver, 1)) == ["first"]
        with pytest.raises(NameTaken):
            queue.put([{"payload": "third", "event_name": "only one"}], PATIENCE)


def test_higher_priorities_go_first(site: Site) -> None:
    queue = site.queue(max_concurrency=1)
    with site.transaction() as connection:
        for priority in (0, 5, -3, 5):
            queue.enqueue(connection, {"payload": str(priority)}, priority=priority)
    with queue.receive(prefetch=1) as receiver:
        seen = []
        for _ in range(4):
            (event,) = take(receiver, 1)
            seen.append(event["payload"])
            settle(receiver, [event])
    assert seen == ["5", "5", "0", "-3"]


@pytest.mark.parametrize("layout", ["time", "keyspace"])
def test_many_rows_come_whole_in_either_layout(site: Site, layout: str) -> None:
    queue = site.queue(layout=layout)
    site.fill(queue, 3_000)
    with queue.receive() as receiver:
        seen: list[str] = []
        while len(seen) < 3_000:
            events = receiver.take(timeout=PATIENCE)
            assert events
            seen += payloads(events)
            receiver.ack(events)
        assert receiver.flush(PATIENCE)
    assert sorted(seen) == sorted(f"p{at}" for at in range(3_000))
    assert queue.counts() == NOBODY


def test_the_database_and_python_agree_on_key_space_ids(site: Site) -> None:
    queue = site.queue()
    keys = [0, 1, -1, 2**62, -(2**63)]
    with site.transaction() as connection:
        queue.enqueue_many(connection, [{"user_id": key, "payload": "k"} for key in keys])
    with queue.receive() as receiver:
        for event in take(receiver, len(keys)):
            assert event.keyspace_id in {None, keyspace_id(event["user_id"])}


def test_receivers_get_the_events_of_their_key_range(site: Site) -> None:
    queue = site.queue()
    site.fill(queue, 60)
    low = {f"p{at}" for at in range(60) if KeyRange.parse("-80").contains(keyspace_id(at))}
    with queue.receive("-80") as first:
        assert set(payloads(take(first, len(low)))) == low
        with queue.receive("80-") as second:
            others = payloads(take(second, 60 - len(low)))
            assert not low & set(others)


def test_the_least_busy_receiver_gets_more(site: Site) -> None:
    queue = site.queue()
    with queue.receive(prefetch=40) as first:
        site.fill(queue, 20)
        held = take(first, 20)
        with queue.receive(prefetch=40) as second:
            site.fill(queue, 20)
            assert len(take(second, 20)) == 20
            first.ack(held)


def test_no_more_events_are_out_than_max_concurrency(site: Site) -> None:
    queue = site.queue(max_concurrency=3)
    site.fill(queue, 10)
    with queue.receive() as receiver:
        seen = 0
        while seen < 10:
            events = take(receiver, min(3, 10 - seen))
            assert receiver.take(timeout=0.05) == []
            settle(receiver, events)
            seen += len(events)


def test_events_fire_no_faster_than_max_qps(site: Site) -> None:
    queue = site.queue(max_qps=20)
    site.fill(queue, 12)
    with queue.receive() as receiver:
        started = time.monotonic()
        receiver.ack(take(receiver, 12))
        # Two are in the bucket at the start; the others come 50 ms apart.
        assert time.monotonic() - started > 9 / 20


def test_a_nack_comes_back_after_its_delay(site: Site) -> None:
    queue = site.queue(backoff="10ms")
    site.fill(queue, 1)
    with queue.receive() as receiver:
        (event,) = take(receiver, 1)
        before = site.now()
        event.nack(delay=0.3, error="try later")
        (again,) = take(receiver, 1)
        assert again.id == event.id
        assert again.attempts == 1
        assert site.now() - before >= 300_000_000
        settle(receiver, [again])
    assert queue.counts() == NOBODY


def test_what_is_not_acked_in_time_is_fired_again(site: Site) -> None:
    queue = site.queue(ack_timeout="500ms")
    site.fill(queue, 3)
    with queue.receive() as receiver:
        first = take(receiver, 3)
        second = take(receiver, 3)
        assert {event.id for event in first} == {event.id for event in second}
        assert all(event.attempts == 1 for event in second)
        settle(receiver, second)
    assert queue.counts() == NOBODY


def test_after_max_attempts_an_event_is_a_dead_letter_that_can_be_retried(site: Site) -> None:
    queue = site.queue(max_attempts=3)
    site.fill(queue, 1)
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


def test_an_ack_by_plain_sql_settles_an_event(site: Site) -> None:
    queue = site.queue(max_concurrency=1, ack_timeout="60s")
    site.fill(queue, 2)
    with queue.receive() as receiver:
        (event,) = take(receiver, 1)
        site.execute(f"UPDATE {queue.name} SET state = 'acked' WHERE event_id = {event.id}")
        # The manager notices long before the ack timeout, and fires the next.
        (other,) = take(receiver, 1)
        assert other.id != event.id
        with site.transaction() as connection:
            assert queue.ack(connection, [other.id]) == 1
    assert queue.counts()["to_be_fired"] == queue.counts()["fired"] == 0


def test_an_ack_that_is_rolled_back_settles_nothing(site: Site) -> None:
    queue = site.queue(ack_timeout="500ms")
    site.fill(queue, 1)
    with queue.receive() as receiver:
        (event,) = take(receiver, 1)
        with contextlib.suppress(ZeroDivisionError), site.transaction() as connection:
            queue.ack(connection, [event.id])
            raise ZeroDivisionError
        (again,) = take(receiver, 1)
        assert again.id == event.id


def test_acked_events_are_kept_for_their_retention(site: Site) -> None:
    queue = site.queue(retention="1h")
    site.fill(queue, 3)
    with queue.receive() as receiver:
        settle(receiver, take(receiver, 3))
    assert queue.counts() == {**NOBODY, "acked": 3}


def test_acked_events_are_purged_when_their_retention_is_over(site: Site) -> None:
    queue = site.queue(retention="100ms", ack_timeout="1s")
    site.fill(queue, 3)
    with queue.receive() as receiver:
        settle(receiver, take(receiver, 3))
        eventually(lambda: queue.counts() == NOBODY)


def test_events_of_a_key_fire_in_order_one_at_a_time(site: Site) -> None:
    queue = site.queue(ordering="key")
    with site.transaction() as connection:
        for at in range(12):
            queue.enqueue(connection, {"user_id": at % 3, "payload": str(at)})
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    nacked: set[int] = set()
    with queue.receive() as receiver:
        while sum(map(len, seen.values())) < 12:
            events = receiver.take(timeout=PATIENCE)
            keys = [event["user_id"] for event in events]
            assert len(keys) == len(set(keys)), "two events of a key are out"
            for event in events:
                if event["user_id"] == 1 and event.id not in nacked:
                    nacked.add(event.id)
                    event.nack(delay=0.02)  # a stuck event delays its key only
                else:
                    seen[event["user_id"]].append(int(event["payload"]))
                    event.ack()
    assert seen == {key: [at for at in range(12) if at % 3 == key] for key in seen}


def test_a_queue_in_order_fires_one_event_after_the_other(site: Site) -> None:
    queue = site.queue(ordering="queue")
    site.fill(queue, 8)
    with queue.receive() as receiver:
        seen = []
        for _ in range(8):
            (event,) = take(receiver, 1)
            assert receiver.take(timeout=0.01) == []
            seen.append(event["payload"])
            settle(receiver, [event])
    assert seen == [f"p{at}" for at in range(8)]


def test_an_event_fires_once_when_its_group_is_done(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "COLLECT_SECONDS", 0.2)
    queue = site.queue(ack_timeout="60s")
    with site.transaction() as connection:
        for at in range(3):
            queue.enqueue(connection, {"payload": f"m{at}"}, group="g")
        queue.enqueue(connection, {"payload": "all done"}, after_group="g")
    with queue.receive() as receiver:
        members = take(receiver, 3)
        assert all(event["payload"] != "all done" for event in members)
        settle(receiver, members[:2])
        assert receiver.take(timeout=0.1) == []
        # The last one is acked behind the manager's back: the collector notices.
        site.execute(f"UPDATE {queue.name} SET state = 'acked' WHERE event_id = {members[2].id}")
        (last,) = take(receiver, 1)
        assert last["payload"] == "all done"
        settle(receiver, [last])
        assert receiver.take(timeout=0.1) == []


def test_what_comes_through_the_manager_is_written_as_fired(site: Site) -> None:
    queue = site.queue()
    with queue.receive() as receiver:
        eventually(lambda: queue.manager().fires)
        site.fill(queue, 1)
        settle(receiver, take(receiver, 1))  # by now the manager knows its receiver
        assert queue.put([{"user_id": 1, "payload": "a"}, {"user_id": 2, "payload": "b"}], PATIENCE)
        events = take(receiver, 2)
        assert queue.counts()["fired"] == 2
        assert payloads(events) == ["a", "b"]
        settle(receiver, events)
        in_an_hour = site.now() + 3_600 * 10**9
        assert queue.put([{"payload": "later", "fire_at": in_an_hour}], PATIENCE)
    assert queue.counts() == {**NOBODY, "to_be_fired": 1}


def test_an_event_that_is_cancelled_or_moved_does_not_fire(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "MAX_UNMARKED_AGE", 0.0)
    queue = site.queue(max_concurrency=1, ack_timeout="60s")
    with site.transaction() as connection:
        names = ("first", "cancelled", "moved", "stays")
        ids = [queue.enqueue(connection, {"payload": name}) for name in names]
    with queue.receive() as receiver:
        (first,) = take(receiver, 1)  # the others wait in the window behind it
        assert queue.cancel([ids[1]]) == 1
        site.execute(
            f"UPDATE {queue.name} SET fire_at = fire_at + {3600 * 10**9} WHERE event_id = {ids[2]}"
        )
        settle(receiver, [first])
        events = take(receiver, 1)
        assert payloads(events) == ["stays"]
        settle(receiver, events)
    assert queue.counts() == {**NOBODY, "to_be_fired": 1}


def test_an_event_that_is_cancelled_while_it_waits_for_its_time_does_not_fire(
    site: Site,
) -> None:
    queue = site.queue()
    with queue.receive() as receiver:
        site.fill(queue, 1)
        settle(receiver, take(receiver, 1))  # the manager reads what is new at once
        while not cancelled_in_time(site, queue, receiver):
            pass


def cancelled_in_time(site: Site, queue: TableQueue, receiver: Receiver) -> bool:
    """Cancel events that are due soon; false if the machine was too slow for that."""
    delays = {"cancelled": 0.8, "moved": 0.8, "stays": 0.9}
    with site.transaction() as connection:
        due = site.now() + 800_000_000
        ids = {
            name: queue.enqueue(connection, {"payload": name}, delay=delay)
            for name, delay in delays.items()
        }
    eventually(lambda: queue.manager().waiting >= 3 or site.now() > due)
    queue.cancel([ids["cancelled"]])
    later = f"UPDATE {queue.name} SET fire_at = fire_at + {3600 * 10**9}"
    site.execute(f"{later} WHERE event_id = {ids['moved']}")
    in_time = site.now() < due
    seen: list[str] = []
    while "stays" not in seen:
        events = take(receiver, 1)
        seen += payloads(events)
        settle(receiver, events)
    assert seen == ["stays"] or not in_time
    return in_time


def test_events_of_a_receiver_that_goes_away_come_to_another(site: Site) -> None:
    queue = site.queue(ack_timeout="60s")
    site.fill(queue, 4)
    first = queue.receive()
    held = take(first, 2)
    first.close()
    with pytest.raises(QueueClosed):
        first.take()
    with queue.receive() as second:
        events = take(second, 4)
        assert {event.id for event in held} <= {event.id for event in events}
        settle(second, events)
    assert queue.counts() == NOBODY


def test_a_loop_over_a_receiver_ends_when_it_is_closed(site: Site) -> None:
    queue = site.queue()
    site.fill(queue, 5)
    receiver = queue.receive()
    seen: list[object] = []
    reader = threading.Thread(target=lambda: seen.extend(_acked(event) for event in receiver))
    reader.start()
    eventually(lambda: len(seen) == 5)
    receiver.close()
    reader.join(PATIENCE)
    assert not reader.is_alive()


def test_a_receiver_is_closed_with_its_queue(site: Site) -> None:
    queue = site.queue()
    site.fill(queue, 3)
    receiver = queue.receive()
    (event, *_) = take(receiver, 3)
    event.ack()
    queue.close()
    with pytest.raises(QueueClosed):
        receiver.take()
    assert queue.counts()["to_be_fired"] + queue.counts()["fired"] == 2, "the ack was not stored"
    assert receiver.flush(PATIENCE)


def _acked(event: object) -> object:
    event.ack()  # type: ignore[attr-defined]
    return event


@pytest.mark.parametrize(
    "name", ['say "hi"', "100%s", "{table}", "sel'ect; --", "`tick`", "Größe ß", "a\\b", "order"]
)
def test_hostile_names_are_only_names(site: Site, name: str) -> None:
    column = f"{name} col"
    quoted, column_quoted = (f'"{each.replace(chr(34), chr(34) * 2)}"' for each in (name, column))
    site.database.sql(f"CREATE QUEUE {quoted} ({column_quoted} TEXT) WITH (backoff = 10ms)")
    try:
        assert name in site.database.sql("SHOW QUEUES")
        with site.database.queue(name) as queue:
            with site.transaction() as connection:
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
        site.database.sql(f"DROP QUEUE {quoted}")


def test_the_printed_ddl_makes_the_queue_too(site: Site) -> None:
    name = site.queue().name
    site.database.sql(f"DROP QUEUE {name}")
    for statement in site.database.ddl(f"CREATE QUEUE {name} (payload TEXT)"):
        site.execute(statement)
    with site.database.queue(name) as queue:
        site.execute(f"INSERT INTO {name} (payload) VALUES ('by hand')")
        with queue.receive() as receiver:
            assert payloads(take(receiver, 1)) == ["by hand"]
