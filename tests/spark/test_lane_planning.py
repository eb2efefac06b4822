"""Planning of a lane's batches: selection of events, division into tasks, suspension."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlane.delivery.settings import DeliverySettings, FailoverSettings, Ordering
from turnlane.intervals import (
    RangeSet,
    Span,
    convert_to_spans,
    count_offsets,
    find_inside,
    merge_near_spans,
)
from turnlane.spark.batch_planning import BatchSize, TaskSpans, select_batch, split_into_tasks
from turnlane.spark.steps import (
    DeliveryPath,
    LaneStep,
    Suspension,
    find_strictest_ordering,
    find_suspension,
    list_required_paths,
)

scattered = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(1, 50)), min_size=1, max_size=30
).map(lambda pairs: _spans(pairs))  # noqa: PLW0108 - defined below
"""Spans, made of the gaps before them and their lengths."""


def _spans(pairs: list[tuple[int, int]]) -> list[Span]:
    spans, at = [], 0
    for gap, length in pairs:
        spans.append((at + gap, at + gap + length))
        at += gap + length
    return spans


def offsets(spans: Any) -> list[int]:
    return [offset for first, end in spans for offset in range(first, end)]


class TestTaskSpans:
    @given(
        st.dictionaries(st.integers(0, 3), scattered, min_size=1),
        st.integers(1, 8),
        st.integers(1, 200),
    )
    def test_tasks_have_all_events_once_in_order(
        self, batch: dict[int, list[Span]], most: int, per: int
    ) -> None:
        shares = split_into_tasks(batch, Ordering.NONE, at_most=most, events_per_task=per)
        for node, spans in batch.items():
            mine = [
                offset for each in shares if each.node == node for offset in offsets(each.spans)
            ]
            assert mine == offsets(spans), "all, once, in order"
        assert all(each.spans for each in shares)

    @given(scattered, st.integers(1, 8))
    def test_tasks_by_key_have_all_offsets(self, spans: list[Span], most: int) -> None:
        shares = split_into_tasks({0: spans}, Ordering.KEY, at_most=most, events_per_task=10)
        assert [each.part for each in shares] == list(range(shares[0].parts))
        assert all(each.spans == tuple(spans) for each in shares)

    def test_strict_order_has_one_task_per_node(self) -> None:
        batch = {0: [(0, 1000)], 1: [(5, 10)], 2: []}
        expected = [TaskSpans(0, ((0, 1000),)), TaskSpans(1, ((5, 10),))]
        assert split_into_tasks(batch, Ordering.STRICT, at_most=8, events_per_task=1) == expected

    def test_empty_batch_has_no_tasks(self) -> None:
        assert split_into_tasks({0: []}, Ordering.NONE, at_most=8, events_per_task=1) == []

    @given(scattered)
    def test_spans_are_read_in_few_ranges_without_other_events(self, spans: list[Span]) -> None:
        read = list(merge_near_spans(spans))
        assert read == list(RangeSet(read)), "in order, and disjoint"
        found = [
            first + int(at)
            for first, end in read
            for at in np.flatnonzero(find_inside(spans, first, end - first))
        ]
        assert found == offsets(spans)

    @given(st.lists(st.integers(0, 300)))
    def test_offsets_are_converted_to_spans(self, offsets: list[int]) -> None:
        spans = convert_to_spans(np.array(offsets, dtype=np.int64))
        assert spans == list(RangeSet((offset, offset + 1) for offset in offsets))


class TestBatch:
    @given(
        st.dictionaries(st.integers(0, 3), scattered, min_size=1),
        st.integers(1, 3000),
        st.floats(0, 1),
    )
    def test_batch_has_pending_events_up_to_its_size(
        self, waiting: dict[int, list[Span]], events: int, newest: float
    ) -> None:
        batch = select_batch(waiting, events, newest)
        total = sum(map(count_offsets, waiting.values()))
        assert sum(map(count_offsets, batch.values())) == min(events, total)
        for node, spans in batch.items():
            assert set(offsets(spans)) <= set(offsets(waiting[node]))

    def test_batch_of_a_backlog_has_a_share_of_the_newest_events(self) -> None:
        assert select_batch({0: [(0, 100)]}, 20, 0.1) == {0: [(0, 18), (98, 100)]}
        assert select_batch({0: [(0, 100)]}, 20, 0.0) == {0: [(0, 20)]}


class TestBatchSize:
    FIRST = BatchSize.from_limits(1000, 1_000_000, 5.0)

    def test_first_batch_has_the_largest_size(self) -> None:
        assert self.FIRST.events == 1_000_000

    def test_size_follows_the_rate_of_the_destination(self) -> None:
        slow = self.FIRST.adjust(1_000_000, 990_000, 2.5)
        assert slow.events == 20_000

    def test_time_of_spark_does_not_reduce_the_size(self) -> None:
        size = self.FIRST.adjust(1_000_000, 990_000, 20.0)
        assert size.events == 10_000, "they were sent in the five seconds of a task"
        assert size.adjust(10_000, 0, 20.0).events == 20_000

    def test_size_grows_after_quick_batches(self) -> None:
        slow = self.FIRST.adjust(1_000_000, 999_990, 10.0)
        assert slow.events == 1000, "at least one send is always possible"
        sizes = []
        for _ in range(6):
            slow = slow.adjust(slow.events, 0, 0.5)
            sizes.append(slow.events)
        assert sizes == [4000, 16_000, 64_000, 256_000, 1_000_000, 1_000_000]

    def test_size_stays_if_nothing_was_sent_or_it_is_the_largest(self) -> None:
        assert self.FIRST.adjust(100, 100, 1.0) is self.FIRST
        assert self.FIRST.adjust(100, 0, 4.0) == self.FIRST


def path(action: str, after: float = 0.0) -> DeliveryPath:
    return DeliveryPath(action=action, after=after)


def breaker(state: str = "closed", wait: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"state": state, "wait": wait, "error": "refused", "open_for": None, **more}


class TestSuspension:
    def test_unknown_breakers_do_not_suspend(self) -> None:
        assert find_suspension([[path("a")]], {}) == Suspension(0.0)
        assert find_suspension([], {}) == Suspension(0.0)

    def test_backoff_waits_without_a_reason(self) -> None:
        assert find_suspension([[path("a")]], {"a": breaker(wait=2.0)}) == Suspension(2.0)

    def test_open_breaker_suspends_the_lane(self) -> None:
        found = find_suspension(
            [[path("a")], [path("b")]], {"a": breaker("open", 12.0), "b": breaker()}
        )
        assert found == Suspension(12.0, is_probe=False, why="a: refused")

    def test_half_open_breaker_allows_a_probe(self) -> None:
        found = find_suspension([[path("a")]], {"a": breaker("half_open")})
        assert found == Suspension(0.0, is_probe=True, why="a: refused")

    def test_failures_allow_only_a_probe(self) -> None:
        failing = {"a": breaker(failures=2), "b": breaker()}
        assert find_suspension([[path("a")], [path("b")]], failing) == Suspension(
            0.0, is_probe=True
        )
        assert find_suspension([[path("a"), path("b")]], failing) == Suspension(0.0), (
            "the path of b is open"
        )

    def test_open_alternative_path_avoids_suspension(self) -> None:
        lane = [[path("a"), path("b")]]
        away = {"a": breaker("open", 12.0)}
        assert find_suspension(lane, away) == Suspension(0.0)
        both = away | {"b": breaker("open", 3.0)}
        assert find_suspension(lane, both) == Suspension(3.0, why="a: refused")

    def test_second_output_is_used_after_the_first_was_away_long_enough(self) -> None:
        lane = [[path("a"), path("a.failover", after=60.0)]]
        early = {"a": breaker("open", 30.0, open_for=50.0)}
        assert find_suspension(lane, early) == Suspension(10.0, why="a: refused")
        late = {"a": breaker("open", 30.0, open_for=60.0)}
        assert find_suspension(lane, late) == Suspension(0.0)
        assert find_suspension(lane, {"a": breaker(wait=1.0)}) == Suspension(1.0)

    def test_second_output_depends_on_its_own_first_output(self) -> None:
        lane = [[path("a"), path("b"), path("b.failover", after=60.0)]]
        away = {"a": breaker("open", 30.0, open_for=500.0)}
        early = away | {"b": breaker("open", 30.0, open_for=5.0)}
        assert find_suspension(lane, early) == Suspension(30.0, why="a: refused")
        late = away | {"b": breaker("open", 30.0, open_for=60.0)}
        assert find_suspension(lane, late) == Suspension(0.0)


class TestSteps:
    def test_required_paths_leave_out_steps_with_a_queue(self) -> None:
        second = DeliverySettings(failover=FailoverSettings(output={"type": "file"}, after=9))
        steps = [
            LaneStep(action="a", source_queue="main", output={}, delivery=second),
            LaneStep(action="b", source_queue="main", output={}, only_when_suspended=True),
            LaneStep(action="c", source_queue="main", output={}, queue="c"),
            LaneStep(action="d", source_queue="main", output={}),
            LaneStep(action="e", source_queue="main", queue="e", only_when_suspended=True),
            LaneStep(action="f", source_queue="main", output={}),
        ]
        expected = [[path("a"), path("a.failover", 9.0), path("b")], [path("f")]]
        assert list_required_paths(steps) == expected

    @pytest.mark.parametrize(
        ("orders", "expected"),
        [([], "none"), (["none", "key"], "key"), (["strict", "key"], "strict")],
    )
    def test_strictest_ordering_of_all_steps_applies(
        self, orders: list[str], expected: str
    ) -> None:
        steps = [
            LaneStep(
                action=each, source_queue="main", delivery=DeliverySettings(ordering=Ordering(each))
            )
            for each in orders
        ]
        assert find_strictest_ordering(steps) == expected
