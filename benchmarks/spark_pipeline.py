"""From syslog over TCP to lines in files, compared with rsyslogd with the same rules.

The time starts with the first byte sent and ends when the last line is in its file. Both write two
files, with each line as it arrived: ``messages`` without debug messages, and ``errors``. turnlane
syncs its main queue and both actions' queues; rsyslogd has one queue in front of both files, which
it does not sync. One pipeline runs all the time, as in production. Its first turns, in which Java
compiles the code that Spark generates, do not count.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks import rsyslog
from benchmarks.effort import Effort
from benchmarks.lines import make_syslog_messages
from benchmarks.measure import Series, alternate
from benchmarks.outcome import Cell, Outcome, Table, make_figure
from benchmarks.pipeline_process import MASTER, PATIENCE, get_size, run_pipeline, wait_until
from benchmarks.rsyslog import ASSISTED, DISK
from benchmarks.sender import Sender

SIZE = 100
OURS = "turnlane, all synced"
STUCK_SECONDS = 45.0
TRIES = 3
WARM_UPS = 2
SMALL_WARM_UPS = 60
SMALL = 20_000
"""The events of the first warm-up turns. Java compiles code that is called often, and most of its
code is called as often in a small batch as in a large one. Full turns would take far longer.
"""
FILES = {"messages": 6, "errors": 3}
"""The files, and the highest severity number that goes into each."""


class Lines:
    """The files of a run, and the bytes that each is expected to have."""

    def __init__(self, place: Path) -> None:
        self.paths = {name: place / "out" / name for name in FILES}
        self._expected = dict.fromkeys(FILES, 0)
        (place / "out").mkdir()

    def expect(self, messages: Sequence[bytes], times: int) -> None:
        """Expect these messages ``times`` more times."""
        severities = [int(message[1:4]) & 7 for message in messages]
        for name, most in FILES.items():
            events = sum(each <= most for each in severities) * times
            self._expected[name] += events * SIZE

    def have_arrived(self) -> bool:
        """Whether all expected lines are in the files."""
        return all(get_size(self.paths[name]) >= each for name, each in self._expected.items())


def measure_rate(
    place: Path, port: int, lines: Lines, events: int, patience: float = PATIENCE
) -> float:
    """Return events per second from the first byte to the last line in its file."""
    messages = make_syslog_messages(20_000, SIZE - 1)
    with contextlib.closing(Sender(place, port, messages, events)) as sender:
        lines.expect(sender.messages, sender.times)
        started = time.perf_counter()
        sender.start()
        wait_until(lines.have_arrived, "lines in files", patience)
        return sender.events / (time.perf_counter() - started)


def measure_rsyslog(effort: Effort, kind: str, events: int) -> float:
    """Measure rsyslogd. Its disk-assisted queue hangs sometimes: then the turn is repeated."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(TimeoutError):
            return _measure_rsyslog_once(effort, kind, events)
    return _measure_rsyslog_once(effort, kind, events)


def _measure_rsyslog_once(effort: Effort, kind: str, events: int) -> float:
    with effort.place() as place:
        lines = Lines(place)
        rules = "\n".join(
            f"if $syslogseverity <= {FILES[name]} then "
            f'action(type="omfile" file="{path}" template="raw")'
            for name, path in lines.paths.items()
        )
        with rsyslog.run_rsyslogd(place, kind, rules) as port:
            return measure_rate(place, port, lines, events, STUCK_SECONDS)


def make_sections(paths: dict[str, Path]) -> dict[str, Any]:
    """Return the pipeline's configuration: synced queues, the main lane and two others."""
    actions = [
        {
            "name": name,
            "filter": f"severity <= {FILES[name]}",
            "queue": {"kind": "disk", "durability": "always"},
            "output": {"type": "file", "path": str(path), "format": "raw"},
        }
        for name, path in paths.items()
    ]
    return {"main": {"durability": "always"}, "parse": "syslog", "actions": actions}


INPUTS = [{"type": "syslog", "queue": "main", "tcp": "127.0.0.1:0"}]


@contextlib.contextmanager
def run_warm_pipeline(
    effort: Effort, spark: SparkSession, events: int
) -> Iterator[Callable[[], float]]:
    """Run a node and a pipeline until they are warm; yields a function that measures a turn."""
    with effort.place() as place:
        lines = Lines(place)
        with run_pipeline(spark, place, make_sections(lines.paths), INPUTS) as pipeline:
            port = int(pipeline.node.inputs["syslog"].rpartition(":")[2])
            turn = partial(measure_rate, place, port, lines, events)
            for _ in range(effort.choose(SMALL_WARM_UPS, 1)):
                measure_rate(place, port, lines, min(events, SMALL))
            for _ in range(effort.choose(WARM_UPS, 0)):
                turn()
            yield turn


def run(effort: Effort, spark: SparkSession) -> Outcome:
    """Measure turnlane, and rsyslogd with both kinds of queues if it is installed."""
    events = effort.events(10_000_000, 20_000_000)
    with run_warm_pipeline(effort, spark, events) as turn:
        contestants = {OURS: turn}
        if rsyslog.find_program() is not None:
            for kind, less in ((ASSISTED, 1), (DISK, 10)):
                contestants[kind] = partial(measure_rsyslog, effort, kind, events // less)
        found = alternate(contestants, effort.rounds)
    rates = {name: Series(each) for name, each in found.items()}
    return Outcome(_make_figures(rates), [_make_table(rates)], _make_remarks())


def _make_figures(found: dict[str, Series]) -> list[Any]:
    how = (
        f"{SIZE}-byte messages over TCP, synced main queue, parse, filter, two lanes with synced "
        f"queues, lines in two files, Spark on {MASTER} / rsyslogd, the same filters and files, "
    )
    bounds = {
        ASSISTED: ("da", "a disk-assisted main queue", 1.2),
        DISK: ("disk", "a disk main queue, not synced", 4),
    }
    return [
        make_figure(
            f"pipeline_vs_rsyslog_{name}",
            found[OURS].over(found[kind]),
            how + what,
            unit="×",
            at_least=least,
        )
        for kind, (name, what, least) in bounds.items()
        if kind in found
    ]


def _make_table(found: dict[str, Series]) -> Table:
    return Table(
        "From syslog to files",
        "events/s",
        (f"{SIZE} B",),
        {name: [Cell.of(series)] for name, series in found.items()},
        "From the first byte sent until the last line is in its file. turnlane syncs every queue.",
    )


def _make_remarks() -> list[str]:
    return (
        []
        if rsyslog.find_program()
        else ["There is no comparison with rsyslogd: it is not installed."]
    )
