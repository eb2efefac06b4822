"""Substitutes for things that a test cannot control: time, a failing disk, a node, a destination.

They are shipped, so that you can test your own code against the same failures as turnlane's::

    disk = FaultyDisk()
    disk.fail("sync", nth=2, error=errno.EIO)       # the second sync fails
    disk.tear(nth=5, keep_bytes=100, kill=True)     # killed in the middle of the fifth write
    disk.fill(after_bytes=1_000_000)                # then full, until something is deleted

    node = MemoryQueue(QueueSettings.of())          # a proxy queue without a network
    proxy = open_queue(kind="proxy", transport=LoopbackTransport(node))

    node = ModelNode()                              # persists and delivers on command
    transport = FlakyTransport(node, crash=node.crash)
    transport.die("after_send", nth=3, crash=True)  # the third block arrives without an answer

    output = FaultyOutput()                         # a destination
    output.fail(RetryLater("busy"), times=3)        # that is busy three times
"""

from __future__ import annotations

from turnlane.testing.machine import OPERATIONS, FaultyDisk, ManualClock, PowerCutDisk
from turnlane.testing.remote import (
    FaultyOutput,
    FlakyConnection,
    FlakyTransport,
    LoopbackConnection,
    LoopbackTransport,
    ModelConnection,
    ModelNode,
    Step,
)

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
    "PowerCutDisk",
    "Step",
]
