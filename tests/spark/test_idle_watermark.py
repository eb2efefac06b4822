"""The last windows of an aggregate come out on a quiet stream, exactly once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.contract.harness import wait_until
from tests.spark.nodes import Served, numbers, serving
from turnlane.client.node_client import UnsettledSpans
from turnlane.formats.parse_settings import ParseSettings
from turnlane.outputs.api import OutputSettings
from turnlane.outputs.file import FileOutputSettings
from turnlane.pipeline.settings import ActionSettings, PipelineSettings
from turnlane.queues.settings import QueueSettings
from turnlane.spark.batch_planning import QueryPosition
from turnlane.spark.idle_watermark import IdleTimer, WatermarkLine
from turnlane.spark.pipeline import Pipeline

PATIENCE = 180.0
COUNT = "SELECT count(*) AS events FROM events GROUP BY window(timestamp, '1 second')"
SECOND = 1_000_000


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    queues: dict[str, dict[str, Any]] = {name: {} for name in ("main", "counts", "others")}
    with serving(tmp_path / "data", queues) as served:
        yield served


Run = Callable[..., Pipeline]


@pytest.fixture
def run(spark: SparkSession, node: Served, tmp_path: Path) -> Iterator[Run]:
    """Starts a pipeline; all that are started have the same checkpoints."""
    started: list[Pipeline] = []

    def start(*actions: ActionSettings) -> Pipeline:
        settings = PipelineSettings(parse=ParseSettings.model_validate("none"), actions=actions)
        access = {"endpoint": node.url}
        started.append(Pipeline(settings, access, spark, tmp_path / "checkpoints"))
        started[-1].start()
        return started[-1]

    yield start
    for each in started:
        each.stop()


def make_action(name: str, output: Path, **more: Any) -> ActionSettings:
    queue = QueueSettings.of(kind="disk", name=name, path=Path(name))
    fields = {"sql": COUNT, "watermark": 1.0, "idle_after": 1.0, **more}
    file = FileOutputSettings(type="file", path=output)
    return ActionSettings(name=name, queue=queue, output=file, **fields)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def count_rows(path: Path) -> int:
    return sum(row["events"] for row in read_rows(path))


def is_empty(node: Served, *queues: str) -> bool:
    return all(node.queue(name).low == node.queue(name).end > 0 for name in queues)


def test_last_windows_come_out_without_newer_events(node: Served, run: Run, tmp_path: Path) -> None:
    now = time.time_ns() // 1000
    pipeline = run(make_action("counts", tmp_path / "counts"))
    node.publish("main", numbers(0, 10), timestamps=now)
    node.publish("main", numbers(10, 30), timestamps=now - 5 * SECOND)
    wait_until(lambda: count_rows(tmp_path / "counts") >= 30, "the windows", PATIENCE)
    node.publish("main", numbers(30, 33))  # Not too late, although the watermark has moved.
    wait_until(lambda: count_rows(tmp_path / "counts") >= 33, "a later window", PATIENCE)
    (counts,) = (each for each in pipeline.status() if each.name == "counts")
    pipeline.stop()
    assert sorted(row["events"] for row in read_rows(tmp_path / "counts")) == [3, 10, 20]
    assert (counts.rows, counts.restarts) == (33, 0), "nothing else is counted"
    for name in ("main", "counts"):
        ledger = node.queue(name).stats().ledger
        assert (ledger.accepted, ledger.delivered, ledger.pending) == (33, 33, 0)


def test_windows_that_were_open_at_the_end_of_a_run_come_out_in_the_next(
    node: Served, run: Run, tmp_path: Path
) -> None:
    node.publish("main", numbers(0, 10))
    first = run(make_action("counts", tmp_path / "counts", idle_after=None))
    wait_until(lambda: is_empty(node, "main", "counts"), "the events", PATIENCE)
    assert first.stop() == []
    assert read_rows(tmp_path / "counts") == []
    second = run(make_action("counts", tmp_path / "counts"))
    wait_until(lambda: count_rows(tmp_path / "counts") >= 10, "the window", PATIENCE)
    assert second.stop() == []
    run(make_action("counts", tmp_path / "counts"))
    node.publish("main", numbers(10, 12))
    wait_until(lambda: count_rows(tmp_path / "counts") >= 12, "a later window", PATIENCE)
    assert [row["events"] for row in read_rows(tmp_path / "counts")] == [10, 2]


def test_window_stays_open_without_idle_after_until_a_newer_event_comes(
    node: Served, run: Run, tmp_path: Path
) -> None:
    now = time.time_ns() // 1000
    run(
        make_action("counts", tmp_path / "counts", idle_after=None),
        make_action("others", tmp_path / "others"),
    )
    node.publish("main", numbers(0, 10), timestamps=now)
    wait_until(lambda: count_rows(tmp_path / "others") == 10, "the other lane", PATIENCE)
    wait_until(lambda: is_empty(node, "counts"), "the events", PATIENCE)
    assert read_rows(tmp_path / "counts") == []
    node.publish("main", numbers(10, 11), timestamps=now + 3600 * SECOND)
    wait_until(lambda: count_rows(tmp_path / "counts") == 10, "the window", PATIENCE)


def test_left_join_returns_events_without_a_partner_on_a_quiet_stream(
    node: Served, run: Run, tmp_path: Path
) -> None:
    join = """
        SELECT CAST(e.value AS string) AS event, CAST(o.value AS string) AS other
        FROM events e LEFT JOIN others o ON e.key = o.key
        AND o.timestamp BETWEEN e.timestamp - INTERVAL 1 SECOND AND e.timestamp + INTERVAL 1 SECOND
    """
    queue = QueueSettings.of(kind="disk", name="others", path=Path("others"))
    keep = OutputSettings(type="discard")
    others = ActionSettings(name="others", filter="key = 'a'", queue=queue, output=keep)
    run(others, make_action("counts", tmp_path / "rows", sql=join, with_queues=("others",)))
    node.publish("main", [b"1", b"2"], keys=["a", "b"])
    wait_until(lambda: len(read_rows(tmp_path / "rows")) >= 2, "both rows", PATIENCE)
    rows = sorted((row["event"], row.get("other")) for row in read_rows(tmp_path / "rows"))
    assert rows == [("1", "1"), ("2", None)]


def test_event_that_comes_too_late_after_a_pause_is_reported(
    node: Served, run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = time.time_ns() // 1000
    run(make_action("counts", tmp_path / "counts"))
    node.publish("main", numbers(0, 10), timestamps=now)
    wait_until(lambda: count_rows(tmp_path / "counts") == 10, "the window", PATIENCE)
    node.publish("main", numbers(10, 12), timestamps=now)
    wait_until(
        lambda: any(
            each.startswith("lane.events_late lane=counts rows=1") for each in caplog.messages
        ),
        "the warning",
        PATIENCE,
    )
    assert count_rows(tmp_path / "counts") == 10


# ── without Spark ──


def make_state(*, low: int, end: int) -> dict[int, UnsettledSpans]:
    return {0: UnsettledSpans([], pending=end - low, end=end, low=low, kept=0)}


class TestIdleTimer:
    def test_event_in_a_queue_of_the_query_starts_the_time_again(self) -> None:
        timer = IdleTimer(0.0)
        assert not timer.add_queues([make_state(low=5, end=5)], 1.0)
        assert timer.add_queues([make_state(low=5, end=6)], 2.0), "it waits"
        assert timer.add_queues([make_state(low=7, end=7)], 3.0), "another one was read already"
        assert not timer.add_queues([make_state(low=7, end=7)], 4.0)
        assert timer.idle_since == 3.0

    def test_events_of_the_main_queue_are_routed_up_to_the_time_at_which_it_had_no_older(
        self,
    ) -> None:
        timer = IdleTimer(0.0)
        timer.add_main(make_state(low=5, end=9), 1.0)
        timer.add_main(make_state(low=8, end=20), 2.0)
        assert timer.routed_until is None, "the main lane has not come so far"
        timer.add_main(make_state(low=9, end=30), 3.0)
        assert timer.routed_until == 1.0
        timer.add_main(make_state(low=29, end=40), 4.0)
        assert timer.routed_until == 1.0
        timer.add_main(make_state(low=40, end=40), 5.0)
        assert timer.routed_until == 5.0

    def test_node_that_is_new_or_gone_does_not_count_as_routed(self) -> None:
        timer = IdleTimer(0.0)
        timer.add_main(make_state(low=5, end=9), 1.0)
        timer.add_main({1: make_state(low=9, end=9)[0]}, 2.0)
        assert timer.routed_until is None


class TestWatermarkLine:
    def test_watermark_moves_as_fast_as_the_clock_from_where_events_have_left_it(self) -> None:
        line = WatermarkLine(watermark=1000.0, at=50.0)
        assert line.compute(50.0, 9999.0) == 1000.0
        assert line.compute(80.0, 9999.0) == 1030.0

    def test_watermark_never_moves_back_or_beyond_its_limit(self) -> None:
        line = WatermarkLine(watermark=1000.0, at=50.0)
        assert line.compute(40.0, 9999.0) == 1000.0
        assert line.compute(80.0, 1010.0) == 1010.0


def test_position_with_a_request_has_the_same_events_and_another_text() -> None:
    before = QueryPosition({0: 5}, {0: 2}, {0: "id"})
    after = replace(before, request=7)
    assert after.to_offset() == {**before.to_offset(), "request": 7}
    assert QueryPosition.from_offset(after.to_offset()) == after
    assert QueryPosition.from_offset(before.to_offset()).request == 0, "of an older version"
