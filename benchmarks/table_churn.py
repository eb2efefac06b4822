"""Whether a queue table gets slower as millions of rows come and go."""

from __future__ import annotations

import itertools
import threading
import time

from benchmarks.effort import Effort
from benchmarks.measure import Series
from benchmarks.outcome import Cell, Outcome, Table, figure
from benchmarks.table_contestant import Done, Turnlane
from benchmarks.table_producer import Job, Producer

PARTS = 10
"""Of the run, one beside the other."""

SHORTEST = 2.0
ENDLESS = 10**12


def run(effort: Effort, url: str, producer: Producer) -> Outcome:
    """As many events as go through, for a while; ten parts of the time beside each other."""
    seconds = max(SHORTEST, effort.seconds(6.0, 3600.0))
    rates = churned(url, producer, seconds)
    how = (
        f"PostgreSQL, events enqueued, fired and acked as fast as they go for {seconds:,.0f} s: "
        "events a second in the last three tenths of the time / in the first three"
    )
    ratio = Series([sum(rates[-3:]) / sum(rates[:3])])
    cells = [Cell.of(Series([rate])) for rate in rates]
    columns = [f"{10 * at}–{10 * at + 10} %" for at in range(PARTS)]
    table = Table("Churn", "events/s", columns, {"turnlane": cells})
    return Outcome([figure("churn_ratio", ratio, how, unit="×", at_least=0.9)], [table])


def churned(url: str, producer: Producer, seconds: float) -> list[float]:
    """Events a second in each tenth of the time."""
    with Turnlane(url) as contestant:
        contestant.reset()
        done = Done(ENDLESS, producer.received)
        consumer = threading.Thread(target=contestant.consume, args=(4, done))
        producer.start(Job(Turnlane, url, ENDLESS))
        consumer.start()
        while not done.count:
            done.wait(0.01)
        counts = []
        for _ in range(PARTS + 1):
            counts.append(done.count)
            time.sleep(seconds / PARTS)
        producer.stop()
        producer.finish()
        done.stop()
        consumer.join()
    return [(after - before) / seconds * PARTS for before, after in itertools.pairwise(counts)]
