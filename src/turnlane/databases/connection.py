"""Connections that survive failures, and errors of the drivers as errors of turnlane.

A `Session` owns one connection and opens another one after a failure. It repeats a transaction
that a deadlock or a busy file stopped, up to `TRIES` times: the work of a transaction has to be
repeatable. A `ChangeWatcher` owns one connection and a thread that waits for changes.

Two functions translate what `Dialect.classify_error` found. `translate_errors` serves queue
tables: it raises ``DatabaseDown``, ``DatabaseReadOnly`` or ``NameTaken``, and lets the driver's
error pass where a caller may expect it (a missing table). `get_delivery_error` serves outputs,
which have to know of every error whether the events or the database are the cause.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NoReturn, Protocol, TypeVar

from turnlane.databases.dialect import Connection, Dialect, ErrorKind, Row
from turnlane.errors import (
    DatabaseDown,
    DatabaseReadOnly,
    NameTaken,
    Never,
    PayloadTooLarge,
    RetryLater,
    TurnlaneError,
)
from turnlane.logs import get_logger
from turnlane.pacing import Backoff
from turnlane.runtime import Closeable, start_thread

log = get_logger(__name__)

T = TypeVar("T")

TRIES = 8
"""Attempts at a transaction that meets deadlocks; then the caller gets the error."""

RETRIED: Final = {ErrorKind.TRANSIENT, ErrorKind.LOCKED, ErrorKind.CREATED_CONCURRENTLY}
"""The same transaction may well succeed a moment later."""

RECONNECT: Final = Backoff(1.0, 30.0)
"""The pauses of a watcher after failures in a row."""


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def translate_errors(dialect: Dialect) -> Iterator[None]:
    """Raise the driver's errors as turnlane's, for connections that belong to no session."""
    try:
        yield
    except (dialect.error, OSError) as error:
        _raise_translated(_classify(dialect, error), error)


def get_delivery_error(dialect: Dialect, error: Exception) -> TurnlaneError | None:
    """Return what an error means for events that an output sends; ``None`` if it is unknown."""
    message = dialect.describe_error(error)
    match _classify(dialect, error):
        case ErrorKind.UNKNOWN:
            return None
        case ErrorKind.TOO_LARGE:
            return PayloadTooLarge(message)
        case ErrorKind.REFUSED_DATA | ErrorKind.DUPLICATE_KEY:
            return Never(message)
        case _:
            return RetryLater(message)


def _classify(dialect: Dialect, error: Exception) -> ErrorKind:
    # Drivers let some errors of the operating system pass as they are.
    return ErrorKind.UNAVAILABLE if isinstance(error, OSError) else dialect.classify_error(error)


def _is_name_taken(kind: ErrorKind, error: Exception) -> bool:
    # Drivers name the index in the message only. Every queue table has a unique ``event_name``.
    return kind is ErrorKind.DUPLICATE_KEY and "event_name" in str(error)


def _raise_translated(kind: ErrorKind, error: Exception) -> NoReturn:
    message = str(error).strip() or type(error).__name__
    if kind in {ErrorKind.TRANSIENT, ErrorKind.LOCKED, ErrorKind.UNAVAILABLE}:
        raise DatabaseDown(f"the database does not answer: {message}") from error
    if kind is ErrorKind.READ_ONLY:
        raise DatabaseReadOnly(f"the database is read-only: {message}") from error
    if _is_name_taken(kind, error):
        raise NameTaken(f"the queue already has an event with this name: {message}") from error
    raise error


# ── sessions ─────────────────────────────────────────────────────────────────────────────────────


class RowsLocked(Exception):
    """Another transaction holds a row that a statement would change."""


class StatementResult:
    """The result of one statement."""

    def __init__(self, cursor: Any) -> None:  # noqa: ANN401 - the drivers share no type
        self._cursor = cursor
        self.count: int = cursor.rowcount

    def rows(self) -> list[Row]:
        """Return the rows that the statement selected or returned."""
        return list(self._cursor.fetchall()) if self._cursor.description else []


def execute_statement(
    connection: Connection, statement: str, parameters: Sequence[Any] = ()
) -> StatementResult:
    """Run a statement on a connection."""
    cursor = connection.cursor()
    cursor.execute(statement, tuple(parameters))
    return StatementResult(cursor)


class Execute(Protocol):
    """Runs a statement within a transaction."""

    def __call__(self, statement: str, parameters: Sequence[Any] = ()) -> StatementResult:
        """Run it."""


class Session(Closeable):
    """One connection, opened when it is needed. One thread uses it at a time; others wait.

    The lock guards the connection. Only :meth:`cancel` does without, since it interrupts the
    thread that holds the lock.
    """

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.statements = 0
        """Statements sent, BEGIN and COMMIT included; for measurements."""
        self.writes = 0
        """Writes that succeeded."""
        self._connection: Connection | None = None
        self._cancelled = False
        self._lock = threading.RLock()

    def query(self, statement: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Return the rows of one statement, which is a transaction of its own."""
        return self._run(lambda execute: execute(statement, parameters).rows(), atomic=False)

    def change(self, statement: str, parameters: Sequence[Any] = ()) -> int:
        """Return the number of rows that one statement changed."""
        changed = self._run(lambda execute: execute(statement, parameters).count, atomic=False)
        self.writes += 1
        return changed

    def write(
        self, statement: str, parameters: Sequence[Any] = (), *, retry_locked: bool = True
    ) -> list[Row]:
        """Return the rows of one statement that also changes some.

        Raises ``RowsLocked`` instead of trying again when another transaction holds a row, if
        ``retry_locked`` is false.
        """
        rows = self._run(
            lambda execute: execute(statement, parameters).rows(),
            atomic=False,
            retry_locked=retry_locked,
        )
        self.writes += 1
        return rows

    def transact(self, work: Callable[[Execute], T]) -> T:
        """Run ``work`` as one transaction; run all of it again after a deadlock."""
        result = self._run(work, atomic=True)
        self.writes += 1
        return result

    def insert_many(self, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Insert rows the fastest way; only within the work of :meth:`transact`."""
        assert self._connection is not None
        self.statements += 1
        self.dialect.insert_many(self._connection, table, columns, rows)

    def cancel(self) -> None:
        """End the statement of another thread, where the database can do that.

        The session cannot be used afterwards.
        """
        self._cancelled = True
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(self.dialect.error, OSError):
                self.dialect.cancel(connection)

    def close(self) -> None:
        """Close the connection; the database rolls back an open transaction."""
        with self._lock:
            self._disconnect()

    def _run(self, work: Callable[[Execute], T], *, atomic: bool, retry_locked: bool = True) -> T:
        with self._lock:
            for attempt in range(1, TRIES + 1):
                try:
                    return self._run_once(work, atomic=atomic)
                except (self.dialect.error, OSError) as error:
                    kind = _classify(self.dialect, error)
                    if kind is ErrorKind.LOCKED and not retry_locked:
                        raise RowsLocked from error
                    if kind not in RETRIED or attempt == TRIES or self._cancelled:
                        if not _is_name_taken(kind, error):
                            self._disconnect()
                        _raise_translated(kind, error)
                    log.debug("database.transaction_retried", error=error)
                    # A random pause, or the same transactions would meet again.
                    time.sleep(random.uniform(0.001, 0.02))  # noqa: S311 - no secret
                except BaseException:
                    # The state of the connection is unknown, unless a transaction was rolled back.
                    if not atomic:
                        self._disconnect()
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _run_once(self, work: Callable[[Execute], T], *, atomic: bool) -> T:
        if self._connection is None:
            self._connection = self.dialect.connect_for_index_scans()
        if not atomic:
            return work(self._execute)
        self.statements += 2
        with self.dialect.transaction(self._connection):
            return work(self._execute)

    def _execute(self, statement: str, parameters: Sequence[Any] = ()) -> StatementResult:
        assert self._connection is not None
        self.statements += 1
        return execute_statement(self._connection, statement, parameters)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(self.dialect.error, OSError):
                connection.close()


# ── watchers ─────────────────────────────────────────────────────────────────────────────────────


class ChangeWatcher(Closeable):
    """A thread that waits for changes until it is closed. It reconnects after a failure."""

    def __init__(
        self, dialect: Dialect, listen: Callable[[Connection, threading.Event], None]
    ) -> None:
        self._dialect = dialect
        self._listen = listen
        """Waits on a connection until the event is set, or the connection breaks."""
        self._closed = threading.Event()
        self._failures = 0
        self._thread = start_thread("turnlane-watch", self._run)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                with contextlib.closing(self._dialect.connect()) as connection:
                    if self._failures:
                        log.info("database.watch_resumed", hint="listening for new rows again")
                    self._failures = 0
                    self._listen(connection, self._closed)
            except (self._dialect.error, OSError) as error:
                self._failures += 1
                if self._failures == 1:
                    log.warning(
                        "database.watch_failed",
                        error=error,
                        hint="new rows are found by polling until it listens again",
                    )
                self._closed.wait(RECONNECT.get_wait(self._failures))
