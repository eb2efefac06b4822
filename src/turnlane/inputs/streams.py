"""Reading many stream connections, plain or TLS, with one thread.

Every ready connection is read once in a round, into one shared buffer, and what all of them sent
goes into the queue as one block. So an idle connection costs a socket and a small object, a busy
one cannot starve the others, and while the queue has no room nobody is read: their windows close
and they wait.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from turnlane.formats.syslog import Framing, find, severities
from turnlane.inputs.connections import WANTS, Connection, Connections, Listener
from turnlane.inputs.contract import Input
from turnlane.inputs.gathering import Gathering
from turnlane.inputs.one_way import OneWayPublisher

log = logging.getLogger(__name__)

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
