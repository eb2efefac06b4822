"""What a queue table does when things fail. The oracle is the same throughout."""

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
from psycopg.conninfo import make_conninfo
from turnlane.table.sql import watch
from turnlane.table.sql.dialect import Dialect, Failure, Verdict
from turnlane.table.sql.postgres import Postgres
from turnlane.table.sql.session import Session
from turnlane.table.url import dialect_of

from tests.table.mortal import OPERATIONS, Killed, MortalStore
from tests.table.oracle import Oracle
from tests.table.servers import MariadbServer, PostgresServer
from tests.table.site import PATIENCE, Site, eventually, payloads, settle, step_until, take
from turnlane import table
from turnlane.clock import BootClock
from turnlane.errors import DatabaseDown, LeadLost
from turnlane.table import dispatcher, id_gaps
from turnlane.table.manager import Manager
from turnlane.table.receiver import Receiver
from turnlane.table.store import TableStore

VICTIM = Path(__file__).with_name("victim.py")
HOLDER = Path(__file__).with_name("holder.py")


def test_a_manager_killed_at_every_step_loses_nothing(site: Site) -> None:
    """One manager after the other dies, before or after a step; the next one carries on.

    An event that waits for a group fires after all its members are acked, and is acked once.
    """
    queue = site.queue(
        lease="150ms", ack_timeout="200ms", ordering="key", window="2s", max_attempts=1_000
    )
    oracle = GroupOracle(site, queue)
    expected: set[str] = set()
    for at, operation in enumerate(each for each in OPERATIONS if each not in ELSEWHERE):
        for after in (False, True):
            if operation in NOT_CALLED.get(site.kind, ()):
                continue
            names = [f"{operation} {after} {each}" for each in range(4)]
            with site.transaction() as connection:
                for each, name in enumerate(names):
                    row = {"user_id": 100 * at + each, "payload": name}
                    queue.enqueue(connection, row, delay=0.05 * each, group=names[0])
                last = f"after {names[0]}"
                row = {"user_id": 100 * at, "payload": last}
                queue.enqueue(connection, row, after_group=names[0])
            expected |= {*names, last}
            expected |= run_until_killed(site, queue, oracle, operation, after=after)
    last_one = site.manager(queue)
    last_one.start()
    with contextlib.closing(last_one):
        receiver = Receiver()
        last_one.attach(receiver)
        oracle.drain(queue, receiver)
    oracle.check(expected)


ELSEWHERE = {"insert_fired", "fire_schedule"}
"""These have tests of their own."""

NOT_CALLED = {
    # It gives the ids of what is rolled back to the next rows, and watches a counter.
    "sqlite": ("read_ids", "listen"),
    "mysql": ("listen",),
}


def run_until_killed(
    site: Site, queue: table.TableQueue, oracle: Oracle, operation: str, *, after: bool
) -> set[str]:
    """Step a manager until it dies. Returns what was enqueued meanwhile."""
    store = MortalStore(site.dialect, queue.definition, operation, after=after)
    manager = Manager(store)
    receiver = Receiver(prefetch=3)
    manager.attach(receiver)
    unacked = 2  # one is nacked, one is kept
    more: set[str] = set()
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
            if manager.fires and not more:
                more.add(enqueue_behind_a_gap(site, queue))
            if manager.fires:
                provoked(manager, operation)
            time.sleep(min(pause, 0.01))  # the manager's own pause
    except Killed:
        pass
    else:
        raise AssertionError(f"nobody called {operation}")
    store.session.close()  # as the system does for a process that dies
    return more


def provoked(manager: Manager, operation: str) -> None:
    """Have a manager that leads do what it does not do by itself."""
    match operation:
        case "unmark" if manager.receivers == 1:
            manager.attach(Receiver())  # who never takes what it is offered
        case "late_ack":
            manager.ack_ids([10**9])
        case "release":
            manager.close()


class GroupOracle(Oracle):
    """Also sees that what waits for a group comes after all of it is settled."""

    def __init__(self, site: Site, queue: table.TableQueue) -> None:
        super().__init__(site)
        self._queue = queue

    def saw(self, events: list[table.TableEvent]) -> None:
        super().saw(events)
        for name in payloads(events):
            if name.startswith("after "):
                members = f"event_group = '{name.removeprefix('after ')}' AND state <> 'acked'"
                left = self._site.execute(f"SELECT 1 FROM {self._queue.name} WHERE {members}")
                assert not left, f"{name}: {len(left)} are not settled"


