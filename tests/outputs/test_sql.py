"""The SQL output: rows, exactly-once delivery, and errors of the databases."""

from __future__ import annotations

import json
import random
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pymysql
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.conftest import skip_or_fail
from tests.contract.harness import wait_until
from tests.databases import mariadb_server, pooled_postgres_server
from tests.outputs.blocks import make_block, make_values
from tests.outputs.event_databases import EventDatabase
from turnlane.databases import ErrorKind, get_delivery_error, load_dialect
from turnlane.delivery.destination import LocalDestinationState
from turnlane.delivery.engine import Engine
from turnlane.delivery.settings import DeliverySettings
from turnlane.errors import Never, PayloadTooLarge, RetryLater
from turnlane.events import Block, block_of
from turnlane.intervals import RangeSet
from turnlane.outputs.sql import SqlOutput, SqlSettings
from turnlane.outputs.sql_rows import build_rows, find_runs, select_outside

WRITTEN = datetime(2026, 11, 18, 11, 6, 40, 123456, tzinfo=UTC)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, EventDatabase]]:
    file = tmp_path_factory.mktemp("sqlite") / "events.db"
    sqlite3.connect(file).close()
    file.touch()
    with pooled_postgres_server() as (postgres, pooled), mariadb_server() as mariadb:
        urls = {"postgresql": postgres, "mysql": mariadb, "sqlite": f"sqlite:///{file}"}
        found = {kind: EventDatabase(url) for kind, url in urls.items()}
        yield found if pooled is None else found | {"pgbouncer": EventDatabase(postgres, pooled)}


@pytest.fixture(params=["postgresql", "pgbouncer", "mysql", "sqlite"])
def database(request: pytest.FixtureRequest, servers: dict[str, EventDatabase]) -> EventDatabase:
    if request.param not in servers:
        skip_or_fail("pgbouncer is not installed")
    found = servers[request.param]
    found.make_table()
    return found


def send(output: SqlOutput, block: Block) -> None:
    output.send(output.prepare(block))


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


def test_columns_paths_and_ids_become_rows(database: EventDatabase) -> None:
    text = "longtext" if database.kind == "mysql" else "text"
    time = "text" if database.kind == "sqlite" else "timestamp(6)"
    raw = "bytea" if database.kind == "postgresql" else "blob"
    database.make_table(
        f"id bigint, name {text}, at {time}, raw {raw}, team {text}, level double precision, "
        f"who {text}, tags {text}, ok boolean, word {text}"
    )
    values = [
        json.dumps({"user": {"id": 7, "name": 'Zoë "x"\n,\\'}, "tags": [1]}).encode(),
        b'{"user": "none", "tags": null}',
        b"{}",
    ]
    headers = pa.array([[("team", "a"), ("x", "y")], [], None], pa.map_(pa.string(), pa.string()))
    block = make_block(
        values,
        10,
        headers=headers,
        level=pa.array([1.5, None, -0.25]),
        ok=pa.array([True, False, None]),
        blob=pa.array([b"\x00\xff\\x", b"", None], pa.binary()),
        key=pa.array(["", None, "it's ü"]),
    )
    columns = {
        "id": "value.user.id",
        "name": "value.user.name",
        "at": "timestamp",
        "raw": "blob",
        "team": "headers.team",
        "level": "level",
        "who": "event_id",
        "tags": "value.tags",
        "ok": "ok",
        "word": "key",
    }
    with database.make_output(columns=columns) as output:
        output.check()
        send(output, block)
    rows = database.run(f"SELECT {', '.join(columns)} FROM events ORDER BY who")
    ids, names, times, blobs, *rest = zip(*rows, strict=True)
    assert ids == (7, None, None)
    assert names == ('Zoë "x"\n,\\', None, None)
    assert [_moment(each) for each in times] == [WRITTEN] * 3
    assert [each if each is None else bytes(each) for each in blobs] == [b"\x00\xff\\x", b"", None]
    assert rest == [
        ("a", None, None),
        (1.5, None, -0.25),
        ("orders/0/10", "orders/0/11", "orders/0/12"),
        ("[1]", None, None),
        (True, False, None),
        ("", None, "it's ü"),
    ]


def _moment(at: Any) -> Any:
    return datetime.fromisoformat(at) if isinstance(at, str) else at.replace(tzinfo=UTC)


