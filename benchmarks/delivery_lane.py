"""A lane's backlog after an outage, on Spark: how fast it drains, and how soon at the full rate.

Events are published while the destination is down, so they wait in the action's queue on disk. Then
the destination comes back. The time starts with the first event that arrives, which is the probe of
the breaker, and ends with the last. The server needs some time for each request. There are two
comparisons: urllib3 in a loop with ready-made bodies and as many requests at a time; and turnlane's
output ``syslog`` with rsyslogd, whose disk-assisted queue was filled in the same way and forwards
over TCP (Debian has no omhttp).
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import turnlane
from benchmarks import rsyslog
from benchmarks.delivery_engine import BATCH, CONCURRENCY, SIZE, make_bodies, post_bare
from benchmarks.effort import Effort
from benchmarks.http_server import AT_WORK, BUCKET, HttpServer
from benchmarks.lines import make_log_lines, make_syslog_messages
from benchmarks.measure import Series, alternate
from benchmarks.outcome import Cell, Figure, Outcome, Table, make_figure
from benchmarks.pipeline_process import MASTER, RunningPipeline, run_pipeline, wait_until
from benchmarks.sender import Sender
from turnlane.events import block_of

ACTION = "away"
LANE, BARE, FORWARD, RSYSLOG = (
    "turnlane, output http",
    "urllib3 in a loop",
    "turnlane, output syslog",
    "rsyslogd, omfwd",
)
FULL = 0.9
"""The share of the usual rate that counts as full."""
WINDOW = 0.5
"""The seconds over which the rate is computed."""

_RECEIVER = """
import json, selectors, socket, sys, time
port, wanted = map(int, sys.argv[1:])
chosen = selectors.DefaultSelector()
listener = socket.create_server(("127.0.0.1", port))
chosen.register(listener, selectors.EVENT_READ)
print("ready", flush=True)
count, first = 0, None
while count < wanted:
    for key, _ in chosen.select():
        if key.fileobj is listener:
            chosen.register(listener.accept()[0], selectors.EVENT_READ)
            continue
        data = key.fileobj.recv(1 << 20)
        if not data:
            chosen.unregister(key.fileobj)
            continue
        first = first or time.monotonic()
        count += data.count(b"\\n")
print(json.dumps({"events": count, "seconds": time.monotonic() - first}), flush=True)
"""
"""Counts lines on any number of connections until ``wanted`` lines have arrived."""


def _make_sections(output: dict[str, Any]) -> dict[str, Any]:
    """Return one action with a disk queue.

    Probes come soon, but late enough that no task waits for them: the lane's reader plans them.
    """
    delivery = {
        "concurrency": CONCURRENCY // 2,  # There are two tasks.
        "batch_events": BATCH,
        "backoff": "200ms",
        "max_backoff": "500ms",
        "breaker_failures": 2,
        "breaker_reset": "2s",
    }
    action = {"name": ACTION, "queue": {"kind": "disk"}, "delivery": delivery, "output": output}
    return {"main": {"kind": "disk"}, "actions": [action]}


def _fill(running: RunningPipeline, values: list[bytes], events: int) -> None:
    """Publish events and wait until all of them are in the action's queue."""
    with turnlane.connect(running.node.flight) as client:
        with client.queue("main") as queue, queue.producer() as producer:
            block = block_of(values)
            for first in range(0, events, len(values)):
                producer.publish_block(block.slice(0, min(len(values), events - first)))
        wait_until(lambda: client.stats(ACTION)[ACTION]["ledger"]["pending"] >= events, "a backlog")


def drain_http(
    effort: Effort, spark: SparkSession, server: HttpServer, events: int
) -> tuple[float, float]:
    """Return events per second of the backlog, and the seconds from the probe to the full rate."""
    output = {"type": "http", "url": server.url, "format": "raw"}
    server.control(**{**AT_WORK, "down": 1})
    with effort.place() as place, run_pipeline(spark, place, _make_sections(output)) as running:
        _fill(running, make_log_lines(10_000, SIZE), events)
        wait_until(lambda: _is_suspended(running), "an open breaker")
        server.control(down=0)
        wait_until(lambda: server.counts()["events"] >= events, "the backlog at its destination")
        counts = server.counts()
    took = max(BUCKET, counts["last"] - counts["first"])  # A test sends only one request.
    return events / took, find_seconds_to_full(counts)


def _is_suspended(running: RunningPipeline) -> bool:
    """Whether the lane sends nothing but probes."""
    return any(lane.name == ACTION and lane.suspended for lane in running.runner.status())


def find_seconds_to_full(counts: dict[str, Any]) -> float:
    """Return the seconds from the first event until the rate is the usual rate.

    The usual rate is the median over events, not over time: pauses do not count.
    """
    first, last = int(counts["first"] / BUCKET), int(counts["last"] / BUCKET)
    arrived = dict(map(tuple, counts["timeline"]))
    buckets = [arrived.get(at, 0) for at in range(first, last + 1)]
    width = max(1, int(min(WINDOW, (last - first) * BUCKET / 4) / BUCKET))
    sums = [sum(buckets[at : at + width]) for at in range(max(1, len(buckets) - width))]
    usual = _find_median(sums, buckets)
    full = next(at for at, each in enumerate(sums) if each >= FULL * usual)
    return max(full * BUCKET, BUCKET)


