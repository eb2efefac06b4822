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
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from turnlane.events import BASE_SCHEMA, Block
from turnlane.formats.lines import Places, column
from turnlane.formats.syslog import Framing, find, severities
from turnlane.inputs.api import Input
from turnlane.inputs.publishers import OneWayPublisher
from turnlane.serving.address import normalize_host

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
                self._admit(accepted, normalize_host(peer[0]), listener.tls)
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


# ── gathering ──
# What an input has received, on its way to becoming one block.
#
# Bytes are received into one buffer, whoever they come from; messages are places in it, until
# all of
# them are made a block together. That costs the same for one sender as for a thousand.

Severities = Callable[[pa.BinaryArray], pa.Int8Array]

_FIELDS = ("value", "timestamp", "severity", "source")
_SCHEMA = pa.schema([BASE_SCHEMA.field(name) for name in _FIELDS])


def no_severities(values: pa.BinaryArray) -> pa.Int8Array:
    """The severities of messages that have none."""
    return pa.nulls(len(values), pa.int8())


class Gathering:
    """A buffer to receive into, and the messages found in it so far. For one thread."""

    def __init__(self, size: int, severities: Severities) -> None:
        self._memory = memoryview(bytearray(size))
        self._severities = severities
        self._at = 0
        self._starts: list[Places] = []
        self._ends: list[Places] = []
        self._sources: list[str | None] = []
        self._counts: list[int] = []
        # The first block of a process takes 100 ms, for Arrow to get ready: not at a sender's cost.
        self.take(np.array([0]), np.array([1]), 1, None)
        self.block()

    @property
    def room(self) -> int:
        """How many more bytes can be received."""
        return len(self._memory) - self._at

    def space(self, rest: bytes = b"") -> memoryview:
        """The free part of the buffer, with ``rest`` at its beginning."""
        free = self._memory[self._at :]
        free[: len(rest)] = rest
        return free

    def take(self, starts: Places, ends: Places, used: int, source: str | None) -> None:
        """Messages are in the first ``used`` bytes of the free part, which is free no longer."""
        self.take_each(starts, ends, used, [source], [len(starts)])

    def take_each(
        self,
        starts: Places,
        ends: Places,
        used: int,
        sources: Sequence[str | None],
        counts: Sequence[int],
    ) -> None:
        """The same, with ``counts[n]`` messages from ``sources[n]``."""
        if len(starts):
            self._starts.append(starts + self._at)
            self._ends.append(ends + self._at)
            self._sources += sources
            self._counts += counts
            self._at += used

    def block(self) -> Block | None:
        """All messages as one block, arrived now; the buffer is free again."""
        if not self._starts:
            return None
        values = column(self._memory, np.concatenate(self._starts), np.concatenate(self._ends))
        arrays = [
            values,
            pa.array(np.full(len(values), time.time_ns() // 1000)).view(_SCHEMA.field(1).type),
            self._severities(values),
            self._source_of_each(),
        ]
        self._at = 0
        self._starts, self._ends, self._sources, self._counts = [], [], [], []
        return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)

    def _source_of_each(self) -> pa.StringArray:
        sources = pa.array(self._sources, pa.string())
        if len(sources) == 1:
            return pa.repeat(sources[0], self._counts[0])
        return sources.take(np.repeat(np.arange(len(sources), dtype=np.int32), self._counts))


# ── streams ──
# Reading many stream connections, plain or TLS, with one thread.
#
# Every ready connection is read once in a round, into one shared buffer, and what all of them
# sent
# goes into the queue as one block. So an idle connection costs a socket and a small object, a
# busy
# one cannot starve the others, and while the queue has no room nobody is read: their windows
# close
# and they wait.


READ_BYTES = 4 << 20
"""What is read in a round, from all connections together. Every block costs its way through threads
and their locks, however large it is: with a quarter of this a busy pipeline does a fifth less."""
LEAST_READ = 16 << 10
"""What a connection may send in a round, however many others do."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How messages are told apart, and what a client may cost."""

    framing: Framing
    longest: int
    connections: int
    idle_seconds: float | None
    message_seconds: float


class StreamReader:
    """Accepts connections and publishes what they send, from :meth:`start` to :meth:`stop`."""

    def __init__(
        self,
        owner: Input,
        publisher: OneWayPublisher,
        listeners: Sequence[Listener],
        limits: StreamLimits,
    ) -> None:
        self._owner = owner
        self._publisher = publisher
        self._limits = limits
        self._connections = Connections(
            owner,
            listeners,
            limits.connections,
            limits.idle_seconds,
            limits.message_seconds,
        )
        self._again: list[Connection] = []
        """TLS connections with more to read than the last round had room for."""
        self._gathering = Gathering(2 * limits.longest + READ_BYTES, severities)
        self._stopping = threading.Event()
        self._deadline = float("inf")
        name = f"turnlane-{owner.settings.label}-streams"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Listen."""
        self._connections.listen()
        self._thread.start()

    def stop(self, deadline: float) -> None:
        """Take no more connections, publish what has arrived, close. Until ``deadline``."""
        self._deadline = deadline
        self._publisher.close(deadline)
        self._stopping.set()
        if self._thread.ident is not None:
            self._connections.wake()
            self._thread.join()
        self._connections.close()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and not self._publisher.failed:
                self._round()
            self._connections.stop_listening()
            self._drain()
        except Exception:
            log.exception("input %s cannot go on", self._owner.settings.label)
            self._give_up()

    def _round(self) -> None:
        again = {each: None for each in self._again if self._connections.has(each)}
        self._again = []
        ready = self._connections.ready(0.0 if again else None)
        self._read([*dict.fromkeys([*again, *ready])])
        self._end(self._connections.late())

    def _read(self, ready: list[Connection]) -> None:
        """Read each once and publish it all."""
        share = max(LEAST_READ, READ_BYTES // max(1, len(ready)))
        for connection in ready:
            if connection.greeting and not self._connections.shake_hands(connection):
                continue
            self._receive(connection, share)
        self._publish()
        for connection in ready:
            if connection.ended:
                self._connections.drop(connection)

    def _receive(self, connection: Connection, share: int) -> int:
        """Read once; returns how many bytes there were."""
        kept = len(connection.rest)
        if self._gathering.room < kept + share:
            self._publish()
        space = self._gathering.space(connection.rest)
        count = self._fill(connection, space[kept : kept + share])
        if count or connection.ended:
            self._find(connection, space[: kept + count], count)
        return count

    def _fill(self, connection: Connection, space: memoryview) -> int:
        """Receive what is there, and note the end of the connection."""
        many = isinstance(connection.socket, ssl.SSLSocket)  # one record at a time
        count = 0
        try:
            while count < len(space) and (many or not count):
                size = connection.socket.recv_into(space[count:])
                count += size
                if not size:
                    connection.ended = True
                    break
            if many and count == len(space):
                self._again.append(connection)
        except WANTS:
            pass
        except (OSError, ValueError) as error:
            log.info("input %s: %s: %s", self._owner.settings.label, connection.source, error)
            connection.ended = True
        return count

    def _find(self, connection: Connection, buffer: memoryview, count: int) -> None:
        limits = self._limits
        try:
            found = find(
                buffer,
                limits.longest,
                limits.framing,
                inside=connection.inside,
                last=connection.ended,
            )
        except Exception:  # a bug, but what one client sends must not end the others
            log.exception("input %s cuts off %s", self._owner.settings.label, connection.source)
            connection.keep(b"", 0, fresh=True)
            connection.ended = True
            self._owner.count(bytes=count, invalid=1)
            return
        rest = bytes(buffer[found.used :])
        connection.keep(rest, found.inside, fresh=len(found.starts) > 0)
        self._connections.heard(connection)
        self._gathering.take(found.starts, found.ends, found.used, connection.source)
        self._owner.count(bytes=count, invalid=found.oversize + found.malformed)

    def _publish(self) -> None:
        block = self._gathering.block()
        if block is not None:
            self._publisher.publish(block)

    # ── stopping ─────────────────────────────────────────────────────────────────────────────────

    def _drain(self) -> None:
        """Read what had arrived when the input was stopped, but not what comes after that."""
        waiting = {each: each.arrived() for each in self._connections.all() if not each.greeting}
        while waiting and time.monotonic() < self._deadline and not self._publisher.failed:
            waiting = {
                each: left - count
                for each, left in waiting.items()
                if left > 0 and (count := self._receive(each, LEAST_READ)) and not each.ended
            }
            self._publish()
        self._end(self._connections.all())

    def _end(self, connections: list[Connection]) -> None:
        """Keep what there is of their last messages, and close them."""
        for connection in connections:
            if not connection.ended and (connection.rest or connection.inside > 0):
                connection.ended = True
                if self._gathering.room < len(connection.rest):
                    self._publish()
                space = self._gathering.space(connection.rest)
                self._find(connection, space[: len(connection.rest)], 0)
        self._publish()
        for connection in connections:
            self._connections.drop(connection)

    def _give_up(self) -> None:
        """Count what was read and cannot be published, and let go."""
        block = self._gathering.block()
        if block is not None:
            self._owner.count(dropped=block.num_rows)
        self._connections.stop_listening()
        for connection in self._connections.all():
            self._connections.drop(connection)
