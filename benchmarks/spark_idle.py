"""The CPU time of a pipeline that has nothing to do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # has none
from pyspark.sql import SparkSession

import turnlane
from benchmarks.effort import Effort
from benchmarks.lines import make_syslog_messages
from benchmarks.measure import Series
from benchmarks.outcome import Cell, Outcome, Table, make_figure
from benchmarks.pipeline_process import RunningPipeline, run_pipeline, wait_until
from benchmarks.spark_lanes import make_actions

LANES = 5
SETTLE_SECONDS = 5.0
"""The time for Java to compile the code of the first batches."""


PARTS = ("driver", "Java", "Python workers", "node")


def get_cpu_seconds() -> dict[int, tuple[str, float]]:
    """Return, for each process, its part of the pipeline and its CPU seconds."""
    found = {}
    this = psutil.Process()
    for each in (this, *this.children(recursive=True)):
        try:
            times, command = each.cpu_times(), each.cmdline()
        except psutil.Error:  # The process has ended.
            continue
        found[each.pid] = _find_part(each.pid == this.pid, command), times.user + times.system
    return found


def compute_cpu_seconds(
    before: dict[int, tuple[str, float]], after: dict[int, tuple[str, float]]
) -> dict[str, float]:
    """Return CPU seconds by part, without processes that have ended, such as idle workers."""
    used = dict.fromkeys(PARTS, 0.0)
    for pid, (part, seconds) in after.items():
        used[part] += seconds - before.get(pid, (part, 0.0))[1]
    return used


def _find_part(is_this: bool, command: list[str]) -> str:  # noqa: FBT001
    if is_this:
        return "driver"
    if command and command[0].endswith("java"):
        return "Java"
    return "node" if "turnlane" in command else "Python workers"


def make_sections(place: Path, lanes: int) -> dict[str, Any]:
    """Return a configuration with lanes to files."""
    paths = [place / f"out-{number}" for number in range(1, lanes)]
    return {"main": {}, "parse": "syslog", "actions": make_actions(paths)}


def settle(running: RunningPipeline, seconds: float) -> None:
    """Wait until every lane has run a batch, and then for ``seconds``."""
    with turnlane.connect(running.node.flight) as client:
        client.queue("main").producer(ack="persisted").publish(make_syslog_messages(1, 99)[0])
    wait_until(lambda: all(each.batches for each in running.runner.status()), "a batch of each")
    time.sleep(seconds)


def run(effort: Effort, spark: SparkSession) -> Outcome:
    """Measure CPU time over several periods."""
    seconds = effort.seconds(4, 20)
    lanes = effort.choose(LANES, 2)
    with (
        effort.place() as place,
        run_pipeline(spark, place, make_sections(place, lanes)) as running,
    ):
        settle(running, effort.seconds(SETTLE_SECONDS, 2 * SETTLE_SECONDS))
        stretches = [_measure_cpu(seconds) for _ in range(effort.rounds)]
    total = Series([sum(each.values()) for each in stretches])
    how = (
        f"CPU time of all processes of a pipeline with {lanes} lanes and no events, over "
        f"{seconds:.0f} s, in percent of one core"
    )
    rows = {part: [Cell.of(Series([each[part] for each in stretches]))] for part in PARTS}
    return Outcome(
        [make_figure("idle_cpu_percent", total, how, unit="%", at_most=10)],
        [Table(f"{lanes} idle lanes", "% of one core", ("CPU",), rows)],
    )


def _measure_cpu(seconds: float) -> dict[str, float]:
    """Return CPU time by part, in percent of one core."""
    before = get_cpu_seconds()
    time.sleep(seconds)
    spent = compute_cpu_seconds(before, get_cpu_seconds())
    return {part: 100 * each / seconds for part, each in spent.items()}
