"""Output ``table``: schedules events in a queue table."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from turnlane.errors import NameTaken, Never, RetryLater, TurnlaneError
from turnlane.events import Block
from turnlane.outputs.api import OnceSettings, Output, OutputSettings, lasting_ids
from turnlane.outputs.pool import Pool
from turnlane.outputs.sql_delivered import Delivered
from turnlane.outputs.sql_notes import Notes
from turnlane.outputs.sql_rows import Offsets, Rows
from turnlane.outputs.sql_rows import rows_of as rows_of_sql_rows
from turnlane.runtime import Closing
from turnlane.table.definition import Definition
from turnlane.table.fenced_writes import EventInserter
from turnlane.table.notes import WriterGate
from turnlane.table.row_codec import cast_batch, check_columns, convert_to_rows
from turnlane.table.shard_directory import ShardRouter, TableAddress
from turnlane.table.sql.dialect import Dialect
from turnlane.table.sql.session import Executed, understood
from turnlane.units import Duration
from turnlane.validation import Contradiction

# ── table_places ──
# The tables that events are scheduled in: one connection to each database.

log = logging.getLogger(__name__)

NAME: Final = "event_name"
FIRE_AT: Final = "fire_at"
NAMES: Final = 1_000
"""To a statement."""

_DATA: Final = {"DataError", "IntegrityError"}
"""As every driver of Python's calls what is wrong with a value."""


