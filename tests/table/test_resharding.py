"""Resharding: no event is lost and no acked event comes again, no matter which process dies."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.table.database_fixture import TIMEOUT, DatabaseFixture, eventually, take
from tests.table.dying_store import ProcessKilled
from tests.table.sharded_fixture import (
    OPTIONS,
    ShardDeliveryChecker,
    ShardedFixture,
    open_sqlite_shards,
    sqlite_url,
)
from turnlane import table
from turnlane.errors import LeadLost, ReshardUnderWay, RetryLater
from turnlane.table.batch_commit import BatchStaging, get_job_id
from turnlane.table.queue_sql import load_queue_dialect
from turnlane.table.reshard import Resharder, ReshardProgress, ReshardStep, RowMover
from turnlane.table.shard_directory import ShardDirectory, ShardRouter
from turnlane.table.shard_store import ShardStore, TransferFilter
from turnlane.table.shards import KeyRange, Shard, ShardMap, keyspace_id

RESHARDING_PROCESS = Path(__file__).with_name("resharding_process.py")

STEPS = (
    "read_newest_map",
    "save_map",
    "save_plan",
    "read_plan",
    "close_lease",
    "open_lease",
    "move_to_outbox",
    "read_first_batch",
    "insert_batch",
    "delete_batch",
    "read_map",
    "has_leader",
    "delete_plan",
    "read_schedules",
    "add_schedule",
    "remove_schedule",
)


class DyingShardStore(ShardStore):
    """Raises before or after one call of one operation, counted over all stores of a process."""

    fatal = ""
    after = False
    calls = 0
    survive = 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        kind = DyingShardStore
        if name not in STEPS or name != kind.fatal:
            return found

        def dying(*arguments: Any) -> Any:
            kind.calls += 1
            if kind.calls <= kind.survive:
                return found(*arguments)
            if kind.after:
                found(*arguments)
            raise ProcessKilled

        return dying


class DyingShardDirectory(ShardDirectory):
    """A directory whose stores raise ``ProcessKilled``."""

    def get_store(self, shard: Shard) -> ShardStore:
        with self._lock:
            if shard.address not in self._stores:
                self._stores[shard.address] = DyingShardStore(
                    self.get_dialect(shard), self.definition
                )
            return self._stores[shard.address]


def make_split_targets(directory: Path) -> list[Shard]:
    return [Shard.from_spec((sqlite_url(directory, each), each)) for each in ("-40", "40-80")]


def put_events(queue: table.ShardedQueue, label: str, count: int) -> set[str]:
    """Put events that are due now, soon, and far after the window."""
    now = time.time_ns()
    rows = [
        {"user_id": at, "payload": f"{label} {at}", "fire_at": now + (at % 3 == 2) * 10**11 * 9}
        for at in range(count)
    ]
    queue.put(rows)
    return {str(row["payload"]) for row in rows}


def make_all_due(db: ShardedFixture, shards: ShardMap) -> None:
    """Make all events due now."""
    for shard in shards.shards:
        later = f"state = 'to_be_fired' AND fire_at > {time.time_ns()}"
        db.execute(shard.url, f"UPDATE {db.name} SET fire_at = {time.time_ns()} WHERE {later}")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("operation", STEPS)
def test_reshard_killed_at_every_step_is_resumed(
    tmp_path: Path, operation: str, after: bool
) -> None:
    """Killed at the first call of an operation, then at the second, and so on until it ends."""
    with open_sqlite_shards(tmp_path, "-80", "80-") as db:
        queue = db.queue()
        expected = put_events(queue, "before", 60)
        for key in (1, 6, 9):
            queue.schedule(f"tick {key}", "0 3 * * *", user_id=key)
        scheduled = queue.schedules()
        DyingShardStore.fatal, DyingShardStore.after = operation, after
        directory, deaths = db.directory(), 0
        while reshard_until_killed(
            directory, ShardMap.from_shards(db.shards), make_split_targets(tmp_path), deaths
        ):
            deaths += 1
            assert deaths < 60
        assert deaths
        queue.refresh()
        assert queue.map.version == 1
        stored = [
            payload
            for shard in queue.map.shards
            for (payload,) in db.execute(shard.url, f"SELECT payload FROM {db.name}")
        ]
        assert sorted(stored) == sorted(expected)  # each of them once
        assert queue.schedules() == scheduled
        assert db.rows(db.shards[0][0]) == 0
        for shard in queue.map.shards:
            lease = f"SELECT owner FROM turnlane_lease WHERE queue = '{db.name}'"
            assert db.execute(shard.url, lease) == [(None,)]


def reshard_until_killed(
    directory: ShardDirectory, shards: ShardMap, targets: list[Shard], survive: int
) -> bool:
    """Reshard; whether it was killed."""
    DyingShardStore.calls, DyingShardStore.survive = 0, survive
    definition = directory.definition
    with DyingShardDirectory(definition, [shard.url for shard in shards.shards]) as dying_directory:
        try:
            Resharder.begin(dying_directory, dying_directory.find_newest_map(shards), targets).run()
        except ProcessKilled:
            return True
    return False


def test_split_and_merge_under_load_lose_nothing(tmp_path: Path) -> None:
    """Events come and fire during both, through clients with old and with new maps."""
    with open_sqlite_shards(tmp_path, "-80", "80-") as db:
        queue, checker, expected = db.queue(), ShardDeliveryChecker(), set[str]()
        with InsertLoad(db, expected), queue.receive() as receiver, AckingThread(checker, receiver):
            for targets in (
                make_split_targets(tmp_path),
                [Shard.from_spec((sqlite_url(tmp_path, "all"), "-"))],
            ):
                db.queue().reshard(targets)
                wait_for_confirmed(checker, len(checker.confirmed) + 50)
        queue.refresh()
        assert [str(shard.key_range) for shard in queue.map.shards] == ["-"]
        assert len(queue.map.retired) == 4
        with queue.receive() as receiver:
            checker.drain(receiver, expected)


def wait_for_confirmed(checker: ShardDeliveryChecker, count: int) -> None:
    eventually(lambda: len(checker.confirmed) > count)


class InsertLoad:
    """Inserts events, by plain SQL into the first shards and by a client that follows the map."""

    def __init__(self, db: ShardedFixture, expected: set[str]) -> None:
        self._site = db
        self._expected = expected
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        db, queue, at = self._site, self._site.queue(), 0
        old = ShardMap.from_shards(db.shards)
        while not self._over.wait(0.005):
            at += 1
            url = old.find_shard(keyspace_id(at)).url
            db.execute(url, f"INSERT INTO {db.name} (user_id, payload) VALUES ({at}, 'old {at}')")
            queue.put([{"user_id": at, "payload": f"new {at}"}])
            self._expected |= {f"old {at}", f"new {at}"}


class AckingThread:
    """Receives and acks on a thread."""

    def __init__(self, checker: ShardDeliveryChecker, receiver: table.Receiver) -> None:
        self._oracle = checker
        self._receiver = receiver
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._oracle.take(self._receiver)
        except BaseException as error:  # noqa: BLE001 - raised when the test ends
            self._failure = error


def test_resharder_killed_repeatedly_under_load_loses_nothing(tmp_path: Path) -> None:
    """kill -9 at random moments; the last process is not killed and finishes."""
    with open_sqlite_shards(tmp_path, "-80", "80-") as db:
        targets = [(shard.url, str(shard.key_range)) for shard in make_split_targets(tmp_path)]
        chance = random.Random(7)
        reshard_through_kills(db, targets, 6_000, [chance.randrange(1, 8) for _ in range(4)])


def reshard_through_kills(
    db: ShardedFixture, targets: list[tuple[str, str]], count: int, kills: list[int]
) -> None:
    """Reshard under load; each process is killed after some lines of progress."""
    queue, checker = db.queue(), ShardDeliveryChecker()
    expected = put_events(queue, "first", count)
    arguments = [db.name, json.dumps(db.shards), json.dumps(targets)]
    with InsertLoad(db, expected), queue.receive() as receiver, AckingThread(checker, receiver):
        for lines in kills:
            kill_after(arguments, lines)
        assert kill_after(arguments, 10**6) == 0
        queue.refresh()
    assert queue.map.version == 1
    make_all_due(db, queue.map)
    with queue.receive() as receiver:
        checker.drain(receiver, expected)


def kill_after(arguments: list[str], lines: int) -> int:
    """Run the resharding process, and kill it after ``lines`` lines of progress."""
    with subprocess.Popen(
        [sys.executable, str(RESHARDING_PROCESS), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for _, _line in zip(range(lines), process.stdout, strict=False):
            pass
        if process.poll() is None and lines < 10**6:
            process.kill()
        _, errors = process.communicate(timeout=TIMEOUT)
        assert process.returncode in (0, -9), errors
        return process.returncode


@pytest.fixture(params=["postgres", "mariadb"])
def served_shards(request: pytest.FixtureRequest) -> list[str]:
    """Create empty databases on a server; returns their urls."""
    return create_databases(request.getfixturevalue(request.param))


def create_databases(server: Any) -> list[str]:
    names = [f"shard_{uuid.uuid4().hex[:8]}" for _ in range(3)]
    with contextlib.closing(load_queue_dialect(server.url).connect()) as connection:
        for name in names:
            connection.cursor().execute(f"CREATE DATABASE {name}")
    base, mark, query = server.url.partition("?")
    root = base.rpartition("/")[0]
    return [f"{root}/{name}{mark}{query}" for name in names]


def test_split_under_load_on_a_server_loses_nothing(served_shards: list[str]) -> None:
    first, *others = served_shards
    with ShardedFixture([(first, "-")]) as db:
        queue, checker = db.queue(), ShardDeliveryChecker()
        expected = put_events(queue, "first", 3_000)
        targets = list(zip(others, ("-80", "80-"), strict=True))
        with InsertLoad(db, expected), queue.receive() as receiver, AckingThread(checker, receiver):
            steps: list[ReshardProgress] = []
            moved = db.queue().reshard(targets, steps.append)
            assert moved >= 1_000
            eventually(lambda: queue.map.version == 1)
        assert [step.step for step in steps if step.step is ReshardStep.DONE] == [ReshardStep.DONE]
        make_all_due(db, queue.map)
        with queue.receive() as receiver:
            checker.drain(receiver, expected)
        for url, key_range in targets:
            wanted = KeyRange.parse(key_range)
            ids = db.execute(url, f"SELECT keyspace_id FROM {db.name}")
            assert all(wanted.contains(row[0]) for row in ids)


def test_resharder_killed_under_load_on_a_server_loses_nothing(served_shards: list[str]) -> None:
    """Killed while events are moved ahead, and while it drains."""
    first, *others = served_shards
    with ShardedFixture([(first, "-")]) as db:
        targets = list(zip(others, ("-80", "80-"), strict=True))
        reshard_through_kills(db, targets, 600, [2, 5])


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def shard_urls(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Create three empty databases; returns their urls."""
    if request.param == "sqlite":
        return [sqlite_url(tmp_path, each) for each in "abc"]
    return create_databases(request.getfixturevalue(request.param))


