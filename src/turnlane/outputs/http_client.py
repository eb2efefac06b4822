"""An HTTP client for outputs: pooled connections, time limits, and what a response means.

All threads of an output share one ``HttpClient``. It is a thin layer over urllib3 that adds a time
limit for connecting alone, a limit for the size of a response, and a way to abort the requests of
other threads. It never retries and never follows redirects: the lane decides about that.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, Final
from weakref import WeakSet

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    InsecureRequestWarning,
    LocationValueError,
    NewConnectionError,
)
from urllib3.exceptions import TimeoutError as Urllib3TimeoutError
from urllib3.util import parse_url

from turnlane.errors import Never, PayloadTooLarge, RetryLater, TurnlaneError
from turnlane.outputs.connections import ClientTls, abort_connection
from turnlane.retry import MAX_RETRY_AFTER
from turnlane.runtime import Closeable

# ── responses ────────────────────────────────────────────────────────────────────────────────────

_MAX_QUOTE: Final = 300
"""Characters of a response that an error message repeats."""
_TOO_LARGE: Final = frozenset({413, 414, 431})
"""Body, URL or headers too large: fewer events may fit, and a single one never will."""
_REFUSED: Final = frozenset({400, 422})
"""Statuses that are about the contents: the same request would fail again."""
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
    kind = _get_error_kind(response.status)
    return RetryLater(text, after=after, alone=response.is_about_url, kind=kind)


def _get_error_kind(status: int) -> str:
    """Return the label of a status in metrics."""
    match status:
        case 401 | 403 | 407:
            return "auth"
        case 408 | 504:
            return "timeout"
        case 429:
            return "rate_limit"
        case _:
            return "server_error" if status >= 500 else "client_error"


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

_MAX_IDLE: Final = 64
"""Idle connections that are kept. If more threads send, the others get temporary connections."""
_READ_BYTES: Final = 1 << 16
_NO_RETRIES: Final = urllib3.Retry(total=False, redirect=False)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """How long connecting and a whole request may take, in seconds, and the bytes of a response."""

    connect: float
    total: float
    response_bytes: int = 1 << 16


class HttpClient(Closeable):
    """Sends requests to one server. Several threads use it at a time."""

    def __init__(self, url: str, tls: ClientTls, limits: HttpLimits) -> None:
        self._server = parse_url(url)
        self._tls = tls
        self._limits = limits
        self._pool: urllib3.HTTPConnectionPool | None = None
        self._pool_lock = threading.Lock()
        self._connections = _OpenConnections()

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
            response = self._get_pool().urlopen(
                method,
                _get_request_target(url),
                body=body,
                headers=headers,  # type: ignore[arg-type]  # bytes are sent unchanged
                timeout=urllib3.Timeout(total=self._limits.total),
                retries=_NO_RETRIES,
                redirect=False,
                preload_content=False,
            )
        except LocationValueError as error:
            raise Never(f"{remove_query(url)} is not a valid URL") from error
        except (HTTPError, OSError) as error:
            is_timeout = isinstance(error, Urllib3TimeoutError) and not isinstance(
                error, NewConnectionError
            )
            kind = "timeout" if is_timeout else "network"
            text = f"{remove_query(url)}: {self._describe(error)}"
            raise RetryLater(text, kind=kind) from error
        return self._read(response, deadline)

    def cancel(self) -> None:
        """Make all requests in progress fail."""
        for connection in self._connections.list_all():
            if connection.sock is not None:
                abort_connection(connection.sock)

    def close(self) -> None:
        """Close the idle connections; the others are closed when their requests end."""
        with self._pool_lock:
            if self._pool is not None:
                self._pool.close()

    def _get_pool(self) -> urllib3.HTTPConnectionPool:
        """Return the pool. The first request creates it, because it reads the files of TLS."""
        with self._pool_lock:
            if self._pool is None:
                options: dict[str, Any] = {
                    "host": self._server.host,
                    "port": self._server.port,
                    "maxsize": _MAX_IDLE,
                    "connect_limit": self._limits.connect,
                    "open_connections": self._connections,
                }
                if self._server.scheme != "https":
                    self._pool = _Pool(**options)
                else:
                    if not self._tls.verify:
                        # The user asked for it: a warning at every connection does not help.
                        urllib3.disable_warnings(InsecureRequestWarning)
                    self._pool = _TlsPool(**options, ssl_context=self._tls.make_context())
            return self._pool

    def _read(self, response: urllib3.BaseHTTPResponse, deadline: float) -> HttpResponse:
        """Read the response up to the limits. Closes a connection that has more to read."""
        body, is_complete = bytearray(), False
        most = self._limits.response_bytes
        try:
            while not is_complete and len(body) <= most and time.monotonic() < deadline:
                chunk = response.read1(_READ_BYTES)
                body += chunk
                is_complete = not chunk
        except (HTTPError, OSError):
            is_complete = False  # the status is known; the caller decides whether that is enough
        if is_complete:
            response.release_conn()
        else:
            response.close()
        headers = {name.lower(): value for name, value in response.headers.items()}
        return HttpResponse(response.status, headers, bytes(body), is_complete)

    def _describe(self, error: Exception) -> str:
        """Return the reason of a failure, without urllib3's representations of its objects."""
        if isinstance(error, NewConnectionError):
            return str(error).rpartition("): ")[2].rpartition("connection: ")[2]
        if isinstance(error, ConnectTimeoutError):
            return f"no connection within {self._limits.connect:g} s"
        if isinstance(error, Urllib3TimeoutError):
            return f"no answer within {self._limits.total:g} s"
        inner = next((each for each in reversed(error.args) if isinstance(each, Exception)), error)
        return str(inner) or type(inner).__name__


@lru_cache(maxsize=64)
def _get_request_target(url: str) -> str:
    """Return path and query. Cached, because most requests go to the same URL."""
    return parse_url(url).request_uri


class _OpenConnections:
    """The connections that exist. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: WeakSet[HTTPConnection] = WeakSet()

    def add(self, connection: HTTPConnection) -> None:
        with self._lock:
            self._connections.add(connection)

    def list_all(self) -> list[HTTPConnection]:
        with self._lock:
            return list(self._connections)


class _Connection(HTTPConnection):
    """A connection with a time limit for connecting; urllib3's limit includes sending the body."""

    def __init__(
        self, *args: Any, connect_limit: float, open_connections: _OpenConnections, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._connect_limit = connect_limit
        self._open_connections = open_connections

    def connect(self) -> None:
        limit = self.timeout
        assert limit is not None
        self.timeout = min(limit, self._connect_limit)
        try:
            super().connect()
        finally:
            self.timeout = limit
        self.sock.settimeout(limit)
        self._open_connections.add(self)


class _TlsConnection(_Connection, HTTPSConnection):
    pass


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection
