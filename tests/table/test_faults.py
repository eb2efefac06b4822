"""What a queue table does when things fail. The oracle is the same throughout."""

from __future__ import annotations

import contextlib
import gc
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest

from tests.table.mortal import OPERATIONS, Killed, MortalStore
from tests.table.oracle import Oracle
from tests.table.servers import MariadbServer, PostgresServer
from tests.table.site import PATIENCE, Site, eventually, payloads, settle, step_until, take
from turnlane import table
from turnlane.clock import Clock
from turnlane.errors import DatabaseDown, LeadLost
from turnlane.table import firing, gaps
from turnlane.table.manager import Manager
from turnlane.table.receiver import Receiver
from turnlane.table.sql import watch
from turnlane.table.sql.dialect import Verdict
from turnlane.table.store import Store
from turnlane.table.url import dialect_of

VICTIM = Path(__file__).with_name("victim.py")


def test_a_manager_killed_at_every_step_loses_nothing(site: Site) -> None:
    """One manager after the other dies, before or after a step; the next one carries on."""
    queue = site.queue(
        lease="150ms", ack_timeout="200ms", ordering="key", window="2s", max_attempts=1_000
    )
    oracle = Oracle(site)
    expected: set[str] = set()
    for at, operation in enumerate(OPERATIONS):
        for after in (False, True):
            names = [f"{operation} {after} {each}" for each in range(4)]
            with site.transaction() as connection:
                for each, name in enumerate(names):
                    row = {"user_id": 100 * at + each, "payload": name}
                    queue.enqueue(connection, row, delay=0.05 * each)
            expected |= set(names)
            if operation == "read_ids" and site.kind == "sqlite":
                continue  # it gives the ids of what is rolled back to the next rows
            expected |= run_until_killed(site, queue, oracle, operation, after=after)
    last = site.manager(queue)
    last.start()
    with contextlib.closing(last):
        receiver = Receiver()
        last.attach(receiver)
        oracle.drain(queue, receiver)
    oracle.check(expected)


def run_until_killed(
    site: Site, queue: table.TableQueue, oracle: Oracle, operation: str, *, after: bool
) -> set[str]:
    """Step a manager until it dies. Returns what was enqueued meanwhile."""
    store = MortalStore(site.dialect, queue.definition, operation, after=after)
    manager = Manager(store)
    receiver = Receiver(prefetch=3)
    manager.attach(receiver)
    unacked = 2  # one is nacked, one is kept
    behind_a_gap: set[str] = set()
    until = time.monotonic() + PATIENCE
    try:
        while time.monotonic() < until:
            pause = manager.run_once()
            events = receiver.take(timeout=0)
            oracle.saw(events)
            while events and unacked:
                event = events.pop()
                unacked -= 1
                if unacked:
                    event.nack()
            receiver.ack(events)
            if manager.fires and not behind_a_gap:
                behind_a_gap.add(enqueue_behind_a_gap(site, queue))
            time.sleep(min(pause, 0.01))  # the manager's own pause
    except Killed:
        pass
    else:
        raise AssertionError(f"nobody called {operation}")
    store.session.close()  # as the system does for a process that dies
    return behind_a_gap


def enqueue_behind_a_gap(site: Site, queue: table.TableQueue) -> str:
    """Commit an event after the id of one that was rolled back."""
    name = uuid.uuid4().hex
    with contextlib.suppress(ZeroDivisionError), site.transaction() as connection:
        queue.enqueue(connection, {"payload": "never"})
        raise ZeroDivisionError
    with site.transaction() as connection:
        queue.enqueue(connection, {"user_id": -1, "payload": name})
    return name


