"""Addresses to listen on, and the rule that only the safe ones are public."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import math
import os
import re
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final, Self

from pydantic.json_schema import JsonSchemaValue

from turnlane.errors import AddressTaken, ConfigError
from turnlane.runtime import Closeable
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
        """An address from ``127.0.0.1:8088``, ``[::1]:514``, ``*:80`` (everywhere) or ``:8088``."""
        if isinstance(value, cls):
            return value
        match = _FORM.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None or int(match[3]) > 65_535:
            raise ValueError(f"{value!r} is not an address; {_HELP}")
        host = match[1] or match[2] or LOOPBACK
        return cls("0.0.0.0" if host == "*" else host, int(match[3]))  # noqa: S104 - asked for

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. A name other than ``localhost`` might be any."""
        if self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def with_port(self, port: int) -> Self:
        """The same host with the port that was really given."""
        return replace(self, port=port)

    def listen(self, kind: int = socket.SOCK_STREAM, *, knob: str = "listen") -> socket.socket:
        """A bound socket, not yet listening.

        Raises ``ConfigError``, or ``AddressTaken`` if another has it, naming ``knob``.
        """
        try:
            family, _, proto, _, place = socket.getaddrinfo(self.host, self.port, type=kind)[0]
        except OSError as error:
            raise ConfigError(knob, f"{self}: there is no such host ({error.strerror})") from None
        # With its protocol named: asyncio turns Nagle's delay (40 ms an answer) off only then.
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
    """A sender's host in the one form for it: one that came by IPv4 to IPv6's socket, as IPv4."""
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
    """Refuse to serve others than this machine unprotected, unless told to. ``ConfigError``.

    ``by`` is the setting by which clients are told from strangers.
    """
    if address.is_loopback or insecure or (tls and tokens):
        return
    missing = " and ".join(word for word, there in (("tls", tls), (by, tokens)) if not there)
    raise ConfigError(
        knob,
        f"{address} can be reached from outside, which needs {missing}: configure that, listen on "
        f"{LOOPBACK}:{address.port}, or force it with insecure: true",
    )


# ── sockets ──
# The connections of a server that does not list them: gRPC, on which Flight is built.
#
# The list of the open descriptors of this process is the only way to find these connections. All
# other descriptors of the process are in that list too, the files of SQLite among them. POSIX
# makes
# them dangerous: if a process closes *any* descriptor of a file, it loses *all* ``fcntl`` locks
# that
# it holds on that file. SQLite relies on these locks. Without them another process takes itself
# for
# the last user of the database and deletes the write-ahead log, and committed rows are lost.
#
# So this module never duplicates and never closes a descriptor: :func:`borrow` uses the number
# itself. The owner can close it at any moment, and the system can give the number to something
# else.
# If that is a file, nothing happens to it, because the calls that follow work on sockets only.
# If it
# is a socket, ``cut`` can end the wrong connection, but only if the number changes hands within
# microseconds; the owner sees a broken connection and connects again. A duplicate would avoid
# this,
# but the duplicate itself can be a file, and to close it drops the locks.

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
    """Shut a connection down; false if that was done before.

    Whoever reads from it finds its end, so that Flight's handlers return.
    """
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def shut_down_connections(port: int) -> int:
    """Shut down every connection of this process to its own ``port``; returns how many."""
    return sum(map(shut_down, list_connections(port)))


def get_idle_seconds(connection: socket.socket) -> float:
    """How long nothing has gone either way; what is on its way, or not taken, counts as gone."""
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


# ── watch ──
# Limits on the connections of a server that has none of its own.

log = logging.getLogger(__name__)

CHECK_SECONDS: Final = 1.0
"""How often it looks; so long may there be more connections than allowed."""
MAX_TIME_SHARE: Final = 0.02
"""Of its time, what it may look for at most: it has to pass by all that the process has open."""


class ConnectionWatch(Closeable):
    """Cuts connections to a port of this process, on a thread of its own, until it is closed.

    Those on which nothing has gone either way for ``idle_timeout`` seconds, and the newest of more
    than ``max_connections``. Where the system does not list open files nothing happens.
    """

    def __init__(self, port: int, max_connections: int, *, idle_timeout: float = math.inf) -> None:
        self._port = port
        self._most = max_connections
        self._idle_timeout = idle_timeout
        self._known: set[int] = set()
        """The connections of the last look, by the number of their socket."""
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"turnlane-watch-{port}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        soon = min(CHECK_SECONDS, self._idle_timeout / 4)
        pause = soon
        while not self._over.wait(pause):
            begun = time.monotonic()
            try:
                self._look()
            except Exception:
                log.exception("connections to port %d could not be looked at", self._port)
            pause = max(soon, (time.monotonic() - begun) / MAX_TIME_SHARE)

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
                "port %d: cut %d idle connections, and %d beyond the %d allowed",
                self._port,
                idle,
                crowded,
                self._most,
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
    """What tells a socket from all others there are."""
    return os.fstat(connection.fileno()).st_ino
