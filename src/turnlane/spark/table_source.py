"""``format("turnlane_table")``: a queue table, to be read as it is, and to schedule events in."""

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
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from turnlane.errors import ConfigError
from turnlane.runtime import revealed
from turnlane.spark.options import Options, with_path, writer_of
from turnlane.spark.session import lasting
from turnlane.table.batch_commit import Staging, job_of
from turnlane.table.definition import Definition
from turnlane.table.grammar import parse_definition
from turnlane.table.queue import Scan, Selection, nanoseconds
from turnlane.table.row_codec import (
    NANOSECONDS,
    block_of,
    check_columns,
    fitted,
    rows_of,
    schema_of,
)
from turnlane.table.shard_directory import Spread, with_password
from turnlane.table.shards import EVERYTHING, SPACE, KeyRange, Shard, ShardMap
from turnlane.table.sql.dialect import Dialect
from turnlane.table.url import dialect_of
from turnlane.validation import Contradiction, Problem

# ── table_options ──
# The options of ``format("turnlane_table")``, checked before anything is read or written.


def _shards(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f'is JSON such as {{"-80": "postgresql://…"}}: {error}') from None


class TableOptions(Options):
    """What reading and writing a queue table have in common."""

    table: str = Field(description="The queue table; `load()` and `save()` name it, too.")
    url: str | None = Field(
        default_factory=lambda: os.environ.get("TURNLANE_TABLE_URL"),
        description="The database, such as `postgresql://user@host/db`. Default: the environment "
        "variable `TURNLANE_TABLE_URL`.",
    )
    shards: Annotated[dict[str, str], BeforeValidator(_shards)] = Field(
        default_factory=dict,
        description="Instead of `url`: the databases by key range, as in "
        '`{"-80": "postgresql://…", "80-": "postgresql://…"}`.',
    )
    password: str | None = Field(
        default=None, repr=False, description="The password, if the addresses have none."
    )
    password_env: str | None = Field(
        default=None, description="The environment variable that has it."
    )
    password_file: Path | None = Field(default=None, description="The file that has it.")

    @model_validator(mode="after")
    def _databases_given(self) -> Self:
        if not self.url and not self.shards:
            raise Contradiction([Problem("url", "is required, as in sqlite:////data/queue.db")])
        if self.shards:
            try:
                ShardMap.of((url, key_range) for key_range, url in self.shards.items())
            except ConfigError as error:
                raise Contradiction([Problem("shards", str(error))]) from None
        return self

    def opened(self) -> Spread:
        """The queue's tables. Raises ``NoSuchQueue``, ``DatabaseDown``, ``ConfigError``."""
        return Spread(self._given(), self.table)

    def dialect(self, address: str) -> Dialect:
        """How a shard's database is reached, whose address has no password."""
        known = {shard.address: shard.url for shard in self._given()}
        return dialect_of(known.get(address) or self._with_password(address))

    def _given(self) -> list[Shard]:
        given = self.shards or {"-": self.url or ""}
        return [Shard.of((self._with_password(url), key_range)) for key_range, url in given.items()]

    def _with_password(self, url: str) -> str:
        password = revealed("password", self.password_env, self.password_file) or self.password
        return with_password(url, password)


class TableReadOptions(TableOptions):
    """The options of reading."""

    num_partitions: int = Field(
        default=1, ge=1, description="Partitions of each shard, by key range."
    )
    rows_per_batch: int = Field(
        default=10_000, ge=1, description="Rows of an Arrow batch given to Spark."
    )
    push_filters: bool = Field(
        default=False,
        description="Let filters on `state`, `fire_at`, `event_id`, `event_name` and the key "
        "decide what the database reads. Needs Spark's `spark.sql.python.filterPushdown.enabled`.",
    )


class TableWriteOptions(TableOptions):
    """The options of writing."""

    writer_id: str | None = Field(
        default=None,
        description="Makes a streaming write exactly once: the batch that was committed last under "
        "this id is not written again. Default: by the query to which `checkpointLocation` "
        "belongs.",
    )
    checkpoint_location: str | None = Field(default=None, description="Spark's own.")
    query_name: str | None = Field(default=None, description="Spark's own.")


# ── table_pruning ──
# Filters that the database applies: those on state, fire time, id, name and key. Pure.

_FIELDS = {"state": "states", "event_name": "names", "event_id": "ids"}


def selection_of(filters: Iterable[Filter], key: str | None) -> Selection:
    """What filters leave of a table whose key is the column ``key``, and perhaps more.

    Spark applies all of them once more: of the table's nanoseconds it knows only microseconds.
    """
    selection = Selection()
    for each in filters:
        selection = _narrowed(selection, each, key)
    return selection


def _narrowed(selection: Selection, each: Filter, key: str | None) -> Selection:
    narrowed = selection
    match each:
        case EqualTo(("fire_at",), datetime() as at):
            narrowed = _until(_since(selection, at, 0), at, 1)
        case GreaterThan(("fire_at",), datetime() as at):
            narrowed = _since(selection, at, 1)
        case GreaterThanOrEqual(("fire_at",), datetime() as at):
            narrowed = _since(selection, at, 0)
        case LessThan(("fire_at",), datetime() as at):
            narrowed = _until(selection, at, 0)
        case LessThanOrEqual(("fire_at",), datetime() as at):
            narrowed = _until(selection, at, 1)
        case EqualTo((name,), value):
            narrowed = _among(selection, name, (value,), key)
        case In((name,), tuple(values)):
            narrowed = _among(selection, name, values, key)
    return narrowed


