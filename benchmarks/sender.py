"""A process that sends syslog over TCP as fast as the receiver reads it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CONNECTIONS = 2
END_SECONDS = 20.0

_PROGRAM = """
import socket, sys, threading
port, repeats, count = (int(each) for each in sys.argv[2:])
content = open(sys.argv[1], "rb").read()
clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
def send(client):
    for _ in range(repeats):
        client.sendall(content)
    client.shutdown(socket.SHUT_WR)
    client.recv(1)
threads = [threading.Thread(target=send, args=(each,)) for each in clients]
print("ready", flush=True)
sys.stdin.readline()
for each in threads: each.start()
for each in threads: each.join()
print("done", flush=True)
"""
"""Sends a file ``repeats`` times over each connection; the receiver closes the connections."""


class Sender:
    """A process that is ready to send messages repeatedly, about ``events`` in total."""

    def __init__(self, place: Path, port: int, messages: Sequence[bytes], events: int) -> None:
        each = max(1, events // CONNECTIONS)
        repeats = max(1, each // len(messages))
        messages = messages[: max(1, each // repeats)]
        self.messages = messages
        self.times = repeats * CONNECTIONS
        """How often each of the messages is sent."""
        content = place / "content"
        content.write_bytes(b"".join(b"%s\n" % message for message in messages))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *map(str, (content, port, repeats, CONNECTIONS))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._await("ready")

    @property
    def events(self) -> int:
        """The number of messages sent in total."""
        return len(self.messages) * self.times

    def _await(self, word: str) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != word:
            raise RuntimeError("the sender failed")

    def send(self) -> None:
        """Send everything; returns when the receiver has closed the connections."""
        self.start()
        self._await("done")

    def start(self) -> None:
        """Start to send; does not wait."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Wait for the end of the process; kill it if the receiver hangs."""
        try:
            self._process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
