"""Events that cannot fire now must not delay the others."""

from __future__ import annotations

import pytest

from tests.table.database_fixture import (
    TIMEOUT,
    DatabaseFixture,
    eventually,
    payloads,
    settle,
    take,
)
from turnlane.table.fetcher import PAGE_ROWS
from turnlane.table.queue import TableQueue
from turnlane.table.receiver import TableEvent
from turnlane.table.shards import KeyRange, keyspace_id

SOON = 20.0
"""Seconds: long on a busy machine, short compared with the ack timeout of these tests."""

MANY = 4 * PAGE_ROWS
"""More events than the memory holds."""


def _find_keys(key_range: str, count: int) -> list[int]:
    """Return keys in a range."""
    span = KeyRange.parse(key_range)
    found: list[int] = []
    at = 0
    while len(found) < count:
        if span.contains(keyspace_id(at)):
            found.append(at)
        at += 1
    return found


def _fill(
    db: DatabaseFixture, queue: TableQueue, key_range: str, count: int, **columns: object
) -> None:
    keys = _find_keys(key_range, count)
    with db.transaction() as connection:
        queue.enqueue_many(
            connection, [{"user_id": key, "payload": str(key), **columns} for key in keys]
        )


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_receiver_that_takes_nothing_does_not_starve_other_key_ranges(
    db: DatabaseFixture, ordering: str
) -> None:
    queue = db.queue(ack_timeout="10m", ordering=ordering)
    _fill(db, queue, "-80", MANY)
    _fill(db, queue, "80-", 300)
    with queue.receive("-80", prefetch=3) as stuck, queue.receive("80-") as receiver:
        first_events = take(stuck, 3)
        settle(receiver, take(receiver, 300, SOON))
        _fill(db, queue, "80-", 10)  # the manager knows now that the others are stuck
        settle(receiver, take(receiver, 10, SOON))
        assert queue.manager().waiting < MANY / 2
        settle(stuck, first_events)
        with queue.receive("-80") as rescuer:
            received = payloads(first_events)
            while len(received) < MANY:
                for each in (rescuer, stuck):
                    events = each.take(timeout=0.01)
                    received += payloads(events)
                    each.ack(events)
            assert sorted(received) == sorted(map(str, _find_keys("-80", MANY)))
            assert rescuer.flush(TIMEOUT)
    assert queue.counts()["to_be_fired"] == queue.counts()["fired"] == 0


def test_key_range_without_receiver_does_not_starve_others(db: DatabaseFixture) -> None:
    queue = db.queue(ack_timeout="10m")
    _fill(db, queue, "-80", MANY)
    with queue.receive("80-") as receiver:
        for _ in range(3):
            _fill(db, queue, "80-", 10)
            settle(receiver, take(receiver, 10, SOON))
        before = queue.manager().store.session.statements
        _fill(db, queue, "80-", 10)
        settle(receiver, take(receiver, 10, SOON))
        # They are not read repeatedly only to be dropped.
        assert queue.manager().store.session.statements - before < 200
        with queue.receive("-80") as other:
            received = 0
            while received < MANY:
                events = other.take(timeout=SOON)
                assert events
                received += len(events)
                other.ack(events)
            assert other.flush(TIMEOUT)
    assert queue.counts()["to_be_fired"] == queue.counts()["fired"] == 0


def test_events_not_due_do_not_delay_due_events(db: DatabaseFixture) -> None:
    queue = db.queue(window="1h", window_events=100, ack_timeout="10m")
    db.fill(queue, 300, fire_at=db.now() + 600 * 10**9)
    with queue.receive() as receiver:
        eventually(lambda: queue.manager().waiting >= 75)
        for _ in range(3):
            with db.transaction() as connection:
                queue.enqueue(connection, {"payload": "now"})
            events = take(receiver, 1, SOON)
            assert payloads(events) == ["now"]
            settle(receiver, events)
            assert queue.manager().waiting <= 100
        db.execute(f"UPDATE {queue.name} SET fire_at = fire_at - {597 * 10**9}")
        received: list[str] = []
        while len(received) < 300:
            events = receiver.take(timeout=SOON)
            assert events
            received += payloads(events)
            settle(receiver, events)
    assert sorted(received) == sorted(f"p{at}" for at in range(300))


