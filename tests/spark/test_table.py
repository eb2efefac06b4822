"""``format("turnlane_table")`` reads a queue table as it is, and schedules each row once."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, In, InputPartition
from pyspark.sql.types import StructType

from tests.databases import postgres_server
from turnlane.errors import WriterAhead
from turnlane.spark.table_source import (
    FilteringTableReader,
    TableScanPart,
    TableStreamWriter,
    TableWriteOptions,
    TurnlaneTableSource,
)
from turnlane.table import Database, TableQueue, connect
from turnlane.table.queue import EventSelection
from turnlane.table.sharded import connect_shards

COLUMNS = (
    "customer BIGINT, subject VARCHAR(100), paid BOOLEAN, price NUMERIC(10, 2), share DOUBLE, "
    'body BLOB, day DATE, seen TIMESTAMP, data JSON, "odd %s {now} ""name""" INT'
)
ODD = 'odd %s {now} "name"'
NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
LATER = datetime(2099, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    place = tmp_path_factory.mktemp("sqlite")
    with postgres_server() as postgres:
        yield {"sqlite": f"sqlite:///{place}/queue.db", "postgres": postgres}


@dataclass
class Shop:
    """A database with the queue ``mails``."""

    url: str
    database: Database

    @property
    def queue(self) -> TableQueue:
        return self.database.queue("mails")

    def execute(self, statement: str) -> list[Any]:
        with contextlib.closing(self.database.connect()) as connection:
            cursor = connection.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []

    def enqueue(self, rows: list[dict[str, Any]]) -> None:
        with (
            contextlib.closing(self.database.connect()) as connection,
            self.database.dialect.transaction(connection),
        ):
            self.queue.enqueue_many(connection, rows)

    def save(self, frame: DataFrame) -> None:
        writing = frame.write.format("turnlane_table").option("url", self.url)
        writing.mode("append").save("mails")

    def subjects(self) -> list[str]:
        return sorted(row["subject"] for row in self.queue.peek(limit=1000))

    def staged(self) -> int:
        found: int = self.execute("SELECT COUNT(*) FROM turnlane_stage_mails")[0][0]
        return found


@pytest.fixture(params=["sqlite", "postgres"])
def shop(request: pytest.FixtureRequest, urls: dict[str, str]) -> Iterator[Shop]:
    url = urls[request.param]
    with connect(url) as database:
        database.sql(f"CREATE QUEUE mails ({COLUMNS}) SHARD BY (customer)")
        yield Shop(url, database)
        database.sql("DROP QUEUE mails")
        database.catalog.close()


def read(spark: SparkSession, url: str, **options: str) -> DataFrame:
    return spark.read.format("turnlane_table").options(url=url, **options).load("mails")


def test_rows_are_scheduled_and_read_back(spark: SparkSession, shop: Shop) -> None:
    day = date(2026, 11, 16)
    row = (7, "Zoë", True, Decimal("12.50"), 0.25, b"\x00\xff", day, NOON, '{"a": 1}')
    schema = create_queue_sql(
        "customer bigint, subject string, paid boolean, price decimal(10,2), share double, "
        "body binary, day date, seen timestamp, data string"
    ).add(ODD, "integer")
    times = create_queue_sql("fire_at timestamp, priority int, event_name string")
    rows = [(*row, 1, LATER, 3, "first"), (8, *[None] * 9, None, None, None)]
    frame = spark.createDataFrame(rows, StructType([*schema, *times]))
    shop.save(frame)
    shop.save(frame)

    unnamed, again, named = (
        each.asDict() for each in read(spark, shop.url).orderBy("fire_at").collect()
    )
    assert (unnamed["customer"], again["customer"]) == (
        8,
        8,
    )  # The event with a name is scheduled once.
    assert abs(unnamed["fire_at"] - datetime.now()) < timedelta(minutes=10)  # noqa: DTZ005
    found = [named[name] for name in schema.names]
    found[5], found[7], found[8] = bytes(found[5]), to_utc(found[7]), json.loads(found[8])
    assert found == [*row[:7], NOON, {"a": 1}, 1]
    assert (to_utc(named["fire_at"]), named["priority"], named["event_name"]) == (LATER, 3, "first")
    assert (named["state"], named["attempts"], named["last_error"]) == ("to_be_fired", 0, None)
    assert {name: unnamed[name] for name in schema.names[1:]} == dict.fromkeys(schema.names[1:])


def create_queue_sql(text: str) -> StructType:
    found = StructType.fromDDL(text)
    assert isinstance(found, StructType)
    return found


def to_utc(naive: datetime) -> datetime:
    """Convert times: PySpark returns them in the local zone."""
    return naive.astimezone(UTC)


def test_partitions_and_filters_limit_the_rows(spark: SparkSession, shop: Shop) -> None:
    at = int(NOON.timestamp()) * 10**9
    shop.enqueue(
        [
            {"customer": n % 10, "subject": f"s{n}", "fire_at": at + n * 10**9 + 500}
            for n in range(100)
        ]
    )
    shop.execute("UPDATE mails SET state = 'dead' WHERE customer = 3")
    whole = read(spark, shop.url, numPartitions="4")
    assert whole.rdd.getNumPartitions() == 4
    assert whole.select("event_id").distinct().count() == whole.count() == 100
    assert {row.keyspace_id for row in whole.select("keyspace_id").collect()} == {
        row["keyspace_id"] for row in shop.queue.scan.read_events(EventSelection())
    }
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        some = read(spark, shop.url, pushFilters="true")
        # The table's fire times are half a microsecond after the times that Spark sees.
        early = some.where("state = 'dead' AND fire_at <= timestamp'2026-11-16 12:00:13'")
        assert sorted(row.subject for row in early.collect()) == ["s13", "s3"]
        later = some.where("customer IN (4, 5) AND fire_at > timestamp'2026-11-16 12:01:25'")
        assert sorted(row.subject for row in later.collect()) == ["s94", "s95"]
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_pushed_filters_are_applied_by_the_database(shop: Shop) -> None:
    shop.enqueue([{"customer": n, "subject": f"s{n}"} for n in range(10)])
    source = TurnlaneTableSource({"url": shop.url, "path": "mails", "pushFilters": "true"})
    reader = source.reader(source.schema())
    assert isinstance(reader, FilteringTableReader)
    filters = [
        In(("customer",), (1, 2, 3)),
        EqualTo(("customer",), 2),
        EqualTo(("state",), "to_be_fired"),
        GreaterThanOrEqual(("fire_at",), NOON - timedelta(days=3650)),
        EqualTo(("subject",), "unknown to the database"),
    ]
    assert list(reader.pushFilters(filters)) == filters
    (partition,) = reader.partitions()
    assert isinstance(partition.value, TableScanPart)
    (block,) = reader.read(partition)
    assert block.column("subject").to_pylist() == ["s2"]
    assert list(reader.read(InputPartition(None))) == []


def test_stream_schedules_each_batch_once(spark: SparkSession, shop: Shop, tmp_path: Path) -> None:
    place, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    place.mkdir()

    def run(name: str, count: int) -> None:
        lines = [json.dumps({"customer": n, "subject": f"{name}{n}"}) for n in range(count)]
        (place / f"{name}.json").write_text("\n".join(lines))
        frame = spark.readStream.schema("customer bigint, subject string").json(str(place))
        query = (
            frame.writeStream.format("turnlane_table")
            .option("url", shop.url)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start("mails")
        )
        query.awaitTermination()

    run("a", 20)
    # As after a kill between the sink's commit and Spark's: the batch is repeated.
    (checkpoint / "commits" / "0").unlink()
    with contextlib.suppress(FileNotFoundError):
        (checkpoint / "commits" / ".0.crc").unlink()
    run("b", 5)
    assert shop.subjects() == sorted([f"a{n}" for n in range(20)] + [f"b{n}" for n in range(5)])
    assert shop.staged() == 0


def writer(shop: Shop, name: str = "w") -> TableStreamWriter:
    options = {"url": shop.url, "table": "mails", "writerId": name}
    return TableStreamWriter(TableWriteOptions.from_spark(options))


def test_interrupted_batch_is_committed_once_or_not_at_all(shop: Shop) -> None:
    first = writer(shop)
    message = first.write(rows("a", "b"))
    writer(shop).write(rows("of a task that was killed"))
    assert shop.queue.counts()["to_be_fired"] == 0
    first.commit([message, None], 7)
    assert shop.subjects() == ["a", "b"]
    assert shop.staged() == 0

    again = writer(shop)  # The driver died before Spark's commit: all rows are repeated.
    again.commit([again.write(rows("a", "b"))], 7)
    other = writer(shop, "another")
    other.commit([other.write(rows("c"))], 7)
    following = writer(shop)
    following.commit([following.write(rows("d"))], 8)
    assert shop.subjects() == ["a", "b", "c", "d"]

    failed = writer(shop)
    failed.abort([failed.write(rows("e"))], 9)
    assert shop.staged() == 0
    assert shop.subjects() == ["a", "b", "c", "d"]


def test_new_checkpoint_at_the_same_path_writes_again(shop: Shop, tmp_path: Path) -> None:
    def commit(query: str, subject: str) -> None:
        (tmp_path / "metadata").write_text(json.dumps({"id": query}))
        options = {"url": shop.url, "table": "mails", "checkpointLocation": str(tmp_path)}
        found = TableStreamWriter(TableWriteOptions.from_spark(options))
        found.commit([found.write(rows(subject))], 0)

    commit("first", "a")
    commit("first", "it comes again")
    commit("second", "b")
    assert shop.subjects() == ["a", "b"]
    assert shop.staged() == 0


def test_writer_that_is_ahead_fails(shop: Shop) -> None:
    ahead = writer(shop, "ahead")
    ahead.commit([ahead.write(rows("a"))], 5)
    with pytest.raises(WriterAhead, match=r"'ahead' has written batch 5 .*batch 0"):
        ahead.commit([ahead.write(rows("b"))], 0)
    assert shop.subjects() == ["a"]


def rows(*names: str) -> Iterator[pa.RecordBatch]:
    return iter([pa.RecordBatch.from_pydict({"subject": list(names)})])


def test_errors_are_raised_before_anything_is_written(spark: SparkSession, shop: Shop) -> None:
    frame = spark.createDataFrame([("x",)], "customr string")
    with pytest.raises(AnalysisException, match="takes no column 'customr'"):
        shop.save(frame)
    with pytest.raises(AnalysisException, match='only "append" is supported'):
        frame.write.format("turnlane_table").option("url", shop.url).mode("overwrite").save("mails")
    with pytest.raises(AnalysisException, match="did you mean numPartitions"):
        read(spark, shop.url, numPartition="4")
    with pytest.raises(AnalysisException, match="no queue 'mials'"):
        spark.read.format("turnlane_table").option("url", shop.url).load("mials")


def test_shards_are_written_by_key_and_read_as_one_table(
    spark: SparkSession, tmp_path: Path
) -> None:
    shards = {"-80": f"sqlite:///{tmp_path}/a.db", "80-": f"sqlite:///{tmp_path}/b.db"}
    with connect_shards((url, key_range) for key_range, url in shards.items()) as databases:
        databases.sql("CREATE QUEUE mails (customer BIGINT, subject TEXT) SHARD BY (customer)")
        rows = [(n, f"s{n}") for n in range(40)]
        frame = spark.createDataFrame(rows, "customer bigint, subject string")
        options = {"shards": json.dumps(shards)}
        frame.write.format("turnlane_table").options(**options).mode("append").save("mails")
        queue = databases.queue("mails")
        shards_read = [queue.queue(shard).scan for shard in queue.map.shards]
        parts = [scan.read_events(EventSelection()) for scan in shards_read]
        ranges = [shard.key_range for shard in queue.map.shards]
        for key_range, part in zip(ranges, map(list, parts), strict=True):
            assert part
            assert all(key_range.contains(event["keyspace_id"]) for event in part)
        found = spark.read.format("turnlane_table").options(**options, numPartitions="2")
        assert found.load("mails").rdd.getNumPartitions() == 4
        assert sorted((row.customer, row.subject) for row in found.load("mails").collect()) == rows
