"""Nodes to read from and write to, in the test's own process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from turnlane.events import block_of, get_values
from turnlane.node.flight.server import FlightPlane
from turnlane.node.node import Node
from turnlane.queues.buffered import BufferedQueue
from turnlane.serving.address import LOOPBACK, Address
from turnlane.serving.auth import Authority
from turnlane.storage.disk_io import Disk


class Served:
    """A running node."""

    def __init__(self, node: Node, plane: FlightPlane) -> None:
        self.node = node
        self.plane = plane

    @property
    def url(self) -> str:
        return f"turnlane://{self.plane.address}"

    def queue(self, name: str) -> BufferedQueue:
        return self.node.queue(name)

    def publish(self, queue: str, values: list[bytes], **columns: Any) -> None:
        """Publish, and wait until it is persisted."""
        self.queue(queue).producer(ack="persisted").publish_block(block_of(values, **columns))

    def values(self, queue: str) -> list[bytes]:
        """Return the values of all events in a queue."""
        found: list[bytes] = []
        at = self.queue(queue).low
        while (piece := self.queue(queue).read(at, 1 << 20)) is not None:
            found += get_values([piece[1]])
            at = piece[0] + piece[1].num_rows
        return found


@contextlib.contextmanager
def serving(
    data: Path,
    queues: Mapping[str, Mapping[str, Any]],
    *,
    port: int = 0,
    disk: Disk | None = None,
) -> Iterator[Served]:
    """Run a node with these queues."""
    with Node(data, queues, disk=disk) as node:
        plane = FlightPlane(node, Authority(()), Address(LOOPBACK, port))
        plane.start()
        try:
            yield Served(node, plane)
        finally:
            plane.stop(5.0)


def numbers(first: int, end: int) -> list[bytes]:
    """Return values that are their own offsets."""
    return [b"%d" % number for number in range(first, end)]


def damage(place: Path, content: bytes) -> None:
    """Change a byte of a queue's file."""
    (chunk,) = place.rglob("*.chunk")
    found = bytearray(chunk.read_bytes())
    found[found.index(content)] ^= 1
    chunk.write_bytes(found)
