"""Tests of the warnings about events in queues that no configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import turnlane
from turnlane.config import loads
from turnlane.events import block_of
from turnlane.node.node import Node
from turnlane.service import Service

Knobs = dict[str, dict[str, Any]]


def leave_queue(data: Path, *values: bytes, taken: int = 0) -> None:
    """Leave a queue ``orders`` with events, the first of them settled."""
    with Node(data, {"orders": {}}) as node:
        node.queue("orders").producer(ack="persisted").publish_block(block_of(list(values)))
        node.queue("orders").settle(0, taken)


@pytest.mark.parametrize("queues", [{}, {"orders": {"kind": "memory"}}], ids=["gone", "in memory"])
def test_orphan_queue_with_events_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, queues: Knobs
) -> None:
    leave_queue(tmp_path, b"one", b"two", b"three", taken=1)
    with Node(tmp_path, queues):
        (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
        assert record.getMessage().startswith("queue.orphan_found path=")
        assert "orders events=2 " in record.getMessage()
    caplog.clear()
    with Node(tmp_path, {"orders": {}}) as node:
        assert [event.value for event in node.queue("orders").get(timeout=20)] == [b"two", b"three"]
    assert "queue.orphan_found" not in caplog.text


def test_settled_events_of_an_orphan_queue_are_not_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave_queue(tmp_path, b"one", b"two", b"three")
    with Node(tmp_path, {"orders": {}}) as node:
        node.queue("orders").settle(1, 2)
    with Node(tmp_path):
        assert "orders events=2 " in caplog.text


def test_empty_queue_or_other_kind_on_disk_is_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave_queue(tmp_path / "empty", b"one", taken=1)
    with Node(tmp_path / "empty"):
        pass
    leave_queue(tmp_path / "other", b"one")
    with Node(tmp_path / "other", {"orders": {"kind": "disk_assisted"}}):
        pass
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_directory_that_is_not_a_queue_does_not_prevent_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "queues" / "notes").mkdir(parents=True)
    with Node(tmp_path, {"orders": {}}):
        assert "queue.orphan_unreadable" in caplog.text


ACTIONS = "actions: [{name: a, output: {type: discard}}]\n"
WITH_LATER = ACTIONS + "queues: {later: {}}\n"


@pytest.mark.parametrize(
    ("by_pipeline", "more", "told"),
    [(True, ACTIONS, True), (True, WITH_LATER, False), (True, "", False), (False, ACTIONS, False)],
    ids=["gone", "configured", "pipeline elsewhere", "made by somebody else"],
)
def test_queue_of_a_removed_action_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, more: str, *, by_pipeline: bool, told: bool
) -> None:
    planes = "flight: {listen: '127.0.0.1:0'}, http: {enabled: false}"
    head = f"node: {{data: '{tmp_path}', {planes}}}\n"
    with Service(loads(head + ACTIONS)).start() as service:
        with turnlane.connect(service.url("flight")) as client:
            node = client.node
            (node.create_for_action if by_pipeline else node.create)("later")
            client.queue("later").producer(ack="persisted").publish(b"waits")
        service.node.create("other")  # the entry of the queue is written again
    for _ in range(2):  # and read again
        caplog.clear()
        with Service(loads(head + more)).start() as service:
            service.warn_of_unread_queues()
        assert ("queue.without_action queue=later events=1" in caplog.text) == told
