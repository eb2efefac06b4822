"""From queue table to queue table: an event fires, goes through Spark, and is scheduled again."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark.program import PATIENCE, Program
from turnlane.table import Database, connect

pytestmark = pytest.mark.timeout(600)

CONFIG = """\
node:
  data: data
  flight: {listen: "127.0.0.1:0"}
  http: {listen: "127.0.0.1:0"}
inputs:
  - {type: table, queue: main, url: "sqlite:///shop.db", table: orders}
parse:
  format: json
  columns: {customer: "customer::bigint", item: item, paid: "paid::int"}
actions:
  - name: reminders
    filter: paid = 0
    output:
      type: table
      url: sqlite:///shop.db
      table: reminders
      columns: {customer: customer, subject: item}
spark:
  master: local[2]
  conf: {spark.sql.shuffle.partitions: "1", spark.ui.enabled: "false"}
"""


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with connect(f"sqlite:///{tmp_path}/shop.db") as found:
        found.sql("CREATE QUEUE orders (customer BIGINT, item TEXT, paid INT) SHARD BY (customer)")
        found.sql("CREATE QUEUE reminders (customer BIGINT, subject TEXT) SHARD BY (customer)")
        yield found


def order(database: Database, first: int, end: int) -> None:
    """One transaction, as a shop would have it."""
    with (
        contextlib.closing(database.connect()) as connection,
        database.dialect.transaction(connection),
    ):
        rows = [{"customer": n, "item": f"item {n}", "paid": n % 2} for n in range(first, end)]
        database.queue("orders").enqueue_many(connection, rows)


def test_fired_order_becomes_a_reminder(database: Database, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    order(database, 0, 20)
    with contextlib.closing(Program(tmp_path, "run", "c.yaml")) as program:
        program.wait_for("lanes")
        seen: dict[int, str] = {}
        with database.queue("reminders").receive() as receiver:
            for expected in (10, 20):
                while len(seen) < expected:
                    events = receiver.take(timeout=PATIENCE)
                    assert events, program.errors
                    for event in events:
                        assert event["customer"] not in seen
                        seen[event["customer"]] = event["subject"]
                    receiver.ack(events)
                    assert receiver.flush(PATIENCE)
                if expected == 10:
                    order(database, 20, 40)
        program.process.send_signal(signal.SIGTERM)
        assert program.ended() == 0, program.errors
    assert seen == {n: f"item {n}" for n in range(0, 40, 2)}
    for name in ("orders", "reminders"):
        assert not any(database.queue(name).counts().values())