def test_event_id_never_names_two_events(shard_urls: list[str]) -> None:
    """After a merge of shards that were created together, and after a split."""
    first, second, third = shard_urls
    with ShardedFixture([(first, "-80"), (second, "80-")]) as db:
        queue = db.queue()
        rows = [{"user_id": at, "payload": f"p{at}", "fire_at": 2**62} for at in range(50)]
        queue.put(rows)
        before = {row[0] for url in (first, second) for row in read_ids_in(db, url)}
        assert len(before) == 50
        queue.reshard([(third, "-")])
        after = {row[0] for row in read_ids_in(db, third)}
        assert len(after) == 50
        assert not before & after
        assert queue.map.shards[0].first_id <= min(after)


def test_ack_of_a_moved_event_acks_no_other(shard_urls: list[str]) -> None:
    first, *others = shard_urls
    with ShardedFixture([(first, "-")], OPTIONS + ", ack_timeout = 60s") as db:
        queue = db.queue()
        queue.put({"user_id": 7, "payload": f"p{at}"} for at in range(3))
        with queue.receive() as receiver:
            stale = take(receiver, 3)
            queue.reshard(list(zip(others, ("-80", "80-"), strict=True)))
            with pytest.raises(LeadLost), queue.transaction(7) as transaction:
                transaction.ack(stale[0])
            for url in others:
                shown = ", ".join(str(event.id) for event in stale)
                acked = f"UPDATE {db.name} SET state = 'acked' WHERE event_id IN ({shown})"
                db.execute(url, acked)
            again = take(receiver, 3)
            assert {event["payload"] for event in again} == {"p0", "p1", "p2"}
            elsewhere = next(at for at in range(99) if not is_same_half(at, 7))
            with (
                pytest.raises(ValueError, match="does not lie in shard"),
                queue.transaction(elsewhere) as transaction,
            ):
                transaction.ack(again[0])
            with queue.transaction(7) as transaction:
                for event in again:
                    transaction.ack(event)
        assert queue.counts()["to_be_fired"] + queue.counts()["fired"] == 0


