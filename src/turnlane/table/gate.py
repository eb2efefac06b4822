"""The gate of those who write whole batches to a queue, once each: open, or shut for a reshard.

What a writer has committed is noted in the database that it wrote to. When a reshard moves on, the
gates of the old shards are shut, the notes are copied, and only then the gates of the new ones
open: so no batch is noted where nobody will look for it. A gate is a row of ``turnlane_writer``
beside the notes; a commit holds it in place.
"""

from __future__ import annotations

from typing import Final

from turnlane.errors import RetryLater
from turnlane.table.sql.dialect import Dialect, Row
from turnlane.table.sql.session import Execute

GATE: Final = ""
"""The row's ``job``; no writer has this name. Its epoch is 0 if the gate is open, else 1."""

AFTER: Final = 1.0
"""Seconds: by then clients know the new map."""


class Gate:
    """One queue's gate in one database. Holds no connection."""

    def __init__(self, dialect: Dialect, queue: str) -> None:
        self._dialect = dialect
        self._queue = queue

    def prepare(self, execute: Execute) -> None:
        """Make the row, and the table that it is in; the gate is open, unless it was shut."""
        execute(writers(self._dialect))
        begin, end = self._dialect.skipping
        self._run(
            execute,
            f"{begin} turnlane_writer (queue, job, epoch) VALUES (%s, %s, 0) {end}",
        )

    def pass_through(self, execute: Execute) -> None:
        """Keep it open until this transaction is over. Raises ``RetryLater`` if it is shut."""
        if self.is_shut(execute, self._dialect.share):
            raise RetryLater(
                f"{self._queue!r} is being resharded: look for its new map", after=AFTER
            )

    def is_there(self, execute: Execute) -> bool:
        """Whether there is the row; the driver's error if there is not even the table."""
        return bool(self._look(execute))

    def is_shut(self, execute: Execute, lock: str = "") -> bool:
        """Whether nobody may write."""
        found = self._look(execute, lock)
        return bool(found and found[0][0])

    def shut(self, execute: Execute) -> None:
        """Wait for commits that are under way, and let no other pass."""
        self._run(execute, "UPDATE turnlane_writer SET epoch = 1 WHERE queue = %s AND job = %s")

    def open(self, execute: Execute) -> None:
        """Let writers pass."""
        self._run(execute, "UPDATE turnlane_writer SET epoch = 0 WHERE queue = %s AND job = %s")

    def _look(self, execute: Execute, lock: str = "") -> list[Row]:
        statement = f"SELECT epoch FROM turnlane_writer WHERE queue = %s AND job = %s {lock}"
        placed = statement.replace("%s", self._dialect.mark)
        return execute(placed, (self._queue, GATE)).rows()

    def _run(self, execute: Execute, statement: str) -> None:
        execute(statement.replace("%s", self._dialect.mark), (self._queue, GATE))


def writers(dialect: Dialect) -> str:
    """The statement that makes the table of gates and notes, unless it is there."""
    names = "ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
    return (
        "CREATE TABLE IF NOT EXISTS turnlane_writer (queue VARCHAR(64) NOT NULL, "
        "job VARCHAR(32) NOT NULL, epoch BIGINT NOT NULL, PRIMARY KEY (queue, job)) "
        + (names if dialect.name == "mysql" else "")
    )
