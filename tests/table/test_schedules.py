"""Schedules: every occurrence comes once, no matter which manager dies or leads."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

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
from tests.table.dying_store import DyingStore, ProcessKilled
from tests.table.sharded_fixture import ShardedFixture, open_sqlite_shards, sqlite_url
from turnlane.errors import NoSuchQueue, NoSuchSchedule, SchemaMismatch, SyntaxFault
from turnlane.table import Manager, TableQueue
from turnlane.table.grammar import CreateSchedule, DropSchedule, ShowSchedules, parse
from turnlane.table.leader import SCHEDULE_SECONDS, ScheduleRunner
from turnlane.table.schedules import Schedule
from turnlane.table.shards import keyspace_id
from turnlane.table.store import TableStore

MINUTE = 60 * 10**9
HOSTILE = 'it\'s "odd" %s {now} `x`\\'


def make_due(db: DatabaseFixture, queue: TableQueue, name: str = "tick", *, ago: int = 0) -> int:
    """Make a schedule due ``ago`` nanoseconds ago; returns that time."""
    at = db.now() - ago
    db.execute(
        f"UPDATE turnlane_schedule SET next_at = {at} "
        f"WHERE queue = '{queue.name}' AND name = '{name}'"
    )
    return at


def read_next_at(queue: TableQueue, name: str = "tick") -> int:
    return next(each.next_at for each in queue.schedules() if each.name == name)


def read_event_names(db: DatabaseFixture, queue: TableQueue) -> list[str]:
    return [row[0] for row in db.execute(f"SELECT event_name FROM {queue.name}")]


def test_event_is_inserted_when_its_schedule_is_due(db: DatabaseFixture) -> None:
    queue = db.queue()
    queue.schedule("tick", "* * * * *", user_id=7, payload="tock")
    assert 0 < read_next_at(queue) - db.now() <= MINUTE
    at = make_due(db, queue, ago=-300_000_000)
    with queue.receive() as receiver:
        (event,) = take(
            receiver, 1, SCHEDULE_SECONDS
        )  # without waiting for the next read of the schedules
        assert db.now() >= at == event.fire_at
        assert event.columns == {"user_id": 7, "payload": "tock"}
        settle(receiver, [event])
        assert receiver.take(timeout=0) == []
    assert 0 < read_next_at(queue) - db.now() <= MINUTE
    assert read_next_at(queue) % MINUTE == 0


def test_one_of_the_missed_occurrences_is_inserted(db: DatabaseFixture) -> None:
    queue = db.queue()
    queue.schedule("tick", "* * * * *", payload="tock")
    at = make_due(db, queue, ago=180 * MINUTE)
    with contextlib.closing(db.manager(queue)) as manager:
        step_until(manager, lambda: read_next_at(queue) > at)
        manager.run_once()
    assert read_next_at(queue) > db.now()
    shown = datetime.fromtimestamp(at // 10**9, UTC)
    assert read_event_names(db, queue) == [f"tick@{shown:%Y-%m-%dT%H:%M:%SZ}"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_manager_killed_while_firing_a_schedule_inserts_it_once(
    db: DatabaseFixture, after: bool
) -> None:
    queue = db.queue(lease="150ms")
    queue.schedule("tick", "* * * * *", payload="tock")
    make_due(db, queue)
    dying_directory = DyingStore(db.dialect, queue.definition, "fire_schedule", after=after)
    with dying_directory, pytest.raises(ProcessKilled):
        step_until(Manager(dying_directory), lambda: False)
    with contextlib.closing(db.manager(queue)) as manager:
        step_until(manager, lambda: read_next_at(queue) > db.now() and manager.can_fire)
        manager.run_once()
    assert len(read_event_names(db, queue)) == 1


def test_existing_event_of_the_same_name_is_not_inserted_again(db: DatabaseFixture) -> None:
    queue = db.queue()
    queue.schedule("tick", "* * * * *", payload="tock")
    at = make_due(db, queue)
    (schedule,) = queue.schedules()
    with db.transaction() as connection:
        queue.enqueue(connection, {"payload": "by hand"}, name=schedule.make_event()["event_name"])
    with contextlib.closing(db.manager(queue)) as manager:
        step_until(manager, lambda: read_next_at(queue) > at)
    assert queue.counts()["to_be_fired"] == 1


def test_broken_schedule_does_not_stop_others(
    db: DatabaseFixture, caplog: pytest.LogCaptureFixture
) -> None:
    queue = db.queue()
    for name in ("a", "b", "c", "tick"):
        queue.schedule(name, "* * * * *", payload=name)
        make_due(db, queue, name)
    spoil = f"UPDATE turnlane_schedule SET {{}} WHERE queue = '{queue.name}' AND name = '{{}}'"
    db.execute(spoil.format("cron = 'now and then'", "a"))
    db.execute(spoil.format("event = '{\"nothing\": 1}'", "b"))
    db.execute(spoil.format("time_zone = 'Berlin/Europe'", "c"))
    with caplog.at_level(logging.ERROR), queue.receive() as receiver:
        assert payloads(take(receiver, 1)) == ["tick"]
        assert receiver.take(timeout=0) == []
    assert caplog.text.count("table.schedule_failed") == 3
    for words in ("'now and then' has 3 fields", "schedule=b ", "no time zone 'Berlin/Europe'"):
        assert words in caplog.text
    assert caplog.text.count("schedule=a ") == 1


def test_changed_schedule_is_replaced_and_an_equal_one_stays(db: DatabaseFixture) -> None:
    queue = db.queue()
    queue.schedule("tick", "0 3 * * *", "Europe/Berlin", user_id=1, payload="x")
    at = make_due(db, queue, ago=MINUTE)
    queue.schedule("tick", "0 3 * * *", "Europe/Berlin", payload="x", user_id=1)
    assert read_next_at(queue) == at
    queue.schedule("tick", "0 3 * * *", user_id=1, payload="x")
    assert read_next_at(queue) > db.now()
    assert [each.time_zone for each in queue.schedules()] == ["UTC"]
    assert queue.unschedule("tick")
    assert not queue.unschedule("tick")
    assert queue.schedules() == []


def test_many_processes_can_create_the_same_schedule_at_once(server_db: DatabaseFixture) -> None:
    queue = server_db.queue()
    opened = [server_db.open_again(queue) for _ in range(6)]
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda each: each.schedule("tick", "0 3 * * *", payload="x"), opened))
    assert len(queue.schedules()) == 1


def test_schedule_with_an_invalid_event_is_refused(db: DatabaseFixture) -> None:
    queue = db.queue("user_id BIGINT, payload VARCHAR(5) NOT NULL")
    with pytest.raises(SchemaMismatch, match="takes no column 'nothing'"):
        queue.schedule("tick", "* * * * *", payload="x", nothing=1)
    with pytest.raises(SchemaMismatch, match="needs a value"):
        queue.schedule("tick", "* * * * *", user_id=1)
    with pytest.raises(SchemaMismatch, match="rejects the event"):
        queue.schedule("tick", "* * * * *", payload=None)
    if db.kind != "sqlite":  # SQLite takes any value
        with pytest.raises(SchemaMismatch, match="rejects the event"):
            queue.schedule("tick", "* * * * *", payload="too long")
    for columns in ({"fire_at": 1}, {"event_name": "x"}, {"payload": b"x"}):
        with pytest.raises(ValueError, match="a schedule"):
            queue.schedule("tick", "* * * * *", **columns)
    with pytest.raises(ValueError, match="no time zone 'Mars'"):
        queue.schedule("tick", "* * * * *", "Mars", payload="x")
    assert queue.schedules() == []
    assert sum(queue.counts().values()) == 0


def test_drop_queue_deletes_its_schedules(db: DatabaseFixture) -> None:
    queue = db.queue()
    queue.schedule("tick", "* * * * *", payload="x")
    db.database.sql(f"DROP QUEUE {queue.name}")
    kept = f"SELECT COUNT(*) FROM turnlane_schedule WHERE queue = '{queue.name}'"
    assert db.execute(kept) == [(0,)]


def test_schedule_may_have_any_name_and_values(db: DatabaseFixture) -> None:
    queue = db.queue(f'user_id BIGINT, "{HOSTILE.replace(chr(34), chr(34) * 2)}" TEXT, n DOUBLE')
    queue.schedule(HOSTILE, "* * * * *", **{HOSTILE: HOSTILE, "n": -2.5})
    (shown,) = queue.schedules()
    assert (shown.name, shown.columns) == (HOSTILE, {HOSTILE: HOSTILE, "n": -2.5})
    db.execute(f"UPDATE turnlane_schedule SET next_at = 0 WHERE queue = '{queue.name}'")
    with queue.receive() as receiver:
        (event,) = take(receiver, 1)
        assert event.columns == {"user_id": None, HOSTILE: HOSTILE, "n": -2.5}


def test_idle_schedule_runner_sends_one_statement_every_few_seconds(db: DatabaseFixture) -> None:
    queue = db.queue()
    queue.schedule("tick", "0 0 1 1 *", payload="x")
    with TableStore(db.dialect, queue.definition) as store:
        table, now = ScheduleRunner(store), db.now()
        table.run_once(0, 100.0, now)
        before = store.session.statements
        assert table.next_time == 100.0 + SCHEDULE_SECONDS
        table.run_once(0, 100.0 + SCHEDULE_SECONDS / 2, now)
        assert store.session.statements == before
        table.run_once(0, 100.0 + SCHEDULE_SECONDS, now)
        assert store.session.statements == before + 1


# ── statements ───────────────────────────────────────────────────────────────────────────────────


def test_statements_create_show_and_drop_schedules(db: DatabaseFixture) -> None:
    queue = db.queue()
    statement = (
        f'CREATE SCHEDULE "tick" ON "{queue.name}" EVERY \'0 3 * * *\' '
        "TIME ZONE 'Europe/Berlin' VALUES (\"payload\" = 'it''s', \"user_id\" = -7)"
    )
    assert db.database.sql(statement) == ["tick"]
    assert statement in db.database.sql("SHOW SCHEDULES")
    (schedule,) = queue.schedules()
    assert schedule.columns == {"user_id": -7, "payload": "it's"}
    assert db.database.sql(f"DROP SCHEDULE tick ON {queue.name}") == ["tick"]
    assert statement not in db.database.sql("SHOW SCHEDULES")
    with pytest.raises(NoSuchSchedule, match="no schedule 'tick'"):
        db.database.sql(f"DROP SCHEDULE tick ON {queue.name}")
    with pytest.raises(NoSuchQueue):
        db.database.sql("CREATE SCHEDULE tick ON nowhere EVERY '* * * * *'")


def test_schedule_statements_are_parsed() -> None:
    text = "create schedule Tick on Q every '* * * * *' values (a = NULL, b = true, c = 1.5,);"
    schedule = Schedule("q", "tick", "* * * * *", columns={"a": None, "b": True, "c": 1.5})
    assert parse(text) == parse(str(schedule)) == CreateSchedule(schedule)
    assert parse("DROP SCHEDULE a ON b") == DropSchedule("a", "b")
    assert parse("SHOW SCHEDULES") == ShowSchedules()


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("CREATE SCHEDULE a EVERY '* * * * *'", "1:19", "expected ON"),
        ("CREATE SCHEDULE a ON b EVERY 5", "1:30", "expected a cron expression in quotes"),
        ("CREATE SCHEDULE a ON b\nEVERY '61 * * * *'", "1:17", "minute: '61'"),
        ("CREATE SCHEDULE a ON b EVERY '* * * * *' TIME ZONE 'X/Y'", "1:17", "time zone 'X/Y'"),
        ("CREATE SCHEDULE a ON b EVERY '* * * * *' VALUES (c = d)", "1:54", "expected TRUE or"),
        ("CREATE SCHEDULE a ON b EVERY '* * * * *' VALUES (c = 5s)", "1:54", "not a number"),
        ("CREATE SCHEDULE a ON b EVERY '* * * * *' VALUES (c=1, c=2)", "1:55", "twice"),
        ("CREATE SCHEDULE a ON b EVERY '* * * * *' VALUES (fire_at=1)", "1:17", "by itself"),
        ("SHOW SCHEDULE", "1:6", "did you mean SCHEDULES"),
    ],
)
def test_syntax_error_has_its_position(text: str, place: str, words: str) -> None:
    with pytest.raises(SyntaxFault) as caught:
        parse(text)
    assert str(caught.value).startswith(f"{place}: ")
    assert words in str(caught.value)


# ── shards ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[ShardedFixture]:
    with open_sqlite_shards(tmp_path, "-80", "80-") as db:
        yield db


def find_keys(db: ShardedFixture) -> list[int]:
    """Return one key of each shard."""
    shards = db.queue().map
    keys = {shards.find_shard(keyspace_id(key)).address: key for key in range(50)}
    return [keys[shard.address] for shard in shards.shards]


def read_schedules_in(db: ShardedFixture, url: str) -> list[str]:
    kept = f"SELECT name FROM turnlane_schedule WHERE queue = '{db.name}'"
    return [row[0] for row in db.execute(url, kept)]


def test_schedule_is_stored_in_the_shard_of_its_key(halves: ShardedFixture) -> None:
    queue, (low, high) = halves.queue(), [url for url, _ in halves.shards]
    lower, upper = find_keys(halves)
    queue.schedule("tick", "* * * * *", user_id=lower, payload="x")
    assert (read_schedules_in(halves, low), read_schedules_in(halves, high)) == (["tick"], [])
    queue.schedule("tick", "* * * * *", user_id=upper, payload="x")
    assert (read_schedules_in(halves, low), read_schedules_in(halves, high)) == ([], ["tick"])
    made = f"CREATE SCHEDULE other ON {halves.name} EVERY '* * * * *' VALUES (user_id = {lower})"
    assert halves.database.sql(made) == ["other"]
    assert [each.name for each in queue.schedules()] == ["other", "tick"]
    assert len(halves.database.sql("SHOW SCHEDULES")) == 2
    halves.database.sql(f"DROP SCHEDULE tick ON {halves.name}")
    assert [each.name for each in queue.schedules()] == ["other"]


def test_schedules_move_with_their_keys_and_fire_there(
    halves: ShardedFixture, tmp_path: Path
) -> None:
    queue, merged = halves.queue(), sqlite_url(tmp_path, "all")
    for key in find_keys(halves):
        queue.schedule(f"tick {key}", "* * * * *", user_id=key, payload=f"p{key}")
    before = queue.schedules()
    queue.reshard([(merged, "-")])
    assert queue.schedules() == before
    assert all(read_schedules_in(halves, url) == [] for url, _ in halves.shards)
    halves.execute(merged, "UPDATE turnlane_schedule SET next_at = 0")
    with queue.receive() as receiver:
        assert len(take(receiver, 2)) == 2
        # A client with an old map creates one in a retired shard: it is moved.
        with TableQueue(
            queue._directory.get_dialect(queue.map.retired[0]), queue.definition
        ) as retired:
            retired.schedule("late", "* * * * *", user_id=1, payload="late")
        eventually(lambda: "late" in read_schedules_in(halves, merged), TIMEOUT)