def read_ids_in(db: ShardedFixture, url: str) -> list[tuple[Any, ...]]:
    return db.execute(url, f"SELECT event_id FROM {db.name}")


def is_same_half(one: int, other: int) -> bool:
    lower = KeyRange.parse("-80")
    return lower.contains(keyspace_id(one)) == lower.contains(keyspace_id(other))


def test_locked_row_delays_only_the_end_of_a_reshard(
    served_shards: list[str],
) -> None:
    first, *others = served_shards
    with ShardedFixture([(first, "-")]) as db, ThreadPoolExecutor(1) as threads:
        queue = db.queue()
        queue.put({"user_id": at, "payload": f"p{at}"} for at in range(10))
        dialect = load_queue_dialect(first)
        with contextlib.closing(dialect.connect()) as connection:
            with dialect.transaction(connection):
                lock_row = f"SELECT payload FROM {db.name} WHERE user_id = 3 FOR UPDATE"
                connection.cursor().execute(lock_row)
                targets = list(zip(others, ("-80", "80-"), strict=True))
                reshard = threads.submit(db.queue().reshard, targets)
                eventually(lambda: queue.map.version == 1)
                with queue.receive() as receiver:
                    events = take(receiver, 9)
                    assert "p3" not in {event["payload"] for event in events}
                    receiver.ack(events)
                    assert receiver.flush(TIMEOUT)
                assert not reshard.done()
            assert reshard.result(TIMEOUT) == 10
        with queue.receive() as receiver:
            assert [event["payload"] for event in take(receiver, 1)] == ["p3"]


