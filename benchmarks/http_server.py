"""A fast HTTP server in a process of its own, whose capacity can be changed while it runs.

It counts the lines of requests. With ``slots`` it processes that many requests at a time, each in
``seconds``; further requests wait. With ``thrash`` above 1, its total rate falls with the number of
requests, like a server that lacks memory or has contended locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import urllib3

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_ANSWER = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nContent-Type: application/json\r\n\r\n%s"
BUCKET = 0.02
"""The timeline's step, in seconds."""
AT_WORK: dict[str, float] = {"slots": 64, "seconds": 0.02, "thrash": 1, "down": 0}
"""A server that works: a request takes some time, and many run in parallel."""
AT_ONCE: dict[str, float] = {"slots": 0, "seconds": 0, "thrash": 1, "down": 0}
"""A server that drops all events: it shows the cost of the client."""


@dataclass
class _State:
    slots: int = 0
    seconds: float = 0.0
    thrash: float = 1.0
    """The exponent of the slowdown beyond ``slots``; 1 is the time to wait in a line."""
    down: bool = False
    busy: int = 0
    events: int = 0
    refused: int = 0
    first: float = 0.0
    last: float = 0.0
    timeline: dict[int, int] = field(default_factory=dict)

    def control(self, query: str) -> None:
        """Change the named values, and count from 0."""
        for name, (value, *_) in parse_qs(query).items():
            setattr(self, name, type(getattr(self, name))(float(value)))
        self.events, self.refused, self.first, self.last, self.timeline = 0, 0, 0.0, 0.0, {}

    def count(self, events: int) -> None:
        """Count events that have arrived."""
        now = time.monotonic()
        self.first = self.first or now
        self.last = now
        self.events += events
        bucket = int(now / BUCKET)
        self.timeline[bucket] = self.timeline.get(bucket, 0) + events

    def counts(self) -> bytes:
        """Return the counts since the last change."""
        values = {name: getattr(self, name) for name in ("events", "refused", "first", "last")}
        return json.dumps({**values, "timeline": sorted(self.timeline.items())}).encode()

    def delay(self) -> float:
        """Return how long a request takes that starts now."""
        over = max(1.0, self.busy / self.slots) if self.slots else 1.0
        return self.seconds * float(over**self.thrash)


class _Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, state: _State) -> None:
        self._state = state
        self._head = b""
        self._left = 0
        self._lines = 0
        self._target = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        if not self._left:
            head, ended, data = (self._head + data).partition(b"\r\n\r\n")
            if not ended:
                self._head = head
                return
            self._head = b""
            self._target = head.split(b" ", 2)[1].decode()
            length = _LENGTH.search(head)
            self._left = int(length[1]) if length else 0
        self._lines += data.count(b"\n")
        self._left -= len(data)
        if self._left <= 0:
            lines, self._left, self._lines = self._lines, 0, 0
            self._answer(lines)

    def _answer(self, lines: int) -> None:
        state, parts = self._state, urlsplit(self._target)
        if parts.path == "/control":
            state.control(parts.query)
            self._write(200, b"{}")
        elif parts.path == "/counts":
            self._write(200, state.counts())
        elif state.down:
            state.refused += 1
            self._write(503, b"{}")
        elif not state.slots:
            self._finish(lines)
        else:
            state.busy += 1
            asyncio.get_running_loop().call_later(state.delay(), self._release, lines)

    def _release(self, lines: int) -> None:
        self._state.busy -= 1
        self._finish(lines)

    def _finish(self, lines: int) -> None:
        self._state.count(lines)
        self._write(200, b"{}")

    def _write(self, status: int, body: bytes) -> None:
        self._transport.write(_ANSWER % (status, len(body), body))


async def _serve() -> None:
    state = _State()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(state), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@dataclass(frozen=True)
class HttpServer:
    """A client of the server."""

    port: int
    _http: urllib3.PoolManager = field(default_factory=urllib3.PoolManager)

    @property
    def url(self) -> str:
        """The address for events."""
        return f"http://127.0.0.1:{self.port}/events"

    def control(self, **changes: float) -> None:
        """Change the server, and count from 0."""
        query = "&".join(f"{name}={value}" for name, value in changes.items())
        self._http.request("GET", f"http://127.0.0.1:{self.port}/control?{query}")

    def counts(self) -> dict[str, Any]:
        """Return ``events``, ``refused``, the times of ``first`` and ``last``, and ``timeline``."""
        answer = self._http.request("GET", f"http://127.0.0.1:{self.port}/counts")
        counts: dict[str, Any] = answer.json()
        return counts


@contextlib.contextmanager
def http_server() -> Iterator[HttpServer]:
    """Run a server, and end it afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.http_server"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield HttpServer(int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    asyncio.run(_serve())
