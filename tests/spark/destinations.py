"""Destinations of lanes: web servers that take events, or refuse them, as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.outputs.web_servers import Handler, Reply, Server


class Destination:
    """A server that counts what it has taken, and refuses what it is told to."""

    def __init__(self, server: Server) -> None:
        self.url = server.url
        self.refuse: Callable[[list[bytes]], Reply | None] = lambda _: None
        self.taken: list[bytes] = []
        self.refused = 0
        self.most = 0
        """Requests at a time."""
        self.peer = 0
        """The port that the last request came from."""
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
        """Refuse everything from now on."""
        self.refuse = lambda _: Reply(503)

    def back(self) -> None:
        """Take everything from now on."""
        self.refuse = lambda _: None


def pid_behind(port: int) -> int:
    """The process that has a connection from this port of this machine."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (socket,) = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}")}
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it is gone by now, or not ours
            if str(file.readlink()) == socket:
                return int(file.parts[2])
    raise LookupError(f"nobody has port {port}")
