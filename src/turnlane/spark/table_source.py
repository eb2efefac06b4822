"""``format("turnlane_table")``: a queue table, to be read as it is, and to schedule events in."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from turnlane.errors import ConfigError
from turnlane.spark.options import with_path
from turnlane.spark.table_options import TableOptions, TableReadOptions, TableWriteOptions
from turnlane.spark.table_reading import PruningTableReader, TableReader
from turnlane.spark.table_writing import TableBatchWriter, TableStreamWriter
from turnlane.table.columns import check_columns, schema_of
from turnlane.table.definition import Definition


class TurnlaneTableSource(DataSource):
    """What Spark asks for a reader or a writer."""

    @classmethod
    def name(cls) -> str:
        return "turnlane_table"

    def schema(self) -> StructType:
        return from_arrow_schema(schema_of(_definition(self._reading())))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._reading()
        kind = PruningTableReader if options.push_filters else TableReader
        return kind(options, schema, _definition(options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001
        if overwrite:
            raise ConfigError("mode", "is append: a queue is only ever appended to")
        return TableBatchWriter(self._writing(schema))

    def streamWriter(  # noqa: N802
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> DataSourceStreamWriter:
        del overwrite  # results that change are written anew, as further events
        return TableStreamWriter(self._writing(schema))

    def _reading(self) -> TableReadOptions:
        return TableReadOptions.of(with_path(self.options, "table"))

    def _writing(self, schema: StructType) -> TableWriteOptions:
        options = TableWriteOptions.of(with_path(self.options, "table"))
        check_columns(schema.names, _definition(options))
        return options


def _definition(options: TableOptions) -> Definition:
    with options.opened() as spread:
        return spread.definition
