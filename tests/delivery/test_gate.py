"""Do all tasks of an action see one gate, and does it remember what it should?"""

from __future__ import annotations

import threading

import pytest

from tests.delivery.harness import PATIENCE
from turnlane.delivery import destination as gates
from turnlane.delivery.breaker import LEASE, Allowed, State
from turnlane.delivery.destination import LocalGate, Permit, Report
from turnlane.delivery.settings import DeliverySettings
from turnlane.testing import ManualClock


def opened(clock: ManualClock) -> LocalGate:
    gate = LocalGate(DeliverySettings(breaker_failures=2, jitter=0, breaker_reset=30), clock=clock)
    for _ in range(2):
        gate.report(Report(failures=1, error="refused"))
        clock.advance(10)
    return gate


def test_failures_open_it_and_the_reason_is_shown() -> None:
    clock = ManualClock()
    gate = opened(clock)
    status = gate.status()
    assert status.state is State.OPEN
    assert (status.wait, status.open_for, status.error) == (20.0, 10.0, "refused")
    assert (status.failures, status.opened) == (2, 1)
    assert gate.permit() == Permit(State.OPEN, Allowed.NONE, wait=20.0)
    assert gate.status().rejected == 1


def test_of_many_askers_one_gets_the_probe() -> None:
    clock = ManualClock()
    gate = opened(clock)
    clock.advance(30)
    together = threading.Barrier(16, timeout=PATIENCE)
    permits: list[Permit] = []

    def ask() -> None:
        together.wait()
        permits.append(gate.permit())

    askers = [threading.Thread(target=ask) for _ in range(16)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(PATIENCE)
    tokens = [permit.probe for permit in permits if permit.allowed is Allowed.PROBE]
    assert len(tokens) == 1
    assert tokens[0] is not None


def test_looking_takes_no_probe() -> None:
    clock = ManualClock()
    gate = opened(clock)
    clock.advance(30)
    assert gate.look().allowed is gate.look().allowed is Allowed.PROBE
    assert gate.look().probe is None
    assert gate.permit().probe is not None


def test_a_probe_whose_asker_died_goes_to_another() -> None:
    clock = ManualClock()
    gate = opened(clock)
    clock.advance(30)
    lost = gate.permit().probe
    clock.advance(LEASE)
    token = gate.permit().probe
    assert token not in {None, lost}
    gate.report(Report(successes=1, probe=lost))
    assert gate.status().state is State.HALF_OPEN, "the one that is late decides nothing"
    gate.report(Report(successes=1, probe=token))
    assert gate.status().state is State.CLOSED
    assert gate.status().error is None


def test_probes_that_fail_come_less_and_less_often() -> None:
    clock = ManualClock()
    gate = opened(clock)
    waits = []
    for _ in range(10):
        clock.advance(gate.look().wait)
        gate.report(Report(failures=1, probe=gate.permit().probe))
        waits.append(gate.look().wait)
    assert waits == sorted(waits)
    assert waits[0] == 30.0
    assert waits[-1] == 300.0


def test_a_person_can_close_it() -> None:
    gate = opened(ManualClock())
    gate.reset()
    assert gate.permit().allowed is Allowed.ALL


def test_counts_add_up() -> None:
    gate = LocalGate(DeliverySettings(), clock=ManualClock())
    for _ in range(2):
        gate.report(
            Report(
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
    status = gate.status()
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
    assert gate.permit().concurrency == 4


def test_attempts_are_kept_forgotten_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "MOST_ATTEMPTS", 2)
    gate = LocalGate(DeliverySettings())
    gate.report(Report(attempts={"0/1": 1, "0/2": 5}))
    gate.report(Report(attempts={"0/1": 2, "0/3": 1}))
    assert gate.look().attempts == {"0/1": 2, "0/3": 1}
    gate.report(Report(attempts={"0/1": 0}))
    assert gate.look().attempts == {"0/3": 1}
