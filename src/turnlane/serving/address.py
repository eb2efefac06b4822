"""Addresses to listen on, the rule that public ones are protected, and limits on connections.

gRPC, on which Flight is built, does not list its connections. The list of the open descriptors of
this process is the only way to find them. All other descriptors of the process are in that list
too, the files of SQLite among them. POSIX makes them dangerous: if a process closes *any*
descriptor of a file, it loses *all* ``fcntl`` locks that it holds on that file. SQLite relies on
these locks. Without them another process takes itself for the last user of the database and deletes
the write-ahead log, and committed rows are lost.

So this module never duplicates and never closes a descriptor: :func:`borrow` uses the number
itself. The owner can close it at any moment, and the system can give the number to something else.
If that is a file, nothing happens to it, because the calls that follow work on sockets only. If it
is a socket, :func:`shut_down` can end the wrong connection, but only if the number changes hands
within microseconds; the owner sees a broken connection and connects again. A duplicate would avoid
this, but the duplicate itself can be a file, and to close it drops the locks.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final, Self

from pydantic.json_schema import JsonSchemaValue

from turnlane.errors import AddressTaken, ConfigError
from turnlane.logs import get_logger
from turnlane.runtime import Closeable, PeriodicThread
from turnlane.units import WrittenQuantity

LOOPBACK: Final = "127.0.0.1"

_HELP: Final = "write host:port, such as 127.0.0.1:8088, [::1]:8088, or :8088 for this machine only"
_FORM: Final = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9._*-]*)):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Address(WrittenQuantity):
    """A host and a port; port 0 lets the operating system choose one."""

    schema: ClassVar[JsonSchemaValue] = {
        "type": "string",
        "pattern": f"^(?:{_FORM.pattern})$",
        "description": "an address: host:port",
        "examples": ["127.0.0.1:8088", "[::1]:8088", ":8088"],
    }

    host: str
    port: int

    @classmethod
    def parse(cls, value: object) -> Self:
        """Parse ``127.0.0.1:8088``, ``[::1]:514``, ``*:80`` (all interfaces) or ``:8088``."""
        if isinstance(value, cls):
            return value
        match = _FORM.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None or int(match[3]) > 65_535:
            raise ValueError(f"{value!r} is not an address; {_HELP}")
        host = match[1] or match[2] or LOOPBACK
        return cls("0.0.0.0" if host == "*" else host, int(match[3]))  # noqa: S104 - asked for

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. False for names other than ``localhost``."""
        if self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def with_port(self, port: int) -> Self:
        """Return the same host with another port."""
        return replace(self, port=port)

    def listen(self, kind: int = socket.SOCK_STREAM, *, knob: str = "listen") -> socket.socket:
        """Return a bound socket that does not listen yet.

        Raises ``ConfigError`` for the setting ``knob``, or ``AddressTaken`` if it is in use.
        """
        try:
            family, _, proto, _, place = socket.getaddrinfo(self.host, self.port, type=kind)[0]
        except OSError as error:
            raise ConfigError(knob, f"{self}: there is no such host ({error.strerror})") from None
        # With the protocol: only then does asyncio turn off Nagle's delay (40 ms per answer).
        bound = socket.socket(family, kind, proto)
        try:
            if kind == socket.SOCK_STREAM:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(place)
        except OSError as error:
            bound.close()
            trouble = AddressTaken if error.errno == errno.EADDRINUSE else ConfigError
            raise trouble(knob, f"cannot listen on {self}: {error.strerror}") from None
        return bound

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def normalize_host(host: str) -> str:
    """Return a sender's host; an IPv4 address that came to an IPv6 socket as IPv4."""
    return host.removeprefix("::ffff:")


def check_exposure(
    address: Address,
    *,
    tls: bool,
    tokens: bool,
    insecure: bool,
    knob: str = "listen",
    by: str = "tokens",
) -> None:
    """Raise ``ConfigError`` if other machines can reach an unprotected address.

    ``by`` is the setting that identifies clients. ``insecure`` turns the check off.
    """
    if address.is_loopback or insecure or (tls and tokens):
        return
    missing = " and ".join(word for word, there in (("tls", tls), (by, tokens)) if not there)
    raise ConfigError(
        knob,
        f"{address} can be reached from outside, which needs {missing}: configure that, listen on "
        f"{LOOPBACK}:{address.port}, or force it with insecure: true",
    )


# ── connections ──────────────────────────────────────────────────────────────────────────────────

