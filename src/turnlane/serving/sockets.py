"""The connections of a server that does not list them: gRPC, on which Flight is built.

The list of the open descriptors of this process is the only way to find these connections. All
other descriptors of the process are in that list too, the files of SQLite among them. POSIX makes
them dangerous: if a process closes *any* descriptor of a file, it loses *all* ``fcntl`` locks that
it holds on that file. SQLite relies on these locks. Without them another process takes itself for
the last user of the database and deletes the write-ahead log, and committed rows are lost.

So this module never duplicates and never closes a descriptor: :func:`borrow` uses the number
itself. The owner can close it at any moment, and the system can give the number to something else.
If that is a file, nothing happens to it, because the calls that follow work on sockets only. If it
is a socket, ``cut`` can end the wrong connection, but only if the number changes hands within
microseconds; the owner sees a broken connection and connects again. A duplicate would avoid this,
but the duplicate itself can be a file, and to close it drops the locks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_OPEN_FILES: Final = Path("/proc/self/fd")

_INFO_BYTES: Final = 64
_LAST_SENT: Final = 44
_LAST_RECEIVED: Final = 52
"""Where Linux's ``struct tcp_info`` has the milliseconds since data last went, and last came."""


def connections(port: int) -> Iterator[socket.socket]:
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


def cut(connection: socket.socket) -> bool:
    """Shut a connection down; false if that was done before.

    Whoever reads from it finds its end, so that Flight's handlers return.
    """
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def cut_connections(port: int) -> int:
    """Shut down every connection of this process to its own ``port``; returns how many."""
    return sum(map(cut, connections(port)))


def idle_seconds(connection: socket.socket) -> float:
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
