"""Driver and node are killed while events are being sent: every event is delivered."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.harness import wait_until
from tests.outputs.web_servers import Reply, get_unused_url, run_server
from tests.spark.destinations import Destination
from turnlane import connect
from turnlane.client import Client
from turnlane.errors import RetryLater

PATIENCE = 120.0
EVENTS = 5000
KILLS = 2
POISON = {b"a 17", b"a 4242"}
pytestmark = pytest.mark.timeout(600)


class Life:
    """A process that is started again after each kill."""

    def __init__(self, *arguments: str, cwd: Path) -> None:
        self._arguments = arguments
        self._cwd = cwd
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.Popen(
            [sys.executable, "-m", *self._arguments],
            cwd=self._cwd,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(PATIENCE) == -signal.SIGKILL, "the process must not end by itself"

    def kill_and_start(self) -> None:
        self.kill()
        self.process = self._started()


@contextmanager
def is_running(*arguments: str, cwd: Path) -> Iterator[Life]:
    life = Life(*arguments, cwd=cwd)
    try:
        yield life
    finally:
        life.process.kill()
        life.process.wait()


def config(port: int) -> str:
    planes = f'flight: {{listen: "127.0.0.1:{port}"}}, http: {{enabled: false}}'
    queues = "main: {durability: always}, a: {durability: always}, a.dead: {durability: always}"
    return f"node: {{data: data, {planes}}}\nqueues: {{{queues}}}\n"


def read_ledgers(client: Client) -> dict[str, Any] | None:
    """Return the statistics of the queues; ``None`` while the node is away."""
    try:
        found = client.nodes[0].stats()
    except RetryLater:
        return None
    return {name: each["ledger"] for name, each in found.items()}


def test_each_event_is_delivered_or_dead_after_kills(tmp_path: Path) -> None:
    port = int(get_unused_url().rpartition(":")[2])
    (tmp_path / "node.yaml").write_text(config(port))
    url = f"turnlane://127.0.0.1:{port}"
    values = [b"a %d" % number for number in range(EVENTS)]
    with (
        run_server() as server,
        is_running("turnlane", "serve", "node.yaml", cwd=tmp_path) as node,
        connect(url) as client,
    ):
        at = Destination(server)

        def refuse(given: list[bytes]) -> Reply | None:
            time.sleep(0.02)  # Some events are always in flight.
            return Reply(400) if POISON & set(given) else None

        at.refuse = refuse
        with client.queue("main") as main:
            producer = main.producer(ack="persisted")
            for value in values:
                producer.publish(value, key="a-0")
        with is_running("tests.spark.killed_loop_process", url, server.url, cwd=tmp_path) as driver:
            for victim in (driver, node) * KILLS:
                before = len(at.taken)
                wait_until(lambda before=before: len(at.taken) > before, "a send", PATIENCE)  # type: ignore[misc]
                victim.kill_and_start()

            def is_through() -> bool:
                found = read_ledgers(client)
                return found is not None and not (found["main"]["pending"] or found["a"]["pending"])

            wait_until(is_through, "everything to be through", PATIENCE)
        found = read_ledgers(client)
        assert found is not None
        blocks = [block for _, block in client.nodes[0].read("a.dead")]
    assert set(at.taken) == set(values) - POISON, "each at least once, and no bad event"
    dead = Counter(value for block in blocks for value in block.column("value").to_pylist())
    assert dead == Counter(POISON), json.dumps(found)
    assert all(ledger["adds_up"] for ledger in found.values())
    assert found["a"]["accepted"] == EVENTS, "from queue to queue each once"
    assert (found["a"]["delivered"], found["a"]["dead"]) == (EVENTS - 2, 2)
