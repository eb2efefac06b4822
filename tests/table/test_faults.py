"""Failures of processes, databases and clocks; one checker for the guarantees in all tests."""

from __future__ import annotations

import contextlib
import gc
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest

from tests.frozen import freeze_process
from tests.table.database_fixture import (
    TIMEOUT,
    DatabaseFixture,
    eventually,
    payloads,
    settle,
    step_until,
    take,
)
from tests.table.delivery_checker import DeliveryChecker
from tests.table.dying_store import OPERATIONS, DyingStore, ProcessKilled
from tests.table.servers import MariadbServer, PostgresServer
from turnlane import table
from turnlane.clock import BootClock
from turnlane.databases import Dialect, ErrorKind, Session, connection
from turnlane.errors import DatabaseDown, LeadLost
from turnlane.pacing import Backoff
from turnlane.table import dispatcher, fetcher
from turnlane.table.manager import Manager
from turnlane.table.queue_sql import RetryDecision, load_queue_dialect
from turnlane.table.receiver import Receiver
from turnlane.table.shard_store import ShardStore
from turnlane.table.store import TableStore

ACKING_PROCESS = Path(__file__).with_name("acking_process.py")
HOLDING_PROCESS = Path(__file__).with_name("holding_process.py")


def test_manager_killed_at_every_step_loses_nothing(db: DatabaseFixture) -> None:
    """One manager after the other dies, before or after a step; the next one carries on.

    An event that waits for a group fires after all its members are acked, and is acked once.
    """
    queue = db.queue(
        lease="150ms", ack_timeout="200ms", ordering="key", window="2s", max_attempts=1_000
    )
    checker = GroupDeliveryChecker(db, queue)
    expected: set[str] = set()
    for at, operation in enumerate(each for each in OPERATIONS if each not in ELSEWHERE):
        for after in (False, True):
            if operation in NOT_CALLED.get(db.kind, ()):
                continue
            names = [f"{operation} {after} {each}" for each in range(4)]
            with db.transaction() as connection:
                for each, name in enumerate(names):
                    row = {"user_id": 100 * at + each, "payload": name}
                    queue.enqueue(connection, row, delay=0.05 * each, group=names[0])
                last = f"after {names[0]}"
                row = {"user_id": 100 * at, "payload": last}
                queue.enqueue(connection, row, after_group=names[0])
            expected |= {*names, last}
            expected |= run_until_killed(db, queue, checker, operation, after=after)
    last_one = db.manager(queue)
    last_one.start()
    with contextlib.closing(last_one):
        receiver = Receiver()
        last_one.attach(receiver)
        checker.drain(queue, receiver)
    checker.check(expected)


ELSEWHERE = {"insert_fired", "fire_schedule"}
"""Operations with tests of their own."""

NOT_CALLED = {
    # SQLite reuses the ids of rolled back rows, so it has no gaps, and it has no listening.
    "sqlite": ("read_ids", "set_listening"),
    "mysql": ("set_listening",),
}


def run_until_killed(
    db: DatabaseFixture,
    queue: table.TableQueue,
    checker: DeliveryChecker,
    operation: str,
    *,
    after: bool,
) -> set[str]:
    """Step a manager until it dies; returns the payloads that were enqueued during that."""
    store = DyingStore(db.dialect, queue.definition, operation, after=after)
    manager = Manager(store)
    receiver = Receiver(prefetch=3)
    manager.attach(receiver)
    unacked = 2  # one is nacked, one is not settled
    more: set[str] = set()
    until = time.monotonic() + TIMEOUT
    try:
        while time.monotonic() < until:
            pause = manager.run_once()
            events = receiver.take(timeout=0)
            checker.record(events)
            while events and unacked:
                event = events.pop()
                unacked -= 1
                if unacked:
                    event.nack()
            receiver.ack(events)
            if manager.can_fire and not more:
                more.add(enqueue_behind_a_gap(db, queue))
            if manager.can_fire:
                provoke(manager, operation)
            time.sleep(min(pause, 0.01))  # the pause that the manager asks for
    except ProcessKilled:
        pass
    else:
        raise AssertionError(f"nobody called {operation}")
    store.session.close()  # like the system when a process dies
    return more


def provoke(manager: Manager, operation: str) -> None:
    """Make a leading manager call an operation that it does not call by itself."""
    match operation:
        case "unmark_fired" if manager.receivers == 1:
            manager.attach(Receiver())  # a receiver that takes nothing
        case "store_late_acks":
            manager.ack_ids([10**9])
        case "release_lease":
            manager.close()


class GroupDeliveryChecker(DeliveryChecker):
    """Also checks that events which wait for a group come after all of its members."""

    def __init__(self, db: DatabaseFixture, queue: table.TableQueue) -> None:
        super().__init__(db)
        self._queue = queue

    def record(self, events: list[table.TableEvent]) -> None:
        super().record(events)
        for name in payloads(events):
            if name.startswith("after "):
                members = f"event_group = '{name.removeprefix('after ')}' AND state <> 'acked'"
                left = self._site.execute(f"SELECT 1 FROM {self._queue.name} WHERE {members}")
                assert not left, f"{name}: {len(left)} are not settled"


