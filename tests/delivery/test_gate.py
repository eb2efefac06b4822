"""Do all tasks of an action see one gate, and does it remember what it should?"""

from __future__ import annotations

import threading

import pytest

from tests.delivery.harness import PATIENCE
from turnlane.delivery import destination as gates
from turnlane.delivery.breaker import PROBE_LEASE, AllowedSends, BreakerState
from turnlane.delivery.destination import LocalDestinationState, SendPermit, SendReport
from turnlane.delivery.settings import DeliverySettings
from turnlane.testing import ManualClock


def opened(clock: ManualClock) -> LocalDestinationState:
    gate = LocalDestinationState(
        DeliverySettings(breaker_failures=2, jitter=0, breaker_reset=30), clock=clock
    )
    for _ in range(2):
        gate.report(SendReport(failures=1, error="refused"))
        clock.advance(10)
    return gate


def test_failures_open_it_and_the_reason_is_shown() -> None:
    clock = ManualClock()
    gate = opened(clock)
    status = gate.get_status()
    assert status.state is BreakerState.OPEN
    assert (status.wait, status.open_for, status.error) == (20.0, 10.0, "refused")
    assert (status.failures, status.opened) == (2, 1)
    assert gate.request_permit() == SendPermit(BreakerState.OPEN, AllowedSends.NONE, wait=20.0)
    assert gate.get_status().rejected == 1


def test_of_many_askers_one_gets_the_probe() -> None:
    clock = ManualClock()
    gate = opened(clock)
    clock.advance(30)
    together = threading.Barrier(16, timeout=PATIENCE)
    permits: list[SendPermit] = []

    def ask() -> None:
        together.wait()
        permits.append(gate.request_permit())

    askers = [threading.Thread(target=ask) for _ in range(16)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(PATIENCE)
    tokens = [permit.probe for permit in permits if permit.allowed is AllowedSends.PROBE]
    assert len(tokens) == 1
    assert tokens[0] is not None


def test_looking_takes_no_probe() -> None:
    clock = ManualClock()
    gate = opened(clock)
    clock.advance(30)
    assert gate.peek_permit().allowed is gate.peek_permit().allowed is AllowedSends.PROBE
    assert gate.peek_permit().probe is None
    assert gate.request_permit().probe is not None


def test_a_probe_whose_asker_died_goes_to_another() -> None:
    clock = ManualClock()
    gate = opened(clock)
    clock.advance(30)
    lost = gate.request_permit().probe
    clock.advance(PROBE_LEASE)
    token = gate.request_permit().probe
    assert token not in {None, lost}
    gate.report(SendReport(successes=1, probe=lost))
    assert gate.get_status().state is BreakerState.HALF_OPEN, "the one that is late decides nothing"
    gate.report(SendReport(successes=1, probe=token))
    assert gate.get_status().state is BreakerState.CLOSED
    assert gate.get_status().error is None


def test_probes_that_fail_come_less_and_less_often() -> None:
    clock = ManualClock()
    gate = opened(clock)
    waits = []
    for _ in range(10):
        clock.advance(gate.peek_permit().wait)
        gate.report(SendReport(failures=1, probe=gate.request_permit().probe))
        waits.append(gate.peek_permit().wait)
    assert waits == sorted(waits)
    assert waits[0] == 30.0
    assert waits[-1] == 300.0


def test_a_person_can_close_it() -> None:
    gate = opened(ManualClock())
    gate.reset()
    assert gate.request_permit().allowed is AllowedSends.ALL


def test_counts_add_up() -> None:
    gate = LocalDestinationState(DeliverySettings(), clock=ManualClock())
    for _ in range(2):
        gate.report(
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
    status = gate.get_status()
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
    assert gate.request_permit().concurrency == 4


def test_attempts_are_kept_forgotten_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "MAX_REMEMBERED_ATTEMPTS", 2)
    gate = LocalDestinationState(DeliverySettings())
    gate.report(SendReport(attempts={"0/1": 1, "0/2": 5}))
    gate.report(SendReport(attempts={"0/1": 2, "0/3": 1}))
    assert gate.peek_permit().attempts == {"0/1": 2, "0/3": 1}
    gate.report(SendReport(attempts={"0/1": 0}))
    assert gate.peek_permit().attempts == {"0/3": 1}
