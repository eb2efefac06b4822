"""A lane that sends nothing says why: it collects events, or it has stalled and starts again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # has none
import pytest
from prometheus_client import CollectorRegistry
from pyspark.sql import SparkSession

from tests.contract.harness import wait_until
from tests.spark.nodes import Served, numbers, serving
from turnlane.cli.supervise import format_lane_status
from turnlane.formats.parse_settings import ParseSettings
from turnlane.node.metrics import NodeCollector
from turnlane.outputs.file import FileOutputSettings
from turnlane.outputs.spark import SparkSinkSettings
from turnlane.pipeline.settings import ActionSettings, LaneSettings, PipelineSettings
from turnlane.queues.settings import QueueSettings
from turnlane.spark.lane import LaneStatus
from turnlane.spark.pipeline import Pipeline

PATIENCE = 180.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "data", {"main": {}, "slow": {}}) as served:
        yield served


def make_pipeline(
    spark: SparkSession, node: Served, place: Path, lane: LaneSettings, **more: object
) -> Pipeline:
    """Return a pipeline with an action ``slow``."""
    queue = QueueSettings.of(kind="disk", name="slow", path=Path("slow"))
    action = ActionSettings.model_validate({"name": "slow", "queue": queue, "lane": lane, **more})
    settings = PipelineSettings(parse=ParseSettings.model_validate("none"), actions=(action,))
    return Pipeline(settings, {"endpoint": node.url}, spark, place / "checkpoints")


def get_status(pipeline: Pipeline) -> LaneStatus:
    (found,) = (each for each in pipeline.status() if each.name == "slow")
    return found


def test_lane_that_collects_events_says_how_many_and_until_when(
    spark: SparkSession, node: Served, tmp_path: Path
) -> None:
    sink = SparkSinkSettings(type="spark", format="parquet", path=str(tmp_path / "files"))
    lane = LaneSettings(min_events=100, max_age=86_400, stall_timeout=1)
    pipeline = make_pipeline(spark, node, tmp_path, lane, output=sink)
    node.publish("main", numbers(0, 50))
    pipeline.start()
    try:
        wait_until(
            lambda: (
                "running, collects events: 50 of 100, at most until "
                in format_lane_status(get_status(pipeline))
            ),
            "the status",
            PATIENCE,
        )
        node.publish("main", numbers(50, 100))
        wait_until(lambda: node.queue("slow").low == 100, "enough events", PATIENCE)
        wait_until(lambda: get_status(pipeline).collecting is None, "the end of it", PATIENCE)
        assert (get_status(pipeline).restarts, get_status(pipeline).stalled) == (0, None)
    finally:
        pipeline.stop()
    assert spark.read.parquet(str(tmp_path / "files")).count() == 100


def test_lane_whose_reader_hangs_is_reported_and_started_again(
    spark: SparkSession, node: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = FileOutputSettings(type="file", path=tmp_path / "out")
    lane = LaneSettings(stall_timeout=5)
    pipeline = make_pipeline(spark, node, tmp_path, lane, output=output)
    pipeline.start()
    hung: list[psutil.Process] = []
    try:
        node.publish("slow", numbers(0, 20))
        wait_until(lambda: node.queue("slow").low == 20, "the lane", PATIENCE)
        hung = find_readers()
        for reader in hung:
            reader.suspend()
        node.publish("slow", numbers(20, 40))
        wait_until(lambda: node.queue("slow").low == 40, "the lane that was restarted", PATIENCE)
        assert get_status(pipeline).restarts >= 1
    finally:
        for reader in hung:
            with contextlib.suppress(psutil.NoSuchProcess):
                reader.resume()
        pipeline.stop()
    stalls = [each for each in caplog.messages if each.startswith("lane.stalled lane=slow")]
    assert "events=20 seconds=" in stalls[-1]
    assert 'spark="Getting offsets from PythonMicroBatchStream' in stalls[-1]
    assert "PythonStreamingSourceRunner.latestOffset(" in stalls[-1], "the stack of the query"
    registry = CollectorRegistry()
    registry.register(NodeCollector(node.node))
    assert registry.get_sample_value("turnlane_lane_stalls_total", {"queue": "slow"})
    assert len(set((tmp_path / "out").read_text().splitlines())) == 40


SLOW_MODULE = """
from pyspark.sql.functions import udf

def wait(events):
    def sleep(value):
        import time
        time.sleep(0.7)
        return str(value)
    return events.withColumn("waited", udf(sleep, "string", useArrow=False)("value"))
"""


def test_lane_delivers_events_that_take_longer_to_arrive_than_a_task_may_send(
    spark: SparkSession, node: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine, where Spark took so long for the rows that no time was left to send."""
    (tmp_path / "slow_rows.py").write_text(SLOW_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    output = FileOutputSettings(type="file", path=tmp_path / "out")
    more = {"output": output, "transform": "slow_rows:wait", "delivery": {"max_time": 1.0}}
    pipeline = make_pipeline(spark, node, tmp_path, LaneSettings(), **more)
    node.publish("main", numbers(0, 3))
    pipeline.start()
    try:
        wait_until(lambda: node.queue("slow").low == 3, "the events", PATIENCE)
    finally:
        pipeline.stop()
        sys.modules.pop("slow_rows", None)
    assert len((tmp_path / "out").read_text().splitlines()) >= 3


def find_readers() -> list[psutil.Process]:
    """Return the processes in which Spark asks the readers of the lanes for offsets."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "pyspark.sql.streaming.python_streaming_source_runner" in each.cmdline():
                found.append(each)
    return found
