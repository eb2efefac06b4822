"""Events that cannot fire now, and how little they are to all the others."""

from __future__ import annotations

import pytest

from tests.table.site import PATIENCE, Site, eventually, payloads, settle, take
from turnlane.table.event import TableEvent
from turnlane.table.fetcher import PAGE_ROWS
from turnlane.table.queue import TableQueue
from turnlane.table.shards import KeyRange, keyspace_id

SOON = 20.0
"""Seconds: long on a busy machine, short beside the ack timeout of these tests."""

MANY = 4 * PAGE_ROWS
"""More than are ever in memory while some are due."""


def _keys(key_range: str, count: int) -> list[int]:
    """Keys in a range."""
    span = KeyRange.parse(key_range)
    found: list[int] = []
    at = 0
    while len(found) < count:
        if span.contains(keyspace_id(at)):
            found.append(at)
        at += 1
    return found


def _fill(site: Site, queue: TableQueue, key_range: str, count: int, **columns: object) -> None:
    keys = _keys(key_range, count)
    with site.transaction() as connection:
        queue.enqueue_many(
            connection, [{"user_id": key, "payload": str(key), **columns} for key in keys]
        )


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_a_receiver_that_takes_nothing_starves_no_other_key_range(
    site: Site, ordering: str
) -> None:
    queue = site.queue(ack_timeout="10m", ordering=ordering)
    _fill(site, queue, "-80", MANY)
    _fill(site, queue, "80-", 300)
    with queue.receive("-80", prefetch=3) as stuck, queue.receive("80-") as receiver:
        held = take(stuck, 3)
        settle(receiver, take(receiver, 300, SOON))
        _fill(site, queue, "80-", 10)  # while the others are known to be stuck
        settle(receiver, take(receiver, 10, SOON))
        assert queue.manager().waiting < MANY / 2
        settle(stuck, held)
        with queue.receive("-80") as rescuer:
            seen = payloads(held)
            while len(seen) < MANY:
                for each in (rescuer, stuck):
                    events = each.take(timeout=0.01)
                    seen += payloads(events)
                    each.ack(events)
            assert sorted(seen) == sorted(map(str, _keys("-80", MANY)))
            assert rescuer.flush(PATIENCE)
    assert queue.counts()["to_be_fired"] == queue.counts()["fired"] == 0


def test_a_key_range_without_a_receiver_starves_no_other(site: Site) -> None:
    queue = site.queue(ack_timeout="10m")
    _fill(site, queue, "-80", MANY)
    with queue.receive("80-") as receiver:
        for _ in range(3):
            _fill(site, queue, "80-", 10)
            settle(receiver, take(receiver, 10, SOON))
        before = queue.manager().store.session.statements
        _fill(site, queue, "80-", 10)
        settle(receiver, take(receiver, 10, SOON))
        # They are not read again and again to be forgotten.
        assert queue.manager().store.session.statements - before < 200
        with queue.receive("-80") as other:
            seen = 0
            while seen < MANY:
                events = other.take(timeout=SOON)
                assert events
                seen += len(events)
                other.ack(events)
            assert other.flush(PATIENCE)
    assert queue.counts()["to_be_fired"] == queue.counts()["fired"] == 0


def test_events_that_are_not_due_hold_up_none_that_are(site: Site) -> None:
    queue = site.queue(window="1h", window_events=100, ack_timeout="10m")
    site.fill(queue, 300, fire_at=site.now() + 600 * 10**9)
    with queue.receive() as receiver:
        eventually(lambda: queue.manager().waiting >= 75)
        for _ in range(3):
            with site.transaction() as connection:
                queue.enqueue(connection, {"payload": "now"})
            events = take(receiver, 1, SOON)
            assert payloads(events) == ["now"]
            settle(receiver, events)
            assert queue.manager().waiting <= 100
        site.execute(f"UPDATE {queue.name} SET fire_at = fire_at - {597 * 10**9}")
        seen: list[str] = []
        while len(seen) < 300:
            events = receiver.take(timeout=SOON)
            assert events
            seen += payloads(events)
            settle(receiver, events)
    assert sorted(seen) == sorted(f"p{at}" for at in range(300))