def _find_median(values: list[int], weights: list[int]) -> int:
    """Return the weighted median."""
    ordered = sorted(zip(values, weights, strict=False))
    so_far = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(so_far, so_far[-1] / 2)][0]


def drain_syslog(effort: Effort, spark: SparkSession, events: int) -> float:
    """Return events per second of the backlog, over TCP."""
    port = _find_free_port()
    output = {
        "type": "syslog",
        "address": f"127.0.0.1:{port}",
        "format": "raw",
        "framing": "newline",
    }
    with effort.place() as place, run_pipeline(spark, place, _make_sections(output)) as running:
        _fill(running, make_syslog_messages(10_000, SIZE - 1), events)
        return _measure_receiving(port, events)


def drain_rsyslog(effort: Effort, events: int) -> float:
    """Return the same for rsyslogd."""
    port = _find_free_port()
    rules = (
        f'action(type="omfwd" target="127.0.0.1" port="{port}" protocol="tcp" template="raw" '
        'action.resumeRetryCount="-1" action.resumeInterval="1")'
    )
    with (
        effort.place() as place,
        rsyslog.run_rsyslogd(place, rsyslog.ASSISTED, rules) as into,
        contextlib.closing(_create_sender(place, into, events)) as sender,
    ):
        sender.send()
        return _measure_receiving(port, sender.events)


def _create_sender(place: Path, port: int, events: int) -> Sender:
    return Sender(place, port, make_syslog_messages(10_000, SIZE - 1), events)


def _measure_receiving(port: int, events: int) -> float:
    """Listen until ``events`` lines have arrived; returns lines per second."""
    command = [sys.executable, "-c", _RECEIVER, str(port), str(events)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        try:
            assert receiver.stdout is not None
            receiver.stdout.readline()
            counts = json.loads(receiver.stdout.readline())
        finally:
            receiver.kill()
    return float(counts["events"] / counts["seconds"])


def _find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def run(effort: Effort, spark: SparkSession, server: HttpServer) -> Outcome:
    """Measure lanes, the bare loop, and rsyslogd if it is installed."""
    events = effort.events(1_000_000, 1_000_000)
    forwarded = effort.events(250_000, 1_000_000)
    recoveries: list[float] = []

    def lane() -> float:
        rate, seconds = drain_http(effort, spark, server, events)
        recoveries.append(seconds)
        return rate

    def loop() -> float:
        server.control(**AT_WORK)
        return events / post_bare(server.url, make_bodies(events), CONCURRENCY)

    contestants: dict[str, Callable[[], float]] = {
        LANE: lane,
        BARE: loop,
        FORWARD: partial(drain_syslog, effort, spark, forwarded),
    }
    if rsyslog.find_program() is not None:
        contestants[RSYSLOG] = partial(drain_rsyslog, effort, forwarded)
    if not effort.is_trial:
        drain_http(effort, spark, server, events // 10)  # Java compiles code that runs often.
    rounds = 1 if effort.quick else 3
    found = {name: Series(rates) for name, rates in alternate(contestants, rounds).items()}
    remarks = (
        [] if RSYSLOG in found else ["There is no comparison with rsyslogd: it is not installed."]
    )
    return Outcome(
        list(_make_figures(found, Series(recoveries))),
        [_make_table(found, events, forwarded)],
        remarks,
    )


def _make_figures(found: dict[str, Series], recoveries: Series) -> Iterator[Figure]:
    yield make_figure(
        "drain_vs_bare",
        found[LANE].over(found[BARE]),
        f"a backlog on disk through a lane on Spark ({MASTER}) with the output http / urllib3 in a "
        f"loop, with ready-made bodies; {BATCH} events of {SIZE} bytes in a request, "
        f"{CONCURRENCY} requests at a time, {AT_WORK['seconds'] * 1000:.0f} ms each",
        unit="×",
        at_least=0.8,
    )
    if RSYSLOG in found:
        yield make_figure(
            "drain_vs_rsyslog",
            found[FORWARD].over(found[RSYSLOG]),
            f"a backlog on disk through a lane on Spark ({MASTER}) with the output syslog over TCP "
            "/ rsyslogd's disk-assisted queue with omfwd over TCP",
            unit="×",
            at_least=1,
        )
    yield make_figure(
        "recovery_to_full_s",
        recoveries,
        f"from the probe's success until {FULL:.0%} of the usual rate, over {WINDOW} s",
        unit="s",
        at_most=2,
    )


def _make_table(found: dict[str, Series], events: int, forwarded: int) -> Table:
    return Table(
        "A backlog after an outage",
        "events/s",
        (f"{SIZE} B",),
        {name: [Cell.of(series)] for name, series in found.items()},
        f"{events:,} events over HTTP and {forwarded:,} as syslog, from the first arrival to the "
        "last.",
    )
