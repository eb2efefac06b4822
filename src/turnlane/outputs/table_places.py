"""The tables that events are scheduled in: one connection to each database."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from turnlane.closing import Closing
from turnlane.errors import NameTaken, Never, RetryLater, TurnlaneError
from turnlane.outputs.sql_delivered import Delivered
from turnlane.outputs.sql_notes import Notes
from turnlane.outputs.sql_rows import Offsets, Rows
from turnlane.table.columns import rows_of
from turnlane.table.definition import Definition
from turnlane.table.gate import Gate
from turnlane.table.inserts import Inserts
from turnlane.table.sql.dialect import Dialect
from turnlane.table.sql.session import Executed, understood

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
        self._inserts = Inserts(dialect, definition)
        self._table = dialect.identifier(definition.name)
        with understood(dialect):
            self._connection = dialect.connect()
        self._gate = Gate(dialect, definition.name)
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
                    listed = self._timed(rows_of(part, self._dialect))
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
