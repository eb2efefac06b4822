"""Does a queue table get every event once, at the time that the event says?"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from tests.databases import mariadb_server, postgres_server
from tests.outputs.blocks import make_block, make_values
from turnlane.errors import Never, RetryLater
from turnlane.events import Block
from turnlane.outputs.table import TableOutput, TableOutputSettings
from turnlane.table import Database, TableQueue, connect
from turnlane.table.queue import EventSelection
from turnlane.table.rows import EventInserter
from turnlane.table.sharded import connect_shards

COLUMNS = "customer BIGINT, note VARCHAR(20) NOT NULL, raw BLOB, seen TIMESTAMP"
PLAIN = {"note": "value"}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    file = tmp_path_factory.mktemp("sqlite") / "queue.db"
    with postgres_server() as postgres, mariadb_server() as mariadb:
        yield {"postgres": postgres, "mariadb": mariadb, "sqlite": f"sqlite:///{file}"}


@dataclass
class Shop:
    """A database with the queue ``jobs``."""

    url: str
    database: Database
    opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def queue(self) -> TableQueue:
        return self.database.queue("jobs")

    def output(self, **knobs: Any) -> TableOutput:
        given = {"type": "table", "url": self.url, "table": "jobs", "columns": PLAIN, **knobs}
        return self.opened.enter_context(TableOutput(TableOutputSettings.model_validate(given)))

    def rows(self) -> list[dict[str, Any]]:
        return sorted(
            self.queue.scan.read_events(EventSelection()), key=lambda row: row["event_id"]
        )

    def notes(self) -> list[str]:
        return [row["note"] for row in self.rows()]

    def now(self) -> int:
        """Return the time of the database."""
        with contextlib.closing(self.database.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(f"SELECT {self.database.dialect.now}")
            found: int = cursor.fetchone()[0]
            return found

    def empty(self) -> None:
        """Delete all rows, as if all events had fired and were acked."""
        with contextlib.closing(self.database.connect()) as connection:
            connection.cursor().execute("DELETE FROM jobs")


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def shop(request: pytest.FixtureRequest, urls: dict[str, str]) -> Iterator[Shop]:
    url = urls[request.param]
    with connect(url) as database:
        database.sql(f"CREATE QUEUE jobs ({COLUMNS}) SHARD BY (customer)")
        found = Shop(url, database)
        with found.opened:
            yield found
        database.sql("DROP QUEUE jobs")


def send(output: TableOutput, block: Block) -> None:
    output.send(output.prepare(block))


def test_columns_become_a_row_that_fires_on_time(shop: Shop) -> None:
    values = [
        json.dumps({"to": 7, "at": "2099-01-01T12:00:00.000001Z", "raw": "ü"}).encode(),
        b'{"to": null}',
    ]
    columns = {
        "customer": "value.to",
        "note": "key",
        "raw": "value.raw",
        "seen": "timestamp",
        "fire_at": "value.at",
        "priority": "urgency",
        "event_group": "headers.team",
    }
    headers = pa.array([[("team", "a")], None], pa.map_(pa.string(), pa.string()))
    keys, urgency = pa.array(["one", "two"]), pa.array([3, None], pa.int64())
    before = time.time_ns()
    output = shop.output(columns=columns)
    output.check()
    send(output, make_block(values, 10, key=keys, headers=headers, urgency=urgency))
    one, two = shop.rows()
    assert (one["customer"], one["note"], bytes(one["raw"])) == (7, "one", "ü".encode())
    assert one["fire_at"] == 4_070_952_000_000_001_000
    assert (one["priority"], one["event_group"], one["state"]) == (3, "a", "to_be_fired")
    assert one["event_name"].startswith("orders/0/10-2026-11-18T11:06:40")
    seen = one["seen"] if isinstance(one["seen"], datetime) else datetime.fromisoformat(one["seen"])
    moment = seen.replace(tzinfo=UTC) if seen.tzinfo is None else seen
    assert moment == datetime(2026, 11, 18, 11, 6, 40, 123456, tzinfo=UTC)
    assert (two["customer"], two["raw"], two["priority"]) == (None, None, 0)
    assert abs(two["fire_at"] - before) < 600 * 10**9


def test_repeated_event_is_not_scheduled_again(shop: Shop) -> None:
    output = shop.output()
    send(output, make_block(make_values(0, 3)))
    send(output, make_block(make_values(0, 5)))  # as after a lost response
    assert shop.notes() == [f"event {n}" for n in range(5)]
    named = shop.output(columns={"note": "value", "event_name": "key"})
    send(named, make_block([b"a", b"b", b"c"], 100, key=pa.array(["x", "x", None])))
    send(named, make_block([b"d", b"e"], 200, key=pa.array(["x", "y"])))
    assert shop.notes()[5:] == ["a", "c", "e"]


def test_event_that_has_fired_is_not_scheduled_again(shop: Shop) -> None:
    output = shop.output(exactly_once=True, delivered_as=f"test {time.time_ns()}")
    send(output, make_block(make_values(0, 3)))
    shop.empty()
    send(output, make_block(make_values(2, 5), 2))
    send(output, make_block(make_values(0, 3), queue="another"))
    notes = [f"event {n}" for n in (3, 4, 0, 1, 2)]
    assert shop.notes() == notes


def test_aborted_write_neither_schedules_nor_records(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = shop.output(exactly_once=True, delivered_as=f"test {time.time_ns()}")
    insert = EventInserter.enqueue_many

    def cut_off(self: EventInserter, *given: Any) -> int:
        insert(self, *given)
        raise OSError("the connection is gone")

    with monkeypatch.context() as broken:
        broken.setattr(EventInserter, "enqueue_many", cut_off)
        with pytest.raises(RetryLater, match="the connection is gone"):
            send(output, make_block(make_values(0, 3)))
    assert shop.notes() == []
    send(output, make_block(make_values(0, 3)))
    assert shop.notes() == ["event 0", "event 1", "event 2"]


def test_delay_counts_from_fire_at_or_from_now(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the database counts: the clock of the node is hours ahead."""
    columns = {"note": "value", "fire_at": "at"}
    output = shop.output(columns=columns, delay="1h")
    at = pa.array([10**18, None], pa.int64())
    before = shop.now()
    ahead = time.time_ns() + 9 * 3600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: ahead)
    send(output, make_block(make_values(0, 2), at=at))
    send(shop.output(delay="1h"), make_block(make_values(2, 3), 2))
    first, *others = [row["fire_at"] for row in shop.rows()]
    assert first == 10**18 + 3600 * 10**9
    assert all(before <= each - 3600 * 10**9 <= shop.now() for each in others)


