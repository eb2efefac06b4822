"""Metrics of queue tables, by queue and shard. Nothing is counted here: managers are asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.core import Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from turnlane.errors import TurnlaneError
from turnlane.node.metric_rows import Row, gauge, read
from turnlane.node.tables import Tables
from turnlane.table.manager import Manager
from turnlane.table.places import Lag
from turnlane.table.queue import TableQueue

log = logging.getLogger(__name__)

FRESH: Final = 15.0
"""Seconds for which a table's depth is not asked for again: the database has to count its rows."""

LABELS: Final = ("queue", "shard")


_GAUGES: Final[tuple[Row[Manager], ...]] = (
    Row("table_leading", "1 if this node leads the shard.", lambda m: float(m.fires)),
    Row("table_window_events", "Events that wait in memory.", lambda m: m.waiting),
    Row("table_in_flight_events", "Events that are fired and not settled.", lambda m: m.in_flight),
    Row(
        "table_window_fill_ratio",
        "How full the window is, 0 to 1.",
        lambda m: m.waiting / m.store.definition.settings.window_events,
    ),
    Row(
        "table_receivers", "Receivers of this node, in process or elsewhere.", lambda m: m.receivers
    ),
)

_COUNTERS: Final[tuple[Row[Manager], ...]] = (
    Row("table_fired", "Events given to receivers.", lambda m: m.counts.fired),
    Row("table_acked", "Events settled.", lambda m: m.counts.acked),
    Row("table_retried", "Events fired again: nacked, or late.", lambda m: m.counts.retried),
    Row("table_dead", "Events that had all their attempts.", lambda m: m.counts.dead),
    Row(
        "table_unreadable",
        "Rows set aside as dead letters because they cannot be read.",
        lambda m: m.store.unreadable,
    ),
    Row("table_lost_acks", "Acks taken and not stored.", lambda m: m.lost_acks),
    Row("table_lost_leads", "Times another manager took the lead.", lambda m: m.counts.lost_leads),
)

_LAGS: Final[tuple[tuple[str, str, Callable[[Manager], Lag]], ...]] = (
    ("fire_lag_seconds", "From due to fired.", lambda m: m.counts.fire_lag),
    ("ack_lag_seconds", "From due to acked.", lambda m: m.counts.ack_lag),
)


class TableCollector(Collector):
    """Collects the metrics of a node's queue tables when it is scraped."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._depths: dict[tuple[str, str], tuple[float, dict[str, int]]] = {}

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is depends on the tables."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The metrics at this moment."""
        found = [
            ((name, str(shard.key_range)), table.queue.queue(shard), manager)
            for name, table in sorted(self._tables.all().items())
            if table.is_open
            for shard, manager in table.queue.managers().items()
        ]
        depth = gauge("table_events", "Events in the table, by state.", *LABELS, "state")
        for labels, queue, _ in found:
            for state, count in self._depth(labels, queue).items():
                depth.add_metric([*labels, state], count)
        yield depth
        yield from _of_managers([(labels, manager) for labels, _, manager in found])
        streams = gauge("table_streams", "Receivers elsewhere.")
        streams.add_metric([], self._tables.streams)
        yield streams

    def _depth(self, labels: tuple[str, str], queue: TableQueue) -> dict[str, int]:
        asked, depth = self._depths.get(labels, (float("-inf"), {}))
        now = time.monotonic()
        if now - asked < FRESH:
            return depth
        try:
            depth = queue.counts()
        except TurnlaneError as error:
            log.debug("the depth of %s is not known: %s", labels, error)
            depth = {}
        self._depths[labels] = (now, depth)
        return depth


def _of_managers(managers: list[tuple[tuple[str, str], Manager]]) -> Iterator[Metric]:
    yield from read(_GAUGES, _COUNTERS, LABELS, managers)
    for name, words, lag_of in _LAGS:
        summary = SummaryMetricFamily(f"turnlane_table_{name}", words, labels=LABELS)
        for labels, manager in managers:
            lag = lag_of(manager)
            summary.add_metric(labels, lag.events, lag.seconds)
        yield summary
