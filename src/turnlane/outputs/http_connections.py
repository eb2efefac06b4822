"""The client of outputs that speak HTTP: connections that all senders share, and time limits."""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Self
from weakref import WeakSet

import urllib3
from pydantic import BaseModel, ConfigDict, Field, model_validator
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
from turnlane.runtime import Closing
from turnlane.serving.address import borrow
from turnlane.validation import Contradiction, Problem

# ── hanging_up ──
# Hanging up on a destination while another thread waits for it: that is woken, and fails.


def hang_up(connection: socket.socket) -> None:
    """End a connection for whoever is using it. Closing alone would wake nobody."""
    with contextlib.suppress(OSError):  # it has ended by itself
        # Not the method of a TLS socket, which takes its state away from the thread that uses it.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def hang_up_on(descriptor: int) -> None:
    """The same for a connection that a library has: its descriptor must be open."""
    with contextlib.suppress(OSError), borrow(descriptor) as connection:
        hang_up(connection)


# ── tls ──
# TLS as a client speaks it: whom an output trusts, and what it shows of itself.


class ClientTls(BaseModel):
    """Files in PEM. They are read where the task runs, when it connects."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ca: Path | None = Field(
        default=None, description="The authorities to trust. Default: those of the system."
    )
    cert: Path | None = Field(
        default=None, description="The certificate to show, followed by its chain."
    )
    key: Path | None = Field(default=None, description="Its private key, not encrypted.")
    verify: bool = Field(
        default=True,
        description="Whether the other side's certificate and name are checked. Without it anybody "
        "can pass for the destination.",
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise Contradiction([Problem("cert", "and key belong together: give both or neither")])
        return self

    def context(self) -> ssl.SSLContext:
        """A client's context, TLS 1.2 or newer.

        Raises ``RetryLater`` naming the file: events wait until somebody has put it right.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None and self.key is not None:
                # No passphrase: without this, OpenSSL would ask for one at the terminal.
                context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(str(each) for each in (self.ca, self.cert, self.key) if each)
            raise RetryLater(f"tls: {files}: {error.strerror or error}") from error
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


# ── web_answers ──
# What an answer of a web server means for the events of its request. Decisions only.

_LONGEST_QUOTE: Final = 300
"""Characters of an answer that are repeated to people."""
_TOO_LARGE: Final = frozenset({413, 414, 431})
"""The body, the address or the headers: those of fewer events may fit, and of one never will."""
_REFUSED: Final = frozenset({400, 422})
"""Statuses that are about the contents: the same request would fail again."""
_ELSEWHERE: Final = frozenset({401, 403, 404, 405, 407})
"""Statuses that are about the address or the rights: another address may do better."""
LONGEST_WAIT: Final = 86_400.0
"""Seconds: nobody who says more is believed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, read as far as it is of use."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = True
    """Whether all of the body was read."""

    @property
    def is_good(self) -> bool:
        """Whether the destination has what it was sent."""
        return 200 <= self.status < 300

    @property
    def blames_address(self) -> bool:
        """Whether requests to another address are worth a try."""
        return self.status in _ELSEWHERE


def error_of(answer: Answer, url: str, now: float) -> TurnlaneError | None:
    """The error that stands for an answer; ``None`` for a good one. ``now``: since the epoch.

    What a person can put right waits for that: a refused password and an unknown path are no
    reason to give up events. Only what is said of the contents is.
    """
    if answer.is_good:
        return None
    text = f"{shown(url)}: HTTP {answer.status}{quoted(answer.body)}"
    if answer.status in _TOO_LARGE:
        return PayloadTooLarge(text)
    if answer.status in _REFUSED:
        return Never(text)
    if 300 <= answer.status < 400:
        where = answer.headers.get("location", "elsewhere")
        return RetryLater(f"{text}; redirects are not followed, this one leads to {where}")
    after = retry_after(answer.headers.get("retry-after"), now)
    kind = _kind(answer.status)
    return RetryLater(text, after=after, alone=answer.blames_address, kind=kind)


def _kind(status: int) -> str:
    """What a status means, in a word."""
    match status:
        case 401 | 403 | 407:
            return "auth"
        case 408 | 504:
            return "timeout"
        case 429:
            return "rate_limit"
        case _:
            return "server_error" if status >= 500 else "client_error"


def retry_after(text: str | None, now: float) -> float | None:
    """The seconds that a header ``Retry-After`` asks for, as a number or as a date."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), LONGEST_WAIT) if math.isfinite(seconds) else None


def shown(url: str) -> str:
    """An address for people, without its query: that is where some have keys."""
    return url.partition("?")[0]


def quoted(body: bytes) -> str:
    """The beginning of an answer in one line, for a message."""
    text = " ".join(body[: 4 * _LONGEST_QUOTE].decode(errors="replace").split())
    text = "".join(sign for sign in text if sign.isprintable() and sign != "�").strip()
    if len(text) > _LONGEST_QUOTE:
        text = f"{text[: _LONGEST_QUOTE - 1]}…"
    return f": {text}" if text else ""


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
            late = isinstance(error, Urllib3TimeoutError) and not isinstance(
                error, NewConnectionError
            )
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