_OPEN_FILES: Final = Path("/proc/self/fd")

_INFO_BYTES: Final = 64
_LAST_SENT: Final = 44
_LAST_RECEIVED: Final = 52
"""Where Linux's ``struct tcp_info`` has the milliseconds since data last went, and last came."""


def list_connections(port: int) -> Iterator[socket.socket]:
    """Yield every connection of this process to its own ``port``.

    The caller borrows a connection until it asks for the next one. The owner can close it before
    that, and then its methods raise ``OSError``. If the system does not list open files, there are
    no connections.
    """
    numbers = [int(name) for name in os.listdir(_OPEN_FILES)] if _OPEN_FILES.is_dir() else []
    for number in numbers:
        with contextlib.suppress(OSError):  # closed since it was listed
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with borrow(number) as connection:
                if _is_connected(connection, port):
                    yield connection


@contextlib.contextmanager
def borrow(number: int) -> Iterator[socket.socket]:
    """Use the socket with this descriptor, which another owner keeps open, and do not close it.

    Raises ``OSError`` if the descriptor is closed or is not a socket.
    """
    connection = socket.socket(fileno=number)
    try:
        yield connection
    finally:
        connection.detach()


def shut_down(connection: socket.socket) -> bool:
    """Shut a connection down; false if it was shut down before.

    A reader sees the end of the stream, so the handlers of Flight return.
    """
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def shut_down_connections(port: int) -> int:
    """Shut down every connection of this process to its own ``port``; return the number."""
    return sum(map(shut_down, list_connections(port)))


def get_idle_seconds(connection: socket.socket) -> float:
    """Return for how many seconds no data was sent or received."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    (sent,), (received,) = (
        struct.unpack_from("=I", info, place) for place in (_LAST_SENT, _LAST_RECEIVED)
    )
    return float(min(sent, received)) / 1000


def _is_connected(connection: socket.socket, port: int) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    own: int = connection.getsockname()[1]
    connection.getpeername()  # raises if it only listens
    return own == port and connection.type == socket.SOCK_STREAM


log = get_logger(__name__)

CHECK_SECONDS: Final = 1.0
"""How often connections are checked; between checks there can be more than allowed."""
MAX_TIME_SHARE: Final = 0.02
"""The largest share of time for the check, which has to look at all open descriptors."""


class ConnectionWatch(Closeable):
    """Shuts down idle and surplus connections to a port of this process, on its own thread.

    A connection is idle without data in either direction for ``idle_timeout`` seconds. Of more than
    ``max_connections`` the newest are shut down. On systems that do not list open files it does
    nothing.
    """

    def __init__(self, port: int, max_connections: int, *, idle_timeout: float = math.inf) -> None:
        self._port = port
        self._most = max_connections
        self._idle_timeout = idle_timeout
        self._known: set[int] = set()
        """The connections of the last check, by the inode of their socket."""
        self._interval = min(CHECK_SECONDS, idle_timeout / 4)
        self._thread = PeriodicThread(f"turnlane-watch-{port}", self._run, self._interval)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.close()

    def _run(self) -> float:
        """Check all connections; return the pause, long enough to use little computing time."""
        begun = time.monotonic()
        try:
            self._look()
        except Exception:
            log.exception("connections.check_failed", port=self._port)
        return max(self._interval, (time.monotonic() - begun) / MAX_TIME_SHARE)

    def _look(self) -> None:
        found: list[int] = []
        idle = 0
        for connection in list_connections(self._port):
            with contextlib.suppress(OSError):  # the server has closed it since
                if get_idle_seconds(connection) >= self._idle_timeout:
                    idle += shut_down(connection)
                else:
                    found.append(_number(connection))
        crowded = self._cut_newest(found)
        if idle or crowded:
            log.info(
                "connections.shut_down",
                port=self._port,
                idle=idle,
                surplus=crowded,
                max_connections=self._most,
            )

    def _cut_newest(self, found: list[int]) -> int:
        known = [number for number in found if number in self._known]
        come = [number for number in found if number not in self._known]
        self._known = {*known, *come[: self._most - len(known)]}
        if len(found) <= self._most:
            return 0
        crowded = 0
        for connection in list_connections(self._port):
            with contextlib.suppress(OSError):  # the server has closed it since
                if _number(connection) not in self._known:
                    crowded += shut_down(connection)
        return crowded


def _number(connection: socket.socket) -> int:
    """Return the inode of a socket, which is unique while the socket is open."""
    return os.fstat(connection.fileno()).st_ino
