"""The time from due to received, and the statements of a manager."""

from __future__ import annotations

import contextlib
import time
from typing import NamedTuple

from benchmarks.effort import Effort
from benchmarks.measure import Series, get_percentile
from benchmarks.outcome import Cell, Outcome, Table, make_figure
from benchmarks.table_contestant import BATCH, Turnlane
from benchmarks.table_producer import Job, Producer

RATE = 1_000
"""Events per second."""

BACKLOG = 100_000
SETTLED = 3.0
"""The seconds after which a manager without events is idle."""


class Lags(NamedTuple):
    """Milliseconds of the median and the 99th percentile, and statements per event."""

    half: float
    most: float
    statements: float


def measure_at_rate(url: str, producer: Producer, count: int) -> Lags:
    """Measure while another process inserts events one by one; each is due at once."""
    with Turnlane(url) as contestant:
        contestant.reset()
        with contestant.queue.receive() as receiver:
            session = contestant.queue.manager().store.session
            contestant.one(1)
            receiver.ack(receiver.take())
            before = session.statements
            producer.start(Job(Turnlane, url, count, RATE))
            lags: list[float] = []
            while len(lags) < count:
                events = receiver.take()
                # The database runs on this machine and has the same clock.
                now = time.time_ns()
                lags += [(now - event.fire_at) / 1e6 for event in events]
                receiver.ack(events)
            receiver.flush()
            producer.finish()
            statements = (session.statements - before) / count
        contestant.queue.close()
    lags.sort()
    return Lags(get_percentile(lags, 0.5), get_percentile(lags, 0.99), statements)


def measure_backlog(url: str, count: int) -> Lags:
    """Measure a backlog: all events are due when the receiver connects."""
    with Turnlane(url) as contestant:
        contestant.reset()
        for first in range(0, count, BATCH):
            contestant.batch(first, min(BATCH, count - first))
        with contestant.queue.receive(prefetch=4 * BATCH) as receiver:
            session = contestant.queue.manager().store.session
            started = time.perf_counter()
            lags: list[float] = []
            while len(lags) < count:
                events = receiver.take()
                lags += [1000 * (time.perf_counter() - started)] * len(events)
                receiver.ack(events)
            receiver.flush()
            statements = session.statements / count
        contestant.queue.close()
    return Lags(get_percentile(lags, 0.5), get_percentile(lags, 0.99), statements)


def measure_idle(urls: dict[str, str], settled: float, seconds: float) -> dict[str, float]:
    """Return statements per second of managers with empty queues, on all databases at once."""
    with contextlib.ExitStack() as stack:
        sessions = {}
        for name, url in urls.items():
            contestant = stack.enter_context(Turnlane(url))
            contestant.reset()
            receiver = stack.enter_context(contestant.queue.receive())
            contestant.one(1)
            receiver.ack(receiver.take())
            receiver.flush()
            sessions[name] = contestant.queue.manager().store.session
        time.sleep(settled)
        before = {name: session.statements for name, session in sessions.items()}
        time.sleep(seconds)
        return {
            name: (session.statements - before[name]) / seconds
            for name, session in sessions.items()
        }


def run(effort: Effort, urls: dict[str, str], producer: Producer) -> Outcome:
    """Measure every database; the figures are of PostgreSQL."""
    rows: dict[str, list[Cell | None]] = {}
    outcome = Outcome()
    count = max(100, round(RATE * effort.seconds(3.0, 20.0)))
    settled = effort.seconds(SETTLED, SETTLED)
    resting = measure_idle(urls, settled, max(SETTLED, effort.seconds(4.0, 30.0)))
    for name, url in urls.items():
        rounds = effort.rounds if name == "PostgreSQL" else effort.few_rounds
        rated = [
            Series(each)
            for each in zip(*_measure_rounds(url, producer, count, rounds), strict=True)
        ]
        backlog = measure_backlog(url, effort.events(BACKLOG // 5, BACKLOG))
        single = [Series([each]) for each in (backlog.half, backlog.most, resting[name])]
        rows[name] = [Cell.of(each) for each in (*rated, *single)]
        if name == "PostgreSQL":
            outcome.figures += [
                make_figure("lag_p99_ms", rated[1], LAG, unit="ms", at_most=20.0),
                make_figure("idle_statements_per_s", single[2], IDLE, at_most=5.0),
            ]
    columns = ("p50 ms", "p99 ms", "statements/event", "backlog p50 ms", "backlog p99 ms", "idle/s")
    outcome.tables.append(Table("From due to received", "", columns, rows, _make_note(effort)))
    return outcome


def _measure_rounds(url: str, producer: Producer, count: int, rounds: int) -> list[Lags]:
    return [measure_at_rate(url, producer, count) for _ in range(rounds)]


LAG = (
    "PostgreSQL; another process inserts 1,000 events per second, one by one, each due at once: "
    "99th percentile of the time from `fire_at`, which is before the commit, until `take()` "
    "returns the event"
)
IDLE = (
    "PostgreSQL; a receiver waits for an empty queue: statements per second that the manager's "
    "connection sends"
)


def _make_note(effort: Effort) -> str:
    backlog = effort.events(BACKLOG // 5, BACKLOG)
    return (
        "At 1,000 inserts per second, one by one. Statements of the manager's connection are "
        f"counted. Backlog: {backlog:,} events are due when the receiver connects, so its times "
        "include the time to drain it. Idle: statements per second with an empty queue."
    )