def test_json_values_of_mixed_types_become_text(database: EventDatabase) -> None:
    database.make_table("id bigint, note varchar(100)")
    values = [b'{"a": 1}', b'{"a": "two"}', b'{"a": {"b": 3}}', b'{"a": 123456789012345678901234}']
    with database.make_output(columns={"id": "offset", "note": "value.a"}) as output:
        send(output, make_block(values))
    notes = [note for _, note in database.run("SELECT id, note FROM events ORDER BY id")]
    assert notes == ["1", "two", '{"b": 3}', "123456789012345678901234"]


def test_a_row_replaces_the_row_with_the_same_key(database: EventDatabase) -> None:
    with database.make_output(key=["id"], columns={"id": "key", "note": "value"}) as output:
        keys = pa.array(["1", "2", "1"])
        send(output, make_block([b"one", b"two", b"one again"], key=keys))
        assert database.run("SELECT note FROM events ORDER BY id") == [("one again",), ("two",)]
        send(output, make_block([b"two again"], key=pa.array(["2"])))
        assert database.run("SELECT note FROM events ORDER BY id") == [
            ("one again",),
            ("two again",),
        ]


def test_rows_with_a_null_in_the_key_replace_no_row(database: EventDatabase) -> None:
    database.make_table("id bigint UNIQUE, note varchar(20)")
    with database.make_output(key=["id"], columns={"id": "key", "note": "value"}) as output:
        send(output, make_block(make_values(0, 3), key=pa.array([None, None, "1"])))
        send(output, make_block(make_values(3, 4), key=pa.array([None], pa.string())))
    assert len(database.run("SELECT id FROM events")) == 4


def test_a_table_with_only_key_columns_keeps_its_rows(database: EventDatabase) -> None:
    database.make_table("id bigint PRIMARY KEY")
    with database.make_output(key=["id"], columns={"id": "offset"}) as output:
        for _ in range(2):
            send(output, make_block(make_values(0, 3)))
    assert database.read_ids() == [0, 1, 2]


# ── exactly once ─────────────────────────────────────────────────────────────────────────────────


def test_events_that_are_sent_again_in_any_order_are_skipped(database: EventDatabase) -> None:
    database.make_table(
        "id bigint, note varchar(20)"
    )  # without a key that would hide repeated rows
    pieces = [(first, first + 10) for first in range(0, 200, 10)]
    again = [(5, 25), (0, 200), (95, 105)]
    mixed = random.Random(7).sample(pieces, len(pieces))
    with (
        database.make_output(exactly_once=True) as one,
        database.make_output(exactly_once=True) as other,
    ):
        for first, end in [*mixed[:10], again[0], *mixed[10:], *again]:
            send(one if first % 20 else other, make_block(make_values(first, end), first))
    assert database.read_ids() == list(range(200))
    assert database.read_delivered_ranges() == [(0, 200)], "ranges that touch are one"


def test_scattered_offsets_are_recorded_as_separate_ranges(database: EventDatabase) -> None:
    """With `ordering: key`, a task has only some of the events of a range."""
    database.make_table("id bigint, note varchar(20)")
    whole = make_block(make_values(0, 30))
    with database.make_output(exactly_once=True) as output:
        send(output, whole.take(pa.array([1, 2, 3, 9, 20])))
        assert database.read_delivered_ranges() == [(1, 4), (9, 10), (20, 21)]
        send(output, whole.slice(0, 10))
        assert database.read_delivered_ranges() == [(0, 10), (20, 21)]
        send(output, whole)
    assert database.read_delivered_ranges() == [(0, 30)]
    assert database.read_ids() == list(range(30))


def test_queues_nodes_and_names_have_separate_records(database: EventDatabase) -> None:
    database.make_table("id bigint, note varchar(20)")
    two_nodes = make_block(make_values(0, 4), partition=pa.array([0, 1, 0, 1], pa.int32()))
    with (
        database.make_output(exactly_once=True) as output,
        database.make_output(exactly_once=True, delivered_as="others") as other,
    ):
        for _ in range(2):
            send(output, make_block(make_values(0, 4)))
            send(output, two_nodes)
            send(output, make_block(make_values(0, 4), queue="invoices"))
            send(other, make_block(make_values(0, 4)))
    # The first two events of node 0 were there already; offsets 1 and 3 of node 1 were not.
    assert len(database.read_ids()) == 4 + 2 + 4 + 4


