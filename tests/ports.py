"""Ports for what is to be found at an address that is known before it listens there."""

from __future__ import annotations

import random
import socket

_CHANCE = random.SystemRandom()
"""Of its own: tests that run at a time are given the same seed."""


def free_port() -> int:
    """A port of nobody, for TCP and for UDP.

    It is below those that the system gives away, so that nobody gets it by chance meanwhile.
    """
    while True:
        port = _CHANCE.randrange(10_000, 32_000)
        if _is_free(port, socket.SOCK_STREAM) and _is_free(port, socket.SOCK_DGRAM):
            return port


def _is_free(port: int, kind: socket.SocketKind) -> bool:
    with socket.socket(socket.AF_INET, kind) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
