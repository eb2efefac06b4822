"""Output ``table``: schedules events in a queue table, in one database or several shards.

An event's name in the table is made of its id, so an event that is sent again is not scheduled
again as long as its row exists. With ``exactly_once`` the delivered offsets are recorded in the
same transaction, so it is not scheduled again even after it has fired.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from turnlane.databases import (
    Dialect,
    StatementResult,
    execute_statement,
    get_delivery_error,
    translate_errors,
)
from turnlane.errors import NameTaken, Never, RetryLater, TurnlaneError
from turnlane.events import Block
from turnlane.logs import get_logger
from turnlane.outputs.api import ExactlyOnceSettings, Output, OutputSettings
from turnlane.outputs.connections import ConnectionPool
from turnlane.outputs.sql_rows import DeliveryRecord, Offsets, TableRows, build_rows
from turnlane.outputs.templates import make_dated_event_ids
from turnlane.runtime import Closeable
from turnlane.table.batch_commit import WriterGate
from turnlane.table.definition import Definition
from turnlane.table.rows import EventInserter, cast_batch, check_columns, convert_to_rows
from turnlane.table.shard_directory import ShardRouter, TableAddress
from turnlane.units import Duration
from turnlane.validation import ContradictorySettings

log = get_logger(__name__)

NAME_COLUMN: Final = "event_name"
FIRE_AT_COLUMN: Final = "fire_at"
NAMES_PER_STATEMENT: Final = 1_000


class ShardWriter(Closeable):
    """Writes into a queue's table in one database. One thread uses it at a time."""

    def __init__(
        self,
        dialect: Dialect,
        definition: Definition,
        delivered_as: str | None,
        delay: int = 0,
    ) -> None:
        self._dialect = dialect
        self._delay = delay
        """Nanoseconds until events without a fire time fire."""
        self._inserts = EventInserter(dialect, definition)
        self._table = dialect.quote_name(definition.name)
        with translate_errors(dialect):
            self._connection = dialect.connect()
        self._gate = WriterGate(dialect, definition.name)
        self._record: DeliveryRecord | None = None
        if delivered_as is not None:
            self._prepare_gate()
            self._record = DeliveryRecord(
                delivered_as,
                dialect.quote_bare_name,
                self._execute,
                self._transaction,
                dialect.lock,
            )

    def write(self, rows: TableRows, numbers: Offsets) -> None:
        """Schedule the rows with these numbers, except rows that were delivered before.

        The record gets all rows, also of other shards, because it needs fewer ranges then.
        """
        with self._translate_errors():
            if self._record is not None:
                self._record.prepare(rows.positions)
            with self._transaction():
                if self._record is not None:
                    self._gate.pass_through(self._run)
                    numbers = np.intersect1d(numbers, self._record.record(rows.positions))
                batch = self._remove_known_names(rows.columns.take(numbers))
                new_rows = convert_to_rows(batch, self._dialect)
                if self._delay and any(FIRE_AT_COLUMN not in row for row in new_rows):
                    # The clock of the database that fires sets the times that are missing.
                    now: int = self._run(f"SELECT {self._dialect.now}").rows()[0][0]
                    new_rows = [{FIRE_AT_COLUMN: now + self._delay, **row} for row in new_rows]
                if new_rows:
                    self._inserts.enqueue_many(self._connection, new_rows)

    def close(self) -> None:
        with contextlib.suppress(self._dialect.error, OSError):
            self._connection.close()

    def _prepare_gate(self) -> None:
        """Create the gate if it is missing. If it exists, no right to create tables is needed."""
        with self._translate_errors():
            try:
                with self._transaction():
                    exists = self._gate.exists(self._run)
            except self._dialect.error as error:
                log.debug("table_output.gate_missing", error=error)
                exists = False
            if not exists:
                with self._transaction():
                    self._gate.prepare(self._run)

    def _remove_known_names(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows whose names are not in the table; of equal names, the first row."""
        if NAME_COLUMN not in batch.schema.names:
            return batch
        names: list[str | None] = batch.column(NAME_COLUMN).to_pylist()
        wanted = [name for name in names if name is not None]
        known: set[str] = set()
        for at in range(0, len(wanted), NAMES_PER_STATEMENT):
            part = wanted[at : at + NAMES_PER_STATEMENT]
            marks = ", ".join("?" * len(part))
            statement = f"SELECT {NAME_COLUMN} FROM {self._table} WHERE {NAME_COLUMN} IN ({marks})"  # noqa: S608 - quoted
            known.update(row[0] for row in self._execute(statement, part))
        new = []
        for at, name in enumerate(names):
            if name is None or name not in known:
                new.append(at)
            if name is not None:
                known.add(name)
        return batch if len(new) == len(names) else batch.take(np.array(new, dtype=np.int64))

    def _execute(self, statement: str, values: Sequence[Any]) -> Sequence[Any]:
        return self._run(statement.replace("?", self._dialect.placeholder), values).rows()

    def _run(self, statement: str, parameters: Sequence[Any] = ()) -> StatementResult:
        return execute_statement(self._connection, statement, parameters)

    def _transaction(self) -> contextlib.AbstractContextManager[None]:
        return self._dialect.transaction(self._connection)

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            with translate_errors(self._dialect):
                yield
        except NameTaken as error:
            # Another sender inserted the name first: the next attempt finds it.
            raise RetryLater(str(error)) from error
        except TurnlaneError:
            raise
        except self._dialect.error as error:
            meaning = get_delivery_error(self._dialect, error)
            raise (meaning or RetryLater(str(error))) from error


class TableOutputSettings(ExactlyOnceSettings, OutputSettings, TableAddress):
    """The settings of the output ``table``."""

    columns: dict[str, str] = Field(
        min_length=1,
        description="The columns of the table, each with its source: a column of the events, a "
        "path such as `headers.team` or `value.user.id` (into JSON), or `event_id`. Besides your "
        "own columns: `fire_at`, `priority`, `event_name`, `event_group`, `after_group`.",
    )
    delay: Duration = Field(
        default=0.0,
        description="How long after `fire_at` events fire; without `fire_at`, after the delivery.",
    )

    @model_validator(mode="after")
    def _check_exactly_once(self) -> Self:
        issues = self.find_exactly_once_issues()
        if issues:
            raise ContradictorySettings(issues)
        return self


class _ShardWriters:
    """The writers of all shards, for one thread."""

    is_open = True

    def __init__(self, settings: TableOutputSettings) -> None:
        with ExitStack() as opened:
            self._router = opened.enter_context(
                ShardRouter(settings.list_databases(), settings.table)
            )
            self.definition = self._router.definition
            check_columns(settings.columns, self.definition)
            delivered_as = settings.get_delivery_name(settings.table)
            self._writers = [
                opened.enter_context(
                    ShardWriter(
                        self._router.get_dialect(shard),
                        self.definition,
                        delivered_as,
                        round(settings.delay * 1e9),
                    )
                )
                for shard in self._router.map.shards
            ]
            self._opened = opened.pop_all()

    def write(self, rows: TableRows) -> None:
        """Schedule all rows, in one transaction of each database."""
        shards = self._router.find_shard_indexes(rows.columns)
        for shard, writer in enumerate(self._writers):
            numbers = np.flatnonzero(shards == shard)
            if len(numbers) or rows.positions:
                writer.write(rows, numbers)

    def cancel(self) -> None:
        """Do nothing: statements have their own time limits."""

    def close(self) -> None:
        """Close the connections."""
        self._opened.close()


class TableOutput(Output):
    """Schedules the events of each block, in one transaction of each database."""

    settings_type = TableOutputSettings
    settings: TableOutputSettings

    def __init__(self, settings: TableOutputSettings) -> None:
        super().__init__(settings)
        self._pool: ConnectionPool[_ShardWriters] = ConnectionPool(self._connect)

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """Return the events as rows. Their ids are their names, unless the settings name them."""
        rows = build_rows(block, self.settings.columns, with_positions=self.settings.exactly_once)
        ids = make_dated_event_ids(block)
        if NAME_COLUMN in self.settings.columns or ids is None:
            return rows
        return rows._replace(columns=rows.columns.append_column(NAME_COLUMN, ids))

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        rows: TableRows = prepared
        with self._pool.borrow() as writers:
            batch = self._add_delay(cast_batch(rows.columns, writers.definition))
            writers.write(rows._replace(columns=batch))

    def check(self) -> None:
        """Connect, which also checks the table and its columns."""
        with self._pool.borrow():
            pass

    def close(self) -> None:
        self._pool.close()

    def _connect(self) -> _ShardWriters:
        try:
            return _ShardWriters(self.settings)
        except Never as error:  # about the settings or the table: a person can correct it
            raise RetryLater(f"table {self.settings.table!r}: {error}") from error

    def _add_delay(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Add the delay to fire times. The writers set times that are missing."""
        at = batch.schema.get_field_index(FIRE_AT_COLUMN)
        if at < 0 or not self.settings.delay:
            return batch
        delayed: Any = pc.add(batch.column(at), round(self.settings.delay * 1e9))
        return batch.set_column(at, FIRE_AT_COLUMN, delayed)
