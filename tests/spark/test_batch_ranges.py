"""A batch is limited and divided into tasks without losing or repeating an offset."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from turnlane.spark.batch_planning import NodeRange, cut_into_ranges, limit_ends
from turnlane.spark.queue_reader import extract_bounds

extents = st.dictionaries(
    st.integers(0, 4), st.tuples(st.integers(0, 1000), st.integers(0, 10_000)), min_size=1
)


@given(extents, st.none() | st.integers(1, 20_000))
def test_limit_is_respected_and_used_fully(
    given_extents: dict[int, tuple[int, int]], limit: int | None
) -> None:
    start = {node: first for node, (first, _) in given_extents.items()}
    end = {node: first + count for node, (first, count) in given_extents.items()}
    ends = limit_ends(start, end, limit)
    taken = {node: ends[node] - start[node] for node in start}
    assert all(0 <= taken[node] <= end[node] - start[node] for node in start)
    backlog = sum(end.values()) - sum(start.values())
    assert sum(taken.values()) == (backlog if limit is None else min(limit, backlog))


@given(extents, st.integers(1, 10), st.integers(1, 10), st.integers(1, 3000))
def test_ranges_cover_the_batch(
    given_extents: dict[int, tuple[int, int]], least: int, most: int, per: int
) -> None:
    start = {node: first for node, (first, _) in given_extents.items()}
    end = {node: first + count for node, (first, count) in given_extents.items()}
    slices = cut_into_ranges(start, end, at_least=least, at_most=most, events_per_task=per)
    for node, first in start.items():
        own = [each for each in slices if each.node == node]
        at = first
        for each in own:
            assert each.first == at < each.end
            at = each.end
        assert at == end[node]


def test_number_of_tasks_follows_the_backlog() -> None:
    def tasks(events: int) -> int:
        return len(
            cut_into_ranges({0: 5}, {0: 5 + events}, at_least=1, at_most=4, events_per_task=100)
        )

    assert [tasks(n) for n in (0, 1, 100, 101, 300, 10_000)] == [0, 1, 1, 2, 3, 4]


@given(extents, st.integers(1, 20), st.integers(1, 3000))
def test_requested_number_of_tasks_is_reached(
    given_extents: dict[int, tuple[int, int]], asked: int, per: int
) -> None:
    start = {node: first for node, (first, _) in given_extents.items()}
    counts = {node: count for node, (_, count) in given_extents.items() if count}
    end = {node: first + given_extents[node][1] for node, first in start.items()}
    tasks = len(cut_into_ranges(start, end, at_least=asked, at_most=asked, events_per_task=per))
    assert tasks == max(min(asked, sum(counts.values())), len(counts))


def test_every_node_gets_a_part_of_the_limit() -> None:
    assert limit_ends({0: 0, 1: 0}, {0: 1000, 1: 10}, 100) == {0: 90, 1: 10}


def test_filters_on_offset_and_partition_limit_the_range() -> None:
    kept: list[Filter] = [IsNotNull(("offset",)), EqualTo(("key",), "a")]
    pushed: list[Filter] = [
        GreaterThan(("offset",), 10),
        GreaterThanOrEqual(("offset",), 5),
        LessThan(("offset",), 40),
        LessThanOrEqual(("offset",), 29),
        In(("partition",), (0, 1)),
    ]
    bounds, rest = extract_bounds([*kept, *pushed])
    assert rest == kept
    start, end = bounds.apply({0: 0, 1: 20, 2: 0}, {0: 100, 1: 25, 2: 100})
    assert (start, end) == ({0: 11, 1: 20}, {0: 30, 1: 25})
    assert cut_into_ranges(start, end, at_least=1, at_most=1, events_per_task=1000) == [
        NodeRange(0, 11, 30),
        NodeRange(1, 20, 25),
    ]


def test_list_of_offsets_limits_the_range_and_stays_with_spark() -> None:
    some: Filter = In(("offset",), (7, 30, 11))
    bounds, rest = extract_bounds([some])
    assert rest == [some]
    assert bounds.apply({0: 0}, {0: 100}) == ({0: 7}, {0: 31})
