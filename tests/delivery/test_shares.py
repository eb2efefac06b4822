"""Do tasks together never have more under way than allowed, and each its part?"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from turnlane.node.breakers import LATELY, Shares

LIMIT = 7


class Tasks(RuleBasedStateMachine):
    """Tasks come, go, ask for their share, and have as much under way as it allows."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = Shares()
        self.now = 0.0
        self.busy: dict[str, int] = {}
        self.share: dict[str, int] = {}
        self.born = 0

    @rule()
    def come(self) -> None:
        self.born += 1
        self.busy[f"task {self.born}"] = 0
        self.share[f"task {self.born}"] = 0

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(sorted(self.busy)))
        self.share[task] = self.shares.of(task, LIMIT, self.busy, self.now)

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(sorted(self.busy)))
        self.busy[task] = max(self.busy[task], self.share[task])

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(sorted(self.busy)))
        self.busy[task] = max(0, self.busy[task] - 1)

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(sorted(self.busy)))
        del self.busy[task], self.share[task]

    @rule()
    def wait(self) -> None:
        self.now += LATELY

    @invariant()
    def never_more_than_the_limit(self) -> None:
        assert sum(self.busy.values()) <= LIMIT


TestTasks = Tasks.TestCase


def test_all_have_the_same_once_all_have_asked_again() -> None:
    shares, busy = Shares(), {"a": 0, "b": 0, "c": 0}
    for _ in range(2):
        given = [shares.of(task, 9, busy, 0.0) for task in busy]
    assert given == [3, 3, 3]


def test_one_that_stays_alone_has_it_all_after_a_while() -> None:
    shares = Shares()
    for task in ("a", "b"):
        shares.of(task, 8, {"a": 0, "b": 0}, 0.0)
    assert shares.of("a", 8, {"a": 0}, 1.0) == 4
    assert shares.of("a", 8, {"a": 0}, 1.0 + LATELY) == 8


def test_none_has_more_than_it_can_use() -> None:
    shares, busy = Shares(), {"a": 0, "b": 0}
    assert shares.of("a", 8, {"a": 0}, 0.0, most=3) == 3
    assert shares.of("b", 8, busy, 0.0, most=3) == 3


def test_more_tasks_than_sends_wait_for_each_other() -> None:
    busy = dict.fromkeys("abc", 0)
    shares = Shares()
    for _ in range(2):
        given = [shares.of(task, 2, busy, 0.0) for task in busy]
    assert given == [1, 1, 0]
