"""``format("turnlane")`` as a stream, compared with Spark's own file streams of the same events.

Each stream reads all events with the same columns in batches of equal size. A filter keeps half of
them, and Spark's sink ``noop`` drops them. Spark reports the time of each batch; the first batch of
a query, which starts processes, does not count. Another contestant is a source that yields rows
which it already has: no source in Python can be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from benchmarks.effort import Effort
from benchmarks.lines import make_log_lines
from benchmarks.measure import Series, alternate
from benchmarks.node_flight import BLOCK, measure_flight
from benchmarks.node_process import NodeProcess, run_node
from benchmarks.outcome import Cell, Figure, Outcome, Table, make_figure
from benchmarks.pipeline_process import MASTER
from benchmarks.spark_bare import NAME, BareSource
from turnlane.events import Block, block_of

OURS, PARQUET, JSON = "turnlane", "Parquet files", "JSON lines"
SMALL_PARQUET = "small Parquet files"
BARE = "a source in Python that reads nothing"
FILES = 4
"""The files of a batch: two for each core."""
SMALL = 20
"""The number of small files for one large file."""
SCHEMA = "value string, timestamp timestamp, severity tinyint, source string"
FILTER = "severity < 4"
HOSTS = 200
START = 1_786_700_000_000_000
"""Microseconds since the epoch."""

Open = Callable[[], DataFrame]


def write_parquet(place: Path, blocks: Sequence[Block]) -> None:
    """Write a file for each block."""
    place.mkdir()
    for number, block in enumerate(blocks):
        pq.write_table(pa.table(_select_columns(block)), place / f"{number:05}.parquet")


def write_json(spark: SparkSession, parquet: Path, place: Path) -> None:
    """Have Spark write the same files as JSON."""
    for path in sorted(parquet.iterdir()):
        made = spark.read.parquet(str(path)).coalesce(1)
        made.write.json(str(place / path.stem))


def _select_columns(block: Block) -> dict[str, pa.Array]:  # type: ignore[type-arg]
    names = [part.split()[0] for part in SCHEMA.split(", ")]
    columns = {name: block.column(name) for name in names}
    return {**columns, "value": columns["value"].cast(pa.string())}


def open_queue_stream(spark: SparkSession, node: NodeProcess, batch: int) -> DataFrame:
    """Open the queue without settling its events."""
    options = {
        "endpoint": node.flight,
        "queue": "main",
        "consume": "false",
        "maxOffsetsPerTrigger": str(batch),
    }
    columns = SCHEMA.replace("value string", "value binary")
    return spark.readStream.format("turnlane").schema(columns).options(**options).load()


def open_bare_stream(spark: SparkSession, events: int, batch: int) -> DataFrame:
    """Open the source that reads nothing."""
    options = {"events": str(events), "batch": str(batch)}
    columns = SCHEMA.replace("value string", "value binary")
    return spark.readStream.format(NAME).schema(columns).options(**options).load()


def open_file_stream(spark: SparkSession, form: str, path: str, files: int = FILES) -> DataFrame:
    """Open a folder; a batch has ``files`` files."""
    reader = spark.readStream.format(form).schema(SCHEMA).option("maxFilesPerTrigger", files)
    return reader.load(path)


def measure_rate(open_stream: Open, place: Path) -> float:
    """Return events per second of all batches except the first."""
    writer = open_stream().where(FILTER).writeStream.format("noop")
    query = writer.trigger(availableNow=True).option("checkpointLocation", str(place)).start()
    query.awaitTermination()
    batches = [each for each in query.recentProgress if each.numInputRows][1:]
    seconds = sum(each.durationMs["triggerExecution"] for each in batches) / 1000
    return sum(each.numInputRows for each in batches) / seconds


def measure_turn(effort: Effort, open_stream: Open) -> float:
    """Measure one turn with a new checkpoint."""
    with effort.place() as place:
        return measure_rate(open_stream, place / "checkpoint")


def events(effort: Effort) -> list[Block]:
    """Return a block for each file."""
    batch = effort.events(800_000, 1_600_000)
    count = batch * effort.choose(4 if effort.quick else 6, 2)
    lines = make_log_lines(batch // FILES, 100)
    block = make_block_from_hosts(lines)
    return [block] * (count // len(lines))


def make_block_from_hosts(lines: list[bytes]) -> Block:
    """Make a block of lines from several hosts, each with its own time."""
    numbers = range(len(lines))
    return block_of(
        lines,
        timestamps=[START + 137 * number for number in numbers],
        severities=[number % 8 for number in numbers],
        sources=[f"10.0.{number * 7 % HOSTS}.1" for number in numbers],
    )


def run(effort: Effort, spark: SparkSession) -> Outcome:
    """Measure all streams in turns, after a turn of each that does not count."""
    blocks = events(effort)
    batch = blocks[0].num_rows * FILES
    with effort.place() as place, run_node(place, {"main": {}}) as node:
        parquet, small, json = place / "parquet", place / "small", place / "json"
        measure_flight(node, _split_blocks(blocks, BLOCK))
        write_parquet(parquet, blocks)
        write_parquet(small, _split_blocks(blocks, -(-blocks[0].num_rows // SMALL)))
        write_json(spark, parquet, json)
        spark.dataSource.register(BareSource)
        streams: dict[str, Open] = {
            OURS: partial(open_queue_stream, spark, node, batch),
            PARQUET: partial(open_file_stream, spark, "parquet", str(parquet)),
            SMALL_PARQUET: partial(open_file_stream, spark, "parquet", str(small), FILES * SMALL),
            JSON: partial(open_file_stream, spark, "json", str(json / "*")),
            BARE: partial(open_bare_stream, spark, batch * len(blocks) // FILES, batch),
        }
        turns = {name: partial(measure_turn, effort, stream) for name, stream in streams.items()}
        if not effort.is_trial:
            alternate(turns, 1)
        found = {name: Series(rates) for name, rates in alternate(turns, effort.rounds).items()}
    return Outcome(_make_figures(found, batch), [_make_table(found, batch)])


def _split_blocks(blocks: Sequence[Block], most: int) -> list[Block]:
    """Split events into blocks of at most ``most`` events."""
    return [block.slice(at, most) for block in blocks for at in range(0, block.num_rows, most)]


def _make_figures(found: dict[str, Series], batch: int) -> list[Figure]:
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
        make_figure(
            f"source_vs_{short}",
            found[OURS].over(found[name]),
            f"{how}Spark's own stream of {what}",
            unit="×",
            at_least=least,
        )
        for short, name, what, least in rivals
    ]
    limit = make_figure("source_vs_bare", found[OURS].over(found[BARE]), f"{how}{BARE}", unit="×")
    return [*figures, limit]


def _make_table(found: dict[str, Series], batch: int) -> Table:
    return Table(
        "Streams into Spark",
        "events/s",
        ("100 B",),
        {name: [Cell.of(series)] for name, series in found.items()},
        f"Batches of {batch:,} events, filtered, to Spark's sink `noop`. A Parquet file has "
        f"{batch // FILES:,} events, a small Parquet file {batch // FILES // SMALL:,}.",
    )
