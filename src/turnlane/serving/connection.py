"""One HTTP connection with deadlines and limits, so that no client holds resources for nothing.

uvicorn parses requests and sends answers, and leaves limits to a proxy in front of it. This module
adds them: the headers have to arrive within the idle timeout and fit their limit, a body has to
keep arriving, the client has to read the answer, and the number of connections is bounded.

Only the callbacks of the parser distinguish headers from a body. uvicorn has no public interface
to them, so :class:`Connection` is a subclass of uvicorn's protocol. ``web.py``
does the same with uvicorn's server. :data:`UVICORN_INTERNALS` lists everything that both use, a
test checks it, and ``pyproject.toml`` bounds uvicorn to versions that pass all tests. To raise the
bound, read the changes of these classes first.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

UVICORN_INTERNALS: Final = {
    "HttpToolsProtocol": (
        *("connection_made", "data_received", "pause_writing", "resume_writing", "shutdown"),
        *("on_message_begin", "on_header", "on_headers_complete", "on_body"),
        *("on_message_complete", "on_response_complete"),
        *("loop", "transport", "connections", "cycle", "headers", "url"),
    ),
    "RequestResponseCycle": ("more_body", "response_complete"),
    "Server": (
        *("run", "startup", "main_loop", "on_tick", "shutdown"),
        *("config", "server_state", "started", "should_exit", "lifespan", "servers"),
    ),
    "ServerState": ("connections",),
}
"""The methods and attributes of uvicorn that this package overrides, reads or sets."""

_NEVER: Final = math.inf

_SLOWEST: Final = 64 * 1024
"""A body that brings fewer bytes than this within the idle timeout is too slow."""

_BUSY: Final = "too many connections"
_LARGE: Final = "the request's headers are too large"


class ConnectionLimits(Protocol):
    """The limits of a connection."""

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
    """A connection with a deadline for the next bytes of its client. Only the loop uses it."""

    def __init__(self, limits: ConnectionLimits, **parts: Any) -> None:
        super().__init__(**parts)
        self.limits = limits
        self._deadline = _NEVER
        self._in_headers = True
        """Whether the next bytes belong to the headers of a request."""
        self._head_bytes = 0
        self._body_bytes = 0

    def abort_if_late(self, now: float) -> None:
        """Abort the connection if the deadline of its client is over."""
        if now >= self._deadline:
            self._deadline = _NEVER
            self.transport.abort()

    # ── called by uvicorn and the parser ────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._restart_deadline()
        if len(self.connections) > self.limits.max_connections:
            self._refuse(b"503 Service Unavailable", _BUSY, b"retry-after: 1\r\n")

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._head_bytes > self.limits.max_header_bytes:
            self._refuse(b"431 Request Header Fields Too Large", _LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._restart_deadline()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        # Trailers arrive here, too, one by one and after the check of the headers.
        if not self._in_headers and self._count_head_bytes() > self.limits.max_header_bytes:
            raise httptools.HttpParserError(_LARGE)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._body_bytes = 0
        if self._count_head_bytes() > self.limits.max_header_bytes:
            self._refuse(b"431 Request Header Fields Too Large", _LARGE)
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        super().on_body(body)
        self._body_bytes += len(body)
        if self._body_bytes >= _SLOWEST:
            self._restart_deadline()

    def on_message_complete(self) -> None:
        self._in_headers = True
        self._head_bytes = 0
        if self.transport.is_closing():
            return
        super().on_message_complete()
        self._deadline = _NEVER if not self.cycle.response_complete else self._next_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._deadline = _NEVER if self._is_answering() else self._next_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._deadline = self._next_deadline()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._deadline = _NEVER if self._is_answering() else self._next_deadline()

    # ── deadlines and refusals ──────────────────────────────────────────────────────────────────

    def _restart_deadline(self) -> None:
        """Give the client one idle timeout for its next bytes."""
        self._body_bytes = 0
        self._deadline = self._next_deadline()

    def _next_deadline(self) -> float:
        return self.loop.time() + self.limits.idle_timeout

    def _is_answering(self) -> bool:
        """Return whether the request is complete and its answer is not."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def _count_head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _refuse(self, status: bytes, reason: str, *headers: bytes) -> None:
        body = reason.encode()
        head = (
            b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n%bconnection: close"
        )
        self.transport.write(head % (status, len(body), b"".join(headers)) + b"\r\n\r\n" + body)
        self.transport.close()