UNREADABLE = {
    "sqlite": ("payload TEXT NOT NULL", "payload", "CAST(x'6f64ff64' AS TEXT)", "od\\xffd"),
    "postgres": ("day DATE NOT NULL, ready BOOLEAN", "day", "'infinity'", "infinity"),
}
"""Values that a driver cannot read: columns, one column, a value, and how it arrives."""


@pytest.mark.parametrize("database", UNREADABLE)
def test_unreadable_row_does_not_stop_a_reshard(
    tmp_path: Path, request: pytest.FixtureRequest, database: str
) -> None:
    """Moved ahead or drained, the row becomes a dead letter."""
    if database == "sqlite":
        first, *others = [sqlite_url(tmp_path, each) for each in "abc"]
    else:
        first, *others = create_databases(request.getfixturevalue(database))
    columns, column, value, arrived = UNREADABLE[database]
    with ShardedFixture([(first, "-")], OPTIONS, f"user_id BIGINT, {columns}") as db:
        queue = db.queue()
        good = {"sqlite": "'good'", "postgres": "'2026-11-17'"}[database]
        for at in range(20):
            odd, later = at in {3, 14, 15}, time.time_ns() + (at >= 10) * 10**12
            db.execute(
                first,
                f"INSERT INTO {db.name} (user_id, fire_at, event_name, {column}) "
                f"VALUES ({at}, {later}, 'n{at}', {value if odd else good})",
            )
        assert queue.reshard(list(zip(others, ("-80", "80-"), strict=True))) == 20
        assert db.rows(first) == 0
        counts = queue.counts()
        assert (counts["to_be_fired"], counts["dead"]) == (17, 3)
        dead = f"FROM {db.name} WHERE state = 'dead'"
        shown = f"SELECT user_id, event_name, last_error, CAST({column} AS TEXT) {dead}"
        found = sorted(row for url in others for row in db.execute(url, shown))
        assert [row[:2] for row in found] == [(3, "n3"), (14, "n14"), (15, "n15")]
        assert all(row[2].startswith("cannot be read: ") and row[3] == arrived for row in found)
        with queue.receive() as receiver:
            assert len(take(receiver, 9)) == 9


