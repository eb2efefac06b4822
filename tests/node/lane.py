"""A lane without Spark: reads the main queue, stages what goes where, commits. May be killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow as pa

from turnlane.events import Block, block_of
from turnlane.node.commits import Commit, Range
from turnlane.node.node import Node
from turnlane.queues.log.files import Disk
from turnlane.testing import FaultyDisk

EVENTS = 30
STEP = 10
QUEUES = {
    "main": {"durability": "always", "shutdown_timeout": "1s"},
    "odd": {"durability": "always", "shutdown_timeout": "1s"},
    "all": {"durability": "always", "shutdown_timeout": "1s"},
}


def opened(data: Path, disk: Disk | None = None) -> Node:
    """A node with a main queue, filled the first time, and two that the lane fills."""
    node = Node(data, QUEUES, disk=disk)
    if not node.queue("main").end:
        producer = node.queue("main").producer(ack="persisted")
        producer.publish_block(block_of([b"%d" % number for number in range(EVENTS)]))
    return node


def staged(node: Node, queue: str, block: Block) -> str:
    """Stage a block; returns the stage's id."""
    with node.staging.stage(queue, block.schema) as stage:
        stage.add(block)
        return stage.finish()


def step(node: Node) -> bool:
    """Bring the next range to where it belongs; false at the end of the queue."""
    main = node.queue("main")
    found = main.read(main.low, STEP)
    if found is None:
        return False
    first, block = found
    odd = block.take(pa.array(range(1 - first % 2, block.num_rows, 2)))
    stages = [staged(node, "odd", odd), staged(node, "all", block)]
    node.commits.commit(Commit(stages, [Range("main", first, first + block.num_rows)]))
    return True


def live(data: Path, op: str, nth: int) -> None:
    """Run the lane until it is through, or killed at the ``nth`` such operation."""
    disk = FaultyDisk()
    node = opened(data, disk)
    disk.kill(op, nth)
    while step(node):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def operations(data: Path) -> dict[str, int]:
    """How often each disk operation is used by an undisturbed lane, once the node is open."""
    disk = FaultyDisk()
    with opened(data, disk) as node:
        before = disk.operations.copy()
        while step(node):
            pass
        return dict(disk.operations - before)
