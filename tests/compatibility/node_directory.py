"""The data directory of a node: make one, and observe a node that starts on it.

The node was killed. So the directory has unfinished commits and their stages, queues made at run
time, a queue that is half dropped, the positions of an input that follows files, and the state of
writers and numbered producers, with and without tokens.
"""

from __future__ import annotations

import json
import resource
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

import turnlane
from tests.compatibility.comparison import mask
from tests.compatibility.flight_peer import FlightPeer, connect_peer
from tests.compatibility.queue_directories import make_block
from tests.compatibility.running import NodeProcess, wait_until
from tests.compatibility.spark_source import make_offset, observe_offset

TOKEN: Final = "shop-secret-0123456789"
FILE_LIMIT: Final = 8192
"""Bytes: with this limit the node can write small files, but not to the end of a large one."""

CONFIGURATION: Final = """\
node:
  data: data
  flight: {listen: "127.0.0.1:0"}
  http: {listen: "127.0.0.1:0"}
  shutdown_timeout: 5s
TOKENS
queues:
  main: {durability: always, chunk_size: 4Ki}
  feed: {durability: always}
  copied: {durability: always, compression: none}
  small: {durability: always, size: 4}
  lines: {durability: always}
  spilling: {kind: disk_assisted, size: 100, high_watermark: 50, low_watermark: 20}
GONE
inputs:
  - {type: files, name: app, queue: lines, paths: ["logs/*.log"], scan_interval: 50ms}
"""
GONE: Final = "  gone: {durability: always, size: 4}"
TOKENS: Final = f"""\
  tokens:
    - {{name: shop, secret: {TOKEN}, rights: {{"*": [publish, read, admin]}}}}
"""


# ── making ───────────────────────────────────────────────────────────────────────────────────────


def make_node(directory: Path) -> None:
    """Make the directory of a node that was killed, and its configurations."""
    plain = CONFIGURATION.replace("TOKENS\n", "")
    texts = {
        "open.yaml": plain.replace("GONE", GONE),
        "tokens.yaml": CONFIGURATION.replace("TOKENS\n", TOKENS).replace("GONE", GONE),
        "without.yaml": plain.replace("GONE\n", ""),
        "tokens-without.yaml": CONFIGURATION.replace("TOKENS\n", TOKENS).replace("GONE\n", ""),
    }
    for name, text in texts.items():
        (directory / name).write_text(text)
    (directory / "logs").mkdir()
    (directory / "logs" / "app.log").write_bytes(b"first\nsecond\nthird\n")
    _leave_failed_commit(directory)
    _leave_state_of_token(directory)
    with NodeProcess(directory, "without.yaml") as node, connect_peer(node.location) as peer:
        _make_run_time_queues(node, peer)
        _publish_numbered(node, peer)
        offset = make_offset(node.url, "copied")
        (directory / "spark-offset.json").write_text(json.dumps(offset))
        _leave_commits(directory, node, peer)
    _leave_dropped_queue(directory)
    for name in ("without.yaml", "tokens-without.yaml", "node.log", "ready.json"):
        (directory / name).unlink(missing_ok=True)


def _leave_failed_commit(directory: Path) -> None:
    """A commit into a queue that is no longer configured: it waits until the queue is back."""
    with NodeProcess(directory, "open.yaml") as node, connect_peer(node.location) as peer:
        stage = peer.put({"stage": "gone"}, make_block(100, 10))["stage"]
        with _commit_aside(node, stages=[stage]):
            wait_until(lambda: _is_blocked(peer, "gone"), "a part of the commit is done")
            node.kill()
    with NodeProcess(directory, "without.yaml"):
        wait_until(lambda: _find_commits(directory, ".failed"), "the commit is set aside")


def _leave_state_of_token(directory: Path) -> None:
    """A numbered producer and a writer, known under the name of their token."""
    with (
        NodeProcess(directory, "tokens-without.yaml") as node,
        connect_peer(node.location, TOKEN) as peer,
    ):
        _publish(node, "till-3", 0, 5, token=TOKEN)
        stage = peer.put({"stage": "feed"}, make_block(0, 2))["stage"]
        peer.act("commit", stages=[stage], writer="query-1", epoch=7)