@pytest.mark.parametrize("after", [False, True])
def test_manager_killed_while_inserting_fired_events_loses_nothing(
    db: DatabaseFixture, *, after: bool
) -> None:
    queue = db.queue(lease="150ms", ack_timeout="200ms")
    store = DyingStore(db.dialect, queue.definition, "insert_fired", after=after)
    manager = Manager(store)
    manager.attach(Receiver())
    step_until(manager, lambda: manager.can_fire and manager.receivers == 1)
    assert not manager.enqueue([{"payload": "new"}], timeout=0)
    with pytest.raises(ProcessKilled):
        step_until(manager, lambda: False)
    store.session.close()
    db.fill(queue, 1)
    checker = DeliveryChecker(db)
    with queue.receive() as receiver:
        checker.drain(queue, receiver)
    checker.check({"p0", "new"} if after else {"p0"})


def test_stopped_process_changes_nothing_after_a_takeover(db: DatabaseFixture) -> None:
    """The process leads, sleeps past its lease with events, and continues when another leads."""
    queue = db.queue(lease="500ms", ack_timeout="60s", retention="1h")
    db.fill(queue, 30)
    with hold_events(db, queue) as process, contextlib.ExitStack() as opened:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "took 10\n"
        receiver = opened.enter_context(queue.receive())
        while not stop_until_takeover(process, queue.manager()):
            process.send_signal(signal.SIGCONT)
        settle(receiver, take(receiver, 30))
        before = sorted(map(str, db.execute(f"SELECT * FROM {queue.name}")))
        process.send_signal(signal.SIGCONT)
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "refused\n"
        assert process.stdout.readline() == "given 0\n"
        assert sorted(map(str, db.execute(f"SELECT * FROM {queue.name}"))) == before
        assert queue.manager().counts.lost_leads == 0


