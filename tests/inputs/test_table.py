"""A queue table as an input: fired events enter the queue and are acked once they are safe."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.harness import wait_until
from tests.inputs.syslog_harness import await_events, read_events
from turnlane.errors import AckPending, QueueEmpty, StorageFailed, TurnlaneError
from turnlane.events import Block, Event
from turnlane.inputs import table
from turnlane.inputs.table import TableInput, TableInputSettings
from turnlane.node.node import Node
from turnlane.queues.api import Published
from turnlane.queues.producer import BufferedProducer
from turnlane.table import Database, TableQueue, connect
from turnlane.table.sharded import connect_shards

OPTIONS = "WITH (lease = 2s, backoff = 10ms, max_backoff = 50ms, max_attempts = 3)"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with connect(f"sqlite:///{tmp_path}/shop.db") as found:
        found.sql(
            "CREATE QUEUE mails (customer BIGINT, subject TEXT, body BLOB) "
            f"SHARD BY (customer) {OPTIONS}"
        )
        yield found


@contextlib.contextmanager
def running(host: Node, tmp_path: Path, **knobs: Any) -> Iterator[TableInput]:
    place = {} if "shards" in knobs else {"url": f"sqlite:///{tmp_path}/shop.db"}
    given = {"queue": "main", "table": "mails", **place, **knobs}
    with TableInput(TableInputSettings.model_validate(given), host) as source:
        source.start()
        yield source
        source.stop(20.0)


def enqueue(database: Database, count: int, **columns: Any) -> TableQueue:
    queue = database.queue("mails")
    with (
        contextlib.closing(database.connect()) as connection,
        database.dialect.transaction(connection),
    ):
        rows = [{"customer": n, "subject": f"s{n}", **columns} for n in range(count)]
        queue.enqueue_many(connection, rows)
    return queue


def is_empty(queue: TableQueue) -> bool:
    return not any(queue.counts().values())


def subjects(events: list[Event]) -> list[str]:
    return sorted(json.loads(event.value or b"")["subject"] for event in events)


def test_fired_events_are_published_and_acked(
    host: Node, database: Database, tmp_path: Path
) -> None:
    queue = enqueue(database, 3, body=b"\xff", fire_at=1_700_000_000_000_001_000)
    with running(host, tmp_path) as source:
        events = await_events(host.queue("main"), 3)
        wait_until(lambda: is_empty(queue))
        assert source.counters.events == 3
    (first, *_) = sorted(events, key=lambda event: event.key or "")
    assert json.loads(first.value or b"") == {"customer": 0, "subject": "s0", "body_base64": "/w=="}
    assert (first.key, first.source, first.timestamp) == ("0", "mails", 1_700_000_000_000_001)
    assert first.headers == {"event_id": "1"}


def test_settings_map_columns_to_key_value_and_headers(
    host: Node, database: Database, tmp_path: Path
) -> None:
    enqueue(database, 1, body=b"raw \xff", event_group="g", priority=4)
    headers = {"group": "event_group", "who": "customer", "urgency": "priority"}
    with running(host, tmp_path, key="subject", value="body", headers=headers):
        (event,) = await_events(host.queue("main"), 1)
    assert (event.key, event.value) == ("s0", b"raw \xff")
    assert event.headers == {"group": "g", "who": "0", "urgency": "4"}


def test_full_queue_counts_no_attempts(host: Node, database: Database, tmp_path: Path) -> None:
    queue = enqueue(database, 35)
    narrow = host.queue("narrow")  # room for 10
    got: list[bytes | None] = []
    with running(host, tmp_path, queue="narrow", ack="accepted"):
        while len(got) < 35:
            batch = narrow.get(10, timeout=60)
            got += [event.value for event in batch]
            batch.done()
        wait_until(lambda: is_empty(queue))
    assert len(set(got)) == len(got) == 35


def test_event_too_large_for_the_queue_is_dead_in_the_table(
    host: Node, database: Database, tmp_path: Path
) -> None:
    large = 1024
    host.create("tight", kind="disk", durability="always", max_event_bytes=large)
    enqueue(database, 1, body=b"x" * (large + 1))
    queue = enqueue(database, 4)
    with running(host, tmp_path, queue="tight") as source:
        assert subjects(await_events(host.queue("tight"), 4)) == ["s0", "s1", "s2", "s3"]
        wait_until(lambda: queue.counts()["dead"] == 1 and queue.counts()["fired"] == 0)
        assert source.counters.invalid == 3
    assert "can never fit" in queue.peek("dead")[0]["last_error"]


def test_crash_before_the_ack_fires_the_event_again(
    host: Node, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = enqueue(database, 2)
    with monkeypatch.context() as dying:
        dying.setattr(TableInput, "_ack", lambda *_: None)
        with running(host, tmp_path):
            await_events(host.queue("main"), 2)
    assert not is_empty(queue)
    with running(host, tmp_path):
        wait_until(lambda: is_empty(queue))
    ids = [(event.headers or {})["event_id"] for event in read_events(host.queue("main"))]
    assert sorted(ids) == ["1", "1", "2", "2"]


@pytest.mark.parametrize("fault", [StorageFailed, AckPending])
def test_failing_or_slow_disk_loses_no_event(
    host: Node,
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: type[TurnlaneError],
) -> None:
    queue = enqueue(database, 3)
    publish = BufferedProducer.publish_block
    faults = iter([fault("once")])

    def failing(self: BufferedProducer, block: Block, **options: Any) -> Published:
        error = next(faults, None)
        if isinstance(error, StorageFailed):
            raise error
        done = publish(self, block, **options)
        if error is not None:
            raise error
        return done

    monkeypatch.setattr(BufferedProducer, "publish_block", failing)
    with running(host, tmp_path):
        wait_until(lambda: is_empty(queue))
    assert subjects(await_events(host.queue("main"), 3)) == ["s0", "s1", "s2"]


def test_partly_published_rows_are_acked_only_where_published(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is full, and its events are not safe yet when the wait for room is over."""
    late = threading.Event()
    await_acks = TableInput._await_acks

    def noticed(self: TableInput) -> bool:
        late.set()
        return await_acks(self)

    monkeypatch.setattr(table, "ROOM_SECONDS", 0.2)
    monkeypatch.setattr(TableInput, "_await_acks", noticed)
    rows = enqueue(database, 20, body=b"x" * 1000)
    knobs = {"kind": "memory", "max_bytes": 10_000, "max_event_bytes": 5_000}
    with Node(tmp_path / "data", {"main": knobs}) as host, running(host, tmp_path):
        queue = host.queue("main")
        assert late.wait(20)
        got: set[str] = set()
        while not is_empty(rows) or queue.stats().ledger.pending:
            with contextlib.suppress(QueueEmpty), queue.get(timeout=0.05) as batch:
                got.update(subjects(list(batch)))
    assert got == {f"s{n}" for n in range(20)}


