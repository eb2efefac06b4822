"""An HTTP client for outputs: pooled connections, time limits, and what a response means.

All threads of an output share one ``HttpClient``. It is a thin layer over ``http.client`` that adds
a time limit for connecting alone, a limit for the size of a response, and a way to abort the
requests of other threads. It never retries and never follows redirects: the lane decides about
that.
"""

from __future__ import annotations

import math
import ssl
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cached_property, lru_cache
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, Final
from urllib.parse import quote, urlsplit

from turnlane.errors import Never, PayloadTooLarge, RetryLater, TurnlaneError
from turnlane.outputs.connections import (
    ClientTls,
    ConnectionPool,
    abort_connection,
    wait_readable,
)
from turnlane.pacing import MAX_RETRY_AFTER
from turnlane.runtime import Closeable

# ── responses ────────────────────────────────────────────────────────────────────────────────────

_MAX_QUOTE: Final = 300
"""Characters of a response that an error message repeats."""
_TOO_LARGE: Final = frozenset({413, 414, 431})
"""Body, URL or headers too large: fewer events may fit, and a single one never will."""
_REFUSED: Final = frozenset({400, 422})
"""Statuses that are about the contents: the same request would fail again."""
_ERROR_KINDS: Final = {
    **dict.fromkeys((401, 403, 407), "auth"),
    **dict.fromkeys((408, 504), "timeout"),
    429: "rate_limit",
}
"""The labels of some statuses in metrics."""
_WRONG_URL: Final = frozenset({401, 403, 404, 405, 407})
"""Statuses that are about the URL or the rights: requests to another URL may succeed."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response, with as much of the body as the limits allow."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    """By name in lower case."""
    body: bytes = b""
    is_complete: bool = True
    """Whether the whole body was read."""

    @property
    def is_success(self) -> bool:
        """Whether the destination accepted the request."""
        return 200 <= self.status < 300

    @property
    def is_about_url(self) -> bool:
        """Whether requests to another URL may succeed."""
        return self.status in _WRONG_URL


def get_response_error(response: HttpResponse, url: str, now: float) -> TurnlaneError | None:
    """Return the error that a response means; ``None`` for a success. ``now``: epoch seconds.

    A mistake that a person can correct, such as a wrong password or path, is retryable: it is no
    reason to give up events. Only statuses about the contents are final.
    """
    if response.is_success:
        return None
    text = f"{remove_query(url)}: HTTP {response.status}{quote_body(response.body)}"
    if response.status in _TOO_LARGE:
        return PayloadTooLarge(text)
    if response.status in _REFUSED:
        return Never(text)
    if 300 <= response.status < 400:
        target = response.headers.get("location", "an unknown address")
        return RetryLater(f"{text}; turnlane does not follow redirects, this one leads to {target}")
    after = parse_retry_after(response.headers.get("retry-after"), now)
    other_kind = "server_error" if response.status >= 500 else "client_error"
    kind = _ERROR_KINDS.get(response.status, other_kind)
    return RetryLater(text, after=after, alone=response.is_about_url, kind=kind)


def parse_retry_after(text: str | None, now: float) -> float | None:
    """Return the seconds that a ``Retry-After`` header asks for, as a number or as a date."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER) if math.isfinite(seconds) else None


def remove_query(url: str) -> str:
    """Return a URL for messages, without its query, which may contain keys."""
    return url.partition("?")[0]


def quote_body(body: bytes) -> str:
    """Return the beginning of a body on one line, after a colon, for a message."""
    text = " ".join(body[: 4 * _MAX_QUOTE].decode(errors="replace").split())
    text = "".join(sign for sign in text if sign.isprintable() and sign != "�").strip()
    if len(text) > _MAX_QUOTE:
        text = f"{text[: _MAX_QUOTE - 1]}…"
    return f": {text}" if text else ""


# ── the client ───────────────────────────────────────────────────────────────────────────────────

