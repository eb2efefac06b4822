"""Does a reader wait for enough events, and never too long?"""

from __future__ import annotations

from turnlane.spark.batch_planning import BatchWait


def test_enough_events_start_a_batch_at_once() -> None:
    assert BatchWait(10, 60.0).compute_wait(10, now=5.0) == 0.0


def test_too_few_events_wait_from_the_first_event_on() -> None:
    wait = BatchWait(10, 60.0)
    assert wait.compute_wait(0, now=0.0) == 0.0, "there is nothing to wait with"
    assert wait.compute_wait(3, now=100.0) == 60.0
    assert wait.compute_wait(4, now=130.0) == 30.0
    assert wait.compute_wait(4, now=161.0) == 0.0
    assert wait.compute_wait(5, now=162.0) == 60.0, "the next batch has a wait of its own"


def test_wait_starts_again_after_the_events_are_gone() -> None:
    wait = BatchWait(10, 60.0)
    wait.compute_wait(3, now=0.0)
    wait.compute_wait(0, now=10.0)
    assert wait.compute_wait(3, now=50.0) == 60.0