def test_missing_table_is_awaited(
    host: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(host, tmp_path), connect(f"sqlite:///{tmp_path}/shop.db") as database:
        wait_until(lambda: "there is no queue 'mails'" in caplog.text)
        database.sql(
            f"CREATE QUEUE mails (customer BIGINT, subject TEXT) SHARD BY (customer) {OPTIONS}"
        )
        enqueue(database, 1)
        await_events(host.queue("main"), 1)


def test_wrong_column_is_named_in_the_log(
    host: Node, database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = enqueue(database, 1)
    with running(host, tmp_path, key="costumer"):
        wait_until(lambda: "key: 'mails' has no column 'costumer'" in caplog.text)
    assert queue.counts()["to_be_fired"] == 1


def test_events_of_all_shards_are_published(host: Node, tmp_path: Path) -> None:
    shards = [
        {"url": f"sqlite:///{tmp_path}/{name}.db", "range": part}
        for name, part in (("a", "-80"), ("b", "80-"))
    ]
    with connect_shards((each["url"], each["range"]) for each in shards) as databases:
        databases.sql(f"CREATE QUEUE mails (customer BIGINT) SHARD BY (customer) {OPTIONS}")
        queue = databases.queue("mails")
        queue.put({"customer": n} for n in range(20))
        with running(host, tmp_path, shards=shards):
            found = await_events(host.queue("main"), 20)
            wait_until(lambda: not any(queue.counts().values()))
    assert {event.key for event in found} == {str(n) for n in range(20)}
