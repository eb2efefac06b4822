"""``format("turnlane")``: a queue, of one node or of several, as a table that grows."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from turnlane.spark.columns import check_writable, read_schema
from turnlane.spark.lane_reading import LaneReader
from turnlane.spark.options import ReadOptions, WriteOptions
from turnlane.spark.reading import BatchReader, PruningReader, StreamReader
from turnlane.spark.writing import BatchWriter, StreamWriter


def _with_queue(options: Mapping[str, str]) -> dict[str, str]:
    """``load("orders")`` and ``save("orders")`` name the queue."""
    given = dict(options)
    path = given.pop("path", None)
    if path is not None:
        given.setdefault("queue", path)
    return given


class TurnlaneSource(DataSource):
    """What Spark asks for a reader or a writer."""

    @classmethod
    def name(cls) -> str:
        return "turnlane"

    def schema(self) -> str:
        return read_schema(include_headers=self._reading().include_headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._reading()
        return (PruningReader if options.push_filters else BatchReader)(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        options = self._reading()
        kind = StreamReader if options.lane is None else LaneReader
        return kind(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001
        del overwrite  # a queue is only ever appended to
        return BatchWriter(self._writing(schema))

    def streamWriter(  # noqa: N802
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> DataSourceStreamWriter:
        del overwrite
        return StreamWriter(self._writing(schema))

    def _reading(self) -> ReadOptions:
        return ReadOptions.of(_with_queue(self.options))

    def _writing(self, schema: StructType) -> WriteOptions:
        options = WriteOptions.of(_with_queue(self.options))
        if not options.steps:
            check_writable(schema, needs_route=options.queue is None)
        return options
