"""Is a destination that failed left alone for as long as it should be, and no longer?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from turnlane.retry import MAX_RETRY_AFTER, Backoff

chances = st.floats(0, 1)
jitters = st.floats(0, 1)
failures = st.integers(1, 10_000)


@given(failures, chances, jitters)
def test_waits_stay_within_their_bounds(count: int, chance: float, jitter: float) -> None:
    backoff = Backoff.from_jitter(1.0, 300.0, jitter)
    middle = min(300.0, 2.0 ** min(count - 1, 64))
    wait = backoff.get_wait(count, chance)
    assert middle * (1 - jitter) - 1e-9 <= wait <= min(300.0, middle * (1 + jitter)) + 1e-9


def test_waits_double_up_to_the_cap() -> None:
    backoff = Backoff.from_jitter(1.0, 20.0, 0.0)
    assert [backoff.get_wait(count, 0.5) for count in range(1, 8)] == [1, 2, 4, 8, 16, 20, 20]


@given(failures, chances, jitters, st.floats(0, MAX_RETRY_AFTER))
def test_a_destination_that_says_when_is_never_asked_sooner(
    count: int, chance: float, jitter: float, said: float
) -> None:
    backoff = Backoff.from_jitter(1.0, 300.0, jitter)
    wait = backoff.get_wait(count, chance, said)
    assert said <= wait <= max(said, 1.0) * (1 + jitter)


def test_one_that_says_at_once_over_and_over_is_still_left_alone_for_a_while() -> None:
    assert Backoff.from_jitter(1.0, 300.0, 0.2).get_wait(7, 0.0, 0.0) == 0.8


def test_nobody_is_believed_to_be_away_for_a_year() -> None:
    assert Backoff.from_jitter(1.0, 300.0, 0.0).get_wait(1, 0.0, 1e9) == MAX_RETRY_AFTER
