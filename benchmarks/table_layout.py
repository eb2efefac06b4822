"""The two layouts of a queue table: time first, or key space first.

``python -m benchmarks.table_layout URL`` fills and drains a queue of each layout in turns, and
prints events per second for both.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from typing import NamedTuple

from turnlane import table
from turnlane.databases import Connection

ROWS = 1_000
"""The rows of a transaction."""


class Speed(NamedTuple):
    """Events per second."""

    enqueued: float
    drained: float
    statements: float
    """Statements per event while the queue was drained."""


def measure(database: table.Database, layout: str, events: int) -> Speed:
    database.sql("DROP QUEUE IF EXISTS layout_bench")
    database.sql(
        "CREATE QUEUE layout_bench (user_id BIGINT, payload VARCHAR(256)) SHARD BY (user_id) "
        f"WITH (layout = {layout})"
    )
    with database.queue("layout_bench") as queue:
        with contextlib.closing(database.connect()) as connection:
            enqueued = fill(database, queue, connection, events)
        started = time.perf_counter()
        with queue.receive(prefetch=4 * ROWS) as receiver:
            drain(receiver, events)
            receiver.flush()
        drained = events / (time.perf_counter() - started)
        statements = queue.manager().store.session.statements / events
    database.sql("DROP QUEUE layout_bench")
    return Speed(enqueued, drained, statements)


def fill(
    database: table.Database, queue: table.TableQueue, connection: Connection, events: int
) -> float:
    started = time.perf_counter()
    for first in range(0, events, ROWS):
        rows = [{"user_id": at, "payload": f"{at:0100}"} for at in range(first, first + ROWS)]
        with database.dialect.transaction(connection):
            queue.enqueue_many(connection, rows)
    return events / (time.perf_counter() - started)


def drain(receiver: table.Receiver, events: int) -> None:
    received = 0
    while received < events:
        batch = receiver.take()
        receiver.ack(batch)
        received += len(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="the address of a database for the test")
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    speeds: dict[str, list[Speed]] = {"time": [], "keyspace": []}
    with table.connect(options.url) as database:
        for _ in range(options.rounds):
            for layout, found in speeds.items():
                found.append(measure(database, layout, options.events))
    for layout, found in speeds.items():
        middle = Speed(*(statistics.median(each) for each in zip(*found, strict=True)))
        print(
            f"{layout:9} enqueue {middle.enqueued:9,.0f}/s   fire and ack {middle.drained:9,.0f}/s"
            f"   {middle.statements:.4f} statements per event"
        )


if __name__ == "__main__":
    main()
