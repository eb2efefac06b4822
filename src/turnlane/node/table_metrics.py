"""Metrics of queue tables, by queue and shard. Nothing is counted here: managers are asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from turnlane.errors import TurnlaneError
from turnlane.node.tables import Tables
from turnlane.table.manager import Manager
from turnlane.table.places import Lag
from turnlane.table.queue import TableQueue

log = logging.getLogger(__name__)

FRESH: Final = 15.0
"""Seconds for which a table's depth is not asked for again: the database has to count its rows."""

LABELS: Final = ("queue", "shard")


class _Row(NamedTuple):
    name: str
    help: str
    value: Callable[[Manager], float]


_GAUGES: Final = (
    _Row("leading", "1 if this node leads the shard.", lambda m: float(m.fires)),
    _Row("window_events", "Events that wait in memory.", lambda m: m.waiting),
    _Row("in_flight_events", "Events that are fired and not settled.", lambda m: m.in_flight),
    _Row(
        "window_fill_ratio",
        "How full the window is, 0 to 1.",
        lambda m: m.waiting / m.store.definition.settings.window_events,
    ),
    _Row("receivers", "Receivers of this node, in process or elsewhere.", lambda m: m.receivers),
)

_COUNTERS: Final = (
    _Row("fired", "Events given to receivers.", lambda m: m.counts.fired),
    _Row("acked", "Events settled.", lambda m: m.counts.acked),
    _Row("retried", "Events fired again: nacked, or late.", lambda m: m.counts.retried),
    _Row("dead", "Events that had all their attempts.", lambda m: m.counts.dead),
    _Row("lost_leads", "Times another manager took the lead.", lambda m: m.counts.lost_leads),
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
        depth = GaugeMetricFamily(
            "turnlane_table_events", "Events in the table, by state.", labels=(*LABELS, "state")
        )
        for labels, queue, _ in found:
            for state, count in self._depth(labels, queue).items():
                depth.add_metric([*labels, state], count)
        yield depth
        yield from _of_managers([(labels, manager) for labels, _, manager in found])
        streams = GaugeMetricFamily("turnlane_table_streams", "Receivers elsewhere.")
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
    for row in _GAUGES:
        gauge = GaugeMetricFamily(f"turnlane_table_{row.name}", row.help, labels=LABELS)
        for labels, manager in managers:
            gauge.add_metric(labels, row.value(manager))
        yield gauge
    for row in _COUNTERS:
        counter = CounterMetricFamily(f"turnlane_table_{row.name}", row.help, labels=LABELS)
        for labels, manager in managers:
            counter.add_metric(labels, row.value(manager))
        yield counter
    for name, words, lag_of in _LAGS:
        summary = SummaryMetricFamily(f"turnlane_table_{name}", words, labels=LABELS)
        for labels, manager in managers:
            lag = lag_of(manager)
            summary.add_metric(labels, lag.events, lag.seconds)
        yield summary
