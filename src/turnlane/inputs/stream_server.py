"""Reads many stream connections, plain or TLS, with one thread.

In a round, every ready connection is read once, into one shared buffer, and all messages together
become one block of the queue. So an idle connection costs a socket and a small object, and a busy
connection cannot starve the others. While the queue has no room, no connection is read: the TCP
windows close, and the senders wait.

A connection opens with a PROXY header and a TLS handshake, as the settings say. Then its first
bytes are checked: the connection of a client that speaks another protocol is closed.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import itertools
import os
import select
import socket
import ssl
import termios
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from turnlane.formats.framing import Framing, find_messages
from turnlane.formats.syslog import (
    FOREIGN_HEAD_BYTES,
    ForeignStream,
    parse_severities,
    recognize_foreign,
)
from turnlane.inputs.api import Input
from turnlane.inputs.publishers import FireAndForgetPublisher, ReceiveBuffer
from turnlane.logs import get_logger
from turnlane.runtime import create_thread
from turnlane.serving.address import normalize_host
from turnlane.serving.proxy_header import (
    HEADER_SECONDS,
    InvalidProxyHeader,
    ProxyHeaderReader,
    is_proxy_header,
)

log = get_logger(__name__)

MAX_ACCEPTS: Final = 64
"""The most new connections of a round."""
MAX_READY: Final = 1_024
"""The most connections that are read in a round."""
HANDSHAKE_SECONDS: Final = 10.0
"""How long a TLS handshake may take."""
SWEEP_SECONDS: Final = 1.0
"""How often to look for connections that have been silent for too long."""
BACKLOG: Final = 1_024
READ_BYTES: Final = 4 << 20
"""How much a round reads from all connections together. Every block has a fixed cost for threads
and locks: with a quarter of this size a busy pipeline is a fifth slower."""
MIN_SHARE_BYTES: Final = 16 << 10
"""How much a connection may send in a round, independent of the number of others."""

WOULD_BLOCK: Final = (
    BlockingIOError,
    InterruptedError,
    ssl.SSLWantReadError,
    ssl.SSLWantWriteError,
)
"""The errors of a socket that has nothing to read at the moment."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How messages are separated, and how much a client may use."""

    framing: Framing
    max_message_bytes: int
    max_connections: int
    idle_seconds: float | None
    message_seconds: float
    proxy_protocol: bool = False
    """Whether every connection begins with a PROXY header."""


@dataclass(frozen=True, slots=True)
class StreamListener:
    """A bound socket, and the TLS context of its connections."""

    socket: socket.socket
    tls: ssl.SSLContext | None = None


@dataclass(slots=True, eq=False)
class StreamConnection:
    """A client, and the beginning of its next message."""

    socket: socket.socket
    number: int
    """The file descriptor, also after the socket was wrapped or closed."""
    source: str
    tls: ssl.SSLContext | None
    header: ProxyHeaderReader | None
    """Reads the PROXY header, until it is complete."""
    last_read: float
    in_handshake: bool = False
    """Whether its TLS handshake has begun and is not complete."""
    is_checked: bool = False
    """Whether enough bytes have arrived to tell that they are syslog."""
    rest: bytes = b""
    inside: int = 0
    """The state of :func:`find_messages`."""
    message_started: float | None = None
    """When the message began that is not complete."""
    has_ended: bool = False

    @property
    def is_opening(self) -> bool:
        """Whether its PROXY header or its TLS handshake is not complete."""
        return self.header is not None or self.in_handshake or self.needs_tls

    @property
    def needs_tls(self) -> bool:
        """Whether its TLS handshake has not begun."""
        return self.tls is not None and not isinstance(self.socket, ssl.SSLSocket)

    def keep_rest(self, rest: bytes, inside: int, *, is_new: bool) -> None:
        """Keep the received part of a message; ``is_new`` if another message ended before it."""
        self.rest, self.inside = rest, inside
        if not rest and not inside:
            self.message_started = None
        elif is_new or self.message_started is None:
            self.message_started = time.monotonic()

    def count_unread(self) -> int:
        """Return how many bytes have arrived and were not read, from the system or from TLS."""
        count = array.array("i", [0])
        fcntl.ioctl(self.socket, termios.FIONREAD, count)
        decrypted = self.socket.pending() if isinstance(self.socket, ssl.SSLSocket) else 0
        return count[0] + decrypted

    def is_silent_since(self, moment: float) -> bool:
        """Whether no bytes have arrived since then, neither read nor unread."""
        return self.last_read < moment and not self.count_unread()

    def is_unfinished_since(self, moment: float) -> bool:
        """Whether the rest of a message is missing that began before then."""
        started = self.message_started
        return started is not None and started < moment and not self.count_unread()


