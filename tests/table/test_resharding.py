"""Resharding: nothing is lost, nothing acked comes again, whoever dies when."""

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
from turnlane.table.url import dialect_of

from tests.table.mortal import Killed
from tests.table.shard_site import OPTIONS, ShardOracle, ShardSite, sqlite_site, sqlite_url
from tests.table.site import PATIENCE, Site, eventually, take
from turnlane import table
from turnlane.errors import LeadLost, ReshardUnderWay, RetryLater
from turnlane.table.batch_commit import BatchStaging, get_job_id
from turnlane.table.reshard import Resharder, ReshardProgress, ReshardStep, RowMover
from turnlane.table.row_codec import TransferFilter
from turnlane.table.shard_directory import ShardDirectory, ShardRouter
from turnlane.table.shard_store import ShardStore
from turnlane.table.shards import KeyRange, Shard, ShardMap, keyspace_id

RESHARDER = Path(__file__).with_name("resharder.py")

STEPS = (
    "newest_map",
    "keep_map",
    "set_plan",
    "plan",
    "shut",
    "open",
    "take",
    "first_batch",
    "arrive",
    "strike",
    "map_of",
    "is_led",
    "end_plan",
    "schedules",
    "keep_schedule",
    "drop_schedule",
)


class MortalShardStore(ShardStore):
    """Dies before or after one call of one operation, counted over all stores of a process."""

    fatal = ""
    after = False
    calls = 0
    survive = 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        kind = MortalShardStore
        if name not in STEPS or name != kind.fatal:
            return found

        def dying(*arguments: Any) -> Any:
            kind.calls += 1
            if kind.calls <= kind.survive:
                return found(*arguments)
            if kind.after:
                found(*arguments)
            raise Killed

        return dying


class MortalSites(ShardDirectory):
    """Sites whose stores die."""

    def store(self, shard: Shard) -> ShardStore:
        with self._lock:
            if shard.address not in self._stores:
                self._stores[shard.address] = MortalShardStore(self.dialect(shard), self.definition)
            return self._stores[shard.address]


def split(directory: Path) -> list[Shard]:
    return [Shard.of((sqlite_url(directory, each), each)) for each in ("-40", "40-80")]


def fill(queue: table.ShardedQueue, label: str, count: int) -> set[str]:
    """Events that are due now, soon, and far beyond any window."""
    now = time.time_ns()
    rows = [
        {"user_id": at, "payload": f"{label} {at}", "fire_at": now + (at % 3 == 2) * 10**11 * 9}
        for at in range(count)
    ]
    queue.put(rows)
    return {str(row["payload"]) for row in rows}


def hurry(site: ShardSite, shards: ShardMap) -> None:
    """Have everything due now."""
    for shard in shards.shards:
        later = f"state = 'to_be_fired' AND fire_at > {time.time_ns()}"
        site.execute(shard.url, f"UPDATE {site.name} SET fire_at = {time.time_ns()} WHERE {later}")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("operation", STEPS)
def test_a_reshard_killed_at_every_step_is_resumed(
    tmp_path: Path, operation: str, after: bool
) -> None:
    """Killed at the first call of an operation, then at the second one, … until it gets through."""
    with sqlite_site(tmp_path, "-80", "80-") as site:
        queue = site.queue()
        expected = fill(queue, "before", 60)
        for key in (1, 6, 9):
            queue.schedule(f"tick {key}", "0 3 * * *", user_id=key)
        scheduled = queue.schedules()
        MortalShardStore.fatal, MortalShardStore.after = operation, after
        sites, deaths = site.sites(), 0
        while reshard_until_killed(sites, ShardMap.of(site.shards), split(tmp_path), deaths):
            deaths += 1
            assert deaths < 60
        assert deaths
        queue.refresh()
        assert queue.map.version == 1
        stored = [
            payload
            for shard in queue.map.shards
            for (payload,) in site.execute(shard.url, f"SELECT payload FROM {site.name}")
        ]
        assert sorted(stored) == sorted(expected)  # each of them, once
        assert queue.schedules() == scheduled
        assert site.rows(site.shards[0][0]) == 0
        for shard in queue.map.shards:
            lease = f"SELECT owner FROM turnlane_lease WHERE queue = '{site.name}'"
            assert site.execute(shard.url, lease) == [(None,)]


