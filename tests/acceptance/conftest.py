"""Directories of queues in every condition."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.queue_commands import KILLED, fill


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """200 events, the first 15 settled."""
    queue = fill(tmp_path / "orders", name="orders")
    queue.get(15).done()
    queue.close()
    return tmp_path / "orders"


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """100 events, the first 30 settled, by a process that was killed."""
    path = tmp_path / "killed"
    run = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert run.returncode == -signal.SIGKILL
    return path


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    with fill(tmp_path / "running") as queue:
        queue.get(15).done()
        yield tmp_path / "running"


@pytest.fixture
def fastqueue(tmp_path: Path) -> Path:
    """Three blocks as FastQueue writes them, the first of which it has handed out."""
    path = tmp_path / "fast"
    path.mkdir()
    blocks = [struct.pack("<Q", len(data)) + data for data in (b"first", b"second", b"\xff\x00")]
    (path / f"{0:016x}").write_bytes(b"".join(blocks))
    ends = {"reader_offset": len(blocks[0]), "writer_offset": sum(map(len, blocks))}
    counts = {"entry_count": 2, "total_bytes": 8}
    (path / "fastqueue.meta").write_text(json.dumps({"version": 2, **ends, **counts}))
    return path
