"""Failures in a pipeline are reported with place and reason, and no event is lost."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from tests.contract.harness import wait_until
from tests.spark.nodes import Served, numbers, serving
from turnlane.config import loads
from turnlane.errors import ConfigError
from turnlane.formats.parse_settings import ParseSettings
from turnlane.outputs.file import FileOutputSettings
from turnlane.outputs.queue import QueueOutputSettings
from turnlane.outputs.spark import SparkSinkSettings
from turnlane.pipeline.settings import ActionSettings, LaneSettings, PipelineSettings
from turnlane.queues.settings import QueueSettings
from turnlane.spark.lane import LaneState, LaneStatus
from turnlane.spark.pipeline import Pipeline
from turnlane.spark.queue_reader import QuerySettler
from turnlane.testing import FaultyDisk

PATIENCE = 180.0
pytestmark = pytest.mark.timeout(600)
QUEUES = ("main", "taken", "other")

Make = Callable[..., Pipeline]


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def node(tmp_path: Path, disk: FaultyDisk) -> Iterator[Served]:
    with serving(tmp_path / "data", {name: {} for name in QUEUES}, disk=disk) as served:
        yield served
        disk.clear()
        disk.unfill()


@pytest.fixture
def make(spark: SparkSession, node: Served, tmp_path: Path) -> Iterator[Make]:
    made: list[Pipeline] = []

    def pipeline(*actions: ActionSettings, **settings: Any) -> Pipeline:
        described = PipelineSettings(parse=ParseSettings(), actions=actions, **settings)
        made.append(Pipeline(described, {"endpoint": node.url}, spark, tmp_path / "checkpoints"))
        return made[-1]

    yield pipeline
    for each in made:
        each.stop()


def action(name: str, output: Any, **settings: Any) -> ActionSettings:
    queue = QueueSettings.of(kind="disk", name=name, path=Path(name))
    return ActionSettings(name=name, queue=queue, output=output, **settings)


def make_file_output(path: Path) -> FileOutputSettings:
    return FileOutputSettings(type="file", path=path)


def values(path: Path) -> list[bytes]:
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted(json.loads(line)["value"].encode() for line in lines)


def wait_until_empty(node: Served, *queues: str) -> Callable[[], bool]:
    return lambda: all(node.queue(name).low == node.queue(name).end > 0 for name in queues)


def lane(pipeline: Pipeline, name: str) -> LaneStatus:
    return next(status for status in pipeline.status() if status.name == name)


def has_reason(pipeline: Pipeline, name: str, what: str) -> Callable[[], bool]:
    return lambda: what in (lane(pipeline, name).reason or "")


# ── raising transforms ──


def fail_at_curse(events: DataFrame) -> DataFrame:
    """A transform that is valid, but fails at an event."""
    return events.where(F.expr("if(value = '7', raise_error('seven is cursed'), true)"))


def test_raising_transform_keeps_the_backlog_and_other_lanes_run(
    node: Served, make: Make, tmp_path: Path
) -> None:
    healthy = action("other", make_file_output(tmp_path / "other"))
    broken = action(
        "taken", make_file_output(tmp_path / "taken"), transform=f"{__name__}:fail_at_curse"
    )
    pipeline = make(broken, healthy)
    node.publish("main", numbers(0, 100))
    pipeline.start()
    wait_until(wait_until_empty(node, "main", "other"), "the healthy lanes", PATIENCE)
    wait_until(has_reason(pipeline, "taken", "seven is cursed"), "the reason", PATIENCE)
    node.publish("main", numbers(100, 200))
    wait_until(lambda: node.queue("other").low == 200, "the others to go on", PATIENCE)
    wait_until(lambda: lane(pipeline, "taken").restarts > 0, "another attempt", PATIENCE)
    assert values(tmp_path / "other") == sorted(numbers(0, 200))
    assert (node.queue("taken").low, node.queue("taken").end) == (0, 200)
    pipeline.stop()

    repaired = make(action("taken", make_file_output(tmp_path / "taken")), healthy)
    repaired.start()
    wait_until(wait_until_empty(node, "taken"), "the backlog", PATIENCE)
    assert set(values(tmp_path / "taken")) == {*numbers(0, 200)}


def test_raising_pipeline_transform_keeps_events_in_the_main_queue(
    node: Served, make: Make, tmp_path: Path
) -> None:
    node.publish("main", numbers(0, 20))
    taken = action("taken", make_file_output(tmp_path / "taken"))
    pipeline = make(taken, transform=f"{__name__}:fail_at_curse")
    pipeline.start()
    wait_until(has_reason(pipeline, "main", "seven is cursed"), "the reason", PATIENCE)
    assert lane(pipeline, "main").state is not LaneState.RUNNING
    pipeline.stop()
    assert (node.queue("main").low, node.queue("taken").end) == (0, 0)

    make(taken).start()
    wait_until(wait_until_empty(node, "main", "taken"), "all of them", PATIENCE)
    assert values(tmp_path / "taken") == sorted(numbers(0, 20))


# ── invalid configurations ──

CONFIG = """\
node: {data: data}
actions:
  - name: taken
    queue: disk
    filter: FILTER
    output: {type: file, path: taken}