def test_late_rows_of_a_retired_shard_are_moved(tmp_path: Path) -> None:
    """A plain INSERT into the first shard arrives after two reshards."""
    with open_sqlite_shards(tmp_path, "-") as db:
        db.queue().reshard([(sqlite_url(tmp_path, "a"), "-80"), (sqlite_url(tmp_path, "b"), "80-")])
        db.queue().reshard([(sqlite_url(tmp_path, "c"), "-")])
        first = db.shards[0][0]
        with db.queue().receive() as receiver:
            db.execute(first, f"INSERT INTO {db.name} (user_id, payload) VALUES (1, 'late')")
            (event,) = take(receiver, 1)
            assert event["payload"] == "late"
            event.ack()
            assert receiver.flush(TIMEOUT)
        assert db.rows(first) == 0


def test_batch_is_delivered_by_the_map_of_its_version(tmp_path: Path) -> None:
    """By a newer map, an event that arrived before a crash would come a second time."""
    with open_sqlite_shards(tmp_path, "-") as db:
        queue, directory = db.queue(), db.directory()
        (source,) = queue.map.shards
        first = Shard.from_spec((sqlite_url(tmp_path, "a"), "-"))
        queue.reshard([first])
        db.execute(source.url, f"INSERT INTO {db.name} (user_id, payload) VALUES (1, 'one')")
        store = directory.get_store(source)
        assert store.move_to_outbox(TransferFilter.PLAIN, 1) == 1
        batch = store.read_first_batch()
        assert batch is not None
        assert directory.get_store(first).insert_batch(store.id, batch.number, batch.rows)
        # Killed here, before the batch was deleted from the outbox.
        last = (sqlite_url(tmp_path, "b"), "-")
        queue.reshard([last])
        RowMover(directory, source).drain(2)
        assert [db.rows(each) for each in (source.url, first.url, last[0])] == [0, 0, 1]


def test_acked_events_stay_acked_after_a_reshard(tmp_path: Path) -> None:
    with open_sqlite_shards(tmp_path, "-", options=f"{OPTIONS}, retention = 1h") as db:
        queue = db.queue()
        queue.put([{"user_id": at, "payload": f"p{at}"} for at in range(50)])
        with queue.receive() as receiver:
            events = take(receiver, 50)
            receiver.ack(events[:30])
            assert receiver.flush(TIMEOUT)
        queue.reshard([(sqlite_url(tmp_path, "a"), "-80"), (sqlite_url(tmp_path, "b"), "80-")])
        assert queue.counts()["acked"] == 30
        acked = {event["payload"] for event in events[:30]}
        with queue.receive() as receiver:
            rest = {event["payload"] for event in take(receiver, 20)}
            assert len(rest) == 20
            assert not rest & acked
            assert receiver.take(timeout=0.3) == []


def test_old_manager_cannot_store_acks_after_the_switch(tmp_path: Path) -> None:
    """An ack of a moved event is refused; the event fires again."""
    with open_sqlite_shards(tmp_path, "-") as db:
        old, directory = db.queue(), db.directory()
        old.put([{"user_id": 1, "payload": "one"}])
        target = Shard.from_spec((sqlite_url(tmp_path, "a"), "-"))
        with old.receive() as receiver:
            (event,) = take(receiver, 1)
            Resharder(
                directory, Resharder.begin(directory, old.map, [target]).plan, leave_seconds=0.0
            ).run()
            event.ack()
            with pytest.raises(LeadLost):
                receiver.flush(TIMEOUT)
            checker = ShardDeliveryChecker()
            checker.drain(receiver, {"one"})  # the same receiver gets it from the new shard