def test_what_waits_behind_a_busy_key_is_bounded_and_starves_no_other(site: Site) -> None:
    queue = site.queue(ordering="key", window_events=100, ack_timeout="10m")
    with site.transaction() as connection:
        queue.enqueue_many(connection, [{"user_id": 1, "payload": f"{at}"} for at in range(300)])
        queue.enqueue_many(connection, [{"user_id": at, "payload": ""} for at in range(2, 22)])
    with queue.receive() as receiver:
        manager = queue.manager()
        (hot,), others = _by_key(take(receiver, 21, SOON), 1)
        settle(receiver, others)
        before = manager.store.session.statements
        with site.transaction() as connection:  # while the key is known to be crowded
            queue.enqueue(connection, {"user_id": 1, "payload": "300"})
            queue.enqueue(connection, {"user_id": 2, "payload": ""})
        settle(receiver, take(receiver, 1, SOON))
        assert manager.store.session.statements - before < 200, "they are read again and again"
        most, seen = manager.waiting, [hot["payload"]]
        receiver.ack([hot])
        while len(seen) <= 300:
            (event,) = take(receiver, 1, SOON)
            seen.append(event["payload"])
            most = max(most, manager.waiting)
            receiver.ack([event])
        assert receiver.flush(PATIENCE)
        assert seen == [f"{at}" for at in range(301)]
        assert 0 < most <= 100
    assert queue.counts()["to_be_fired"] == queue.counts()["fired"] == 0


def _by_key(events: list[TableEvent], key: int) -> tuple[list[TableEvent], list[TableEvent]]:
    """Events of a key, and all others."""
    mine = [event for event in events if event["user_id"] == key]
    return mine, [event for event in events if event["user_id"] != key]


@pytest.mark.parametrize("prefetch", [2, 50])
def test_a_long_queue_in_order_comes_in_order_from_a_short_window(
    site: Site, prefetch: int
) -> None:
    queue = site.queue(ordering="queue", window_events=20, ack_timeout="10m")
    site.fill(queue, 200)
    seen: list[str] = []
    with queue.receive(prefetch=prefetch) as receiver:
        while len(seen) < 200:
            (event,) = take(receiver, 1, SOON)
            seen.append(event["payload"])
            assert queue.manager().waiting <= 20
            receiver.ack([event])
        assert receiver.flush(PATIENCE)
    assert seen == [f"p{at}" for at in range(200)]


def test_many_busy_keys_share_the_room_for_what_waits_behind_them(site: Site) -> None:
    queue = site.queue(ordering="key", window_events=40, ack_timeout="10m")
    with site.transaction() as connection:
        queue.enqueue_many(
            connection, [{"user_id": at % 60, "payload": f"{at}"} for at in range(600)]
        )
    seen: dict[int, list[int]] = {key: [] for key in range(60)}
    with queue.receive() as receiver:
        while sum(map(len, seen.values())) < 600:
            events = receiver.take(timeout=SOON)
            assert events
            assert queue.manager().waiting <= 40
            for event in events:
                seen[event["user_id"]].append(int(event["payload"]))
            receiver.ack(events)
        assert receiver.flush(PATIENCE)
    assert seen == {key: list(range(key, 600, 60)) for key in range(60)}
    assert queue.counts()["to_be_fired"] == queue.counts()["fired"] == 0


def test_a_retry_is_found_though_its_key_is_crowded(site: Site) -> None:
    """Far off, it is not in memory; those that wait for it are, and there are more of them."""
    queue = site.queue(ordering="key", window="1s", window_events=20, ack_timeout="10m")
    with site.transaction() as connection:
        queue.enqueue_many(connection, [{"user_id": 1, "payload": f"{at}"} for at in range(60)])
    with queue.receive() as receiver:
        (first,) = take(receiver, 1, SOON)
        first.nack(delay=3.0)
        (again,) = take(receiver, 1, SOON)
        assert again.id == first.id
        receiver.ack([again])
        seen: list[int] = []
        while len(seen) < 59:
            (event,) = take(receiver, 1, SOON)
            seen.append(int(event["payload"]))
            receiver.ack([event])
        assert seen == list(range(1, 60))
