"""Writers that commit each batch exactly once: staging, the record of batches, and the gate.

**Staging.** Several writers, on several machines, *stage* rows beside a queue table. Then one of
them moves all stages of a batch into the table, in one transaction that also records the number of
the batch (its *epoch*) in ``turnlane_writer``. A batch whose number is the last recorded one is not
moved again. So a batch that was interrupted anywhere can be repeated from its beginning.

**Delivered ranges.** The ``table`` output records the ranges of offsets that it delivered, in
``turnlane_delivered``, in the transaction that inserts the rows.

**The gate.** Both records belong to the database that the writer wrote to, so they move along when
a shard is split or merged. A reshard closes the gates of the old shards, copies the records, and
only then opens the gates of the new shards: no batch is recorded where no writer will look for it.
The gate is a row of ``turnlane_writer``; a commit locks it against changes. When shards are merged,
only progress that all of them recorded counts: a writer that was interrupted between two of them
writes some events twice, and loses none.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from turnlane.databases import Dialect, Execute, Row, Session
from turnlane.errors import RetryLater, WriterAhead
from turnlane.runtime import Closeable
from turnlane.table.definition import INSERT_COLUMNS, Definition
from turnlane.table.queue_sql import get_queue_sql, get_table_options

STAGE_RETENTION: Final = 7 * 86_400
"""Seconds after which stages are deleted that were neither committed nor discarded."""

STAGE_PREFIX: Final = "turnlane_stage_"
STAGE_COLUMNS: Final = ("stage", "number")

GATE_JOB: Final = ""
"""The ``job`` of the gate's row; no writer has this name. Epoch 0: the gate is open; 1: closed."""

RETRY_AFTER: Final = 1.0
"""Seconds until clients know the new map."""

DELIVERED_TABLE: Final = "turnlane_delivered"
_DELIVERED_COLUMNS: Final = ("target", "queue", "partition", "first", "end")


def get_job_id(writer: str | None) -> str:
    """Return the id of all stages of a writer; a random one if the writer has no name."""
    return uuid.uuid4().hex if writer is None else hashlib.sha256(writer.encode()).hexdigest()[:32]


def get_writer_ddl(dialect: Dialect) -> str:
    """Return the statement that creates ``turnlane_writer``, unless it exists."""
    return (
        "CREATE TABLE IF NOT EXISTS turnlane_writer (queue VARCHAR(64) NOT NULL, "
        "job VARCHAR(32) NOT NULL, epoch BIGINT NOT NULL, PRIMARY KEY (queue, job))"
        + get_table_options(dialect)
    )


def delete_batch_data(dialect: Dialect, queue: str, execute: Execute) -> None:
    """Delete the stages of a dropped queue, and the records of its writers."""
    execute(f"DROP TABLE IF EXISTS {dialect.quote_name(STAGE_PREFIX + queue)}")
    execute(get_writer_ddl(dialect))  # it may not exist yet
    execute(f"DELETE FROM turnlane_writer WHERE queue = {dialect.placeholder}", (queue,))


# ── the gate ─────────────────────────────────────────────────────────────────────────────────────


class WriterGate:
    """The gate of one queue in one database. Holds no connection."""

    def __init__(self, dialect: Dialect, queue: str) -> None:
        self._dialect = dialect
        self._queue = queue

    def prepare(self, execute: Execute) -> None:
        """Create the gate's row and its table if they are missing; a new gate is open."""
        execute(get_writer_ddl(self._dialect))
        begin, end = self._dialect.insert_or_ignore
        insert = f"{begin} turnlane_writer (queue, job, epoch) VALUES (%s, %s, 0) {end}"
        execute(self._dialect.render(insert), (self._queue, GATE_JOB))

    def pass_through(self, execute: Execute) -> None:
        """Keep the gate open until this transaction ends. Raises ``RetryLater`` if it is closed."""
        if self.is_closed(execute, self._dialect.share):
            raise RetryLater(
                f"{self._queue!r} is being resharded: read its new map and try again",
                after=RETRY_AFTER,
            )

    def exists(self, execute: Execute) -> bool:
        """Whether the gate's row exists; the driver's error if the table does not."""
        return bool(self._read(execute))

    def is_closed(self, execute: Execute, lock: str = "") -> bool:
        """Whether writers have to wait."""
        found = self._read(execute, lock)
        return bool(found and found[0][0])

    def set_closed(self, execute: Execute, *, closed: bool) -> None:
        """Let writers pass, or wait for commits that are under way and let no other pass."""
        update = "UPDATE turnlane_writer SET epoch = %s WHERE queue = %s AND job = %s"
        execute(self._dialect.render(update), (int(closed), self._queue, GATE_JOB))

    def _read(self, execute: Execute, lock: str = "") -> list[Row]:
        select = f"SELECT epoch FROM turnlane_writer WHERE queue = %s AND job = %s {lock}"
        return execute(self._dialect.render(select), (self._queue, GATE_JOB)).rows()


