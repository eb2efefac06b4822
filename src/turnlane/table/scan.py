"""Scans: reading a queue table as it is, beside its manager, in one statement.

A scan takes no lock and no part in firing: whoever manages the table does not notice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final

from turnlane.table.definition import OWN_COLUMNS, Definition
from turnlane.table.selection import Selection
from turnlane.table.sql.dialect import Dialect, Row
from turnlane.table.sql.session import understood

PAGE: Final = 10_000
"""Rows that are in memory at a time."""


class Scan:
    """Reads the events of one queue in one database, every column of theirs."""

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self._dialect = dialect
        self._definition = definition
        self.columns: tuple[str, ...] = (*OWN_COLUMNS, *definition.names)
        """All there are, turnlane's own first."""

    def pages(
        self,
        selection: Selection,
        columns: Sequence[str] | None = None,
        *,
        first: int | None = None,
        size: int = PAGE,
    ) -> Generator[list[Row], None, None]:
        """The rows, as they are at one moment, some at a time.

        Only the ``first`` so many by fire time, if that is given; otherwise all, in any order.
        Raises ``DatabaseDown``.
        """
        statement, parameters = self._statement(selection, columns or self.columns, first)
        with (
            understood(self._dialect),
            contextlib.closing(self._dialect.connect()) as connection,
        ):
            yield from self._dialect.stream(connection, statement, parameters, size)

    def events(self, selection: Selection, first: int | None = None) -> Iterator[dict[str, Any]]:
        """The rows, as columns by their names."""
        for page in self.pages(selection, first=first):
            yield from (dict(zip(self.columns, row, strict=True)) for row in page)

    def ids(self, selection: Selection, first: int | None = None) -> list[int]:
        """Their ids."""
        pages = self.pages(selection, ("event_id",), first=first)
        return [row[0] for page in pages for row in page]

    def _statement(
        self, selection: Selection, columns: Sequence[str], first: int | None
    ) -> tuple[str, Row]:
        dialect = self._dialect
        own = [self._expression(name) for name in columns]
        condition, parameters = selection.where(dialect, self._definition)
        table = dialect.identifier(self._definition.name)
        statement = f"SELECT {', '.join(own)} FROM {table} WHERE {condition}"
        if first is not None:
            statement += f" ORDER BY fire_at, event_id LIMIT {int(first)}"
        return statement, parameters

    def _expression(self, name: str) -> str:
        if name == "keyspace_id":
            return self._dialect.keyspace(self._definition)
        return self._dialect.identifier(name)
