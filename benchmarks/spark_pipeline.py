"""The whole way, syslog over TCP to lines in files, beside rsyslogd with the same rules.

What is timed is from the first byte sent until the last line is in its file. Both write two files:
``messages`` gets everything but debugging, ``errors`` the errors, each line as it came. turnlane
syncs its main queue and both actions' queues; rsyslogd has one queue, which it does not sync, in
front of both files. One pipeline runs all the time, as it would for months, and takes its turns:
the first ones, in which Java compiles the code that Spark makes for it, do not count.
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
from benchmarks.lines import syslog_messages
from benchmarks.measure import Series, alternate
from benchmarks.outcome import Cell, Outcome, Table, figure
from benchmarks.piped import MASTER, PATIENCE, piped, size_of, wait_until
from benchmarks.rsyslog import ASSISTED, DISK
from benchmarks.sender import Sender

SIZE = 100
OURS = "turnlane, all synced"
STUCK_SECONDS = 45.0
TRIES = 3
WARM_UPS = 2
SMALL_WARM_UPS = 60
SMALL = 20_000
"""Before that, turns of so few events: Java compiles what is called often, and most of its code is
called so many times a batch, however large that is. Full turns would take far longer to get there.
"""
FILES = {"messages": 6, "errors": 3}
"""The files, and the least severe that goes into each."""


class Lines:
    """The files that are written, and how much of what is sent belongs into each."""

    def __init__(self, place: Path) -> None:
        self.paths = {name: place / "out" / name for name in FILES}
        self._expected = dict.fromkeys(FILES, 0)
        (place / "out").mkdir()

    def expect(self, messages: Sequence[bytes], times: int) -> None:
        """So many more of these are being sent."""
        severities = [int(message[1:4]) & 7 for message in messages]
        for name, most in FILES.items():
            events = sum(each <= most for each in severities) * times
            self._expected[name] += events * SIZE

    def are_there(self) -> bool:
        """Whether all of them are in the files."""
        return all(size_of(self.paths[name]) >= each for name, each in self._expected.items())


def rate(place: Path, port: int, lines: Lines, events: int, patience: float = PATIENCE) -> float:
    """Events a second from the first byte to the last line in its file."""
    messages = syslog_messages(20_000, SIZE - 1)
    with contextlib.closing(Sender(place, port, messages, events)) as sender:
        lines.expect(sender.messages, sender.times)
        started = time.perf_counter()
        sender.start()
        wait_until(lines.are_there, "lines in files", patience)
        return sender.events / (time.perf_counter() - started)


def rsyslog_events(effort: Effort, kind: str, events: int) -> float:
    """Through rsyslogd. Its disk-assisted queue gets stuck now and then: that turn is repeated."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(TimeoutError):
            return _rsyslog_events(effort, kind, events)
    return _rsyslog_events(effort, kind, events)


def _rsyslog_events(effort: Effort, kind: str, events: int) -> float:
    with effort.place() as place:
        lines = Lines(place)
        rules = "\n".join(
            f"if $syslogseverity <= {FILES[name]} then "
            f'action(type="omfile" file="{path}" template="raw")'
            for name, path in lines.paths.items()
        )
        with rsyslog.running(place, kind, rules) as port:
            return rate(place, port, lines, events, STUCK_SECONDS)


def sections(paths: dict[str, Path]) -> dict[str, Any]:
    """The pipeline's configuration: synced queues, two lanes beside the main one."""
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
def running(effort: Effort, spark: SparkSession, events: int) -> Iterator[Callable[[], float]]:
    """A node and a pipeline that have been at it for a while; calling it takes a turn."""
    with effort.place() as place:
        lines = Lines(place)
        with piped(spark, place, sections(lines.paths), INPUTS) as pipeline:
            port = int(pipeline.node.inputs["syslog"].rpartition(":")[2])
            turn = partial(rate, place, port, lines, events)
            for _ in range(effort.unless_trial(SMALL_WARM_UPS, 1)):
                rate(place, port, lines, min(events, SMALL))
            for _ in range(effort.unless_trial(WARM_UPS, 0)):
                turn()
            yield turn


def run(effort: Effort, spark: SparkSession) -> Outcome:
    """turnlane, and rsyslogd with both of its queues if it is installed."""
    events = effort.events(10_000_000, 20_000_000)
    with running(effort, spark, events) as turn:
        contestants = {OURS: turn}
        if rsyslog.program() is not None:
            for kind, less in ((ASSISTED, 1), (DISK, 10)):
                contestants[kind] = partial(rsyslog_events, effort, kind, events // less)
        found = alternate(contestants, effort.rounds)
    rates = {name: Series(each) for name, each in found.items()}
    return Outcome(_figures(rates), [_table(rates)], _remarks())


def _figures(found: dict[str, Series]) -> list[Any]:
    how = (
        f"{SIZE}-byte messages over TCP, synced main queue, parse, filter, two lanes with synced "
        f"queues, lines in two files, Spark on {MASTER} / rsyslogd, the same filters and files, "
    )
    bounds = {
        ASSISTED: ("da", "a disk-assisted main queue", 1.2),
        DISK: ("disk", "a disk main queue, not synced", 4),
    }
    return [
        figure(
            f"pipeline_vs_rsyslog_{name}",
            found[OURS].over(found[kind]),
            how + what,
            unit="×",
            at_least=least,
        )
        for kind, (name, what, least) in bounds.items()
        if kind in found
    ]


def _table(found: dict[str, Series]) -> Table:
    return Table(
        "From syslog to files",
        "events/s",
        (f"{SIZE} B",),
        {name: [Cell.of(series)] for name, series in found.items()},
        "From the first byte sent until the last line is in its file, "
        "turnlane with every queue synced.",
    )


def _remarks() -> list[str]:
    return [] if rsyslog.program() else ["rsyslogd is not installed: nothing to compare with."]
