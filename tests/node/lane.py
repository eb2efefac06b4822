"""A lane without Spark: it reads the main queue, stages events for two queues, and commits."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from turnlane.events import Block, block_of, get_values
from turnlane.intervals import COPY_SCHEMA
from turnlane.node.commit_record import Commit, SettleRange
from turnlane.node.node import Node
from turnlane.node.staging import StageContents
from turnlane.queues.buffered import BufferedQueue
from turnlane.storage.disk_io import Disk
from turnlane.testing import FaultyDisk

EVENTS = 30
STEP = 10
QUEUES = {
    "main": {"durability": "always", "shutdown_timeout": "1s"},
    "odd": {"durability": "always", "shutdown_timeout": "1s"},
    "all": {"durability": "always", "shutdown_timeout": "1s"},
}


def open_node(data: Path, disk: Disk | None = None) -> Node:
    """Open a node with a main queue, filled at the first start, and two target queues."""
    node = Node(data, QUEUES, disk=disk)
    if not node.queue("main").end:
        producer = node.queue("main").producer(ack="persisted")
        producer.publish_block(block_of([b"%d" % number for number in range(EVENTS)]))
    return node


def stage_block(node: Node, queue: str, block: Block) -> str:
    """Stage a block; return the id of the stage."""
    with node.staging.stage(StageContents(queue, block.schema)) as stage:
        stage.add(block)
        return stage.finish()


def read_contents(queue: BufferedQueue) -> list[bytes]:
    """Return all values of a queue without settling them."""
    found: list[bytes] = []
    at = queue.low
    while (piece := queue.read(at, 1 << 20)) is not None:
        first, block = piece
        assert first == at, "events are missing"
        found += get_values([block])
        at = first + block.num_rows
    return found


def stage_copies(node: Node, first: int, count: int) -> list[str]:
    """Stage references to a range of the main queue: all events, and the odd ones."""
    offsets = range(first, first + count)
    routes = [1 + 2 * (offset % 2) for offset in offsets]
    places = pa.record_batch([pa.array(offsets, pa.int64()), pa.array(routes)], schema=COPY_SCHEMA)
    with node.copy(node.queue("main"), ["all", "odd"]) as copying:
        copying.add(places)
        return copying.finish()


def commit_next_range(node: Node, *, by_place: bool = False) -> bool:
    """Copy and commit the next range; false at the end of the queue."""
    main = node.queue("main")
    found = main.read(main.low, STEP)
    if found is None:
        return False
    first, block = found
    if by_place:
        stages = stage_copies(node, first, block.num_rows)
    else:
        odd = block.take(pa.array(range(1 - first % 2, block.num_rows, 2)))
        stages = [stage_block(node, "odd", odd), stage_block(node, "all", block)]
    node.commits.commit(Commit(stages, [SettleRange("main", first, first + block.num_rows)]))
    return True


def run_lane(data: Path, op: str, nth: int, by_place: bool) -> None:
    """Run the lane to its end, or until it is killed at the ``nth`` such operation."""
    disk = FaultyDisk()
    node = open_node(data, disk)
    disk.kill(op, nth)
    while commit_next_range(node, by_place=by_place):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def open_until_killed(
    data: Path, queues: Mapping[str, Mapping[str, Any]], op: str, nth: int
) -> None:
    """Open a node; be killed at the ``nth`` such operation, or when the node is open."""
    disk = FaultyDisk()
    disk.kill(op, nth)
    Node(data, queues, disk=disk)
    os.kill(os.getpid(), signal.SIGKILL)


def count_operations(data: Path, *, by_place: bool = False) -> dict[str, int]:
    """Count the disk operations of an undisturbed lane after the node is open."""
    disk = FaultyDisk()
    with open_node(data, disk) as node:
        before = disk.operations.copy()
        while commit_next_range(node, by_place=by_place):
            pass
        return dict(disk.operations - before)