def recognize_stream(head: bytes) -> ForeignStream | None:
    """Return why the first bytes of a connection are not syslog; ``None`` if they may be."""
    if is_proxy_header(head):
        hint = "looks like the PROXY protocol of a balancer; set `proxy_protocol: true`"
        return ForeignStream("proxy_header", hint)
    return recognize_foreign(head)


class StreamConnections:
    """All connections of some listeners. Only :meth:`wake` may be called from other threads."""

    def __init__(
        self, owner: Input, listeners: Sequence[StreamListener], limits: StreamLimits
    ) -> None:
        self._owner = owner
        self._label = owner.settings.label
        self._listeners = {each.socket.fileno(): each for each in listeners}
        self._limits = limits
        self._open: OrderedDict[int, StreamConnection] = OrderedDict()
        """By file descriptor; the longest silent connection is first."""
        self._opening: set[StreamConnection] = set()
        self._epoll = select.epoll()
        self._waker, self._wake_end = os.pipe()
        self._epoll.register(self._waker, select.EPOLLIN)
        self._last_sweep = 0.0
        self._paused_until = 0.0

    def listen(self) -> None:
        """Begin to accept connections."""
        for number, listener in self._listeners.items():
            listener.socket.setblocking(False)  # noqa: FBT003 - the socket's own interface
            listener.socket.listen(BACKLOG)
            self._epoll.register(number, select.EPOLLIN)

    def stop_listening(self) -> None:
        """Accept the waiting connections, and then no more."""
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            self._accept(listener, BACKLOG)
            listener.socket.close()

    def close(self) -> None:
        """Close the listeners and the poll, but no connection."""
        for listener in self._listeners.values():
            listener.socket.close()
        self._epoll.close()
        os.close(self._waker)
        os.close(self._wake_end)

    def wake(self) -> None:
        """Make :meth:`poll` return at once, now and later. Safe from any thread."""
        os.write(self._wake_end, b".")

    def list_all(self) -> list[StreamConnection]:
        """Return every connection."""
        return [*self._open.values()]

    def is_open(self, connection: StreamConnection) -> bool:
        """Whether the connection was not closed."""
        return self._open.get(connection.number) is connection

    def poll(self, timeout: float | None) -> list[StreamConnection]:
        """Wait for connections with something to read, and accept new ones."""
        if timeout is None and (self._open or self._paused_until):
            timeout = SWEEP_SECONDS
        ready = []
        for number, _ in self._epoll.poll(timeout, MAX_READY):
            if number in self._listeners:
                self._accept(self._listeners[number])
            elif number in self._open:
                ready.append(self._open[number])
        return ready

    def mark_read(self, connection: StreamConnection) -> None:
        """Note that a connection is not idle."""
        connection.last_read = time.monotonic()
        self._open.move_to_end(connection.number)

    def drop(self, connection: StreamConnection) -> None:
        """Close a connection."""
        del self._open[connection.number]
        self._opening.discard(connection)
        if connection.socket.fileno() >= 0:  # or TLS has closed it: the client is gone
            self._epoll.unregister(connection.number)
        if isinstance(connection.socket, ssl.SSLSocket) and not connection.in_handshake:
            with contextlib.suppress(OSError, ValueError):  # sends the close alert; does not wait
                connection.socket.unwrap()
        connection.socket.close()
        self._owner.count(connections=-1)

    def find_expired(self) -> list[StreamConnection]:
        """Find connections that are silent, or in the middle of a message, for too long."""
        now = time.monotonic()
        if now < self._last_sweep + SWEEP_SECONDS:
            return []
        self._last_sweep = now
        if self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            self._watch_listeners(select.EPOLLIN)
        for connection in [*self._opening]:
            step, seconds = "TLS handshake", HANDSHAKE_SECONDS
            if connection.header is not None:
                step, seconds = "PROXY header", HEADER_SECONDS
            if connection.is_silent_since(now - seconds):
                self._refuse(connection, f"no {step} within {seconds:g} seconds")
        # While the queue is full no connection is read, so unread bytes do not count as silence.
        oldest = now - self._limits.message_seconds
        expired = [each for each in self._open.values() if each.is_unfinished_since(oldest)]
        if self._limits.idle_seconds is not None:
            oldest = now - self._limits.idle_seconds
            quiet = itertools.takewhile(lambda each: each.last_read < oldest, self._open.values())
            expired += [connection for connection in quiet if connection.is_silent_since(oldest)]
        return [*dict.fromkeys(expired)]

    # ── accepting clients ────────────────────────────────────────────────────────────────────────

    def _accept(self, listener: StreamListener, most: int = MAX_ACCEPTS) -> None:
        for _ in range(most):
            try:
                accepted, peer = listener.socket.accept()
            except WOULD_BLOCK:
                return
            except ConnectionError:
                continue  # closed by the client before it was accepted
            except OSError as error:
                # Most likely there are no file descriptors left: leave new connections waiting.
                log.warning("input.accept_failed", input=self._label, error=error)
                self._watch_listeners(0)
                self._paused_until = time.monotonic() + SWEEP_SECONDS
                return
            if len(self._open) < self._limits.max_connections:
                self._admit(accepted, normalize_host(peer[0]), listener.tls)
            else:
                self._owner.count(refused=1)
                accepted.close()

    def _watch_listeners(self, events: int) -> None:
        for number in self._listeners:
            self._epoll.modify(number, events)

    def _admit(self, accepted: socket.socket, source: str, tls: ssl.SSLContext | None) -> None:
        accepted.setblocking(False)  # noqa: FBT003 - the socket's own interface
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        header = ProxyHeaderReader() if self._limits.proxy_protocol else None
        number = accepted.fileno()
        connection = StreamConnection(accepted, number, source, tls, header, time.monotonic())
        self._open[number] = connection
        self._epoll.register(number, select.EPOLLIN)
        if connection.is_opening:
            self._opening.add(connection)
        self._owner.count(connections=1)

    def continue_opening(self, connection: StreamConnection) -> bool:
        """Continue with PROXY header and TLS handshake; true if both are done.

        If one of them fails, the connection is closed.
        """
        try:
            if connection.header is not None and not self._read_header(connection):
                return False
            if connection.needs_tls and not self._start_tls(connection):
                return False
            if connection.in_handshake and not self._continue_handshake(connection):
                return False
        except (OSError, ValueError) as error:
            self._refuse(connection, str(error))
            return False
        self._opening.discard(connection)
        return True

    def _read_header(self, connection: StreamConnection) -> bool:
        """Read the PROXY header; true if it is complete."""
        assert connection.header is not None
        try:
            header = connection.header.receive(connection.socket)
        except InvalidProxyHeader as error:
            if connection.header.has_begun:
                hint = f"{error}; `proxy_protocol` needs one from every client"
                self.refuse_foreign(connection, ForeignStream("proxy_header", hint))
            self.drop(connection)  # without a word if it has sent nothing: a balancer's check
            return False
        if header is None:
            return False
        if header.client is not None:
            connection.source = header.client[0]
        connection.header = None
        connection.last_read = time.monotonic()
        return True

    def _start_tls(self, connection: StreamConnection) -> bool:
        """Begin the TLS handshake, if the first bytes have arrived and may be TLS."""
        assert connection.tls is not None
        try:
            head = connection.socket.recv(FOREIGN_HEAD_BYTES, socket.MSG_PEEK)
        except WOULD_BLOCK:
            return False
        foreign = recognize_stream(head)
        if foreign is not None and foreign.reason != "tls":
            self.refuse_foreign(connection, foreign)
            self.drop(connection)
            return False
        connection.socket = connection.tls.wrap_socket(
            connection.socket, server_side=True, do_handshake_on_connect=False
        )
        connection.in_handshake = True
        return True

    def _continue_handshake(self, connection: StreamConnection) -> bool:
        """Continue a TLS handshake; true if it is done."""
        assert isinstance(connection.socket, ssl.SSLSocket)
        number = connection.number
        try:
            connection.socket.do_handshake()
        except ssl.SSLWantReadError:
            self._epoll.modify(number, select.EPOLLIN)
            return False
        except ssl.SSLWantWriteError:
            self._epoll.modify(number, select.EPOLLIN | select.EPOLLOUT)
            return False
        self._epoll.modify(number, select.EPOLLIN)
        connection.in_handshake = False
        return True

    def refuse_foreign(self, connection: StreamConnection, foreign: ForeignStream) -> None:
        """Log and count a client that does not speak syslog; the caller closes the connection."""
        source = connection.source
        hint = foreign.hint
        log.warning("input.connection_invalid", input=self._label, source=source, hint=hint)
        self._owner.count_invalid(foreign.reason)

    def _refuse(self, connection: StreamConnection, reason: str) -> None:
        source = connection.source
        log.info("input.connection_refused", input=self._label, source=source, reason=reason)
        self._owner.count(refused=1)
        self.drop(connection)


