"""The time from publishing an event to its line in a file, with only a few events."""

from __future__ import annotations

import time
from pathlib import Path

from pyspark.sql import SparkSession

import turnlane
from benchmarks.effort import Effort
from benchmarks.lines import make_syslog_messages
from benchmarks.measure import Series, get_percentile
from benchmarks.outcome import Cell, Outcome, Table, make_figure
from benchmarks.pipeline_process import RunningPipeline, run_pipeline, wait_until
from benchmarks.spark_pipeline import FILES, SIZE, make_sections

PER_SECOND = 10
WARM_UP = 20


class Arrivals:
    """The times at which the lines of a file arrived, by the size of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.times: list[float] = []

    def look(self) -> None:
        """Record the lines since the last call."""
        size = self._path.stat().st_size if self._path.exists() else 0
        self.times += [time.perf_counter()] * (size // SIZE - len(self.times))


def measure_latencies(running: RunningPipeline, paths: list[Path], events: int) -> list[float]:
    """Return the milliseconds of each event until it is in all files, sorted."""
    severe = [each for each in make_syslog_messages(1000, SIZE - 1) if int(each[1:4]) & 7 <= 3]
    files = [Arrivals(path) for path in paths]
    sent: list[float] = []

    def have_all_arrived() -> bool:
        for each in files:
            each.look()
        return all(len(each.times) >= len(sent) for each in files)

    with turnlane.connect(running.node.flight) as client:
        producer = client.queue("main").producer(ack="accepted", on_ack=lambda _: None)
        started = time.perf_counter()
        for number in range(WARM_UP + events):
            producer.publish(severe[number % len(severe)])
            sent.append(time.perf_counter())
            if number == WARM_UP:  # Until here, lanes were starting.
                wait_until(have_all_arrived, "the first lines")
                started = time.perf_counter() - number / PER_SECOND
            due = started + (number + 1) / PER_SECOND
            while time.perf_counter() < due:
                have_all_arrived()
                time.sleep(0.002)
        wait_until(have_all_arrived, "lines in files")
    came = [max(times) for times in zip(*(each.times for each in files), strict=True)]
    took = [1000 * (end - start) for start, end in zip(sent, came, strict=True)]
    return sorted(took[WARM_UP + 1 :])


def run(effort: Effort, spark: SparkSession) -> Outcome:
    """Measure single events through the main lane and two lanes behind it."""
    events = effort.choose(effort.events(100, 600), 10)
    with effort.place() as place:
        paths = {name: place / name for name in FILES}
        with run_pipeline(spark, place, make_sections(paths)) as running:
            took = measure_latencies(running, list(paths.values()), events)
    half, most = Series([get_percentile(took, 0.5)]), Series([get_percentile(took, 0.99)])
    how = (
        f"one event every {1000 // PER_SECOND} ms, from `publish()` until it is in the files of "
        "both lanes behind the main lane, with synced queues: "
    )
    rows = {f"{PER_SECOND} per second": [Cell.of(half), Cell.of(most)]}
    return Outcome(
        [
            make_figure("trickle_p50_ms", half, how + "median", unit="ms", at_most=1000),
            make_figure("trickle_p99_ms", most, how + "99th percentile", unit="ms", at_most=2000),
        ],
        [Table("Single events, from publish to a file", "ms", ("p50", "p99"), rows)],
    )