def test_a_process_killed_in_the_middle_loses_nothing(site: Site) -> None:
    queue = site.queue(lease="1s", ack_timeout="1s")
    site.fill(queue, 300)
    oracle = Oracle(site)
    process = subprocess.Popen(
        [sys.executable, str(VICTIM), site.url, queue.name], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:  # to the end: what it received before it died counts
        verb, *words = line.split()
        if verb == "got":
            oracle.received.update(words)
        else:
            oracle.confirmed.update(map(int, words))
        if len(oracle.confirmed) >= 50:
            process.kill()
    process.wait()
    process.stdout.close()
    with queue.receive() as receiver:
        oracle.drain(queue, receiver)
    oracle.check({f"p{at}" for at in range(300)})


def test_a_manager_that_was_paused_changes_nothing(site: Site) -> None:
    queue = site.queue(lease="300ms", ack_timeout="60s", retention="1h")
    site.fill(queue, 4)
    paused = site.manager(queue)
    stale = Receiver()
    paused.attach(stale)
    step_until(paused, lambda: _out(paused) == 4)
    (taken,) = take(stale, 1)
    taken.ack()
    # It sleeps past its lease, with an ack in hand and three events that nobody took.
    other = site.open_again(queue)
    with other.receive() as receiver:
        events = take(receiver, 4)
        settle(receiver, events)
        before = sorted(site.execute(f"SELECT * FROM {queue.name}"))
        assert stale.take(timeout=0) == [], "a stale manager's events were given out"
        assert not paused.fires
        paused.run_once()
        runner = threading.Thread(target=paused.run_once)
        runner.start()
        with contextlib.suppress(LeadLost):
            stale.flush(0.2)
        runner.join(PATIENCE)
        assert sorted(site.execute(f"SELECT * FROM {queue.name}")) == before
        assert stale.take(timeout=0) == []
    paused.store.session.close()


def _out(manager: Manager) -> int:
    reign = manager._reign
    return 0 if reign is None else len(reign.stock.flights)


def test_every_write_with_an_old_token_is_refused(site: Site) -> None:
    queue = site.queue(lease="1s")
    site.fill(queue, 3)
    store = Store(site.dialect, queue.definition)
    grant = store.acquire("old", 0.0)
    assert grant is not None
    eventually(lambda: store.acquire("new", 60.0) is not None)
    before = sorted(site.execute(f"SELECT * FROM {queue.name}"))
    ids = [row[0] for row in site.execute(f"SELECT event_id FROM {queue.name}")]
    writes: list[Any] = [
        lambda: store.mark(grant.token, ids),
        lambda: store.ack(grant.token, ids),
        lambda: store.late_ack(grant.token, ids),
        lambda: store.put_back(grant.token, [Verdict(ids[0], "dead", 0, 1, None)]),
        lambda: store.insert_fired(grant.token, ["payload"], [("new",)]),
        lambda: store.release_groups(grant.token),
        lambda: store.purge(grant.token, 2**62),
        lambda: store.renew(grant.token, 1.0),
    ]
    for write in writes:
        with pytest.raises(LeadLost):
            write()
    assert store.read_new(grant.token, 0, 10) == []
    assert store.read_due(grant.token, (0, 0), 2**62, 10) == []
    assert sorted(site.execute(f"SELECT * FROM {queue.name}")) == before
    store.close()


def test_a_takeover_waits_for_a_write_that_is_under_way(site: Site) -> None:
    queue = site.queue(lease="1s")
    site.fill(queue, 1)
    first, second = (Store(site.dialect, queue.definition) for _ in range(2))
    grant = first.acquire("first", 0.0)
    assert grant is not None
    fenced, go_on = threading.Event(), threading.Event()

    def write(_: Any) -> None:
        fenced.set()
        assert go_on.wait(PATIENCE)

    taken: list[Any] = []
    writer = threading.Thread(target=lambda: first._fence.transact(grant.token, write))
    taker = threading.Thread(target=lambda: taken.append(second.acquire("second", 60.0)))
    writer.start()
    assert fenced.wait(PATIENCE)
    taker.start()
    taker.join(0.3)
    assert not taken, "the lead was taken while its holder was writing"
    go_on.set()
    writer.join(PATIENCE)
    taker.join(PATIENCE)
    assert taken[0] is not None
    assert taken[0].token == grant.token + 1
    for store in (first, second):
        store.close()


def test_the_database_is_restarted(served_site: Site) -> None:
    site = served_site
    assert site.server is not None
    queue = site.queue(ack_timeout="2s")
    site.fill(queue, 50)
    oracle = Oracle(site)
    with queue.receive() as receiver:
        events = take(receiver, 20)
        oracle.saw(events)
        oracle.ack(receiver, events)
        events = take(receiver, 10)
        oracle.saw(events)
        receiver.ack(events)
        site.server.restart()
        oracle.drain(queue, receiver)
    oracle.check({f"p{at}" for at in range(50)})


def test_a_server_that_says_nothing_is_noticed(mariadb: MariadbServer) -> None:
    with Site(f"{mariadb.url}?read_timeout=1", mariadb) as site:
        queue = site.queue()
        site.fill(queue, 1)
        assert queue.counts()["to_be_fired"] == 1
        with mariadb.silent():
            started = time.monotonic()
            with pytest.raises(DatabaseDown):
                queue.counts()
            assert time.monotonic() - started < 30  # well before the minute of the default
        assert queue.counts()["to_be_fired"] == 1


def test_a_connection_to_postgresql_asks_whether_its_host_is_there(
    postgres: PostgresServer,
) -> None:
    with contextlib.closing(table.connect(postgres.url).connect()) as connection:
        told = connection.info.get_parameters()
        assert told["keepalives_idle"] == "10"
        assert told["tcp_user_timeout"] == "25000"
    url = f"{postgres.url}&keepalives_idle=77&application_name=shop"
    with contextlib.closing(table.connect(url).connect()) as connection:
        told = connection.info.get_parameters()
        assert told["keepalives_idle"] == "77"
        assert told["application_name"] == "shop"


def test_a_watch_that_cannot_connect_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "RETRIES", (0.05, 0.1))
    directory = tmp_path / "later"
    poked = threading.Event()
    watching = dialect_of(f"sqlite:///{directory}/queue.db").watch("mails", poked.set)
    assert watching is not None
    with watching:
        eventually(lambda: "polling until it listens again" in caplog.text)
        assert not poked.is_set()
        directory.mkdir()
        assert poked.wait(PATIENCE)
    assert caplog.text.count("polling until") == 1


