"""The delivery of one step in a task: second output, deadline and ordering."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from turnlane.delivery.destination import LocalDestinationState, SendReport
from turnlane.delivery.engine import GRACE, Engine
from turnlane.delivery.settings import DeliverySettings, FailoverSettings
from turnlane.events import Block
from turnlane.runtime import Closeable
from turnlane.spark import lane_task as delivering_module
from turnlane.spark.lane_task import StepDelivery
from turnlane.spark.steps import LaneStep

AWAY = 3600.0


class OpenState(LocalDestinationState, Closeable):
    """The state of a destination in this process, which a task opens and closes."""

    def close(self) -> None:
        """Do nothing: no node counts the tasks here."""


class FakeBreakers:
    """The first output is away; ``open_for`` says for how long, at each question."""

    def __init__(self, open_for: Iterator[float]) -> None:
        self._open_for = open_for

    def open_destination(self, action: str, step: LaneStep, *_: Any) -> OpenState:
        state = OpenState(step.delivery)
        if "." not in action:
            state.report(SendReport(failures=1, error="away"))
        return state

    def get_states(self, actions: Sequence[str]) -> dict[str, dict[str, float]]:
        return {action: {"open_for": next(self._open_for)} for action in actions}


@contextmanager
def open_delivery(target: Path, open_for: Iterator[float], **knobs: Any) -> Iterator[StepDelivery]:
    """Create the delivery of an action whose output is away, with a file as second output."""
    second = {"type": "file", "path": str(target), "format": "raw"}
    failover = FailoverSettings(output=second, after=60)
    delivery = DeliverySettings(breaker_failures=1, failover=failover, **knobs)
    first = {"type": "file", "path": str(target.with_suffix(".first"))}
    step = LaneStep(action="a", source_queue="a", output=first, delivery=delivery)
    with ExitStack() as opened:
        yield StepDelivery(step, FakeBreakers(open_for), opened)  # type: ignore[arg-type]


def block(*values: str) -> Block:
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([value[0] for value in values]),
            "value": pa.array([value.encode() for value in values]),
            "payload": pa.array([value.encode() for value in values]),
        }
    )


def yield_ages(*seconds: float) -> Iterator[float]:
    yield from seconds


def test_second_output_gets_rows_that_the_first_cannot_take(tmp_path: Path) -> None:
    with open_delivery(tmp_path / "out", yield_ages(AWAY)) as delivery:
        ((_, outcome),) = delivery.run([block("a1", "b1")])
    assert (outcome.delivered, len(outcome.deferred)) == (2, 0)
    assert (tmp_path / "out").read_text() == "a1\nb1\n"


def test_second_output_stops_at_the_deadline_of_the_task(tmp_path: Path) -> None:
    def blocks() -> Iterator[Block]:
        yield block("a1")
        time.sleep(0.2)  # By then the task's time is over, on any machine.
        yield block("a2")

    with open_delivery(tmp_path / "out", yield_ages(AWAY, AWAY), max_time=0.1) as delivery:
        outcomes = [outcome for _, outcome in delivery.run(blocks())]
    assert outcomes[1].deferred.tolist() == [0], "it is deferred to the next batch"


def test_second_output_gets_rows_that_took_longer_than_the_time_of_a_task_to_arrive(
    tmp_path: Path,
) -> None:
    def blocks() -> Iterator[Block]:
        time.sleep(0.2)  # Longer than the task's time, on any machine.
        yield block("a1")

    with open_delivery(tmp_path / "out", yield_ages(AWAY), max_time=0.1) as delivery:
        ((_, outcome),) = delivery.run(blocks())
    assert outcome.delivered == 1


def test_grace_covers_the_timeouts_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A send that is given up sooner may still arrive, so its events would repeat forever."""
    graces: list[float] = []

    def made(*args: Any, grace: float, **more: Any) -> Engine:
        graces.append(grace)
        return Engine(*args, grace=grace, **more)

    monkeypatch.setattr(delivering_module, "Engine", made)
    for timeout in ("10m", "1s"):
        output = {"type": "http", "url": "http://localhost:1", "timeout": timeout}
        with ExitStack() as opened:
            step = LaneStep(action="a", source_queue="a", output=output)
            StepDelivery(step, FakeBreakers(yield_ages()), opened)  # type: ignore[arg-type]
    assert graces == [610.0, GRACE]


@pytest.mark.parametrize(("ordering", "written"), [("strict", ""), ("key", "b2\n")])
def test_ordered_rows_do_not_overtake_deferred_rows(
    tmp_path: Path, ordering: str, written: str
) -> None:
    """The breaker has been open long enough only for the second block."""
    with open_delivery(tmp_path / "out", yield_ages(59.9, 60.1), ordering=ordering) as delivery:
        results = list(delivery.run([block("a1"), block("a2", "b2")]))
    assert [outcome.delivered for _, outcome in results] == [0, written.count("\n")]
    assert results[1][1].deferred.tolist() == ([0, 1] if not written else [0])
    found = tmp_path / "out"
    assert (found.read_text() if found.exists() else "") == written
