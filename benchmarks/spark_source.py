"""``format("turnlane")`` as a stream, beside Spark's own file streams over the same events.

Each stream reads all there is, the same columns, in batches of equal size, keeps the half that a
filter lets through, and gives it to Spark's sink that throws rows away. A batch's time is what
Spark says of it; the first batch of a query, which starts everything, is left out. Beside them runs
a source that only hands over what it has: Spark's limit for all that are written in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from benchmarks.effort import Effort
from benchmarks.lines import log_lines
from benchmarks.measure import Series, alternate
from benchmarks.node_flight import BLOCK, flight_speed
from benchmarks.outcome import Cell, Figure, Outcome, Table, figure
from benchmarks.piped import MASTER
from benchmarks.served import Served, served
from benchmarks.spark_bare import NAME, BareSource
from turnlane.events import Block, block_of

OURS, PARQUET, JSON = "turnlane", "Parquet files", "JSON lines"
SMALL_PARQUET = "small Parquet files"
BARE = "a source in Python that reads nothing"
FILES = 4
"""Files of a batch: two for each core."""
SMALL = 20
"""How many small files are made of one."""
SCHEMA = "value string, timestamp timestamp, severity tinyint, source string"
FILTER = "severity < 4"
HOSTS = 200
START = 1_786_700_000_000_000
"""Microseconds since the epoch."""

Open = Callable[[], DataFrame]


def written_parquet(place: Path, blocks: Sequence[Block]) -> None:
    """A file for each block."""
    place.mkdir()
    for number, block in enumerate(blocks):
        pq.write_table(pa.table(_columns(block)), place / f"{number:05}.parquet")


def written_json(spark: SparkSession, parquet: Path, place: Path) -> None:
    """The same files as JSON, written by Spark."""
    for path in sorted(parquet.iterdir()):
        made = spark.read.parquet(str(path)).coalesce(1)
        made.write.json(str(place / path.stem))


def _columns(block: Block) -> dict[str, pa.Array]:  # type: ignore[type-arg]
    names = [part.split()[0] for part in SCHEMA.split(", ")]
    columns = {name: block.column(name) for name in names}
    return {**columns, "value": columns["value"].cast(pa.string())}


def opened_queue(spark: SparkSession, node: Served, batch: int) -> DataFrame:
    """The queue, which keeps its events."""
    options = {
        "endpoint": node.flight,
        "queue": "main",
        "consume": "false",
        "maxOffsetsPerTrigger": str(batch),
    }
    columns = SCHEMA.replace("value string", "value binary")
    return spark.readStream.format("turnlane").schema(columns).options(**options).load()


def opened_bare(spark: SparkSession, events: int, batch: int) -> DataFrame:
    """As much, of nowhere."""
    options = {"events": str(events), "batch": str(batch)}
    columns = SCHEMA.replace("value string", "value binary")
    return spark.readStream.format(NAME).schema(columns).options(**options).load()


def opened_files(spark: SparkSession, form: str, path: str, files: int = FILES) -> DataFrame:
    """A folder, so many files at a time."""
    reader = spark.readStream.format(form).schema(SCHEMA).option("maxFilesPerTrigger", files)
    return reader.load(path)


def rate(open_stream: Open, place: Path) -> float:
    """Events a second of all batches but the first."""
    writer = open_stream().where(FILTER).writeStream.format("noop")
    query = writer.trigger(availableNow=True).option("checkpointLocation", str(place)).start()
    query.awaitTermination()
    batches = [each for each in query.recentProgress if each.numInputRows][1:]
    seconds = sum(each.durationMs["triggerExecution"] for each in batches) / 1000
    return sum(each.numInputRows for each in batches) / seconds


def measured(effort: Effort, open_stream: Open) -> float:
    """One turn, with a checkpoint of its own."""
    with effort.place() as place:
        return rate(open_stream, place / "checkpoint")


def events(effort: Effort) -> list[Block]:
    """A block for each file."""
    batch = effort.events(800_000, 1_600_000)
    count = batch * effort.unless_trial(4 if effort.quick else 6, 2)
    lines = log_lines(batch // FILES, 100)
    block = from_hosts(lines)
    return [block] * (count // len(lines))


def from_hosts(lines: list[bytes]) -> Block:
    """Lines as they come from some hosts: each at a time of its own."""
    numbers = range(len(lines))
    return block_of(
        lines,
        timestamps=[START + 137 * number for number in numbers],
        severities=[number % 8 for number in numbers],
        sources=[f"10.0.{number * 7 % HOSTS}.1" for number in numbers],
    )


def run(effort: Effort, spark: SparkSession) -> Outcome:
    """All of them in turns, after a turn of each that does not count."""
    blocks = events(effort)
    batch = blocks[0].num_rows * FILES
    with effort.place() as place, served(place, {"main": {}}) as node:
        parquet, small, json = place / "parquet", place / "small", place / "json"
        flight_speed(node, _pieces(blocks, BLOCK))
        written_parquet(parquet, blocks)
        written_parquet(small, _pieces(blocks, -(-blocks[0].num_rows // SMALL)))
        written_json(spark, parquet, json)
        spark.dataSource.register(BareSource)
        streams: dict[str, Open] = {
            OURS: partial(opened_queue, spark, node, batch),
            PARQUET: partial(opened_files, spark, "parquet", str(parquet)),
            SMALL_PARQUET: partial(opened_files, spark, "parquet", str(small), FILES * SMALL),
            JSON: partial(opened_files, spark, "json", str(json / "*")),
            BARE: partial(opened_bare, spark, batch * len(blocks) // FILES, batch),
        }
        turns = {name: partial(measured, effort, stream) for name, stream in streams.items()}
        if not effort.is_trial:
            alternate(turns, 1)
        found = {name: Series(rates) for name, rates in alternate(turns, effort.rounds).items()}
    return Outcome(_figures(found, batch), [_table(found, batch)])


def _pieces(blocks: Sequence[Block], most: int) -> list[Block]:
    """The same events in blocks of at most so many."""
    return [block.slice(at, most) for block in blocks for at in range(0, block.num_rows, most)]


def _figures(found: dict[str, Series], batch: int) -> list[Figure]:
    how = (
        f"100-byte events, batches of {batch:,}, filter, noop, Spark on {MASTER}: "
        '`format("turnlane")` from a node\'s disk queue / '
    )
    each = batch // FILES
    rivals = [
        ("parquet", PARQUET, f"{PARQUET} with {each:,} events each", 2),
        ("small_parquet", SMALL_PARQUET, f"{PARQUET} with {each // SMALL:,} events each", None),
        ("json", JSON, JSON, 3),
    ]
    figures = [
        figure(
            f"source_vs_{short}",
            found[OURS].over(found[name]),
            f"{how}Spark's own stream of {what}",
            unit="×",
            at_least=least,
        )
        for short, name, what, least in rivals
    ]
    limit = figure("source_vs_bare", found[OURS].over(found[BARE]), f"{how}{BARE}", unit="×")
    return [*figures, limit]


def _table(found: dict[str, Series], batch: int) -> Table:
    return Table(
        "Streams into Spark",
        "events/s",
        ("100 B",),
        {name: [Cell.of(series)] for name, series in found.items()},
        f"Batches of {batch:,} events, filtered, to Spark's sink `noop`. A Parquet file has "
        f"{batch // FILES:,} events, a small one {batch // FILES // SMALL:,}.",
    )