def test_rows_are_not_written_again_after_the_answer_to_a_commit_is_lost(
    database: EventDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.make_table("id bigint, note varchar(20)")
    with database.make_output(exactly_once=True) as output:
        send(output, make_block(make_values(0, 1), 100))
        with output._writers.borrow() as writer:
            real = writer.transaction

        @contextmanager
        def lost() -> Iterator[None]:
            with real():
                yield
            raise RetryLater("the answer is lost")

        with monkeypatch.context() as patched:
            patched.setattr(writer, "transaction", lost)
            with pytest.raises(RetryLater):
                send(output, make_block(make_values(0, 10)))
        send(output, make_block(make_values(0, 10)))
    assert database.read_ids() == [*range(10), 100]


def test_deleted_records_raise_an_error_and_are_created_again(database: EventDatabase) -> None:
    """Without a row to lock, two senders would not notice each other."""
    with database.make_output(exactly_once=True) as output:
        send(output, make_block(make_values(0, 3)))
        database.run("DELETE FROM turnlane_delivered")
        with pytest.raises(RetryLater, match="the rows of turnlane_delivered were deleted"):
            send(output, make_block(make_values(3, 6), 3))
        send(output, make_block(make_values(3, 6), 3))
    assert database.read_ids() == list(range(6))
    assert database.read_delivered_ranges() == [(3, 6)]


def test_rows_that_were_not_written_are_not_recorded(database: EventDatabase) -> None:
    with database.make_output(exactly_once=True) as output:
        with pytest.raises(Never):
            send(output, make_block([b"fits", b"x" * 100]))
        assert database.read_ids() == []
        assert database.read_delivered_ranges() == []
        send(output, make_block([b"fits"]))
    assert database.read_ids() == [0]


def test_several_senders_of_the_same_events_write_them_once(database: EventDatabase) -> None:
    """A task that Spark replaced may still run beside its replacement."""
    database.make_table("id bigint, note varchar(20)")
    pieces = [(first, first + 25) for first in range(0, 200, 20)]
    start = threading.Barrier(4)

    def write(seed: int) -> None:
        order = random.Random(seed).sample(pieces, len(pieces))
        with database.make_output(exactly_once=True, timeout="60s") as output:
            start.wait(60)
            for first, end in order:
                send_until_accepted(output, make_block(make_values(first, end), first))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert database.read_ids() == list(range(205))
    assert database.read_delivered_ranges() == [(0, 205)]


def send_until_accepted(output: SqlOutput, block: Block) -> None:
    def sent() -> bool:
        try:
            send(output, block)
        except RetryLater:
            return False
        return True

    wait_until(sent, "the block to be written", 60)


def test_rows_made_by_sql_cannot_be_delivered_exactly_once() -> None:
    block = make_block(make_values(0, 2)).drop_columns(["offset"])
    output = EventDatabase("sqlite:///a.db").make_output(
        exactly_once=True, columns={"note": "value"}
    )
    with pytest.raises(RetryLater, match="no queue"):
        output.prepare(block)


def test_several_rows_of_one_event_are_each_written_once(database: EventDatabase) -> None:
    """It does not matter which of the rows are sent again, and together with which others."""
    offsets, rows = pa.array([0, 1, 1, 1, 2]), pa.array([0, 0, 1, 2, 0])
    block = make_block(make_values(0, 5), offset=offsets, turnlane_row=rows)
    database.make_table("id varchar(40) PRIMARY KEY, note varchar(20)")
    columns = {"id": "event_id", "note": "value"}
    with database.make_output(exactly_once=True, columns=columns) as output:
        for part in (block.slice(0, 3), block.slice(2), block, block.slice(3)):
            output.send(output.prepare(part))
    found = database.run("SELECT id, note FROM events ORDER BY id")
    ids = ["0", "1", "1.1", "1.2", "2"]
    assert found == [(f"orders/0/{each}", f"event {at}") for at, each in enumerate(ids)]


@given(st.lists(st.integers(0, 60), max_size=40), st.lists(st.integers(0, 60), max_size=40))
def test_find_runs_and_select_outside_agree_with_sets(some: list[int], others: list[int]) -> None:
    known = RangeSet(find_runs(np.array(others, dtype=np.int64)))
    assert {each for first, end in known for each in range(first, end)} == set(others)
    fresh = select_outside(np.array(some, dtype=np.int64), known)
    assert fresh.tolist() == [each not in set(others) for each in some]


@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
def test_cancel_ends_a_write_that_waits_for_a_lock(
    servers: dict[str, EventDatabase], kind: str
) -> None:
    database = servers[kind]
    database.make_table()
    database.run("INSERT INTO events (id, note) VALUES (0, 'there')")
    failed: list[BaseException] = []

    def write() -> None:
        try:
            send(output, make_block([b"another"]))
        except RetryLater as error:
            failed.append(error)

    with (
        database.make_output(key=["id"], timeout="10m") as output,
        database.connect() as other,
        closing(other.cursor()) as cursor,
    ):
        cursor.execute("BEGIN")
        cursor.execute("UPDATE events SET note = 'locked'")
        writer = threading.Thread(target=write)
        writer.start()

        def cancelled() -> bool:
            output.cancel()  # again, since it may not have waited yet
            return not writer.is_alive()

        wait_until(cancelled, "the write to end", 60)
        cursor.execute("ROLLBACK")
        assert failed
        send(output, make_block([b"another"]))
    assert database.run("SELECT note FROM events") == [("another",)]


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "block",
    [
        make_block([b"x" * 21]),
        make_block([b"again"], 1),
        make_block([b"null"], value=pa.nulls(1, pa.binary())),
        make_block([b"no number"], offset=pa.array(["one"])),
    ],
    ids=["too long", "the same key", "null", "no number"],
)
def test_a_value_that_the_table_refuses_raises_never(database: EventDatabase, block: Block) -> None:
    with database.make_output() as output:
        send(output, make_block([b"first"], 1))
        if database.kind == "sqlite" and block.column("offset").to_pylist() == ["one"]:
            database.make_table("id integer, note text, CHECK (typeof(id) = 'integer')")
        with pytest.raises(Never):
            send(output, block)
        send(output, make_block([b"second"], 2))  # the connection still works


