"""Reading a queue table with Spark: a partition for each shard and key range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from turnlane.spark.table_options import TableReadOptions
from turnlane.spark.table_pruning import selection_of
from turnlane.table.columns import block_of
from turnlane.table.definition import Definition
from turnlane.table.grammar import parse_definition
from turnlane.table.keyspace import EVERYTHING, SPACE, KeyRange
from turnlane.table.scan import Scan
from turnlane.table.selection import Selection
from turnlane.table.shards import Shard


class Part(NamedTuple):
    """What a task reads."""

    address: str
    """The database's, without the password."""
    key_range: KeyRange


class TablePartition(InputPartition):
    """A part, as Spark carries it to a task."""

    def __init__(self, part: Part) -> None:
        super().__init__((part.address, str(part.key_range)))
        self.part = part


class TableReader(DataSourceReader):
    """A queue table as it is now; each partition at one moment of its own."""

    def __init__(
        self, options: TableReadOptions, schema: StructType, definition: Definition
    ) -> None:
        self._options = options
        self._schema = schema
        self._definition = str(definition)
        self._selection = Selection()

    def partitions(self) -> Sequence[InputPartition]:
        with self._options.opened() as spread:
            shards = spread.map.shards
        # One key is on one page: there is nothing to divide.
        count = 1 if self._selection.keys is not None else self._options.num_partitions
        return [TablePartition(part) for shard in shards for part in parts_of(shard, count)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, TablePartition):
            return  # where there are none, Spark makes up one that is empty
        part = partition.part
        dialect = self._options.dialect(part.address)
        schema = to_arrow_schema(self._schema, timezone="UTC")
        scan = Scan(dialect, parse_definition(self._definition))
        wanted = replace(self._selection, key_range=part.key_range)
        for rows in scan.pages(wanted, schema.names, size=self._options.rows_per_batch):
            yield block_of(rows, schema)


class PruningTableReader(TableReader):
    """The same, with filters for the database. Spark refuses it unless told to push them."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802
        """The database applies what it can; Spark applies all of them, which costs little."""
        key = parse_definition(self._definition).shard_by
        self._selection = selection_of(filters, key)
        yield from filters


def parts_of(shard: Shard, count: int) -> list[Part]:
    """A shard in so many parts, by key.

    The outer ones go on beyond the shard: somebody may have inserted what is not its own.
    """
    if count == 1:
        return [Part(shard.address, EVERYTHING)]
    ranges = shard.key_range.split(count)
    ranges[0] = replace(ranges[0], start=0)
    ranges[-1] = replace(ranges[-1], end=SPACE)
    return [Part(shard.address, each) for each in ranges]
