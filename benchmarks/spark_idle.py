"""What a pipeline costs that has nothing to do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # has none
from pyspark.sql import SparkSession

import turnlane
from benchmarks.effort import Effort
from benchmarks.lines import syslog_messages
from benchmarks.measure import Series
from benchmarks.outcome import Cell, Outcome, Table, figure
from benchmarks.piped import Piped, piped, wait_until
from benchmarks.spark_lanes import actions

LANES = 5
SETTLE_SECONDS = 5.0
"""Until Java has compiled what the first batches have made it run."""


PARTS = ("driver", "Java", "Python workers", "node")


def cpu_seconds() -> dict[int, tuple[str, float]]:
    """By process: which part of the pipeline it is, and what it has used so far."""
    found = {}
    this = psutil.Process()
    for each in (this, *this.children(recursive=True)):
        try:
            times, command = each.cpu_times(), each.cmdline()
        except psutil.Error:  # it has ended
            continue
        found[each.pid] = _part(each.pid == this.pid, command), times.user + times.system
    return found


def used_between(
    before: dict[int, tuple[str, float]], after: dict[int, tuple[str, float]]
) -> dict[str, float]:
    """Seconds by part. A process that has ended meanwhile, an idle worker say, is left out."""
    used = dict.fromkeys(PARTS, 0.0)
    for pid, (part, seconds) in after.items():
        used[part] += seconds - before.get(pid, (part, 0.0))[1]
    return used


def _part(is_this: bool, command: list[str]) -> str:  # noqa: FBT001
    if is_this:
        return "driver"
    if command and command[0].endswith("java"):
        return "Java"
    return "node" if "turnlane" in command else "Python workers"


def sections(place: Path, lanes: int) -> dict[str, Any]:
    """Lanes to files beside the main one."""
    paths = [place / f"out-{number}" for number in range(1, lanes)]
    return {"main": {}, "parse": "syslog", "actions": actions(paths)}


def settle(running: Piped, seconds: float) -> None:
    """Have every lane do a batch, then leave them alone for a while."""
    with turnlane.connect(running.node.flight) as client:
        client.queue("main").producer(ack="persisted").publish(syslog_messages(1, 99)[0])
    wait_until(lambda: all(each.batches for each in running.runner.status()), "a batch of each")
    time.sleep(seconds)


def run(effort: Effort, spark: SparkSession) -> Outcome:
    """CPU time in each of several stretches."""
    seconds = effort.seconds(4, 20)
    lanes = effort.unless_trial(LANES, 2)
    with effort.place() as place, piped(spark, place, sections(place, lanes)) as running:
        settle(running, effort.seconds(SETTLE_SECONDS, 2 * SETTLE_SECONDS))
        stretches = [_used(seconds) for _ in range(effort.rounds)]
    total = Series([sum(each.values()) for each in stretches])
    how = (
        f"CPU time of all processes of a pipeline of {lanes} lanes that has nothing to do, over "
        f"{seconds:.0f} s, in percent of one core"
    )
    rows = {part: [Cell.of(Series([each[part] for each in stretches]))] for part in PARTS}
    return Outcome(
        [figure("idle_cpu_percent", total, how, unit="%", at_most=10)],
        [Table(f"{lanes} idle lanes", "% of one core", ("CPU",), rows)],
    )


def _used(seconds: float) -> dict[str, float]:
    """By part, in percent of one core."""
    before = cpu_seconds()
    time.sleep(seconds)
    spent = used_between(before, cpu_seconds())
    return {part: 100 * each / seconds for part, each in spent.items()}
