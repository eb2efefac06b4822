"""turnlane in about a minute: events by syslog and HTTP, lanes on Spark, a ledger at the end.

``turnlane run`` starts a node and a pipeline on local Spark. Log messages arrive over TCP and HTTP.
One lane keeps important messages, one archives all messages as Parquet, and one counts them with
windowed SQL. The destination of a fourth lane is down for a while, which does not slow the others.
The exit code is 0 if every event is accounted for at the end.

    python examples/pipeline.py [--events 100000]
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
from rich.console import Console
from rich.live import Live
from rich.table import Table

import turnlane

OVER_HTTP = 1_000
"""The events that are sent by HTTP; the others are sent by TCP."""
PATIENCE = 240.0
QUEUES = ("main", "alerts", "archive", "counts", "flaky")

Process = subprocess.Popen[str]

console = Console()


def make_message(number: int) -> bytes:
    """Return a syslog message; the severities 0 to 7 take turns."""
    return b"<%d>1 2026-11-16T08:00:00Z shop checkout - - - order %d" % (16 + number % 8, number)


def make_configuration(place: Path) -> tuple[str, dict[str, int]]:
    """Return the configuration as YAML, and the ports in it."""
    ports = {name: find_free_port() for name in ("flight", "http", "syslog", "web")}
    text = f"""
node:
  data: {place}/data
  flight: {{listen: "127.0.0.1:{ports["flight"]}"}}
  http: {{listen: "127.0.0.1:{ports["http"]}"}}
inputs:
  - {{type: syslog, tcp: "127.0.0.1:{ports["syslog"]}", queue: main}}
  - {{type: http, listen: "127.0.0.1:{ports["web"]}", queue: main, split: lines}}
main: {{durability: interval}}
parse: syslog
actions:
  - name: alerts
    filter: "severity <= 3"
    queue: disk
    output: {{type: file, path: {place}/out/alerts.jsonl}}
  - name: archive
    queue: disk
    lane: {{min_events: 1}}  # Otherwise it waits up to a minute to fill a file.
    output: {{type: spark, format: parquet, path: {place}/out/archive, columns: [message]}}
  - name: counts
    queue: disk
    sql: >
      SELECT severity, count(*) AS events FROM events
      GROUP BY window(timestamp, '1 hour'), severity
    watermark: 10m
    output_mode: update
    output: {{type: file, path: {place}/out/counts.jsonl}}
  - name: flaky
    filter: "severity = 0"
    queue: disk
    output: {{type: file, path: {place}/out/flaky/events.jsonl}}
spark:
  master: "local[2]"
"""
    return text, ports


def find_free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
    return port


# ── senders ──────────────────────────────────────────────────────────────────────────────────────


def send_syslog(port: int, first: int, end: int) -> None:
    """Send messages over TCP, as a syslog daemon does: one message in each line."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for at in range(first, end, 1000):
            lines = [make_message(number) + b"\n" for number in range(at, min(end, at + 1000))]
            connection.sendall(b"".join(lines))


def send_http(port: int, first: int, end: int) -> None:
    """Send messages in one request; the answer arrives when they are persisted."""
    body = b"\n".join(make_message(number) for number in range(first, end))
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/", body, {"Content-Type": "text/plain"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        assert answer.status in {200, 204}


# ── watching ─────────────────────────────────────────────────────────────────────────────────────


class StatusDisplay:
    """Shows the states of the lanes and the ledgers of the queues."""

    def __init__(self, url: str) -> None:
        self.lanes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.ready = threading.Event()
        self._client = turnlane.connect(url)

    def listen(self, lines: Iterator[str]) -> None:
        """Read the lines that ``turnlane run --json`` prints."""
        for line in lines:
            report = json.loads(line)
            if report["event"] == "lane":
                self.lanes[report["name"]] = report["state"]
                if why := report.get("suspended") or report.get("reason"):
                    self.reasons[report["name"]] = why
            elif report["event"] == "node" and report.get("state") == "ready":
                self.ready.set()

    def get_ledgers(self) -> dict[str, dict[str, Any]]:
        """Return the ledgers by queue; empty while the node does not answer."""
        try:
            stats = self._client.stats()
        except turnlane.RetryLater:
            return {}
        return {name: stats[name]["ledger"] for name in QUEUES if name in stats}

    def make_table(self, note: str) -> Table:
        """Make a table of queues and lanes."""
        table = Table(title=note, title_justify="left")
        table.add_column("queue and lane")
        for column in ("accepted", "delivered", "pending"):
            table.add_column(column, justify="right")
        table.add_column("lane")
        for name, ledger in self.get_ledgers().items():
            numbers = [f"{ledger[column]:,}" for column in ("accepted", "delivered", "pending")]
            table.add_row(name, *numbers, self.lanes.get(name, "starting"))
        return table

    def close(self) -> None:
        """Close the connection to the node."""
        self._client.close()


