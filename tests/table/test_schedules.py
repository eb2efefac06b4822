"""Recurring events: each occurrence comes once, whoever dies and whoever leads."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.table.mortal import Killed, MortalStore
from tests.table.shard_site import ShardSite, sqlite_site, sqlite_url
from tests.table.site import PATIENCE, Site, eventually, payloads, settle, step_until, take
from turnlane.errors import NoSuchQueue, NoSuchSchedule, SchemaMismatch, SyntaxFault
from turnlane.table import Manager, TableQueue
from turnlane.table.grammar import CreateSchedule, DropSchedule, ShowSchedules, parse
from turnlane.table.leader import SCHEDULE_SECONDS, ScheduleRunner
from turnlane.table.schedules import Schedule
from turnlane.table.shards import keyspace_id
from turnlane.table.store import TableStore

MINUTE = 60 * 10**9
HOSTILE = 'it\'s "odd" %s {now} `x`\\'


def due(site: Site, queue: TableQueue, name: str = "tick", *, ago: int = 0) -> int:
    """Have a schedule due since so many nanoseconds; when that was."""
    at = site.now() - ago
    site.execute(
        f"UPDATE turnlane_schedule SET next_at = {at} "
        f"WHERE queue = '{queue.name}' AND name = '{name}'"
    )
    return at


def next_at(queue: TableQueue, name: str = "tick") -> int:
    return next(each.next_at for each in queue.schedules() if each.name == name)


def names(site: Site, queue: TableQueue) -> list[str]:
    return [row[0] for row in site.execute(f"SELECT event_name FROM {queue.name}")]


def test_an_event_comes_when_its_schedule_is_due(site: Site) -> None:
    queue = site.queue()
    queue.schedule("tick", "* * * * *", user_id=7, payload="tock")
    assert 0 < next_at(queue) - site.now() <= MINUTE
    at = due(site, queue, ago=-300_000_000)
    with queue.receive() as receiver:
        (event,) = take(receiver, 1, SCHEDULE_SECONDS)  # without waiting for the next look
        assert site.now() >= at == event.fire_at
        assert event.columns == {"user_id": 7, "payload": "tock"}
        settle(receiver, [event])
        assert receiver.take(timeout=0) == []
    assert 0 < next_at(queue) - site.now() <= MINUTE
    assert next_at(queue) % MINUTE == 0


def test_of_what_was_missed_one_occurrence_comes(site: Site) -> None:
    queue = site.queue()
    queue.schedule("tick", "* * * * *", payload="tock")
    at = due(site, queue, ago=180 * MINUTE)
    with contextlib.closing(site.manager(queue)) as manager:
        step_until(manager, lambda: next_at(queue) > at)
        manager.run_once()
    assert next_at(queue) > site.now()
    shown = datetime.fromtimestamp(at // 10**9, UTC)
    assert names(site, queue) == [f"tick@{shown:%Y-%m-%dT%H:%M:%SZ}"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_manager_that_dies_over_a_schedule_loses_and_doubles_nothing(
    site: Site, after: bool
) -> None:
    queue = site.queue(lease="150ms")
    queue.schedule("tick", "* * * * *", payload="tock")
    due(site, queue)
    mortal = MortalStore(site.dialect, queue.definition, "fire_schedule", after=after)
    with mortal, pytest.raises(Killed):
        step_until(Manager(mortal), lambda: False)
    with contextlib.closing(site.manager(queue)) as manager:
        step_until(manager, lambda: next_at(queue) > site.now() and manager.fires)
        manager.run_once()
    assert len(names(site, queue)) == 1


def test_an_event_of_the_same_name_is_not_put_there_again(site: Site) -> None:
    queue = site.queue()
    queue.schedule("tick", "* * * * *", payload="tock")
    at = due(site, queue)
    (schedule,) = queue.schedules()
    with site.transaction() as connection:
        queue.enqueue(connection, {"payload": "by hand"}, name=schedule.event["event_name"])
    with contextlib.closing(site.manager(queue)) as manager:
        step_until(manager, lambda: next_at(queue) > at)
    assert queue.counts()["to_be_fired"] == 1


def test_a_schedule_that_somebody_spoilt_holds_up_no_other(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    queue = site.queue()
    for name in ("a", "b", "c", "tick"):
        queue.schedule(name, "* * * * *", payload=name)
        due(site, queue, name)
    spoil = f"UPDATE turnlane_schedule SET {{}} WHERE queue = '{queue.name}' AND name = '{{}}'"
    site.execute(spoil.format("cron = 'now and then'", "a"))
    site.execute(spoil.format("event = '{\"nothing\": 1}'", "b"))
    site.execute(spoil.format("time_zone = 'Berlin/Europe'", "c"))
    with caplog.at_level(logging.ERROR), queue.receive() as receiver:
        assert payloads(take(receiver, 1)) == ["tick"]
        assert receiver.take(timeout=0) == []
    for words in ("schedule a: 'now and then' has 3 fields", "schedule b: ", "no time zone"):
        assert words in caplog.text
    assert caplog.text.count("schedule a") == 1


def test_a_schedule_is_replaced_unless_it_is_the_same(site: Site) -> None:
    queue = site.queue()
    queue.schedule("tick", "0 3 * * *", "Europe/Berlin", user_id=1, payload="x")
    at = due(site, queue, ago=MINUTE)
    queue.schedule("tick", "0 3 * * *", "Europe/Berlin", payload="x", user_id=1)
    assert next_at(queue) == at
    queue.schedule("tick", "0 3 * * *", user_id=1, payload="x")
    assert next_at(queue) > site.now()
    assert [each.time_zone for each in queue.schedules()] == ["UTC"]
    assert queue.unschedule("tick")
    assert not queue.unschedule("tick")
    assert queue.schedules() == []


def test_many_processes_declare_the_same_schedule_at_once(served_site: Site) -> None:
    queue = served_site.queue()
    opened = [served_site.open_again(queue) for _ in range(6)]
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda each: each.schedule("tick", "0 3 * * *", payload="x"), opened))
    assert len(queue.schedules()) == 1


def test_what_the_queue_does_not_take_is_refused_at_once(site: Site) -> None:
    queue = site.queue("user_id BIGINT, payload VARCHAR(5) NOT NULL")
    with pytest.raises(SchemaMismatch, match="takes no column 'nothing'"):
        queue.schedule("tick", "* * * * *", payload="x", nothing=1)
    with pytest.raises(SchemaMismatch, match="needs a value"):
        queue.schedule("tick", "* * * * *", user_id=1)
    with pytest.raises(SchemaMismatch, match="takes no such event"):
        queue.schedule("tick", "* * * * *", payload=None)
    if site.kind != "sqlite":  # which does not mind
        with pytest.raises(SchemaMismatch, match="takes no such event"):
            queue.schedule("tick", "* * * * *", payload="too long")
    for columns in ({"fire_at": 1}, {"event_name": "x"}, {"payload": b"x"}):
        with pytest.raises(ValueError, match="a schedule"):
            queue.schedule("tick", "* * * * *", **columns)
    with pytest.raises(ValueError, match="no time zone 'Mars'"):
        queue.schedule("tick", "* * * * *", "Mars", payload="x")
    assert queue.schedules() == []
    assert sum(queue.counts().values()) == 0


def test_schedules_go_with_their_queue(site: Site) -> None:
    queue = site.queue()
    queue.schedule("tick", "* * * * *", payload="x")
    site.database.sql(f"DROP QUEUE {queue.name}")
    kept = f"SELECT COUNT(*) FROM turnlane_schedule WHERE queue = '{queue.name}'"
    assert site.execute(kept) == [(0,)]


def test_a_schedule_may_have_any_name_and_values(site: Site) -> None:
    queue = site.queue(f'user_id BIGINT, "{HOSTILE.replace(chr(34), chr(34) * 2)}" TEXT, n DOUBLE')
    queue.schedule(HOSTILE, "* * * * *", **{HOSTILE: HOSTILE, "n": -2.5})
    (shown,) = queue.schedules()
    assert (shown.name, shown.columns) == (HOSTILE, {HOSTILE: HOSTILE, "n": -2.5})
    site.execute(f"UPDATE turnlane_schedule SET next_at = 0 WHERE queue = '{queue.name}'")
    with queue.receive() as receiver:
        (event,) = take(receiver, 1)
        assert event.columns == {"user_id": None, HOSTILE: HOSTILE, "n": -2.5}


def test_a_quiet_timetable_costs_a_statement_every_few_seconds(site: Site) -> None:
    queue = site.queue()
    queue.schedule("tick", "0 0 1 1 *", payload="x")
    with TableStore(site.dialect, queue.definition) as store:
        table, now = ScheduleRunner(store), site.now()
        table.run_once(0, 100.0, now)
        before = store.session.statements
        assert table.next_time() == 100.0 + SCHEDULE_SECONDS
        table.run_once(0, 100.0 + SCHEDULE_SECONDS / 2, now)
        assert store.session.statements == before
        table.run_once(0, 100.0 + SCHEDULE_SECONDS, now)
        assert store.session.statements == before + 1


# ── statements ───────────────────────────────────────────────────────────────────────────────────


def test_schedules_are_made_shown_and_dropped_by_statements(site: Site) -> None:
    queue = site.queue()
    statement = (
        f'CREATE SCHEDULE "tick" ON "{queue.name}" EVERY \'0 3 * * *\' '
        "TIME ZONE 'Europe/Berlin' VALUES (\"payload\" = 'it''s', \"user_id\" = -7)"
    )
    assert site.database.sql(statement) == ["tick"]
    assert statement in site.database.sql("SHOW SCHEDULES")
    (schedule,) = queue.schedules()
    assert schedule.columns == {"user_id": -7, "payload": "it's"}
    assert site.database.sql(f"DROP SCHEDULE tick ON {queue.name}") == ["tick"]
    assert statement not in site.database.sql("SHOW SCHEDULES")
    with pytest.raises(NoSuchSchedule, match="no schedule 'tick'"):
        site.database.sql(f"DROP SCHEDULE tick ON {queue.name}")
    with pytest.raises(NoSuchQueue):
        site.database.sql("CREATE SCHEDULE tick ON nowhere EVERY '* * * * *'")


def test_the_statements_are_read() -> None:
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
def test_mistakes_are_shown_where_they_are(text: str, place: str, words: str) -> None:
    with pytest.raises(SyntaxFault) as caught:
        parse(text)
    assert str(caught.value).startswith(f"{place}: ")
    assert words in str(caught.value)


# ── shards ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[ShardSite]:
    with sqlite_site(tmp_path, "-80", "80-") as site:
        yield site


def keys_of(site: ShardSite) -> list[int]:
    """A key of each shard."""
    shards = site.queue().map
    keys = {shards.shard_of(keyspace_id(key)).address: key for key in range(50)}
    return [keys[shard.address] for shard in shards.shards]


def kept_in(site: ShardSite, url: str) -> list[str]:
    kept = f"SELECT name FROM turnlane_schedule WHERE queue = '{site.name}'"
    return [row[0] for row in site.execute(url, kept)]


def test_a_schedule_lies_where_its_key_belongs(halves: ShardSite) -> None:
    queue, (low, high) = halves.queue(), [url for url, _ in halves.shards]
    lower, upper = keys_of(halves)
    queue.schedule("tick", "* * * * *", user_id=lower, payload="x")
    assert (kept_in(halves, low), kept_in(halves, high)) == (["tick"], [])
    queue.schedule("tick", "* * * * *", user_id=upper, payload="x")
    assert (kept_in(halves, low), kept_in(halves, high)) == ([], ["tick"])
    made = f"CREATE SCHEDULE other ON {halves.name} EVERY '* * * * *' VALUES (user_id = {lower})"
    assert halves.database.sql(made) == ["other"]
    assert [each.name for each in queue.schedules()] == ["other", "tick"]
    assert len(halves.database.sql("SHOW SCHEDULES")) == 2
    halves.database.sql(f"DROP SCHEDULE tick ON {halves.name}")
    assert [each.name for each in queue.schedules()] == ["other"]


def test_schedules_move_with_their_keys_and_fire_there(halves: ShardSite, tmp_path: Path) -> None:
    queue, merged = halves.queue(), sqlite_url(tmp_path, "all")
    for key in keys_of(halves):
        queue.schedule(f"tick {key}", "* * * * *", user_id=key, payload=f"p{key}")
    before = queue.schedules()
    queue.reshard([(merged, "-")])
    assert queue.schedules() == before
    assert all(kept_in(halves, url) == [] for url, _ in halves.shards)
    halves.execute(merged, "UPDATE turnlane_schedule SET next_at = 0")
    with queue.receive() as receiver:
        assert len(take(receiver, 2)) == 2
        # Who has an old map puts one where nobody fires it: it is moved on.
        with TableQueue(queue._sites.dialect(queue.map.retired[0]), queue.definition) as retired:
            retired.schedule("late", "* * * * *", user_id=1, payload="late")
        eventually(lambda: "late" in kept_in(halves, merged), PATIENCE)
