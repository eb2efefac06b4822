"""A Spark source in Python that reads nothing: its rows were made before.

No source in Python can be faster on the same machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from benchmarks.lines import make_log_lines
from turnlane.events import block_of
from turnlane.spark.options import ROWS_PER_BATCH

NAME = "bare"
TASKS = 2
Offset = dict[str, int]


class BareSource(DataSource):
    """A source of ``events`` events in batches of ``batch``."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return BareReader(schema, int(self.options["events"]), int(self.options["batch"]))


class BareReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Counts the events that Spark has read."""

    def __init__(self, schema: StructType, events: int, batch: int) -> None:
        self._schema = schema
        self._events = events
        self._batch = batch

    def initialOffset(self) -> Offset:  # noqa: N802
        return {"at": 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Do nothing."""

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        del limit
        return {"at": min(start["at"] + self._batch, self._events)}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        each = (end["at"] - start["at"]) // TASKS
        return [InputPartition(each)] * TASKS if each else []

    def read(self, partition: InputPartition) -> Iterator[Any]:
        schema = to_arrow_schema(self._schema, timezone="UTC")
        full, rest = divmod(partition.value, ROWS_PER_BATCH)
        rows = _rows(schema)
        for _ in range(full):
            yield rows
        if rest:
            yield rows.slice(0, rest)


@cache
def _rows(schema: pa.Schema) -> pa.RecordBatch:
    """Return the Arrow batch that all tasks yield."""
    lines = make_log_lines(ROWS_PER_BATCH, 100)
    severities = [number % 8 for number in range(len(lines))]
    block = block_of(lines, severities=severities, sources=["10.0.0.1"] * len(lines))
    return block.select(schema.names).cast(schema)
