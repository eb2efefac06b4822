"""The outbox: events on their way to another shard, read past what cannot be read.

A row that the driver cannot give must not stop a reshard. Of such a row each column is read by
itself, and one that cannot be as the text that the database has for it. It arrives as a dead
letter, as it would have become where it was.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from turnlane.table.letters import Batch, columns_of
from turnlane.table.salvage import halve
from turnlane.table.shard_tables import ShardTables
from turnlane.table.sql.dialect import Row

log = logging.getLogger(__name__)


class Outbox:
    """The outbox of one queue in one database, as far as it is read."""

    def __init__(self, tables: ShardTables) -> None:
        self._tables = tables
        self._names = columns_of(tables.definition)

    def first_batch(self) -> Batch | None:
        """The oldest batch."""
        found = self._tables.query(
            "SELECT batch, version, event_id FROM {outbox} "
            "WHERE batch = (SELECT MIN(batch) FROM {outbox}) ORDER BY fire_at, event_id"
        )
        if not found:
            return None
        number, version, _ = found[0]
        ids = [row[2] for row in found]
        rows, broken = halve(self._tables.dialect, self._read, ids)
        rows += [self._dead(*each) for each in broken]
        place = {event_id: at for at, event_id in enumerate(ids)}
        rows.sort(key=lambda row: place[row[0]])
        return Batch(number, version, [row[1:] for row in rows])

    def _read(self, ids: Sequence[int]) -> list[Row]:
        condition, parameters = self._tables.dialect.ids(ids)
        statement = self._tables.sql("SELECT event_id, {columns} FROM {outbox} WHERE event_id ")
        return self._tables.session.query(statement + condition, parameters)

    def _dead(self, event_id: int, error: str) -> Row:
        """A row that cannot be read, as a dead letter; one that was acked stays so."""
        log.error("queue %s: event %d: %s", self._tables.definition.name, event_id, error)
        row = {name: self._value(event_id, name) for name in self._names}
        if row["state"] != "acked":
            row |= {"state": "dead", "last_error": error}
        return (event_id, *row.values())

    def _value(self, event_id: int, name: str) -> Any:  # noqa: ANN401 - whatever a column holds
        dialect = self._tables.dialect
        column = dialect.identifier(name)
        try:
            return self._column(event_id, column)
        except dialect.error as error:
            if not dialect.is_unreadable(error):
                raise
        raw = self._column(event_id, dialect.raw(column))
        return raw.decode(errors="backslashreplace") if isinstance(raw, bytes) else raw

    def _column(self, event_id: int, expression: str) -> Any:  # noqa: ANN401 - likewise
        rest = self._tables.sql("FROM {outbox} WHERE event_id = %s")
        return self._tables.session.query(f"SELECT {expression} {rest}", (event_id,))[0][0]