def reshard_until_killed(
    sites: ShardDirectory, shards: ShardMap, targets: list[Shard], survive: int
) -> bool:
    """Whether it died."""
    MortalShardStore.calls, MortalShardStore.survive = 0, survive
    definition = sites.definition
    with MortalSites(definition, [shard.url for shard in shards.shards]) as mortal:
        try:
            Resharder.begin(mortal, mortal.newest(shards), targets).run()
        except Killed:
            return True
    return False


def test_a_split_and_a_merge_under_load(tmp_path: Path) -> None:
    """Events come and fire all the while, through clients with old maps and with new ones."""
    with sqlite_site(tmp_path, "-80", "80-") as site:
        queue, oracle, expected = site.queue(), ShardOracle(), set[str]()
        with Load(site, expected), queue.receive() as receiver, Eater(oracle, receiver):
            for targets in (split(tmp_path), [Shard.of((sqlite_url(tmp_path, "all"), "-"))]):
                site.queue().reshard(targets)
                confirmed_beyond(oracle, len(oracle.confirmed) + 50)
        queue.refresh()
        assert [str(shard.key_range) for shard in queue.map.shards] == ["-"]
        assert len(queue.map.retired) == 4
        with queue.receive() as receiver:
            oracle.drain(receiver, expected)


def confirmed_beyond(oracle: ShardOracle, count: int) -> None:
    eventually(lambda: len(oracle.confirmed) > count)


class Load:
    """Inserts events by plain SQL into the first shards, and by a client that follows the map."""

    def __init__(self, site: ShardSite, expected: set[str]) -> None:
        self._site = site
        self._expected = expected
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        site, queue, at = self._site, self._site.queue(), 0
        old = ShardMap.of(site.shards)
        while not self._over.wait(0.005):
            at += 1
            url = old.shard_of(keyspace_id(at)).url
            site.execute(
                url, f"INSERT INTO {site.name} (user_id, payload) VALUES ({at}, 'old {at}')"
            )
            queue.put([{"user_id": at, "payload": f"new {at}"}])
            self._expected |= {f"old {at}", f"new {at}"}


class Eater:
    """Receives on a thread."""

    def __init__(self, oracle: ShardOracle, receiver: table.Receiver) -> None:
        self._oracle = oracle
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


def test_a_resharder_killed_again_and_again_under_load(tmp_path: Path) -> None:
    """kill -9 at random moments; one that is let live finishes."""
    with sqlite_site(tmp_path, "-80", "80-") as site:
        targets = [(shard.url, str(shard.key_range)) for shard in split(tmp_path)]
        chance = random.Random(7)
        reshard_through_kills(site, targets, 6_000, [chance.randrange(1, 8) for _ in range(4)])


def reshard_through_kills(
    site: ShardSite, targets: list[tuple[str, str]], count: int, kills: list[int]
) -> None:
    """Under load, killed after so many lines each time, with so many events at the start."""
    queue, oracle = site.queue(), ShardOracle()
    expected = fill(queue, "first", count)
    arguments = [site.name, json.dumps(site.shards), json.dumps(targets)]
    with Load(site, expected), queue.receive() as receiver, Eater(oracle, receiver):
        for lines in kills:
            kill_after(arguments, lines)
        assert kill_after(arguments, 10**6) == 0
        queue.refresh()
    assert queue.map.version == 1
    hurry(site, queue.map)
    with queue.receive() as receiver:
        oracle.drain(receiver, expected)


