"""The client of outputs that speak HTTP: connections that all senders share, and time limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
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
    TimeoutError,  # noqa: A004 - only in this module
)
from urllib3.util import parse_url

from turnlane.closing import Closing
from turnlane.errors import Never, RetryLater
from turnlane.outputs.hanging_up import hang_up
from turnlane.outputs.tls import ClientTls
from turnlane.outputs.web_answers import Answer, shown

_CONNECTIONS: Final = 64
"""Idle ones that are kept; more senders than that make connections of their own."""
_PIECE: Final = 1 << 16
_NO_RETRIES: Final = urllib3.Retry(total=False, redirect=False)


@dataclass(frozen=True, slots=True)
class Limits:
    """How long connecting and a whole request may take, in seconds; how long an answer may be."""

    connect: float
    total: float
    answer: int = 1 << 16


class WebClient(Closing):
    """Sends requests to one server, those of several threads at a time. Follows no redirects."""

    def __init__(self, url: str, tls: ClientTls, limits: Limits) -> None:
        self._server = parse_url(url)
        self._tls = tls
        self._limits = limits
        self._made: urllib3.HTTPConnectionPool | None = None
        self._making = threading.Lock()
        self._connected = _Connected()

    def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, bytes],
        body: Any = None,  # noqa: ANN401 - whatever is bytes
    ) -> Answer:
        """The answer, whatever it is. Raises ``RetryLater`` if there is none."""
        deadline = time.monotonic() + self._limits.total
        try:
            response = self._pool().urlopen(
                method,
                _target(url),
                body=body,
                headers=headers,  # type: ignore[arg-type]  # bytes are taken as they are
                timeout=urllib3.Timeout(total=self._limits.total),
                retries=_NO_RETRIES,
                redirect=False,
                preload_content=False,
            )
        except LocationValueError as error:
            raise Never(f"{shown(url)} is no address") from error
        except (HTTPError, OSError) as error:
            late = isinstance(error, TimeoutError) and not isinstance(error, NewConnectionError)
            kind = "timeout" if late else "network"
            raise RetryLater(f"{shown(url)}: {self._reason(error)}", kind=kind) from error
        return self._read(response, deadline)

    def _pool(self) -> urllib3.HTTPConnectionPool:
        """Made when it is first needed: the files of its TLS may not be there before."""
        with self._making:
            if self._made is None:
                self._made = self._safe() if self._server.scheme == "https" else self._plain()
            return self._made

    def _plain(self) -> urllib3.HTTPConnectionPool:
        return _Pool(**self._knobs())

    def _safe(self) -> urllib3.HTTPConnectionPool:
        if not self._tls.verify:
            # Said of every connection otherwise, to somebody who has asked for it.
            urllib3.disable_warnings(InsecureRequestWarning)
        return _SafePool(**self._knobs(), ssl_context=self._tls.context())

    def _knobs(self) -> dict[str, Any]:
        server, limit = self._server, self._limits.connect
        place = {"host": server.host, "port": server.port, "maxsize": _CONNECTIONS}
        return {**place, "connect_limit": limit, "connected": self._connected}

    def _read(self, response: urllib3.BaseHTTPResponse, deadline: float) -> Answer:
        """The answer's beginning. A connection whose answer was not read to its end is closed."""
        body, whole = bytearray(), False
        try:
            while not whole and len(body) <= self._limits.answer and time.monotonic() < deadline:
                piece = response.read1(_PIECE)
                body += piece
                whole = not piece
        except (HTTPError, OSError):
            whole = False  # the status is known by now; whether the rest matters, others decide
        if whole:
            response.release_conn()
        else:
            response.close()
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Answer(response.status, headers, bytes(body), whole)

    def _reason(self, error: Exception) -> str:
        """What happened, without urllib3's names for its objects."""
        if isinstance(error, NewConnectionError):
            return str(error).rpartition("): ")[2].rpartition("connection: ")[2]
        if isinstance(error, ConnectTimeoutError):
            return f"no connection within {self._limits.connect:g} s"
        if isinstance(error, TimeoutError):
            return f"no answer within {self._limits.total:g} s"
        inner = next((each for each in reversed(error.args) if isinstance(each, Exception)), error)
        return str(inner) or type(inner).__name__

    def cancel(self) -> None:
        """Have all requests fail that are under way."""
        for connection in self._connected.all():
            if connection.sock is not None:
                hang_up(connection.sock)

    def close(self) -> None:
        """Close the connections that are idle; others are when their requests end."""
        with self._making:
            if self._made is not None:
                self._made.close()


@lru_cache(maxsize=64)
def _target(url: str) -> str:
    """What is asked of the server: most requests go to the same address."""
    return parse_url(url).request_uri


# ── connecting ───────────────────────────────────────────────────────────────────────────────────


class _Connected:
    """The connections there are, for as long as somebody has them. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: WeakSet[HTTPConnection] = WeakSet()

    def add(self, connection: HTTPConnection) -> None:
        with self._lock:
            self._connections.add(connection)

    def all(self) -> list[HTTPConnection]:
        with self._lock:
            return list(self._connections)


class _Connecting(HTTPConnection):
    """Has a time limit for connecting alone: urllib3's own also holds for sending the body."""

    def __init__(
        self, *args: Any, connect_limit: float, connected: _Connected, **knobs: Any
    ) -> None:
        super().__init__(*args, **knobs)
        self._connect_limit = connect_limit
        self._connected = connected

    def connect(self) -> None:
        limit = self.timeout
        assert limit is not None
        self.timeout = min(limit, self._connect_limit)
        try:
            super().connect()
        finally:
            self.timeout = limit
        self.sock.settimeout(limit)
        self._connected.add(self)


class _SafelyConnecting(_Connecting, HTTPSConnection):
    pass


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connecting


class _SafePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SafelyConnecting
