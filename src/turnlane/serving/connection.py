"""One HTTP connection that may not be held open for nothing, nor grow without bound.

uvicorn parses and answers; what it leaves to a proxy in front is done here: headers have to come
within the idle time and fit their limit, a body has to keep coming, an answer has to be taken, and
there are only so many connections.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_NEVER: Final = math.inf

_SLOWEST: Final = 64 * 1024
"""A body that brings fewer bytes than this in an idle time is as good as stuck."""

_BUSY: Final = "too many connections"
_LARGE: Final = "the request's headers are too large"


class ConnectionLimits(Protocol):
    """What a connection is held to."""

    @property
    def max_header_bytes(self) -> int:
        """Request line and headers together."""

    @property
    def max_connections(self) -> int:
        """Connections at a time."""

    @property
    def idle_timeout(self) -> float:
        """Seconds."""


class Connection(HttpToolsProtocol):
    """A connection with a deadline for whatever its client owes; :meth:`cut_if_late` keeps it."""

    def __init__(self, limits: ConnectionLimits, **parts: Any) -> None:
        super().__init__(**parts)
        self.limits = limits
        self._due = _NEVER
        self._heading = True
        """Whether headers are being received, or waited for."""
        self._head_bytes = 0
        self._body_bytes = 0

    def cut_if_late(self, now: float) -> None:
        """Drop the connection if its client has kept it waiting for too long."""
        if now >= self._due:
            self._due = _NEVER
            self.transport.abort()

    # ── what uvicorn calls ──────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()
        if len(self.connections) > self.limits.max_connections:
            self._refuse(b"503 Service Unavailable", _BUSY, b"retry-after: 1\r\n")

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._heading and self._head_bytes > self.limits.max_header_bytes:
            self._refuse(b"431 Request Header Fields Too Large", _LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        # Trailers come here too, one by one and after the headers were judged.
        if not self._heading and self._size_of_head() > self.limits.max_header_bytes:
            raise httptools.HttpParserError(_LARGE)

    def on_headers_complete(self) -> None:
        self._heading = False
        self._body_bytes = 0
        if self._size_of_head() > self.limits.max_header_bytes:
            self._refuse(b"431 Request Header Fields Too Large", _LARGE)
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        super().on_body(body)
        self._body_bytes += len(body)
        if self._body_bytes >= _SLOWEST:
            self._expect()

    def on_message_complete(self) -> None:
        self._heading = True
        self._head_bytes = 0
        if self.transport.is_closing():
            return
        super().on_message_complete()
        self._due = _NEVER if not self.cycle.response_complete else self._later()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._due = _NEVER if self._is_answering() else self._later()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._due = self._later()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._due = _NEVER if self._is_answering() else self._later()

    # ── deadlines and refusals ──────────────────────────────────────────────────────────────────

    def _expect(self) -> None:
        """The client has one idle time for the next thing it owes."""
        self._body_bytes = 0
        self._due = self._later()

    def _later(self) -> float:
        return self.loop.time() + self.limits.idle_timeout

    def _is_answering(self) -> bool:
        """Whether it is the application's turn: a whole request is there, and no whole answer."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def _size_of_head(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _refuse(self, status: bytes, reason: str, *headers: bytes) -> None:
        body = reason.encode()
        head = (
            b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n%bconnection: close"
        )
        self.transport.write(head % (status, len(body), b"".join(headers)) + b"\r\n\r\n" + body)
        self.transport.close()
