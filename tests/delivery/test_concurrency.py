"""Does the limit find what a destination can take?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlane.delivery.limits import SAMPLES, AdaptiveLimit, FixedLimit, make_concurrency_limit
from turnlane.delivery.settings import DeliverySettings


class Load:
    """Sends over and over at full use; each takes as long as told."""

    def __init__(self, limit: AdaptiveLimit) -> None:
        self.limit = limit
        self.now = 0.0

    def rounds(self, count: int, seconds: float, *, pushed_back: bool = False) -> None:
        """So many looks back."""
        for _ in range(count):
            self.now += 10 * seconds
            for _ in range(1 if pushed_back else min(SAMPLES, 2 * self.limit.limit)):
                self.limit.on_start(self.limit.limit)
                self.limit.on_finish(
                    self.now, None if pushed_back else seconds, is_pushed_back=pushed_back
                )


def test_it_grows_by_one_while_sends_take_no_longer() -> None:
    limit = AdaptiveLimit(1, 32)
    Load(limit).rounds(10, 0.1)
    assert limit.limit == 11


def test_it_stays_where_it_is_not_reached() -> None:
    limit = AdaptiveLimit(1, 32, 8)
    for step in range(1, 100):
        limit.on_start(3)
        limit.on_finish(step * 0.1, 0.1, is_pushed_back=False)
    assert limit.limit == 8


def test_it_shrinks_by_a_tenth_when_pushed_back() -> None:
    limit = AdaptiveLimit(1, 32, 20)
    Load(limit).rounds(1, 0.1, pushed_back=True)
    assert limit.limit == 18


def test_it_shrinks_more_the_longer_sends_take() -> None:
    left = []
    for seconds in (0.11, 0.15, 0.2, 1.0):
        limit = AdaptiveLimit(1, 32, 20)
        load = Load(limit)
        load.rounds(1, 0.1)
        before = limit.limit
        load.rounds(1, seconds)
        left.append(limit.limit / before)
    assert left == sorted(left, reverse=True)
    assert left[0] > 1
    assert left[-1] == pytest.approx(0.5, abs=0.05)


def test_a_destination_that_is_slower_for_good_is_believed_in_the_end() -> None:
    limit = AdaptiveLimit(1, 32, 20)
    load = Load(limit)
    load.rounds(5, 0.1)
    load.rounds(60, 0.3)
    assert limit.limit > 20


@pytest.mark.parametrize("capacity", [2, 4, 16])
def test_it_settles_where_one_more_would_only_wait(capacity: int) -> None:
    limit = AdaptiveLimit(1, 64)
    load = Load(limit)
    for _ in range(300):
        load.rounds(1, 0.05 * max(1.0, limit.limit / capacity))
    assert capacity <= limit.limit <= 1.5 * capacity + 1


@given(
    st.integers(1, 5),
    st.integers(5, 40),
    st.integers(0, 100),
    st.lists(st.tuples(st.floats(0.001, 10), st.booleans(), st.booleans()), max_size=200),
)
def test_it_never_leaves_its_bounds(
    least: int, most: int, hint: int, sends: list[tuple[float, bool, bool]]
) -> None:
    limit = AdaptiveLimit(least, most, hint)
    now = 0.0
    for seconds, failed, busy in sends:
        now += seconds
        limit.on_start(most if busy else 1)
        limit.on_finish(now, None if failed else seconds, is_pushed_back=failed)
        assert least <= limit.limit <= most


def test_a_hint_is_where_it_begins() -> None:
    settings = DeliverySettings(min_concurrency=2, max_concurrency=16)
    assert make_concurrency_limit(settings).limit == 2
    assert make_concurrency_limit(settings, 9).limit == 9
    assert make_concurrency_limit(settings, 99).limit == 16


def test_fixed_is_fixed() -> None:
    limit = make_concurrency_limit(DeliverySettings(concurrency=7), 3)
    limit.on_finish(1.0, 0.1, is_pushed_back=True)
    assert isinstance(limit, FixedLimit)
    assert limit.limit == 7
