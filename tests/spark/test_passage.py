"""Which action gets which rows, and what becomes of those that it cannot deliver now?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from turnlane.delivery.results import BlockResult, DeadLetter
from turnlane.events import Block
from turnlane.spark.lane_task import StepResult, run_steps
from turnlane.spark.row_codec import Mask
from turnlane.spark.steps import LaneStep

ROWS = pa.RecordBatch.from_pydict({"number": list(range(6))})
OF_THREE_EVENTS = pa.RecordBatch.from_pydict(
    {"number": list(range(6)), "partition": [0] * 6, "offset": [7, 7, 8, 8, 9, 9]}
)


class Destinations:
    """Actions that take what they are told to, and remember what they were asked."""

    def __init__(self, *, away: dict[str, set[int]], dead: dict[str, set[int]]) -> None:
        self._away = away
        self._dead = dead
        self.asked: dict[str, list[int]] = {}

    def deliver(self, step: LaneStep, rows: Block) -> BlockResult:
        numbers: list[Any] = rows.column("number").to_pylist()
        self.asked.setdefault(step.action, []).extend(numbers)
        away, dead = self._away.get(step.action, set()), self._dead.get(step.action, set())
        kept = [at for at, number in enumerate(numbers) if number in away]
        gone = np.array([at for at, number in enumerate(numbers) if number in dead], dtype=np.int64)
        letters = [DeadLetter(rows.take(gone), gone, "Never", "no", 1)] if len(gone) else []
        delivered = len(numbers) - len(kept) - len(gone)
        return BlockResult(delivered, np.array(kept, dtype=np.int64), letters)


def step(
    name: str, *, output: bool = True, queue: str | None = None, instead: bool = False
) -> LaneStep:
    return LaneStep(
        action=name,
        source_queue="main",
        output={"type": "test"} if output else None,
        queue=queue,
        only_when_suspended=instead,
    )


def sent(
    *steps: LaneStep,
    rows: Block = ROWS,
    routes: dict[str, set[int]] | None = None,
    away: dict[str, set[int]] | None = None,
    dead: dict[str, set[int]] | None = None,
) -> tuple[StepResult, dict[str, list[int]]]:
    """Send all rows through the steps; returns what became of them, and who was asked."""
    everything = set(range(rows.num_rows))
    masks = {
        each.action: np.isin(np.arange(6), list((routes or {}).get(each.action, everything)))
        for each in steps
    }
    destinations = Destinations(away=away or {}, dead=dead or {})
    return run_steps(rows, steps, masks, destinations.deliver), destinations.asked


def where(mask: Mask) -> list[int]:
    found: list[int] = np.flatnonzero(mask).tolist()
    return found


def test_each_step_gets_its_routed_rows() -> None:
    result, asked = sent(step("a"), step("b"), routes={"a": {0, 1}, "b": {1, 5}})
    assert asked == {"a": [0, 1], "b": [1, 5]}
    assert not result.deferred.any()


def test_undeliverable_event_is_deferred_for_all_later_steps() -> None:
    """Later actions are not even asked; earlier ones had it."""
    result, asked = sent(step("a"), step("b"), step("c"), away={"b": {2}})
    assert where(result.deferred) == [2]
    assert asked == {"a": [0, 1, 2, 3, 4, 5], "b": [0, 1, 2, 3, 4, 5], "c": [0, 1, 3, 4, 5]}


def test_undelivered_rows_of_try_direct_go_into_the_queue() -> None:
    result, _ = sent(step("a", queue="a"), step("b"), away={"a": {1, 2}, "b": {2}})
    assert where(result.deferred) == [2]
    assert where(result.queued["a"]) == [1, 2], "which of these goes is known when all are through"


def test_suspended_step_is_replaced_by_the_next() -> None:
    result, asked = sent(step("a"), step("b", instead=True), away={"a": {1, 2, 3}, "b": {3}})
    assert asked["b"] == [1, 2, 3]
    assert where(result.deferred) == [3]


def test_replacing_step_takes_only_its_routed_rows() -> None:
    routes = {"a": {0, 1, 2}, "b": {2, 3}}
    result, asked = sent(step("a"), step("b", instead=True), routes=routes, away={"a": {1, 2}})
    assert asked["b"] == [2]
    assert where(result.deferred) == [1]


def test_queue_step_takes_undelivered_rows() -> None:
    steps = [step("a"), step("b", output=False, queue="b", instead=True)]
    result, asked = sent(*steps, away={"a": {4}})
    assert "b" not in asked
    assert not result.deferred.any()
    assert where(result.queued["b"]) == [4]


def test_rows_left_by_a_group_go_into_its_first_queue() -> None:
    steps = [step("a", queue="a"), step("b", instead=True)]
    result, _ = sent(*steps, away={"a": {1, 2}, "b": {2}})
    assert where(result.queued["a"]) == [2]
    assert not result.deferred.any()


def test_dead_mask_leaves_out_deferred_rows() -> None:
    routes = {"a": {1, 3, 5}}
    result, _ = sent(step("a"), step("b"), routes=routes, dead={"a": {3, 5}}, away={"b": {5}})
    (dead,) = result.dead
    assert dead.numbers.tolist() == [3, 5]
    assert where(result.dead_mask) == [3]


def test_all_rows_of_an_event_are_deferred_together() -> None:
    """Whatever they were routed to: later actions are not asked, and no queue gets them."""
    steps = [step("a", queue="a"), step("b"), step("c")]
    routes = {"a": {2, 4}, "b": {1, 3}, "c": {0, 2, 5}}
    away = {"a": {2, 4}, "b": {3}}
    result, asked = sent(*steps, rows=OF_THREE_EVENTS, routes=routes, away=away)
    assert where(result.deferred) == [2, 3]
    assert asked["c"] == [0, 5]
    assert where(result.queued["a"] & ~result.deferred) == [4]


def test_dead_row_of_a_deferred_event_is_deferred() -> None:
    routes = {"a": {0, 2}, "b": {1, 5}}
    result, _ = sent(
        step("a"),
        step("b"),
        rows=OF_THREE_EVENTS,
        routes=routes,
        dead={"a": {0, 2}},
        away={"b": {1}},
    )
    assert where(result.deferred) == [0, 1]
    assert where(result.dead_mask) == [2]
