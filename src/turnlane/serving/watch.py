"""Limits on the connections of a server that has none of its own."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from typing import Final

from turnlane.closing import Closing
from turnlane.serving.sockets import connections, cut, idle_seconds

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
"""How often it looks; so long may there be more connections than allowed."""
SHARE: Final = 0.02
"""Of its time, what it may look for at most: it has to pass by all that the process has open."""


class ConnectionWatch(Closing):
    """Cuts connections to a port of this process, on a thread of its own, until it is closed.

    Those on which nothing has gone either way for ``idle_timeout`` seconds, and the newest of more
    than ``max_connections``. Where the system does not list open files nothing happens.
    """

    def __init__(self, port: int, max_connections: int, *, idle_timeout: float = math.inf) -> None:
        self._port = port
        self._most = max_connections
        self._idle_timeout = idle_timeout
        self._known: set[int] = set()
        """The connections of the last look, by the number of their socket."""
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
        soon = min(LOOK_SECONDS, self._idle_timeout / 4)
        pause = soon
        while not self._over.wait(pause):
            begun = time.monotonic()
            try:
                self._look()
            except Exception:
                log.exception("connections to port %d could not be looked at", self._port)
            pause = max(soon, (time.monotonic() - begun) / SHARE)

    def _look(self) -> None:
        found: list[int] = []
        idle = 0
        for connection in connections(self._port):
            with contextlib.suppress(OSError):  # the server has closed it since
                if idle_seconds(connection) >= self._idle_timeout:
                    idle += cut(connection)
                else:
                    found.append(_number(connection))
        crowded = self._cut_newest(found)
        if idle or crowded:
            log.info(
                "port %d: cut %d idle connections, and %d beyond the %d allowed",
                self._port,
                idle,
                crowded,
                self._most,
            )

    def _cut_newest(self, found: list[int]) -> int:
        known = [number for number in found if number in self._known]
        come = [number for number in found if number not in self._known]
        self._known = {*known, *come[: self._most - len(known)]}
        if len(found) <= self._most:
            return 0
        crowded = 0
        for connection in connections(self._port):
            with contextlib.suppress(OSError):  # the server has closed it since
                if _number(connection) not in self._known:
                    crowded += cut(connection)
        return crowded


def _number(connection: socket.socket) -> int:
    """What tells a socket from all others there are."""
    return os.fstat(connection.fileno()).st_ino
