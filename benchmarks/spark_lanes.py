"""What lanes cost, and what a lane whose destination is dead costs the others."""

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
from benchmarks.lines import syslog_messages
from benchmarks.measure import SHORT_TURNS, Series, alternate
from benchmarks.node_flight import BLOCK, flight_speed
from benchmarks.outcome import Cell, Figure, Outcome, Table, figure
from benchmarks.piped import Piped, piped, size_of, wait_until

SIZE = 100
COUNTS: tuple[int, ...] = (1, 2, 4, 8)
HEALTHY = 2
THIRD = "third"
WELL, DEAD = "a third lane that is well", "a third lane that is dead"


def actions(paths: list[Path]) -> list[dict[str, Any]]:
    """A lane for each file; every event goes into all of them."""
    return [
        {
            "name": f"lane-{number}",
            "queue": "disk",
            "output": {"type": "file", "path": str(path), "format": "raw"},
        }
        for number, path in enumerate(paths, start=1)
    ]


def third(place: Path, *, is_dead: bool) -> dict[str, Any]:
    """One more lane, which gets a sixth of the events.

    The output of one that is dead fails for ever: a file below a file.
    """
    obstacle = place / "obstacle"
    obstacle.touch()
    path = obstacle / "never" if is_dead else place / "third"
    output = {"type": "file", "path": str(path), "format": "raw"}
    return {"name": THIRD, "filter": "severity <= 3", "queue": "disk", "output": output}


def drain(running: Piped, paths: list[Path], events: int) -> float:
    """Events a second from the first published until all are in every file."""
    lines = syslog_messages(min(events, BLOCK), SIZE - 1)
    blocks = [turnlane.block_of(lines)] * max(1, events // len(lines))
    sent = len(lines) * len(blocks)
    expected = {path: size_of(path) + sent * SIZE for path in paths}
    started = time.perf_counter()
    flight_speed(running.node, blocks)
    wait_until(lambda: all(size_of(path) >= expected[path] for path in paths), "lines in files")
    return sent / (time.perf_counter() - started)


@contextmanager
def lanes(
    effort: Effort, spark: SparkSession, count: int, *, third_is_dead: bool | None = None
) -> Iterator[Callable[[], float]]:
    """So many lanes that have done a batch, beside a third that is dead, or well, or not there.

    Calling it takes a turn: events a second through them. They have a session of their own, for
    in one session no two lanes have the same name.
    """
    spark = spark.newSession()
    events = effort.events(500_000, 3_000_000)
    with effort.place() as place:
        paths = [place / f"out-{number}" for number in range(count)]
        every = actions(paths)
        if third_is_dead is not None:
            every.append(third(place, is_dead=third_is_dead))
        with piped(spark, place, {"main": {}, "parse": "syslog", "actions": every}) as running:
            drain(running, paths, events // 3)
            if third_is_dead:
                wait_until(lambda: is_suspended(running), "a lane that is known to be dead")
            yield partial(drain, running, paths, events)


def is_suspended(running: Piped) -> bool:
    """Whether it is known that the third lane's destination is dead."""
    return any(lane.suspended for lane in running.runner.status() if lane.name == THIRD)


def run(effort: Effort, spark: SparkSession) -> Outcome:
    """One turn for each number of lanes; several beside a third lane, well or dead."""
    single = {}
    for count in effort.unless_trial(COUNTS, COUNTS[:1]):
        with lanes(effort, spark, count) as turn:
            single[count] = turn()
    healthy = effort.unless_trial(HEALTHY, 1)
    rounds = effort.unless_trial(SHORT_TURNS * effort.rounds, 1)
    with (
        lanes(effort, spark, healthy, third_is_dead=False) as well,
        lanes(effort, spark, healthy, third_is_dead=True) as dead,
    ):
        turns = alternate({WELL: well, DEAD: dead}, rounds)
    found = {name: Series(rates) for name, rates in turns.items()}
    return Outcome([_loss(found)], [_lanes_table(single), _dead_table(found)])


def _loss(found: dict[str, Series]) -> Figure:
    loss = found[DEAD].over(found[WELL]).map(lambda ratio: 100 * (1 - ratio))
    how = (
        f"throughput that {HEALTHY} lanes to files lose if the output of a third one, which gets a "
        "sixth of the events, fails for ever, as is known by then, against the same pipeline in "
        "which it is well"
    )
    return figure("dead_lane_loss_percent", loss, how, unit="%", at_most=5)


def _lanes_table(single: dict[int, float]) -> Table:
    rows = {
        f"{count} lane{'s' if count > 1 else ''}": [
            Cell.of(Series([each])),
            Cell.of(Series([each * count])),
        ]
        for count, each in single.items()
    }
    note = "Every event goes through the main lane and into every lane's queue and file."
    return Table("The cost of lanes", "", ("events/s", "lines/s"), rows, note)


def _dead_table(found: dict[str, Series]) -> Table:
    rows = {name: [Cell.of(series)] for name, series in found.items()}
    return Table(f"{HEALTHY} lanes beside a third", "events/s", ("100 B",), rows)