def _among(selection: Selection, name: str, values: tuple[Any, ...], key: str | None) -> Selection:
    field = "keys" if name == key else _FIELDS.get(name)
    if field is None or any(value is None for value in values):
        return selection
    known: tuple[Any, ...] | None = getattr(selection, field)
    kept: Any = values if known is None else tuple(each for each in known if each in values)
    changed: dict[str, Any] = {field: kept}
    return replace(selection, **changed)


def _since(selection: Selection, at: datetime, more: int) -> Selection:
    """Due at a microsecond, or at the one after it, or later."""
    bound = nanoseconds(at) + more * NANOSECONDS
    known = selection.fire_from
    return replace(selection, fire_from=bound if known is None else max(known, bound))


def _until(selection: Selection, at: datetime, more: int) -> Selection:
    bound = nanoseconds(at) + more * NANOSECONDS
    known = selection.fire_until
    return replace(selection, fire_until=bound if known is None else min(known, bound))


# ── table_reading ──
# Reading a queue table with Spark: a partition for each shard and key range.


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


# ── table_writing ──
# Writing to a queue table with Spark: tasks stage rows, the driver commits them.
#
# A batch is all or nothing in each database, and in each it is committed once.


@dataclass
class StagedRows(WriterCommitMessage):
    """The stage that a task has filled, and in which databases: by their addresses."""

    stage: str
    addresses: set[str] = field(default_factory=set)


class TableTask:
    """One task's way of writing."""

    def __init__(self, spread: Spread, job: str, opened: ExitStack) -> None:
        self._spread = spread
        self._opened = opened
        self._staged = StagedRows(f"{job}/{uuid.uuid4().hex}")
        self._stagings: dict[Shard, Staging] = {}
        self._count = 0

    def run(self, batches: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage everything."""
        for batch in batches:
            if batch.num_rows:
                self._stage(fitted(batch, self._spread.definition))
        return self._staged

    def _stage(self, batch: pa.RecordBatch) -> None:
        for shard, part in self._sorted(batch):
            staging = self._staging(shard)
            staging.add(self._staged.stage, self._count, rows_of(part, staging.dialect))
            self._count += part.num_rows
            self._staged.addresses.add(shard.address)

    def _sorted(self, batch: pa.RecordBatch) -> list[tuple[Shard, pa.RecordBatch]]:
        """The rows by the shard that has their keys."""
        shards, numbers = self._spread.map.shards, self._spread.numbers(batch)
        return [
            (shards[at], batch.take(np.flatnonzero(numbers == at)))
            for at in np.unique(numbers).tolist()
        ]

    def _staging(self, shard: Shard) -> Staging:
        known = self._stagings.get(shard)
        if known is None:
            known = Staging(self._spread.dialect(shard), self._spread.definition)
            self._stagings[shard] = self._opened.enter_context(known)
        return known


class TableWriting:
    """What batch and stream have in common."""

    def __init__(self, options: TableWriteOptions, job: str) -> None:
        self._options = options
        self._job = job

    # Spark's own Arrow writers, too, take batches where their base classes have rows.
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """A task's part: called where the rows are."""
        with lasting("write"), ExitStack() as opened:
            spread = opened.enter_context(self._options.opened())
            return TableTask(spread, self._job, opened).run(iterator)

    def _committed(
        self,
        messages: Sequence[WriterCommitMessage | None],
        epoch: int | None = None,
        writer: str | None = None,
    ) -> None:
        staged = [message for message in messages if isinstance(message, StagedRows)]
        with self._options.opened() as spread:
            addresses = {each for message in staged for each in message.addresses}
            if epoch is not None:  # noted everywhere: shards that are merged have to agree
                addresses |= {shard.address for shard in spread.map.shards}
            for address in sorted(addresses):
                stages = [each.stage for each in staged if address in each.addresses]
                with Staging(spread.dialect(Shard(address)), spread.definition) as staging:
                    staging.commit(self._job, stages, epoch, writer)

    def _aborted(self) -> None:
        with self._options.opened() as spread:
            for shard in spread.map.shards:
                with Staging(spread.dialect(shard), spread.definition) as staging:
                    staging.discard(self._job)


class TableBatchWriter(TableWriting, DataSourceArrowWriter):  # type: ignore[misc]  # write()
    """Schedules events, once."""

    def __init__(self, options: TableWriteOptions) -> None:
        super().__init__(options, job_of(None))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._committed(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        del messages
        self._aborted()


class TableStreamWriter(TableWriting, DataSourceStreamArrowWriter):  # type: ignore[misc]  # write()
    """Schedules events a batch at a time: exactly once if the query has an id."""

    def __init__(self, options: TableWriteOptions) -> None:
        # Tasks, too, find this name: they may not see the checkpoint itself.
        super().__init__(options, job_of(options.writer_id or options.checkpoint_location))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        options = self._options
        writer = writer_of(options.writer_id, options.checkpoint_location)
        self._committed(messages, batchId, writer)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        del messages, batchId
        self._aborted()


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
