"""A client that sends syslog over TCP as fast as it is taken, in a process of its own."""

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
"""Sends a file so many times over each of its connections, until the receiver closes them."""


class Sender:
    """A process that is ready to send messages over and over, about ``events`` in all."""

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
        """How many messages are sent in all."""
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
        """Begin to send."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Let the process end, by force if the receiver is stuck."""
        try:
            self._process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
