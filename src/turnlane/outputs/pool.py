"""A pool of connections for the outputs that keep connections open: SQL, queue tables, syslog.

There are as many connections as threads that send at the same time. The lock guards the two lists;
no method connects, sends or waits while it holds the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from turnlane.errors import Never
from turnlane.runtime import Closeable


class PooledConnection(Protocol):
    """A connection that a pool can keep."""

    @property
    def is_open(self) -> bool:
        """Whether the other side has not closed it, as far as one can know without sending."""

    def cancel(self) -> None:
        """Make the thread that uses it fail. Another thread calls this; it returns at once."""

    def close(self) -> None:
        """Close it."""


ConnectionT = TypeVar("ConnectionT", bound=PooledConnection)


class Pool(Closeable, Generic[ConnectionT]):
    """Lends each connection to one thread at a time, the most recently used one first."""

    def __init__(self, connect: Callable[[], ConnectionT]) -> None:
        self._connect = connect
        self._idle: list[ConnectionT] = []
        self._lent: list[ConnectionT] = []
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def borrow(self) -> Iterator[ConnectionT]:
        """Lend a connection to the ``with`` block.

        The pool closes it after an error, except after ``Never``: that error is about the events,
        and the connection still works.
        """
        connection = self._take_idle() or self._connect()
        with self._lock:
            self._lent.append(connection)
        try:
            yield connection
        except Never:
            self._take_back(connection, reusable=True)
            raise
        except BaseException:
            self._take_back(connection, reusable=False)
            raise
        self._take_back(connection, reusable=True)

    def cancel(self) -> None:
        """Make all threads that use a connection fail; the connections are closed then."""
        # Under the lock, no connection is closed before it is cancelled. (Another file could have
        # its descriptor by then.)
        with self._lock:
            for connection in self._lent:
                connection.cancel()

    def close(self) -> None:
        """Close all connections; a connection that is lent is closed when it comes back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take_idle(self) -> ConnectionT | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.is_open:
                return connection
            connection.close()

    def _take_back(self, connection: ConnectionT, *, reusable: bool) -> None:
        with self._lock:
            self._lent = [each for each in self._lent if each is not connection]
            if reusable and not self._closed:
                self._idle.append(connection)
                return
        connection.close()
