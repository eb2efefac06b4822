"""The process that the kill loop kills: it follows files into a queue until it dies."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.inputs.files_harness import StubHost, settings
from turnlane.inputs.files import FilesInput
from turnlane.queues import open_queue
from turnlane.queues.buffered import BufferedQueue
from turnlane.testing import FaultyDisk


def live(
    data: Path, pattern: str, knobs: dict[str, Any], kill_at: tuple[str, int, str], pipe: Connection
) -> None:
    """Follow until killed: from outside, or at the nth operation of a kind on a disk file."""
    disk = FaultyDisk()
    queue = open_queue(path=data / "q", name="q", disk=disk, **knobs)
    assert isinstance(queue, BufferedQueue)
    operation, nth, match = kill_at
    if nth:
        disk.kill(operation, nth, match=match)
    running = FilesInput(settings(pattern, read_buffer=512), StubHost(data, queue), disk=disk)
    running.start()
    pipe.send("started")
    threading.Event().wait()
