"""Limits on the connections of a server that has none of its own."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from typing import Final

from turnlane.closing import Closing
from turnlane.serving.sockets import connections, cut, idle_seconds

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
"""How often it looks; so long may there be more connections than allowed."""


class ConnectionWatch(Closing):
    """Cuts connections to a port of this process, on a thread of its own, until it is closed.

    Those on which nothing has gone either way for ``idle_timeout`` seconds, and the newest of more
    than ``max_connections``. Where the system does not list open files nothing happens.
    """

    def __init__(self, port: int, max_connections: int, *, idle_timeout: float = math.inf) -> None:
        self._port = port
        self._most = max_connections
        self._idle_timeout = idle_timeout
        self._known: dict[int, None] = {}
        """The connections of the last look, by the number of their socket; oldest first."""
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"turnlane-watch-{port}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(min(LOOK_SECONDS, self._idle_timeout / 4)):
            try:
                self._look()
            except Exception:
                log.exception("connections to port %d could not be looked at", self._port)

    def _look(self) -> None:
        idle = self._cut_idle()
        crowded = self._cut_newest()
        if idle or crowded:
            log.info(
                "port %d: cut %d idle connections, and %d beyond the %d allowed",
                self._port,
                idle,
                crowded,
                self._most,
            )

    def _cut_idle(self) -> int:
        return sum(
            cut(each)
            for each in connections(self._port)
            if idle_seconds(each) >= self._idle_timeout
        )

    def _cut_newest(self) -> int:
        found = {_number(each) for each in connections(self._port)}
        known = [number for number in self._known if number in found]
        come = [number for number in found if number not in self._known]
        self._known = dict.fromkeys([*known, *come][: self._most])
        if len(found) <= self._most:
            return 0
        return sum(
            cut(each) for each in connections(self._port) if _number(each) not in self._known
        )


def _number(connection: socket.socket) -> int:
    """What tells a socket from all others there are."""
    return os.fstat(connection.fileno()).st_ino
