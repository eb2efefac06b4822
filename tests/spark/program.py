"""``turnlane`` as a separate process, for tests that read its output and kill it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 250


class Program:
    """A ``turnlane`` process that reports its events as JSON."""

    def __init__(self, place: Path, *arguments: str) -> None:
        self.place = place
        self._said = queue.SimpleQueue[dict[str, Any] | None]()
        self.heard: list[dict[str, Any]] = []
        self._errors = (place / "stderr").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "turnlane", *arguments, "--json"],
            cwd=place,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._listen)
        self._reader.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # A kill may cut off the last line.
                self._said.put(json.loads(line))
        self._said.put(None)

    def wait_for(self, event: str, **about: Any) -> dict[str, Any]:
        """Return the next report that matches."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                said = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                said = None
            if said is None:
                pytest.fail(f"no {event} {about}, but {self.heard}\n{self.errors}")
            self.heard.append(said)
            if said["event"] == event and about.items() <= said.items():
                return said

    def hear(self) -> list[dict[str, Any]]:
        """Return all reports until now."""
        with contextlib.suppress(queue.Empty):
            while (said := self._said.get_nowait()) is not None:
                self.heard.append(said)
        return self.heard

    @property
    def errors(self) -> str:
        return (self.place / "stderr").read_text(errors="replace")

    def ended(self) -> int:
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """Kill the process and its Java process; its node is in another session."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(PATIENCE)

    def close(self) -> None:
        self.kill()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()


def list_descendants(pid: int) -> list[int]:
    """Return all processes that a process has started, and those that these have started."""
    try:
        children = children_of(pid)
    except FileNotFoundError:  # The process has ended.
        return []
    return [each for child in children for each in (child, *list_descendants(child))]


def read_command_line(pid: int) -> str:
    """Return what every user of the machine can read of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def children_of(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # The thread has ended.
            children += map(int, (task / "children").read_text().split())
    return children
