"""Queues for tests of disk faults: small chunks, and numbered values."""

from __future__ import annotations

import contextlib
from typing import Any

from tests.recovery.hooked_disk import Stored
from turnlane.errors import EventsLost
from turnlane.queues.producer import BufferedProducer

KNOBS: dict[str, dict[str, Any]] = {
    "disk": {
        "kind": "disk",
        "durability": "always",
        "chunk_size": "4Ki",
        "memory_bytes": "8Ki",
        "write_buffer": "1Ki",
        "compression": "none",
    },
    "disk_assisted": {
        "kind": "disk_assisted",
        "durability": "always",
        "chunk_size": "4Ki",
        "size": 100,
        "compression": "none",
    },
}


def close(queue: Stored) -> None:
    with contextlib.suppress(EventsLost):
        queue.close()
    assert queue.stats().ledger.adds_up


def value(number: int) -> bytes:
    return b"%06d" % number + bytes(100)


def values(first: int, end: int) -> list[bytes]:
    return [value(number) for number in range(first, end)]


def publish(producer: BufferedProducer, first: int, end: int) -> None:
    for number in range(first, end):
        producer.publish(value(number))
