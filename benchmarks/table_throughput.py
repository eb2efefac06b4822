"""Events a second: enqueued, and enqueued, fired and acked at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from benchmarks.effort import Effort
from benchmarks.measure import Series, alternate, undisturbed
from benchmarks.outcome import Cell, Figure, Outcome, Table, figure
from benchmarks.table_contestant import BATCH, Done, TableContestant, Turnlane
from benchmarks.table_producer import Job, Producer
from benchmarks.table_rivals import PgQueuer, Procrastinate, SkipLocked

RECEIVERS: tuple[int, ...] = (1, 4, 16)
COMPARED = 4
"""Receivers of the runs that figures are taken from."""

FEWER = 10_000
"""Events of a run on a database where no figure comes of it."""

SINGLE = 500
"""Events enqueued one by one, for a measurement."""

RIVALS: tuple[type[TableContestant], ...] = (Turnlane, SkipLocked, PgQueuer, Procrastinate)

TARGETS = {"vs_pgqueuer": (PgQueuer, 3.0), "vs_procrastinate": (Procrastinate, 20.0)}


class Sustained:
    """One run after the other: another process enqueues, this one receives and acks."""

    def __init__(self, effort: Effort, producer: Producer) -> None:
        self._effort = effort
        self._producer = producer
        self.statements: list[float] = []
        """Of turnlane's manager, to an event."""

    def rate(
        self, kind: type[TableContestant], url: str, receivers: int, events: int | None = None
    ) -> float:
        """Events a second, from the first insert until the last ack is stored."""
        count = self._effort.events(events or kind.events)
        with kind(url) as contestant, undisturbed():
            contestant.reset()
            self._producer.start(Job(kind, url, count))
            started = time.perf_counter()
            done = Done(count, self._producer.received)
            contestant.consume(receivers, done)
            self._producer.finish()
            if isinstance(contestant, Turnlane):
                self.statements.append(contestant.statements / count)
        return count / (done.ended_at - started)


def enqueued(effort: Effort, kind: type[TableContestant], url: str) -> tuple[float, float]:
    """Events a second, one by one and in batches."""
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


def beside_others(effort: Effort, url: str, producer: Producer) -> Outcome:
    """All that there is for PostgreSQL, in turns."""
    sustained = Sustained(effort, producer)
    rates: dict[tuple[str, int], Series] = {}
    numbers = effort.unless_trial(RECEIVERS, (COMPARED,))
    for receivers in numbers:
        runs: dict[str, Callable[[], float]] = {
            kind.label: partial(sustained.rate, kind, url, receivers) for kind in RIVALS
        }
        rounds = effort.rounds if receivers == COMPARED else effort.few_rounds
        for label, found in alternate(runs, rounds).items():
            rates[label, receivers] = Series(found)
    calls = {kind.label: partial(enqueued, effort, kind, url) for kind in RIVALS}
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
        "The same PostgreSQL, 100-byte payloads. In bulk: 1,000 events to a transaction, by what "
        "each has for it. Sustained: one process enqueues in bulk, at most 20,000 events ahead, "
        "another one receives and acks, until the last ack is stored."
    )
    table = Table("Queue tables side by side", "events/s", columns, rows, note)
    return Outcome([*_figures(rates), _statements(sustained.statements)], [table])


def _figures(rates: dict[tuple[str, int], Series]) -> list[Figure]:
    own = rates[Turnlane.label, COMPARED]
    how = f"sustained, {COMPARED} receivers, the same PostgreSQL: turnlane / "
    figures = [
        figure(
            name, own.over(rates[kind.label, COMPARED]), how + kind.label, unit="×", at_least=bound
        )
        for name, (kind, bound) in TARGETS.items()
    ]
    by_hand = own.over(rates[SkipLocked.label, COMPARED])
    words = "batches of 1,000 by hand with psycopg: claimed with `SKIP LOCKED`, then deleted"
    return [*figures, figure("vs_skip_locked", by_hand, how + words, unit="×", at_least=1.0)]


def _statements(found: list[float]) -> Figure:
    how = (
        "sustained, all numbers of receivers: statements that the manager's connection sent, "
        "counted there, BEGIN and COMMIT included / events"
    )
    return figure("statements_per_event", Series(found), how, at_most=0.05)


def on_each_database(effort: Effort, urls: dict[str, str], producer: Producer) -> Outcome:
    """Turnlane alone, on every database."""
    sustained = Sustained(effort, producer)
    rows: dict[str, list[Cell | None]] = {}
    numbers = effort.unless_trial(RECEIVERS, (COMPARED,))
    for name, url in urls.items():
        rounds = range(effort.few_rounds)
        puts = [enqueued(effort, Turnlane, url) for _ in rounds]
        rates = [
            Series([sustained.rate(Turnlane, url, receivers, FEWER) for _ in rounds])
            for receivers in numbers
        ]
        series = [*(Series(each) for each in zip(*puts, strict=True)), *rates]
        rows[name] = [Cell.of(each) for each in series]
    columns = ["enqueue, one by one", "enqueue, in bulk"]
    columns += [f"sustained, {receivers} receivers" for receivers in numbers]
    return Outcome(tables=[Table("turnlane on each database", "events/s", columns, rows)])