def wait(
    live: Live, watch: StatusDisplay, process: Process, note: str, condition: Callable[[], bool]
) -> None:
    """Show the status until the condition is true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if (code := process.poll()) is not None:
            raise SystemExit(f"turnlane run has ended with exit code {code}: {note}")
        if time.monotonic() > deadline:
            raise SystemExit(f"not after {PATIENCE:.0f} s: {note}")
        live.update(watch.make_table(note))
        time.sleep(0.25)


@contextmanager
def run_turnlane(config: Path) -> Iterator[Process]:
    """Run ``turnlane run``; at the end, stop it as Ctrl-C does."""
    command = [sys.executable, "-m", "turnlane", "run", str(config), "--json"]
    log = config.with_name("run.log")
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            yield process
        except SystemExit:
            console.print(log.read_text()[-4000:], markup=False)
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


# ── the account ──────────────────────────────────────────────────────────────────────────────────


def read_numbers(path: Path) -> list[int]:
    """Return the numbers of the orders in a file of JSON lines."""
    return sorted(
        int(json.loads(line)["message"].split()[1]) for line in path.read_text().splitlines()
    )


def check_outputs(out: Path, events: int) -> bool:
    """Check that every destination has each of its events once."""
    archive = ds.dataset(out / "archive", exclude_invalid_files=True, format="parquet").to_table()
    texts: list[Any] = archive.column("message").to_pylist()
    archived = sorted(int(text.split()[1]) for text in texts)
    counted: dict[int, int] = {}
    for line in (out / "counts.jsonl").read_text().splitlines():
        row = json.loads(line)
        counted[row["severity"]] = max(counted.get(row["severity"], 0), row["events"])
    checks = {
        "alerts": read_numbers(out / "alerts.jsonl") == [n for n in range(events) if n % 8 <= 3],
        "archive": archived == list(range(events)),
        "counts": sum(counted.values()) == events,
        "flaky": read_numbers(out / "flaky" / "events.jsonl") == list(range(0, events, 8)),
    }
    for name, right in checks.items():
        console.print(f"{'✓' if right else '✗'} {name}: {'each event once' if right else 'wrong'}")
    return all(checks.values())


def demonstrate(place: Path, events: int) -> bool:
    """Run the demonstration; returns whether every event is accounted for."""
    text, ports = make_configuration(place)
    config = place / "demo.yaml"
    config.write_text(text)
    blocked = place / "out" / "flaky"
    blocked.parent.mkdir()
    blocked.write_text("a file in place of a folder: the destination is down")
    watch = StatusDisplay(f"turnlane://127.0.0.1:{ports['flight']}")

    def are_drained(*queues: str) -> bool:
        ledgers = watch.get_ledgers()
        return all(ledgers.get(q, {}).get("accepted") and not ledgers[q]["pending"] for q in queues)

    with run_turnlane(config) as process, Live(console=console, refresh_per_second=4) as live:
        assert process.stdout is not None
        threading.Thread(target=watch.listen, args=(process.stdout,), daemon=True).start()
        wait(live, watch, process, "Starting a node and Spark", watch.ready.is_set)
        split = events - OVER_HTTP
        send_syslog(ports["syslog"], 0, split)
        send_http(ports["web"], split, events)
        healthy = ("main", "alerts", "archive", "counts")
        note = f"{events:,} events sent; the destination of flaky is down"
        wait(live, watch, process, note, lambda: are_drained(*healthy) and "flaky" in watch.reasons)
        blocked.unlink()
        wait(live, watch, process, "The destination of flaky is back", lambda: are_drained("flaky"))
        live.update(watch.make_table("All delivered"))
        ledgers = watch.get_ledgers()
    console.print()
    watch.close()
    console.print(f"flaky had failed with: {watch.reasons['flaky']}", markup=False)
    adds_up = all(ledger["adds_up"] and not ledger["pending"] for ledger in ledgers.values())
    accepted = ledgers["main"]["accepted"] == events
    console.print(f"{'✓' if adds_up and accepted else '✗'} every ledger adds up")
    return check_outputs(place / "out", events) and adds_up and accepted


def main() -> None:
    """Run the demonstration and report its result."""
    parser = argparse.ArgumentParser(description="Run a pipeline and account for every event.")
    parser.add_argument("--events", type=int, default=100_000)
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="turnlane-demo-") as place:
        adds_up = demonstrate(Path(place), max(options.events, 2 * OVER_HTTP))
    console.print(f"Took {time.monotonic() - started:.0f} s.")
    sys.exit(0 if adds_up else 1)


if __name__ == "__main__":
    main()
