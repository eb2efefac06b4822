"""``format("turnlane_table")``: reads a queue table as it is now, and schedules events in it.

Reading has a partition for each shard and key range; filters that the database can apply are passed
to it. Writing works as with queues: tasks stage rows in the databases, and the driver commits them,
so a batch is written as a whole or not at all in each database.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
from pydantic import BeforeValidator, Field, model_validator
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    EqualTo,
    Filter,
    In,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from turnlane.databases import Dialect, add_password
from turnlane.errors import ConfigError
from turnlane.runtime import read_secret
from turnlane.spark.options import Options, find_writer_id, get_range, merge_path
from turnlane.spark.session import freeze_gc_after
from turnlane.table.batch_commit import BatchStaging, get_job_id
from turnlane.table.definition import Definition
from turnlane.table.grammar import parse_definition
from turnlane.table.queue import EventSelection, TableScan, convert_to_nanoseconds
from turnlane.table.queue_sql import load_queue_dialect
from turnlane.table.rows import (
    build_block,
    cast_batch,
    check_columns,
    convert_to_rows,
    get_schema,
)
from turnlane.table.shard_directory import ShardRouter
from turnlane.table.shards import KEYSPACE_SIZE, WHOLE_KEYSPACE, KeyRange, Shard, ShardMap
from turnlane.validation import ConfigIssue, ContradictorySettings

# ── options ──


def _parse_shards(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f'must be JSON such as {{"-80": "postgresql://…"}}: {error}') from None


class TableOptions(Options):
    """The options of reading and writing: the table and its databases."""

    table: str = Field(description="The queue table; `load()` and `save()` may name it instead.")
    url: str | None = Field(
        default_factory=lambda: os.environ.get("TURNLANE_TABLE_URL"),
        description="The database, such as `postgresql://user@host/db`. Default: the environment "
        "variable `TURNLANE_TABLE_URL`.",
    )
    shards: Annotated[dict[str, str], BeforeValidator(_parse_shards)] = Field(
        default_factory=dict,
        description="Instead of `url`: the databases by key range, as in "
        '`{"-80": "postgresql://…", "80-": "postgresql://…"}`.',
    )
    password: str | None = Field(
        default=None, repr=False, description="The password, if the addresses have none."
    )
    password_env: str | None = Field(
        default=None, description="The environment variable with the password."
    )
    password_file: Path | None = Field(default=None, description="The file with the password.")

    @model_validator(mode="after")
    def _check_databases(self) -> Self:
        if not self.url and not self.shards:
            raise ContradictorySettings(
                [ConfigIssue("url", "is required, as in sqlite:////data/queue.db")]
            )
        if self.shards:
            try:
                ShardMap.from_shards((url, key_range) for key_range, url in self.shards.items())
            except ConfigError as error:
                raise ContradictorySettings([ConfigIssue("shards", str(error))]) from None
        return self

    def open_tables(self) -> ShardRouter:
        """Open the queue's tables. Raises ``NoSuchQueue``, ``DatabaseDown``, ``ConfigError``."""
        return ShardRouter(self._list_shards(), self.table)

    def get_dialect(self, address: str) -> Dialect:
        """Return the dialect for a shard's database, whose address has no password."""
        known = {shard.address: shard.url for shard in self._list_shards()}
        return load_queue_dialect(known.get(address) or self._add_password(address))

    def _list_shards(self) -> list[Shard]:
        given = (self.shards or {"-": self.url or ""}).items()
        return [Shard.from_spec((self._add_password(url), key_range)) for key_range, url in given]

    def _add_password(self, url: str) -> str:
        password = read_secret("password", self.password_env, self.password_file) or self.password
        return add_password(url, password)


class TableReadOptions(TableOptions):
    """The options of a reader."""

    num_partitions: int = Field(
        default=1, ge=1, description="The partitions of each shard, by key range."
    )
    rows_per_batch: int = Field(
        default=10_000, ge=1, description="Rows of an Arrow batch for Spark."
    )
    push_filters: bool = Field(
        default=False,
        description="Let filters on `state`, `fire_at`, `event_id`, `event_name` and the key "
        "decide what the database reads. Needs Spark's `spark.sql.python.filterPushdown.enabled`.",
    )


