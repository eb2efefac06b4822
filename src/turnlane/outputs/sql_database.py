"""A connection to a database that rows are written over: what all databases have in common."""

from __future__ import annotations

import abc
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa

from turnlane.errors import TurnlaneError
from turnlane.outputs.http_connections import ClientTls
from turnlane.outputs.sql_delivered import Delivered
from turnlane.outputs.sql_notes import Notes
from turnlane.outputs.sql_rows import Rows
from turnlane.runtime import Closing

log = logging.getLogger(__name__)


class Target(NamedTuple):
    """What is written, and how the database is reached."""

    url: str
    password: str | None
    tls: ClientTls | None
    table: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    delivered_as: str | None
    """The name under which it is noted what was delivered; ``None``: it is not."""
    connect_timeout: float
    timeout: float


class Database(Closing):
    """One connection. Used by one thread at a time; raises turnlane's errors, and unknown ones."""

    quote_mark: ClassVar[str] = '"'
    lock_suffix: ClassVar[str] = " FOR UPDATE"

    def __init__(self, target: Target) -> None:
        self.target = target
        self._notes: Notes | None = None
        with self._understood():
            self.connect()
            try:
                self.look()
            except BaseException:
                self.close()
                raise

    # ── what each database does its own way ──────────────────────────────────────────────────────

    @abc.abstractmethod
    def connect(self) -> None:
        """Connect."""

    @abc.abstractmethod
    def look(self) -> None:
        """Look at the table. Fails as writing would if it, or a column, is not there."""

    @property
    @abc.abstractmethod
    def is_open(self) -> bool:
        """Whether the server has not hung up."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Have the statement that is under way fail. Called by another thread."""

    @abc.abstractmethod
    def execute(self, statement: str, values: Sequence[Any]) -> Sequence[Any]:
        """Run a statement whose parameters are ``?``."""

    @abc.abstractmethod
    def insert(self, rows: pa.RecordBatch) -> None:
        """Write rows, over those of the same key if there is one."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Begin a transaction."""

    @abc.abstractmethod
    def commit(self) -> None:
        """End it."""

    @abc.abstractmethod
    def rollback(self) -> None:
        """Undo it; does not fail, whatever has become of the connection."""

    @abc.abstractmethod
    def understood(self, error: Exception) -> TurnlaneError | None:
        """What an error of the driver means for the events; ``None`` if nobody can tell."""

    # ── what all do ──────────────────────────────────────────────────────────────────────────────

    def write(self, rows: Rows) -> None:
        """Write all rows in one transaction, but for those that were written before."""
        with self._understood():
            if rows.places:
                self._noted().get_ready(rows.places)
            with self._transaction():
                fresh = self._fresh(rows) if rows.places else rows.columns
                if fresh.num_rows:
                    self.insert(fresh)

    def _noted(self) -> Notes:
        if self._notes is None:
            name = self.target.delivered_as
            assert name is not None
            delivered = Delivered(name, self.quoted, self.execute)
            self._notes = Notes(delivered, self._transaction, self.lock_suffix)
        return self._notes

    def _fresh(self, rows: Rows) -> pa.RecordBatch:
        """The rows that are not in the table yet, noted as delivered from now on."""
        chosen = self._noted().fresh(rows.places)
        repeated = rows.columns.num_rows - len(chosen)
        if not repeated:
            return rows.columns
        log.info("%s: %d events were delivered before", self.target.table, repeated)
        return rows.columns.take(chosen)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self.begin()
        try:
            yield
            self.commit()
        except BaseException:
            self.rollback()
            raise

    @contextmanager
    def _understood(self) -> Iterator[None]:
        try:
            yield
        except TurnlaneError:
            raise
        except Exception as error:
            meaning = self.understood(error)
            if meaning is None:
                raise
            raise meaning from error

    # ── names ────────────────────────────────────────────────────────────────────────────────────

    def quoted(self, name: str) -> str:
        """A name as it stands in a statement."""
        mark = self.quote_mark
        return mark + name.replace(mark, 2 * mark) + mark

    @property
    def table(self) -> str:
        """The table's name as it stands in a statement."""
        return ".".join(map(self.quoted, self.target.table.split(".")))

    @property
    def columns(self) -> str:
        """The columns' names as they stand in a statement."""
        return ", ".join(map(self.quoted, self.target.columns))

    def others(self, form: str) -> str:
        """The columns that are not of the key, each in a form such as ``{0} = EXCLUDED.{0}``."""
        names = (name for name in self.target.columns if name not in self.target.key)
        return ", ".join(form.format(self.quoted(name)) for name in names)


def python_rows(rows: pa.RecordBatch, changed: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Rows as drivers take them; ``changed`` columns instead of the rows' own."""
    columns = [changed.get(name, rows.column(name)).to_pylist() for name in rows.schema.names]
    return list(zip(*columns, strict=True))
