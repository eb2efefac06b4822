"""Several nodes: a node that is away delays only its events, and each event arrives once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from tests.contract.harness import wait_until
from tests.spark.nodes import Served, numbers, serving
from turnlane.client.node_client import Credentials
from turnlane.delivery.destination import SendPermit, SendReport
from turnlane.errors import StorageFailed
from turnlane.formats.parse_settings import ParseSettings
from turnlane.key_hash import find_node
from turnlane.ledger import Outcome
from turnlane.outputs.file import FileOutputSettings
from turnlane.pipeline.settings import ActionSettings, PipelineSettings
from turnlane.queues.settings import QueueSettings
from turnlane.spark.nodes import BreakerClient, Nodes, split_by_content
from turnlane.spark.pipeline import PipelinePlan, PipelineRunner
from turnlane.spark.steps import LaneStep

PATIENCE = 180.0
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "first", {"main": {}}) as served:
        yield served


@pytest.fixture
def port(tmp_path: Path) -> int:
    """The address of the second node."""
    with serving(tmp_path / "elsewhere", {}) as served:
        return served.plane.address.port


@pytest.fixture
def runner(
    spark: SparkSession, first: Served, port: int, tmp_path: Path
) -> Iterator[Callable[[], PipelineRunner]]:
    runner = PipelineRunner(spark)

    def start() -> PipelineRunner:
        wanted = QueueSettings.of(kind="disk", name="taken", path=Path("taken"))
        output = FileOutputSettings(type="file", path=tmp_path / "taken")
        action = ActionSettings(name="taken", queue=wanted, output=output)
        settings = PipelineSettings(parse=ParseSettings(), actions=(action,))
        access = {"endpoint": f"{first.url},127.0.0.1:{port}"}
        runner.start(
            PipelinePlan(settings, {"main": {}, "taken": {}}, access, tmp_path / "checkpoints")
        )
        return runner

    yield start
    runner.stop()


def test_failed_events_that_are_settled_without_a_send_are_forgotten(
    first: Served, tmp_path: Path
) -> None:
    step = LaneStep(action="send", source_queue="main")
    with serving(tmp_path / "second", {}) as second:
        second.node.create("main")
        places = f"{first.url},{second.plane.address}"
        breakers = BreakerClient(Nodes(places, Credentials()))
        for served in (first, second):
            served.publish("main", numbers(0, 10))
        with breakers.open_destination("send", step, lambda: (0, 0)) as task:
            failed = {"main/0": [(0, 5)], "main/1": [(2, 8)], "another/0": [(0, 2)]}
            task.report(SendReport(failed=failed))
        first.queue("main").settle(0, 6, Outcome.DEAD)
        second.queue("main").settle(0, 4, Outcome.DEAD)
        with breakers.open_destination("send", step, lambda: (0, 0)) as task:
            left = {"main/1": [(4, 8)], "another/0": [(0, 2)]}
            assert _get_spans(task.request_permit()) == left
        second.node.drop("main")
        with breakers.open_destination("send", step, lambda: (0, 0)) as task:
            assert _get_spans(task.request_permit()) == left, "a node without the queue is no error"
        destination = first.node.breakers.of("send").destination
        assert _get_spans(destination.request_permit()) == left, "the node has forgotten them"


def _get_spans(permit: SendPermit) -> dict[str, list[tuple[int, ...]]]:
    return {source: [tuple(each) for each in spans] for source, spans in permit.failed.items()}


def taken(place: Path) -> set[bytes]:
    """Return the delivered values."""
    file = place / "taken"
    lines = file.read_text().splitlines() if file.exists() else []
    return {json.loads(line)["value"].encode() for line in lines}


def test_node_that_is_away_delays_only_its_events(
    runner: Callable[[], PipelineRunner], first: Served, port: int, tmp_path: Path
) -> None:
    """The node is away when the lanes start, joins, leaves while they run, and returns."""
    first.publish("main", numbers(0, 100))
    started = runner()
    wait_until(lambda: taken(tmp_path) == {*numbers(0, 100)}, "what is there to come", PATIENCE)
    assert all(status.reason is None for status in started.status())

    second = tmp_path / "second"
    with serving(second, {"main": {}}, port=port) as served:
        served.publish("main", numbers(100, 200))
        wait_until(lambda: taken(tmp_path) == {*numbers(0, 200)}, "its events", PATIENCE)
        assert served.queue("taken").end == 100, "missing queues were created"

    first.publish("main", numbers(200, 300))
    expected = {*numbers(0, 300)}
    wait_until(lambda: taken(tmp_path) == expected, "the other one's events", PATIENCE)

    with serving(second, {"main": {}}, port=port) as served:
        served.publish("main", numbers(300, 400))
        wait_until(lambda: taken(tmp_path) == {*numbers(0, 400)}, "all of them", PATIENCE)
        started.stop()
        for node, count in ((first, 200), (served, 200)):
            assert node.queue("taken").end == count, "each event is in the action's queue once"
            assert node.queue("main").low == node.queue("main").end == count


# ── writing ──


def test_rows_go_to_the_node_of_their_key_or_value() -> None:
    values = [b"%d" % number for number in range(1000)]
    keys = [None if number % 3 else f"k{number}" for number in range(1000)]
    rows = pa.RecordBatch.from_arrays(
        [pa.array(values, pa.binary()), pa.array(keys, pa.string())], names=["value", "key"]
    )

    def places(batches: list[pa.RecordBatch]) -> dict[bytes | None, int]:
        return {
            value: node
            for batch in batches
            for node, part in split_by_content(batch, 3)
            for value in part.column("value").to_pylist()
        }

    whole = places([rows])
    assert whole == places([rows.slice(at, 7) for at in range(0, 1000, 7)])
    assert {whole[value] for value in values} == {0, 1, 2}
    for value, key in zip(values, keys, strict=True):
        assert whole[value] == find_node(value.decode() if key is None else key, 3)


def test_rows_without_key_and_value_have_a_node() -> None:
    rows = pa.RecordBatch.from_arrays([pa.array([None, None], pa.binary())], names=["value"])
    assert [(node, part.num_rows) for node, part in split_by_content(rows, 2)] == [(0, 2)]


def test_repeated_batch_is_recognised_on_every_node(
    spark: SparkSession,
    first: Served,
    port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One node has committed the batch, the other has not: it is repeated, cut differently."""

    def refuse(*_: object) -> bool:
        raise StorageFailed("no room for a commit")

    with serving(tmp_path / "second", {"all": {}}, port=port) as second:
        first.node.create("all")
        first.publish("main", numbers(0, 200))
        both = f"{first.url},{second.plane.address}"
        with monkeypatch.context() as broken:
            broken.setattr(second.node.commits, "commit", refuse)
            with pytest.raises(StreamingQueryException, match="no room for a commit"):
                write(read(spark, first, tasks=1), both, tmp_path / "c")
        assert first.values("all"), "half of it is there"
        assert not second.values("all")
        write(read(spark, first, tasks=3), both, tmp_path / "c")
        assert sorted(first.values("all") + second.values("all")) == sorted(numbers(0, 200))
        assert second.values("all")


def read(spark: SparkSession, node: Served, *, tasks: int) -> DataFrame:
    options = {"endpoint": node.url, "consume": "false", "minPartitions": str(tasks)}
    return spark.readStream.format("turnlane").options(**options).load("main")


def write(source: DataFrame, endpoint: str, checkpoint: Path) -> None:
    query = (
        source.select("value")
        .writeStream.format("turnlane")
        .options(endpoint=endpoint, queue="all", checkpointLocation=str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
