"""The frames that a queue writes, and the batches that it makes of stored frames."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnlane.events import block_of
from turnlane.queues import open_queue
from turnlane.queues.api import Queue
from turnlane.queues.buffer import BlockRange
from turnlane.queues.disk import JOIN_BYTES
from turnlane.storage.store import FRAME_BYTES, group_into_frames
from turnlane.testing import FaultyDisk


def reopened(path: Path, disk: FaultyDisk, frames: list[int]) -> Queue:
    """Return a queue with nothing in memory, and frames of 1 KB events on disk."""
    with open_queue(kind="disk", path=path, compression="none") as queue:
        producer = queue.producer(ack="persisted")
        for events in frames:
            producer.publish_block(block_of([b"x" * 1000] * events))
    return open_queue(kind="disk", path=path, disk=disk, dequeue_batch_size=10_000)


def batches(queue: Queue, events: int) -> list[int]:
    """Return the number of events in each batch."""
    sizes: list[int] = []
    while sum(sizes) < events:
        batch = queue.get(timeout=0)
        sizes.append(batch.block.num_rows)
        batch.done()
    return sizes


LARGE = 4 * JOIN_BYTES // 1000


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        pytest.param([10, 10, 10], [30], id="small ones come together"),
        pytest.param([10, LARGE, 10], [10, LARGE, 10], id="a large one comes alone"),
        pytest.param([LARGE, LARGE], [LARGE, LARGE], id="large ones are never copied"),
    ],
)
def test_only_small_frames_are_joined_to_a_batch(
    tmp_path: Path, frames: list[int], expected: list[int]
) -> None:
    """Joining copies the events: for a large frame this costs more than another batch."""
    with reopened(tmp_path / "queue", FaultyDisk(), frames) as queue:
        assert batches(queue, sum(frames)) == expected


def test_a_large_frame_is_read_once(tmp_path: Path) -> None:
    """The reader keeps the frame that did not fit into the last batch."""
    disk = FaultyDisk()
    with reopened(tmp_path / "queue", disk, [10, LARGE]) as queue:
        assert queue.get(timeout=0).block.num_rows == 10
        before = disk.operations["read"]
        assert queue.get(timeout=0).block.num_rows == LARGE
        assert disk.operations["read"] == before


@pytest.mark.parametrize(("blocks", "frames"), [(1, 1), (29, 1), (31, 2), (45, 2), (110, 5)])
def test_frames_have_about_the_same_size(blocks: int, frames: int) -> None:
    """Full frames and a small rest would be nearly twice as many frames."""
    block = block_of([b"x"])
    size = FRAME_BYTES // 20
    portions = [BlockRange(at, at + 1, size, [block]) for at in range(blocks)]
    made = group_into_frames(portions)
    assert sum(map(len, made)) == blocks
    assert len(made) == frames
    assert max(map(len, made)) - min(map(len, made)) <= 1
