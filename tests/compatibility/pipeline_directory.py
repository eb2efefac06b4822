"""The directory of a pipeline on Spark: its node's data, its checkpoints, and what it has written.

A lane that counts goes on with its counts only if a newer version finds the same checkpoint and
understands the offsets in it.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow.dataset as ds

import turnlane
from tests.compatibility.comparison import mask
from tests.compatibility.flight_peer import connect_peer
from tests.compatibility.running import NodeProcess, read_json_lines

CONFIGURATION: Final = """\
node:
  data: data
  flight: {listen: "127.0.0.1:0"}
  http: {listen: "127.0.0.1:0"}
  shutdown_timeout: 5s
main: {durability: always}
parse: syslog
actions:
  - name: refused
    filter: severity = 0
    queue: disk
    output: {type: http, url: "http://127.0.0.1:PORT/"}
  - name: counts
    queue: {kind: disk, durability: always}
    sql: SELECT hostname, count(*) AS events FROM events GROUP BY hostname
    output_mode: update
    output: {type: file, path: counts.jsonl}
  - name: archive
    queue: {kind: disk, durability: always}
    lane: {min_events: 1}
    output: {type: spark, format: parquet, path: archive, columns: [hostname, message, severity]}
  - name: all
    output: {type: file, path: all.jsonl}
spark:
  conf: {spark.sql.shuffle.partitions: "1", spark.ui.enabled: "false"}
"""
_REFUSED: Final = re.compile(r"  - name: refused\n(?:    .*\n)+")
"""One lane less makes the second run faster."""
SECONDS: Final = 120.0
"""Spark needs long to start on a busy machine."""


class PipelineProcess:
    """``turnlane run`` in a directory."""

    def __init__(self, directory: Path, config: str) -> None:
        self._directory = directory
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        command = [sys.executable, "-m", "turnlane", "run", config, "--json", "--no-reload"]
        command += ["--master", "local[2]"]
        with (directory / "pipeline.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._listen)
        self._reader.start()
        self.url: str = self._await("node", state="ready")["flight"]
        self._await("lanes")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def _await(self, event: str, **about: Any) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while True:
            said = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
            assert said is not None, (self._directory / "pipeline.log").read_text()
            if said["event"] == event and about.items() <= said.items():
                return said

    def wait_until(self, condition: Any, what: str) -> None:
        """Wait, as long as the process runs."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            is_well = time.monotonic() < deadline and self._process.poll() is None
            assert is_well, f"not {what}: {(self._directory / 'pipeline.log').read_text()}"
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop in order."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(SECONDS)
        self._end()

    def kill(self) -> None:
        """End everything that was started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(SECONDS)
        self._end()

    def _end(self) -> None:
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def run_pipeline(directory: Path, config: str) -> Iterator[PipelineProcess]:
    """Run a pipeline for a while."""
    process = PipelineProcess(directory, config)
    try:
        yield process
        process.stop()
    finally:
        process.kill()


# ── making ───────────────────────────────────────────────────────────────────────────────────────


def make_pipeline(directory: Path) -> None:
    """Run a pipeline until it has delivered four events, of which one is a dead letter."""
    with _refusing_server() as port:
        text = CONFIGURATION.replace("PORT", str(port))
        (directory / "pipeline.yaml").write_text(text)
        (directory / "again.yaml").write_text(_REFUSED.sub("", text))
        with run_pipeline(directory, "pipeline.yaml") as pipeline:
            _publish(pipeline, (3, "web-1"), (6, "web-1"), (6, "web-2"), (0, "web-2"))
            _await_settled(pipeline, directory, 4)
    (directory / "pipeline.log").unlink()


@contextlib.contextmanager
def _refusing_server() -> Iterator[int]:
    """A destination that refuses everything for good."""

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(400)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


def _publish(pipeline: PipelineProcess, *events: tuple[int, str]) -> None:
    lines = [
        f"<{8 + severity}>1 2026-01-01T12:00:00.5Z {host} shop 42 ID7 "
        f'[meta@1 team="a"] from {host}, {severity}'.encode()
        for severity, host in events
    ]
    with turnlane.connect(pipeline.url) as client, client.queue("main") as main:
        main.producer(ack="persisted").publish_block(turnlane.block_of(lines, timestamps=1))


def _await_settled(pipeline: PipelineProcess, directory: Path, events: int) -> None:
    """Wait until all events are written: lanes settle them only after that."""
    with connect_peer(pipeline.url.replace("turnlane://", "grpc://")) as peer:

        def is_settled() -> bool:
            stats = peer.act("stats")
            pending = {name: each["ledger"]["pending"] for name, each in stats.items()}
            return (
                pending.pop("refused.dead", 1) == 1
                and not any(pending.values())
                and len(_read_lines(directory / "all.jsonl")) == events
            )

        pipeline.wait_until(is_settled, "all events are delivered")


# ── observing ────────────────────────────────────────────────────────────────────────────────────


def observe_pipeline(directory: Path) -> dict[str, Any]:
    """Run the pipeline again, with three events more."""
    with run_pipeline(directory, "again.yaml") as pipeline:
        _publish(pipeline, (4, "web-1"), (5, "web-2"), (5, "web-3"))
        _await_settled(pipeline, directory, 7)
    return {
        "checkpoints": {
            each.name: json.loads((each / "turnlane.json").read_text())
            for each in sorted((directory / "data" / "checkpoints").iterdir())
            if (each / "turnlane.json").exists()
        },
        "counts": _read_counts(directory),
        "archive": _read_archive(directory),
        "lines": _read_lines(directory / "all.jsonl"),
    }


def observe_dead_letters(directory: Path) -> dict[str, Any]:
    """List the dead letters of the pipeline, and send them to the main queue."""
    varying = {"dead_error", "error"}
    with NodeProcess(directory, "pipeline.yaml") as node, connect_peer(node.location) as peer:
        access = ("--endpoint", node.url, "--json")
        found = {
            "list": read_json_lines("dlq", "list", *access),
            "show": mask(read_json_lines("dlq", "show", "refused", *access), varying),
            "chosen": len(read_json_lines("dlq", "show", "refused", "--reason", "Never", *access)),
            "replay": read_json_lines("dlq", "replay", "refused", "--to", "main", *access),
            "breakers": read_json_lines("breaker", "list", *access),
        }
        found["main"] = peer.read("main")
        return found


def _read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _read_counts(directory: Path) -> dict[str, int]:
    """Return the newest count of each host."""
    return {row["hostname"]: row["events"] for row in _read_lines(directory / "counts.jsonl")}


def _read_archive(directory: Path) -> list[str]:
    files = [str(file) for file in (directory / "archive").glob("*.parquet")]
    if not files:
        return []
    rows = ds.dataset(files, format="parquet").to_table().to_pylist()
    return sorted(row["message"] for row in rows)
