"""Runs a node in a process of its own, as users do."""

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

from benchmarks.process_memory import get_own_bytes

CONFIG = "node.yaml"
"""The configuration file of the node, in its directory."""


@dataclass(frozen=True)
class NodeProcess:
    """A running node."""

    pid: int
    flight: str
    """For ``turnlane.connect``."""
    http: str
    """The address that paths are appended to."""
    inputs: Mapping[str, Any]

    def get_own_bytes(self) -> int:
        """Return the private bytes of the process."""
        return get_own_bytes(self.pid)


@contextmanager
def run_node(
    directory: Path,
    queues: Mapping[str, Mapping[str, Any]],
    inputs: list[dict[str, Any]] | None = None,
    pipeline: Mapping[str, Any] | None = None,
) -> Iterator[NodeProcess]:
    """Run ``turnlane serve`` with these queues, and stop it at the end.

    ``pipeline`` has further sections of the configuration, whose queues the node gets, too.
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
    config.write_text(json.dumps(values))  # JSON is YAML.
    command = [sys.executable, "-m", "turnlane", "serve", str(config), "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        about = json.loads(process.stdout.readline())
        try:
            yield NodeProcess(process.pid, about["flight"], about["http"], about["inputs"])
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
