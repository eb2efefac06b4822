"""A node and a program without turnlane share a SQLite file: the file keeps every row."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import turnlane
from tests.table.database_fixture import TIMEOUT, eventually
from turnlane import table
from turnlane.config import Config
from turnlane.events import iterate_events
from turnlane.service import Service

WRITER = Path(__file__).with_name("foreign_writer.py")
ROWS = 1_000
SECONDS = 5
"""Several times the period with which the node looks at its connections."""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with table.connect(f"sqlite:///{path}") as made:
        for name in ("served", "copied"):
            made.sql(f"CREATE QUEUE {name} (user_id BIGINT, payload TEXT) SHARD BY (user_id)")
    return path


@pytest.fixture
def service(database: Path, tmp_path: Path) -> Iterator[Service]:
    """A node with both planes, a table that it serves and a table that it reads as an input."""
    url = f"sqlite:///{database}"
    planes = {plane: {"listen": "127.0.0.1:0"} for plane in ("flight", "http")}
    config = {
        "node": {"data": tmp_path / "node", "shutdown_timeout": "2s", **planes},
        "queues": {"main": {}},
        "tables": {"served": {"url": url}},
        "inputs": [{"type": "table", "queue": "main", "url": url, "table": "copied"}],
    }
    with Service(Config.model_validate(config)).start() as running:
        yield running


def test_all_rows_of_a_foreign_program_arrive(service: Service, database: Path) -> None:
    """The program connects for every row; the node must not let it delete the write-ahead log."""
    settings = [str(database), "served,copied", str(ROWS), str(SECONDS)]
    expected = {f"p{at}" for at in range(ROWS)}
    received: list[str] = []
    with (
        turnlane.connect(service.url("flight")) as client,
        client.table("served").receive() as receiver,
        subprocess.Popen([sys.executable, str(WRITER), *settings]) as writer,
    ):
        while len(received) < ROWS:
            events = receiver.take(100, timeout=TIMEOUT / 2)
            assert events, f"{len(received)} of {ROWS} rows arrived"
            received += [event["payload"] for event in events]
            receiver.ack(events)
        assert receiver.flush(TIMEOUT)
        assert writer.wait(TIMEOUT) == 0
    assert sorted(received) == sorted(expected)
    assert read_copied_payloads(service) == expected
    assert check_integrity(database) == "ok"


def read_copied_payloads(service: Service) -> set[str]:
    """The payloads that the input has put into the queue of the node."""
    queue = service.node.queue("main")
    eventually(lambda: queue.end >= ROWS)
    found: set[str] = set()
    start = queue.low
    while (read := queue.read(start, ROWS)) is not None:
        events = list(iterate_events(read[1], read[0]))
        found |= {json.loads(event.value or b"")["payload"] for event in events}
        start += len(events)
    return found


def check_integrity(database: Path) -> str:
    """What SQLite itself says about the file, in another process and with the node at work."""
    run = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); "
    ask = "print(*c.execute('PRAGMA integrity_check').fetchone())"
    done = subprocess.run(
        [sys.executable, "-c", run + ask, database], capture_output=True, check=True, text=True
    )
    return done.stdout.strip()
