"""The number of workers for a backlog, and the pauses of a failing consumer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlane.errors import Never, QueueFull, RetryLater
from turnlane.queues.worker_pool import FIRST_PAUSE, LAST_PAUSE, count_wanted_workers, retry_pause


@pytest.mark.parametrize(
    ("backlog", "minimum", "most", "wanted"),
    [(0, 10, 4, 0), (1, 10, 4, 1), (10, 10, 4, 1), (11, 10, 4, 2), (40, 10, 4, 4), (41, 10, 4, 4)],
)
def test_a_backlog_wants_one_worker_per_minimum_events(
    backlog: int, minimum: int, most: int, wanted: int
) -> None:
    """One for every started ``minimum`` of events, none without events, at most ``most``."""
    assert count_wanted_workers(backlog, minimum, most) == wanted


@given(
    backlog=st.integers(0, 10**9),
    more=st.integers(0, 10**6),
    minimum=st.integers(1, 10**6),
    most=st.integers(1, 64),
)
def test_a_larger_backlog_never_wants_fewer_workers(
    backlog: int, more: int, minimum: int, most: int
) -> None:
    """The number grows with the backlog, within its bounds."""
    few, many = (count_wanted_workers(n, minimum, most) for n in (backlog, backlog + more))
    assert (backlog > 0) <= few <= many <= most


def test_a_pause_doubles_up_to_its_cap() -> None:
    """Each failure in a row doubles the pause, however many there are."""
    error = ValueError("no")
    pauses = [retry_pause(failures, error, 1.0) for failures in range(1, 100)]
    assert pauses[:4] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, 8 * FIRST_PAUSE]
    assert pauses == sorted(pauses)
    assert pauses[-1] == retry_pause(10**9, error, 1.0) == LAST_PAUSE


@given(failures=st.integers(1, 1000), jitter=st.floats(0, 1))
def test_jitter_shortens_a_pause_by_at_most_half(failures: int, jitter: float) -> None:
    """Jitter shortens a pause to at least half of it."""
    full = retry_pause(failures, Never("no"), 1.0)
    assert full / 2 <= retry_pause(failures, Never("no"), jitter) <= full


def test_the_delay_of_a_retry_later_error_is_used() -> None:
    """``after`` is taken as it is; without it the pause is the usual one."""
    assert retry_pause(20, RetryLater("busy", after=7.5), 0.3) == 7.5
    assert retry_pause(1, QueueFull("busy", after=0.0), 0.3) == 0.0
    assert retry_pause(1, RetryLater("busy"), 1.0) == FIRST_PAUSE
