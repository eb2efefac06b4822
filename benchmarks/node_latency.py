"""The time from publishing an event to its ``persisted`` ack, at several rates."""

from __future__ import annotations

import threading
import time
from collections import deque

import turnlane
from benchmarks.effort import Effort
from benchmarks.lines import make_log_lines
from benchmarks.measure import Series, get_percentile
from benchmarks.node_process import NodeProcess, run_node
from benchmarks.outcome import Cell, Outcome, Table, make_figure

RATES: tuple[int, ...] = (1, 100, 10_000)
STEP = 0.001
"""The seconds between bursts: at 10,000 events per second, ten events at a time."""


def measure_latencies(node: NodeProcess, rate: int, seconds: float) -> list[float]:
    """Return the milliseconds of every event at this rate, sorted."""
    sent: deque[float] = deque()
    took: list[float] = []
    expected = max(3, round(rate * seconds))
    complete = threading.Event()

    def on_ack(ack: turnlane.Ack) -> None:
        now = time.perf_counter()
        took.extend(1000 * (now - sent.popleft()) for _ in range(ack.count))
        if len(took) >= expected:
            complete.set()

    lines = make_log_lines(expected, 100)
    with turnlane.connect(node.flight) as client:
        queue = client.queue("main")
        producer = queue.producer(ack="persisted", on_ack=on_ack)
        producer.publish(b"the first one opens the connection")
        sent.appendleft(time.perf_counter())
        while not took:
            time.sleep(STEP)
        took.clear()
        started = time.perf_counter()
        for number, line in enumerate(lines):
            due = started + number / rate
            while (left := due - time.perf_counter()) > 0:
                time.sleep(max(left, STEP))
            sent.append(time.perf_counter())
            producer.publish(line)
        assert complete.wait(60)
    return sorted(took)


def run(effort: Effort) -> Outcome:
    """Measure all rates in turns."""
    rates = effort.choose(RATES, RATES[1:])
    found: dict[int, list[list[float]]] = {rate: [] for rate in rates}
    for _ in range(effort.rounds):
        with effort.place() as place, run_node(place, {"main": {"durability": "always"}}) as node:
            for rate in rates:
                seconds = 2.0 if rate == 1 else effort.seconds(1.0, 5.0)
                found[rate].append(measure_latencies(node, rate, seconds))
    rows = {}
    p99 = {}
    for rate, rounds in found.items():
        half, most = ([get_percentile(each, part) for each in rounds] for part in (0.5, 0.99))
        p99[rate] = Series(most)
        rows[f"{rate:,} per second"] = [Cell.of(Series(half)), Cell.of(Series(most))]
    how = (
        "100-byte events, one by one through `turnlane.connect`, 10,000 per second, "
        "`durability: always`: 99th percentile of the time from `publish()` to the `persisted` ack"
    )
    table = Table("From publish to persisted", "ms", ("p50", "p99"), rows)
    return Outcome(
        [make_figure("persisted_p99_ms", p99[10_000], how, unit="ms", at_most=20.0)], [table]
    )
