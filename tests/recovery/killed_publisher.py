"""Processes that tests kill after they were told that a policy dropped some of their events."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.node.http_harness import serve_http
from turnlane.queues import open_queue

EVENTS = 8


def publish_singles(path: Path, knobs: dict[str, Any], ack: str, pipe: Connection) -> None:
    """Publish, report how many events were dropped, and wait for the kill."""
    queue = open_queue(path=path, **knobs)
    producer = queue.producer(ack=ack)
    pipe.send(sum(not producer.publish(b"x", severity=7) for _ in range(EVENTS)))
    pipe.recv()


def publish_over_http(path: Path, knobs: dict[str, Any], ack: str, pipe: Connection) -> None:
    """Do the same through a node."""
    with serve_http(path, {"orders": knobs}) as served:
        event = {"value": "x", "severity": 7}
        told = [served.post(event, params={"ack": ack}).json() for _ in range(EVENTS)]
        pipe.send(sum(answer["dropped"] for answer in told))
        pipe.recv()