# ── staging ──────────────────────────────────────────────────────────────────────────────────────


class BatchStaging(Closeable):
    """The stages of one queue in one database. Thread-safe.

    Every call may raise ``DatabaseDown`` or ``DatabaseReadOnly``, and may be repeated.
    """

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self.dialect = dialect
        self.definition = definition
        self._session = Session(dialect)
        self._gate = WriterGate(dialect, definition.name)
        self._columns = (*INSERT_COLUMNS, *definition.column_names)
        self._is_prepared = False

    def close(self) -> None:
        self._session.close()

    def add(self, stage: str, first: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows to a stage; ``first`` is the number of the first one."""
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
        """Move stages into the table and delete all others of the job; returns how many events.

        Moves nothing if its ``writer``, by default the job, committed the batch ``epoch`` last;
        raises ``WriterAhead`` if the writer committed a later one. Leaves out events whose names
        are in the table. With an ``epoch``, raises ``RetryLater`` while the queue is being
        resharded: in the new map, the batch may belong to another database.
        """
        self._prepare()

        def work(execute: Execute) -> int:
            if epoch is not None:
                self._gate.pass_through(execute)
            if epoch is not None and not self._record_epoch(execute, writer or job, epoch):
                moved = 0
            else:
                move = self._build_move()
                moved = sum(execute(move, (stage,)).count for stage in sorted(stages))
            self._delete_stages(execute, job)
            return moved

        return self._session.transact(work)

    def discard(self, job: str) -> None:
        """Delete all stages of a job."""
        self._prepare()
        self._session.transact(lambda execute: self._delete_stages(execute, job))

    def _record_epoch(self, execute: Execute, writer: str, epoch: int) -> bool:
        """Record a batch; false if it is the last recorded one."""
        key = (self.definition.name, get_job_id(writer))
        select = "SELECT epoch FROM turnlane_writer WHERE queue = %s AND job = %s {lock}"
        found = execute(self._render(select), key).rows()
        if found and found[0][0] > epoch:
            raise WriterAhead.of(writer, found[0][0], epoch)
        if found and found[0][0] == epoch:
            return False
        change = (
            "UPDATE turnlane_writer SET epoch = %s WHERE queue = %s AND job = %s"
            if found
            else "INSERT INTO turnlane_writer (epoch, queue, job) VALUES (%s, %s, %s)"
        )
        execute(self._render(change), (epoch, *key))
        return True

    def _build_move(self) -> str:
        begin, end = self.dialect.insert_or_ignore
        defaults = {"fire_at": "{now}", "priority": "0"}
        values = [
            f"COALESCE({name}, {defaults[name]})" if name in defaults else name
            for name in INSERT_COLUMNS
        ]
        return self._render(
            f"{begin} {{table}} ({', '.join(INSERT_COLUMNS)}, {{users}}) "
            f"SELECT {', '.join(values)}, {{users}} FROM {{stages}} "
            f"WHERE stage = %s ORDER BY number {end}"
        )

    def _delete_stages(self, execute: Execute, job: str) -> None:
        execute(
            self._render("DELETE FROM {stages} WHERE stage LIKE %s OR staged_at < {now} - %s"),
            (f"{job}/%", STAGE_RETENTION * 10**9),
        )

    def _prepare(self) -> None:
        """Create the tables, once."""
        if self._is_prepared:
            return
        create_stages = (
            "CREATE TABLE IF NOT EXISTS {stages} (stage VARCHAR(80) NOT NULL, "
            "number BIGINT NOT NULL, staged_at BIGINT NOT NULL DEFAULT {now}, "
            "fire_at BIGINT, priority SMALLINT, event_name VARCHAR(255), "
            "event_group VARCHAR(255), after_group VARCHAR(255), {declared}, "
            f"PRIMARY KEY (stage, number)){get_table_options(self.dialect)}"
        )
        self._session.change(self._render(create_stages))
        self._session.transact(self._gate.prepare)
        self._is_prepared = True

    def _render(self, template: str) -> str:
        dialect, definition = self.dialect, self.definition
        columns = ", ".join(map(get_queue_sql(dialect).declare_column, definition.columns))
        return dialect.render(
            template,
            table=dialect.quote_name(definition.name),
            stages=dialect.quote_name(STAGE_PREFIX + definition.name),
            users=", ".join(map(dialect.quote_name, definition.column_names)),
            declared=columns.replace("%", dialect.percent),
        )


# ── progress, for a reshard ──────────────────────────────────────────────────────────────────────

Stream = tuple[str, int]
"""A queue of a node, and its partition."""
Spans = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class WriterProgress:
    """The progress of all writers that one database has recorded."""

    batches: dict[str, int] = field(default_factory=dict)
    """The last batch of each writer, by job."""
    delivered: dict[Stream, Spans] = field(default_factory=dict)
    """The delivered ranges of offsets."""

    def find_common(self, other: WriterProgress) -> WriterProgress:
        """Return the progress that both databases have recorded."""
        batches = {
            job: min(epoch, other.batches[job])
            for job, epoch in self.batches.items()
            if job in other.batches
        }
        delivered = {
            stream: intersect_spans(spans, other.delivered[stream])
            for stream, spans in self.delivered.items()
            if stream in other.delivered
        }
        return WriterProgress(batches, delivered)


def intersect_spans(one: Spans, other: Spans) -> Spans:
    """Return the intersection of two lists of spans."""
    common = (
        (max(first, start), min(end, stop))
        for first, end in one
        for start, stop in other
        if first < stop and start < end
    )
    return sorted(common)


class ProgressTable(Closeable):
    """The recorded progress and the gate of one queue in one database. Calls may be repeated."""

    def __init__(self, dialect: Dialect, queue: str) -> None:
        self._dialect = dialect
        self._queue = queue
        self._gate = WriterGate(dialect, queue)
        self._session = Session(dialect)

    def close(self) -> None:
        self._session.close()

    def read(self) -> WriterProgress:
        """Return the progress that is recorded now."""
        self._session.transact(self._gate.prepare)
        batches = "SELECT job, epoch FROM turnlane_writer WHERE queue = %s AND job <> %s"
        rows = self._session.query(self._render(batches), (self._queue, GATE_JOB))
        return WriterProgress({row[0]: row[1] for row in rows}, self._read_delivered())

    def close_gate(self) -> None:
        """Let no writer record anything here any more."""
        self._session.transact(self._gate.prepare)
        self._session.transact(lambda execute: self._gate.set_closed(execute, closed=True))

    def is_gate_closed(self) -> bool:
        """Whether no writer can record anything here."""
        self._session.transact(self._gate.prepare)
        return self._session.transact(self._gate.is_closed)

    def replace_and_open(self, progress: WriterProgress) -> None:
        """Record the progress of other databases and open the gate; nothing if it is open."""
        if progress.delivered:
            self._session.change(
                self._render(
                    f"CREATE TABLE IF NOT EXISTS {DELIVERED_TABLE} ("
                    "{target} VARCHAR(200) NOT NULL, {queue} VARCHAR(200) NOT NULL, "
                    "{partition} INTEGER NOT NULL, {first} BIGINT NOT NULL, {end} BIGINT NOT NULL, "
                    "PRIMARY KEY ({target}, {queue}, {partition}, {first}))"
                )
            )

        def work(execute: Execute) -> None:
            if not self._gate.is_closed(execute, self._dialect.lock):
                return
            delete = "DELETE FROM turnlane_writer WHERE queue = %s AND job <> %s"
            execute(self._render(delete), (self._queue, GATE_JOB))
            insert = "INSERT INTO turnlane_writer (queue, job, epoch) VALUES (%s, %s, %s)"
            for job, epoch in progress.batches.items():
                execute(self._render(insert), (self._queue, job, epoch))
            if progress.delivered:
                delete = f"DELETE FROM {DELIVERED_TABLE} WHERE {{target}} = %s"
                execute(self._render(delete), (self._queue,))
                rows: Sequence[tuple[object, ...]] = [
                    (self._queue, *stream, *span)
                    for stream, spans in progress.delivered.items()
                    for span in spans
                ]
                if rows:
                    self._session.insert_many(DELIVERED_TABLE, _DELIVERED_COLUMNS, rows)
            self._gate.set_closed(execute, closed=False)

        self._session.transact(work)

    def _read_delivered(self) -> dict[Stream, Spans]:
        select = "SELECT {queue}, {partition}, {first}, {end} FROM "
        select += f"{DELIVERED_TABLE} WHERE {{target}} = %s"
        try:
            rows = self._session.query(self._render(select), (self._queue,))
        except self._dialect.error:
            return {}  # the table does not exist: no output has needed it
        found: dict[Stream, Spans] = {}
        for queue, partition, first, end in rows:
            found.setdefault((queue, partition), []).append((first, end))
        return found

    def _render(self, template: str) -> str:
        names = {name: self._dialect.quote_name(name) for name in _DELIVERED_COLUMNS}
        return self._dialect.render(template, **names)