def test_a_queue_that_is_dropped_is_missed_once_and_found_again(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("turnlane.table.manager.PAUSE", 0.1)
    queue = site.queue(lease="300ms")
    site.fill(queue, 1)
    with queue.receive() as receiver:
        settle(receiver, take(receiver, 1))
        site.database.catalog.drop(queue.name)
        eventually(lambda: "nothing fires until it is there again" in caplog.text)
        statements = queue.manager().store.session.statements
        eventually(lambda: queue.manager().store.session.statements > statements + 5)
        said = [record for record in caplog.records if queue.name in record.getMessage()]
        assert sum("there is no queue" in each.getMessage() for each in said) == 1
        assert not any(each.exc_info for each in said)
        site.database.catalog.create(queue.definition)
        site.fill(queue, 1)
        settle(receiver, take(receiver, 1))


def test_a_queue_that_is_made_anew_otherwise_is_not_led(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("turnlane.table.manager.PAUSE", 0.1)
    queue = site.queue(lease="300ms")
    with queue.receive():
        eventually(lambda: queue.manager().fires)
        site.database.catalog.drop(queue.name)
        eventually(lambda: "nothing fires until it is there again" in caplog.text)
        site.database.sql(f"CREATE QUEUE {queue.name} (other TEXT)")
        eventually(lambda: "was made anew, otherwise" in caplog.text)
        assert not queue.manager().fires


def test_a_read_only_database_stops_the_firing_and_keeps_the_acks(site: Site) -> None:
    queue = site.queue(ack_timeout="60s", lease="600ms")
    with site.transaction() as connection:
        queue.enqueue(connection, {"payload": "first"})
    with queue.receive() as receiver:
        (first,) = take(receiver, 1)
        with site.transaction() as connection:
            due = site.now() + 500_000_000
            queue.enqueue(connection, {"payload": "second"}, at=due)
        with read_only(site, queue):
            first.ack()
            assert not receiver.flush(0.1)
            eventually(lambda: not queue.manager().fires)
            held = receiver.take(timeout=0)  # a slow machine may have fired it before
            eventually(lambda: site.now() > due)
            assert receiver.take(timeout=0.1) == [], "it fired while nothing could be written"
        assert receiver.flush(PATIENCE)
        (second,) = held or take(receiver, 1)
        assert second["payload"] == "second"
        settle(receiver, [second])


def test_a_database_that_becomes_read_only_is_noticed_though_nobody_acks(site: Site) -> None:
    queue = site.queue(ack_timeout="60s", lease="10m")
    site.fill(queue, 1)
    with queue.receive() as receiver:
        (event,) = take(receiver, 1)
        with read_only(site, queue):
            eventually(lambda: not queue.manager().fires)
        eventually(lambda: queue.manager().fires)
        settle(receiver, [event])


@contextlib.contextmanager
def read_only(site: Site, queue: table.TableQueue) -> Iterator[None]:
    """The database takes no writes for a while."""
    if isinstance(site.server, PostgresServer):
        options = "-c default_transaction_read_only=off"
        with psycopg.connect(site.url, autocommit=True, options=options) as admin:
            admin.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            admin.execute("SELECT pg_reload_conf()")
            # The server tells its processes before it starts another one.
            eventually(lambda: site.execute("SHOW default_transaction_read_only") == [("on",)])
            try:
                yield
            finally:
                admin.execute("ALTER SYSTEM RESET default_transaction_read_only")
                admin.execute("SELECT pg_reload_conf()")
    elif isinstance(site.server, MariadbServer):
        with contextlib.closing(site.server.connect()) as admin:
            admin.cursor().execute("SET GLOBAL read_only = 1")
            try:
                yield
            finally:
                admin.cursor().execute("SET GLOBAL read_only = 0")
    else:
        connect = site.dialect.connect
        session = queue.manager().store.session

        def refusing() -> Any:
            connection = connect()
            connection.execute("PRAGMA query_only = ON")
            return connection

        session.dialect.own_connection = refusing  # type: ignore[method-assign]
        session.close()
        try:
            yield
        finally:
            session.dialect.own_connection = connect  # type: ignore[method-assign]
            session.close()


def test_connections_are_cut_in_the_middle_of_everything(site: Site) -> None:
    queue = site.queue(ack_timeout="1s")
    site.fill(queue, 400)
    oracle = Oracle(site)
    over = threading.Event()
    cutter = threading.Thread(target=cut_connections, args=(site, queue, over))
    with queue.receive(prefetch=40) as receiver:
        cutter.start()
        try:
            while sum(oracle.received.values()) < 200:
                events = receiver.take(20, timeout=PATIENCE)
                oracle.saw(events)
                receiver.ack(events)  # not confirmed: whatever of it is lost comes again
        finally:
            over.set()
            cutter.join(PATIENCE)
        oracle.drain(queue, receiver)
    oracle.check({f"p{at}" for at in range(400)})


def cut_connections(site: Site, queue: table.TableQueue, over: threading.Event) -> None:
    """End the manager's connection, again and again."""
    session = queue.manager().store.session
    while not over.wait(0.1):
        connection = session._connection
        if connection is None:
            continue
        if isinstance(site.server, PostgresServer):
            site.execute(f"SELECT pg_terminate_backend({connection.info.backend_pid})")
        elif isinstance(site.server, MariadbServer):
            with contextlib.suppress(pymysql.MySQLError):  # it may be gone already
                site.execute(f"KILL {connection.thread_id()}")
        else:
            session.close()


def test_deadlocks_and_serialization_failures_are_retried(site: Site) -> None:
    queue = site.queue()
    site.fill(queue, 5)
    failures = [deadlock(site) for _ in range(3)]
    with queue.receive() as receiver:
        events = take(receiver, 5)
        session = queue.manager().store.session
        once = session._once

        def failing(work: Any, *, atomic: bool) -> Any:
            if failures:
                raise failures.pop()
            return once(work, atomic=atomic)

        session._once = failing  # type: ignore[method-assign]
        settle(receiver, events)
        assert not failures
    assert queue.counts()["to_be_fired"] == 0


def deadlock(site: Site) -> Exception:
    """The error of the driver for it."""
    match site.kind:
        case "postgres":
            return psycopg.errors.DeadlockDetected("deadlock detected")
        case "mysql":
            found: Exception = pymysql.err.OperationalError(1213, "Deadlock found")
            return found
        case _:
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            return error


class Skewed(Clock):
    """A client whose wall clock is an hour ahead."""

    def time_ns(self) -> int:
        return super().time_ns() + 3_600 * 10**9


def test_only_the_clock_of_the_database_counts(site: Site) -> None:
    queue = site.queue()
    oracle = Oracle(site)
    with site.transaction() as connection:
        queue.enqueue(connection, {"payload": "soon"}, delay=0.5)
    manager = Manager(Store(site.dialect, queue.definition), clock=Skewed())
    manager.start()
    with contextlib.closing(manager):
        receiver = Receiver()
        manager.attach(receiver)
        events = take(receiver, 1)
        oracle.saw(events)
        oracle.ack(receiver, events)


def test_an_ack_that_comes_late_settles_the_event_wherever_it_is(site: Site) -> None:
    queue = site.queue(ack_timeout="300ms")
    site.fill(queue, 1)
    with queue.receive() as slow:
        (first,) = take(slow, 1)
        (second,) = take(slow, 1)
        assert second.id == first.id
        settle(slow, [first])
        assert queue.counts()["fired"] == queue.counts()["to_be_fired"] == 0
        settle(slow, [second])  # the second receiver's ack is one too many
        settle(slow, [first])
        assert slow.take(timeout=0.5) == []


def test_an_ack_of_what_was_never_received_changes_nothing(site: Site) -> None:
    queue = site.queue()
    with site.transaction() as connection:
        later = queue.enqueue(connection, {"payload": "later"}, delay=1.0)
        far = queue.enqueue(connection, {"payload": "far"}, delay=3_600)
        queue.enqueue(connection, {"payload": "now"})
    with queue.receive() as receiver:
        settle(receiver, take(receiver, 1))
        queue.manager().ack_ids([later, far, 10**9])
        assert receiver.flush(PATIENCE)
        assert queue.counts()["to_be_fired"] == 2
        assert payloads(take(receiver, 1)) == ["later"]


@pytest.mark.parametrize("patience", [gaps.PATIENCE, 0.0])
def test_a_transaction_that_stays_open_fires_when_it_commits(
    served_site: Site, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when its id is asked for no longer: then the sweep finds it."""
    site = served_site
    monkeypatch.setattr(gaps, "PATIENCE", patience)
    queue = site.queue(window="1s")
    with queue.receive() as receiver:
        with site.transaction() as connection:
            queue.enqueue(connection, {"payload": "slow"})
            for _ in range(3):
                site.fill(queue, 1)
                settle(receiver, take(receiver, 1))
            assert receiver.take(timeout=0.1) == []
        events = take(receiver, 1)
        assert payloads(events) == ["slow"]
        settle(receiver, events)


def test_a_hundred_thousand_due_at_once(site: Site) -> None:
    queue = site.queue(ack_timeout="120s")
    for _ in range(10):
        site.fill(queue, 10_000)
    seen: set[int] = set()
    with queue.receive(prefetch=4_000) as receiver:
        while len(seen) < 100_000:
            events = receiver.take(timeout=PATIENCE)
            ids = {event.id for event in events}
            assert ids
            assert not ids & seen
            seen |= ids
            receiver.ack(events)
        assert receiver.flush(PATIENCE)
        assert queue.manager().store.session.statements < 100_000 * 0.05
    assert queue.counts()["to_be_fired"] == queue.counts()["fired"] == 0


def test_a_million_due_at_once_after_a_downtime(postgres: PostgresServer) -> None:
    """All come, once, and none early; few of them are in memory at a time."""
    million, later = 1_000_000, 5_000
    with Site(postgres.url, postgres) as site:
        queue = site.queue(ack_timeout="10m")
        limit = queue.definition.settings.window_events
        # A thousand of the others become due in every second from now on.
        site.execute(
            f"INSERT INTO {queue.name} (user_id, payload, fire_at) SELECT at, 'p' || at, "
            f"{site.now()} + greatest(0, at - {million}) * 1000000::bigint "
            f"FROM generate_series(1, {million + later}) AS at"
        )
        seen, count = bytearray(million + later), 0
        with queue.receive(prefetch=4_000) as receiver:
            manager = queue.manager()
            while count < len(seen):
                events = receiver.take(timeout=PATIENCE)
                assert max(event.fire_at for event in events) <= time.time_ns()
                for event in events:
                    seen[event["user_id"] - 1] += 1
                assert manager.waiting <= limit
                if count % 100_000 < len(events):  # the window, what is out, what is acked
                    assert _events_in_memory() <= 4 * limit
                count += len(events)
                receiver.ack(events)
            assert receiver.flush(PATIENCE)
            assert set(seen) == {1}
            assert manager.counts.fired == len(seen)
        assert sum(queue.counts().values()) == 0


def _events_in_memory() -> int:
    return sum(type(each) is table.TableEvent for each in gc.get_objects())


class SlowToMark(Store):
    """A store that takes longer to mark events than the lease lasts."""

    def mark(self, token: int, ids: Sequence[int]) -> set[int]:
        marked = super().mark(token, ids)
        time.sleep(0.3)  # the fault itself
        return marked


def test_a_mark_that_takes_longer_than_the_lease_loses_no_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firing, "FRESH", 0.0)
    queue = site.queue(lease="200ms", ack_timeout="10m")
    with site.transaction() as connection:
        queue.enqueue(connection, {"payload": "marked before it fires"}, delay=0.2)
    manager = Manager(SlowToMark(site.dialect, queue.definition))
    manager.start()
    with contextlib.closing(manager):
        receiver = Receiver()
        manager.attach(receiver)
        settle(receiver, take(receiver, 1))
