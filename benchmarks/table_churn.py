"""Whether a queue table gets slower as millions of rows come and go."""

from __future__ import annotations

import itertools
import threading
import time

from benchmarks.effort import Effort
from benchmarks.measure import Series, alternate
from benchmarks.outcome import Cell, Outcome, Table, figure
from benchmarks.table_contestant import Done, Turnlane
from benchmarks.table_producer import Job, Producer
from turnlane.runtime import Closeable

PARTS = 10
"""Of the time, one beside the other."""

WARM_UP = 2.0
"""Seconds of a run that do not count: connections, caches, the first vacuum."""

SHORTEST = 2.0
"""Seconds in which something is sure to happen in every part."""

ENDLESS = 10**12


class Fresh(Turnlane):
    """A queue that was made just now, beside the one that was not."""

    name = "fresh"


class Churn(Closeable):
    """A queue whose manager and receivers stay, while another process enqueues now and then."""

    def __init__(self, kind: type[Turnlane], url: str, producer: Producer) -> None:
        self._job = Job(kind, url, ENDLESS)
        self._producer = producer
        self._before: int | None = None
        """How many events there were when this run began; none while it is another's turn."""
        self._contestant = kind(url)
        self._contestant.reset()
        self._done = Done(ENDLESS, self._tell)
        self._consumer = threading.Thread(target=self._contestant.consume, args=(4, self._done))
        self._consumer.start()

    def close(self) -> None:
        """Have the receivers end."""
        self._done.stop()
        self._consumer.join()
        self._contestant.close()

    def rates(self, seconds: float, warm_up: float, parts: int = 1) -> list[float]:
        """Events a second in each part of the time, as fast as they go; then nothing is left."""
        self._before = self._done.count
        self._producer.start(self._job)
        while self._done.count == self._before:
            time.sleep(0.01)
        time.sleep(warm_up)
        counts = [self._done.count]
        for _ in range(parts):
            time.sleep(seconds / parts)
            counts.append(self._done.count)
        self._producer.stop()
        self._producer.finish()
        while any(self._contestant.queue.counts().values()):
            time.sleep(0.01)
        self._before = None
        return [(after - before) / seconds * parts for before, after in itertools.pairwise(counts)]

    def _tell(self, count: int) -> None:
        if self._before is not None:
            self._producer.received(count - self._before)


def run(effort: Effort, url: str, producer: Producer) -> Outcome:
    """As many events as go through, for a while; ten parts of the time beside each other."""
    seconds = max(SHORTEST, effort.seconds(15.0, 3600.0))
    warm_up = effort.seconds(WARM_UP, WARM_UP)
    with Churn(Turnlane, url, producer) as old:
        rates = old.rates(seconds, warm_up, PARTS)
        beside = _beside_a_new_one(effort, old, url, producer)
    how = (
        f"PostgreSQL, events enqueued, fired and acked as fast as they go for {seconds:,.0f} s, "
        f"after {warm_up:,.0f} s to warm up: events a second in the last three tenths of the time "
        "/ in the first three"
    )
    ratio = Series([sum(rates[-3:]) / sum(rates[:3])])
    cells = [Cell.of(Series([rate])) for rate in rates]
    columns = [f"{10 * at}–{10 * at + 10} %" for at in range(PARTS)]
    table = Table("Churn", "events/s", columns, {"turnlane": cells})
    return Outcome([figure("churn_ratio", ratio, how, unit="×", at_least=0.9)], [table, beside])


def _beside_a_new_one(effort: Effort, old: Churn, url: str, producer: Producer) -> Table:
    """The queue, its manager still the same, and a new one by turns: at the machine's same pace."""
    turn, warm_up = effort.seconds(2.0, 10.0), effort.seconds(0.5, WARM_UP)
    with Churn(Fresh, url, producer) as new:
        runs = {
            "that churned": lambda: old.rates(turn, warm_up)[0],
            "made just now": lambda: new.rates(turn, warm_up)[0],
        }
        found = alternate(runs, effort.few_rounds)
    cells: list[Cell | None] = [Cell.of(Series(each)) for each in found.values()]
    note = "A queue that churned, and one that was made afterwards, by turns."
    return Table("After the churn", "events/s", list(found), {"turnlane": cells}, note)