class StreamReader:
    """Accepts connections and publishes their messages, from :meth:`start` to :meth:`stop`."""

    def __init__(
        self,
        owner: Input,
        publisher: FireAndForgetPublisher,
        listeners: Sequence[StreamListener],
        limits: StreamLimits,
    ) -> None:
        self._owner = owner
        self._label = owner.settings.label
        self.publisher = publisher
        self._limits = limits
        self._connections = StreamConnections(owner, listeners, limits)
        self._unfinished: list[StreamConnection] = []
        """TLS connections with more to read than the last round had room for."""
        size = 2 * limits.max_message_bytes + READ_BYTES
        self._buffer = ReceiveBuffer(size, parse_severities)
        self._stopping = threading.Event()
        self._deadline = float("inf")
        name = f"turnlane-{self._label}-streams"
        self._thread = create_thread(name, self._run)

    def start(self) -> None:
        """Listen, and start the thread."""
        self._connections.listen()
        self._thread.start()

    def stop(self, deadline: float) -> None:
        """Accept no more connections, publish the received messages, close. Until ``deadline``."""
        self._deadline = deadline
        self.publisher.set_deadline(deadline)
        self._stopping.set()
        if self._thread.ident is not None:
            self._connections.wake()
            self._thread.join()
        self._connections.close()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and not self.publisher.has_failed:
                unfinished = [each for each in self._unfinished if self._connections.is_open(each)]
                self._unfinished = []
                ready = self._connections.poll(0.0 if unfinished else None)
                self._read([*dict.fromkeys([*unfinished, *ready])])
                self._end(self._connections.find_expired())
            self._connections.stop_listening()
            self._drain()
        except Exception:
            log.exception("input.reader_failed", input=self._label)
            block = self._buffer.take_block()
            if block is not None:
                self._owner.count(dropped=block.num_rows)
            self._connections.stop_listening()
            for connection in self._connections.list_all():
                self._connections.drop(connection)

    def _read(self, ready: list[StreamConnection]) -> None:
        """Read each connection once and publish all messages."""
        share = max(MIN_SHARE_BYTES, READ_BYTES // max(1, len(ready)))
        for connection in ready:
            if connection.is_opening and not self._connections.continue_opening(connection):
                continue
            self._receive(connection, share)
        self._publish()
        for connection in ready:
            if connection.has_ended:
                self._connections.drop(connection)

    def _receive(self, connection: StreamConnection, share: int) -> int:
        """Read once; return how many bytes there were."""
        kept = len(connection.rest)
        if self._buffer.room < kept + share:
            self._publish()
        space = self._buffer.get_space(connection.rest)
        count = self._fill(connection, space[kept : kept + share])
        if count or connection.has_ended:
            self._find_messages(connection, space[: kept + count], count)
        return count

    def _fill(self, connection: StreamConnection, space: memoryview) -> int:
        """Receive the available bytes, and notice the end of the connection."""
        is_tls = isinstance(connection.socket, ssl.SSLSocket)  # returns one record at a time
        count = 0
        try:
            while count < len(space) and (is_tls or not count):
                size = connection.socket.recv_into(space[count:])
                count += size
                if not size:
                    connection.has_ended = True
                    break
            if is_tls and count == len(space):
                self._unfinished.append(connection)
        except WOULD_BLOCK:
            pass
        except (OSError, ValueError) as error:
            source = connection.source
            log.info("input.connection_lost", input=self._label, source=source, error=error)
            connection.has_ended = True
        return count

    def _find_messages(self, connection: StreamConnection, buffer: memoryview, count: int) -> None:
        if not connection.is_checked:
            foreign = recognize_stream(bytes(buffer[:FOREIGN_HEAD_BYTES]))
            if foreign is not None:
                self._connections.refuse_foreign(connection, foreign)
                connection.keep_rest(b"", 0, is_new=True)
                connection.has_ended = True
                self._owner.count(bytes=count)
                return
        try:
            found = find_messages(
                buffer,
                self._limits.max_message_bytes,
                self._limits.framing,
                inside=connection.inside,
                last=connection.has_ended,
            )
        except Exception:  # a bug, but the bytes of one client must not end the others
            log.exception("input.framing_failed", input=self._label, source=connection.source)
            connection.keep_rest(b"", 0, is_new=True)
            connection.has_ended = True
            self._owner.count(bytes=count)
            self._owner.count_invalid("framing")
            return
        rest = bytes(buffer[found.used :])
        connection.keep_rest(rest, found.inside, is_new=len(found.starts) > 0)
        connection.is_checked = found.used > 0 or len(rest) >= FOREIGN_HEAD_BYTES
        self._connections.mark_read(connection)
        self._buffer.add(found.starts, found.ends, found.used, connection.source)
        self._owner.count(bytes=count)
        self._owner.count_invalid("too_long", found.oversize)
        self._owner.count_invalid("framing", found.malformed)

    def _publish(self) -> None:
        block = self._buffer.take_block()
        if block is not None:
            self.publisher.publish(block)

    def _drain(self) -> None:
        """Read the bytes that had arrived when the input was stopped, and no later ones."""
        waiting = {
            each: each.count_unread()
            for each in self._connections.list_all()
            if not each.is_opening
        }
        while waiting and time.monotonic() < self._deadline and not self.publisher.has_failed:
            waiting = {
                each: left - count
                for each, left in waiting.items()
                if left > 0
                and (count := self._receive(each, MIN_SHARE_BYTES))
                and not each.has_ended
            }
            self._publish()
        self._end(self._connections.list_all())

    def _end(self, connections: list[StreamConnection]) -> None:
        """Publish the received part of the last messages, and close the connections."""
        for connection in connections:
            if not connection.has_ended and (connection.rest or connection.inside > 0):
                connection.has_ended = True
                if self._buffer.room < len(connection.rest):
                    self._publish()
                space = self._buffer.get_space(connection.rest)
                self._find_messages(connection, space[: len(connection.rest)], 0)
        self._publish()
        for connection in connections:
            self._connections.drop(connection)
