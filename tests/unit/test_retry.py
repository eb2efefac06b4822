"""Does a backoff wait as long as it should, and no longer?"""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from turnlane.pacing import MAX_RETRY_AFTER, Backoff, FlowRates, estimate_drain_seconds

chances = st.floats(0, 1)
jitters = st.floats(0, 1)
failures = st.integers(1, 10_000)


@given(failures, chances, jitters)
def test_wait_with_jitter_stays_within_its_bounds(count: int, chance: float, jitter: float) -> None:
    backoff = Backoff.from_jitter(1.0, 300.0, jitter)
    middle = min(300.0, 2.0 ** min(count - 1, 64))
    wait = backoff.get_wait(count, chance)
    assert middle * (1 - jitter) - 1e-9 <= wait <= min(300.0, middle * (1 + jitter)) + 1e-9


@given(st.integers(0, 10**9), st.floats(0, 1e6), st.floats(0, 1e6), chances)
def test_wait_after_any_number_of_failures_is_at_most_the_longest(
    count: int, first: float, longest: float, chance: float
) -> None:
    assert 0 <= Backoff.from_jitter(first, longest, 0.25).get_wait(count, chance) <= longest


def test_waits_of_several_failures_double_up_to_the_longest() -> None:
    backoff = Backoff(1.0, 20.0)
    assert [backoff.get_wait(count) for count in range(1, 8)] == [1, 2, 4, 8, 16, 20, 20]


def test_waits_grow_by_the_multiplier_and_stay_the_same_with_one() -> None:
    grown = Backoff.from_jitter(1.0, 20.0, 0.0, 3.0)
    assert [grown.get_wait(count) for count in range(1, 6)] == [1, 3, 9, 20, 20]
    steady = Backoff.from_jitter(1.0, 20.0, 0.0, 1.0)
    assert {steady.get_wait(count) for count in range(1, 100)} == {1.0}


def test_waits_with_random_numbers_differ_within_the_jitter() -> None:
    backoff = Backoff.from_jitter(1.0, 1e9, 0.25)
    for count, middle in ((1, 1.0), (2, 2.0), (5, 16.0)):
        waits = [backoff.get_wait(count, random.Random(seed).random()) for seed in range(50)]
        assert all(abs(wait - middle) <= middle * 0.25 for wait in waits)
        assert len(set(waits)) > 10


def test_factors_below_one_shorten_the_wait() -> None:
    backoff = Backoff(1.0, 20.0, 0.5, 1.0)
    assert [backoff.get_wait(9, chance) for chance in (0.0, 0.5, 1.0)] == [10.0, 15.0, 20.0]


@given(failures, chances, jitters, st.floats(0, MAX_RETRY_AFTER))
def test_requested_wait_is_never_shortened(
    count: int, chance: float, jitter: float, requested: float
) -> None:
    wait = Backoff.from_jitter(1.0, 300.0, jitter).get_wait(count, chance, requested)
    assert requested <= wait <= max(requested, 1.0) * (1 + jitter)


def test_requested_wait_of_zero_is_raised_to_the_shortest_wait() -> None:
    assert Backoff.from_jitter(1.0, 300.0, 0.2).get_wait(7, 0.0, 0.0) == 0.8


def test_requested_wait_of_years_is_cut_to_a_day() -> None:
    assert Backoff(1.0, 300.0).get_wait(1, 0.0, 1e9) == MAX_RETRY_AFTER


def test_rates_are_averages_of_the_last_minute() -> None:
    rates = FlowRates()
    rates.add(0.0, 0, 0)
    rates.add(0.5, 900, 0)
    assert rates.get_rates() is None, "too short a time"
    rates.add(10.0, 1000, 500)
    assert rates.get_rates() == (100.0, 50.0)
    for second in range(11, 200):
        rates.add(float(second), 1000, 500 + second)
        rates.add(second + 0.1, 1000, 500 + second)
    rate_in, rate_out = rates.get_rates() or (0.0, 0.0)
    assert rate_in == 0
    assert 0.95 < rate_out < 1.05


def test_time_to_drain_follows_from_the_rates() -> None:
    assert estimate_drain_seconds(10_000, 0.0, 160.0) == 62.5
    assert estimate_drain_seconds(100, 40.0, 50.0) == 10
    assert estimate_drain_seconds(100, 50.0, 50.0) == math.inf
    assert estimate_drain_seconds(0, 50.0, 0.0) == 0