def _make_run_time_queues(node: NodeProcess, peer: FlightPeer) -> None:
    peer.act("create", queue="made", knobs={"max_bytes": "1Gi", "durability": "never"})
    peer.act("create", queue="alerts", knobs={"kind": "disk"}, by_pipeline=True)
    peer.act("create", queue="alerts.dead", knobs={"kind": "disk"}, by_pipeline=True)
    peer.act("create", queue="fleeting", knobs={"kind": "memory", "size": 10})
    peer.act("create", queue="left", knobs={})
    request = urllib.request.Request(
        f"{node.http}/queues/audit",
        json.dumps({"durability": "always", "sync_interval": None}).encode(),
        {"content-type": "application/json"},
        method="PUT",
    )
    urllib.request.urlopen(request).close()
    peer.put({"publish": "left"}, make_block(0, 3))
    peer.put({"publish": "made"}, make_block(0, 3, is_wide=True))


def _publish_numbered(node: NodeProcess, peer: FlightPeer) -> None:
    _publish(node, "till-3", 0, 25)
    request = urllib.request.Request(
        f"{node.http}/queues/main/events", b"paid", {"producer-id": "shop", "sequence": "11"}
    )
    urllib.request.urlopen(request).close()
    peer.put({"publish": "feed"}, make_block(0, 20))
    peer.put({"publish": "copied"}, *(make_block(first, 10) for first in range(0, 200, 10)))
    peer.put({"publish": "spilling", "ack": "accepted"}, make_block(0, 10))
    batch = peer.get(consume="main", max_events=5)
    peer.act("settle", queue="main", first=12, end=15)
    peer.act("release", lease=batch[0][0]["lease"])
    peer.act("purge", queue="main", spans=[[20, 22]], why="a trial")
    stage = peer.put({"stage": "made"}, make_block(50, 2))["stage"]
    peer.act("commit", stages=[stage], writer="query-1", epoch=3)


def _leave_commits(directory: Path, node: NodeProcess, peer: FlightPeer) -> None:
    """Two commits that were begun: one waits for room, one for a disk that takes no more."""
    stage = peer.put({"stage": "small"}, make_block(300, 10))["stage"]
    peer.put({"stage": "small"}, make_block(400, 1))  # it is never committed
    ranges = [{"queue": "main", "first": 0, "end": 10}]
    with _commit_aside(node, stages=[stage], ranges=ranges, writer="query-2", epoch=1):
        wait_until(lambda: _is_blocked(peer, "small"), "a part of the commit is done")
        columns: list[Any] = [pa.array(range(2, 22, 2), pa.int64()), pa.array([1] * 10, pa.int64())]
        places = pa.RecordBatch.from_arrays(columns, names=["offset", "routes"])
        stages = peer.put({"copy": "feed", "into": ["copied"]}, places)["stages"]
        hard = resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE, (FILE_LIMIT, hard))
        with _commit_aside(node, stages=stages, ranges=[{"queue": "feed", "first": 0, "end": 22}]):
            wait_until(lambda: len(_find_commits(directory, ".commit")) == 2, "the second commit")
            node.kill()


def _leave_dropped_queue(directory: Path) -> None:
    """The list of queues says that a queue has to go, and its directory is still there."""
    registry = directory / "data" / "queues.json"
    entries = json.loads(registry.read_text())
    identity = json.loads((directory / "data" / "queues" / "left" / "queue.json").read_text())
    entries["left"] = {"dropped": identity["queue_id"]}
    registry.write_text(json.dumps(entries, indent=1))


def _publish(
    node: NodeProcess, producer_id: str, first: int, count: int, token: str | None = None
) -> None:
    with (
        turnlane.connect(node.url, token=token) as client,
        client.queue("main", producer_id=producer_id) as queue,
    ):
        queue.producer(ack="persisted").publish_block(make_block(first, count))


