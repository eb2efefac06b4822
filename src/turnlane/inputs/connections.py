"""The stream connections of an input: accepted, greeted with TLS, watched, closed when silent."""

from __future__ import annotations

import array
import contextlib
import fcntl
import itertools
import logging
import os
import select
import socket
import ssl
import termios
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from turnlane.inputs.contract import Input
from turnlane.serving.address import named

log = logging.getLogger(__name__)

ACCEPTS: Final = 64
"""New connections taken in a round."""
READS: Final = 1_024
"""Ready connections looked at in a round."""
HANDSHAKE_SECONDS: Final = 10.0
"""How long a TLS handshake may take."""
SWEEP_SECONDS: Final = 1.0
"""How often to look for connections that have been silent for too long."""
BACKLOG: Final = 1_024

WANTS: Final = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""What a socket raises that has nothing to read at the moment."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A bound socket, and the TLS that its connections are to speak."""

    socket: socket.socket
    tls: ssl.SSLContext | None = None


@dataclass(slots=True, eq=False)
class Connection:
    """A client: who it is, and what it has begun to say."""

    socket: socket.socket
    source: str
    greeting: bool
    """Whether its TLS handshake is still under way."""
    seen: float
    rest: bytes = b""
    inside: int = 0
    begun: float | None = None
    """When the message began that is not complete."""
    ended: bool = False

    def keep(self, rest: bytes, inside: int, *, fresh: bool) -> None:
        """Keep what there is of a message; ``fresh`` if another has ended before it."""
        self.rest, self.inside = rest, inside
        if not rest and not inside:
            self.begun = None
        elif fresh or self.begun is None:
            self.begun = time.monotonic()

    def arrived(self) -> int:
        """How many bytes have been received and not handed over, by the system or by TLS."""
        count = array.array("i", [0])
        fcntl.ioctl(self.socket, termios.FIONREAD, count)
        unpacked = self.socket.pending() if isinstance(self.socket, ssl.SSLSocket) else 0
        return count[0] + unpacked

    def silent_since(self, moment: float) -> bool:
        """Whether nothing has come since then: neither read, nor waiting to be."""
        return self.seen < moment and not self.arrived()

    def unfinished_since(self, moment: float) -> bool:
        """Whether it owes the rest of a message that it began before then."""
        return self.begun is not None and self.begun < moment and not self.arrived()


