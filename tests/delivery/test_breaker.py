"""Does the breaker open, let one probe through, and always get it back?"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from turnlane.delivery.breaker import PROBE_LEASE, AllowedSends, BreakerState, CircuitBreaker

RESET = 30.0


def opened(threshold: int = 3, now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker(threshold, RESET)
    for _ in range(threshold):
        breaker = breaker.record_failure(now, 0.0)
    return breaker


def test_it_opens_after_so_many_failures_in_a_row() -> None:
    breaker = CircuitBreaker(3, RESET)
    for now in (0.0, 2.0):
        breaker = breaker.record_failure(now, 1.0)
        assert breaker.get_state(now) is BreakerState.CLOSED
    breaker = breaker.record_failure(4.0, 1.0)
    assert breaker.get_state(4.0) is BreakerState.OPEN
    assert breaker.get_wait(4.0) == RESET
    assert breaker.opened == 1


def test_a_success_begins_the_row_anew() -> None:
    breaker = (
        CircuitBreaker(2, RESET).record_failure(0.0, 1.0).record_success().record_failure(2.0, 1.0)
    )
    assert breaker.get_state(2.0) is BreakerState.CLOSED


def test_failures_of_sends_that_were_under_way_together_count_once() -> None:
    breaker = CircuitBreaker(2, RESET)
    for _ in range(10):
        breaker = breaker.record_failure(0.0, 1.0)
    assert breaker.failures == 1


def test_nothing_goes_before_the_backoff_is_over() -> None:
    breaker = CircuitBreaker(5, RESET).record_failure(0.0, 1.0)
    assert breaker.get_allowed(0.9) is AllowedSends.NONE
    assert breaker.get_allowed(1.0) is AllowedSends.ALL


def test_a_success_ends_a_backoff_but_not_what_the_destination_said() -> None:
    assert (
        CircuitBreaker(5, RESET).record_failure(0.0, 9.0).record_success().get_allowed(1.0)
        is AllowedSends.ALL
    )
    said = CircuitBreaker(5, RESET).record_failure(0.0, 9.0, is_requested=True).record_success()
    assert said.get_allowed(1.0) is AllowedSends.NONE
    assert said.get_allowed(9.0) is AllowedSends.ALL


def test_the_longest_that_the_destination_said_counts() -> None:
    breaker = (
        CircuitBreaker(5, RESET)
        .record_failure(0.0, 5.0, is_requested=True)
        .record_failure(1.0, 9.0, is_requested=True)
    )
    assert breaker.get_wait(1.0) == 9.0


def test_one_probe_and_its_success_closes() -> None:
    breaker = opened()
    assert breaker.get_allowed(RESET) is AllowedSends.PROBE
    breaker = breaker.lend_probe(RESET, "a")
    assert breaker.get_allowed(RESET) is AllowedSends.NONE
    breaker = breaker.record_success("a")
    assert breaker.get_state(RESET) is BreakerState.CLOSED
    assert breaker.get_allowed(RESET) is AllowedSends.ALL


def test_a_probe_that_fails_keeps_it_open_for_as_long_as_the_backoff_says() -> None:
    breaker = opened().lend_probe(RESET, "a").record_failure(RESET, 120.0, token="a")
    assert breaker.get_state(RESET) is BreakerState.OPEN
    assert breaker.get_wait(RESET) == 120.0
    assert breaker.opened == 1


def test_others_say_nothing_about_an_open_breaker() -> None:
    breaker = opened().lend_probe(RESET, "a")
    assert breaker.record_success() == breaker.record_success("b") == breaker
    assert (
        breaker.record_failure(RESET, 500.0)
        == breaker.record_failure(RESET, 500.0, token="b")
        == breaker
    )


def test_a_probe_comes_back_unused_or_by_itself() -> None:
    lent = opened().lend_probe(RESET, "a")
    assert lent.release_probe("a").get_allowed(RESET) is AllowedSends.PROBE
    assert lent.release_probe("b").get_allowed(RESET) is AllowedSends.NONE
    assert lent.get_allowed(RESET + PROBE_LEASE) is AllowedSends.PROBE


def test_a_person_can_close_it() -> None:
    assert opened().lend_probe(RESET, "a").reset().get_allowed(0.0) is AllowedSends.ALL


@dataclass
class _Asker:
    token: str
    since: float


@dataclass
class _World:
    breaker: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(3, RESET))
    now: float = 0.0
    out: list[_Asker] = field(default_factory=list)


class BreakerMachine(RuleBasedStateMachine):
    """Askers that report, are silent or report late; time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.world = _World()
        self.tokens = 0

    @rule()
    def ask(self) -> None:
        world = self.world
        if world.breaker.get_allowed(world.now) is AllowedSends.PROBE:
            self.tokens += 1
            token = str(self.tokens)
            alive = [each for each in world.out if world.now < each.since + PROBE_LEASE]
            assert not alive, "one probe at a time"
            world.breaker = world.breaker.lend_probe(world.now, token)
            world.out.append(_Asker(token, world.now))

    @rule(wait=st.floats(0.1, 300), said=st.booleans())
    def fail(self, wait: float, said: bool) -> None:
        world = self.world
        world.breaker = world.breaker.record_failure(world.now, wait, is_requested=said)

    @rule()
    def succeed(self) -> None:
        self.world.breaker = self.world.breaker.record_success()

    @precondition(lambda self: self.world.out)
    @rule(data=st.data(), how=st.sampled_from(["success", "failure", "unused"]))
    def report_on_a_probe(self, data: st.DataObject, how: str) -> None:
        world = self.world
        asker = world.out.pop(data.draw(st.integers(0, len(world.out) - 1)))
        current = world.breaker.probe is not None and world.breaker.probe.token == asker.token
        before = world.breaker
        if how == "success":
            world.breaker = before.record_success(asker.token)
            assert not current or world.breaker.open_since is None
        elif how == "failure":
            world.breaker = before.record_failure(world.now, 1.0, token=asker.token)
        else:
            world.breaker = before.release_probe(asker.token)
        assert not current or world.breaker.probe is None, "reported on, so released"

    @rule(seconds=st.floats(0, 100))
    def pass_time(self, seconds: float) -> None:
        self.world.now += seconds

    @rule()
    def reset(self) -> None:
        self.world.breaker = self.world.breaker.reset()
        self.world.out.clear()
        assert self.world.breaker.get_allowed(self.world.now) is AllowedSends.ALL

    @invariant()
    def something_goes_in_the_end(self) -> None:
        breaker = self.world.breaker
        much_later = max(self.world.now, breaker.not_before) + PROBE_LEASE
        assert breaker.get_allowed(much_later) is not AllowedSends.NONE


TestBreakerMachine = BreakerMachine.TestCase


def test_a_probe_that_is_renewed_is_nobody_elses_and_an_old_token_renews_nothing() -> None:
    breaker = opened(now=0.0).lend_probe(RESET, "slow").renew_probe(RESET + PROBE_LEASE - 1, "slow")
    assert breaker.get_allowed(RESET + PROBE_LEASE + 1) is AllowedSends.NONE
    assert breaker.renew_probe(RESET + PROBE_LEASE + 1, "another") == breaker
    assert breaker.get_allowed(RESET + 2 * PROBE_LEASE) is AllowedSends.PROBE
