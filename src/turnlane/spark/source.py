"""``format("turnlane")``: a queue, of one node or of several, as a table that grows."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from turnlane.errors import ConfigError
from turnlane.spark.columns import check_writable, read_schema
from turnlane.spark.lane_options import (
    LaneReadOptions,
    LaneWriteOptions,
    read_options,
    write_options,
)
from turnlane.spark.lane_reading import LaneReader
from turnlane.spark.lasting import lasting
from turnlane.spark.options import ReadOptions, WriteOptions, with_path
from turnlane.spark.reading import BatchReader, PruningReader
from turnlane.spark.stream_reading import StreamReader
from turnlane.spark.writing import BatchWriter, StreamWriter


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
        if isinstance(options, LaneReadOptions):
            return LaneReader(options, schema)
        if "ending_offsets" in options.model_fields_set:
            raise ConfigError("endingOffsets", "is for batch queries; a stream reads on")
        return StreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001
        if overwrite:
            raise ConfigError("mode", "is append: a queue is only ever appended to")
        return BatchWriter(self._writing(schema))

    def streamWriter(  # noqa: N802
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> DataSourceStreamWriter:
        del overwrite  # results that change are written anew, as further events
        with lasting("plan"):
            return StreamWriter(self._writing(schema))

    def _reading(self) -> ReadOptions:
        return read_options(with_path(self.options, "queue"))

    def _writing(self, schema: StructType) -> WriteOptions:
        options = write_options(with_path(self.options, "queue"))
        if not (isinstance(options, LaneWriteOptions) and options.has_own_rows):
            check_writable(schema, needs_route=options.queue is None)
        return options
