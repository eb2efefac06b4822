"""Does the limit find out how many sends a destination can take?"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlane.delivery.limits import SAMPLES, ConcurrencyLimit, make_concurrency_limit
from turnlane.delivery.settings import DeliverySettings


class Load:
    """Sends at the full limit; every send takes the given time."""

    def __init__(self, limit: ConcurrencyLimit) -> None:
        self.limit = limit
        self.now = 0.0

    def run_rounds(self, count: int, seconds: float, *, pushed_back: bool = False) -> None:
        """Send until the limit was adjusted ``count`` times."""
        for _ in range(count):
            self.now += 10 * seconds
            for _ in range(1 if pushed_back else min(SAMPLES, 2 * self.limit.limit)):
                self.limit.on_start(self.limit.limit)
                self.limit.on_finish(
                    self.now, None if pushed_back else seconds, is_pushed_back=pushed_back
                )


@pytest.mark.parametrize(
    ("knobs", "least", "most"),
    [
        ({"senders": 3}, 1, 3),
        ({"senders": 3, "min_concurrency": 5}, 3, 3),
        ({"senders": 3, "concurrency": 8}, 3, 3),
        ({"senders": 8, "concurrency": 3}, 3, 3),
    ],
)
def test_senders_limit_the_sends_of_a_task(knobs: dict[str, Any], least: int, most: int) -> None:
    limit = make_concurrency_limit(DeliverySettings(**knobs))
    assert limit.limit == least
    Load(limit).run_rounds(20, 0.1)
    assert limit.limit == most


def test_limit_grows_by_one_while_sends_stay_fast() -> None:
    limit = ConcurrencyLimit(1, 32)
    Load(limit).run_rounds(10, 0.1)
    assert limit.limit == 11


def test_limit_that_is_not_reached_stays() -> None:
    limit = ConcurrencyLimit(1, 32, 8)
    for step in range(1, 100):
        limit.on_start(3)
        limit.on_finish(step * 0.1, 0.1, is_pushed_back=False)
    assert limit.limit == 8


def test_push_back_shrinks_the_limit_by_a_tenth() -> None:
    limit = ConcurrencyLimit(1, 32, 20)
    Load(limit).run_rounds(1, 0.1, pushed_back=True)
    assert limit.limit == 18


def test_slower_sends_shrink_the_limit_more() -> None:
    left = []
    for seconds in (0.11, 0.15, 0.2, 1.0):
        limit = ConcurrencyLimit(1, 32, 20)
        load = Load(limit)
        load.run_rounds(1, 0.1)
        before = limit.limit
        load.run_rounds(1, seconds)
        left.append(limit.limit / before)
    assert left == sorted(left, reverse=True)
    assert left[0] > 1
    assert left[-1] == pytest.approx(0.5, abs=0.05)


def test_limit_grows_again_if_a_destination_stays_slower() -> None:
    limit = ConcurrencyLimit(1, 32, 20)
    load = Load(limit)
    load.run_rounds(5, 0.1)
    load.run_rounds(60, 0.3)
    assert limit.limit > 20


@pytest.mark.parametrize("capacity", [2, 4, 16])
def test_limit_settles_near_the_capacity_of_the_destination(capacity: int) -> None:
    limit = ConcurrencyLimit(1, 64)
    load = Load(limit)
    for _ in range(300):
        load.run_rounds(1, 0.05 * max(1.0, limit.limit / capacity))
    assert capacity <= limit.limit <= 1.5 * capacity + 1


@given(
    st.integers(1, 5),
    st.integers(5, 40),
    st.integers(0, 100),
    st.lists(st.tuples(st.floats(0.001, 10), st.booleans(), st.booleans()), max_size=200),
)
def test_limit_stays_within_its_bounds(
    least: int, most: int, hint: int, sends: list[tuple[float, bool, bool]]
) -> None:
    limit = ConcurrencyLimit(least, most, hint)
    now = 0.0
    for seconds, failed, busy in sends:
        now += seconds
        limit.on_start(most if busy else 1)
        limit.on_finish(now, None if failed else seconds, is_pushed_back=failed)
        assert least <= limit.limit <= most


def test_limit_starts_at_the_hint_within_its_bounds() -> None:
    settings = DeliverySettings(min_concurrency=2, max_concurrency=16)
    assert make_concurrency_limit(settings).limit == 2
    assert make_concurrency_limit(settings, 9).limit == 9
    assert make_concurrency_limit(settings, 99).limit == 16


def test_fixed_limit_never_changes() -> None:
    limit = make_concurrency_limit(DeliverySettings(concurrency=7), 3)
    for number in range(100):
        limit.on_start(7)
        limit.on_finish(10.0 * number, 0.01 * number, is_pushed_back=number % 20 == 19)
        assert limit.limit == 7
