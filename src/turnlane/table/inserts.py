"""Inserts: how events get into a queue table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from turnlane.table.definition import ENQUEUED, Definition
from turnlane.table.sql.dialect import Connection, Dialect, Row
from turnlane.table.sql.session import understood


class Inserts:
    """Inserts into one queue. Holds no connection; safe to use from any thread."""

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self.dialect = dialect
        self.definition = definition
        self._name = definition.name

    def enqueue(
        self, connection: Connection, row: Mapping[str, Any], delay: float | None = None
    ) -> int:
        """Insert one event in the transaction that ``connection`` is in; returns its id."""
        columns = tuple(row)
        self._check_columns(columns)
        names = [self.dialect.identifier(name) for name in columns]
        marks = [self.dialect.mark] * len(columns)
        values = list(row.values())
        if delay is not None:
            names.append("fire_at")
            marks.append(f"{self.dialect.now} + {self.dialect.mark}")
            values.append(round(delay * 1e9))
        cursor = connection.cursor()
        cursor.execute(self.statement(names, marks), tuple(values))
        if self.dialect.returning:
            return int(cursor.fetchone()[0])
        return int(cursor.lastrowid)

    def enqueue_many(self, connection: Connection, rows: Iterable[Mapping[str, Any]]) -> int:
        """Insert events in the transaction that ``connection`` is in; returns how many."""
        listed = list(rows)
        shapes: dict[tuple[str, ...], list[Row]] = {}
        for row in listed:
            shapes.setdefault(tuple(row), []).append(tuple(row.values()))
        for columns in shapes:
            self._check_columns(columns)
        for columns, values in shapes.items():
            self.dialect.insert_many(connection, self._name, columns, values)
        return len(listed)

    def insert(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert events in a transaction of the store's own."""
        with (
            understood(self.dialect),
            contextlib.closing(self.dialect.connect()) as connection,
            self.dialect.transaction(connection),
        ):
            self.enqueue_many(connection, rows)

    def check(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Raise ``ValueError`` for a column that an insert cannot set."""
        for columns in {tuple(row) for row in rows}:
            self._check_columns(columns)

    def statement(self, names: Sequence[str], marks: Sequence[str], rows: int = 1) -> str:
        """One that inserts rows and returns their ids, where the database does that."""
        if not names:
            names, marks = ["event_group"], ["NULL"]
        returning = " RETURNING event_id" if self.dialect.returning else ""
        values = ", ".join([f"({', '.join(marks)})"] * rows)
        table = self.dialect.identifier(self._name)
        return f"INSERT INTO {table} ({', '.join(names)}) VALUES {values}{returning}"

    def _check_columns(self, columns: Iterable[str]) -> None:
        allowed = (*self.definition.names, *ENQUEUED)
        for name in columns:
            if name not in allowed:
                raise ValueError(
                    f"{name!r} is not a column that an insert into {self._name!r} sets"
                )
