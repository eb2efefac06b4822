"""Telling systemd how the service is; nothing happens without systemd."""

from __future__ import annotations

import os
import socket

from turnlane.logs import get_logger

log = get_logger(__name__)


def notify(state: str) -> None:
    """Send a state such as ``READY=1`` to whoever started this process, if it wants to know."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    if path.startswith("@"):  # an abstract socket
        path = "\0" + path[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.sendto(state.encode(), path)
    except OSError as error:
        log.warning("systemd.notify_failed", state=state, error=error)
