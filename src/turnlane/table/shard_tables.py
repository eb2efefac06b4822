"""The tables that a database has for a queue with several: made when they are needed."""

from __future__ import annotations

import uuid
from typing import Final

from turnlane.table.definition import Definition
from turnlane.table.letters import columns_of
from turnlane.table.sql.dialect import Dialect, Row
from turnlane.table.sql.session import Execute, Session
from turnlane.table.statements import delete_from

PREFIX: Final = "turnlane_move_"
"""Of the outboxes' names."""


def clear_shards(dialect: Dialect, queue: str, execute: Execute) -> None:
    """Remove all that is kept of the shards of a queue that is dropped.

    Its maps too: one that is made anew under the same name has nothing to do with them.
    """
    execute(f"DROP TABLE IF EXISTS {dialect.identifier(PREFIX + queue)}")
    for name, statement in _bookkeeping(dialect).items():
        execute(statement)  # which nobody may have needed so far
        execute(f"DELETE FROM {name} WHERE queue = {dialect.mark}", (queue,))


def _bookkeeping(dialect: Dialect) -> dict[str, str]:
    """Statements that make the tables which all queues share, by their names."""
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


class ShardTables:
    """``turnlane_map``, ``turnlane_shard``, ``turnlane_arrival`` and the outbox of one queue."""

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self.dialect = dialect
        self.definition = definition
        self.session = Session(dialect)
        self._name = definition.name
        self._prepared = False

    def prepare(self) -> None:
        """Make the tables, once; who finds them there needs no right to make any."""
        if self._prepared:
            return
        if not self._are_there():
            for statement in self._tables():
                self.change(statement)
        if not self._is_known():
            try:
                self.change(
                    "INSERT INTO turnlane_shard (queue, shard_id) VALUES (%s, %s)",
                    *(self._name, uuid.uuid4().hex),
                )
            except self.dialect.error:
                if not self._is_known():  # else another was quicker
                    raise
        self._prepared = True

    def _are_there(self) -> bool:
        try:
            for name in (*_bookkeeping(self.dialect), "{outbox}"):
                self.query(f"SELECT 1 FROM {name} WHERE 1 = 0")
        except self.dialect.error:
            return False
        return True

    def _is_known(self) -> bool:
        return bool(self.query("SELECT 1 FROM turnlane_shard WHERE queue = %s", self._name))

    def _tables(self) -> list[str]:
        number = f"CAST(0 AS {'SIGNED' if self.dialect.name == 'mysql' else 'BIGINT'})"
        return [
            *_bookkeeping(self.dialect).values(),
            (
                f"CREATE TABLE IF NOT EXISTS {{outbox}} AS SELECT {number} AS batch, "
                f"{number} AS version, event_id, {{columns}} FROM {{table}} WHERE 1 = 0"
            ),
        ]

    def query(self, template: str, *parameters: object) -> list[Row]:
        """The rows of one statement."""
        return self.session.query(self.sql(template), parameters)

    def change(self, template: str, *parameters: object) -> int:
        """How many rows one statement changed."""
        return self.session.change(self.sql(template), parameters)

    def sql(self, template: str) -> str:
        """A statement with the names of the tables and of the columns that are moved."""
        table, by_id = self.dialect.identifier(self._name), self.dialect.hints(self.definition)[1]
        return self.dialect.sql(
            template,
            table=table,
            by_id=by_id,
            delete=delete_from(table, by_id),
            outbox=self.dialect.identifier(PREFIX + self._name),
            columns=", ".join(map(self.dialect.identifier, columns_of(self.definition))),
        )
