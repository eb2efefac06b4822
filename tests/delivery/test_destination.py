"""Do all tasks of an action share one state, and does it remember what it should?"""

from __future__ import annotations

import threading

import pytest

from tests.delivery.harness import TIMEOUT, peek_permit
from turnlane.delivery import destination
from turnlane.delivery.breaker import PROBE_LEASE, AllowedSends, BreakerState
from turnlane.delivery.destination import LocalDestinationState, SendPermit, SendReport
from turnlane.delivery.settings import DeliverySettings
from turnlane.testing import ManualClock


def make_open_state(clock: ManualClock) -> LocalDestinationState:
    state = LocalDestinationState(
        DeliverySettings(breaker_failures=2, jitter=0, breaker_reset=30), clock=clock
    )
    for _ in range(2):
        state.report(SendReport(failures=1, error="refused"))
        clock.advance(10)
    return state


def test_failures_open_the_breaker_and_the_status_shows_the_reason() -> None:
    clock = ManualClock()
    state = make_open_state(clock)
    status = state.get_status()
    assert status.state is BreakerState.OPEN
    assert (status.wait, status.open_for, status.error) == (20.0, 10.0, "refused")
    assert (status.failures, status.opened) == (2, 1)
    assert state.request_permit() == SendPermit(BreakerState.OPEN, AllowedSends.NONE, wait=20.0)
    assert state.get_status().rejected == 1


def test_one_of_many_concurrent_tasks_gets_the_probe() -> None:
    clock = ManualClock()
    state = make_open_state(clock)
    clock.advance(30)
    together = threading.Barrier(16, timeout=TIMEOUT)
    permits: list[SendPermit] = []

    def ask() -> None:
        together.wait()
        permits.append(state.request_permit())

    askers = [threading.Thread(target=ask) for _ in range(16)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(TIMEOUT)
    tokens = [permit.probe for permit in permits if permit.allowed is AllowedSends.PROBE]
    assert len(tokens) == 1
    assert tokens[0] is not None


def test_probe_of_a_dead_task_is_lent_to_another() -> None:
    clock = ManualClock()
    state = make_open_state(clock)
    clock.advance(30)
    lost = state.request_permit().probe
    clock.advance(PROBE_LEASE)
    token = state.request_permit().probe
    assert token not in {None, lost}
    state.report(SendReport(successes=1, probe=lost))
    assert state.get_status().state is BreakerState.HALF_OPEN, (
        "a late report of the old probe changes nothing"
    )
    state.report(SendReport(successes=1, probe=token))
    assert state.get_status().state is BreakerState.CLOSED
    assert state.get_status().error is None


def test_failed_probes_lengthen_the_wait() -> None:
    clock = ManualClock()
    state = make_open_state(clock)
    waits = []
    for _ in range(10):
        clock.advance(peek_permit(state).wait)
        state.report(SendReport(failures=1, probe=state.request_permit().probe))
        waits.append(peek_permit(state).wait)
    assert waits == sorted(waits)
    assert waits[0] == 30.0
    assert waits[-1] == 300.0


def test_reset_allows_all_sends() -> None:
    state = make_open_state(ManualClock())
    state.reset()
    assert state.request_permit().allowed is AllowedSends.ALL


def test_reports_add_up_in_the_status() -> None:
    state = LocalDestinationState(DeliverySettings(), clock=ManualClock())
    for _ in range(2):
        state.report(
            SendReport(
                successes=3,
                delivered=10,
                dead=1,
                kept=2,
                rejected=3,
                retries=2,
                retry_successes=1,
                retry_failures={"RetryLater": 1},
                latency=0.5,
                concurrency=4,
            )
        )
    status = state.get_status()
    assert status.totals == {
        "sends": 6,
        "failures": 0,
        "delivered": 20,
        "dead": 2,
        "kept": 4,
        "rejected": 6,
        "retries": 4,
        "retry_successes": 2,
    }
    assert status.retry_failures == {"RetryLater": 2}
    assert (status.latency, status.concurrency) == (0.5, 4)
    assert state.request_permit().concurrency == 4


def test_remembered_attempts_are_updated_forgotten_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(destination, "MAX_REMEMBERED_ATTEMPTS", 2)
    state = LocalDestinationState(DeliverySettings())
    state.report(SendReport(attempts={"0/1": 1, "0/2": 5}))
    state.report(SendReport(attempts={"0/1": 2, "0/3": 1}))
    assert peek_permit(state).attempts == {"0/1": 2, "0/3": 1}
    state.report(SendReport(attempts={"0/1": 0}))
    assert peek_permit(state).attempts == {"0/3": 1}
