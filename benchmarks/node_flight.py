"""Blocks over Flight into a synced disk queue, compared with HTTP."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from pathlib import Path

import turnlane
from benchmarks.effort import Effort
from benchmarks.lines import make_log_lines, split_into_blocks
from benchmarks.measure import Series, freeze_gc
from benchmarks.node_process import NodeProcess, run_node
from benchmarks.outcome import Cell, Outcome, Table, make_figure

BLOCK = 20_000
REQUEST = 100
"""The events of an HTTP request."""

_WRK_SCRIPT = """\
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/x-ndjson"
wrk.body = io.open("{body}"):read("*a")
"""


def measure_flight(node: NodeProcess, blocks: list[turnlane.Block]) -> float:
    """Return events per second from the first block to the last ``persisted`` ack."""
    expected: int = sum(block.num_rows for block in blocks)
    heard = 0
    complete = threading.Event()

    def on_ack(ack: turnlane.Ack) -> None:
        nonlocal heard
        heard += ack.count
        if heard == expected:
            complete.set()

    with turnlane.connect(node.flight) as client:
        queue = client.queue("main", batch_size=BLOCK, batches=8, max_bytes="256Mi")
        producer = queue.producer(ack="persisted", on_ack=on_ack)
        with freeze_gc():
            started = time.perf_counter()
            for block in blocks:
                producer.publish_block(block)
            assert complete.wait(120)
            seconds = time.perf_counter() - started
    return expected / seconds


def measure_http(node: NodeProcess, directory: Path, seconds: float) -> float:
    """Return events per second of wrk, in requests of 100 events that are persisted."""
    body = directory / "body.ndjson"
    lines = [json.dumps({"value": line.decode()}) for line in make_log_lines(REQUEST, 100)]
    body.write_text("\n".join(lines) + "\n")
    script = directory / "post.lua"
    script.write_text(_WRK_SCRIPT.format(body=body))
    url = f"{node.http}/queues/main/events"
    command = ["wrk", "-t1", "-c16", f"-d{max(1, round(seconds))}s", "-s", str(script), url]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in found:
        raise RuntimeError(found)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", found)
    assert rate is not None, found
    return float(rate[1]) * REQUEST


def run(effort: Effort) -> Outcome:
    """Measure Flight and HTTP in turns."""
    events = effort.events(2_000_000, 5_000_000)
    blocks = [
        turnlane.block_of(part) for part in split_into_blocks(make_log_lines(events, 100), BLOCK)
    ]
    flight, http = [], []
    for _ in range(effort.rounds):
        with effort.place() as place, run_node(place, {"main": {"durability": "always"}}) as node:
            flight.append(measure_flight(node, blocks))
            http.append(measure_http(node, place, effort.seconds(1, 3)))
    series = {"Flight, blocks of 20,000": Series(flight), "HTTP, 16 × 100 lines": Series(http)}
    rows = {name: [Cell.of(each)] for name, each in series.items()}
    how = (
        f"{events:,} events of 100 B in blocks of {BLOCK:,} from one client over Flight into a "
        "disk queue with `durability: always`, until the last event is acked as `persisted`"
    )
    note = "One client process and the node on the same cores; `durability: always`."
    return Outcome(
        [make_figure("flight_events_per_s", series["Flight, blocks of 20,000"], how, at_least=2e6)],
        [Table("Publishing to a node, persisted", "events/s", ("events/s",), rows, note)],
    )
