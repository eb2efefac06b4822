"""Events in queues that a configuration no longer has: does a node say that they are there?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turnlane.events import block_of
from turnlane.node.node import Node

Knobs = dict[str, dict[str, Any]]


def leave(data: Path, *values: bytes, taken: int = 0) -> None:
    """A queue ``orders`` with events, the first of them settled."""
    with Node(data, {"orders": {}}) as node:
        node.queue("orders").producer(ack="persisted").publish_block(block_of(list(values)))
        node.queue("orders").settle(0, taken)


@pytest.mark.parametrize("queues", [{}, {"orders": {"kind": "memory"}}], ids=["gone", "in memory"])
def test_a_queue_that_still_holds_events_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, queues: Knobs
) -> None:
    leave(tmp_path, b"one", b"two", b"three", taken=1)
    with Node(tmp_path, queues):
        (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
        assert "orders holds 2 events that nobody reads" in record.getMessage()
    caplog.clear()
    with Node(tmp_path, {"orders": {}}) as node:
        assert [event.value for event in node.queue("orders").get(timeout=20)] == [b"two", b"three"]
    assert "nobody reads" not in caplog.text


def test_events_settled_out_of_order_are_not_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave(tmp_path, b"one", b"two", b"three")
    with Node(tmp_path, {"orders": {}}) as node:
        node.queue("orders").settle(1, 2)
    with Node(tmp_path):
        assert "holds 2 events" in caplog.text


def test_a_queue_that_is_empty_or_another_kind_on_disk_is_no_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave(tmp_path / "empty", b"one", taken=1)
    with Node(tmp_path / "empty"):
        pass
    leave(tmp_path / "other", b"one")
    with Node(tmp_path / "other", {"orders": {"kind": "disk_assisted"}}):
        pass
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_a_directory_that_is_no_queue_keeps_no_node_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "queues" / "notes").mkdir(parents=True)
    with Node(tmp_path, {"orders": {}}):
        assert "cannot tell whether events wait in" in caplog.text
