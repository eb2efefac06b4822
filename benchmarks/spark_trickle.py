"""How long an event takes from being published to a line in a file, when there are only a few."""

from __future__ import annotations

import time
from pathlib import Path

from pyspark.sql import SparkSession

import turnlane
from benchmarks.effort import Effort
from benchmarks.lines import syslog_messages
from benchmarks.measure import Series, percentile
from benchmarks.outcome import Cell, Outcome, Table, figure
from benchmarks.piped import Piped, piped, wait_until
from benchmarks.spark_pipeline import FILES, SIZE, sections

PER_SECOND = 10
WARM_UP = 20


class Arrivals:
    """When the lines of a file came; the end of the file tells how many there are."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.times: list[float] = []

    def look(self) -> None:
        """Note what has come since the last time."""
        size = self._path.stat().st_size if self._path.exists() else 0
        self.times += [time.perf_counter()] * (size // SIZE - len(self.times))


def latencies(running: Piped, paths: list[Path], events: int) -> list[float]:
    """Milliseconds of each event until it is in all the files."""
    severe = [each for each in syslog_messages(1000, SIZE - 1) if int(each[1:4]) & 7 <= 3]
    files = [Arrivals(path) for path in paths]
    sent: list[float] = []

    def all_came() -> bool:
        for each in files:
            each.look()
        return all(len(each.times) >= len(sent) for each in files)

    with turnlane.connect(running.node.flight) as client:
        producer = client.queue("main").producer(ack="accepted", on_ack=lambda _: None)
        started = time.perf_counter()
        for number in range(WARM_UP + events):
            producer.publish(severe[number % len(severe)])
            sent.append(time.perf_counter())
            if number == WARM_UP:  # until here lanes were starting
                wait_until(all_came, "the first lines")
                started = time.perf_counter() - number / PER_SECOND
            due = started + (number + 1) / PER_SECOND
            while time.perf_counter() < due:
                all_came()
                time.sleep(0.002)
        wait_until(all_came, "lines in files")
    came = [max(times) for times in zip(*(each.times for each in files), strict=True)]
    took = [1000 * (end - start) for start, end in zip(sent, came, strict=True)]
    return sorted(took[WARM_UP + 1 :])


def run(effort: Effort, spark: SparkSession) -> Outcome:
    """A trickle through the main lane and two lanes behind it."""
    events = effort.unless_trial(effort.events(100, 600), 10)
    with effort.place() as place:
        paths = {name: place / name for name in FILES}
        with piped(spark, place, sections(paths)) as running:
            took = latencies(running, list(paths.values()), events)
    half, most = Series([percentile(took, 0.5)]), Series([percentile(took, 0.99)])
    how = (
        f"one event every {1000 // PER_SECOND} ms, from `publish()` until it is in the files of "
        "both lanes behind the main one, queues synced: "
    )
    rows = {f"{PER_SECOND} a second": [Cell.of(half), Cell.of(most)]}
    return Outcome(
        [
            figure("trickle_p50_ms", half, how + "median", unit="ms", at_most=1000),
            figure("trickle_p99_ms", most, how + "99th percentile", unit="ms", at_most=2000),
        ],
        [Table("A trickle, from published to a file", "ms", ("p50", "p99"), rows)],
    )