@contextmanager
def _commit_aside(node: NodeProcess, **commit: Any) -> Iterator[None]:
    """Send a commit that gets no answer, for the node is killed."""

    def send() -> None:
        with suppress(pa.ArrowException), connect_peer(node.location) as peer:
            peer.act("commit", **commit)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()


# ── observing ────────────────────────────────────────────────────────────────────────────────────


def observe_node(directory: Path) -> dict[str, Any]:
    """Start nodes on the directory, and describe what they find and do."""
    _move_positions(directory)
    with NodeProcess(directory, "open.yaml") as node, connect_peer(node.location) as peer:
        with (directory / "logs" / "app.log").open("ab") as file:
            file.write(b"fourth\n")
        found = _observe_open(directory, node, peer)
    with (
        NodeProcess(directory, "tokens.yaml") as node,
        connect_peer(node.location, TOKEN) as peer,
    ):
        found["with_token"] = {
            "resume_at": peer.greet("main", "till-3")["resume_at"],
            "epoch": peer.act("epoch", writer="query-1"),
            "epoch_of_unknown": peer.act("epoch", writer="query-2"),
        }
    return found


def _observe_open(directory: Path, node: NodeProcess, peer: FlightPeer) -> dict[str, Any]:
    taken = {queue: peer.consume(queue, 10) for queue in ("small", "gone")}
    staging = directory / "data" / "staging"
    wait_until(lambda: not any(staging.iterdir()), "all commits are finished")
    wait_until(lambda: _pending(peer, "lines") == 4, "the new line is read")
    peer.act("create", queue="new", knobs={"size": 5})
    events = {name: peer.read(name)[-20:] for name in sorted(peer.act("queues"))}
    events["lines"] = mask(events["lines"], {"timestamp"})
    purged = peer.act("purge", queue="made", spans=[[0, 1]], why="another trial")
    audit = (directory / "data" / "audit.jsonl").read_text().splitlines()
    with urllib.request.urlopen(f"{node.http}/queues") as answer:
        listed = json.load(answer)
    offset = json.loads((directory / "spark-offset.json").read_text())
    return {
        "spark": observe_offset(node.url, "copied", offset),
        "queues": peer.act("queues"),
        "listed": sorted(each["name"] for each in listed["queues"]),
        "registry": json.loads((directory / "data" / "queues.json").read_text()),
        "taken": taken,
        "events": events,
        "ledgers": {name: each["ledger"] for name, each in peer.act("stats").items()},
        "resume_at": {
            producer: peer.greet("main", producer)["resume_at"]
            for producer in ("till-3", "shop", "unknown")
        },
        "epochs": {
            writer: peer.act("epoch", writer=writer)["epoch"]
            for writer in ("query-1", "query-2", "unknown")
        },
        "commits": _find_commits(directory, ""),
        "directories": sorted(each.name for each in (directory / "data" / "queues").iterdir()),
        "purged": purged,
        "audit": mask([json.loads(line) for line in audit], {"time"}),
    }


def _move_positions(directory: Path) -> None:
    """Give the positions of files the identity that the files have here."""
    positions = directory / "data" / "inputs" / "app.json"
    saved = json.loads(positions.read_text())
    for entry in saved["files"]:
        file = directory / "logs" / Path(entry["path"]).name
        entry["key"] = [file.stat().st_dev, file.stat().st_ino]
        entry["path"] = str(directory / "logs" / file.name)
    positions.write_text(json.dumps(saved))


def _pending(peer: FlightPeer, queue: str) -> int:
    pending: int = peer.act("stats", queue=queue)[queue]["ledger"]["pending"]
    return pending


def _is_blocked(peer: FlightPeer, queue: str) -> bool:
    """Tell whether a publisher waits for room, and the queue has what came before."""
    stats = peer.act("stats", queue=queue)[queue]
    return bool(stats["blocked_publishers"] and stats["syncs"])


def _find_commits(directory: Path, suffix: str) -> list[str]:
    names = (path.name for path in (directory / "data" / "commits").iterdir())
    return sorted(name for name in names if name.endswith(suffix))
