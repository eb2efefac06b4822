"""The cost of lanes, and the cost of a lane with a dead destination for the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import turnlane
from benchmarks.effort import Effort
from benchmarks.lines import make_syslog_messages
from benchmarks.measure import SHORT_TURNS, Series, alternate
from benchmarks.node_flight import BLOCK, measure_flight
from benchmarks.outcome import Cell, Figure, Outcome, Table, make_figure
from benchmarks.pipeline_process import RunningPipeline, get_size, run_pipeline, wait_until

SIZE = 100
COUNTS: tuple[int, ...] = (1, 2, 4, 8)
HEALTHY = 2
THIRD = "third"
HEALTHY_THIRD, DEAD_THIRD = "with a healthy third lane", "with a dead third lane"


def make_actions(paths: list[Path]) -> list[dict[str, Any]]:
    """Return an action for each file; every event goes into all files."""
    return [
        {
            "name": f"lane-{number}",
            "queue": "disk",
            "output": {"type": "file", "path": str(path), "format": "raw"},
        }
        for number, path in enumerate(paths, start=1)
    ]


def make_third_action(place: Path, *, is_dead: bool) -> dict[str, Any]:
    """Return one more action, which gets a sixth of the events.

    If it is dead, its output always fails: its path is below a file.
    """
    obstacle = place / "obstacle"
    obstacle.touch()
    path = obstacle / "never" if is_dead else place / "third"
    output = {"type": "file", "path": str(path), "format": "raw"}
    return {"name": THIRD, "filter": "severity <= 3", "queue": "disk", "output": output}


def drain(running: RunningPipeline, paths: list[Path], events: int) -> float:
    """Return events per second from the first publish until all events are in every file."""
    lines = make_syslog_messages(min(events, BLOCK), SIZE - 1)
    blocks = [turnlane.block_of(lines)] * max(1, events // len(lines))
    sent = len(lines) * len(blocks)
    expected = {path: get_size(path) + sent * SIZE for path in paths}
    started = time.perf_counter()
    measure_flight(running.node, blocks)
    wait_until(lambda: all(get_size(path) >= expected[path] for path in paths), "lines in files")
    return sent / (time.perf_counter() - started)


@contextmanager
def lanes(
    effort: Effort, spark: SparkSession, count: int, *, third_is_dead: bool | None = None
) -> Iterator[Callable[[], float]]:
    """Run ``count`` lanes, and perhaps one more lane that is dead or healthy.

    Yields a function that measures one turn in events per second. The lanes have a session of
    their own, because in one session all lanes need different names.
    """
    spark = spark.newSession()
    events = effort.events(500_000, 3_000_000)
    with effort.place() as place:
        paths = [place / f"out-{number}" for number in range(count)]
        every = make_actions(paths)
        if third_is_dead is not None:
            every.append(make_third_action(place, is_dead=third_is_dead))
        with run_pipeline(
            spark, place, {"main": {}, "parse": "syslog", "actions": every}
        ) as running:
            drain(running, paths, events // 3)
            if third_is_dead:
                wait_until(lambda: is_suspended(running), "a suspended lane")
            yield partial(drain, running, paths, events)


def is_suspended(running: RunningPipeline) -> bool:
    """Whether the third lane is suspended because its destination is dead."""
    return any(lane.suspended for lane in running.runner.status() if lane.name == THIRD)


def run(effort: Effort, spark: SparkSession) -> Outcome:
    """Measure one turn for each number of lanes, and several turns with a third lane."""
    single = {}
    for count in effort.choose(COUNTS, COUNTS[:1]):
        with lanes(effort, spark, count) as turn:
            single[count] = turn()
    healthy = effort.choose(HEALTHY, 1)
    rounds = effort.choose(SHORT_TURNS * effort.rounds, 1)
    with (
        lanes(effort, spark, healthy, third_is_dead=False) as well,
        lanes(effort, spark, healthy, third_is_dead=True) as dead,
    ):
        turns = alternate({HEALTHY_THIRD: well, DEAD_THIRD: dead}, rounds)
    found = {name: Series(rates) for name, rates in turns.items()}
    return Outcome([_make_loss_figure(found)], [_make_lanes_table(single), _make_dead_table(found)])


def _make_loss_figure(found: dict[str, Series]) -> Figure:
    loss = found[DEAD_THIRD].over(found[HEALTHY_THIRD]).map(lambda ratio: 100 * (1 - ratio))
    how = (
        f"throughput that {HEALTHY} lanes to files lose if the output of a third lane, which gets "
        "a sixth of the events, always fails and the lane is suspended, compared with a third lane "
        "that works; negative if they get faster, because a suspended lane uses little processor "
        "time"
    )
    return make_figure("dead_lane_loss_percent", loss, how, unit="%", at_most=5)


def _make_lanes_table(single: dict[int, float]) -> Table:
    rows = {
        f"{count} lane{'s' if count > 1 else ''}": [
            Cell.of(Series([each])),
            Cell.of(Series([each * count])),
        ]
        for count, each in single.items()
    }
    note = "Every event goes through the main lane and into every lane's queue and file."
    return Table("The cost of lanes", "", ("events/s", "lines/s"), rows, note)


def _make_dead_table(found: dict[str, Series]) -> Table:
    rows = {name: [Cell.of(series)] for name, series in found.items()}
    return Table(f"{HEALTHY} lanes with a third lane", "events/s", ("100 B",), rows)
