"""Sockets to a syslog receiver, which never says that it has got anything.

What can be known is found out all the same: whether the other side has hung up, before and after a
batch, and whether its TCP has confirmed every byte.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import select
import socket
import ssl
import struct
import termios
import time
from typing import Final, NamedTuple

from turnlane.errors import Never, PartlyDelivered, RetryLater, TurnlaneError
from turnlane.formats.texts import Strung
from turnlane.outputs.hanging_up import hang_up
from turnlane.outputs.tls import ClientTls
from turnlane.serving.address import Address

_GREETING_SECONDS: Final = 1.0
_SHORTEST_LOOK: Final = 0.0002
_LONGEST_LOOK: Final = 0.02


class Limits(NamedTuple):
    """How long things may take, in seconds."""

    connect: float
    send: float


class StreamSocket:
    """A TCP or TLS connection."""

    def __init__(
        self, address: Address, limits: Limits, tls: ClientTls | None, *, confirm: bool
    ) -> None:
        self._address = address
        self._limits = limits
        self._confirm = confirm
        context = tls.context() if tls is not None else None
        try:
            plain = socket.create_connection((address.host, address.port), limits.connect)
        except OSError as error:
            raise self._failed(error) from error
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket = self._secured(plain, context) if context is not None else plain
        except OSError as error:
            plain.close()
            raise self._failed(error) from error
        self._socket.settimeout(limits.send)

    def _secured(self, plain: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        secured = context.wrap_socket(plain, server_hostname=self._address.host)
        # In TLS 1.3 the client is through before the server has looked at its certificate. What
        # comes first is a ticket for the next time, or a refusal: then nothing must be sent.
        if secured.version() == "TLSv1.3" and not secured.pending():
            _readable(secured, min(_GREETING_SECONDS, self._limits.connect))
        return secured

    @property
    def is_open(self) -> bool:
        """Whether the other side has not hung up, as far as is known here."""
        return self._trouble() is None

    def send(self, messages: Strung) -> None:
        """Send all of it, and wait until the other side's TCP has it. Raises ``RetryLater``."""
        if (trouble := self._trouble()) is not None:
            raise self._failed(trouble)
        deadline = time.monotonic() + self._limits.send
        try:
            self._socket.sendall(memoryview(messages.data))
        except OSError as error:
            raise self._failed(error) from error
        if self._confirm:
            self._await_confirmation(deadline)
        if (trouble := self._trouble()) is not None:
            raise self._failed(trouble)

    def _await_confirmation(self, deadline: float) -> None:
        look = _SHORTEST_LOOK
        while unconfirmed := _unconfirmed(self._socket):
            if (trouble := self._trouble()) is not None:
                raise self._failed(trouble)
            if time.monotonic() > deadline:
                raise RetryLater(f"{self._address} has not confirmed {unconfirmed} bytes in time")
            _readable(self._socket, look)  # woken early if it hangs up
            look = min(2 * look, _LONGEST_LOOK)

    def _trouble(self) -> OSError | None:
        """What is known to be wrong. What the other side might say is no answer, and is dropped."""
        try:
            self._socket.settimeout(0)
            while self._socket.recv(4096):
                pass
        except (BlockingIOError, ssl.SSLWantReadError):
            return None
        except OSError as error:
            return error
        finally:
            with contextlib.suppress(OSError):
                self._socket.settimeout(self._limits.send)
        return ConnectionResetError("it has hung up")

    def _failed(self, error: OSError) -> RetryLater:
        return RetryLater(f"{self._address}: {error.strerror or error}")

    def cancel(self) -> None:
        """Have whoever sends fail."""
        hang_up(self._socket)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


class DatagramSocket:
    """Sends each message in a datagram of its own, and hardly ever hears of one that is lost."""

    def __init__(self, address: Address, limits: Limits) -> None:
        self._address = address
        try:
            family, kind, proto, _, place = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_DGRAM
            )[0]
            self._socket = socket.socket(family, kind, proto)
        except OSError as error:
            raise self._failed(error) from error
        self._socket.settimeout(limits.send)
        try:
            self._socket.connect(place)
        except OSError as error:
            self._socket.close()
            raise self._failed(error) from error

    @property
    def is_open(self) -> bool:
        """Nobody can know."""
        return True

    def send(self, messages: Strung) -> None:
        """Send them one by one: a datagram is a message, and a call to the system."""
        data, first = memoryview(messages.data), 0
        failures: dict[int, TurnlaneError] = {}
        for row, end in enumerate(messages.ends.tolist()):
            try:
                self._socket.send(data[first:end])
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise self._failed(error) from error
                failures[row] = Never(f"{end - first} bytes do not fit into a datagram")
            first = end
        if failures:
            raise PartlyDelivered(failures)

    def _failed(self, error: OSError) -> RetryLater:
        return RetryLater(f"{self._address}: {error.strerror or error}")

    def cancel(self) -> None:
        """Nothing: a datagram waits for nobody."""

    def close(self) -> None:
        """Let go."""
        self._socket.close()


def _readable(connection: socket.socket, timeout: float) -> None:
    """Wait until there is something to read, or an end."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.poll(timeout * 1000)


def _unconfirmed(connection: socket.socket) -> int:
    """How many bytes the other side's TCP has not confirmed."""
    count: int = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
    return count
