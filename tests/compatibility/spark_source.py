"""Spark's source ``format("turnlane")``, used as Spark does, but without Spark.

Offsets are in the checkpoints of users' queries, so every version has to understand older ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pyspark.sql.types import BinaryType, LongType, StringType, StructType

import pyspark_turnlane
import pyspark_turnlane_table
from tests.compatibility.running import encode_bytes

READ_OPTIONS: Final[Mapping[str, str]] = {
    "endpoint": "turnlane://127.0.0.1:1",
    "token": "t",
    "queue": "orders",
    "startingOffsets": '{"0": 42}',
    "endingOffsets": "latest",
    "startingTimestamp": "1700000000000",
    "maxOffsetsPerTrigger": "10",
    "maxBytesPerTrigger": "1Mi",
    "minOffsetsPerTrigger": "2",
    "maxTriggerDelay": "5s",
    "minPartitions": "2",
    "workers": "3",
    "workerMinimumEvents": "100",
    "rowsPerBatch": "1000",
    "failOnDataLoss": "false",
    "skipSettled": "true",
    "includeHeaders": "true",
    "consume": "false",
    "pushFilters": "true",
    "pollTimeout": "2s",
}
WRITE_OPTIONS: Final[Mapping[str, str]] = {
    "endpoint": "turnlane://127.0.0.1:1",
    "token": "t",
    "queue": "orders",
    "writerId": "query-1",
    "checkpointLocation": "checkpoints",
    "queryName": "a query",
}
_COLUMNS: Final = [("key", StringType()), ("value", BinaryType()), ("offset", LongType())]


def _make_schema() -> StructType:
    schema = StructType()
    for name, kind in _COLUMNS:
        schema = schema.add(name, kind)
    return schema


def read_source_names() -> dict[str, Any]:
    """Return the names of the sources, of their options and of their columns."""
    source = pyspark_turnlane.DefaultSource(dict(READ_OPTIONS))
    columns = source.schema()
    assert isinstance(columns, str)
    for option in ("tokenEnv", "tokenFile", "tlsCa"):
        pyspark_turnlane.DefaultSource({**READ_OPTIONS, option: "x"}).schema()
    pyspark_turnlane.DefaultSource(dict(WRITE_OPTIONS)).writer(_make_schema(), overwrite=False)
    return {
        "formats": [source.name(), pyspark_turnlane_table.DefaultSource.name()],
        "columns": columns.split(", "),
    }


def _open_stream(url: str, queue: str, **options: str) -> Any:
    given = {"endpoint": url, "queue": queue, **options}
    return pyspark_turnlane.DefaultSource(given).streamReader(_make_schema())


def make_offset(url: str, queue: str) -> dict[str, Any]:
    """Read the first 50 events of a queue, and return the offset that Spark would keep."""
    reader = _open_stream(url, queue, maxOffsetsPerTrigger="50")
    offset: dict[str, Any] = reader.latestOffset(
        reader.initialOffset(), reader.getDefaultReadLimit()
    )
    return offset


def observe_offset(url: str, queue: str, offset: dict[str, Any]) -> dict[str, Any]:
    """Go on from a stored offset, read five events, and settle everything before."""
    reader = _open_stream(url, queue, maxOffsetsPerTrigger="5")
    end = reader.latestOffset(offset, reader.getDefaultReadLimit())
    rows = [
        {**row, "value": encode_bytes(row["value"])}
        for partition in reader.partitions(offset, end)
        for block in reader.read(partition)
        for row in block.to_pylist()
    ]
    reader.commit(end)
    return {"end": end, "rows": rows}