"""


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("severity <", "c.yaml:5:13: actions[0].filter: [PARSE_SYNTAX_ERROR]"),
        ("sevrity < 3", "c.yaml:5:13: actions[0].filter: [UNRESOLVED_COLUMN"),
    ],
)
def test_invalid_filter_is_reported_with_its_place_in_the_file(
    written: str, message: str, spark: SparkSession, tmp_path: Path
) -> None:
    config = loads(CONFIG.replace("FILTER", written), "c.yaml", {})
    settings = config.pipeline()
    assert settings is not None
    with pytest.raises(ConfigError) as caught:
        Pipeline(settings, {"endpoint": "turnlane://127.0.0.1:1"}, spark, tmp_path).start()
    assert str(config.locate(caught.value)).startswith(message)


# ── checkpoints ──


def test_stateless_lane_continues_without_its_checkpoint(
    node: Served, make: Make, tmp_path: Path
) -> None:
    """The checkpoint is deleted while the lane is stopped: the node knows the cursor."""
    taken = action("taken", make_file_output(tmp_path / "taken"))
    for first in (0, 100):
        node.publish("main", numbers(first, first + 100))
        pipeline = make(taken)
        pipeline.start()
        wait_until(wait_until_empty(node, "main", "taken"), "the lanes", PATIENCE)
        pipeline.stop()
        shutil.rmtree(tmp_path / "checkpoints")
    assert values(tmp_path / "taken") == sorted(numbers(0, 200))


def test_spark_sink_continues_its_files_after_a_configuration_change(
    spark: SparkSession, node: Served, make: Make, tmp_path: Path
) -> None:
    """The batch numbers must continue; otherwise Spark would skip batches as repeats."""
    (tmp_path / "files" / "_spark_metadata").mkdir(parents=True)  # A failed start leaves this.
    for columns in (("value",), ("value", "upper(queue) AS queue")):
        sink = SparkSinkSettings(
            type="spark", format="parquet", path=str(tmp_path / "files"), columns=columns
        )
        first = node.queue("main").end
        node.publish("main", numbers(first, first + 100))
        shorter = f"length(value) < {5 + len(columns)}"
        pipeline = make(action("taken", sink, filter=shorter, lane=LaneSettings(min_events=1)))
        pipeline.start()
        wait_until(wait_until_empty(node, "main", "taken"), "the lanes", PATIENCE)
        pipeline.stop()
    found = spark.read.parquet(str(tmp_path / "files")).collect()
    assert sorted(bytes(row.value) for row in found) == sorted(numbers(0, 200))


def test_spark_sink_without_its_checkpoint_fails_and_skips_nothing(
    node: Served, make: Make, tmp_path: Path
) -> None:
    sink = SparkSinkSettings(type="spark", format="parquet", path=str(tmp_path / "files"))
    taken = action("taken", sink, lane=LaneSettings(min_events=1))
    node.publish("main", numbers(0, 100))
    pipeline = make(taken)
    pipeline.start()
    wait_until(wait_until_empty(node, "main", "taken"), "the lanes", PATIENCE)
    pipeline.stop()
    shutil.rmtree(tmp_path / "checkpoints")

    node.publish("main", numbers(100, 200))
    pipeline = make(taken)
    pipeline.start()
    wait_until(has_reason(pipeline, "taken", "_spark_metadata"), "the reason", PATIENCE)
    wait_until(lambda: node.queue("taken").end == 200, "the main lane", PATIENCE)
    assert node.queue("taken").low == 100, "its events are kept"


@pytest.mark.parametrize("sql", [None, "SELECT value FROM events"])
def test_lane_with_a_checkpoint_reads_all_of_a_recreated_queue(
    spark: SparkSession, node: Served, make: Make, tmp_path: Path, sql: str | None
) -> None:
    """Also if it has more events than the lane had read of the old queue."""
    sink = SparkSinkSettings(type="spark", format="parquet", path=str(tmp_path / "files"))
    output = sink if sql is None else make_file_output(tmp_path / "late")
    for first, end in ((0, 100), (100, 250)):
        node.node.create("late")
        node.publish("late", numbers(first, end))
        pipeline = make(action("late", output, sql=sql, lane=LaneSettings(min_events=1)))
        pipeline.start()
        wait_until(wait_until_empty(node, "late"), "the lane", PATIENCE)
        pipeline.stop()
        assert node.queue("late").stats().ledger.delivered == end - first
        node.node.drop("late")
    if sql is None:
        rows = spark.read.parquet(str(tmp_path / "files")).collect()
        found = sorted(bytes(row.value) for row in rows)
    else:
        found = values(tmp_path / "late")
    assert found == sorted(numbers(0, 250))


@pytest.mark.parametrize("sql", [None, "SELECT value FROM events"])
def test_lane_that_gets_a_checkpoint_reads_no_settled_events(
    spark: SparkSession, node: Served, make: Make, tmp_path: Path, sql: str | None
) -> None:
    """A lane without a checkpoint has settled events in any order before."""
    sink = SparkSinkSettings(type="spark", format="parquet", path=str(tmp_path / "files"))
    output = sink if sql is None else make_file_output(tmp_path / "taken.json")
    node.publish("taken", numbers(0, 100))
    node.queue("taken").settle(20, 80)
    pipeline = make(action("taken", output, sql=sql, lane=LaneSettings(min_events=1)))
    pipeline.start()
    wait_until(wait_until_empty(node, "taken"), "the lane", PATIENCE)
    pipeline.stop()
    if sql is None:
        found = [bytes(row.value) for row in spark.read.parquet(str(tmp_path / "files")).collect()]
    else:
        found = values(tmp_path / "taken.json")
    assert sorted(found) == sorted([*numbers(0, 20), *numbers(80, 100)])


COUNT = "SELECT 'all' AS what, count(*) AS events FROM events"


def test_stateful_lane_starts_empty_without_checkpoint_or_with_another_query(
    node: Served, make: Make, tmp_path: Path
) -> None:
    """The counts are lost, as documented, but no event is skipped."""

    def counted(sql: str, path: str, first: int) -> int:
        node.publish("main", numbers(first, first + 100))
        output = make_file_output(tmp_path / path)
        pipeline = make(action("taken", output, sql=sql, output_mode="complete"))
        pipeline.start()
        wait_until(wait_until_empty(node, "main", "taken"), "the lanes", PATIENCE)
        pipeline.stop()
        lines = (tmp_path / path).read_text().splitlines()
        return int(json.loads(lines[-1])["events"])

    assert counted(COUNT, "one", 0) == 100
    assert counted(COUNT, "one", 100) == 200, "it continues"
    shutil.rmtree(tmp_path / "checkpoints")
    assert counted(COUNT, "one", 200) == 100, (
        "without a checkpoint it starts with the pending events"
    )
    assert counted(COUNT.replace("'all'", "'these'"), "one", 300) == 100, "so does another query"
    (left,) = (tmp_path / "checkpoints").glob("taken-*")
    assert counted(COUNT, "one", 400) == 100, (
        "so does an earlier query, which has not seen all events"
    )
    assert not left.exists()


def drop_duplicates(events: DataFrame) -> DataFrame:
    """The configuration of the documentation."""
    return events.withWatermark("timestamp", "1 hour").dropDuplicatesWithinWatermark(["key"])


def test_deduplicating_transform_keeps_its_state_across_a_restart(
    node: Served, make: Make, tmp_path: Path
) -> None:
    taken = action(
        "taken", make_file_output(tmp_path / "taken"), transform=f"{__name__}:drop_duplicates"
    )
    for keys in (["a", "b", "a"], ["b", "c"]):
        node.publish("main", [each.encode() for each in keys], keys=keys)
        pipeline = make(taken)
        pipeline.start()
        wait_until(wait_until_empty(node, "main", "taken"), "the lanes", PATIENCE)
        pipeline.stop()
    assert values(tmp_path / "taken") == [b"a", b"b", b"c"]


def test_repeated_batch_of_sql_is_in_the_queue_once(
    node: Served, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver dies after the node has committed the batch and before Spark has."""
    output = QueueOutputSettings(type="queue", endpoint=node.url, queue="other")
    taken = action("taken", output, sql="SELECT value, key FROM events")
    node.publish("main", numbers(0, 100))
    with monkeypatch.context() as dying:
        dying.setattr(QuerySettler, "settle", lambda *_: None)
        pipeline = make(taken)
        pipeline.start()
        wait_until(lambda: node.queue("other").end == 100, "the batch", PATIENCE)
        pipeline.stop()
    for noted in (tmp_path / "checkpoints").glob("taken-*/commits/*"):
        noted.unlink()

    node.publish("main", numbers(100, 200))
    make(taken).start()
    wait_until(wait_until_empty(node, "main", "taken"), "the lanes", PATIENCE)
    assert sorted(node.values("other")) == sorted(numbers(0, 200))