def test_events_in_the_window_are_not_moved_while_a_manager_leads(tmp_path: Path) -> None:
    with open_sqlite_shards(tmp_path, "-") as db:
        queue, directory = db.queue(), db.directory()
        put_events(queue, "x", 9)
        store = directory.get_store(queue.map.shards[0])
        with pytest.raises(LeadLost, match="not closed"):
            store.move_to_outbox(TransferFilter.PLAIN, 1)
        assert store.move_to_outbox(TransferFilter.FAR, 1, store.read_now() + 10**11) == 3
        assert db.rows(db.shards[0][0]) == 6


def test_closed_shard_has_no_leader(tmp_path: Path) -> None:
    with open_sqlite_shards(tmp_path, "-") as db:
        queue, directory = db.queue(), db.directory()
        (shard,) = queue.map.shards
        store = directory.get_store(shard)
        store.close_lease()
        queue.put([{"user_id": 1, "payload": "one"}])
        with queue.receive() as receiver:
            assert receiver.take(timeout=0.5) == []
            store.open_lease()
            assert take(receiver, 1)[0]["payload"] == "one"


def test_key_order_survives_a_reshard(tmp_path: Path) -> None:
    options = f"{OPTIONS}, ordering = key"
    with open_sqlite_shards(tmp_path, "-", options=options) as db:
        queue = db.queue()
        queue.put([{"user_id": at % 5, "payload": f"{at % 5} {at:03}"} for at in range(60)])
        received: dict[str, list[str]] = {}
        with queue.receive() as receiver:
            for at in range(60):
                if at == 20:
                    db.queue().reshard(
                        [(sqlite_url(tmp_path, "a"), "-80"), (sqlite_url(tmp_path, "b"), "80-")]
                    )
                (event,) = take(receiver, 1)
                key, number = event["payload"].split()
                if number not in received.setdefault(key, []):
                    received[key].append(number)
                event.ack()
                try:
                    receiver.flush(TIMEOUT)
                except LeadLost:
                    continue
                if sum(map(len, received.values())) == 60:
                    break
        assert all(numbers == sorted(numbers) for numbers in received.values())


def test_group_ends_after_its_last_member_across_shards(tmp_path: Path) -> None:
    with open_sqlite_shards(tmp_path, "-") as db:
        queue = db.queue()
        with queue.transaction(1) as transaction:
            for at in range(3):
                transaction.enqueue({"user_id": 1, "payload": f"m{at}"}, group="g", delay=900.0)
            transaction.enqueue({"user_id": 1, "payload": "end"}, after_group="g")
        queue.reshard([(sqlite_url(tmp_path, "a"), "-80"), (sqlite_url(tmp_path, "b"), "80-")])
        with queue.receive() as receiver:
            assert receiver.take(timeout=0.5) == []
            for shard in queue.map.shards:
                db.execute(
                    shard.url,
                    f"UPDATE {db.name} SET fire_at = {time.time_ns()} WHERE event_group = 'g'",
                )
            order = []
            for _ in range(4):
                (event,) = take(receiver, 1)
                order.append(event["payload"])
                event.ack()
                assert receiver.flush(TIMEOUT)
        assert order[3] == "end"
        assert set(order[:3]) == {"m0", "m1", "m2"}


def test_merged_shards_keep_both_events_of_one_name(tmp_path: Path) -> None:
    with open_sqlite_shards(tmp_path, "-80", "80-") as db:
        queue = db.queue()
        keys = {queue.map.find_shard(keyspace_id(key)).address: key for key in range(50)}
        for key in keys.values():
            queue.put([{"user_id": key, "payload": f"p{key}", "event_name": "same"}])
        queue.reshard([(sqlite_url(tmp_path, "all"), "-")])
        with queue.receive() as receiver:
            ShardDeliveryChecker().drain(receiver, {f"p{key}" for key in keys.values()})


def test_second_reshard_is_refused(tmp_path: Path) -> None:
    with open_sqlite_shards(tmp_path, "-80", "80-") as db:
        directory, shards = db.directory(), ShardMap.from_shards(db.shards)
        Resharder.begin(directory, shards, make_split_targets(tmp_path))
        other = Shard.from_spec((sqlite_url(tmp_path, "z"), "80-"))
        with pytest.raises(ReshardUnderWay):
            Resharder.begin(directory, shards, [other])
        queue = db.queue()
        assert queue.resume_reshard() is not None
        assert queue.resume_reshard() is None
        assert queue.reshard([other]) == 0
        assert [str(each.key_range) for each in queue.map.shards] == ["-40", "40-80", "80-"]


