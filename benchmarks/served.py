"""A node in a process of its own, as a user runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.resident import own_bytes

CONFIG = "node.yaml"
"""The file that the node was given, in its directory."""


@dataclass(frozen=True)
class Served:
    """A running node."""

    pid: int
    flight: str
    """For ``turnlane.connect``."""
    http: str
    """The address that paths are appended to."""
    inputs: Mapping[str, Any]

    def resident_bytes(self) -> int:
        """What it has in memory for itself."""
        return own_bytes(self.pid)


@contextmanager
def served(
    directory: Path,
    queues: Mapping[str, Mapping[str, Any]],
    inputs: list[dict[str, Any]] | None = None,
    pipeline: Mapping[str, Any] | None = None,
) -> Iterator[Served]:
    """Run ``turnlane serve`` with these queues; at the end it is stopped in order.

    ``pipeline`` are further sections of the configuration, whose queues it has, too.
    """
    config = directory / CONFIG
    values = {
        "node": {
            "data": str(directory / "data"),
            "flight": {"listen": "127.0.0.1:0"},
            "http": {"listen": "127.0.0.1:0"},
        },
        "queues": queues,
        "inputs": inputs or [],
        **(pipeline or {}),
    }
    config.write_text(json.dumps(values))  # which is YAML, too
    command = [sys.executable, "-m", "turnlane", "serve", str(config), "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        about = json.loads(process.stdout.readline())
        try:
            yield Served(process.pid, about["flight"], about["http"], about["inputs"])
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
