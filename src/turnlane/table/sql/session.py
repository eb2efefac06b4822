"""A session with the database: one connection, made again when it breaks; errors made ours."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NoReturn, Protocol, TypeVar

from turnlane.errors import DatabaseDown, DatabaseReadOnly, NameTaken
from turnlane.runtime import Closing
from turnlane.table.sql.dialect import Connection, Dialect, Failure, Row

log = logging.getLogger(__name__)

T = TypeVar("T")

TRIES = 8
"""Of a transaction that meets deadlocks; then the caller hears of it."""


class RowsLocked(Exception):
    """Somebody else holds a row that a statement would change."""


class Execute(Protocol):
    """Runs a statement within a transaction."""

    def __call__(self, statement: str, parameters: Sequence[Any] = ()) -> Executed:
        """Run it."""


RETRIED: Final = {Failure.TRANSIENT, Failure.LOCKED, Failure.MADE_TWICE}
"""What may well succeed a moment later."""


class Executed:
    """What a statement did."""

    def __init__(self, cursor: Any) -> None:  # noqa: ANN401 - the drivers share no type
        self._cursor = cursor
        self.count: int = cursor.rowcount
        self.last_id: int = getattr(cursor, "lastrowid", None) or 0

    def rows(self) -> list[Row]:
        """The rows it returned."""
        return list(self._cursor.fetchall())


class Session(Closing):
    """One connection, used by one thread at a time; others wait for their turn."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.statements = 0
        """How many were sent, those that begin and end transactions included, for measurements."""
        self.writes = 0
        """How many writes succeeded."""
        self._connection: Connection | None = None
        self._cancelled = False
        self._lock = threading.RLock()

    def query(self, statement: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """The rows of one statement, which is a transaction of its own."""
        return self._try(lambda execute: execute(statement, parameters).rows(), atomic=False)

    def change(self, statement: str, parameters: Sequence[Any] = ()) -> int:
        """How many rows one statement changed."""
        changed = self._try(lambda execute: execute(statement, parameters).count, atomic=False)
        self.writes += 1
        return changed

    def write(
        self, statement: str, parameters: Sequence[Any] = (), *, patient: bool = True
    ) -> list[Row]:
        """The rows of one statement that also changes some.

        Unless it is patient, it raises ``RowsLocked`` when it would be tried again for that.
        """
        rows = self._try(
            lambda execute: execute(statement, parameters).rows(), atomic=False, patient=patient
        )
        self.writes += 1
        return rows

    def transact(self, work: Callable[[Execute], T]) -> T:
        """Run ``work`` as one transaction; again, whole, when it meets a deadlock."""
        result = self._try(work, atomic=True)
        self.writes += 1
        return result

    def insert_many(self, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Insert rows the fastest way; only within the work of :meth:`transact`."""
        assert self._connection is not None
        self.statements += 1
        self.dialect.insert_many(self._connection, table, columns, rows)

    def cancel(self) -> None:
        """Have a statement of another thread end at once, where the database can; for good.

        The session is of no use afterwards.
        """
        self._cancelled = True
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(self.dialect.error, OSError):
                self.dialect.cancel(connection)

    def close(self) -> None:
        """Let go of the connection; what is not committed is rolled back."""
        with self._lock:
            self._disconnect()

    def _try(self, work: Callable[[Execute], T], *, atomic: bool, patient: bool = True) -> T:
        with self._lock:
            for last in [False] * (TRIES - 1) + [True]:
                try:
                    return self._once(work, atomic=atomic)
                except (self.dialect.error, OSError) as error:
                    if not patient and _failure(self.dialect, error) is Failure.LOCKED:
                        raise RowsLocked from error
                    self._judge(error, last=last or self._cancelled)
                except BaseException:
                    # Nobody can say in what state the connection is.
                    if not atomic:
                        self._disconnect()
                    raise
        raise AssertionError("the last try returns or raises")

    def _once(self, work: Callable[[Execute], T], *, atomic: bool) -> T:
        if self._connection is None:
            self._connection = self.dialect.own_connection()
        if not atomic:
            return work(self._execute)
        self.statements += 2
        with self.dialect.transaction(self._connection):
            return work(self._execute)

    def _execute(self, statement: str, parameters: Sequence[Any] = ()) -> Executed:
        assert self._connection is not None
        self.statements += 1
        cursor = self._connection.cursor()
        cursor.execute(statement, tuple(parameters))
        return Executed(cursor)

    def _judge(self, error: Exception, *, last: bool) -> None:
        """Return if the work may be tried again, else raise what the error means."""
        failure = _failure(self.dialect, error)
        if failure in RETRIED and not last:
            log.debug("the database asks for a retry: %s", error)
            # Apart from each other, or the same transactions would meet again.
            time.sleep(random.uniform(0.001, 0.02))  # noqa: S311 - no secret
            return
        if failure is not Failure.NAME_TAKEN:
            self._disconnect()
        _raise(failure, error)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(self.dialect.error, OSError):
                connection.close()


@contextlib.contextmanager
def understood(dialect: Dialect) -> Iterator[None]:
    """Make errors of the driver's ours, for connections that are no session's."""
    try:
        yield
    except (dialect.error, OSError) as error:
        _raise(_failure(dialect, error), error)


def _failure(dialect: Dialect, error: Exception) -> Failure:
    return Failure.DISCONNECTED if isinstance(error, OSError) else dialect.failure(error)


def _raise(failure: Failure, error: Exception) -> NoReturn:
    message = str(error).strip() or type(error).__name__
    match failure:
        case Failure.TRANSIENT | Failure.LOCKED | Failure.DISCONNECTED:
            raise DatabaseDown(f"the database does not answer: {message}") from error
        case Failure.READ_ONLY:
            raise DatabaseReadOnly(f"the database is read-only: {message}") from error
        case Failure.NAME_TAKEN:
            raise NameTaken(f"an event of this name is in the queue: {message}") from error
        case _:
            raise error
