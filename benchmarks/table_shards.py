"""A queue in 1, 2 and 4 shards: databases of one server on one machine."""

from __future__ import annotations

from functools import cached_property

import psycopg

from benchmarks.effort import Effort
from benchmarks.measure import Series
from benchmarks.outcome import Cell, Outcome, Table
from benchmarks.table_contestant import QUEUE, Done, TableContestant, make_row, receive_all
from benchmarks.table_producer import Producer
from benchmarks.table_throughput import COMPARED, Sustained
from turnlane import table

RANGES = {1: ("-",), 2: ("-80", "80-"), 4: ("-40", "40-80", "80-c0", "c0-")}
EVENTS = 20_000


class Sharded(TableContestant):
    """A queue over several databases; ``url`` has a line for each address."""

    label = "turnlane, sharded"
    events = EVENTS

    def __init__(self, url: str) -> None:
        super().__init__(url)
        urls = url.splitlines()
        self._database = table.connect_shards(zip(urls, RANGES[len(urls)], strict=True))

    @cached_property
    def _queue(self) -> table.ShardedQueue:
        return self._database.queue("bench")

    def reset(self) -> None:
        self._database.sql("DROP QUEUE IF EXISTS bench")
        self._database.sql(QUEUE.format("bench"))

    def one(self, count: int) -> None:
        for at in range(count):
            self._queue.put([make_row(at)])

    def batch(self, first: int, count: int) -> None:
        self._queue.put(map(make_row, range(first, first + count)))

    def consume(self, receivers: int, done: Done) -> None:
        receive_all(self._queue.receive, receivers, done)

    def close(self) -> None:
        self._database.close()


def run(effort: Effort, url: str, producer: Producer) -> Outcome:
    """Measure the sustained rate with every number of shards, in turns."""
    sustained = Sustained(effort, producer)
    numbers = effort.choose(list(RANGES), [2])
    found: dict[int, list[float]] = {shards: [] for shards in numbers}
    for turn in range(effort.few_rounds):
        for shards in numbers:
            urls = [_create_database(url, f"bench_{turn}_{shards}_{at}") for at in range(shards)]
            found[shards].append(sustained.rate(Sharded, "\n".join(urls), COMPARED))
    rows = {
        f"{shards} shards" if shards > 1 else "1 shard": [Cell.of(Series(rates))]
        for shards, rates in found.items()
    }
    note = (
        f"Sustained, {COMPARED} receivers. The shards are databases of one PostgreSQL on one "
        "machine, and all managers run in one process: this shows the cost of shards, not the gain."
    )
    return Outcome(tables=[Table("Shards", "events/s", ["sustained"], rows, note)])


def _create_database(url: str, name: str) -> str:
    """Create another database of the same server; returns its address."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        return url.replace(f"/{connection.info.dbname}?", f"/{name}?", 1)
