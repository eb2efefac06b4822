"""A disk with hooks: at a chosen operation a test can make it wait or fail."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.contract.harness import PATIENCE
from turnlane.errors import EventsLost, QueueClosed
from turnlane.events import Block
from turnlane.queues import open_queue
from turnlane.queues.buffered import BufferedQueue
from turnlane.testing import FaultyDisk

Stored = BufferedQueue
Hook = Callable[[Path | int], None]
"""Called with the file or its descriptor before the operation; may wait or raise."""


class _Planned(NamedTuple):
    op: str
    match: str
    hook: Hook


class HookedDisk(FaultyDisk):
    """A faulty disk with hooks."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks: list[_Planned] = []

    def on(self, op: str, hook: Hook, match: str = "") -> None:
        """Call ``hook`` before every such operation, until :meth:`clear`."""
        self._hooks.append(_Planned(op, match, hook))

    def pause(self, op: str, match: str = "", skip: int = 0) -> Pause:
        """Let such operations wait, after the next few."""
        pause = Pause(skip)
        self.on(op, pause, match)
        return pause

    def clear(self) -> None:
        self._hooks.clear()
        super().clear()

    @property
    def open_files(self) -> set[str]:
        """Return the names of the open files."""
        with self._lock:
            return {path.name for path in self._paths.values()}

    def _begin(self, op: str, file: Path | int) -> Any:
        path = file if isinstance(file, Path) else self._get_path(file)
        name = path.name if path else ""
        for planned in list(self._hooks):
            if planned.op == op and planned.match in name:
                planned.hook(file)
        return super()._begin(op, file)


class Pause:
    """A point at which threads wait until the test calls ``end()``. Then it stays open."""

    def __init__(self, skip: int = 0) -> None:
        self._skips = iter(range(skip))
        self._reached = threading.Event()
        self._ended = threading.Event()

    def __call__(self, *args: object) -> None:
        if next(self._skips, None) is not None:
            return
        self._reached.set()
        assert self._ended.wait(PATIENCE), "the test did not let go"

    def await_reached(self) -> None:
        """Wait until a thread waits here."""
        assert self._reached.wait(PATIENCE), "nobody came"

    def end(self) -> None:
        """Let all threads continue."""
        self._ended.set()


class Once:
    """A hook that raises an error the first time, and never again."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self._raised = threading.Event()

    def __call__(self, *args: object) -> None:
        if not self._raised.is_set():
            self._raised.set()
            raise self._error

    @property
    def raised(self) -> bool:
        """Whether the error was raised."""
        return self._raised.is_set()


class Opener:
    """Opens queues, and closes them after the test. Their ledgers must add up."""

    def __init__(self) -> None:
        self.closing = contextlib.ExitStack()

    def __call__(self, kind: str, **knobs: Any) -> BufferedQueue:
        queue = open_queue(kind=kind, **knobs)
        assert isinstance(queue, BufferedQueue)
        self.closing.callback(_close, queue)
        return queue

    def stored(self, kind: str, path: Path, **knobs: Any) -> Stored:
        """Open a queue with a directory."""
        queue = self(kind, path=path, **knobs)
        assert isinstance(queue, BufferedQueue)
        return queue


def _close(queue: BufferedQueue) -> None:
    with contextlib.suppress(EventsLost):
        queue.close()
    assert queue.stats().ledger.adds_up, queue.stats().ledger


def get_block_values(block: Block) -> list[bytes]:
    """Return the values of a block."""
    return [value for value in block.column("value").to_pylist() if value is not None]


def take(queue: BufferedQueue, count: int) -> list[bytes]:
    """Get the next events, settle them, and return their values."""
    found: list[bytes] = []
    while len(found) < count:
        with queue.get(count - len(found), timeout=PATIENCE) as batch:
            found += get_block_values(batch.block)
    return found


def drain_queue(queue: BufferedQueue) -> list[bytes]:
    """Finish the queue, settle all remaining events, and return their values."""
    queue.finish()
    found: list[bytes] = []
    with contextlib.suppress(QueueClosed):
        while True:
            with queue.get(timeout=PATIENCE) as batch:
                found += get_block_values(batch.block)
    return found
