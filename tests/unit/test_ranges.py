"""A set of ranges behaves like a set of integers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlane.intervals import RangeSet

LIMIT = 40
NUMBERS = range(LIMIT)
number = st.integers(0, LIMIT - 1)
span = st.tuples(number, number)
change = st.tuples(st.sampled_from(["add", "remove", "drop_below"]), span)


def apply(ranges: RangeSet, plain: set[int], verb: str, first: int, end: int) -> None:
    """Apply the same change to both."""
    if verb == "drop_below":
        ranges.drop_below(first)
        plain -= set(range(first))
    elif verb == "add":
        ranges.add(first, end)
        plain |= set(range(first, end))
    else:
        ranges.remove(first, end)
        plain -= set(range(first, end))


def build(changes: list[tuple[str, tuple[int, int]]]) -> tuple[RangeSet, set[int]]:
    ranges, plain = RangeSet(), set[int]()
    for verb, (first, end) in changes:
        apply(ranges, plain, verb, first, end)
    return ranges, plain


def numbers(spans: list[tuple[int, int]]) -> set[int]:
    return {one for first, end in spans for one in range(first, end)}


def assert_tidy(spans: list[tuple[int, int]]) -> None:
    """Check that the ranges are sorted, not empty, and do not touch."""
    assert all(first < end for first, end in spans)
    assert all(before[1] < after[0] for before, after in pairwise(spans))


both = st.lists(change, max_size=30).map(build)


@given(both)
def test_range_set_equals_a_set_of_numbers(pair: tuple[RangeSet, set[int]]) -> None:
    ranges, plain = pair
    assert_tidy(list(ranges))
    assert numbers(list(ranges)) == plain
    assert {one for one in NUMBERS if one in ranges} == plain
    assert ranges.total == len(plain)
    assert ranges.end == max(plain, default=-1) + 1
    assert bool(ranges) == bool(plain)
    assert len(ranges) == len(list(ranges))


@given(both, span)
def test_queries_about_a_span_equal_a_set_of_numbers(
    pair: tuple[RangeSet, set[int]], at: tuple[int, int]
) -> None:
    ranges, plain = pair
    asked = set(range(*at))
    assert ranges.covers(*at) == (asked <= plain)
    assert ranges.overlap(*at) == len(asked & plain)
    for spans, expected in (
        (ranges.within(*at), asked & plain),
        (ranges.missing(*at), asked - plain),
    ):
        assert_tidy(spans)
        assert numbers(spans) == expected


@given(both, number)
def test_queries_about_a_number_equal_a_set_of_numbers(
    pair: tuple[RangeSet, set[int]], at: int
) -> None:
    ranges, plain = pair
    assert (at in ranges) == (at in plain)
    assert ranges.end_of_run(at) == next(one for one in range(at, LIMIT + 1) if one not in plain)
    assert ranges.next_after(at) == min((one for one in plain if one >= at), default=None)


@given(both, change)
def test_copy_is_equal_and_independent(
    pair: tuple[RangeSet, set[int]], step: tuple[str, tuple[int, int]]
) -> None:
    ranges, plain = pair
    copy, before = ranges.copy(), list(ranges)
    assert copy == ranges
    verb, (first, end) = step
    apply(copy, set(plain), verb, first, end)
    assert list(ranges) == before


@given(st.lists(span, max_size=10))
def test_sets_with_equal_numbers_are_equal(spans: list[tuple[int, int]]) -> None:
    assert RangeSet(spans) == RangeSet(reversed(spans))
    assert numbers(list(RangeSet(spans))) == numbers(spans)


def test_text_shows_the_ranges_and_other_types_are_unequal() -> None:
    ranges = RangeSet([(1, 3), (5, 6)])
    assert repr(ranges) == "Ranges([(1, 3), (5, 6)])"
    assert ranges != [(1, 3), (5, 6)]
    with pytest.raises(TypeError, match="hashed"):
        hash(ranges)
