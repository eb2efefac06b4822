"""Connections that are used again: as many as there are senders at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from turnlane.errors import Never
from turnlane.runtime import Closing


class Connection(Protocol):
    """What can be kept in a pool."""

    @property
    def is_open(self) -> bool:
        """Whether the other side is still there, as far as can be known without sending."""

    def cancel(self) -> None:
        """Have the thread that uses it fail. Called by another one; returns at once."""

    def close(self) -> None:
        """Let go."""


Open = TypeVar("Open", bound=Connection)


class Pool(Closing, Generic[Open]):
    """Lends each connection to one thread at a time. The one used last comes first."""

    def __init__(self, connect: Callable[[], Open]) -> None:
        self._connect = connect
        self._idle: list[Open] = []
        self._lent: list[Open] = []
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def borrowed(self) -> Iterator[Open]:
        """A connection, for as long as the block lasts.

        One that failed is closed. ``Never`` is said of events: the connection is sound.
        """
        connection = self._taken()
        with self._lock:
            self._lent.append(connection)
        try:
            yield connection
        except Never:
            self._give_back(connection)
            raise
        except BaseException:
            self._forget(connection)
            connection.close()
            raise
        self._give_back(connection)

    def cancel(self) -> None:
        """Have all fail that use a connection now; it is closed then."""
        with self._lock:  # so that none of them is closed, and its descriptor another's, meanwhile
            for connection in self._lent:
                connection.cancel()

    def _taken(self) -> Open:
        while (connection := self._idle_one()) is not None:
            if connection.is_open:
                return connection
            connection.close()
        return self._connect()

    def _forget(self, connection: Open) -> None:
        with self._lock:
            self._lent = [each for each in self._lent if each is not connection]

    def _idle_one(self) -> Open | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: Open) -> None:
        self._forget(connection)
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close all of them; one that is lent is closed when it comes back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
