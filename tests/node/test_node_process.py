"""Tests of the process of ``turnlane run``: it restarts after a crash, ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import turnlane
from tests.contract.harness import wait_until
from tests.ports import free_port
from turnlane.cli.process import NodeProcess
from turnlane.node.node import Node

PATIENCE = 60
CONFIG = (
    "node: {data: data, flight: {listen: '127.0.0.1:0'}, http: {listen: '127.0.0.1:0'}}\n"
    "actions: [{name: a, queue: disk, output: {type: discard}}]\n"
)

PARENT = """
import sys, time
from pathlib import Path
from turnlane.cli.process import NodeProcess

node = NodeProcess(Path("c.yaml"), Path("c.yaml").read_text())
node.start()
while node.ready is None:
    node.poll()
    time.sleep(0.05)
print(node.ready["pid"], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeProcess]:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    with NodeProcess(Path("c.yaml"), CONFIG) as made:
        yield made


def is_ready(node: NodeProcess) -> bool:
    assert node.poll() is None, "it died"
    return node.ready is not None


def wait_for_exit(node: NodeProcess) -> int:
    """Wait for the end of the process; return its exit code."""
    deadline = time.monotonic() + PATIENCE
    while (code := node.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return code


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_dead_node_process_is_restarted(node: NodeProcess) -> None:
    node.start()
    wait_until(lambda: is_ready(node), patience=PATIENCE)
    assert node.ready is not None
    os.kill(node.ready["pid"], signal.SIGKILL)
    assert wait_for_exit(node) == -signal.SIGKILL
    assert node.ready is None
    wait_until(node.restart_if_due, patience=PATIENCE)
    wait_until(lambda: is_ready(node), patience=PATIENCE)
    assert node.starts == 2
    assert node.stop(PATIENCE)


@pytest.mark.parametrize(
    "change",
    [("parse: json", "parse: jsno"), ("${PLACE}", "elsewhere"), ("'127.0.0.1:", "'127.0.0.2:")],
    ids=["rejected", "other data", "other address"],
)
def test_restarted_node_process_keeps_its_configuration(
    change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLACE", "data")
    text = CONFIG.replace("data: data", "data: '${PLACE}'").replace(":0'", f":{free_port()}'", 1)
    text += "parse: json\n"
    with NodeProcess(Path("c.yaml"), text) as node:
        node.start()
        wait_until(lambda: is_ready(node), patience=PATIENCE)
        assert node.ready is not None
        before = node.ready
        with turnlane.connect(before["flight"]) as client:
            client.queue("a").producer(ack="persisted").publish(b"kept")
        Path("c.yaml").write_text(text.replace(*change))
        os.kill(before["pid"], signal.SIGKILL)
        assert wait_for_exit(node) == -signal.SIGKILL
        wait_until(node.restart_if_due, patience=PATIENCE)
        wait_until(lambda: is_ready(node), patience=PATIENCE)
        assert node.ready["flight"] == before["flight"]
        with turnlane.connect(before["flight"]) as client:
            assert client.stats()["a"]["ledger"]["pending"] == 1
        assert node.stop(PATIENCE)
    assert not Path("elsewhere").exists()


def test_events_of_a_removed_action_are_logged_at_the_first_start_only(
    node: NodeProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    """Later the pipeline runs, with actions that may be new."""
    warning = "queue.without_action queue=later events=1"
    with Node(Path("data")) as before:
        queue = before.create_for_action("later")
        queue.producer(ack="persisted").publish(b"waits")
    node.start()
    wait_until(lambda: is_ready(node), patience=PATIENCE)
    assert warning in capfd.readouterr().err
    assert node.ready is not None
    os.kill(node.ready["pid"], signal.SIGKILL)
    wait_for_exit(node)
    wait_until(node.restart_if_due, patience=PATIENCE)
    wait_until(lambda: is_ready(node), patience=PATIENCE)
    assert warning not in capfd.readouterr().err
    assert node.stop(PATIENCE)


def test_node_process_that_cannot_start_exits_with_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with NodeProcess(tmp_path / "c.yaml", "node: {}") as node:
        node.start()
        assert wait_for_exit(node) == 78
    assert f"{tmp_path}/c.yaml:1:" in capfd.readouterr().err


def test_node_process_stops_cleanly_with_its_parent(node: NodeProcess, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed process leaves files behind
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_alive(pid), patience=PATIENCE)
    _, errors = parent.communicate()
    assert "node.stopped" in errors