def test_a_bad_event_becomes_a_dead_letter_and_all_others_are_written_once(
    database: EventDatabase,
) -> None:
    """The engine of a lane halves the batch until it has found the bad event."""
    values = make_values(0, 400)
    values[123] = b"x" * 21
    settings = DeliverySettings.model_validate({"max_time": "60s"})
    with (
        database.make_output(exactly_once=True) as output,
        Engine(output, settings, LocalDestinationState(settings)) as engine,
    ):
        outcome = engine.deliver(make_block(values))
    assert (outcome.delivered, len(outcome.deferred)) == (399, 0)
    assert [letter.numbers.tolist() for letter in outcome.dead] == [[123]]
    assert database.read_ids() == [number for number in range(400) if number != 123]
    assert database.read_delivered_ranges() == [(0, 123), (124, 400)]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"table": "missing"}, "missing"),
        ({"columns": {"id": "offset", "nowhere": "value"}}, "nowhere"),
        ({"columns": {"id": "offset", "note": "nothing"}}, "no 'nothing'; they have key, value"),
        ({"password_env": "TURNLANE_TEST_UNSET"}, "TURNLANE_TEST_UNSET is empty or not set"),
        ({"password_file": Path("/nowhere/password")}, "/nowhere/password"),
    ],
)
def test_an_error_that_a_person_has_to_correct_is_retried(
    database: EventDatabase, knobs: dict[str, Any], message: str
) -> None:
    with database.make_output(**knobs) as output, pytest.raises(RetryLater, match=message):
        send(output, make_block(make_values(0, 1)))


def test_an_unreachable_database_is_retried(tmp_path: Path) -> None:
    for url in (
        "postgresql://postgres@127.0.0.1:1/postgres",
        "mysql://root@127.0.0.1:1/turnlane",
        f"sqlite:///{tmp_path / 'missing.db'}",
    ):
        with EventDatabase(url).make_output() as output:
            with pytest.raises(RetryLater):
                output.check()
            with pytest.raises(RetryLater):
                send(output, make_block(make_values(0, 1)))