def test_events_behind_a_busy_key_are_bounded_and_do_not_starve_others(db: DatabaseFixture) -> None:
    queue = db.queue(ordering="key", window_events=100, ack_timeout="10m")
    with db.transaction() as connection:
        queue.enqueue_many(connection, [{"user_id": 1, "payload": f"{at}"} for at in range(300)])
        queue.enqueue_many(connection, [{"user_id": at, "payload": ""} for at in range(2, 22)])
    with queue.receive() as receiver:
        manager = queue.manager()
        (hot,), others = _split_by_key(take(receiver, 21, SOON), 1)
        settle(receiver, others)
        before = manager.store.session.statements
        with db.transaction() as connection:  # the manager knows now that the key is crowded
            queue.enqueue(connection, {"user_id": 1, "payload": "300"})
            queue.enqueue(connection, {"user_id": 2, "payload": ""})
        settle(receiver, take(receiver, 1, SOON))
        assert manager.store.session.statements - before < 200, "they are read again and again"
        most, received = manager.waiting, [hot["payload"]]
        receiver.ack([hot])
        while len(received) <= 300:
            (event,) = take(receiver, 1, SOON)
            received.append(event["payload"])
            most = max(most, manager.waiting)
            receiver.ack([event])
        assert receiver.flush(TIMEOUT)
        assert received == [f"{at}" for at in range(301)]
        assert 0 < most <= 100
    assert queue.counts()["to_be_fired"] == queue.counts()["fired"] == 0


def _split_by_key(events: list[TableEvent], key: int) -> tuple[list[TableEvent], list[TableEvent]]:
    """Split events into events of a key and others."""
    mine = [event for event in events if event["user_id"] == key]
    return mine, [event for event in events if event["user_id"] != key]


@pytest.mark.parametrize("prefetch", [2, 50])
def test_long_ordered_queue_keeps_its_order_with_a_short_window(
    db: DatabaseFixture, prefetch: int
) -> None:
    queue = db.queue(ordering="queue", window_events=20, ack_timeout="10m")
    db.fill(queue, 200)
    received: list[str] = []
    with queue.receive(prefetch=prefetch) as receiver:
        while len(received) < 200:
            (event,) = take(receiver, 1, SOON)
            received.append(event["payload"])
            assert queue.manager().waiting <= 20
            receiver.ack([event])
        assert receiver.flush(TIMEOUT)
    assert received == [f"p{at}" for at in range(200)]


def test_many_busy_keys_share_the_room_for_waiting_events(db: DatabaseFixture) -> None:
    queue = db.queue(ordering="key", window_events=40, ack_timeout="10m")
    with db.transaction() as connection:
        queue.enqueue_many(
            connection, [{"user_id": at % 60, "payload": f"{at}"} for at in range(600)]
        )
    received: dict[int, list[int]] = {key: [] for key in range(60)}
    with queue.receive() as receiver:
        while sum(map(len, received.values())) < 600:
            events = receiver.take(timeout=SOON)
            assert events
            assert queue.manager().waiting <= 40
            for event in events:
                received[event["user_id"]].append(int(event["payload"]))
            receiver.ack(events)
        assert receiver.flush(TIMEOUT)
    assert received == {key: list(range(key, 600, 60)) for key in range(60)}
    assert queue.counts()["to_be_fired"] == queue.counts()["fired"] == 0


def test_retry_is_found_although_its_key_is_crowded(db: DatabaseFixture) -> None:
    """The retry is far off and not in memory, but the events that wait for it are."""
    queue = db.queue(ordering="key", window="1s", window_events=20, ack_timeout="10m")
    with db.transaction() as connection:
        queue.enqueue_many(connection, [{"user_id": 1, "payload": f"{at}"} for at in range(60)])
    with queue.receive() as receiver:
        (first,) = take(receiver, 1, SOON)
        first.nack(delay=3.0)
        (again,) = take(receiver, 1, SOON)
        assert again.id == first.id
        receiver.ack([again])
        received: list[int] = []
        while len(received) < 59:
            (event,) = take(receiver, 1, SOON)
            received.append(int(event["payload"]))
            receiver.ack([event])
        assert received == list(range(1, 60))
