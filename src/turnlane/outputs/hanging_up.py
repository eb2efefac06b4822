"""Hanging up on a destination while another thread waits for it: that is woken, and fails."""

from __future__ import annotations

import contextlib
import socket

from turnlane.serving.sockets import borrow


def hang_up(connection: socket.socket) -> None:
    """End a connection for whoever is using it. Closing alone would wake nobody."""
    with contextlib.suppress(OSError):  # it has ended by itself
        # Not the method of a TLS socket, which takes its state away from the thread that uses it.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def hang_up_on(descriptor: int) -> None:
    """The same for a connection that a library has: its descriptor must be open."""
    with contextlib.suppress(OSError), borrow(descriptor) as connection:
        hang_up(connection)
