"""turnlane's own contestants: the memory and the disk kind, with their default settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import turnlane
from benchmarks.contestant import Contestant

READ_BATCH = 50_000
"""Events of a batch when a backlog is read: the setting for throughput."""


class Turnlane(Contestant):
    """A queue of the kind that a subclass says."""

    events = 100_000

    def __init__(self, directory: Path, expected: int) -> None:
        self.queue = turnlane.open_queue(**self._settings(directory, expected))
        self.producer = self.queue.producer()
        self.put = self.producer.publish

    def _settings(self, directory: Path, expected: int) -> dict[str, Any]:
        raise NotImplementedError

    def put_block(self, values: Sequence[bytes]) -> None:
        self.producer.publish_block(turnlane.block_of(values))

    def drain(self, count: int) -> None:
        taken = 0
        while taken < count:
            batch = self.queue.get(timeout=10)
            taken += batch.block.num_rows
            batch.done()

    def close(self) -> None:
        self.queue.close()


class Memory(Turnlane):
    """The memory kind, with room for everything."""

    label = "turnlane memory"

    def _settings(self, directory: Path, expected: int) -> dict[str, Any]:
        del directory
        return {
            "kind": "memory",
            "size": expected + 1,
            "max_bytes": "8Gi",
            "dequeue_batch_size": min(READ_BATCH, expected),
        }


class Disk(Turnlane):
    """The disk kind, synced every second."""

    label = "turnlane disk"

    def _settings(self, directory: Path, expected: int) -> dict[str, Any]:
        del expected
        return {"kind": "disk", "path": directory / "queue", "dequeue_batch_size": READ_BATCH}

    def secure(self) -> None:
        # One last event whose publisher waits: when it is persisted, everything before it is.
        self.queue.producer(ack="persisted").publish(b"the end")


class DiskValues(Disk):
    """The same, with every value made a Python object on reading."""

    label = "turnlane disk, values as bytes"

    def drain(self, count: int) -> None:
        taken = 0
        while taken < count:
            batch = self.queue.get(timeout=10)
            taken += len(batch.block.column("value").to_pylist())
            batch.done()


class AlwaysDisk(Disk):
    """The disk kind with ``durability: always``, its publishers waiting for the sync."""

    label = "turnlane disk, always"

    def __init__(self, directory: Path, expected: int) -> None:
        super().__init__(directory, expected)
        self.producer = self.queue.producer(ack="persisted")
        self.put = self.producer.publish

    def _settings(self, directory: Path, expected: int) -> dict[str, Any]:
        return super()._settings(directory, expected) | {"durability": "always"}
