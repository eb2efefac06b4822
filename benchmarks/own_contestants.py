"""The contestants of turnlane: memory and disk queues with their default settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import turnlane
from benchmarks.contestant import Contestant

READ_BATCH = 50_000
"""The events of a batch when a backlog is read: a setting for throughput."""


class Turnlane(Contestant):
    """A queue; the subclass chooses its kind."""

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
    """A memory queue with room for all events."""

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
    """A disk queue that is synced every second."""

    label = "turnlane disk"

    def _settings(self, directory: Path, expected: int) -> dict[str, Any]:
        del expected
        return {"kind": "disk", "path": directory / "queue", "dequeue_batch_size": READ_BATCH}

    def secure(self) -> None:
        # The publisher of this last event waits: when it is persisted, all events before it are.
        self.queue.producer(ack="persisted").publish(b"the end")


class DiskValues(Disk):
    """A disk queue whose reader makes a Python object of every value."""

    label = "turnlane disk, values as bytes"

    def drain(self, count: int) -> None:
        taken = 0
        while taken < count:
            batch = self.queue.get(timeout=10)
            taken += len(batch.block.column("value").to_pylist())
            batch.done()


class AlwaysDisk(Disk):
    """A disk queue with ``durability: always`` whose publishers wait for the sync."""

    label = "turnlane disk, always"

    def __init__(self, directory: Path, expected: int) -> None:
        super().__init__(directory, expected)
        self.producer = self.queue.producer(ack="persisted")
        self.put = self.producer.publish

    def _settings(self, directory: Path, expected: int) -> dict[str, Any]:
        return super()._settings(directory, expected) | {"durability": "always"}
