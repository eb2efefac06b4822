"""Does the breaker open, let one probe through, and always get it back?"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from turnlane.delivery.breaker import LEASE, Allowed, Breaker, State

RESET = 30.0


def opened(threshold: int = 3, now: float = 0.0) -> Breaker:
    breaker = Breaker(threshold, RESET)
    for _ in range(threshold):
        breaker = breaker.failed(now, 0.0)
    return breaker


def test_it_opens_after_so_many_failures_in_a_row() -> None:
    breaker = Breaker(3, RESET)
    for now in (0.0, 2.0):
        breaker = breaker.failed(now, 1.0)
        assert breaker.state(now) is State.CLOSED
    breaker = breaker.failed(4.0, 1.0)
    assert breaker.state(4.0) is State.OPEN
    assert breaker.wait(4.0) == RESET
    assert breaker.opened == 1


def test_a_success_begins_the_row_anew() -> None:
    breaker = Breaker(2, RESET).failed(0.0, 1.0).succeeded().failed(2.0, 1.0)
    assert breaker.state(2.0) is State.CLOSED


def test_failures_of_sends_that_were_under_way_together_count_once() -> None:
    breaker = Breaker(2, RESET)
    for _ in range(10):
        breaker = breaker.failed(0.0, 1.0)
    assert breaker.failures == 1


def test_nothing_goes_before_the_backoff_is_over() -> None:
    breaker = Breaker(5, RESET).failed(0.0, 1.0)
    assert breaker.allowed(0.9) is Allowed.NONE
    assert breaker.allowed(1.0) is Allowed.ALL


def test_a_success_ends_a_backoff_but_not_what_the_destination_said() -> None:
    assert Breaker(5, RESET).failed(0.0, 9.0).succeeded().allowed(1.0) is Allowed.ALL
    said = Breaker(5, RESET).failed(0.0, 9.0, said=True).succeeded()
    assert said.allowed(1.0) is Allowed.NONE
    assert said.allowed(9.0) is Allowed.ALL


def test_the_longest_that_the_destination_said_counts() -> None:
    breaker = Breaker(5, RESET).failed(0.0, 5.0, said=True).failed(1.0, 9.0, said=True)
    assert breaker.wait(1.0) == 9.0


def test_one_probe_and_its_success_closes() -> None:
    breaker = opened()
    assert breaker.allowed(RESET) is Allowed.PROBE
    breaker = breaker.lend(RESET, "a")
    assert breaker.allowed(RESET) is Allowed.NONE
    breaker = breaker.succeeded("a")
    assert breaker.state(RESET) is State.CLOSED
    assert breaker.allowed(RESET) is Allowed.ALL


def test_a_probe_that_fails_keeps_it_open_for_as_long_as_the_backoff_says() -> None:
    breaker = opened().lend(RESET, "a").failed(RESET, 120.0, token="a")
    assert breaker.state(RESET) is State.OPEN
    assert breaker.wait(RESET) == 120.0
    assert breaker.opened == 1


def test_others_say_nothing_about_an_open_breaker() -> None:
    breaker = opened().lend(RESET, "a")
    assert breaker.succeeded() == breaker.succeeded("b") == breaker
    assert breaker.failed(RESET, 500.0) == breaker.failed(RESET, 500.0, token="b") == breaker


def test_a_probe_comes_back_unused_or_by_itself() -> None:
    lent = opened().lend(RESET, "a")
    assert lent.released("a").allowed(RESET) is Allowed.PROBE
    assert lent.released("b").allowed(RESET) is Allowed.NONE
    assert lent.allowed(RESET + LEASE) is Allowed.PROBE


def test_a_person_can_close_it() -> None:
    assert opened().lend(RESET, "a").closed().allowed(0.0) is Allowed.ALL


@dataclass
class _Asker:
    token: str
    since: float


@dataclass
class _World:
    breaker: Breaker = field(default_factory=lambda: Breaker(3, RESET))
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
        if world.breaker.allowed(world.now) is Allowed.PROBE:
            self.tokens += 1
            token = str(self.tokens)
            alive = [each for each in world.out if world.now < each.since + LEASE]
            assert not alive, "one probe at a time"
            world.breaker = world.breaker.lend(world.now, token)
            world.out.append(_Asker(token, world.now))

    @rule(wait=st.floats(0.1, 300), said=st.booleans())
    def fail(self, wait: float, said: bool) -> None:
        world = self.world
        world.breaker = world.breaker.failed(world.now, wait, said=said)

    @rule()
    def succeed(self) -> None:
        self.world.breaker = self.world.breaker.succeeded()

    @precondition(lambda self: self.world.out)
    @rule(data=st.data(), how=st.sampled_from(["success", "failure", "unused"]))
    def report_on_a_probe(self, data: st.DataObject, how: str) -> None:
        world = self.world
        asker = world.out.pop(data.draw(st.integers(0, len(world.out) - 1)))
        current = world.breaker.probe is not None and world.breaker.probe.token == asker.token
        before = world.breaker
        if how == "success":
            world.breaker = before.succeeded(asker.token)
            assert not current or world.breaker.open_since is None
        elif how == "failure":
            world.breaker = before.failed(world.now, 1.0, token=asker.token)
        else:
            world.breaker = before.released(asker.token)
        assert not current or world.breaker.probe is None, "reported on, so released"

    @rule(seconds=st.floats(0, 100))
    def pass_time(self, seconds: float) -> None:
        self.world.now += seconds

    @rule()
    def reset(self) -> None:
        self.world.breaker = self.world.breaker.closed()
        self.world.out.clear()
        assert self.world.breaker.allowed(self.world.now) is Allowed.ALL

    @invariant()
    def something_goes_in_the_end(self) -> None:
        breaker = self.world.breaker
        much_later = max(self.world.now, breaker.not_before) + LEASE
        assert breaker.allowed(much_later) is not Allowed.NONE


TestBreakerMachine = BreakerMachine.TestCase


def test_a_probe_that_is_renewed_is_nobody_elses_and_an_old_token_renews_nothing() -> None:
    breaker = opened(now=0.0).lend(RESET, "slow").renewed(RESET + LEASE - 1, "slow")
    assert breaker.allowed(RESET + LEASE + 1) is Allowed.NONE
    assert breaker.renewed(RESET + LEASE + 1, "another") == breaker
    assert breaker.allowed(RESET + 2 * LEASE) is Allowed.PROBE