_READ_BYTES: Final = 1 << 16
_URL_SIGNS: Final = "/?:@!$&'()*+,;=~%[]"
"""Characters that a path or a query may contain. A ``%`` begins a character that is escaped."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """How long connecting and a whole request may take, in seconds, and the bytes of a response."""

    connect: float
    total: float
    response_bytes: int = 1 << 16


class HttpClient(Closeable):
    """Sends requests to one server. Several threads use it at a time."""

    def __init__(self, url: str, tls: ClientTls, limits: HttpLimits) -> None:
        self._server = urlsplit(url)
        self._tls = tls
        self._limits = limits
        self._pool = ConnectionPool(self._connect)

    def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, bytes],
        body: Any = None,  # noqa: ANN401 - any bytes-like object
    ) -> HttpResponse:
        """Return the response, also an error response. Raises ``RetryLater`` if there is none."""
        deadline = time.monotonic() + self._limits.total
        try:
            with self._pool.borrow() as connection:
                return connection.exchange(method, url, headers, body, deadline)
        except (HTTPException, OSError) as error:
            kind = "timeout" if isinstance(error, TimeoutError) else "network"
            text = f"{remove_query(url)}: {str(error) or type(error).__name__}"
            raise RetryLater(text, kind=kind) from error

    def cancel(self) -> None:
        """Make all requests in progress fail."""
        self._pool.cancel()

    def close(self) -> None:
        """Close the idle connections; the others are closed when their requests end."""
        self._pool.close()

    def _connect(self) -> HttpClientConnection:
        host, context = self._server.hostname or "", self._context
        return HttpClientConnection(host, self._server.port, context, self._limits)

    @cached_property
    def _context(self) -> ssl.SSLContext | None:
        """The TLS context, which reads files: the first connection makes it."""
        if self._server.scheme != "https":
            return None
        context = self._tls.make_context()
        context.set_alpn_protocols(["http/1.1"])
        return context


class HttpClientConnection(HTTPConnection):
    """An open connection. One thread uses it at a time; only :meth:`cancel` is for another one."""

    auto_open = 0

    def __init__(
        self, host: str, port: int | None, context: ssl.SSLContext | None, limits: HttpLimits
    ) -> None:
        self.default_port = 80 if context is None else 443
        super().__init__(host, port or self.default_port, timeout=limits.connect)
        self._limits = limits
        try:
            self.connect()
            if context is not None:
                self.sock = context.wrap_socket(self.sock, server_hostname=host)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"no connection within {limits.connect:g} s") from error
            raise
        # ``http.client`` forgets ``sock`` when the server wants to close the connection after its
        # response. It must be possible to abort reading that response, too.
        self._socket = self.sock

    @property
    def is_open(self) -> bool:
        """Whether the server has neither closed the connection nor sent anything unexpected."""
        return self.sock is not None and not wait_readable(self.sock, 0)

    def cancel(self) -> None:
        """Make the request of another thread fail."""
        abort_connection(self._socket)

    def exchange(
        self,
        method: str,
        url: str,
        headers: Mapping[str, bytes],
        body: Any,  # noqa: ANN401 - any bytes-like object
        deadline: float,
    ) -> HttpResponse:
        """Send a request and return the response. Closes a connection that has more to read."""
        is_sent = True
        try:
            self._limit_time(deadline)
            try:
                self.request(method, _get_request_target(url), body, headers)
            except (BrokenPipeError, ConnectionResetError):
                is_sent = False  # the server may have answered before it read everything
            self._limit_time(deadline)
            response = self.getresponse()
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {self._limits.total:g} s") from error
        content, is_complete = self._read(response, deadline)
        if is_complete and is_sent:
            response.close()
        else:
            self.close()
        fields = {name.lower(): value for name, value in response.headers.items()}
        if fields.get("content-encoding") in ("gzip", "deflate"):  # a user's headers asked for it
            content = _decompress(content, self._limits.response_bytes)
        return HttpResponse(response.status, fields, content, is_complete)

    def _read(self, response: HTTPResponse, deadline: float) -> tuple[bytes, bool]:
        """Return the body up to the limits, and whether that is all of it."""
        body = bytearray()
        try:
            while len(body) <= self._limits.response_bytes and time.monotonic() < deadline:
                self._limit_time(deadline)
                chunk = response.read1(_READ_BYTES)
                if not chunk:
                    return bytes(body), not response.length
                body += chunk
        except (HTTPException, OSError):
            pass  # the status is known; the caller decides whether that is enough
        return bytes(body), False

    def _limit_time(self, deadline: float) -> None:
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))


@lru_cache(maxsize=64)
def _get_request_target(url: str) -> str:
    """Return path and query. Cached, because most requests go to the same URL."""
    _, _, path, query, _ = urlsplit(url)
    return quote(f"{path or '/'}?{query}" if query else path or "/", safe=_URL_SIGNS)


def _decompress(body: bytes, most: int) -> bytes:
    """Return the beginning of a compressed body; the body itself if it is not compressed."""
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body, most)
    except zlib.error:
        return body