@pytest.mark.parametrize("after", [False, True])
def test_a_manager_killed_while_it_writes_events_as_fired_loses_nothing(
    site: Site, *, after: bool
) -> None:
    queue = site.queue(lease="150ms", ack_timeout="200ms")
    store = MortalStore(site.dialect, queue.definition, "insert_fired", after=after)
    manager = Manager(store)
    manager.attach(Receiver())
    step_until(manager, lambda: manager.fires and manager.receivers == 1)
    assert not manager.enqueue([{"payload": "new"}], timeout=0)
    with pytest.raises(Killed):
        step_until(manager, lambda: False)
    store.session.close()
    site.fill(queue, 1)
    oracle = Oracle(site)
    with queue.receive() as receiver:
        oracle.drain(queue, receiver)
    oracle.check({"p0", "new"} if after else {"p0"})


def test_a_process_that_was_stopped_changes_nothing(site: Site) -> None:
    """It leads, sleeps past its lease with events in hand, and goes on when another leads."""
    queue = site.queue(lease="500ms", ack_timeout="60s", retention="1h")
    site.fill(queue, 30)
    with holding(site, queue) as process, contextlib.ExitStack() as opened:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "took 10\n"
        receiver = opened.enter_context(queue.receive())
        while not stopped(process, queue.manager()):
            process.send_signal(signal.SIGCONT)
        settle(receiver, take(receiver, 30))
        before = sorted(map(str, site.execute(f"SELECT * FROM {queue.name}")))
        process.send_signal(signal.SIGCONT)
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "refused\n"
        assert process.stdout.readline() == "given 0\n"
        assert sorted(map(str, site.execute(f"SELECT * FROM {queue.name}"))) == before
        assert queue.manager().counts.lost_leads == 0


