"""Stand-ins for what tests cannot command: time, disks that fail, a node at the far end.

Shipped, so that you can test your own code against the same troubles as turnlane's::

    disk = FaultyDisk()
    disk.fail("sync", nth=2, error=errno.EIO)       # the second sync fails
    disk.tear(nth=5, keep_bytes=100, kill=True)     # killed in the middle of the fifth write
    disk.fill(after_bytes=1_000_000)                # then full, until something is deleted

    node = MemoryQueue(QueueSettings.of())          # a proxy queue without a network
    proxy = open_queue(kind="proxy", transport=LoopbackTransport(node))

    node = ModelNode()                              # one that persists and delivers when told to
    transport = FlakyTransport(node, crash=node.crash)
    transport.die("after_send", nth=3, crash=True)  # the third block arrives; nobody hears of it

    output = FaultyOutput()                         # a destination
    output.fail(RetryLater("busy"), times=3)        # that is busy for a while
"""

from __future__ import annotations

from turnlane.testing.clock import ManualClock
from turnlane.testing.faulty_disk import OPERATIONS, FaultyDisk
from turnlane.testing.flaky import FlakyConnection, FlakyTransport, Step
from turnlane.testing.loopback import LoopbackConnection, LoopbackTransport
from turnlane.testing.model_node import ModelConnection, ModelNode
from turnlane.testing.output import FaultyOutput

__all__ = [
    "OPERATIONS",
    "FaultyDisk",
    "FaultyOutput",
    "FlakyConnection",
    "FlakyTransport",
    "LoopbackConnection",
    "LoopbackTransport",
    "ManualClock",
    "ModelConnection",
    "ModelNode",
    "Step",
]
