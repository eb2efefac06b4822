"""Events on their way from one shard to another: the tables of a sharded queue, and the outbox.

A transfer has three transactions. The first takes a batch of events out of the table and puts them
into the *outbox*, next to the number of the batch; after it, no manager can fire or ack them here.
The second, in the other database, inserts the whole batch and records its number; a batch whose
number is recorded is not inserted again. The third deletes the batch from the outbox. So an event
is in one place no matter where a process dies, and the next process goes on.

A row that the driver cannot read must not stop a reshard. Each column of such a row is read by
itself, and an unreadable column as the text that the database has for it. The row arrives as a dead
letter, which it would also have become in its old table.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Container, Sequence
from typing import Any, Final, NamedTuple

from turnlane.databases import Dialect, Execute, Row, Session
from turnlane.logs import get_logger
from turnlane.table.definition import Definition
from turnlane.table.queue_sql import begin_delete, get_queue_sql
from turnlane.table.rows import convert_to_portable
from turnlane.table.store import find_unreadable_rows

log = get_logger(__name__)

OUTBOX_PREFIX: Final = "turnlane_move_"

TRANSFERRED_COLUMNS: Final = (
    "fire_at",
    "state",
    "attempts",
    "priority",
    "event_name",
    "event_group",
    "after_group",
    "last_error",
)
"""The system columns of an event that move with it. It gets another id."""


class TransferFilter(enum.Enum):
    """Which events are taken out of a table, as a condition in SQL."""

    FAR = (
        "fire_at > %s AND state = 'to_be_fired' AND attempts = 0 "
        "AND event_group IS NULL AND after_group IS NULL"
    )
    """Events that no manager has in memory: they are due after the end of its window."""
    HISTORY = "state = 'acked'"
    PLAIN = "after_group IS NULL"
    ALL = "1 = 1"
    """Also events that wait for a group, whose members have to arrive before them."""


ONLINE_FILTERS: Final = (TransferFilter.FAR, TransferFilter.HISTORY)
"""Events that can be moved while a manager fires from the same table."""


class TransferBatch(NamedTuple):
    """A batch of events in an outbox."""

    number: int
    version: int
    """The version of the map that says where they belong."""
    rows: list[Row]


def get_transferred_columns(definition: Definition) -> tuple[str, ...]:
    """Return the columns of an event that move with it."""
    return (*TRANSFERRED_COLUMNS, *definition.column_names)


def prepare_arrivals(
    rows: Sequence[Row], definition: Definition, used_names: Container[str]
) -> list[Row]:
    """Return rows for the database that they arrive in, without event names that are used there.

    A fired event has to fire again: no ack can reach the manager that fired it.
    """
    columns = get_transferred_columns(definition)
    at_state, at_name = columns.index("state"), columns.index("event_name")
    booleans = {column.name for column in definition.columns if column.type == "BOOLEAN"}
    at_booleans = [at for at, name in enumerate(columns) if name in booleans]
    prepared = []
    for row in rows:
        values = list(map(convert_to_portable, row))
        if values[at_state] == "fired":
            values[at_state] = "to_be_fired"
        if values[at_name] in used_names:
            values[at_name] = None
        for at in at_booleans:  # MySQL and SQLite return numbers
            values[at] = None if values[at] is None else bool(values[at])
        prepared.append(tuple(values))
    return prepared


# ── the tables ───────────────────────────────────────────────────────────────────────────────────


def _get_shared_ddl(dialect: Dialect) -> dict[str, str]:
    """Return the statements that create the tables which all queues share, by table."""
    mysql = dialect.name == "mysql"
    text = "VARCHAR(64)" + (" CHARACTER SET utf8mb4 COLLATE utf8mb4_bin" if mysql else "")
    columns = {
        "turnlane_map": (
            f"queue {text} NOT NULL, version BIGINT NOT NULL, map TEXT NOT NULL, "
            "PRIMARY KEY (queue, version)"
        ),
        "turnlane_shard": (
            f"queue {text} PRIMARY KEY, shard_id {text} NOT NULL, "
            "batch BIGINT NOT NULL DEFAULT 0, plan TEXT"
        ),
        "turnlane_arrival": (
            f"queue {text} NOT NULL, source {text} NOT NULL, batch BIGINT NOT NULL DEFAULT 0, "
            "PRIMARY KEY (queue, source)"
        ),
    }
    return {
        name: f"CREATE TABLE IF NOT EXISTS {name} ({listed})" for name, listed in columns.items()
    }


def delete_shard_data(dialect: Dialect, queue: str, execute: Execute) -> None:
    """Delete the outbox, maps and plans of a dropped queue.

    A queue that is created again under the same name must not follow the old maps.
    """
    execute(f"DROP TABLE IF EXISTS {dialect.quote_name(OUTBOX_PREFIX + queue)}")
    for name, create in _get_shared_ddl(dialect).items():
        execute(create)  # it may not exist yet
        execute(f"DELETE FROM {name} WHERE queue = {dialect.placeholder}", (queue,))


class ShardTables:
    """``turnlane_map``, ``turnlane_shard``, ``turnlane_arrival`` and the outbox of one queue."""

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self.dialect = dialect
        self.definition = definition
        self.session = Session(dialect)
        self._name = definition.name
        self._is_prepared = False

    def prepare(self) -> None:
        """Create the tables, once; if they exist, no right to create tables is needed."""
        if self._is_prepared:
            return
        if not self._has_tables():
            for statement in self._get_ddl():
                self.change(statement)
        if not self._has_shard_row():
            try:
                self.change(
                    "INSERT INTO turnlane_shard (queue, shard_id) VALUES (%s, %s)",
                    *(self._name, uuid.uuid4().hex),
                )
            except self.dialect.error:
                if not self._has_shard_row():  # otherwise another process inserted it
                    raise
        self._is_prepared = True

    def _has_tables(self) -> bool:
        try:
            for name in (*_get_shared_ddl(self.dialect), "{outbox}"):
                self.query(f"SELECT 1 FROM {name} WHERE 1 = 0")
        except self.dialect.error:
            return False
        return True

    def _has_shard_row(self) -> bool:
        return bool(self.query("SELECT 1 FROM turnlane_shard WHERE queue = %s", self._name))

    def _get_ddl(self) -> list[str]:
        number = f"CAST(0 AS {'SIGNED' if self.dialect.name == 'mysql' else 'BIGINT'})"
        return [
            *_get_shared_ddl(self.dialect).values(),
            (
                f"CREATE TABLE IF NOT EXISTS {{outbox}} AS SELECT {number} AS batch, "
                f"{number} AS version, event_id, {{columns}} FROM {{table}} WHERE 1 = 0"
            ),
        ]

    def query(self, template: str, *parameters: object) -> list[Row]:
        """Run one statement; returns its rows."""
        return self.session.query(self.render(template), parameters)

    def change(self, template: str, *parameters: object) -> int:
        """Run one statement; returns how many rows it changed."""
        return self.session.change(self.render(template), parameters)

    def render(self, template: str) -> str:
        """Fill in the names of the tables and of the columns that move."""
        table = self.dialect.quote_name(self._name)
        by_id = get_queue_sql(self.dialect).get_index_hints(self.definition)[1]
        columns = get_transferred_columns(self.definition)
        return self.dialect.render(
            template,
            table=table,
            by_id=by_id,
            delete=begin_delete(table, by_id),
            outbox=self.dialect.quote_name(OUTBOX_PREFIX + self._name),
            columns=", ".join(map(self.dialect.quote_name, columns)),
        )


# ── the outbox ───────────────────────────────────────────────────────────────────────────────────


class Outbox:
    """Reads the outbox of one queue in one database."""

    def __init__(self, tables: ShardTables) -> None:
        self._tables = tables
        self._names = get_transferred_columns(tables.definition)

    def read_first_batch(self) -> TransferBatch | None:
        """Return the oldest batch; unreadable rows are dead letters in it."""
        found = self._tables.query(
            "SELECT batch, version, event_id FROM {outbox} "
            "WHERE batch = (SELECT MIN(batch) FROM {outbox}) ORDER BY fire_at, event_id"
        )
        if not found:
            return None
        number, version, _ = found[0]
        ids = [row[2] for row in found]
        rows, unreadable = find_unreadable_rows(self._tables.dialect, self._read_rows, ids)
        rows += [self._read_as_dead_letter(*each) for each in unreadable]
        positions = {event_id: at for at, event_id in enumerate(ids)}
        rows.sort(key=lambda row: positions[row[0]])
        return TransferBatch(number, version, [row[1:] for row in rows])

    def _read_rows(self, ids: Sequence[int]) -> list[Row]:
        condition, parameters = self._tables.dialect.match_ids(ids)
        statement = self._tables.render("SELECT event_id, {columns} FROM {outbox} WHERE event_id ")
        return self._tables.session.query(statement + condition, parameters)

    def _read_as_dead_letter(self, event_id: int, error: str) -> Row:
        """Read an unreadable row column by column; an acked event stays acked."""
        queue = self._tables.definition.name
        log.error("table.row_unreadable", queue=queue, event_id=event_id, error=error)
        row = {name: self._read_value(event_id, name) for name in self._names}
        if row["state"] != "acked":
            row |= {"state": "dead", "last_error": error}
        return (event_id, *row.values())

    def _read_value(self, event_id: int, name: str) -> Any:  # noqa: ANN401 - a column of any type
        dialect = self._tables.dialect
        column = dialect.quote_name(name)
        try:
            return self._read_expression(event_id, column)
        except dialect.error as error:
            if not dialect.is_unreadable(error):
                raise
        raw = self._read_expression(event_id, dialect.cast_to_raw(column))
        return raw.decode(errors="backslashreplace") if isinstance(raw, bytes) else raw

    def _read_expression(self, event_id: int, expression: str) -> Any:  # noqa: ANN401 - any type
        rest = self._tables.render("FROM {outbox} WHERE event_id = %s")
        return self._tables.session.query(f"SELECT {expression} {rest}", (event_id,))[0][0]