@contextlib.contextmanager
def hold_events(db: DatabaseFixture, queue: table.TableQueue) -> Iterator[subprocess.Popen[str]]:
    """Run a process that leads a queue and has taken events."""
    command = [sys.executable, str(HOLDING_PROCESS), db.url, queue.name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def stop_until_takeover(process: subprocess.Popen[str], other: Manager) -> bool:
    """Stop a process; whether another manager takes the lead. It cannot during a transaction."""
    freeze_process(process.pid)
    until = time.monotonic() + 5
    while not other.can_fire and time.monotonic() < until:
        time.sleep(0.01)  # the lease ends by the database's clock
    return other.can_fire


def enqueue_behind_a_gap(db: DatabaseFixture, queue: table.TableQueue) -> str:
    """Commit an event whose id follows the id of a rolled back event."""
    name = uuid.uuid4().hex
    with contextlib.suppress(ZeroDivisionError), db.transaction() as connection:
        queue.enqueue(connection, {"payload": "never"})
        raise ZeroDivisionError
    with db.transaction() as connection:
        queue.enqueue(connection, {"user_id": -1, "payload": name})
    return name


def test_process_killed_in_the_middle_loses_nothing(db: DatabaseFixture) -> None:
    queue = db.queue(lease="1s", ack_timeout="1s")
    db.fill(queue, 300)
    checker = DeliveryChecker(db)
    process = subprocess.Popen(
        [sys.executable, str(ACKING_PROCESS), db.url, queue.name], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:  # to the end: events received before its death count
        verb, *words = line.split()
        if verb == "got":
            checker.received.update(words)
        else:
            checker.confirmed.update(map(int, words))
        if len(checker.confirmed) >= 50:
            process.kill()
    process.wait()
    process.stdout.close()
    with queue.receive() as receiver:
        checker.drain(queue, receiver)
    checker.check({f"p{at}" for at in range(300)})


def test_paused_manager_changes_nothing_after_a_takeover(db: DatabaseFixture) -> None:
    queue = db.queue(lease="300ms", ack_timeout="60s", retention="1h")
    db.fill(queue, 4)
    paused = db.manager(queue)
    stale = Receiver()
    paused.attach(stale)
    step_until(paused, lambda: _count_in_flight(paused) == 4)
    (taken,) = take(stale, 1)
    taken.ack()
    # It sleeps past its lease, with one ack and three events that no thread took.
    other = db.open_again(queue)
    with other.receive() as receiver:
        events = take(receiver, 4)
        settle(receiver, events)
        before = sorted(db.execute(f"SELECT * FROM {queue.name}"))
        assert stale.take(timeout=0) == [], "a stale manager's events were given out"
        assert not paused.can_fire
        paused.run_once()
        runner = threading.Thread(target=paused.run_once)
        runner.start()
        with contextlib.suppress(LeadLost):
            stale.flush(0.2)
        runner.join(TIMEOUT)
        assert sorted(db.execute(f"SELECT * FROM {queue.name}")) == before
        assert stale.take(timeout=0) == []
    paused.store.session.close()


def _count_in_flight(manager: Manager) -> int:
    term = manager._term
    return 0 if term is None else len(term.state.in_flight)


def test_every_write_with_an_old_token_is_refused(db: DatabaseFixture) -> None:
    queue = db.queue(lease="1s")
    db.fill(queue, 3)
    store = TableStore(db.dialect, queue.definition)
    grant = store.acquire_lease("old", 0.0)
    assert grant is not None
    eventually(lambda: store.acquire_lease("new", 60.0) is not None)
    with db.transaction() as connection:
        queue.enqueue(connection, {"user_id": 9}, group="g")
        queue.enqueue(connection, {"user_id": 9}, after_group="h")
    db.execute(f"UPDATE {queue.name} SET state = 'fired', attempts = 1 WHERE event_id = 2")
    before = sorted(map(str, db.execute(f"SELECT * FROM {queue.name}")))
    queue.schedule("tick", "* * * * *", payload="x")
    db.execute(f"UPDATE turnlane_schedule SET next_at = 1 WHERE queue = '{queue.name}'")
    columns = "owner, token, expires_at, listening"
    lease = f"SELECT {columns} FROM turnlane_lease WHERE queue = '{queue.name}'"
    led = db.execute(lease)
    ids = [row[0] for row in db.execute(f"SELECT event_id FROM {queue.name}")]
    writes: list[Any] = [
        lambda: store.mark_fired(grant.token, ids),
        lambda: store.store_acks(grant.token, ids),
        lambda: store.store_acks(grant.token, ids, {"g"}),
        lambda: store.store_acks(grant.token, (), {"g"}),
        lambda: store.store_acks(grant.token, ids, likely_locked=True),
        lambda: store.unmark_fired(grant.token, ids),
        lambda: store.store_late_acks(grant.token, ids),
        lambda: store.apply_decisions(grant.token, [RetryDecision(ids[0], "dead", 0, 1, None)]),
        lambda: store.insert_fired(grant.token, ["payload"], [("new",)]),
        lambda: store.release_groups(grant.token),
        lambda: store.delete_old_acked(grant.token, 2**62),
        lambda: store.fire_schedule(grant.token, "tick"),
        lambda: store.renew_lease(grant.token, 1.0),
    ]
    for write in writes:
        with pytest.raises(LeadLost):
            write()
    store.set_listening(grant.token, on=True)
    store.release_lease(grant.token)
    assert db.execute(lease) == led
    assert [each.next_at for each in queue.schedules()] == [1]
    assert store.read_new(grant.token, 0, 10) == []
    assert store.read_ids(grant.token, ids) == store.read_retried(grant.token) == []
    assert store.read_due(grant.token, (0, 0), 2**62, 10) == []
    assert sorted(map(str, db.execute(f"SELECT * FROM {queue.name}"))) == before
    store.close()


def test_takeover_waits_for_a_running_write(db: DatabaseFixture) -> None:
    queue = db.queue(lease="1s")
    db.fill(queue, 1)
    first, second = (TableStore(db.dialect, queue.definition) for _ in range(2))
    grant = first.acquire_lease("first", 0.0)
    assert grant is not None
    fenced, go_on = threading.Event(), threading.Event()

    def write(_: Any) -> None:
        fenced.set()
        assert go_on.wait(TIMEOUT)

    taken: list[Any] = []
    writer = threading.Thread(target=lambda: first._transact(grant.token, write))
    taker = threading.Thread(target=lambda: taken.append(second.acquire_lease("second", 60.0)))
    writer.start()
    assert fenced.wait(TIMEOUT)
    taker.start()
    taker.join(0.3)
    assert not taken, "the lead was taken while its holder was writing"
    go_on.set()
    writer.join(TIMEOUT)
    taker.join(TIMEOUT)
    assert taken[0] is not None
    assert taken[0].token == grant.token + 1
    for store in (first, second):
        store.close()


def test_database_restart_loses_nothing(server_db: DatabaseFixture) -> None:
    db = server_db
    assert db.server is not None
    queue = db.queue(ack_timeout="2s")
    db.fill(queue, 50)
    checker = DeliveryChecker(db)
    with queue.receive() as receiver:
        events = take(receiver, 20)
        checker.record(events)
        checker.ack(receiver, events)
        events = take(receiver, 10)
        checker.record(events)
        receiver.ack(events)
        db.server.restart()
        checker.drain(queue, receiver)
    checker.check({f"p{at}" for at in range(50)})


def test_silent_server_is_noticed(mariadb: MariadbServer) -> None:
    with DatabaseFixture(f"{mariadb.url}?read_timeout=1", mariadb) as db:
        queue = db.queue()
        db.fill(queue, 1)
        assert queue.counts()["to_be_fired"] == 1
        with mariadb.silent():
            started = time.monotonic()
            with pytest.raises(DatabaseDown):
                queue.counts()
            assert time.monotonic() - started < 30  # well before the default of one minute
        assert queue.counts()["to_be_fired"] == 1


def test_postgresql_connection_uses_keepalives(
    postgres: PostgresServer,
) -> None:
    with contextlib.closing(table.connect(postgres.url).connect()) as connection:
        parameters = connection.info.get_parameters()
        assert parameters["keepalives_idle"] == "10"
        assert parameters["tcp_user_timeout"] == "25000"
    url = f"{postgres.url}&keepalives_idle=77&application_name=shop"
    with contextlib.closing(table.connect(url).connect()) as connection:
        parameters = connection.info.get_parameters()
        assert parameters["keepalives_idle"] == "77"
        assert parameters["application_name"] == "shop"


def test_watch_that_cannot_connect_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "RECONNECT", Backoff(0.05, 0.1))
    directory = tmp_path / "later"
    poked = threading.Event()
    watching = load_queue_dialect(f"sqlite:///{directory}/queue.db").watch(
        "turnlane", "mails", poked.set
    )
    assert watching is not None
    with watching:
        eventually(lambda: "polling until it listens again" in caplog.text)
        assert not poked.is_set()
        directory.mkdir()
        assert poked.wait(TIMEOUT)
    assert caplog.text.count("polling until") == 1


def test_dropped_queue_is_reported_once_and_found_again(
    db: DatabaseFixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("turnlane.table.manager.MISSING_QUEUE_PAUSE", 0.1)
    queue = db.queue(lease="300ms")
    db.fill(queue, 1)
    with queue.receive() as receiver:
        settle(receiver, take(receiver, 1))
        db.database.catalog.drop(queue.name)
        eventually(lambda: "table.queue_missing" in caplog.text)
        statements = queue.manager().store.session.statements
        eventually(lambda: queue.manager().store.session.statements > statements + 5)
        said = [record for record in caplog.records if queue.name in record.getMessage()]
        assert sum("there is no queue" in each.getMessage() for each in said) == 1
        assert not any(each.exc_info for each in said)
        db.database.catalog.create(queue.definition)
        db.fill(queue, 1)
        settle(receiver, take(receiver, 1))


def test_queue_created_with_another_definition_is_not_led(
    db: DatabaseFixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("turnlane.table.manager.MISSING_QUEUE_PAUSE", 0.1)
    queue = db.queue(lease="300ms")
    with queue.receive():
        eventually(lambda: queue.manager().can_fire)
        db.database.catalog.drop(queue.name)
        eventually(lambda: "table.queue_missing" in caplog.text)
        db.database.sql(f"CREATE QUEUE {queue.name} (other TEXT)")
        eventually(lambda: "was created again with another definition" in caplog.text)
        assert not queue.manager().can_fire


def test_read_only_database_stops_firing_and_keeps_acks(db: DatabaseFixture) -> None:
    queue = db.queue(ack_timeout="60s", lease="600ms")
    with db.transaction() as connection:
        queue.enqueue(connection, {"payload": "first"})
    with queue.receive() as receiver:
        (first,) = take(receiver, 1)
        with db.transaction() as connection:
            due = db.now() + 500_000_000
            queue.enqueue(connection, {"payload": "second"}, at=due)
        with make_read_only(db, queue):
            first.ack()
            assert not receiver.flush(0.1)
            eventually(lambda: not queue.manager().can_fire)
            fired_before = receiver.take(timeout=0)  # a slow machine may have fired it before
            eventually(lambda: db.now() > due)
            assert receiver.take(timeout=0.1) == [], "it fired while nothing could be written"
        assert receiver.flush(TIMEOUT)
        (second,) = fired_before or take(receiver, 1)
        assert second["payload"] == "second"
        settle(receiver, [second])


def test_read_only_database_is_noticed_without_acks(db: DatabaseFixture) -> None:
    queue = db.queue(ack_timeout="60s", lease="10m")
    db.fill(queue, 1)
    with queue.receive() as receiver:
        (event,) = take(receiver, 1)
        with make_read_only(db, queue):
            eventually(lambda: not queue.manager().can_fire)
        eventually(lambda: queue.manager().can_fire)
        settle(receiver, [event])


@contextlib.contextmanager
def make_read_only(db: DatabaseFixture, queue: table.TableQueue) -> Iterator[None]:
    """Make the database refuse writes for a while."""
    if isinstance(db.server, PostgresServer):
        options = "-c default_transaction_read_only=off"
        with psycopg.connect(db.url, autocommit=True, options=options) as admin:
            admin.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            admin.execute("SELECT pg_reload_conf()")
            # The server informs its processes before it starts a new one.
            eventually(lambda: db.execute("SHOW default_transaction_read_only") == [("on",)])
            try:
                yield
            finally:
                admin.execute("ALTER SYSTEM RESET default_transaction_read_only")
                admin.execute("SELECT pg_reload_conf()")
    elif isinstance(db.server, MariadbServer):
        with contextlib.closing(db.server.connect()) as admin:
            admin.cursor().execute("SET GLOBAL read_only = 1")
            try:
                yield
            finally:
                admin.cursor().execute("SET GLOBAL read_only = 0")
    else:
        connect = db.dialect.connect
        session = queue.manager().store.session

        def refusing() -> Any:
            connection = connect()
            connection.execute("PRAGMA query_only = ON")
            return connection

        session.dialect.connect_for_index_scans = refusing  # type: ignore[method-assign]
        session.close()
        try:
            yield
        finally:
            session.dialect.connect_for_index_scans = connect  # type: ignore[method-assign]
            session.close()


def test_cut_connections_lose_nothing(db: DatabaseFixture) -> None:
    queue = db.queue(ack_timeout="1s")
    db.fill(queue, 400)
    checker = DeliveryChecker(db)
    over = threading.Event()
    cutter = threading.Thread(target=cut_connections, args=(db, queue, over))
    with queue.receive(prefetch=40) as receiver:
        cutter.start()
        try:
            while sum(checker.received.values()) < 200:
                events = receiver.take(20, timeout=TIMEOUT)
                checker.record(events)
                receiver.ack(events)  # not confirmed: events with lost acks come again
        finally:
            over.set()
            cutter.join(TIMEOUT)
        checker.drain(queue, receiver)
    checker.check({f"p{at}" for at in range(400)})


def cut_connections(db: DatabaseFixture, queue: table.TableQueue, over: threading.Event) -> None:
    """End the manager's connection repeatedly."""
    session = queue.manager().store.session
    while not over.wait(0.1):
        connection = session._connection
        if connection is None:
            continue
        if isinstance(db.server, PostgresServer):
            db.execute(f"SELECT pg_terminate_backend({connection.info.backend_pid})")
        elif isinstance(db.server, MariadbServer):
            with contextlib.suppress(pymysql.MySQLError):  # it may be gone already
                db.execute(f"KILL {connection.thread_id()}")
        else:
            session.close()


def test_database_without_free_connections_keeps_acks(server_db: DatabaseFixture) -> None:
    db = server_db
    queue = db.queue(ack_timeout="60s")
    db.fill(queue, 2)
    with limit_connections(db) as (dialect, exhausted):
        manager = Manager(TableStore(dialect, queue.definition))
        manager.start()
        with manager:
            receiver = Receiver()
            manager.attach(receiver)
            events = take(receiver, 2)
            with exhausted(manager):
                receiver.ack(events)
                assert not receiver.flush(0.3)
                eventually(lambda: not manager.can_fire)
            assert receiver.flush(TIMEOUT)
            assert manager.lost_acks == manager.counts.lost_leads == 0
    assert queue.counts()["to_be_fired"] == queue.counts()["fired"] == 0


Exhausted = Callable[[Manager], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def limit_connections(db: DatabaseFixture) -> Iterator[tuple[Dialect, Exhausted]]:
    """Create a user with few connections; returns how to use them all up."""
    user = f"limited_{uuid.uuid4().hex[:8]}"
    if isinstance(db.server, PostgresServer):
        db.execute(f"CREATE ROLE {user} LOGIN")
        db.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {user}")
        yield (
            load_queue_dialect(f"{db.url}&user={user}"),
            lambda manager: use_up_role_connections(db, manager),
        )
        db.execute(f"DROP OWNED BY {user}")
        db.execute(f"DROP ROLE {user}")
    else:
        assert isinstance(db.server, MariadbServer)
        with contextlib.closing(db.server.connect()) as root, root.cursor() as cursor:
            cursor.execute(f"CREATE USER {user}@'127.0.0.1' WITH MAX_USER_CONNECTIONS 2")
            cursor.execute(f"GRANT ALL ON turnlane.* TO {user}@'127.0.0.1'")
            dialect = load_queue_dialect(db.url.replace("app@", f"{user}@"))
            yield dialect, lambda manager: use_up_user_connections(db, dialect, manager)
            cursor.execute(f"DROP USER {user}@'127.0.0.1'")


@contextlib.contextmanager
def use_up_role_connections(db: DatabaseFixture, manager: Manager) -> Iterator[None]:
    """Close the manager's connection and allow the role no other."""
    connection = manager.store.session._connection
    assert connection is not None
    user = connection.info.user
    db.execute(f"ALTER ROLE {user} CONNECTION LIMIT 0")
    db.execute(f"SELECT pg_terminate_backend({connection.info.backend_pid})")
    yield
    db.execute(f"ALTER ROLE {user} CONNECTION LIMIT -1")


@contextlib.contextmanager
def use_up_user_connections(
    db: DatabaseFixture, dialect: Dialect, manager: Manager
) -> Iterator[None]:
    """Open all connections that the user may have."""
    with contextlib.ExitStack() as connections:
        connections.enter_context(contextlib.closing(dialect.connect()))

        def try_connect() -> bool:
            connection = manager.store.session._connection
            with contextlib.suppress(pymysql.MySQLError, AttributeError):
                db.server.connect().cursor().execute(f"KILL {connection.thread_id()}")  # type: ignore[union-attr]
            try:
                connections.enter_context(contextlib.closing(dialect.connect()))
            except pymysql.MySQLError:
                return False
            return True

        eventually(try_connect)
        yield


@pytest.mark.parametrize("code", [1021, 1040, 1114, 1203, 1226])
def test_exhausted_resources_are_retried(code: int) -> None:
    error = pymysql.err.OperationalError(code, "no more of it")
    assert (
        load_queue_dialect("mysql://nobody@nowhere/none").classify_error(error)
        is ErrorKind.UNAVAILABLE
    )


def test_real_deadlock_is_retried(server_db: DatabaseFixture) -> None:
    """The manager's transaction and a user's transaction wait for each other's rows."""
    db = server_db
    queue = db.queue()
    db.fill(queue, 40)
    store = TableStore(db.dialect, queue.definition)
    grant = store.acquire_lease("me", 60.0)
    assert grant is not None
    other, met, tries = db.dialect.connect(), threading.Barrier(2), []

    def users_transaction() -> None:
        with contextlib.suppress(db.dialect.error), db.dialect.transaction(other):
            for event_id in range(2, 41):  # InnoDB rolls back the transaction with fewer changes
                touch(other.cursor().execute, event_id)
            met.wait(TIMEOUT)
            touch(other.cursor().execute, 1)

    def touch(execute: Any, event_id: int) -> None:
        execute(f"UPDATE {queue.name} SET payload = 'x' WHERE event_id = {event_id}")

    def work(execute: Any) -> None:
        tries.append(1)
        touch(execute, 1)
        if len(tries) == 1:
            met.wait(TIMEOUT)
        touch(execute, 2)

    # PostgreSQL rolls back either transaction: repeat until it is ours.
    for _ in range(20):
        tries.clear()
        user = threading.Thread(target=users_transaction)
        user.start()
        store._transact(grant.token, work)
        user.join(TIMEOUT)
        if len(tries) > 1:
            break
    other.close()
    store.close()
    assert len(tries) == 2


def test_real_serialization_failure_is_retried(postgres: PostgresServer) -> None:
    with DatabaseFixture(postgres.url, postgres) as db:
        queue = db.queue()
        db.fill(queue, 1)
        session, tries = Session(db.dialect), []
        change = f"UPDATE {queue.name} SET priority = priority + 1"

        def work(execute: Any) -> None:
            execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
            execute(f"SELECT priority FROM {queue.name}")
            tries.append(1)
            if len(tries) == 1:
                db.execute(change)  # another transaction, after ours has read the row
            execute(change)

        session.transact(work)
        session.close()
        assert len(tries) == 2
        assert db.execute(f"SELECT priority FROM {queue.name}") == [(2,)]


def test_deadlocks_and_serialization_failures_are_retried(db: DatabaseFixture) -> None:
    queue = db.queue()
    db.fill(queue, 5)
    failures = [make_deadlock_error(db) for _ in range(3)]
    with queue.receive() as receiver:
        events = take(receiver, 5)
        session = queue.manager().store.session
        once = session._run_once

        def failing(work: Any, *, atomic: bool) -> Any:
            if failures:
                raise failures.pop()
            return once(work, atomic=atomic)

        session._run_once = failing  # type: ignore[method-assign]
        settle(receiver, events)
        assert not failures
    assert queue.counts()["to_be_fired"] == 0


def make_deadlock_error(db: DatabaseFixture) -> Exception:
    """Return the driver's error for a deadlock."""
    match db.kind:
        case "postgres":
            return psycopg.errors.DeadlockDetected("deadlock detected")
        case "mysql":
            found: Exception = pymysql.err.OperationalError(1213, "Deadlock found")
            return found
        case _:
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            return error


@pytest.mark.parametrize("skew", [-9 * 3600, 9 * 3600])
def test_only_the_database_clock_decides_when_events_fire(
    db: DatabaseFixture, skew: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's clock may be hours wrong: its events are scheduled, fired and retried on time."""
    queue = db.queue(ack_timeout="300ms")
    checker = DeliveryChecker(db)
    wall, wall_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: wall() + skew)
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + skew * 10**9)
    before = db.now()
    with db.transaction() as connection:
        queue.enqueue(connection, {"payload": "soon"}, delay=0.5)
        queue.enqueue(connection, {"payload": "later"}, delay=3600)
    with queue.receive() as receiver:
        events = take(receiver, 1)
        checker.record(events)
        assert payloads(events) == ["soon"]
        assert events[0].fire_at - before >= 500_000_000
        checker.record(take(receiver, 1))  # not acked in time, by the database's clock
        events[0].ack()
        assert receiver.flush(TIMEOUT)
    assert queue.counts()["to_be_fired"] == 1


def test_manager_whose_machine_slept_sends_nothing(db: DatabaseFixture) -> None:
    """Its clock runs on during the sleep: the lease is over before it can ask the database."""
    assert isinstance(Manager(TableStore(db.dialect, db.queue().definition))._clock, BootClock)
    assert abs(BootClock().monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60
    queue = db.queue(lease="60s")
    db.fill(queue, 1)
    clock = SleepingClock()
    manager = Manager(TableStore(db.dialect, queue.definition), clock=clock)
    with manager:
        receiver = Receiver()
        manager.attach(receiver)
        step_until(manager, lambda: manager.in_flight == 1)
        clock.slept = 3600.0
        assert receiver.take(timeout=0) == []
        assert not manager.can_fire


class SleepingClock(BootClock):
    """The clock of a machine that slept for a while."""

    slept = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.slept


DAY = 86_400 * 10**9


def test_lease_of_a_clock_that_jumped_a_day_is_taken_over(
    db: DatabaseFixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The database's clock is a day ahead, the leader is killed, the clock is put right."""
    queue = db.queue(lease="60s")
    clock = SleepingClock()
    with monkeypatch.context() as jumped:
        jumped.setattr(db.dialect, "now", f"({db.dialect.now} + {DAY})")
        killed = Manager(TableStore(db.dialect, queue.definition), clock=clock)
        step_until(killed, lambda: killed.can_fire)
    term = queue.status().term
    assert queue.status().lease > 86_000
    db.fill(queue, 1)
    with Manager(TableStore(db.dialect, queue.definition), clock=clock) as manager:
        manager.run_once()
        clock.slept += 25
        manager.run_once()
        assert not manager.can_fire, "the leader could still live"
        clock.slept += 60
        step_until(manager, lambda: manager.can_fire)
        assert "table.lease_not_believed" in caplog.text
        assert queue.status().term == term + 1
        assert queue.status().lease <= 60
        with pytest.raises(LeadLost):
            killed.store.store_acks(term, [1])
    assert queue.counts()["to_be_fired"] == 1
    killed.store.close()


def test_leader_that_lives_keeps_its_lease_when_the_clock_is_set_back(
    db: DatabaseFixture, caplog: pytest.LogCaptureFixture
) -> None:
    queue = db.queue(lease="60s")
    clock = SleepingClock()
    with (
        Manager(TableStore(db.dialect, queue.definition), clock=clock) as leader,
        Manager(TableStore(db.dialect, queue.definition), clock=clock) as other,
    ):
        step_until(leader, lambda: leader.can_fire)
        for _ in range(9):  # three leases long
            db.execute(
                f"UPDATE turnlane_lease SET expires_at = expires_at + {DAY} "
                f"WHERE queue = '{queue.name}'"
            )
            other.run_once()
            clock.slept += 25
            leader.run_once()
        assert leader.can_fire
        assert not other.can_fire
    assert "lease_not_believed" not in caplog.text


def test_closed_lease_is_never_taken_over(db: DatabaseFixture) -> None:
    """A reshard closes the lease without an end: no manager may fire until it opens it."""
    queue = db.queue(lease="60s")
    clock = SleepingClock()
    with (
        contextlib.closing(ShardStore(db.dialect, queue.definition)) as shard,
        Manager(TableStore(db.dialect, queue.definition), clock=clock) as manager,
    ):
        shard.close_lease()
        for _ in range(4):
            manager.run_once()
            clock.slept += 60
        assert not manager.can_fire
        shard.open_lease()
        step_until(manager, lambda: manager.can_fire)


def test_late_ack_settles_the_event_in_every_state(db: DatabaseFixture) -> None:
    queue = db.queue(ack_timeout="300ms")
    db.fill(queue, 1)
    with queue.receive() as slow:
        (first,) = take(slow, 1)
        (second,) = take(slow, 1)
        assert second.id == first.id
        settle(slow, [first])
        assert queue.counts()["fired"] == queue.counts()["to_be_fired"] == 0
        settle(slow, [second])  # the event was acked before
        settle(slow, [first])
        assert slow.take(timeout=0.5) == []


def test_ack_of_an_event_never_fired_changes_nothing(db: DatabaseFixture) -> None:
    queue = db.queue()
    with db.transaction() as connection:
        later = queue.enqueue(connection, {"payload": "later"}, delay=1.0)
        far = queue.enqueue(connection, {"payload": "far"}, delay=3_600)
        queue.enqueue(connection, {"payload": "now"})
    with queue.receive() as receiver:
        settle(receiver, take(receiver, 1))
        queue.manager().ack_ids([later, far, 10**9])
        assert receiver.flush(TIMEOUT)
        assert queue.counts()["to_be_fired"] == 2
        assert payloads(take(receiver, 1)) == ["later"]


def test_open_sqlite_transaction_delays_writes_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite has one writer at a time: acks wait for the transaction and are stored after it."""
    monkeypatch.setattr("turnlane.databases.sqlite.BUSY_MS", 50)
    with DatabaseFixture(f"sqlite:///{tmp_path}/queue.db", None) as db:
        queue = db.queue(lease="10m", ack_timeout="60s")
        db.fill(queue, 3)
        with queue.receive() as receiver:
            events = take(receiver, 3)
            with db.transaction() as connection:
                queue.enqueue(connection, {"payload": "slow"})
                receiver.ack(events)
                assert not receiver.flush(1.0)
            assert receiver.flush(TIMEOUT)
            events = take(receiver, 1)
            assert payloads(events) == ["slow"]
            settle(receiver, events)
            assert queue.manager().lost_acks == queue.manager().counts.lost_leads == 0


@pytest.mark.parametrize("timeout", [fetcher.STALE_AFTER, 0.0])
def test_event_of_a_long_transaction_fires_when_it_commits(
    server_db: DatabaseFixture, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep finds it even if its id is not read any more."""
    db = server_db
    monkeypatch.setattr(fetcher, "STALE_AFTER", timeout)
    queue = db.queue(window="1s")
    with queue.receive() as receiver:
        with db.transaction() as connection:
            queue.enqueue(connection, {"payload": "slow"})
            for _ in range(3):
                db.fill(queue, 1)
                settle(receiver, take(receiver, 1))
            assert receiver.take(timeout=0.1) == []
        events = take(receiver, 1)
        assert payloads(events) == ["slow"]
        settle(receiver, events)


def test_hundred_thousand_events_due_at_once_all_fire(db: DatabaseFixture) -> None:
    queue = db.queue(ack_timeout="120s")
    for _ in range(10):
        db.fill(queue, 10_000)
    received: set[int] = set()
    with queue.receive(prefetch=4_000) as receiver:
        while len(received) < 100_000:
            events = receiver.take(timeout=TIMEOUT)
            ids = {event.id for event in events}
            assert ids
            assert not ids & received
            received |= ids
            receiver.ack(events)
        assert receiver.flush(TIMEOUT)
        assert queue.manager().store.session.statements < 100_000 * 0.05
    assert queue.counts()["to_be_fired"] == queue.counts()["fired"] == 0


def test_million_due_events_after_a_downtime_stay_within_the_window(
    postgres: PostgresServer,
) -> None:
    """All come once and not early; few of them are in memory at a time."""
    million, later = 1_000_000, 5_000
    with DatabaseFixture(postgres.url, postgres) as db:
        queue = db.queue(ack_timeout="10m")
        limit = queue.definition.settings.window_events
        # A thousand of the other events become due every second.
        db.execute(
            f"INSERT INTO {queue.name} (user_id, payload, fire_at) SELECT at, 'p' || at, "
            f"{db.now()} + greatest(0, at - {million}) * 1000000::bigint "
            f"FROM generate_series(1, {million + later}) AS at"
        )
        received, count = bytearray(million + later), 0
        with queue.receive(prefetch=4_000) as receiver:
            manager = queue.manager()
            while count < len(received):
                events = receiver.take(timeout=TIMEOUT)
                assert max(event.fire_at for event in events) <= time.time_ns()
                for event in events:
                    received[event["user_id"] - 1] += 1
                assert manager.waiting <= limit
                if count % 100_000 < len(events):  # the window, events in flight, acked events
                    assert _events_in_memory() <= 4 * limit
                count += len(events)
                receiver.ack(events)
            assert receiver.flush(TIMEOUT)
            assert set(received) == {1}
            assert manager.counts.fired == len(received)
        assert sum(queue.counts().values()) == 0


def _events_in_memory() -> int:
    return sum(type(each) is table.TableEvent for each in gc.get_objects())


class SlowMarkStore(TableStore):
    """A store whose marks take longer than the lease."""

    def mark_fired(self, token: int, ids: Sequence[int]) -> set[int]:
        marked = super().mark_fired(token, ids)
        time.sleep(0.3)  # the fault
        return marked


def test_mark_slower_than_the_lease_delays_no_retry(
    db: DatabaseFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "MAX_UNMARKED_AGE", 0.0)
    queue = db.queue(lease="200ms", ack_timeout="10m")
    with db.transaction() as connection:
        queue.enqueue(connection, {"payload": "marked before it fires"}, delay=0.2)
    manager = Manager(SlowMarkStore(db.dialect, queue.definition))
    manager.start()
    with contextlib.closing(manager):
        receiver = Receiver()
        manager.attach(receiver)
        settle(receiver, take(receiver, 1))