def test_a_wrong_password_is_retried(
    servers: dict[str, EventDatabase], monkeypatch: pytest.MonkeyPatch
) -> None:
    database = servers["mysql"]
    database.make_table()
    database.run("CREATE USER IF NOT EXISTS shop@localhost IDENTIFIED BY 'right'",
              "GRANT ALL ON turnlane.* TO shop@localhost")  # fmt: skip
    there = EventDatabase(database.url.replace("root@", "shop@"))
    monkeypatch.setenv("TURNLANE_TEST_PASSWORD", "wrong")
    with there.make_output(password_env="TURNLANE_TEST_PASSWORD") as output:
        with pytest.raises(RetryLater, match="Access denied") as caught:
            output.check()
        assert "wrong" not in str(caught.value)
        monkeypatch.setenv("TURNLANE_TEST_PASSWORD", "right")
        send(output, make_block(make_values(0, 1)))
    assert database.read_ids() == [0]


def test_a_write_waits_for_a_locked_row_and_then_gives_up(database: EventDatabase) -> None:
    database.run("INSERT INTO events (id, note) VALUES (1, 'there')")
    begin = {"sqlite": "BEGIN IMMEDIATE", "mysql": "BEGIN", "postgresql": "BEGIN"}[database.kind]
    with database.connect() as other, database.make_output(key=["id"], timeout="1s") as output:
        cursor = other.cursor()
        cursor.execute(begin)
        cursor.execute("UPDATE events SET note = 'locked' WHERE id = 1")
        with pytest.raises(RetryLater):
            send(output, make_block([b"new"], 1))
        cursor.execute("ROLLBACK")
        send(output, make_block([b"new"], 1))
    assert database.run("SELECT note FROM events") == [("new",)]


KILL = {
    # Wait until the backend has ended: one that only got the signal may still accept a statement.
    "postgresql": "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
    "WHERE application_name = 'turnlane'",
    "mysql": "SELECT id FROM information_schema.processlist WHERE db = 'turnlane' "
    "AND command = 'Sleep'",
}

LEFT = {
    "postgresql": "SELECT pid FROM pg_stat_activity WHERE application_name = 'turnlane'",
    "mysql": KILL["mysql"],
}


@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
def test_a_connection_closed_by_the_server_is_replaced(
    servers: dict[str, EventDatabase], kind: str
) -> None:
    database = servers[kind]
    database.make_table()
    with database.make_output() as output:
        send(output, make_block(make_values(0, 5)))
        for (found,) in database.run(KILL[kind]):
            if kind == "mysql":
                database.run(f"KILL {found}")
        wait_until(lambda: not database.run(LEFT[kind]), "the connection to be closed", 60.0)
        with output._writers.borrow() as writer:  # an open connection, old or new
            assert writer.is_open
        send(output, make_block(make_values(5, 10), 5))
    assert database.read_ids() == list(range(10))


