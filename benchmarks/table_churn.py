"""The speed of a queue table after millions of rows were added and removed."""

from __future__ import annotations

import itertools
import threading
import time

from benchmarks.effort import Effort
from benchmarks.measure import Series, alternate
from benchmarks.outcome import Cell, Outcome, Table, make_figure
from benchmarks.table_contestant import Done, Turnlane
from benchmarks.table_producer import Job, Producer
from turnlane.runtime import Closeable

PARTS = 10
"""The number of equal parts of the time."""

WARM_UP = 2.0
"""The first seconds of a run do not count: connections, caches, the first vacuum."""

SHORTEST = 2.0
"""The shortest run in seconds: long enough for events in every part."""

ENDLESS = 10**12


class Fresh(Turnlane):
    """A new queue, for comparison with the old queue."""

    name = "fresh"


class Churn(Closeable):
    """A queue whose manager and receivers keep running; another process enqueues in turns."""

    def __init__(self, kind: type[Turnlane], url: str, producer: Producer) -> None:
        self._job = Job(kind, url, ENDLESS)
        self._producer = producer
        self._before: int | None = None
        """The events acked before this run; ``None`` between runs."""
        self._contestant = kind(url)
        self._contestant.reset()
        self._done = Done(ENDLESS, self._tell)
        self._consumer = threading.Thread(target=self._contestant.consume, args=(4, self._done))
        self._consumer.start()

    def close(self) -> None:
        """End the receivers."""
        self._done.stop()
        self._consumer.join()
        self._contestant.close()

    def rates(self, seconds: float, warm_up: float, parts: int = 1) -> list[float]:
        """Return events per second in each part of the time; then wait until the queue is empty."""
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
    """Run the queue at full speed; compare the parts of the time with each other."""
    seconds = max(SHORTEST, effort.seconds(15.0, 3600.0))
    warm_up = effort.seconds(WARM_UP, WARM_UP)
    with Churn(Turnlane, url, producer) as old:
        rates = old.rates(seconds, warm_up, PARTS)
        beside = _compare_with_new_queue(effort, old, url, producer)
    how = (
        f"PostgreSQL, events enqueued, fired and acked at full speed for {seconds:,.0f} s, after "
        f"{warm_up:,.0f} s to warm up: events per second in the last three tenths of the time / in "
        "the first three tenths"
    )
    ratio = Series([sum(rates[-3:]) / sum(rates[:3])])
    cells = [Cell.of(Series([rate])) for rate in rates]
    columns = [f"{10 * at}–{10 * at + 10} %" for at in range(PARTS)]
    table = Table("Churn", "events/s", columns, {"turnlane": cells})
    return Outcome(
        [make_figure("churn_ratio", ratio, how, unit="×", at_least=0.9)], [table, beside]
    )


def _compare_with_new_queue(effort: Effort, old: Churn, url: str, producer: Producer) -> Table:
    """Compare the old queue, with the same manager, and a new queue in turns."""
    turn, warm_up = effort.seconds(2.0, 10.0), effort.seconds(0.5, WARM_UP)
    with Churn(Fresh, url, producer) as new:
        runs = {
            "old queue": lambda: old.rates(turn, warm_up)[0],
            "new queue": lambda: new.rates(turn, warm_up)[0],
        }
        found = alternate(runs, effort.few_rounds)
    cells: list[Cell | None] = [Cell.of(Series(each)) for each in found.values()]
    note = "The queue of the churn and a queue that was created afterwards, in turns."
    return Table("After the churn", "events/s", list(found), {"turnlane": cells}, note)
