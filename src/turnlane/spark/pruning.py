"""Filters that save reading: those on ``offset`` and ``partition``. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from turnlane.spark.ranges import Positions


@dataclass(frozen=True)
class Bounds:
    """What filters leave of a queue."""

    first: int = 0
    end: int | None = None
    nodes: frozenset[int] | None = None

    def applied(self, start: Positions, end: Positions) -> tuple[dict[int, int], dict[int, int]]:
        """A range cut down to them."""
        nodes = [node for node in start if self.nodes is None or node in self.nodes]
        firsts = {node: max(start[node], self.first) for node in nodes}
        ends = {node: end[node] if self.end is None else min(end[node], self.end) for node in nodes}
        return firsts, {node: max(ends[node], firsts[node]) for node in nodes}

    def from_offset(self, first: int) -> Bounds:
        """Only what is at ``first`` or beyond."""
        return replace(self, first=max(self.first, first))

    def up_to(self, end: int) -> Bounds:
        """Only what is before ``end``."""
        return replace(self, end=end if self.end is None else min(self.end, end))

    def on_nodes(self, nodes: Iterable[int]) -> Bounds:
        """Only what is on these nodes."""
        wanted = frozenset(nodes)
        return replace(self, nodes=wanted if self.nodes is None else self.nodes & wanted)


def bounds_of(filters: Iterable[Filter]) -> tuple[Bounds, list[Filter]]:
    """The bounds that filters set, and the filters that say more than that."""
    bounds = Bounds()
    rest = []
    for each in filters:
        narrowed = _narrowed(bounds, each)
        if narrowed is None:
            bounds = _hull(bounds, each)
            rest.append(each)
        else:
            bounds = narrowed
    return bounds, rest


def _narrowed(bounds: Bounds, each: Filter) -> Bounds | None:
    narrowed = None
    match each:
        case EqualTo(("offset",), int(value)):
            narrowed = bounds.from_offset(value).up_to(value + 1)
        case GreaterThan(("offset",), int(value)):
            narrowed = bounds.from_offset(value + 1)
        case GreaterThanOrEqual(("offset",), int(value)):
            narrowed = bounds.from_offset(value)
        case LessThan(("offset",), int(value)):
            narrowed = bounds.up_to(value)
        case LessThanOrEqual(("offset",), int(value)):
            narrowed = bounds.up_to(value + 1)
        case EqualTo(("partition",), int(value)):
            narrowed = bounds.on_nodes([value])
        case In(("partition",), tuple(values)):
            narrowed = bounds.on_nodes(values)
    return narrowed


def _hull(bounds: Bounds, each: Filter) -> Bounds:
    """The bounds that a filter sets beside what Spark has still to look at."""
    match each:
        case In(("offset",), (int(), *_) as values):
            there = [value for value in values if value is not None]
            return bounds.from_offset(min(there)).up_to(max(there) + 1)
    return bounds
