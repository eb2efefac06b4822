"""Does a token bucket keep to its rate?"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlane.pacing import TokenBucket


@given(
    st.floats(0.5, 10_000),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1), st.floats(0, 3)), max_size=60),
)
def test_claims_never_exceed_the_rate_and_one_second_saved(
    rate: float, claims: list[tuple[float, float, float]]
) -> None:
    size = max(1, int(rate))
    bucket = TokenBucket(rate, size, 0.0)
    now, taken, last = 0.0, 0, 0.0
    for pause, share, within in claims:
        now += pause
        count = max(1, int(size * share))
        wait = bucket.claim(count, within, now)
        if wait > within:
            continue
        taken += count
        assert now + wait >= last - 1e-6, "a later claim is not served earlier"
        last = now + wait
        assert taken <= rate * last * (1 + 1e-6) + 1e-3


def test_claim_after_a_long_idle_time_finds_a_full_bucket_only() -> None:
    bucket = TokenBucket(100.0, 100, 0.0)
    assert bucket.claim(100, 0.0, 3600.0) == 0
    assert bucket.claim(100, 0.5, 3600.0) == 1.0, "not taken: it would come too late"
    assert bucket.claim(100, 1.0, 3600.0) == 1.0
    assert bucket.claim(1, 5.0, 3600.0) == pytest.approx(1.01)


def test_taking_what_is_available_keeps_to_the_rate() -> None:
    bucket = TokenBucket(100.0, 10, 0.0, tokens=10)
    taken = sum(bucket.take_available(1_000, step / 100) for step in range(101))
    assert 100 <= taken <= 110


def test_tokens_given_back_can_be_taken_again() -> None:
    bucket = TokenBucket(1.0, 5, 0.0, tokens=5)
    assert bucket.take_available(9, 0.0) == 5
    bucket.give_back(3)
    assert bucket.seconds_until(3, 0.0) == 0.0
    assert bucket.take_available(9, 0.0) == 3


def test_bucket_of_size_zero_spaces_claims_at_the_rate() -> None:
    bucket = TokenBucket(10.0, 0, 0.0)
    bucket.claim(5, math.inf, 100.0)
    assert bucket.seconds_until(0, 100.0) == pytest.approx(0.5)
    assert bucket.seconds_until(0, 200.0) == 0.0


def test_new_rate_keeps_tokens_that_were_claimed() -> None:
    bucket = TokenBucket(1.0, 10, 0.0)
    bucket.claim(10, math.inf, 0.0)
    bucket.set_rate(5.0, 10, 0.0)
    assert bucket.seconds_until(0, 0.0) == pytest.approx(2.0)