def kill_after(arguments: list[str], lines: int) -> int:
    """Run the resharder, and kill it once it has said so many lines."""
    with subprocess.Popen(
        [sys.executable, str(RESHARDER), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for _, _line in zip(range(lines), process.stdout, strict=False):
            pass
        if process.poll() is None and lines < 10**6:
            process.kill()
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode in (0, -9), errors
        return process.returncode


@pytest.fixture(params=["postgres", "mariadb"])
def served_shards(request: pytest.FixtureRequest) -> list[str]:
    """Addresses of empty databases on a server."""
    return databases_of(request.getfixturevalue(request.param))


def databases_of(server: Any) -> list[str]:
    names = [f"shard_{uuid.uuid4().hex[:8]}" for _ in range(3)]
    with contextlib.closing(dialect_of(server.url).connect()) as connection:
        for name in names:
            connection.cursor().execute(f"CREATE DATABASE {name}")
    base, mark, query = server.url.partition("?")
    root = base.rpartition("/")[0]
    return [f"{root}/{name}{mark}{query}" for name in names]


def test_a_split_under_load_on_a_server(served_shards: list[str]) -> None:
    first, *others = served_shards
    with ShardSite([(first, "-")]) as site:
        queue, oracle = site.queue(), ShardOracle()
        expected = fill(queue, "first", 3_000)
        targets = list(zip(others, ("-80", "80-"), strict=True))
        with Load(site, expected), queue.receive() as receiver, Eater(oracle, receiver):
            steps: list[ReshardProgress] = []
            moved = site.queue().reshard(targets, steps.append)
            assert moved >= 1_000
            eventually(lambda: queue.map.version == 1)
        assert [step.step for step in steps if step.step is ReshardStep.DONE] == [ReshardStep.DONE]
        hurry(site, queue.map)
        with queue.receive() as receiver:
            oracle.drain(receiver, expected)
        for url, key_range in targets:
            wanted = KeyRange.parse(key_range)
            ids = site.execute(url, f"SELECT keyspace_id FROM {site.name}")
            assert all(wanted.contains(row[0]) for row in ids)


def test_a_resharder_killed_under_load_on_a_server(served_shards: list[str]) -> None:
    """While events are moved ahead, and while it drains."""
    first, *others = served_shards
    with ShardSite([(first, "-")]) as site:
        targets = list(zip(others, ("-80", "80-"), strict=True))
        reshard_through_kills(site, targets, 600, [2, 5])


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def shard_urls(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Addresses of three empty databases."""
    if request.param == "sqlite":
        return [sqlite_url(tmp_path, each) for each in "abc"]
    return databases_of(request.getfixturevalue(request.param))


def test_an_id_never_means_two_events(shard_urls: list[str]) -> None:
    """Neither after a merge of shards that were made together nor after a split."""
    first, second, third = shard_urls
    with ShardSite([(first, "-80"), (second, "80-")]) as site:
        queue = site.queue()
        rows = [{"user_id": at, "payload": f"p{at}", "fire_at": 2**62} for at in range(50)]
        queue.put(rows)
        before = {row[0] for url in (first, second) for row in ids_in(site, url)}
        assert len(before) == 50
        queue.reshard([(third, "-")])
        after = {row[0] for row in ids_in(site, third)}
        assert len(after) == 50
        assert not before & after
        assert queue.map.shards[0].first_id <= min(after)


def test_an_ack_of_an_event_that_was_moved_acks_no_other(shard_urls: list[str]) -> None:
    first, *others = shard_urls
    with ShardSite([(first, "-")], OPTIONS + ", ack_timeout = 60s") as site:
        queue = site.queue()
        queue.put({"user_id": 7, "payload": f"p{at}"} for at in range(3))
        with queue.receive() as receiver:
            stale = take(receiver, 3)
            queue.reshard(list(zip(others, ("-80", "80-"), strict=True)))
            with pytest.raises(LeadLost), queue.transaction(7) as transaction:
                transaction.ack(stale[0])
            for url in others:
                shown = ", ".join(str(event.id) for event in stale)
                acked = f"UPDATE {site.name} SET state = 'acked' WHERE event_id IN ({shown})"
                site.execute(url, acked)
            again = take(receiver, 3)
            assert {event["payload"] for event in again} == {"p0", "p1", "p2"}
            elsewhere = next(at for at in range(99) if not same_half(at, 7))
            with (
                pytest.raises(ValueError, match="does not lie in shard"),
                queue.transaction(elsewhere) as transaction,
            ):
                transaction.ack(again[0])
            with queue.transaction(7) as transaction:
                for event in again:
                    transaction.ack(event)
        assert queue.counts()["to_be_fired"] + queue.counts()["fired"] == 0


def ids_in(site: ShardSite, url: str) -> list[tuple[Any, ...]]:
    return site.execute(url, f"SELECT event_id FROM {site.name}")


def same_half(one: int, other: int) -> bool:
    lower = KeyRange.parse("-80")
    return lower.contains(keyspace_id(one)) == lower.contains(keyspace_id(other))


def test_a_row_that_somebody_holds_delays_only_the_end_of_a_reshard(
    served_shards: list[str],
) -> None:
    first, *others = served_shards
    with ShardSite([(first, "-")]) as site, ThreadPoolExecutor(1) as threads:
        queue = site.queue()
        queue.put({"user_id": at, "payload": f"p{at}"} for at in range(10))
        dialect = dialect_of(first)
        with contextlib.closing(dialect.connect()) as connection:
            with dialect.transaction(connection):
                held = f"SELECT payload FROM {site.name} WHERE user_id = 3 FOR UPDATE"
                connection.cursor().execute(held)
                targets = list(zip(others, ("-80", "80-"), strict=True))
                reshard = threads.submit(site.queue().reshard, targets)
                eventually(lambda: queue.map.version == 1)
                with queue.receive() as receiver:
                    events = take(receiver, 9)
                    assert "p3" not in {event["payload"] for event in events}
                    receiver.ack(events)
                    assert receiver.flush(PATIENCE)
                assert not reshard.done()
            assert reshard.result(PATIENCE) == 10
        with queue.receive() as receiver:
            assert [event["payload"] for event in take(receiver, 1)] == ["p3"]


UNREADABLE = {
    "sqlite": ("payload TEXT NOT NULL", "payload", "CAST(x'6f64ff64' AS TEXT)", "od\\xffd"),
    "postgres": ("day DATE NOT NULL, ready BOOLEAN", "day", "'infinity'", "infinity"),
}
"""What a database takes and its driver cannot give: columns, one, a value, and how it arrives."""


@pytest.mark.parametrize("database", UNREADABLE)
def test_a_row_that_cannot_be_read_stops_no_reshard(
    tmp_path: Path, request: pytest.FixtureRequest, database: str
) -> None:
    """Neither one that is moved ahead, nor one that is drained; each becomes a dead letter."""
    if database == "sqlite":
        first, *others = [sqlite_url(tmp_path, each) for each in "abc"]
    else:
        first, *others = databases_of(request.getfixturevalue(database))
    columns, column, value, arrived = UNREADABLE[database]
    with ShardSite([(first, "-")], OPTIONS, f"user_id BIGINT, {columns}") as site:
        queue = site.queue()
        good = {"sqlite": "'good'", "postgres": "'2026-11-17'"}[database]
        for at in range(20):
            odd, later = at in {3, 14, 15}, time.time_ns() + (at >= 10) * 10**12
            site.execute(
                first,
                f"INSERT INTO {site.name} (user_id, fire_at, event_name, {column}) "
                f"VALUES ({at}, {later}, 'n{at}', {value if odd else good})",
            )
        assert queue.reshard(list(zip(others, ("-80", "80-"), strict=True))) == 20
        assert site.rows(first) == 0
        counts = queue.counts()
        assert (counts["to_be_fired"], counts["dead"]) == (17, 3)
        dead = f"FROM {site.name} WHERE state = 'dead'"
        shown = f"SELECT user_id, event_name, last_error, CAST({column} AS TEXT) {dead}"
        found = sorted(row for url in others for row in site.execute(url, shown))
        assert [row[:2] for row in found] == [(3, "n3"), (14, "n14"), (15, "n15")]
        assert all(row[2].startswith("cannot be read: ") and row[3] == arrived for row in found)
        with queue.receive() as receiver:
            assert len(take(receiver, 9)) == 9


def test_a_retired_shard_s_late_rows_are_moved_on(tmp_path: Path) -> None:
    """Through two reshards, with nobody but a plain INSERT into the very first shard."""
    with sqlite_site(tmp_path, "-") as site:
        site.queue().reshard(
            [(sqlite_url(tmp_path, "a"), "-80"), (sqlite_url(tmp_path, "b"), "80-")]
        )
        site.queue().reshard([(sqlite_url(tmp_path, "c"), "-")])
        first = site.shards[0][0]
        with site.queue().receive() as receiver:
            site.execute(first, f"INSERT INTO {site.name} (user_id, payload) VALUES (1, 'late')")
            (event,) = take(receiver, 1)
            assert event["payload"] == "late"
            event.ack()
            assert receiver.flush(PATIENCE)
        assert site.rows(first) == 0


def test_an_event_is_delivered_by_the_map_it_was_taken_by(tmp_path: Path) -> None:
    """Or one that had arrived before a crash would come a second time, by a newer map."""
    with sqlite_site(tmp_path, "-") as site:
        queue, sites = site.queue(), site.sites()
        (source,) = queue.map.shards
        first = Shard.of((sqlite_url(tmp_path, "a"), "-"))
        queue.reshard([first])
        site.execute(source.url, f"INSERT INTO {site.name} (user_id, payload) VALUES (1, 'one')")
        store = sites.store(source)
        assert store.take(TransferFilter.PLAIN, 1) == 1
        batch = store.first_batch()
        assert batch is not None
        assert sites.store(first).arrive(store.id, batch.number, batch.rows)
        # Killed here, before it was struck off.
        last = (sqlite_url(tmp_path, "b"), "-")
        queue.reshard([last])
        RowMover(sites, source).drain(2)
        assert [site.rows(each) for each in (source.url, first.url, last[0])] == [0, 0, 1]


def test_what_was_acked_stays_acked(tmp_path: Path) -> None:
    with sqlite_site(tmp_path, "-", options=f"{OPTIONS}, retention = 1h") as site:
        queue = site.queue()
        queue.put([{"user_id": at, "payload": f"p{at}"} for at in range(50)])
        with queue.receive() as receiver:
            events = take(receiver, 50)
            receiver.ack(events[:30])
            assert receiver.flush(PATIENCE)
        queue.reshard([(sqlite_url(tmp_path, "a"), "-80"), (sqlite_url(tmp_path, "b"), "80-")])
        assert queue.counts()["acked"] == 30
        acked = {event["payload"] for event in events[:30]}
        with queue.receive() as receiver:
            rest = {event["payload"] for event in take(receiver, 20)}
            assert len(rest) == 20
            assert not rest & acked
            assert receiver.take(timeout=0.3) == []


def test_the_old_manager_can_confirm_nothing_after_the_switch(tmp_path: Path) -> None:
    """An ack that comes when its event was moved is refused; the event fires again."""
    with sqlite_site(tmp_path, "-") as site:
        old, sites = site.queue(), site.sites()
        old.put([{"user_id": 1, "payload": "one"}])
        target = Shard.of((sqlite_url(tmp_path, "a"), "-"))
        with old.receive() as receiver:
            (event,) = take(receiver, 1)
            Resharder(sites, Resharder.begin(sites, old.map, [target]).plan, grace=0.0).run()
            event.ack()
            with pytest.raises(LeadLost):
                receiver.flush(PATIENCE)
            oracle = ShardOracle()
            oracle.drain(receiver, {"one"})  # from the new shard, by the same receiver


def test_near_events_are_not_taken_while_a_manager_may_have_them(tmp_path: Path) -> None:
    with sqlite_site(tmp_path, "-") as site:
        queue, sites = site.queue(), site.sites()
        fill(queue, "x", 9)
        store = sites.store(queue.map.shards[0])
        with pytest.raises(LeadLost, match="not shut"):
            store.take(TransferFilter.PLAIN, 1)
        assert store.take(TransferFilter.FAR, 1, store.now() + 10**11) == 3
        assert site.rows(site.shards[0][0]) == 6


def test_a_shard_that_is_shut_is_led_by_nobody(tmp_path: Path) -> None:
    with sqlite_site(tmp_path, "-") as site:
        queue, sites = site.queue(), site.sites()
        (shard,) = queue.map.shards
        store = sites.store(shard)
        store.shut()
        queue.put([{"user_id": 1, "payload": "one"}])
        with queue.receive() as receiver:
            assert receiver.take(timeout=0.5) == []
            store.open()
            assert take(receiver, 1)[0]["payload"] == "one"


def test_order_by_key_holds_through_a_reshard(tmp_path: Path) -> None:
    options = f"{OPTIONS}, ordering = key"
    with sqlite_site(tmp_path, "-", options=options) as site:
        queue = site.queue()
        queue.put([{"user_id": at % 5, "payload": f"{at % 5} {at:03}"} for at in range(60)])
        seen: dict[str, list[str]] = {}
        with queue.receive() as receiver:
            for at in range(60):
                if at == 20:
                    site.queue().reshard(
                        [(sqlite_url(tmp_path, "a"), "-80"), (sqlite_url(tmp_path, "b"), "80-")]
                    )
                (event,) = take(receiver, 1)
                key, number = event["payload"].split()
                if number not in seen.setdefault(key, []):
                    seen[key].append(number)
                event.ack()
                try:
                    receiver.flush(PATIENCE)
                except LeadLost:
                    continue
                if sum(map(len, seen.values())) == 60:
                    break
        assert all(numbers == sorted(numbers) for numbers in seen.values())


def test_a_group_ends_after_its_last_member_wherever_they_are(tmp_path: Path) -> None:
    with sqlite_site(tmp_path, "-") as site:
        queue = site.queue()
        with queue.transaction(1) as transaction:
            for at in range(3):
                transaction.enqueue({"user_id": 1, "payload": f"m{at}"}, group="g", delay=900.0)
            transaction.enqueue({"user_id": 1, "payload": "end"}, after_group="g")
        queue.reshard([(sqlite_url(tmp_path, "a"), "-80"), (sqlite_url(tmp_path, "b"), "80-")])
        with queue.receive() as receiver:
            assert receiver.take(timeout=0.5) == []
            for shard in queue.map.shards:
                site.execute(
                    shard.url,
                    f"UPDATE {site.name} SET fire_at = {time.time_ns()} WHERE event_group = 'g'",
                )
            order = []
            for _ in range(4):
                (event,) = take(receiver, 1)
                order.append(event["payload"])
                event.ack()
                assert receiver.flush(PATIENCE)
        assert order[3] == "end"
        assert set(order[:3]) == {"m0", "m1", "m2"}


def test_merged_shards_may_have_had_the_same_name_for_two_events(tmp_path: Path) -> None:
    with sqlite_site(tmp_path, "-80", "80-") as site:
        queue = site.queue()
        keys = {queue.map.shard_of(keyspace_id(key)).address: key for key in range(50)}
        for key in keys.values():
            queue.put([{"user_id": key, "payload": f"p{key}", "event_name": "same"}])
        queue.reshard([(sqlite_url(tmp_path, "all"), "-")])
        with queue.receive() as receiver:
            ShardOracle().drain(receiver, {f"p{key}" for key in keys.values()})


def test_one_reshard_at_a_time(tmp_path: Path) -> None:
    with sqlite_site(tmp_path, "-80", "80-") as site:
        sites, shards = site.sites(), ShardMap.of(site.shards)
        Resharder.begin(sites, shards, split(tmp_path))
        other = Shard.of((sqlite_url(tmp_path, "z"), "80-"))
        with pytest.raises(ReshardUnderWay):
            Resharder.begin(sites, shards, [other])
        queue = site.queue()
        assert queue.resume_reshard() is not None
        assert queue.resume_reshard() is None
        assert queue.reshard([other]) == 0
        assert [str(each.key_range) for each in queue.map.shards] == ["-40", "40-80", "80-"]


def test_a_client_with_old_settings_finds_the_new_shards(tmp_path: Path) -> None:
    with sqlite_site(tmp_path, "-") as site:
        site.queue().reshard(
            [(sqlite_url(tmp_path, "a"), "-80"), (sqlite_url(tmp_path, "b"), "80-")]
        )
        late = site.queue()
        assert [str(shard.key_range) for shard in late.map.shards] == ["-80", "80-"]
        late.put([{"user_id": at, "payload": f"p{at}"} for at in range(20)])
        assert site.rows(site.shards[0][0]) == 0


def test_a_retired_shard_is_forgotten_and_deleted(tmp_path: Path) -> None:
    with sqlite_site(tmp_path, "-80", "80-") as site:
        queue = site.queue()
        queue.reshard(split(tmp_path))
        old = site.shards[0][0]
        site.execute(old, f"INSERT INTO {site.name} (user_id, payload) VALUES (1, 'last')")
        assert [shard.url for shard in queue.forget_retired()] == [old]
        assert queue.map.retired == ()
        assert site.rows(old) == 0
        Path(old.removeprefix("sqlite:///")).unlink()
        with queue.receive() as receiver:
            assert take(receiver, 1)[0]["payload"] == "last"
        queue.reshard([(sqlite_url(tmp_path, "all"), "-")])
        assert [str(shard.key_range) for shard in queue.map.shards] == ["-"]


def _tables(url: str) -> set[str]:
    """The names of all tables of a database."""
    listed = "SELECT name FROM sqlite_master WHERE type = 'table'"
    if not url.startswith("sqlite"):
        schema = "DATABASE()" if url.startswith("mysql") else "current_schema()"
        listed = f"SELECT table_name FROM information_schema.tables WHERE table_schema = {schema}"
    with contextlib.closing(dialect_of(url).connect()) as connection:
        cursor = connection.cursor()
        cursor.execute(listed)
        return {row[0] for row in cursor.fetchall()}


def test_a_dropped_queue_leaves_nothing_of_its_shards(site: Site) -> None:
    name = site.queue().name
    with ShardDirectory(site.database.catalog.definition(name), [site.url]) as sites:
        store = sites.store(Shard.of((site.url, "-")))
        store.keep_map(ShardMap.of([(site.url, "-")]))
        store.arrive("a shard", 7, [])
    outbox = f"turnlane_move_{name}"
    assert outbox in _tables(site.url)
    site.database.sql(f"DROP QUEUE {name}")
    assert outbox not in _tables(site.url)
    for kept in ("turnlane_map", "turnlane_shard", "turnlane_arrival"):
        assert site.execute(f"SELECT COUNT(*) FROM {kept} WHERE queue = '{name}'") == [(0,)]


def test_a_queue_made_anew_does_not_follow_the_former_s_map(tmp_path: Path) -> None:
    with sqlite_site(tmp_path, "-80", "80-") as site:
        with site.queue() as queue:
            queue.reshard(split(tmp_path))
        made = site.database._databases[0].catalog.definition(site.name)
        site.database.sql(f"DROP QUEUE {site.name}")
        site.database.sql(f"CREATE QUEUE {str(made).removeprefix('CREATE QUEUE ')}")
        assert [str(shard.key_range) for shard in site.queue().map.shards] == ["-80", "80-"]


def test_a_database_that_is_gone_hides_no_newer_map(tmp_path: Path) -> None:
    with sqlite_site(tmp_path, "-80", "80-") as site:
        queue = site.queue()
        site.queue().reshard(split(tmp_path))
        Path(site.shards[0][0].removeprefix("sqlite:///")).unlink()
        later = table.ShardedQueue(site.sites(), ShardMap.of(site.shards))
        assert later.map.version == 1
        later.close()
        queue.refresh()
        assert queue.map.version == 1


def test_many_clients_come_at_the_same_time(served_shards: list[str]) -> None:
    """Each of them makes what tables are missing."""
    with ShardSite([(served_shards[0], "-")]) as site, ThreadPoolExecutor(6) as threads:
        for queue in [threads.submit(site.queue) for _ in range(12)]:
            assert queue.result(PATIENCE).map.version == 0


@pytest.mark.parametrize("name", ["%s", "100%d {table}", "%(x)s"])
def test_columns_with_any_name_are_moved(site: Site, name: str) -> None:
    queue = site.queue(f'user_id BIGINT, "{name}" TEXT')
    other = site.queue(f'user_id BIGINT, "{name}" TEXT')
    with site.transaction() as connection:
        queue.enqueue(connection, {"user_id": 7, name: "100 %s"}, name="one")
    with (
        ShardStore(site.dialect, queue.definition) as source,
        ShardStore(site.dialect, other.definition) as target,
    ):
        source.shut()
        assert source.take(TransferFilter.PLAIN, 1) == 1
        batch = source.first_batch()
        assert batch is not None
        assert target.arrive(source.id, batch.number, batch.rows)
        assert not target.arrive(source.id, batch.number, batch.rows)
        source.strike(batch.number)
        assert source.left() == 0
    with other.receive() as receiver:
        (event,) = take(receiver, 1)
        assert event[name] == "100 %s"


# ── writers of whole batches ─────────────────────────────────────────────────────────────────────


def write_batch(site: ShardSite, shards: ShardMap, epoch: int, *, only: int | None = None) -> None:
    """As Spark does: rows to each shard, noted in all of them; perhaps cut off after some."""
    definition = site.sites().definition
    for shard in shards.shards[:only]:
        rows = [
            {"user_id": at, "payload": f"{epoch} {at}", "fire_at": 2**62}
            for at in range(20)
            if shard.key_range.contains(keyspace_id(at))
        ]
        with BatchStaging(dialect_of(shard.url), definition) as staging:
            job = get_job_id("w")
            staging.add(f"{job}/1", 0, rows)
            staging.commit(job, [f"{job}/1"], epoch)


def all_payloads(site: ShardSite, shards: ShardMap) -> list[str]:
    chosen = f"SELECT payload FROM {site.name}"
    return sorted(row[0] for shard in shards.shards for row in site.execute(shard.url, chosen))


@pytest.mark.parametrize("how", ["split", "merge"])
def test_a_batch_that_comes_again_after_a_reshard_is_there_once(
    shard_urls: list[str], how: str
) -> None:
    first, second, third = shard_urls
    halves, whole = ("-80", "80-"), ("-",)
    before, after = (whole, halves) if how == "split" else (halves, whole)
    old = [first] if how == "split" else [first, second]
    new = [second, third] if how == "split" else [third]
    with ShardSite(list(zip(old, before, strict=True))) as site:
        queue = site.queue()
        shards = queue.map
        write_batch(site, shards, 6)
        write_batch(site, shards, 7)
        queue.reshard(list(zip(new, after, strict=True)))
        with pytest.raises(RetryLater, match="resharded"):
            write_batch(site, shards, 8)  # by the old map
        write_batch(site, queue.map, 7)
        write_batch(site, queue.map, 8)
        expected = sorted(f"{epoch} {at}" for epoch in (6, 7, 8) for at in range(20))
        assert all_payloads(site, queue.map) == expected
        if how == "split":  # whoever knows one database finds the others
            with ShardRouter([(first, "-")], site.name) as spread:
                assert spread.map.version == 1


def test_shards_are_not_merged_in_the_middle_of_a_batch(shard_urls: list[str]) -> None:
    first, second, third = shard_urls
    with ShardSite([(first, "-80"), (second, "80-")]) as site:
        queue = site.queue()
        write_batch(site, queue.map, 1)
        write_batch(site, queue.map, 2, only=1)
        with pytest.raises(ReshardUnderWay, match="let it finish"):
            queue.reshard([(third, "-")])
        write_batch(site, queue.map, 2)
        assert queue.reshard([(third, "-")]) == 40
        assert len(set(all_payloads(site, queue.map))) == 40