def test_client_with_old_settings_finds_the_new_shards(tmp_path: Path) -> None:
    with open_sqlite_shards(tmp_path, "-") as db:
        db.queue().reshard([(sqlite_url(tmp_path, "a"), "-80"), (sqlite_url(tmp_path, "b"), "80-")])
        late = db.queue()
        assert [str(shard.key_range) for shard in late.map.shards] == ["-80", "80-"]
        late.put([{"user_id": at, "payload": f"p{at}"} for at in range(20)])
        assert db.rows(db.shards[0][0]) == 0


def test_retired_shard_can_be_forgotten_and_deleted(tmp_path: Path) -> None:
    with open_sqlite_shards(tmp_path, "-80", "80-") as db:
        queue = db.queue()
        queue.reshard(make_split_targets(tmp_path))
        old = db.shards[0][0]
        db.execute(old, f"INSERT INTO {db.name} (user_id, payload) VALUES (1, 'last')")
        assert [shard.url for shard in queue.forget_retired()] == [old]
        assert queue.map.retired == ()
        assert db.rows(old) == 0
        Path(old.removeprefix("sqlite:///")).unlink()
        with queue.receive() as receiver:
            assert take(receiver, 1)[0]["payload"] == "last"
        queue.reshard([(sqlite_url(tmp_path, "all"), "-")])
        assert [str(shard.key_range) for shard in queue.map.shards] == ["-"]


def _list_tables(url: str) -> set[str]:
    """Return the names of all tables of a database."""
    listed = "SELECT name FROM sqlite_master WHERE type = 'table'"
    if not url.startswith("sqlite"):
        schema = "DATABASE()" if url.startswith("mysql") else "current_schema()"
        listed = f"SELECT table_name FROM information_schema.tables WHERE table_schema = {schema}"
    with contextlib.closing(load_queue_dialect(url).connect()) as connection:
        cursor = connection.cursor()
        cursor.execute(listed)
        return {row[0] for row in cursor.fetchall()}


def test_dropped_queue_leaves_no_shard_data(db: DatabaseFixture) -> None:
    name = db.queue().name
    with ShardDirectory(db.database.catalog.get_definition(name), [db.url]) as directory:
        store = directory.get_store(Shard.from_spec((db.url, "-")))
        store.save_map(ShardMap.from_shards([(db.url, "-")]))
        store.insert_batch("a shard", 7, [])
    outbox = f"turnlane_move_{name}"
    assert outbox in _list_tables(db.url)
    db.database.sql(f"DROP QUEUE {name}")
    assert outbox not in _list_tables(db.url)
    for kept in ("turnlane_map", "turnlane_shard", "turnlane_arrival"):
        assert db.execute(f"SELECT COUNT(*) FROM {kept} WHERE queue = '{name}'") == [(0,)]


def test_recreated_queue_does_not_follow_the_old_map(tmp_path: Path) -> None:
    with open_sqlite_shards(tmp_path, "-80", "80-") as db:
        with db.queue() as queue:
            queue.reshard(make_split_targets(tmp_path))
        made = db.database._databases[0].catalog.get_definition(db.name)
        db.database.sql(f"DROP QUEUE {db.name}")
        db.database.sql(f"CREATE QUEUE {str(made).removeprefix('CREATE QUEUE ')}")
        assert [str(shard.key_range) for shard in db.queue().map.shards] == ["-80", "80-"]


def test_missing_database_does_not_hide_a_newer_map(tmp_path: Path) -> None:
    with open_sqlite_shards(tmp_path, "-80", "80-") as db:
        queue = db.queue()
        db.queue().reshard(make_split_targets(tmp_path))
        Path(db.shards[0][0].removeprefix("sqlite:///")).unlink()
        later = table.ShardedQueue(db.directory(), ShardMap.from_shards(db.shards))
        assert later.map.version == 1
        later.close()
        queue.refresh()
        assert queue.map.version == 1