class TableWriteOptions(TableOptions):
    """The options of a sink."""

    writer_id: str | None = Field(
        default=None,
        description="Makes a streaming write exactly once: the batch that was committed last under "
        "this id is not written again. Default: the id of the query of `checkpointLocation`.",
    )
    checkpoint_location: str | None = Field(default=None, description="Set by Spark.")
    query_name: str | None = Field(default=None, description="Set by Spark.")


# ── filters ──

_FIELDS = {"state": "states", "event_name": "names", "event_id": "ids"}


def build_selection(filters: Iterable[Filter], key: str | None) -> EventSelection:
    """Return the rows that filters leave, or more, of a table whose key is the column ``key``.

    Spark applies all filters again: the table has nanoseconds, but Spark only microseconds.
    """
    fields: dict[str, Any] = {}
    firsts, ends = [], []
    for each in filters:
        found = get_range(each, "fire_at", datetime, convert_to_nanoseconds, step=1000)
        if found is not None:
            first, end = found
            firsts += [] if first is None else [first]
            ends += [] if end is None else [end]
            continue
        match each:
            case EqualTo((name,), value):
                values = (value,)
            case In((name,), tuple(values)):
                pass
            case _:
                continue
        field = "keys" if name == key else _FIELDS.get(name)
        if field is not None and None not in values:
            known = fields.get(field, values)
            fields[field] = tuple(each for each in known if each in values)
    fire_from, fire_until = max(firsts, default=None), min(ends, default=None)
    return EventSelection(fire_from=fire_from, fire_until=fire_until, **fields)


# ── reading ──


class TableScanPart(NamedTuple):
    """The part of a shard that a task reads."""

    address: str
    """The address of the database, without the password."""
    key_range: KeyRange


