"""A node in its own process, which tests kill: ``python killed_process.py DATA PORT``."""

from __future__ import annotations

import contextlib
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.frozen import freeze_process
from turnlane.node.flight.server import FlightPlane
from turnlane.node.node import Node
from turnlane.serving.address import LOOPBACK, Address
from turnlane.serving.auth import Authority

QUEUES = {
    "main": {"sync_interval": "20ms", "shutdown_timeout": "1s"},
    "memory": {"kind": "memory"},
    "disk_assisted": {"kind": "disk_assisted"},
}

ROOT = Path(__file__).parents[2]


class KilledProcess:
    """The process, which can be started repeatedly on the same data and port."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"turnlane://{LOOPBACK}:{self.port}"

    def start(self) -> None:
        """Start the process and wait until it listens."""
        command = [
            sys.executable,
            "-m",
            "tests.node.killed_process",
            str(self.data),
            str(self.port),
        ]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], 30)
        assert ready, "the node does not start"
        self.port = int(self._process.stdout.readline())

    def freeze(self, *, frozen: bool) -> None:
        """Stop the process with its connections open, or let it continue."""
        assert self._process is not None
        if frozen:
            freeze_process(self._process.pid)
        else:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            self._process = None


@contextlib.contextmanager
def run_killed_node(data: Path) -> Iterator[KilledProcess]:
    """A node process, killed at the end of the test."""
    made = KilledProcess(data)
    made.start()
    try:
        yield made
    finally:
        made.kill()


if __name__ == "__main__":
    node = Node(Path(sys.argv[1]), QUEUES)
    plane = FlightPlane(node, Authority(), Address(LOOPBACK, int(sys.argv[2])))
    plane.start()
    print(plane.address.port, flush=True)  # noqa: T201 - the test reads it
    sys.stdin.read()
