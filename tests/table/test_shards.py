"""Queues with several shards: where keys lie, and which receivers get them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.table.database_fixture import TIMEOUT, eventually, take
from tests.table.sharded_fixture import ShardDeliveryChecker, open_sqlite_shards, sqlite_url
from turnlane import table
from turnlane.databases import remove_password
from turnlane.errors import ConfigError, LeadLost
from turnlane.table.shards import KeyRange, Shard, ShardMap, keyspace_id


def find_key_in(key_range: str) -> int:
    """Return the first number whose hash lies in a range."""
    wanted = KeyRange.parse(key_range)
    return next(key for key in range(10_000) if wanted.contains(keyspace_id(key)))


@pytest.mark.parametrize(
    ("ranges", "wrong"),
    [
        (["-80"], "no shard has the keys 80-"),
        (["-40", "80-"], "no shard has the keys 40-80"),
        (["-80", "40-"], "more than one shard has the keys 40-80"),
        (["40-80", "80-"], "no shard has the keys -40"),
        (["-"] * 2, "more than one shard has the keys -"),
        ([], "no shard has the keys -"),
        (["-8"], "'-8' is not a key range"),
    ],
)
def test_map_must_have_every_key_exactly_once(ranges: list[str], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        ShardMap.from_shards([(f"sqlite:///{at}.db", each) for at, each in enumerate(ranges)])


def test_two_shards_cannot_share_a_database() -> None:
    with pytest.raises(ConfigError, match="is used by two shards"):
        ShardMap.from_shards([("sqlite:///a.db", "-80"), ("sqlite:///a.db", "80-")])


def test_every_key_has_one_shard() -> None:
    shards = ShardMap.from_shards([("sqlite:///b.db", "80-"), ("sqlite:///a.db", "-80")])
    for key in range(1000):
        found = shards.find_shard(keyspace_id(key))
        assert found.key_range.contains(keyspace_id(key))
    assert {shards.find_shard(keyspace_id(key)).url for key in range(20)} == {
        "sqlite:///a.db",
        "sqlite:///b.db",
    }


def test_map_is_stored_without_passwords() -> None:
    url = "postgresql://app:secret@db.example:5432/shop?sslmode=require"
    shards = ShardMap.from_shards([(url, "-")])
    assert "secret" not in shards.to_json() + repr(shards) + str(shards.shards[0])
    assert remove_password(url) == "postgresql://app@db.example:5432/shop?sslmode=require"
    assert ShardMap.from_json(shards.to_json()) == shards


def test_reshard_must_cover_whole_shards() -> None:
    shards = ShardMap.from_shards([("sqlite:///a.db", "-80"), ("sqlite:///b.db", "80-")])
    split = shards.plan_reshard(
        [Shard.from_spec(("sqlite:///c.db", "-40")), Shard.from_spec(("sqlite:///d.db", "40-80"))]
    )
    assert [str(shard.key_range) for shard in split.shards] == ["-40", "40-80", "80-"]
    assert [shard.url for shard in split.retired] == ["sqlite:///a.db"]
    assert split.version == 1
    with pytest.raises(ConfigError, match="no shard has the keys 40-80"):
        shards.plan_reshard([Shard.from_spec(("sqlite:///c.db", "-40"))])
    with pytest.raises(ConfigError, match="used by two shards"):
        shards.plan_reshard([Shard.from_spec(("sqlite:///b.db", "-80"))])


def test_events_are_stored_in_the_shard_of_their_key(tmp_path: Path) -> None:
    with open_sqlite_shards(tmp_path, "-40", "40-80", "80-") as db:
        queue = db.queue()
        assert queue.put({"user_id": key, "payload": f"p{key}"} for key in range(200)) == 200
        for url, key_range in db.shards:
            wanted = KeyRange.parse(key_range)
            keys = {row[0] for row in db.execute(url, f"SELECT user_id FROM {db.name}")}
            assert keys == {key for key in range(200) if wanted.contains(keyspace_id(key))}
        assert queue.counts()["to_be_fired"] == 200


def test_event_commits_with_other_data_in_its_shard(tmp_path: Path) -> None:
    with open_sqlite_shards(tmp_path, "-80", "80-") as db:
        queue = db.queue()
        low, high = find_key_in("-80"), find_key_in("80-")
        db.execute(db.shards[0][0], "CREATE TABLE orders (customer BIGINT)")
        with queue.transaction(low) as transaction:
            transaction.connection.execute(f"INSERT INTO orders VALUES ({low})")
            transaction.enqueue({"user_id": low, "payload": "kept"})
            with pytest.raises(ValueError, match="does not lie in shard -80"):
                transaction.enqueue({"user_id": high, "payload": "elsewhere"})
        with contextlib.suppress(RuntimeError), queue.transaction(low) as transaction:
            transaction.connection.execute(f"INSERT INTO orders VALUES ({low})")
            transaction.enqueue({"user_id": low, "payload": "rolled back"})
            raise RuntimeError
        assert db.execute(db.shards[0][0], "SELECT COUNT(*) FROM orders") == [(1,)]
        with queue.receive() as receiver:
            (event,) = take(receiver, 1)
            assert event["payload"] == "kept"
            event.ack()
            assert receiver.flush(TIMEOUT)
        assert queue.counts()["to_be_fired"] == 0


def test_key_range_of_a_receiver_may_span_shards(tmp_path: Path) -> None:
    with open_sqlite_shards(tmp_path, "-40", "40-80", "80-") as db:
        queue = db.queue()
        queue.put({"user_id": key, "payload": f"p{key}"} for key in range(300))
        middle = KeyRange.parse("20-c0")
        inside = {f"p{key}" for key in range(300) if middle.contains(keyspace_id(key))}
        with queue.receive("20-c0") as cutting, queue.receive("-20") as low:
            got = {event["payload"] for event in take(cutting, len(inside))}
            assert got == inside
            assert cutting.take(timeout=0.2) == []
            below = KeyRange.parse("-20")
            rest = {f"p{key}" for key in range(300) if below.contains(keyspace_id(key))}
            assert {event["payload"] for event in take(low, len(rest))} == rest


def test_row_in_the_wrong_shard_is_received(tmp_path: Path) -> None:
    with open_sqlite_shards(tmp_path, "-80", "80-") as db:
        high = find_key_in("80-")
        wrong = db.shards[0][0]
        db.execute(wrong, f"INSERT INTO {db.name} (user_id, payload) VALUES ({high}, 'lost?')")
        with db.queue().receive("80-") as receiver:
            assert take(receiver, 1)[0]["payload"] == "lost?"


def test_two_processes_share_the_shards(tmp_path: Path) -> None:
    """Each process leads some shards; only the leader of a shard confirms its acks."""
    with open_sqlite_shards(tmp_path, "-80", "80-") as db:
        first, second = db.queue(), db.queue()
        low, high = (shard for shard in first.map.shards)
        first.queue(low).manager()
        second.queue(high).manager()
        eventually(lambda: first.queue(low).manager().can_fire)
        eventually(lambda: second.queue(high).manager().can_fire)
        checker = ShardDeliveryChecker()
        with first.receive() as one, second.receive() as two:
            first.put({"user_id": key, "payload": f"p{key}"} for key in range(100))
            expected = {f"p{key}" for key in range(100)}

            def all_confirmed() -> bool:
                checker.take(one, 0.02)
                checker.take(two, 0.02)
                return checker.confirmed == expected

            eventually(all_confirmed)
            assert set(checker.received.values()) == {1}


def test_ack_lost_with_the_lease_is_not_confirmed_later(tmp_path: Path) -> None:
    """Even if the same manager leads again before flush() is called."""
    with open_sqlite_shards(tmp_path, "-") as db:
        queue = db.queue()
        queue.put([{"user_id": 1, "payload": "once"}])
        with queue.receive() as receiver:
            (shard,) = queue.map.shards
            manager = queue.queue(shard).manager()
            (event,) = take(receiver, 1)
            token = f"UPDATE turnlane_lease SET token = token + 1 WHERE queue = '{db.name}'"
            db.execute(shard.url, f"{token.replace('token + 1', 'token + 1, expires_at = 0')}")
            event.ack()
            eventually(lambda: manager.counts.lost_leads == 1)
            eventually(lambda: manager.can_fire)
            with pytest.raises(LeadLost):
                receiver.flush(TIMEOUT)
            (again,) = take(receiver, 1)
            again.ack()
            assert receiver.flush(TIMEOUT)


def test_queue_without_a_key_cannot_be_sharded(tmp_path: Path) -> None:
    shards = [(sqlite_url(tmp_path, "a"), "-80"), (sqlite_url(tmp_path, "b"), "80-")]
    with table.connect_shards(shards) as database:
        database.sql("CREATE QUEUE plain (payload TEXT)")
        assert database.sql("SHOW QUEUES") == ["plain"]
        with pytest.raises(ConfigError, match="SHARD BY"):
            database.queue("plain")


def test_shards_with_different_definitions_are_refused(tmp_path: Path) -> None:
    shards = [(sqlite_url(tmp_path, "a"), "-80"), (sqlite_url(tmp_path, "b"), "80-")]
    with table.connect(shards[0][0]) as one, table.connect(shards[1][0]) as other:
        one.sql("CREATE QUEUE q (k BIGINT) SHARD BY (k)")
        other.sql("CREATE QUEUE q (k TEXT) SHARD BY (k)")
    with table.connect_shards(shards) as database, pytest.raises(ConfigError, match="not the same"):
        database.queue("q")