@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
def test_a_connection_lost_in_a_transaction_leaves_no_rows(
    servers: dict[str, EventDatabase], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = servers[kind]
    database.make_table("id bigint, note varchar(20)")
    with database.make_output(exactly_once=True) as output:
        send(output, make_block(make_values(0, 1)))
        with output._writers.borrow() as writer:
            real = writer.insert

        def cut(rows: pa.RecordBatch) -> None:
            real(rows)
            if kind == "postgresql":
                database.run(KILL[kind])
            else:
                ((number,),) = writer.execute("SELECT connection_id()", [])
                database.run(f"KILL {number}")

        with monkeypatch.context() as patched:
            patched.setattr(writer, "insert", cut)
            with pytest.raises(RetryLater):
                send(output, make_block(make_values(1, 9), 1))
        send(output, make_block(make_values(0, 9)))
    assert database.read_ids() == list(range(9))


def test_bytes_that_are_not_utf8_do_not_fit_a_text_column(database: EventDatabase) -> None:
    with database.make_output() as output, pytest.raises(Never):
        send(output, make_block([b"\xff\xfe"]))


def test_the_last_of_two_equal_headers_is_used() -> None:
    """Templates and readers of the event use the last one, too."""
    kind = block_of([]).schema.field("headers").type
    twice: Any = pa.array([[("team", "a"), ("team", "b")]], kind)
    found = build_rows(
        make_block([b"x"], headers=twice), {"team": "headers.team"}, with_positions=False
    )
    assert found.columns.column("team").to_pylist() == ["b"]


def test_bytes_in_lists_become_base64() -> None:
    parts: Any = pa.array([[b"\xff\xfe", None], None], pa.list_(pa.binary()))
    found = build_rows(
        make_block([b"x", b"y"], parts=parts), {"parts": "parts"}, with_positions=False
    )
    assert found.columns.column("parts").to_pylist() == ['["//4=", null]', None]


def test_invalid_json_raises_never() -> None:
    output = EventDatabase("sqlite:///a.db").make_output(
        columns={"id": "offset", "note": "value.a"}
    )
    with pytest.raises(Never, match="not JSON"):
        output.prepare(make_block([b"{}", b"{"]))


def test_errors_of_postgresql_say_whether_the_events_are_the_cause() -> None:
    dialect = load_dialect("postgresql://nowhere/none")

    def meaning(state: str) -> Exception | None:
        return get_delivery_error(dialect, psycopg.errors.lookup(state)("x"))

    for state in ("08006", "40001", "40P01", "53300", "55P03", "57014", "42P01", "42501", "25006"):
        assert isinstance(meaning(state), RetryLater), state
    assert isinstance(get_delivery_error(dialect, psycopg.OperationalError("x")), RetryLater)
    for state in ("22001", "22P02", "23505", "23502", "44000"):
        assert isinstance(meaning(state), Never), state
    assert meaning("P0001") is None, "an error of a trigger is tried a limited number of times"


def test_errors_of_mysql_say_whether_the_events_are_the_cause() -> None:
    dialect = load_dialect("mysql://nobody@nowhere/none")

    def meaning(*arguments: object) -> Exception | None:
        return get_delivery_error(dialect, pymysql.err.OperationalError(*arguments))

    for number in (1205, 1213, 2013, 2006, 1146, 1045, 1142, 1040, 1836):
        assert isinstance(meaning(number, "x"), RetryLater), number
    for number in (1062, 1048, 1406, 1264, 1366, 1452, 4025):
        assert isinstance(meaning(number, "x"), Never), number
    assert isinstance(meaning("nan can not be used with MySQL"), Never)
    assert isinstance(meaning(1153, "x"), PayloadTooLarge)
    assert meaning(1644, "x") is None, "an error of a trigger is tried a limited number of times"


def test_errors_of_sqlite_say_whether_the_events_are_the_cause(tmp_path: Path) -> None:
    file = tmp_path / "a.db"
    dialect = load_dialect(f"sqlite:///{file}")
    with closing(dialect.connect()) as connection:
        connection.execute("CREATE TABLE t (id INTEGER UNIQUE NOT NULL)")
        connection.execute("INSERT INTO t VALUES (1)")
        for statement, values, expected in (
            ("INSERT INTO t VALUES (1)", (), ErrorKind.DUPLICATE_KEY),
            ("INSERT INTO t VALUES (NULL)", (), ErrorKind.REFUSED_DATA),
            ("INSERT INTO t VALUES (?)", (2**64,), ErrorKind.REFUSED_DATA),
            ("SELECT * FROM missing", (), ErrorKind.NEEDS_OPERATOR),
            ("SELECT ?", (), ErrorKind.UNKNOWN),
        ):
            with pytest.raises(Exception) as caught:
                connection.execute(statement, values)
            assert dialect.classify_error(caught.value) is expected, statement


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"url": "oracle://a/b"}, "must be a URL such as postgresql://"),
        ({"url": "postgresql://user:secret@host/db"}, "contains a password"),
        ({"url": "sqlite://file.db"}, "sqlite:///file.db"),
        ({"table": 'a"; DROP TABLE b'}, "pattern"),
        ({"columns": {}}, "at least 1"),
        ({"key": ["other"]}, "other is not one of the columns"),
        ({"delivered_as": "x"}, "needs exactly_once: true"),
        ({"tls": {"verify": False}}, "needs a database server"),
    ],
)
def test_contradictory_settings_are_refused(knobs: dict[str, Any], message: str) -> None:
    given_: dict[str, Any] = {
        "type": "sql",
        "url": "sqlite:///a.db",
        "table": "events",
        "columns": {"id": "offset"},
    }
    with pytest.raises(ValidationError, match=message):
        SqlSettings.model_validate({**given_, **knobs})
