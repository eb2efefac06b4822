"""Fixtures for tests of inputs: real nodes with disk queues."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.inputs.web_inputs import open_node
from turnlane.node.node import Node


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Node]:
    """A node with the disk queue ``main``, synced before every ack, and a small ``narrow`` one."""
    queues: dict[str, dict[str, Any]] = {
        "main": {"kind": "disk", "durability": "always"},
        "narrow": {"kind": "memory", "size": 10, "light_delay_mark": None},
    }
    with Node(tmp_path / "data", queues) as node:
        yield node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node for inputs that are servers."""
    with open_node(tmp_path / "node") as found:
        yield found
