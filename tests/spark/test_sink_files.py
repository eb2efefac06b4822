"""A quiet stream makes few files, and they have all events."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.contract.harness import wait_until
from tests.spark.nodes import Served, numbers, serving
from turnlane.formats.parse_settings import ParseSettings
from turnlane.outputs.api import OutputSettings
from turnlane.outputs.spark import SparkSinkSettings
from turnlane.pipeline.settings import ActionSettings, LaneSettings, PipelineSettings
from turnlane.queues.settings import QueueSettings
from turnlane.spark.batch_planning import BatchWait
from turnlane.spark.pipeline import Pipeline
from turnlane.spark.sinks import MIN_EVENTS_PER_FILE, with_file_batching

PATIENCE = 180.0
AGE = 3.0
NOON = 1_795_003_200_000_000
HOUR = 3_600_000_000


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    queues: dict[str, dict[str, Any]] = {name: {} for name in ("main", "archive", "counts")}
    with serving(tmp_path / "data", queues) as served:
        yield served


def action(name: str, lane: LaneSettings, output: OutputSettings, **more: Any) -> ActionSettings:
    queue = QueueSettings.of(kind="disk", name=name, path=Path(name))
    return ActionSettings(name=name, queue=queue, lane=lane, output=output, **more)


def parquet(path: Path, **knobs: Any) -> SparkSinkSettings:
    return SparkSinkSettings(type="spark", format="parquet", path=str(path), **knobs)


def test_few_events_make_few_files_and_one_per_partition_folder(
    spark: SparkSession, node: Served, tmp_path: Path
) -> None:
    # A file needs more events than arrive: they are written because of their age.
    archive = action(
        "archive", LaneSettings(max_age=AGE), parquet(tmp_path / "files", columns=("value",))
    )
    counts = action(
        "counts",
        LaneSettings(min_events=250, max_age=AGE),
        parquet(tmp_path / "counts", partition_by=("severity",)),
        sql="SELECT severity, key, count(*) AS events FROM events "
        "GROUP BY window(timestamp, '1 hour'), severity, key",
        watermark=60.0,
    )
    parse = ParseSettings.model_validate("none")
    settings = PipelineSettings(parse=parse, actions=(archive, counts))
    pipeline = Pipeline(settings, {"endpoint": node.url}, spark, tmp_path / "checkpoints")
    began = time.monotonic()
    pipeline.start()
    try:
        for first in range(0, 250, 50):
            publish(node, first, NOON)
            wait_until(lambda: is_routed(node), "a trickle", PATIENCE)
        publish(node, 250, NOON + 2 * HOUR)  # The first hour has ended.
        wait_until(lambda: node.queue("archive").low == 300, "the archive", PATIENCE)
        wait_until(lambda: is_written(tmp_path / "counts"), "the counts", PATIENCE)
    finally:
        pipeline.stop()
    batches = 2 + (time.monotonic() - began) / AGE
    found = spark.read.parquet(str(tmp_path / "files")).collect()
    assert Counter(bytes(row.value) for row in found) == Counter(numbers(0, 300))
    assert len(list((tmp_path / "files").glob("*.parquet"))) <= batches
    groups = spark.read.parquet(str(tmp_path / "counts")).collect()
    assert Counter({(row.severity, row.key): row.events for row in groups}) == Counter(
        {(number % 2, str(number % 10)): 25 for number in range(10)}
    )
    folders = sorted((tmp_path / "counts").glob("severity=*"))
    assert [len(list(folder.glob("*.parquet"))) for folder in folders] == [1, 1]


def is_written(files: Path) -> bool:
    """Whether the log of the sink has files, not only unfinished ones."""
    noted = (entry.read_text() for entry in (files / "_spark_metadata").glob("[0-9]*"))
    return any('"path"' in text for text in noted)


def is_routed(node: Served) -> bool:
    return node.queue("archive").end == node.queue("main").end


def publish(node: Served, first: int, moment: int) -> None:
    node.publish(
        "main",
        numbers(first, first + 50),
        timestamps=moment,
        severities=[number % 2 for number in range(50)],
        keys=[str(number % 10) for number in range(50)],
    )


def test_quiet_day_makes_few_files_and_many_events_are_written_at_once(tmp_path: Path) -> None:
    """An event a second, and at the end enough events for a file at once."""
    lane = with_file_batching(action("a", LaneSettings(), parquet(tmp_path))).lane
    wait = BatchWait(lane.min_events, lane.max_age)
    files = waiting = 0
    for second in range(86_400):
        waiting += 1
        if not wait.compute_wait(waiting, float(second)):
            files, waiting = files + 1, 0
    assert 1400 <= files <= 1440
    assert wait.compute_wait(waiting + MIN_EVENTS_PER_FILE, 86_400.0) == 0.0


def test_only_file_sinks_without_settings_wait_for_events(tmp_path: Path) -> None:
    usual, quick = LaneSettings(), LaneSettings(min_events=1)
    waiting = with_file_batching(action("a", usual, parquet(tmp_path))).lane
    assert (waiting.min_events, waiting.max_age) == (MIN_EVENTS_PER_FILE, 60)
    aged = with_file_batching(action("a", LaneSettings(max_age=600), parquet(tmp_path))).lane
    assert (aged.min_events, aged.max_age) == (MIN_EVENTS_PER_FILE, 600)
    assert with_file_batching(action("a", quick, parquet(tmp_path))).lane == quick
    small = LaneSettings(max_events=500)
    assert with_file_batching(action("a", small, parquet(tmp_path))).lane.min_events == 500
    there = SparkSinkSettings(type="spark", format="csv", options={"path": "x"})
    assert with_file_batching(action("a", usual, there)).lane.min_events == MIN_EVENTS_PER_FILE
    for output in (
        SparkSinkSettings(type="spark", format="jdbc", options={"url": "jdbc:x"}),
        OutputSettings(type="discard"),
    ):
        unchanged = action("a", usual, output)
        assert with_file_batching(unchanged) is unchanged