def test_many_clients_can_open_the_queue_at_once(served_shards: list[str]) -> None:
    """Each of them creates the missing tables."""
    with ShardedFixture([(served_shards[0], "-")]) as db, ThreadPoolExecutor(6) as threads:
        for queue in [threads.submit(db.queue) for _ in range(12)]:
            assert queue.result(TIMEOUT).map.version == 0


@pytest.mark.parametrize("name", ["%s", "100%d {table}", "%(x)s"])
def test_columns_with_any_name_are_moved(db: DatabaseFixture, name: str) -> None:
    queue = db.queue(f'user_id BIGINT, "{name}" TEXT')
    other = db.queue(f'user_id BIGINT, "{name}" TEXT')
    with db.transaction() as connection:
        queue.enqueue(connection, {"user_id": 7, name: "100 %s"}, name="one")
    with (
        ShardStore(db.dialect, queue.definition) as source,
        ShardStore(db.dialect, other.definition) as target,
    ):
        source.close_lease()
        assert source.move_to_outbox(TransferFilter.PLAIN, 1) == 1
        batch = source.read_first_batch()
        assert batch is not None
        assert target.insert_batch(source.id, batch.number, batch.rows)
        assert not target.insert_batch(source.id, batch.number, batch.rows)
        source.delete_batch(batch.number)
        assert source.count_rows() == 0
    with other.receive() as receiver:
        (event,) = take(receiver, 1)
        assert event[name] == "100 %s"


# ── writers of whole batches ─────────────────────────────────────────────────────────────────────


def write_batch(
    db: ShardedFixture, shards: ShardMap, epoch: int, *, only: int | None = None
) -> None:
    """Write like Spark: rows to each shard, recorded in all of them; ``only`` some shards."""
    definition = db.directory().definition
    for shard in shards.shards[:only]:
        rows = [
            {"user_id": at, "payload": f"{epoch} {at}", "fire_at": 2**62}
            for at in range(20)
            if shard.key_range.contains(keyspace_id(at))
        ]
        with BatchStaging(load_queue_dialect(shard.url), definition) as staging:
            job = get_job_id("w")
            staging.add(f"{job}/1", 0, rows)
            staging.commit(job, [f"{job}/1"], epoch)


def read_all_payloads(db: ShardedFixture, shards: ShardMap) -> list[str]:
    chosen = f"SELECT payload FROM {db.name}"
    return sorted(row[0] for shard in shards.shards for row in db.execute(shard.url, chosen))


@pytest.mark.parametrize("how", ["split", "merge"])
def test_batch_repeated_after_a_reshard_is_stored_once(shard_urls: list[str], how: str) -> None:
    first, second, third = shard_urls
    halves, whole = ("-80", "80-"), ("-",)
    before, after = (whole, halves) if how == "split" else (halves, whole)
    old = [first] if how == "split" else [first, second]
    new = [second, third] if how == "split" else [third]
    with ShardedFixture(list(zip(old, before, strict=True))) as db:
        queue = db.queue()
        shards = queue.map
        write_batch(db, shards, 6)
        write_batch(db, shards, 7)
        queue.reshard(list(zip(new, after, strict=True)))
        with pytest.raises(RetryLater, match="resharded"):
            write_batch(db, shards, 8)  # by the old map
        write_batch(db, queue.map, 7)
        write_batch(db, queue.map, 8)
        expected = sorted(f"{epoch} {at}" for epoch in (6, 7, 8) for at in range(20))
        assert read_all_payloads(db, queue.map) == expected
        if how == "split":  # a client that knows one database finds the others
            with ShardRouter([(first, "-")], db.name) as spread:
                assert spread.map.version == 1


def test_merge_is_refused_in_the_middle_of_a_batch(shard_urls: list[str]) -> None:
    first, second, third = shard_urls
    with ShardedFixture([(first, "-80"), (second, "80-")]) as db:
        queue = db.queue()
        write_batch(db, queue.map, 1)
        write_batch(db, queue.map, 2, only=1)
        with pytest.raises(ReshardUnderWay, match="let it finish"):
            queue.reshard([(third, "-")])
        write_batch(db, queue.map, 2)
        assert queue.reshard([(third, "-")]) == 40
        assert len(set(read_all_payloads(db, queue.map))) == 40
