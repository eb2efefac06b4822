"""Connections of outputs: TLS as a client, a pool, and aborting what another thread waits for."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

from pydantic import Field, model_validator

from turnlane.errors import Never, RetryLater
from turnlane.runtime import Closeable
from turnlane.serving.address import borrow
from turnlane.validation import ConfigIssue, ContradictorySettings, SettingsModel


class ClientTls(SettingsModel):
    """TLS settings of an output. The files are PEM; the task reads them when it connects."""

    ca: Path | None = Field(
        default=None, description="The authorities to trust. Default: those of the system."
    )
    cert: Path | None = Field(
        default=None, description="The certificate to present, followed by its chain."
    )
    key: Path | None = Field(
        default=None, description="The private key of the certificate, not encrypted."
    )
    verify: bool = Field(
        default=True,
        description="Whether the certificate and the name of the server are checked. Without the "
        "check anyone can pretend to be the destination.",
    )

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ContradictorySettings(
                [ConfigIssue("cert", "and key belong together: give both or neither")]
            )
        return self

    def make_context(self) -> ssl.SSLContext:
        """Return a context for TLS 1.2 or newer.

        Raises ``RetryLater`` with the names of the files: events wait until a person corrects them.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None and self.key is not None:
                # An empty passphrase: otherwise OpenSSL would ask for one at the terminal.
                context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(str(each) for each in (self.ca, self.cert, self.key) if each)
            raise RetryLater(f"tls: {files}: {error.strerror or error}") from error
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def abort_connection(connection: socket.socket) -> None:
    """Make a thread that uses this connection fail. Closing it would not wake the thread."""
    with contextlib.suppress(OSError):  # the connection has ended already
        # Not the method of a TLS socket: it would remove the TLS state that the thread uses.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def wait_readable(connection: socket.socket, timeout: float) -> bool:
    """Wait until there are bytes to read or the connection is closed; false on timeout."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def abort_descriptor(descriptor: int) -> None:
    """Abort a connection that a library owns, by its descriptor, which must be open."""
    with contextlib.suppress(OSError), borrow(descriptor) as connection:
        abort_connection(connection)


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


class ConnectionPool(Closeable, Generic[ConnectionT]):
    """Lends each connection to one thread at a time, the most recently used one first.

    There are as many connections as threads that send at the same time. The lock guards the two
    lists; no method connects, sends or waits while it holds the lock.
    """

    def __init__(self, connect: Callable[[], ConnectionT]) -> None:
        self._connect = connect
        self._idle: list[ConnectionT] = []
        self._lent: list[ConnectionT] = []
        self._lock = threading.Lock()
        self._closed = False

    @contextlib.contextmanager
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
