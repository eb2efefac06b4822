"""Cutting off clients that do not leave: Flight itself can only wait for them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_OPEN_FILES = Path("/proc/self/fd")


def cut_connections(port: int) -> int:
    """Shut down every connection of this process to its own ``port``; returns how many.

    Whoever reads from one finds its end, so that Flight's handlers return. Where the system does
    not list open files nothing happens.
    """
    return sum(map(_cut, _connections(port)))


def _connections(port: int) -> Iterator[socket.socket]:
    numbers = [int(name) for name in os.listdir(_OPEN_FILES)] if _OPEN_FILES.is_dir() else []
    for number in numbers:
        with (
            contextlib.suppress(OSError),  # closed meanwhile, or no socket
            _copied(number) as connection,
        ):
            if _is_connected(connection, port):
                yield connection


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


def _cut(connection: socket.socket) -> bool:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True