def test_bad_event_and_missing_table_raise_different_errors(shop: Shop) -> None:
    output = shop.output()
    for bad in (b"much too long for that column", b"\xff"):
        if bad[0] != 0xFF and shop.database.dialect.name == "sqlite":
            continue  # SQLite does not limit the length
        with pytest.raises(Never):
            send(output, make_block([b"good", bad]))
    with pytest.raises(Never):
        send(shop.output(columns={"note": "value.a"}), make_block([b'{"b": 1}']))
    assert shop.notes() == []
    send(output, make_block([b"good"]))
    with pytest.raises(RetryLater, match="takes no column 'nott'"):
        shop.output(columns={"nott": "value"}).check()
    with pytest.raises(RetryLater, match="column 'note' needs a value"):
        shop.output(columns={"raw": "value"}).check()
    with pytest.raises(RetryLater, match="no queue 'jibs'"):
        shop.output(table="jibs").check()
    with pytest.raises(RetryLater, match="there is no password"):
        shop.output(password_env="TURNLANE_NO_SUCH_VARIABLE").check()


def test_unavailable_server_is_retryable(tmp_path: Path) -> None:
    settings = {"type": "table", "table": "jobs", "columns": PLAIN}
    for url in ("postgresql://u@127.0.0.1:1/db", "mysql://u@127.0.0.1:1/db"):
        given = TableOutputSettings.model_validate({**settings, "url": url})
        with TableOutput(given) as output, pytest.raises(RetryLater):
            send(output, make_block([b"a"]))
    for wrong in (
        {"url": "oracle://x"},
        {"url": "postgresql://u:secret@h/db"},
        {},
        {"shards": [{"url": f"sqlite:///{tmp_path}/a.db", "range": "-80"}]},
    ):
        with pytest.raises(ValidationError):
            TableOutputSettings.model_validate({**settings, **wrong})


def test_each_shard_gets_its_own_events_once(tmp_path: Path) -> None:
    shards = [
        {"url": f"sqlite:///{tmp_path}/{name}.db", "range": part}
        for name, part in (("a", "-80"), ("b", "80-"))
    ]
    settings = TableOutputSettings.model_validate(
        {
            "type": "table",
            "shards": shards,
            "table": "jobs",
            "columns": {"customer": "value.to"},
            "exactly_once": True,
        }
    )
    values = [b'{"to": %d}' % n for n in range(30)]
    with connect_shards((each["url"], each["range"]) for each in shards) as databases:
        databases.sql("CREATE QUEUE jobs (customer BIGINT) SHARD BY (customer)")
        queue = databases.queue("jobs")
        with TableOutput(settings) as output:
            send(output, make_block(values[:20]))
            send(output, make_block(values))
        customers = []
        for shard in queue.map.shards:
            rows = list(queue.queue(shard).scan.read_events(EventSelection()))
            assert all(shard.key_range.contains(row["keyspace_id"]) for row in rows)
            customers += [row["customer"] for row in rows]
        assert sorted(customers) == list(range(30))
        for shard in queue.map.shards:
            queue.queue(shard).cancel(queue.queue(shard).scan.read_ids(EventSelection()))
        with TableOutput(settings) as output:
            send(output, make_block(values))  # all of them are recorded
            queue.reshard([(f"sqlite:///{tmp_path}/c.db", "-")])
            with pytest.raises(RetryLater, match="resharded"):
                send(output, make_block(values))
            send(output, make_block(values))
            send(output, make_block([b'{"to": 99}'], 30))
        (merged,) = queue.map.shards
        scanned = queue.queue(merged).scan.read_events(EventSelection())
        assert [row["customer"] for row in scanned] == [99]