class TablePlace(Closing):
    """A queue's table in one database. Used by one thread at a time."""

    def __init__(
        self,
        dialect: Dialect,
        definition: Definition,
        delivered_as: str | None,
        delay: int = 0,
    ) -> None:
        self._dialect = dialect
        self._delay = delay
        """Nanoseconds from now until events fire that have no time."""
        self._inserts = EventInserter(dialect, definition)
        self._table = dialect.identifier(definition.name)
        with understood(dialect):
            self._connection = dialect.connect()
        self._gate = WriterGate(dialect, definition.name)
        self._notes: Notes | None = None
        if delivered_as is not None:
            self._prepare_gate()
            delivered = Delivered(delivered_as, dialect.bare, self._execute)
            self._notes = Notes(delivered, self._transaction, f" {dialect.lock}")

    def write(self, rows: Rows, mine: Offsets) -> None:
        """Schedule the rows whose numbers are ``mine``, but for those that were before.

        All rows are noted: none of the others belongs here. (So the notes stay short.)
        """
        with self._understood():
            if self._notes is not None:
                self._notes.get_ready(rows.places)
            with self._transaction():
                if self._notes is not None:
                    self._gate.pass_through(self._executed)
                    mine = np.intersect1d(mine, self._notes.fresh(rows.places))
                part = self._unknown(rows.columns.take(mine))
                if part.num_rows:
                    listed = self._timed(convert_to_rows(part, self._dialect))
                    self._inserts.enqueue_many(self._connection, listed)

    def close(self) -> None:
        with contextlib.suppress(self._dialect.error, OSError):
            self._connection.close()

    def _prepare_gate(self) -> None:
        """Make what is missing of it; who finds it there needs no right to make tables."""
        with self._understood():
            try:
                with self._transaction():
                    there = self._gate.is_there(self._executed)
            except self._dialect.error as error:
                log.debug("there is no gate: %s", error)
                there = False
            if not there:
                with self._transaction():
                    self._gate.prepare(self._executed)

    def _timed(self, listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows with their fire times, by the clock of the database that fires them."""
        if self._delay and any(FIRE_AT not in row for row in listed):
            now: int = self._run(f"SELECT {self._dialect.now}", ())[0][0]
            return [{FIRE_AT: now + self._delay, **row} for row in listed]
        return listed

    def _unknown(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows whose names are not in the table; of several with one name, the first."""
        if NAME not in batch.schema.names:
            return batch
        names: list[str | None] = batch.column(NAME).to_pylist()
        seen = self._taken([name for name in names if name is not None])
        kept = []
        for at, name in enumerate(names):
            if name is None or name not in seen:
                kept.append(at)
            if name is not None:
                seen.add(name)
        return batch if len(kept) == len(names) else batch.take(np.array(kept, dtype=np.int64))

    def _taken(self, names: Sequence[str]) -> set[str]:
        taken: set[str] = set()
        for at in range(0, len(names), NAMES):
            some = names[at : at + NAMES]
            marks = ", ".join([self._dialect.mark] * len(some))
            statement = f"SELECT {NAME} FROM {self._table} WHERE {NAME} IN ({marks})"  # noqa: S608 - quoted
            taken.update(row[0] for row in self._run(statement, some))
        return taken

    def _execute(self, statement: str, values: Sequence[Any]) -> Sequence[Any]:
        return self._run(statement.replace("?", self._dialect.mark), values)

    def _executed(self, statement: str, parameters: Sequence[Any] = ()) -> Executed:
        cursor = self._connection.cursor()
        cursor.execute(statement, tuple(parameters))
        return Executed(cursor)

    def _run(self, statement: str, values: Sequence[Any]) -> Sequence[Any]:
        cursor = self._connection.cursor()
        cursor.execute(statement, tuple(values))
        return list(cursor.fetchall()) if cursor.description else ()

    def _transaction(self) -> contextlib.AbstractContextManager[None]:
        return self._dialect.transaction(self._connection)

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        try:
            with understood(self._dialect):
                yield
        except NameTaken as error:
            # Another sender was quicker: next time it is seen.
            raise RetryLater(str(error)) from error
        except TurnlaneError:
            raise
        except self._dialect.error as error:
            raise _meaning(error) from error


def _meaning(error: Exception) -> TurnlaneError:
    """What an error of a driver means for the events."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return Never(str(error)) if kinds & _DATA else RetryLater(str(error))


class TableOutputSettings(OnceSettings, OutputSettings, TableAddress):
    """The settings of a table output."""

    columns: dict[str, str] = Field(
        min_length=1,
        description="The table's columns, each with where it comes from: a column of the events, "
        "a path such as `headers.team` or `value.user.id` (into JSON), or `event_id`. Beside "
        "yours: `fire_at`, `priority`, `event_name`, `event_group`, `after_group`.",
    )
    delay: Duration = Field(
        default=0.0, description="How long after `fire_at` they fire; without that, after now."
    )

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        problems = self.once_problems()
        if problems:
            raise Contradiction(problems)
        return self


class _Tables:
    """The queue's tables in all databases, as one thread uses them."""

    is_open = True

    def __init__(self, settings: TableOutputSettings) -> None:
        with ExitStack() as opened:
            self._spread = opened.enter_context(ShardRouter(settings.databases(), settings.table))
            self.definition = self._spread.definition
            check_columns(settings.columns, self.definition)
            noted = settings.noted_as(settings.table)
            self._places = [
                opened.enter_context(
                    TablePlace(
                        self._spread.dialect(shard),
                        self.definition,
                        noted,
                        _nanoseconds(settings.delay),
                    )
                )
                for shard in self._spread.map.shards
            ]
            self._opened = opened.pop_all()

    def write(self, rows: Rows) -> None:
        """Schedule all rows; a transaction in each database."""
        numbers = self._spread.numbers(rows.columns)
        for at, place in enumerate(self._places):
            mine = np.flatnonzero(numbers == at)
            if len(mine) or rows.places:
                place.write(rows, mine)

    def cancel(self) -> None:
        """Nothing: statements have time limits of their own."""

    def close(self) -> None:
        """Let go of the connections."""
        self._opened.close()


class TableOutput(Output):
    """Schedules each block, in a transaction of each database."""

    settings_type = TableOutputSettings
    settings: TableOutputSettings

    def __init__(self, settings: TableOutputSettings) -> None:
        super().__init__(settings)
        self._tables: Pool[_Tables] = Pool(self._connect)

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """The block's events as rows; named by their ids unless the settings name them."""
        rows = rows_of_sql_rows(block, self.settings.columns, places=self.settings.exactly_once)
        ids = lasting_ids(block)
        if NAME in self.settings.columns or ids is None:
            return rows
        return rows._replace(columns=rows.columns.append_column(NAME, ids))

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        rows: Rows = prepared
        with self._tables.borrowed() as tables:
            batch = self._delayed(cast_batch(rows.columns, tables.definition))
            tables.write(rows._replace(columns=batch))

    def check(self) -> None:
        """Connect, which looks at the table and its columns."""
        with self._tables.borrowed():
            pass

    def close(self) -> None:
        self._tables.close()

    def _connect(self) -> _Tables:
        try:
            return _Tables(self.settings)
        except Never as error:  # of the settings or the table, which a person can change
            raise RetryLater(f"table {self.settings.table!r}: {error}") from error

    def _delayed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with its fire times as late as they shall be; the others are the table's."""
        at = batch.schema.get_field_index(FIRE_AT)
        if at < 0 or not self.settings.delay:
            return batch
        late: Any = pc.add(batch.column(at), _nanoseconds(self.settings.delay))
        return batch.set_column(at, FIRE_AT, late)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
