"""Do tasks together stay within the limit of sends, and get equal shares?"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from turnlane.node.breakers import TASK_COUNT_SECONDS, SendShares

LIMIT = 7


class Tasks(RuleBasedStateMachine):
    """Tasks that start, end, ask for their shares, and have as many sends as these allow."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = SendShares()
        self.now = 0.0
        self.busy: dict[str, int] = {}
        self.share: dict[str, int] = {}
        self.started = 0

    @rule()
    def start_task(self) -> None:
        self.started += 1
        self.busy[f"task {self.started}"] = 0
        self.share[f"task {self.started}"] = 0

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(sorted(self.busy)))
        self.share[task] = self.shares.compute(task, LIMIT, self.busy, self.now)

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def start_sends(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(sorted(self.busy)))
        self.busy[task] = max(self.busy[task], self.share[task])

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def end_send(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(sorted(self.busy)))
        self.busy[task] = max(0, self.busy[task] - 1)

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def end_task(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(sorted(self.busy)))
        del self.busy[task], self.share[task]

    @rule()
    def wait(self) -> None:
        self.now += TASK_COUNT_SECONDS

    @invariant()
    def sends_stay_within_the_limit(self) -> None:
        assert sum(self.busy.values()) <= LIMIT


TestTasks = Tasks.TestCase


def test_all_tasks_get_equal_shares_after_asking_again() -> None:
    shares, busy = SendShares(), {"a": 0, "b": 0, "c": 0}
    for _ in range(2):
        given = [shares.compute(task, 9, busy, 0.0) for task in busy]
    assert given == [3, 3, 3]


def test_single_task_gets_the_whole_limit_after_a_while() -> None:
    shares = SendShares()
    for task in ("a", "b"):
        shares.compute(task, 8, {"a": 0, "b": 0}, 0.0)
    assert shares.compute("a", 8, {"a": 0}, 1.0) == 4
    assert shares.compute("a", 8, {"a": 0}, 1.0 + TASK_COUNT_SECONDS) == 8


def test_share_is_at_most_what_a_task_can_use() -> None:
    shares, busy = SendShares(), {"a": 0, "b": 0}
    assert shares.compute("a", 8, {"a": 0}, 0.0, most=3) == 3
    assert shares.compute("b", 8, busy, 0.0, most=3) == 3


def test_tasks_beyond_the_limit_wait_for_others() -> None:
    busy = dict.fromkeys("abc", 0)
    shares = SendShares()
    for _ in range(2):
        given = [shares.compute(task, 2, busy, 0.0) for task in busy]
    assert given == [1, 1, 0]
