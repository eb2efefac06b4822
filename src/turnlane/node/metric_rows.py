"""What the node's metrics are made of: rows that say how a value is read off something."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Some = TypeVar("Some")

Family = GaugeMetricFamily | CounterMetricFamily


class Row(NamedTuple, Generic[Some]):
    """A metric with one value for each of many; ``None`` leaves one out."""

    name: str
    help: str
    value: Callable[[Some], float | None]


def gauge(name: str, words: str, *labels: str) -> GaugeMetricFamily:
    """A gauge without values yet."""
    return GaugeMetricFamily(f"turnlane_{name}", words, labels=labels)


def counter(name: str, words: str, *labels: str) -> CounterMetricFamily:
    """A counter without values yet."""
    return CounterMetricFamily(f"turnlane_{name}", words, labels=labels)


def read(
    gauges: Iterable[Row[Some]],
    counters: Iterable[Row[Some]],
    labels: Sequence[str],
    seen: Sequence[tuple[Sequence[str], Some]],
) -> Iterator[Metric]:
    """The metrics of rows, with the values of all that was seen, each behind its labels'."""
    for row in gauges:
        yield _filled(gauge(row.name, row.help, *labels), row, seen)
    for row in counters:
        yield _filled(counter(row.name, row.help, *labels), row, seen)


def _filled(metric: Family, row: Row[Some], seen: Sequence[tuple[Sequence[str], Some]]) -> Metric:
    for labels, each in seen:
        value = row.value(each)
        if value is not None:
            metric.add_metric(labels, value)
    return metric


def joined(metrics: Iterable[Metric]) -> list[Metric]:
    """Metrics in their order; those of one name as one, whatever their labels are.

    Two of a name would be a mistake to whoever reads them.
    """
    found: dict[str, Metric] = {}
    for metric in metrics:
        known = found.setdefault(metric.name, metric)
        if known is not metric:
            known.samples.extend(metric.samples)
    return list(found.values())
