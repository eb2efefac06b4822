"""Staging: rows that wait beside a queue table until a whole batch of them is committed.

Several writers, on several machines, *stage* rows; then one of them moves all stages of the batch
into the table, in one transaction that also notes the batch's number. A batch whose number was
noted last is not moved again, so one that was cut off anywhere may be repeated from its beginning.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from turnlane.errors import WriterAhead
from turnlane.runtime import Closing
from turnlane.table.definition import INSERT_COLUMNS, Definition
from turnlane.table.notes import WriterGate, get_writer_ddl
from turnlane.table.sql.dialect import Dialect
from turnlane.table.sql.session import Execute, Session

STAGE_RETENTION: Final = 7 * 86_400
"""Seconds after which stages that nobody has committed or given up are deleted."""

STAGE_PREFIX: Final = "turnlane_stage_"
STAGE_COLUMNS: Final = ("stage", "number")


def get_job_id(writer: str | None) -> str:
    """A name for all stages of a writer; another one every time if it has no name."""
    return uuid.uuid4().hex if writer is None else hashlib.sha256(writer.encode()).hexdigest()[:32]


def delete_staged_rows(dialect: Dialect, queue: str, execute: Execute) -> None:
    """Remove all stages of a queue that is dropped, and what was noted of its writers."""
    execute(f"DROP TABLE IF EXISTS {dialect.identifier(STAGE_PREFIX + queue)}")
    execute(get_writer_ddl(dialect))  # which nobody may have needed so far
    execute(f"DELETE FROM turnlane_writer WHERE queue = {dialect.mark}", (queue,))


def _end(dialect: Dialect) -> str:
    """What the declaration of a table ends with."""
    names = "ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
    return names if dialect.name == "mysql" else ""


class BatchStaging(Closing):
    """The stages of one queue in one database. Safe to use from any thread.

    Every call may raise ``DatabaseDown`` or ``DatabaseReadOnly``, and may be repeated.
    """

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self.dialect = dialect
        self.definition = definition
        self._session = Session(dialect)
        self._gate = WriterGate(dialect, definition.name)
        self._columns = (*INSERT_COLUMNS, *definition.names)
        self._prepared = False

    def close(self) -> None:
        self._session.close()

    def add(self, stage: str, first: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows to a stage, as its ``first`` and the following."""
        self._prepare()
        names = (*STAGE_COLUMNS, *self._columns)
        values = [
            (stage, number, *map(row.get, self._columns))
            for number, row in enumerate(rows, start=first)
        ]

        def work(execute: Execute) -> None:
            del execute
            self._session.insert_many(STAGE_PREFIX + self.definition.name, names, values)

        self._session.transact(work)

    def commit(
        self, job: str, stages: Sequence[str], epoch: int | None = None, writer: str | None = None
    ) -> int:
        """Move stages into the table and forget all others of the job; how many events.

        None if the batch ``epoch`` was the last that its ``writer``, by default the job, has
        committed; raises ``WriterAhead`` if that has committed a later one. An event whose name is
        in the table is left out. Raises ``RetryLater`` while the queue is being resharded, if there
        is an ``epoch``: by another map, the batch may belong elsewhere.
        """
        self._prepare()

        def work(execute: Execute) -> int:
            if epoch is not None:
                self._gate.pass_through(execute)
            if epoch is not None and not self._note(execute, writer or job, epoch):
                moved = 0
            else:
                moved = sum(execute(self._move(), (stage,)).count for stage in sorted(stages))
            self._forget(execute, job)
            return moved

        return self._session.transact(work)

    def discard(self, job: str) -> None:
        """Give up all stages of a job."""
        self._prepare()
        self._session.transact(lambda execute: self._forget(execute, job))

    # ── how ──────────────────────────────────────────────────────────────────────────────────────

    def _note(self, execute: Execute, writer: str, epoch: int) -> bool:
        """Note a batch; false if it is the last that was noted."""
        key = (self.definition.name, get_job_id(writer))
        found = execute(
            self._sql("SELECT epoch FROM turnlane_writer WHERE queue = %s AND job = %s {lock}"), key
        ).rows()
        if found and found[0][0] > epoch:
            raise WriterAhead.of(writer, found[0][0], epoch)
        if found and found[0][0] == epoch:
            return False
        change = (
            "UPDATE turnlane_writer SET epoch = %s WHERE queue = %s AND job = %s"
            if found
            else "INSERT INTO turnlane_writer (epoch, queue, job) VALUES (%s, %s, %s)"
        )
        execute(self._sql(change), (epoch, *key))
        return True

    def _move(self) -> str:
        begin, end = self.dialect.skipping
        defaults = {"fire_at": "{now}", "priority": "0"}
        values = [
            f"COALESCE({name}, {defaults[name]})" if name in defaults else name
            for name in INSERT_COLUMNS
        ]
        return self._sql(
            f"{begin} {{table}} ({', '.join(INSERT_COLUMNS)}, {{own}}) "
            f"SELECT {', '.join(values)}, {{own}} FROM {{stages}} "
            f"WHERE stage = %s ORDER BY number {end}"
        )

    def _forget(self, execute: Execute, job: str) -> None:
        execute(
            self._sql("DELETE FROM {stages} WHERE stage LIKE %s OR staged_at < {now} - %s"),
            (f"{job}/%", STAGE_RETENTION * 10**9),
        )

    def _prepare(self) -> None:
        """Make the tables, once."""
        if self._prepared:
            return
        for statement in self._tables():
            try:
                self._session.change(self._sql(statement))
            except self.dialect.error:
                # Two at the same time: PostgreSQL tells one of them that it is there, as an error.
                self._session.change(self._sql(statement))
        self._session.transact(self._gate.prepare)
        self._prepared = True

    def _tables(self) -> list[str]:
        return [
            (
                "CREATE TABLE IF NOT EXISTS {stages} (stage VARCHAR(80) NOT NULL, "
                "number BIGINT NOT NULL, staged_at BIGINT NOT NULL DEFAULT {now}, "
                "fire_at BIGINT, priority SMALLINT, event_name VARCHAR(255), "
                "event_group VARCHAR(255), after_group VARCHAR(255), {declared}, "
                f"PRIMARY KEY (stage, number)) {_end(self.dialect)}"
            ),
            get_writer_ddl(self.dialect),
        ]

    def _sql(self, template: str) -> str:
        dialect, definition = self.dialect, self.definition
        columns = ", ".join(map(dialect.own_columns, definition.columns))
        return dialect.sql(
            template,
            table=dialect.identifier(definition.name),
            stages=dialect.identifier(STAGE_PREFIX + definition.name),
            own=", ".join(map(dialect.identifier, definition.names)),
            declared=columns.replace("%", dialect.percent),
        )
