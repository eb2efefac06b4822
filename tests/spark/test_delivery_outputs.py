"""Lanes on real Spark deliver to a database, a queue and a syslog receiver at the same time."""

from __future__ import annotations

import socketserver
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from tests.contract.harness import wait_until
from tests.spark.nodes import Served, numbers, serving
from turnlane.delivery.settings import DeliverySettings, Ordering
from turnlane.errors import ConfigError
from turnlane.formats.parse_settings import ParseSettings
from turnlane.outputs.queue import QueueOutputSettings
from turnlane.outputs.sql import SqlSettings
from turnlane.outputs.syslog import SyslogOutputSettings
from turnlane.pipeline.settings import ActionSettings, PipelineSettings
from turnlane.queues.settings import QueueSettings
from turnlane.spark.pipeline import Pipeline

PATIENCE = 180.0
pytestmark = pytest.mark.timeout(600)
ACTIONS = ("rows", "copies", "lines")
VALUES = numbers(0, 500)


def duplicate_rows(events: DataFrame) -> DataFrame:
    """Make two rows of each event."""
    return events.withColumn("side", F.explode(F.array(F.lit("left"), F.lit("right"))))


def repartition_rows(events: DataFrame) -> DataFrame:
    return duplicate_rows(events).repartition(4)


class Lines(socketserver.StreamRequestHandler):
    """Collects the lines of one connection."""

    def handle(self) -> None:
        for line in self.rfile:
            self.server.lines.append(line.strip())  # type: ignore[attr-defined]


@contextmanager
def receiver() -> Iterator[tuple[str, list[bytes]]]:
    """A syslog server, and the lines that it has received."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Lines) as server:
        server.daemon_threads = True
        lines: list[bytes] = []
        server.lines = lines  # type: ignore[attr-defined]
        listening = threading.Thread(target=server.serve_forever)
        listening.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}", lines
        finally:
            server.shutdown()
            listening.join()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    names = ["main", "elsewhere", *ACTIONS, *(f"{name}.dead" for name in ACTIONS)]
    with serving(tmp_path / "data", {name: {} for name in names}) as found:
        yield found


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "rows.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE rows (id TEXT, number INTEGER, side TEXT)")
    return path


def action(name: str, output: Any, **more: Any) -> ActionSettings:
    queue = QueueSettings.of(kind="disk", name=name, path=Path(name))
    return ActionSettings(name=name, queue=queue, output=output, **more)


def test_each_output_gets_all_events(
    spark: SparkSession, node: Served, database: Path, tmp_path: Path
) -> None:
    columns = {"id": "event_id", "number": "value", "side": "side"}
    url = f"sqlite:///{database}"
    sql = SqlSettings(type="sql", url=url, table="rows", columns=columns, exactly_once=True)
    strict = DeliverySettings(ordering=Ordering.STRICT)
    copy = QueueOutputSettings(
        type="queue", endpoint=node.url, queue="elsewhere", producer="copies"
    )
    with receiver() as (address, lines):
        settings = PipelineSettings(
            parse=ParseSettings.model_validate("none"),
            actions=(
                action("rows", sql, transform=f"{__name__}:duplicate_rows"),
                action("copies", copy, delivery=strict),
                action("lines", make_syslog_action(address)),
            ),
        )
        pipeline = Pipeline(settings, {"endpoint": node.url}, spark, tmp_path / "checkpoints")
        node.publish("main", VALUES)
        pipeline.start()
        try:
            for name in ("main", *ACTIONS):
                queue = node.queue(name)
                wait_until(lambda queue=queue: queue.low == len(VALUES), name, PATIENCE)  # type: ignore[misc]
        finally:
            pipeline.stop()
        wait_until(lambda: set(lines) == set(VALUES), "all lines", PATIENCE)
    assert node.values("elsewhere") == VALUES, "in order, and each once"
    with closing(sqlite3.connect(database)) as connection:
        found = connection.execute("SELECT number, side, id FROM rows").fetchall()
    assert {(int(number), side) for number, side, _ in found} == {
        (number, side) for number in range(len(VALUES)) for side in ("left", "right")
    }
    assert len(found) == len({row[2] for row in found}) == 2 * len(VALUES), (
        "each row has its own id"
    )
    assert all((side == "right") == id_.endswith(".1") for _, side, id_ in found)
    for each in node.node.queues().values():
        assert each.stats().ledger.adds_up


@pytest.mark.parametrize("once", [True, False])
def test_repartitioning_transform_is_refused_for_exactly_once_outputs(
    spark: SparkSession, node: Served, database: Path, tmp_path: Path, *, once: bool
) -> None:
    sql = SqlSettings(
        type="sql",
        url=f"sqlite:///{database}",
        table="rows",
        columns={"number": "value"},
        exactly_once=once,
    )
    spread = action("rows", sql, transform=f"{__name__}:repartition_rows")
    settings = PipelineSettings(parse=ParseSettings(), actions=(spread,))
    pipeline = Pipeline(settings, {"endpoint": node.url}, spark, tmp_path / "checkpoints")
    if not once:
        pipeline.check()
        return
    with pytest.raises(ConfigError, match=r"actions\[0\].transform: moves rows to other tasks"):
        pipeline.check()


def make_syslog_action(address: str) -> SyslogOutputSettings:
    given = {"type": "syslog", "address": address, "protocol": "tcp", "format": "raw"}
    return SyslogOutputSettings.model_validate({**given, "framing": "newline"})