@contextlib.contextmanager
def holding(site: Site, queue: table.TableQueue) -> Iterator[subprocess.Popen[str]]:
    """A process that leads a queue, and has taken events."""
    command = [sys.executable, str(HOLDER), site.url, queue.name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def stopped(process: subprocess.Popen[str], other: Manager) -> bool:
    """Stop a process; whether another leads then: not if it has a transaction under way."""
    process.send_signal(signal.SIGSTOP)
    until = time.monotonic() + 5
    while not other.fires and time.monotonic() < until:
        time.sleep(0.01)  # the lease ends by the database's clock
    return other.fires


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
    store = TableStore(site.dialect, queue.definition)
    grant = store.acquire("old", 0.0)
    assert grant is not None
    eventually(lambda: store.acquire("new", 60.0) is not None)
    with site.transaction() as connection:
        queue.enqueue(connection, {"user_id": 9}, group="g")
        queue.enqueue(connection, {"user_id": 9}, after_group="h")
    site.execute(f"UPDATE {queue.name} SET state = 'fired', attempts = 1 WHERE event_id = 2")
    before = sorted(map(str, site.execute(f"SELECT * FROM {queue.name}")))
    queue.schedule("tick", "* * * * *", payload="x")
    site.execute(f"UPDATE turnlane_schedule SET next_at = 1 WHERE queue = '{queue.name}'")
    columns = "owner, token, expires_at, listening"
    lease = f"SELECT {columns} FROM turnlane_lease WHERE queue = '{queue.name}'"
    led = site.execute(lease)
    ids = [row[0] for row in site.execute(f"SELECT event_id FROM {queue.name}")]
    writes: list[Any] = [
        lambda: store.mark(grant.token, ids),
        lambda: store.ack(grant.token, ids),
        lambda: store.ack(grant.token, ids, {"g"}),
        lambda: store.ack(grant.token, (), {"g"}),
        lambda: store.ack(grant.token, ids, wary=True),
        lambda: store.unmark(grant.token, ids),
        lambda: store.late_ack(grant.token, ids),
        lambda: store.put_back(grant.token, [Verdict(ids[0], "dead", 0, 1, None)]),
        lambda: store.insert_fired(grant.token, ["payload"], [("new",)]),
        lambda: store.release_groups(grant.token),
        lambda: store.purge(grant.token, 2**62),
        lambda: store.fire_schedule(grant.token, "tick"),
        lambda: store.renew(grant.token, 1.0),
    ]
    for write in writes:
        with pytest.raises(LeadLost):
            write()
    store.listen(grant.token, on=True)
    store.release(grant.token)
    assert site.execute(lease) == led
    assert [each.next_at for each in queue.schedules()] == [1]
    assert store.read_new(grant.token, 0, 10) == []
    assert store.read_ids(grant.token, ids) == store.read_retried(grant.token) == []
    assert store.read_due(grant.token, (0, 0), 2**62, 10) == []
    assert sorted(map(str, site.execute(f"SELECT * FROM {queue.name}"))) == before
    store.close()


def test_a_takeover_waits_for_a_write_that_is_under_way(site: Site) -> None:
    queue = site.queue(lease="1s")
    site.fill(queue, 1)
    first, second = (TableStore(site.dialect, queue.definition) for _ in range(2))
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
    monkeypatch.setattr("turnlane.table.manager.MISSING_QUEUE_PAUSE", 0.1)
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
    monkeypatch.setattr("turnlane.table.manager.MISSING_QUEUE_PAUSE", 0.1)
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


def test_a_database_without_a_free_connection_keeps_the_acks(served_site: Site) -> None:
    site = served_site
    queue = site.queue(ack_timeout="60s")
    site.fill(queue, 2)
    with limited(site) as (dialect, exhausted):
        manager = Manager(TableStore(dialect, queue.definition))
        manager.start()
        with manager:
            receiver = Receiver()
            manager.attach(receiver)
            events = take(receiver, 2)
            with exhausted(manager):
                receiver.ack(events)
                assert not receiver.flush(0.3)
                eventually(lambda: not manager.fires)
            assert receiver.flush(PATIENCE)
            assert manager.lost_acks == manager.counts.lost_leads == 0
    assert queue.counts()["to_be_fired"] == queue.counts()["fired"] == 0


Exhausted = Callable[[Manager], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def limited(site: Site) -> Iterator[tuple[Dialect, Exhausted]]:
    """A user who may have few connections, and how to have none left for a manager."""
    user = f"limited_{uuid.uuid4().hex[:8]}"
    if isinstance(site.server, PostgresServer):
        site.execute(f"CREATE ROLE {user} LOGIN")
        site.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {user}")
        yield Postgres(make_conninfo(site.url, user=user)), lambda manager: no_slot(site, manager)
        site.execute(f"DROP OWNED BY {user}")
        site.execute(f"DROP ROLE {user}")
    else:
        assert isinstance(site.server, MariadbServer)
        with contextlib.closing(site.server.connect()) as root, root.cursor() as cursor:
            cursor.execute(f"CREATE USER {user}@'127.0.0.1' WITH MAX_USER_CONNECTIONS 2")
            cursor.execute(f"GRANT ALL ON turnlane.* TO {user}@'127.0.0.1'")
            dialect = dialect_of(site.url.replace("app@", f"{user}@"))
            yield dialect, lambda manager: all_slots(site, dialect, manager)
            cursor.execute(f"DROP USER {user}@'127.0.0.1'")


@contextlib.contextmanager
def no_slot(site: Site, manager: Manager) -> Iterator[None]:
    """The role has as many connections as it may have, and the manager's is gone."""
    connection = manager.store.session._connection
    assert connection is not None
    user = connection.info.user
    site.execute(f"ALTER ROLE {user} CONNECTION LIMIT 0")
    site.execute(f"SELECT pg_terminate_backend({connection.info.backend_pid})")
    yield
    site.execute(f"ALTER ROLE {user} CONNECTION LIMIT -1")


@contextlib.contextmanager
def all_slots(site: Site, dialect: Dialect, manager: Manager) -> Iterator[None]:
    """All connections that the user may have are somebody else's."""
    with contextlib.ExitStack() as held:
        held.enter_context(contextlib.closing(dialect.connect()))

        def quicker() -> bool:
            connection = manager.store.session._connection
            with contextlib.suppress(pymysql.MySQLError, AttributeError):
                site.server.connect().cursor().execute(f"KILL {connection.thread_id()}")  # type: ignore[union-attr]
            try:
                held.enter_context(contextlib.closing(dialect.connect()))
            except pymysql.MySQLError:
                return False
            return True

        eventually(quicker)
        yield


@pytest.mark.parametrize("code", [1021, 1040, 1114, 1203, 1226])
def test_what_a_database_has_not_enough_of_may_be_there_later(code: int) -> None:
    error = pymysql.err.OperationalError(code, "no more of it")
    assert dialect_of("mysql://nobody@nowhere/none").failure(error) is Failure.DISCONNECTED


def test_a_real_deadlock_is_retried(served_site: Site) -> None:
    """The manager's transaction and a user's each wait for a row that the other has."""
    site = served_site
    queue = site.queue()
    site.fill(queue, 40)
    store = TableStore(site.dialect, queue.definition)
    grant = store.acquire("me", 60.0)
    assert grant is not None
    other, met, tries = site.dialect.connect(), threading.Barrier(2), []

    def users_transaction() -> None:
        with contextlib.suppress(site.dialect.error), site.dialect.transaction(other):
            for event_id in range(2, 41):  # InnoDB gives up whoever has changed less
                touch(other.cursor().execute, event_id)
            met.wait(PATIENCE)
            touch(other.cursor().execute, 1)

    def touch(execute: Any, event_id: int) -> None:
        execute(f"UPDATE {queue.name} SET payload = 'x' WHERE event_id = {event_id}")

    def work(execute: Any) -> None:
        tries.append(1)
        touch(execute, 1)
        if len(tries) == 1:
            met.wait(PATIENCE)
        touch(execute, 2)

    # Whom PostgreSQL gives up is a matter of chance: have it be us once.
    for _ in range(20):
        tries.clear()
        user = threading.Thread(target=users_transaction)
        user.start()
        store._fence.transact(grant.token, work)
        user.join(PATIENCE)
        if len(tries) > 1:
            break
    other.close()
    store.close()
    assert len(tries) == 2


def test_a_real_serialization_failure_is_retried(postgres: PostgresServer) -> None:
    with Site(postgres.url, postgres) as site:
        queue = site.queue()
        site.fill(queue, 1)
        session, tries = Session(site.dialect), []
        change = f"UPDATE {queue.name} SET priority = priority + 1"

        def work(execute: Any) -> None:
            execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
            execute(f"SELECT priority FROM {queue.name}")
            tries.append(1)
            if len(tries) == 1:
                site.execute(change)  # somebody else, after we have seen the row
            execute(change)

        session.transact(work)
        session.close()
        assert len(tries) == 2
        assert site.execute(f"SELECT priority FROM {queue.name}") == [(2,)]


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


@pytest.mark.parametrize("skew", [-9 * 3600, 9 * 3600])
def test_only_the_clock_of_the_database_counts(
    site: Site, skew: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's may be hours off, behind or ahead: what it schedules, fires and retries is not."""
    queue = site.queue(ack_timeout="300ms")
    oracle = Oracle(site)
    wall, wall_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: wall() + skew)
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + skew * 10**9)
    before = site.now()
    with site.transaction() as connection:
        queue.enqueue(connection, {"payload": "soon"}, delay=0.5)
        queue.enqueue(connection, {"payload": "later"}, delay=3600)
    with queue.receive() as receiver:
        events = take(receiver, 1)
        oracle.saw(events)
        assert payloads(events) == ["soon"]
        assert events[0].fire_at - before >= 500_000_000
        oracle.saw(take(receiver, 1))  # not acked in time, by nobody's clock but the database's
        events[0].ack()
        assert receiver.flush(PATIENCE)
    assert queue.counts()["to_be_fired"] == 1


def test_a_manager_whose_machine_slept_gives_out_nothing(site: Site) -> None:
    """Its clock goes on meanwhile: the lease is over before it can look at the database."""
    assert isinstance(Manager(TableStore(site.dialect, site.queue().definition))._clock, BootClock)
    assert abs(BootClock().monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60
    queue = site.queue(lease="60s")
    site.fill(queue, 1)
    clock = Sleeper()
    manager = Manager(TableStore(site.dialect, queue.definition), clock=clock)
    with manager:
        receiver = Receiver()
        manager.attach(receiver)
        step_until(manager, lambda: manager.in_flight == 1)
        clock.slept = 3600.0
        assert receiver.take(timeout=0) == []
        assert not manager.fires


class Sleeper(BootClock):
    """A machine that was asleep for a while."""

    slept = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.slept


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


def test_a_transaction_that_stays_open_on_sqlite_holds_writes_up_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one writer at a time: acks wait for it, and are stored when it is done."""
    monkeypatch.setattr("turnlane.table.sql.sqlite.BUSY_MS", 50)
    with Site(f"sqlite:///{tmp_path}/queue.db", None) as site:
        queue = site.queue(lease="10m", ack_timeout="60s")
        site.fill(queue, 3)
        with queue.receive() as receiver:
            events = take(receiver, 3)
            with site.transaction() as connection:
                queue.enqueue(connection, {"payload": "slow"})
                receiver.ack(events)
                assert not receiver.flush(1.0)
            assert receiver.flush(PATIENCE)
            events = take(receiver, 1)
            assert payloads(events) == ["slow"]
            settle(receiver, events)
            assert queue.manager().lost_acks == queue.manager().counts.lost_leads == 0


@pytest.mark.parametrize("patience", [id_gaps.STALE_AFTER, 0.0])
def test_a_transaction_that_stays_open_fires_when_it_commits(
    served_site: Site, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when its id is asked for no longer: then the sweep finds it."""
    site = served_site
    monkeypatch.setattr(id_gaps, "STALE_AFTER", patience)
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


class SlowToMark(TableStore):
    """A store that takes longer to mark events than the lease lasts."""

    def mark(self, token: int, ids: Sequence[int]) -> set[int]:
        marked = super().mark(token, ids)
        time.sleep(0.3)  # the fault itself
        return marked


def test_a_mark_that_takes_longer_than_the_lease_loses_no_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "MAX_UNMARKED_AGE", 0.0)
    queue = site.queue(lease="200ms", ack_timeout="10m")
    with site.transaction() as connection:
        queue.enqueue(connection, {"payload": "marked before it fires"}, delay=0.2)
    manager = Manager(SlowToMark(site.dialect, queue.definition))
    manager.start()
    with contextlib.closing(manager):
        receiver = Receiver()
        manager.attach(receiver)
        settle(receiver, take(receiver, 1))