# ── full disks ──


def fill_disk(disk: FaultyDisk, match: str) -> Callable[[], None]:
    """Make the disk full for these files; returns a function that makes room again."""
    disk.fail("write", error=errno.ENOSPC, times=None, match=match)
    return disk.clear


def test_commit_on_a_full_disk_waits_for_room(
    node: Served,
    make: Make,
    disk: FaultyDisk,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The disk is full for stages, then for the commit's file, then for the queue."""
    pipeline = make(action("taken", make_file_output(tmp_path / "taken")))
    node.publish("main", numbers(0, 100))
    disk.fill()
    pipeline.start()
    wait_until(has_reason(pipeline, "main", "No space left"), "the lane to say so", PATIENCE)
    assert node.queue("main").low == 0
    disk.unfill()
    wait_until(lambda: node.queue("taken").low == 100, "room to be used", PATIENCE)

    make_room = fill_disk(disk, ".commit")
    node.publish("main", numbers(100, 200))
    wait_until(has_reason(pipeline, "main", "cannot commit: No space left"), "to say so", PATIENCE)
    assert node.queue("main").low == 100
    make_room()
    wait_until(lambda: node.queue("taken").low == 200, "room to be used", PATIENCE)

    node.publish("main", numbers(200, 300))
    make_room = fill_disk(disk, ".chunk")
    wait_until(
        lambda: "queue.write_failed queue=taken" in caplog.text, "the node to say so", PATIENCE
    )
    make_room()
    wait_until(lambda: node.queue("taken").low == 300, "room to be used", PATIENCE)
    pipeline.stop()
    assert node.queue("taken").end == 300, "each event arrived once"
    assert node.queue("main").low == 300
    assert set(values(tmp_path / "taken")) == {*numbers(0, 300)}