class TableReader(DataSourceReader):
    """Reads a queue table as it is now; each partition at a moment of its own."""

    def __init__(
        self, options: TableReadOptions, schema: StructType, definition: Definition
    ) -> None:
        self._options = options
        self._schema = schema
        self._definition = str(definition)
        self._selection = EventSelection()

    def partitions(self) -> Sequence[InputPartition]:
        with self._options.open_tables() as tables:
            shards = tables.map.shards
        # A selection of keys is small, so it is not divided.
        count = 1 if self._selection.keys is not None else self._options.num_partitions
        parts = []
        for shard in shards:
            ranges = shard.key_range.split(count) if count > 1 else [WHOLE_KEYSPACE]
            # The outer parts extend beyond the shard: it may contain rows of other shards.
            ranges[0] = replace(ranges[0], start=0)
            ranges[-1] = replace(ranges[-1], end=KEYSPACE_SIZE)
            parts += [TableScanPart(shard.address, each) for each in ranges]
        return [InputPartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        part = partition.value
        if not isinstance(part, TableScanPart):
            return  # Spark passes an empty partition if a query has none.
        dialect = self._options.get_dialect(part.address)
        schema = to_arrow_schema(self._schema, timezone="UTC")
        scan = TableScan(dialect, parse_definition(self._definition))
        wanted = replace(self._selection, key_range=part.key_range)
        for rows in scan.read_pages(wanted, schema.names, size=self._options.rows_per_batch):
            yield build_block(rows, schema)


class FilteringTableReader(TableReader):
    """Reads only rows that the database selects by filters.

    A class of its own: Spark refuses a reader with ``pushFilters`` unless its setting
    ``spark.sql.python.filterPushdown.enabled`` is on.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802
        """Have the database apply filters that it can apply; Spark applies all again."""
        key = parse_definition(self._definition).shard_by
        self._selection = build_selection(filters, key)
        yield from filters


# ── writing ──


@dataclass
class StagedRows(WriterCommitMessage):
    """The stage of a task, and the addresses of the databases that have rows of it."""

    stage: str
    addresses: set[str] = field(default_factory=set)


class TableTask:
    """A writing task: stages rows in the databases of their shards."""

    def __init__(self, tables: ShardRouter, job: str, opened: ExitStack) -> None:
        self._tables = tables
        self._opened = opened
        self._staged = StagedRows(f"{job}/{uuid.uuid4().hex}")
        self._stagings: dict[Shard, BatchStaging] = {}
        self._count = 0

    def run(self, batches: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage all rows."""
        for batch in batches:
            if batch.num_rows:
                self._stage(cast_batch(batch, self._tables.definition))
        return self._staged

    def _stage(self, batch: pa.RecordBatch) -> None:
        """Stage rows in the databases of the shards of their keys."""
        shards, numbers = self._tables.map.shards, self._tables.find_shard_indexes(batch)
        for at in np.unique(numbers).tolist():
            shard, part = shards[at], batch.take(np.flatnonzero(numbers == at))
            staging = self._stagings.get(shard)
            if staging is None:
                staging = BatchStaging(self._tables.get_dialect(shard), self._tables.definition)
                self._stagings[shard] = self._opened.enter_context(staging)
            staging.add(self._staged.stage, self._count, convert_to_rows(part, staging.dialect))
            self._count += part.num_rows
            self._staged.addresses.add(shard.address)


class QueueTableWriter:
    """The part that batch and stream writers share."""

    def __init__(self, options: TableWriteOptions, job: str) -> None:
        self._options = options
        self._job = job

    # Like Spark's own Arrow writers, it takes batches where the base classes declare rows.
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of a task; Spark calls it in the task."""
        with freeze_gc_after("write"), ExitStack() as opened:
            tables = opened.enter_context(self._options.open_tables())
            return TableTask(tables, self._job, opened).run(iterator)

    def _commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        epoch: int | None = None,
        writer: str | None = None,
    ) -> None:
        staged = [message for message in messages if isinstance(message, StagedRows)]
        with self._options.open_tables() as tables:
            addresses = {each for message in staged for each in message.addresses}
            if epoch is not None:  # Noted in every shard: shards that are merged later must agree.
                addresses |= {shard.address for shard in tables.map.shards}
            for address in sorted(addresses):
                stages = [each.stage for each in staged if address in each.addresses]
                with BatchStaging(tables.get_dialect(Shard(address)), tables.definition) as staging:
                    staging.commit(self._job, stages, epoch, writer)

    def _abort(self) -> None:
        with self._options.open_tables() as tables:
            for shard in tables.map.shards:
                with BatchStaging(tables.get_dialect(shard), tables.definition) as staging:
                    staging.discard(self._job)


class TableBatchWriter(QueueTableWriter, DataSourceArrowWriter):  # type: ignore[misc]  # write()
    """Schedules events, once."""

    def __init__(self, options: TableWriteOptions) -> None:
        super().__init__(options, get_job_id(None))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._commit(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        del messages
        self._abort()


class TableStreamWriter(QueueTableWriter, DataSourceStreamArrowWriter):  # type: ignore[misc]  # write()
    """Schedules batches of events: exactly once if the query has a writer id."""

    def __init__(self, options: TableWriteOptions) -> None:
        # Tasks need the same name, but may not see the checkpoint.
        super().__init__(options, get_job_id(options.writer_id or options.checkpoint_location))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        options = self._options
        writer = find_writer_id(options.writer_id, options.checkpoint_location)
        self._commit(messages, batchId, writer)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        del messages, batchId
        self._abort()


class TurnlaneTableSource(DataSource):
    """Creates the readers and writers that Spark asks for."""

    @classmethod
    def name(cls) -> str:
        return "turnlane_table"

    def schema(self) -> StructType:
        return from_arrow_schema(get_schema(_read_definition(self._parse_read_options())))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._parse_read_options()
        kind = FilteringTableReader if options.push_filters else TableReader
        return kind(options, schema, _read_definition(options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001
        if overwrite:
            raise ConfigError("mode", 'only "append" is supported, not "overwrite"')
        return TableBatchWriter(self._parse_write_options(schema))

    def streamWriter(  # noqa: N802
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> DataSourceStreamWriter:
        del overwrite  # Results that change are written again, as further events.
        return TableStreamWriter(self._parse_write_options(schema))

    def _parse_read_options(self) -> TableReadOptions:
        return TableReadOptions.from_spark(merge_path(self.options, "table"))

    def _parse_write_options(self, schema: StructType) -> TableWriteOptions:
        options = TableWriteOptions.from_spark(merge_path(self.options, "table"))
        check_columns(schema.names, _read_definition(options))
        return options


def _read_definition(options: TableOptions) -> Definition:
    with options.open_tables() as tables:
        return tables.definition