class Connections:
    """All connections of some listeners. Everything but :meth:`wake` is for one thread."""

    def __init__(
        self,
        owner: Input,
        listeners: Sequence[Listener],
        most: int,
        idle_seconds: float | None,
        message_seconds: float,
    ) -> None:
        self._owner = owner
        self._label = owner.settings.label
        self._listeners = {each.socket.fileno(): each for each in listeners}
        self._most = most
        self._idle_seconds = idle_seconds
        self._message_seconds = message_seconds
        self._open: OrderedDict[int, Connection] = OrderedDict()
        """By file descriptor, the longest silent first."""
        self._greeting: set[Connection] = set()
        self._epoll = select.epoll()
        self._waker, self._wake_end = os.pipe()
        self._epoll.register(self._waker, select.EPOLLIN)
        self._swept = 0.0
        self._paused_until = 0.0

    def listen(self) -> None:
        """Let clients in."""
        for number, listener in self._listeners.items():
            listener.socket.setblocking(False)  # noqa: FBT003 - the socket's own interface
            listener.socket.listen(BACKLOG)
            self._epoll.register(number, select.EPOLLIN)

    def stop_listening(self) -> None:
        """Let nobody in any more but those who have knocked already."""
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            self._accept(listener, BACKLOG)
            listener.socket.close()

    def close(self) -> None:
        """Let go of everything that belongs to no connection."""
        for listener in self._listeners.values():
            listener.socket.close()
        self._epoll.close()
        os.close(self._waker)
        os.close(self._wake_end)

    def wake(self) -> None:
        """Have :meth:`ready` return from now on, whatever happens. From any thread."""
        os.write(self._wake_end, b".")

    def all(self) -> list[Connection]:
        """Every connection."""
        return [*self._open.values()]

    def has(self, connection: Connection) -> bool:
        """Whether it is still open."""
        return connection.socket.fileno() in self._open

    def ready(self, timeout: float | None) -> list[Connection]:
        """Wait for connections with something to read; new ones are let in."""
        if timeout is None and (self._open or self._paused_until):
            timeout = SWEEP_SECONDS
        found = []
        for number, _ in self._epoll.poll(timeout, READS):
            if number in self._listeners:
                self._accept(self._listeners[number])
            elif number in self._open:
                found.append(self._open[number])
        return found

    def heard(self, connection: Connection) -> None:
        """Note that a connection is not idle."""
        connection.seen = time.monotonic()
        self._open.move_to_end(connection.socket.fileno())

    def drop(self, connection: Connection) -> None:
        """Close a connection."""
        number = connection.socket.fileno()
        del self._open[number]
        self._greeting.discard(connection)
        self._epoll.unregister(number)
        if isinstance(connection.socket, ssl.SSLSocket) and not connection.greeting:
            with contextlib.suppress(OSError, ValueError):  # says goodbye, and does not wait
                connection.socket.unwrap()
        connection.socket.close()
        self._owner.count(connections=-1)

    def late(self) -> list[Connection]:
        """Now and then: those that have been silent, or in the middle of a message, too long."""
        now = time.monotonic()
        if now < self._swept + SWEEP_SECONDS:
            return []
        self._swept = now
        if self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            self._attend(select.EPOLLIN)
        for connection in [*self._greeting]:
            if connection.silent_since(now - HANDSHAKE_SECONDS):
                self._refuse(connection, "took too long over its TLS handshake")
        # While the queue is full nobody is read: then it is not they who are silent.
        oldest = now - self._message_seconds
        late = [each for each in self._open.values() if each.unfinished_since(oldest)]
        return [*dict.fromkeys([*late, *self._silent(now)])]

    def _silent(self, now: float) -> list[Connection]:
        if self._idle_seconds is None:
            return []
        oldest = now - self._idle_seconds
        quiet = itertools.takewhile(lambda each: each.seen < oldest, self._open.values())
        return [connection for connection in quiet if connection.silent_since(oldest)]

    # ── letting clients in ───────────────────────────────────────────────────────────────────────

    def _accept(self, listener: Listener, most: int = ACCEPTS) -> None:
        for _ in range(most):
            try:
                accepted, peer = listener.socket.accept()
            except WANTS:
                return
            except ConnectionError:
                continue  # gone before we came to it
            except OSError as error:
                self._pause(error)
                return
            if len(self._open) < self._most:
                self._admit(accepted, named(peer[0]), listener.tls)
            else:
                self._owner.count(refused=1)
                accepted.close()

    def _pause(self, error: OSError) -> None:
        """Leave new connections waiting for a while: out of file descriptors, most likely."""
        log.warning("input %s cannot accept connections: %s", self._label, error)
        self._attend(0)
        self._paused_until = time.monotonic() + SWEEP_SECONDS

    def _attend(self, events: int) -> None:
        for number in self._listeners:
            self._epoll.modify(number, events)

    def _admit(self, accepted: socket.socket, source: str, tls: ssl.SSLContext | None) -> None:
        accepted.setblocking(False)  # noqa: FBT003 - the socket's own interface
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if tls is not None:
            try:
                accepted = tls.wrap_socket(
                    accepted, server_side=True, do_handshake_on_connect=False
                )
            except OSError as error:  # reset meanwhile
                log.info("input %s: %s: %s", self._label, source, error)
                accepted.close()
                return
        connection = Connection(accepted, source, tls is not None, time.monotonic())
        self._open[accepted.fileno()] = connection
        self._epoll.register(accepted.fileno(), select.EPOLLIN)
        if tls is not None:
            self._greeting.add(connection)
        self._owner.count(connections=1)

    def shake_hands(self, connection: Connection) -> bool:
        """Go on with a TLS handshake; whether it is done. One that fails closes the connection."""
        assert isinstance(connection.socket, ssl.SSLSocket)
        number = connection.socket.fileno()
        try:
            connection.socket.do_handshake()
        except ssl.SSLWantReadError:
            self._epoll.modify(number, select.EPOLLIN)
        except ssl.SSLWantWriteError:
            self._epoll.modify(number, select.EPOLLIN | select.EPOLLOUT)
        except (OSError, ValueError) as error:
            self._refuse(connection, str(error))
        else:
            self._epoll.modify(number, select.EPOLLIN)
            connection.greeting = False
            self._greeting.discard(connection)
            return True
        return False

    def _refuse(self, connection: Connection, reason: str) -> None:
        log.info("input %s refuses %s: %s", self._label, connection.source, reason)
        self._owner.count(refused=1)
        self.drop(connection)
