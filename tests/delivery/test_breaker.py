"""Does the breaker open, allow one probe, and always get it back?"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from turnlane.delivery.breaker import PROBE_LEASE, AllowedSends, BreakerState, CircuitBreaker

RESET = 30.0


def make_open_breaker(threshold: int = 3, now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker(threshold, RESET)
    for _ in range(threshold):
        breaker = breaker.record_failure(now, 0.0)
    return breaker


def test_threshold_of_failures_in_a_row_opens_the_breaker() -> None:
    breaker = CircuitBreaker(3, RESET)
    for now in (0.0, 2.0):
        breaker = breaker.record_failure(now, 1.0)
        assert breaker.get_state(now) is BreakerState.CLOSED
    breaker = breaker.record_failure(4.0, 1.0)
    assert breaker.get_state(4.0) is BreakerState.OPEN
    assert breaker.get_wait(4.0) == RESET
    assert breaker.opened == 1


def test_breaker_without_a_threshold_never_opens_and_closes_when_it_is_switched_off() -> None:
    breaker = CircuitBreaker(0, RESET)
    for now in range(100):
        breaker = breaker.record_failure(float(now), 0.5)
        assert breaker.get_state(now + 0.6) is BreakerState.CLOSED
        assert breaker.get_wait(float(now)) == 0.5, "the backoff holds all the same"
    switched_off = make_open_breaker().with_limits(0, RESET)
    assert switched_off.get_state(0.0) is BreakerState.CLOSED


def test_success_resets_the_count_of_failures() -> None:
    breaker = (
        CircuitBreaker(2, RESET).record_failure(0.0, 1.0).record_success().record_failure(2.0, 1.0)
    )
    assert breaker.get_state(2.0) is BreakerState.CLOSED


def test_failures_of_concurrent_sends_count_once() -> None:
    breaker = CircuitBreaker(2, RESET)
    for _ in range(10):
        breaker = breaker.record_failure(0.0, 1.0)
    assert breaker.failures == 1


def test_nothing_is_allowed_during_the_backoff() -> None:
    breaker = CircuitBreaker(5, RESET).record_failure(0.0, 1.0)
    assert breaker.get_allowed(0.9) is AllowedSends.NONE
    assert breaker.get_allowed(1.0) is AllowedSends.ALL


def test_success_ends_a_backoff_but_not_a_requested_wait() -> None:
    assert (
        CircuitBreaker(5, RESET).record_failure(0.0, 9.0).record_success().get_allowed(1.0)
        is AllowedSends.ALL
    )
    said = CircuitBreaker(5, RESET).record_failure(0.0, 9.0, is_requested=True).record_success()
    assert said.get_allowed(1.0) is AllowedSends.NONE
    assert said.get_allowed(9.0) is AllowedSends.ALL


def test_longest_of_several_requested_waits_applies() -> None:
    breaker = (
        CircuitBreaker(5, RESET)
        .record_failure(0.0, 5.0, is_requested=True)
        .record_failure(1.0, 9.0, is_requested=True)
    )
    assert breaker.get_wait(1.0) == 9.0


def test_success_of_the_only_probe_closes_the_breaker() -> None:
    breaker = make_open_breaker()
    assert breaker.get_allowed(RESET) is AllowedSends.PROBE
    breaker = breaker.lend_probe(RESET, "a")
    assert breaker.get_allowed(RESET) is AllowedSends.NONE
    breaker = breaker.record_success("a")
    assert breaker.get_state(RESET) is BreakerState.CLOSED
    assert breaker.get_allowed(RESET) is AllowedSends.ALL


def test_failed_probe_keeps_the_breaker_open_for_the_backoff() -> None:
    breaker = make_open_breaker().lend_probe(RESET, "a").record_failure(RESET, 120.0, token="a")
    assert breaker.get_state(RESET) is BreakerState.OPEN
    assert breaker.get_wait(RESET) == 120.0
    assert breaker.opened == 1


def test_results_without_the_probe_token_do_not_change_an_open_breaker() -> None:
    breaker = make_open_breaker().lend_probe(RESET, "a")
    assert breaker.record_success() == breaker.record_success("b") == breaker
    assert (
        breaker.record_failure(RESET, 500.0)
        == breaker.record_failure(RESET, 500.0, token="b")
        == breaker
    )


def test_probe_is_free_again_when_released_or_expired() -> None:
    lent = make_open_breaker().lend_probe(RESET, "a")
    assert lent.release_probe("a").get_allowed(RESET) is AllowedSends.PROBE
    assert lent.release_probe("b").get_allowed(RESET) is AllowedSends.NONE
    assert lent.get_allowed(RESET + PROBE_LEASE) is AllowedSends.PROBE


def test_reset_closes_an_open_breaker() -> None:
    assert make_open_breaker().lend_probe(RESET, "a").reset().get_allowed(0.0) is AllowedSends.ALL


@dataclass
class _Task:
    token: str
    since: float


@dataclass
class _Model:
    breaker: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(3, RESET))
    now: float = 0.0
    out: list[_Task] = field(default_factory=list)


class BreakerMachine(RuleBasedStateMachine):
    """Tasks that report, are silent or report late, while time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _Model()
        self.tokens = 0

    @rule()
    def ask(self) -> None:
        model = self.model
        if model.breaker.get_allowed(model.now) is AllowedSends.PROBE:
            self.tokens += 1
            token = str(self.tokens)
            alive = [each for each in model.out if model.now < each.since + PROBE_LEASE]
            assert not alive, "one probe at a time"
            model.breaker = model.breaker.lend_probe(model.now, token)
            model.out.append(_Task(token, model.now))

    @rule(wait=st.floats(0.1, 300), is_requested=st.booleans())
    def fail(self, wait: float, is_requested: bool) -> None:
        model = self.model
        model.breaker = model.breaker.record_failure(model.now, wait, is_requested=is_requested)

    @rule()
    def succeed(self) -> None:
        self.model.breaker = self.model.breaker.record_success()

    @precondition(lambda self: self.model.out)
    @rule(data=st.data(), how=st.sampled_from(["success", "failure", "unused"]))
    def report_probe(self, data: st.DataObject, how: str) -> None:
        model = self.model
        task = model.out.pop(data.draw(st.integers(0, len(model.out) - 1)))
        current = model.breaker.probe is not None and model.breaker.probe.token == task.token
        before = model.breaker
        if how == "success":
            model.breaker = before.record_success(task.token)
            assert not current or model.breaker.open_since is None
        elif how == "failure":
            model.breaker = before.record_failure(model.now, 1.0, token=task.token)
        else:
            model.breaker = before.release_probe(task.token)
        assert not current or model.breaker.probe is None, "a reported probe is released"

    @rule(seconds=st.floats(0, 100))
    def pass_time(self, seconds: float) -> None:
        self.model.now += seconds

    @rule()
    def reset(self) -> None:
        self.model.breaker = self.model.breaker.reset()
        self.model.out.clear()
        assert self.model.breaker.get_allowed(self.model.now) is AllowedSends.ALL

    @invariant()
    def sends_are_allowed_in_the_end(self) -> None:
        breaker = self.model.breaker
        much_later = max(self.model.now, breaker.not_before) + PROBE_LEASE
        assert breaker.get_allowed(much_later) is not AllowedSends.NONE


TestBreakerMachine = BreakerMachine.TestCase


def test_renewed_probe_stays_lent_and_a_wrong_token_renews_nothing() -> None:
    breaker = (
        make_open_breaker(now=0.0)
        .lend_probe(RESET, "slow")
        .renew_probe(RESET + PROBE_LEASE - 1, "slow")
    )
    assert breaker.get_allowed(RESET + PROBE_LEASE + 1) is AllowedSends.NONE
    assert breaker.renew_probe(RESET + PROBE_LEASE + 1, "another") == breaker
    assert breaker.get_allowed(RESET + 2 * PROBE_LEASE) is AllowedSends.PROBE
