"""Notes: which batches and events a shard's database was given, for those who give them once.

They go along when a shard is split or merged. Of shards that become one, what all of them have got
counts as given: a writer that was cut off between two of them gives some events twice, and loses
none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Final

from turnlane.errors import RetryLater
from turnlane.runtime import Closing
from turnlane.table.sql.dialect import Dialect, Row
from turnlane.table.sql.session import Execute, Session

# ── gate ──
# The gate of those who write whole batches to a queue, once each: open, or shut for a reshard.
#
# What a writer has committed is noted in the database that it wrote to. When a reshard moves on,
# the
# gates of the old shards are shut, the notes are copied, and only then the gates of the new ones
# open: so no batch is noted where nobody will look for it. A gate is a row of
# ``turnlane_writer``
# beside the notes; a commit holds it in place.

GATE_JOB: Final = ""
"""The row's ``job``; no writer has this name. Its epoch is 0 if the gate is open, else 1."""

RETRY_AFTER: Final = 1.0
"""Seconds: by then clients know the new map."""


class WriterGate:
    """One queue's gate in one database. Holds no connection."""

    def __init__(self, dialect: Dialect, queue: str) -> None:
        self._dialect = dialect
        self._queue = queue

    def prepare(self, execute: Execute) -> None:
        """Make the row, and the table that it is in; the gate is open, unless it was shut."""
        execute(get_writer_ddl(self._dialect))
        begin, end = self._dialect.skipping
        self._run(
            execute,
            f"{begin} turnlane_writer (queue, job, epoch) VALUES (%s, %s, 0) {end}",
        )

    def pass_through(self, execute: Execute) -> None:
        """Keep it open until this transaction is over. Raises ``RetryLater`` if it is shut."""
        if self.is_shut(execute, self._dialect.share):
            raise RetryLater(
                f"{self._queue!r} is being resharded: look for its new map", after=RETRY_AFTER
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
        return execute(placed, (self._queue, GATE_JOB)).rows()

    def _run(self, execute: Execute, statement: str) -> None:
        execute(statement.replace("%s", self._dialect.mark), (self._queue, GATE_JOB))


def get_writer_ddl(dialect: Dialect) -> str:
    """The statement that makes the table of gates and notes, unless it is there."""
    names = "ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
    return (
        "CREATE TABLE IF NOT EXISTS turnlane_writer (queue VARCHAR(64) NOT NULL, "
        "job VARCHAR(32) NOT NULL, epoch BIGINT NOT NULL, PRIMARY KEY (queue, job)) "
        + (names if dialect.name == "mysql" else "")
    )


DELIVERED_TABLE: Final = "turnlane_delivered"
"""Where outputs note what they delivered: ranges of offsets."""

Stream = tuple[str, int]
"""A queue of a node's, and its partition."""
Spans = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class WriterProgress:
    """What is noted in one database."""

    batches: dict[str, int] = field(default_factory=dict)
    """The last batch of each writer."""
    delivered: dict[Stream, Spans] = field(default_factory=dict)

    def common(self, other: WriterProgress) -> WriterProgress:
        """What both databases have got."""
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


def find_common_progress(noted: Iterable[WriterProgress]) -> WriterProgress:
    """What all databases have got."""
    return reduce(WriterProgress.common, noted)


def intersect_spans(one: Spans, other: Spans) -> Spans:
    """What lies in both of two lists of spans."""
    met = (
        (max(first, start), min(end, stop))
        for first, end in one
        for start, stop in other
        if first < stop and start < end
    )
    return sorted(met)


class ProgressTable(Closing):
    """The notes and the gate of one queue in one database. Every call may be repeated."""

    def __init__(self, dialect: Dialect, queue: str) -> None:
        self._dialect = dialect
        self._queue = queue
        self._gate = WriterGate(dialect, queue)
        self._session = Session(dialect)
        names = map(dialect.identifier, ("target", "queue", "partition", "first", "end"))
        self._target, self._of, self._partition, self._first, self._end = names

    def close(self) -> None:
        self._session.close()

    def read(self) -> WriterProgress:
        """What is noted now."""
        batches = "SELECT job, epoch FROM turnlane_writer WHERE queue = %s AND job <> %s"
        self._session.transact(self._gate.prepare)
        rows = self._session.query(self._sql(batches), (self._queue, GATE_JOB))
        return WriterProgress({row[0]: row[1] for row in rows}, self._read_delivered())

    def shut(self) -> None:
        """Let nobody note anything here any more."""
        self._session.transact(self._gate.prepare)
        self._session.transact(self._gate.shut)

    @property
    def are_shut(self) -> bool:
        """Whether nobody can note anything here."""
        self._session.transact(self._gate.prepare)
        return self._session.transact(self._gate.is_shut)

    def arrive(self, noted: WriterProgress) -> None:
        """Take over what was noted elsewhere, and let writers pass; nothing if they do already."""
        if noted.delivered:
            self._make_delivered()

        def work(execute: Execute) -> None:
            if not self._gate.is_shut(execute, self._dialect.lock):
                return
            self._replace_batches(execute, noted.batches)
            if noted.delivered:
                self._replace_delivered(execute, noted.delivered)
            self._gate.open(execute)

        self._session.transact(work)

    # ── how ──────────────────────────────────────────────────────────────────────────────────────

    def _replace_batches(self, execute: Execute, batches: dict[str, int]) -> None:
        gone = "DELETE FROM turnlane_writer WHERE queue = %s AND job <> %s"
        execute(self._sql(gone), (self._queue, GATE_JOB))
        for job, epoch in batches.items():
            added = "INSERT INTO turnlane_writer (queue, job, epoch) VALUES (%s, %s, %s)"
            execute(self._sql(added), (self._queue, job, epoch))

    def _read_delivered(self) -> dict[Stream, Spans]:
        columns = f"{self._of}, {self._partition}, {self._first}, {self._end}"
        statement = f"SELECT {columns} FROM {DELIVERED_TABLE} WHERE {self._target} = %s"
        try:
            rows = self._session.query(self._sql(statement), (self._queue,))
        except self._dialect.error:
            return {}  # nobody needed the table so far
        found: dict[Stream, Spans] = {}
        for queue, partition, first, end in rows:
            found.setdefault((queue, partition), []).append((first, end))
        return found

    def _make_delivered(self) -> None:
        columns = (
            f"{self._target} VARCHAR(200) NOT NULL, {self._of} VARCHAR(200) NOT NULL, "
            f"{self._partition} INTEGER NOT NULL, {self._first} BIGINT NOT NULL, "
            f"{self._end} BIGINT NOT NULL"
        )
        key = f"{self._target}, {self._of}, {self._partition}, {self._first}"
        self._session.change(
            f"CREATE TABLE IF NOT EXISTS {DELIVERED_TABLE} ({columns}, PRIMARY KEY ({key}))"
        )

    def _replace_delivered(self, execute: Execute, delivered: dict[Stream, Spans]) -> None:
        gone = f"DELETE FROM {DELIVERED_TABLE} WHERE {self._target} = %s"
        execute(self._sql(gone), (self._queue,))
        rows: Sequence[tuple[object, ...]] = [
            (self._queue, *stream, *span) for stream, spans in delivered.items() for span in spans
        ]
        names = ("target", "queue", "partition", "first", "end")
        if rows:
            self._session.insert_many(DELIVERED_TABLE, names, rows)

    def _sql(self, statement: str) -> str:
        return statement.replace("%s", self._dialect.mark)
