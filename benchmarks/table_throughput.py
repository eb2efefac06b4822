"""Events per second: only enqueued, and enqueued, fired and acked at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from benchmarks.effort import Effort
from benchmarks.measure import Series, alternate, freeze_gc
from benchmarks.outcome import Cell, Figure, Outcome, Table, make_figure
from benchmarks.table_contestant import BATCH, Done, TableContestant, Turnlane
from benchmarks.table_peers import PgQueuer, Procrastinate, SkipLocked
from benchmarks.table_producer import Job, Producer

RECEIVERS: tuple[int, ...] = (1, 4, 16)
COMPARED = 4
"""The number of receivers for the figures."""

FEWER = 10_000
"""The events of a run without a figure."""

SINGLE = 500
"""The events of a measurement that enqueues one by one."""

RIVALS: tuple[type[TableContestant], ...] = (Turnlane, SkipLocked, PgQueuer, Procrastinate)

TARGETS = {"vs_pgqueuer": (PgQueuer, 3.0), "vs_procrastinate": (Procrastinate, 20.0)}


class Sustained:
    """Measures runs in which another process enqueues, and this process receives and acks."""

    def __init__(self, effort: Effort, producer: Producer) -> None:
        self._effort = effort
        self._producer = producer
        self.statements: list[float] = []
        """The statements per event of turnlane's manager."""

    def rate(
        self, kind: type[TableContestant], url: str, receivers: int, events: int | None = None
    ) -> float:
        """Return events per second from the first insert until the last ack is stored."""
        count = self._effort.events(events or kind.events)
        with kind(url) as contestant, freeze_gc():
            contestant.reset()
            self._producer.start(Job(kind, url, count))
            started = time.perf_counter()
            done = Done(count, self._producer.received)
            contestant.consume(receivers, done)
            self._producer.finish()
            if isinstance(contestant, Turnlane):
                self.statements.append(contestant.statements / count)
        return count / (done.ended_at - started)


def measure_enqueue(effort: Effort, kind: type[TableContestant], url: str) -> tuple[float, float]:
    """Return events per second, one by one and in batches."""
    single, many = effort.events(SINGLE), effort.events(max(BATCH, kind.events // 2))
    with kind(url) as contestant:
        contestant.reset()
        started = time.perf_counter()
        contestant.one(single)
        one = single / (time.perf_counter() - started)
        started = time.perf_counter()
        for first in range(0, many, BATCH):
            contestant.batch(first, min(BATCH, many - first))
        return one, many / (time.perf_counter() - started)


def compare_contestants(effort: Effort, url: str, producer: Producer) -> Outcome:
    """Compare all contestants on PostgreSQL, in turns."""
    sustained = Sustained(effort, producer)
    rates: dict[tuple[str, int], Series] = {}
    numbers = effort.choose(RECEIVERS, (COMPARED,))
    for receivers in numbers:
        runs: dict[str, Callable[[], float]] = {
            kind.label: partial(sustained.rate, kind, url, receivers) for kind in RIVALS
        }
        rounds = effort.rounds if receivers == COMPARED else effort.few_rounds
        for label, found in alternate(runs, rounds).items():
            rates[label, receivers] = Series(found)
    calls = {kind.label: partial(measure_enqueue, effort, kind, url) for kind in RIVALS}
    puts = alternate(calls, effort.few_rounds)
    rows = {
        kind.label: [
            *(Cell.of(Series(each)) for each in zip(*puts[kind.label], strict=True)),
            *(Cell.of(rates[kind.label, receivers]) for receivers in numbers),
        ]
        for kind in RIVALS
    }
    columns = ["enqueue, one by one", "enqueue, in bulk"]
    columns += [f"sustained, {receivers} receivers" for receivers in numbers]
    note = (
        "The same PostgreSQL, 100-byte payloads. In bulk: 1,000 events in a transaction, with the "
        "fastest call of each. Sustained: one process enqueues in bulk, at most 20,000 events "
        "ahead; another process receives and acks, until the last ack is stored."
    )
    table = Table("Queue tables side by side", "events/s", columns, rows, note)
    return Outcome([*_make_figures(rates), _make_statements_figure(sustained.statements)], [table])


def _make_figures(rates: dict[tuple[str, int], Series]) -> list[Figure]:
    own = rates[Turnlane.label, COMPARED]
    how = f"sustained, {COMPARED} receivers, the same PostgreSQL: turnlane / "
    figures = [
        make_figure(
            name, own.over(rates[kind.label, COMPARED]), how + kind.label, unit="×", at_least=bound
        )
        for name, (kind, bound) in TARGETS.items()
    ]
    by_hand = own.over(rates[SkipLocked.label, COMPARED])
    words = "batches of 1,000 by hand with psycopg: claimed with `SKIP LOCKED`, then deleted"
    return [*figures, make_figure("vs_skip_locked", by_hand, how + words, unit="×", at_least=1.0)]


def _make_statements_figure(found: list[float]) -> Figure:
    how = (
        "sustained, all numbers of receivers: statements that the manager's connection sends, "
        "including BEGIN and COMMIT / events"
    )
    return make_figure("statements_per_event", Series(found), how, at_most=0.05)


def measure_each_database(effort: Effort, urls: dict[str, str], producer: Producer) -> Outcome:
    """Measure turnlane on every database."""
    sustained = Sustained(effort, producer)
    rows: dict[str, list[Cell | None]] = {}
    numbers = effort.choose(RECEIVERS, (COMPARED,))
    for name, url in urls.items():
        rounds = range(effort.few_rounds)
        puts = [measure_enqueue(effort, Turnlane, url) for _ in rounds]
        rates = [
            Series([sustained.rate(Turnlane, url, receivers, FEWER) for _ in rounds])
            for receivers in numbers
        ]
        series = [*(Series(each) for each in zip(*puts, strict=True)), *rates]
        rows[name] = [Cell.of(each) for each in series]
    columns = ["enqueue, one by one", "enqueue, in bulk"]
    columns += [f"sustained, {receivers} receivers" for receivers in numbers]
    return Outcome(tables=[Table("turnlane on each database", "events/s", columns, rows)])
