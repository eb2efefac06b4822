"""A close stores every accepted event."""

from __future__ import annotations

from pathlib import Path

from tests.contract.harness import wait_until
from tests.queue_internals import store_of
from turnlane.events import block_of
from turnlane.queues import open_buffered_queue
from turnlane.queues.settings import QueueSettings
from turnlane.testing import FaultyDisk


def test_close_syncs_events_that_are_being_written(tmp_path: Path) -> None:
    """A write that began before the close leaves nothing unsynced."""
    disk = FaultyDisk()
    settings = QueueSettings.of(
        kind="disk", path=tmp_path / "queue", sync_interval="1h", write_buffer="1Mi"
    )
    queue = open_buffered_queue(settings, disk=disk)
    queue.producer(ack="persisted").publish(b"the interval begins with this sync")
    writes = disk.operations["write"]
    disk.delay("write", seconds=0.3, match=".chunk")
    queue.producer().publish_block(block_of([b"x" * 1000] * 2000))
    wait_until(lambda: disk.operations["write"] > writes)
    assert store_of(queue).log.end < queue.end
    queue.close()
    assert store_of(queue).log.synced_end == store_of(queue).log.end == 2001
