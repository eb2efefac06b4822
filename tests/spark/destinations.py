"""Destinations of lanes: web servers that accept or refuse events, as a test decides."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from tests.outputs.web_servers import Handler, Reply, Server


class Destination:
    """A server that collects the events that it accepts; ``refuse`` decides."""

    def __init__(self, server: Server) -> None:
        self.url = server.url
        self.refuse: Callable[[list[bytes]], Reply | None] = lambda _: None
        self.taken: list[bytes] = []
        self.refused = 0
        self.most = 0
        """The most requests at a time."""
        self.peer = 0
        """The client port of the last request."""
        self._now = 0
        self._lock = threading.Lock()
        server.behave = self._answer

    def _answer(self, handler: Handler) -> Reply:
        values = handler.read().body.splitlines()
        with self._lock:
            self.peer = handler.client_address[1]
            self._now += 1
            self.most = max(self.most, self._now)
        reply = self.refuse(values)
        with self._lock:
            self._now -= 1
            if reply is not None:
                self.refused += 1
                return reply
            self.taken += values
        return Reply()

    def away(self) -> None:
        """Refuse all further events."""
        self.refuse = lambda _: Reply(503)

    def back(self) -> None:
        """Accept all further events."""
        self.refuse = lambda _: None


def find_pid(url: str, port: int) -> int:
    """Return the process that has a connection to this server from this local port."""
    server = urlsplit(url).port or 80
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    # Other connections of this machine may have the same local port.
    (socket,) = {
        f"socket:[{row[9]}]"
        for row in rows
        if row[1].endswith(f":{port:04X}") and row[2].endswith(f":{server:04X}")
    }
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # The process has ended, or belongs to another user.
            if str(file.readlink()) == socket:
                return int(file.parts[2])
    raise LookupError(f"no process has a connection from port {port}")
