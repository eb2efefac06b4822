"""Connections of servers that say nothing of them: gRPC, which Flight is made of."""

from __future__ import annotations

import contextlib
import os
import socket
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
    """Every connection of this process to its own ``port``, for as long as it is looked at.

    Where the system does not list open files there are none.
    """
    numbers = [int(name) for name in os.listdir(_OPEN_FILES)] if _OPEN_FILES.is_dir() else []
    for number in numbers:
        with (
            contextlib.suppress(OSError),  # closed meanwhile, or no socket
            _copied(number) as connection,
        ):
            if _is_connected(connection, port):
                yield connection


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


def _copied(number: int) -> socket.socket:
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _is_connected(connection: socket.socket, port: int) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    own: int = connection.getsockname()[1]
    connection.getpeername()  # raises if it only listens
    return own == port and connection.type == socket.SOCK_STREAM
