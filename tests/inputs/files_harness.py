"""A files input with a queue of its own, and the lines in that queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.contract.harness import wait_until
from turnlane.inputs.files import FilesInput, FilesSettings
from turnlane.queues import open_queue
from turnlane.queues.buffered import BufferedQueue
from turnlane.storage.disk_io import Disk

QUICK = {"scan_interval": 0.02, "rotate_wait": 0.1}


@dataclass
class StubHost:
    """The part of a node that an input uses."""

    data: Path
    only: BufferedQueue

    def queue(self, name: str) -> BufferedQueue:
        assert name == "q"
        return self.only


@dataclass
class RunningInput:
    """A running input."""

    input: FilesInput
    queue: BufferedQueue

    def rows(self) -> list[tuple[str, bytes]]:
        """Return source and value of all events in the queue, in order."""
        rows: list[tuple[str, bytes]] = []
        at = self.queue.low
        while (found := self.queue.read(at, 10_000)) is not None:
            first, block = found
            values, sources = block.column("value"), block.column("source")
            pairs = zip(sources.to_pylist(), values.to_pylist(), strict=True)
            rows += [(str(source), bytes(value or b"")) for source, value in pairs]
            at = first + block.num_rows
        return rows

    def lines(self, path: Path | None = None) -> list[bytes]:
        return [value for source, value in self.rows() if path is None or source == str(path)]

    def await_lines(self, count: int) -> list[bytes]:
        """Wait for ``count`` lines, check that there are no more, and return them."""
        wait_until(lambda: self.queue.end >= count)
        lines = self.lines()
        assert len(lines) == count
        return lines

    def await_rounds(self, rounds: int = 3) -> None:
        """Wait until the input has scanned more than ``rounds`` times."""
        scans: list[int] = []
        scan = self.input._tracker.scan

        def counted() -> None:
            scan()
            scans.append(1)

        self.input._tracker.scan = counted  # type: ignore[method-assign]
        wait_until(lambda: len(scans) > rounds)
        self.input._tracker.scan = scan  # type: ignore[method-assign]


def settings(*paths: Path | str, **knobs: Any) -> FilesSettings:
    return FilesSettings(**{"queue": "q", "paths": tuple(map(str, paths)), **QUICK, **knobs})


@contextmanager
def open_test_queue(data: Path, disk: Disk | None = None, **knobs: Any) -> Iterator[BufferedQueue]:
    """Open the queue of a data directory."""
    place = {} if knobs.get("kind") == "memory" else {"path": data / "q"}
    queue = open_queue(**{"kind": "disk", "name": "q", **place, **knobs}, disk=disk)
    assert isinstance(queue, BufferedQueue)
    try:
        yield queue
    finally:
        queue.close()


@contextmanager
def run_input(
    data: Path,
    *paths: Path | str,
    queue: BufferedQueue | None = None,
    disk: Disk | None = None,
    **knobs: Any,
) -> Iterator[RunningInput]:
    """Run an input that follows the paths; without ``queue`` it gets a disk queue."""
    if queue is None:
        with (
            open_test_queue(data, sync_interval=0.01) as own,
            run_input(data, *paths, queue=own, disk=disk, **knobs) as running,
        ):
            yield running
        return
    running_input = FilesInput(settings(*paths, **knobs), StubHost(data, queue), disk=disk)
    running_input.start()
    try:
        yield RunningInput(running_input, queue)
    finally:
        # A memory queue acks when a consumer settles events; here there is no consumer.
        running_input.stop(5.0 if queue.settings.kind.value == "disk" else 0.0)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def make_lines(first: int, end: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(first, end))


def make_values(first: int, end: int) -> list[bytes]:
    return [b"line %d" % number for number in range(first, end)]


def await_condition(condition: Callable[[], bool]) -> None:
    wait_until(condition)
