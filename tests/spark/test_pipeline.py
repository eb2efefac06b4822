"""Each event goes where its filter says, once, independently of other lanes."""

from __future__ import annotations

import json
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.contract.harness import wait_until
from tests.spark.nodes import Served, serving
from turnlane.delivery.settings import DeliverySettings
from turnlane.errors import ConfigError
from turnlane.formats.parse_settings import ParseSettings
from turnlane.outputs import api
from turnlane.outputs.api import OutputSettings
from turnlane.outputs.file import FileOutput, FileOutputSettings
from turnlane.outputs.spark import SparkSinkSettings
from turnlane.pipeline.settings import ActionSettings, LaneSettings, PipelineSettings
from turnlane.queues.settings import QueueSettings
from turnlane.spark.checkpoints import to_spark_uri
from turnlane.spark.lane import LaneState
from turnlane.spark.pipeline import Pipeline
from turnlane.spark.session import override_settings

PATIENCE = 180.0
LANES = ("main", "main.dead", "alerts", "archive", "counts", "broken")

Make = Callable[..., Pipeline]


def queue(name: str) -> QueueSettings:
    return QueueSettings.of(kind="disk", name=name, path=Path(name))


def messages(first: int, end: int) -> list[bytes]:
    """Return syslog messages with each severity in turn."""
    head = b"<%d>1 2026-11-16T05:00:00Z host app - - - message %d"
    return [head % (8 + number % 8, number) for number in range(first, end)]


def numbers(path: Path) -> list[int]:
    """Return the messages in a file of JSON lines."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [int(json.loads(line)["message"].split()[1]) for line in lines]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "data", {name: {} for name in LANES}) as served:
        yield served


@pytest.fixture
def make(spark: SparkSession, node: Served, tmp_path: Path) -> Iterator[Make]:
    made: list[Pipeline] = []

    def pipeline(*actions: ActionSettings, **settings: Any) -> Pipeline:
        parse = ParseSettings.model_validate(settings.pop("parse", "syslog"))
        described = PipelineSettings(parse=parse, actions=actions, **settings)
        made.append(Pipeline(described, {"endpoint": node.url}, spark, tmp_path / "checkpoints"))
        return made[-1]

    yield pipeline
    for each in made:
        each.stop()


def wait_until_empty(node: Served, *queues: str) -> Callable[[], bool]:
    return lambda: all(node.queue(name).low == node.queue(name).end > 0 for name in queues)


def make_file_output(path: Path) -> FileOutputSettings:
    return FileOutputSettings(type="file", path=path)


def test_each_action_gets_the_events_of_its_filter(
    spark: SparkSession, node: Served, make: Make, tmp_path: Path
) -> None:
    """A pipeline with direct, queued and discarding actions, a Spark sink, and SQL with state."""
    counting = (
        "SELECT severity, count(*) AS events FROM events "
        "GROUP BY window(timestamp, '1 hour'), severity"
    )
    pipeline = make(
        ActionSettings(name="noise", filter="severity = 7", output=OutputSettings(type="discard")),
        ActionSettings(
            name="alerts",
            filter="severity <= 3",
            queue=queue("alerts"),
            output=make_file_output(tmp_path / "alerts"),
        ),
        ActionSettings(name="all", output=make_file_output(tmp_path / "all")),
        ActionSettings(
            name="archive",
            queue=queue("archive"),
            lane=LaneSettings(min_events=1),
            output=SparkSinkSettings(
                type="spark", format="parquet", path=str(tmp_path / "archive")
            ),
        ),
        ActionSettings(
            name="counts",
            filter="severity < 2",
            queue=queue("counts"),
            sql=counting,
            watermark=60.0,
            output_mode="update",
            output=make_file_output(tmp_path / "counts"),
        ),
    )
    assert len(pipeline.status()) == 0
    listeners = len(spark.streams._jsqm.listListeners())
    node.publish("main", messages(0, 800))
    pipeline.start()
    assert len(pipeline.status()) == 1 + 3, (
        "the main lane and one lane for each action with a queue"
    )
    wait_until(wait_until_empty(node, "main", "alerts", "archive", "counts"), "all lanes", PATIENCE)
    expected = {"main": 800, "alerts": 400, "archive": 700, "counts": 200}

    def are_all_counted() -> bool:
        return {status.name: status.rows for status in pipeline.status()} == expected

    wait_until(are_all_counted, "the rows of all lanes", PATIENCE)
    pipeline.stop()
    kept = [number for number in range(800) if number % 8 != 7]
    assert sorted(numbers(tmp_path / "alerts")) == [n for n in range(800) if n % 8 <= 3]
    assert sorted(numbers(tmp_path / "all")) == kept, "events discarded before are missing"
    archive = spark.read.parquet(str(tmp_path / "archive"))
    assert sorted(int(row.message.split()[1]) for row in archive.collect()) == kept
    totals: Counter[int] = Counter()
    for line in (tmp_path / "counts").read_text().splitlines():
        row = json.loads(line)
        totals[row["severity"]] = max(totals[row["severity"]], row["events"])
    assert totals == {0: 100, 1: 100}
    assert len(spark.streams._jsqm.listListeners()) == listeners, "there are no listeners left"


def test_raw_outputs_get_values_with_any_filter(node: Served, make: Make, tmp_path: Path) -> None:
    """Only filters read parsed columns: queues store the raw events."""
    raw = {
        name: FileOutputSettings(type="file", path=tmp_path / name, format="raw")
        for name in ("alerts", "archive", "direct")
    }
    by_name = "app_name = 'app' AND severity <= 5"
    pipeline = make(
        ActionSettings(
            name="alerts", filter="severity <= 3", queue=queue("alerts"), output=raw["alerts"]
        ),
        ActionSettings(
            name="archive", filter=by_name, queue=queue("archive"), output=raw["archive"]
        ),
        ActionSettings(name="direct", filter="facility = 1", output=raw["direct"]),
    )
    sent = messages(0, 80)
    node.publish("main", sent)
    pipeline.start()
    wait_until(wait_until_empty(node, "main", "alerts", "archive"), "all lanes", PATIENCE)
    pipeline.stop()
    for name, most in (("alerts", 3), ("archive", 5), ("direct", 7)):
        lines = (tmp_path / name).read_bytes().splitlines()
        assert sorted(lines) == sorted(each for at, each in enumerate(sent) if at % 8 <= most)
    assert "app_name" not in node.queue("archive").columns()


def test_binary_values_are_complete_in_json_files(node: Served, make: Make, tmp_path: Path) -> None:
    """Written by the main lane, and by a lane of its own."""
    sent = [b"\xff\xfe\x00abc", b"plain", bytes(range(256))]
    pipeline = make(
        ActionSettings(name="all", output=make_file_output(tmp_path / "all")),
        ActionSettings(
            name="alerts", queue=queue("alerts"), output=make_file_output(tmp_path / "alerts")
        ),
        parse="none",
    )
    node.publish("main", sent)
    pipeline.start()
    wait_until(wait_until_empty(node, "main", "alerts"), "all lanes", PATIENCE)
    pipeline.stop()
    for name in ("all", "alerts"):
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert sorted(map(get_value, rows)) == sorted(sent)
        assert [row["value"] for row in rows if "value" in row] == ["plain"]


def get_value(row: dict[str, str]) -> bytes:
    text = row.get("value")
    return b64decode(row["value_base64"]) if text is None else text.encode()


@pytest.mark.parametrize("condition", [None, "severity = 7"])
def test_pipeline_that_only_discards_settles_all_events(
    node: Served, make: Make, condition: str | None
) -> None:
    """Events that no filter takes are settled as well."""
    nowhere = OutputSettings(type="discard")
    pipeline = make(ActionSettings(name="noise", filter=condition, output=nowhere))
    node.publish("main", messages(0, 80))
    pipeline.start()
    wait_until(wait_until_empty(node, "main"), "the main lane", PATIENCE)
    node.publish("main", messages(80, 100))
    wait_until(wait_until_empty(node, "main"), "its next batch", PATIENCE)
    pipeline.stop()
    ledger = node.queue("main").stats().ledger
    assert ledger.adds_up
    assert (ledger.accepted, ledger.delivered, ledger.pending) == (100, 100, 0)


def archive(path: Path) -> ActionSettings:
    """A sink of files that needs the checkpoint with which it was started."""
    return ActionSettings(
        name="archive",
        queue=queue("archive"),
        lane=LaneSettings(min_events=1),
        output=SparkSinkSettings(type="spark", format="parquet", path=path.as_uri()),
    )


def test_checkpoint_given_as_a_path_is_found_again(
    spark: SparkSession,
    node: Served,
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in a directory whose name contains characters that URIs escape."""
    odd = tmp_path / "checkpoints of ü#1?50%20"
    settings = make(archive(tmp_path / "archive"))._settings
    commits: list[set[str]] = []
    for at, given in enumerate((str, to_spark_uri)):
        monkeypatch.setattr("turnlane.spark.pipeline.to_spark_uri", given)
        pipeline = Pipeline(settings, {"endpoint": node.url}, spark, odd)
        node.publish("main", messages(8 * at, 8 * at + 8))
        pipeline.start()
        wait_until(lambda: settled(node, "archive", 8 * at + 8), f"run {at}", PATIENCE)  # noqa: B023
        pipeline.stop()
        [checkpoint] = (each for each in odd.iterdir() if each.name.startswith("archive-"))
        commits.append({each.name for each in (checkpoint / "commits").glob("[0-9]*")})
    rows = spark.read.parquet(str(tmp_path / "archive")).collect()
    assert sorted(int(row.message.split()[1]) for row in rows) == list(range(16))
    # A batch may have no events on a busy machine, so their number is not fixed.
    assert set() < commits[0] < commits[1], "the second run continues the batches of the first"
    assert [each.name for each in tmp_path.glob("checkpoints*")] == [odd.name]


def settled(node: Served, name: str, count: int) -> bool:
    return node.queue(name).low >= count


def test_checkpoints_are_local_with_any_default_file_system(
    spark: SparkSession, node: Served, make: Make, tmp_path: Path
) -> None:
    pipeline = make(archive(tmp_path / "archive"))
    node.publish("main", messages(0, 8))
    with override_settings(spark, {"fs.defaultFS": "nowhere://far/"}):
        pipeline.start()
        wait_until(wait_until_empty(node, "main", "archive"), "all lanes", PATIENCE)
        pipeline.stop()
    assert any((tmp_path / "checkpoints").glob("archive-*/commits/0"))


def test_unparsed_events_become_dead_letters_and_lanes_read_json(
    node: Served, make: Make, tmp_path: Path
) -> None:
    raw = FileOutputSettings(type="file", path=tmp_path / "raw", format="raw")
    pipeline = make(
        ActionSettings(name="raw", output=raw),
        ActionSettings(name="all", output=make_file_output(tmp_path / "all")),
        ActionSettings(
            name="alerts",
            filter="try_variant_get(data, '$.level', 'int') > 1",
            queue=queue("alerts"),
            sql="SELECT data:level::int AS level, data:text::string AS text FROM events",
            output=make_file_output(tmp_path / "alerts"),
        ),
        parse={"format": "json", "on_error": "dead"},
    )
    good = [b'{"level": 1, "text": "one"}', b'{"level": 2, "text": "two"}']
    node.publish("main", [*good, b"no json"])
    pipeline.start()
    wait_until(wait_until_empty(node, "main", "alerts"), "the lanes", PATIENCE)
    pipeline.stop()
    assert (tmp_path / "raw").read_bytes().splitlines() == good
    lines = [json.loads(line) for line in (tmp_path / "all").read_text().splitlines()]
    assert [line["data"]["text"] for line in lines] == ["one", "two"]
    assert json.loads((tmp_path / "alerts").read_text()) == {"level": 2, "text": "two"}
    assert node.values("main.dead") == [b"no json"]
    found = node.queue("main.dead").read(0, 10)
    assert found is not None
    assert found[1].column("parse_error").to_pylist()[0]


def test_failing_lane_does_not_affect_others(node: Served, make: Make, tmp_path: Path) -> None:
    """Its file is a directory: other lanes run, its backlog is kept, the reason is shown."""
    (tmp_path / "broken").mkdir()
    soon = DeliverySettings(backoff=0.1, max_backoff=0.1, breaker_failures=2, breaker_reset=0.5)
    pipeline = make(
        ActionSettings(
            name="broken",
            queue=queue("broken"),
            delivery=soon,
            output=make_file_output(tmp_path / "broken"),
        ),
        ActionSettings(
            name="alerts", queue=queue("alerts"), output=make_file_output(tmp_path / "alerts")
        ),
    )
    node.publish("main", messages(0, 100))
    pipeline.start()
    wait_until(wait_until_empty(node, "main", "alerts"), "the healthy lanes", PATIENCE)

    def broken() -> Any:
        return next(status for status in pipeline.status() if status.name == "broken")

    wait_until(lambda: broken().suspended is not None, "the reason to be shown", PATIENCE)
    assert "Is a directory" in broken().suspended
    wait_until(lambda: broken().state is LaneState.RUNNING, "its first batch to end", PATIENCE)
    assert node.queue("broken").low == 0
    assert sorted(numbers(tmp_path / "alerts")) == list(range(100))
    (tmp_path / "broken").rmdir()
    wait_until(wait_until_empty(node, "broken"), "it to recover by itself", PATIENCE)
    wait_until(lambda: broken().suspended is None, "that to be shown", PATIENCE)
    assert broken().restarts == 0
    pipeline.stop()
    assert sorted(numbers(tmp_path / "broken")) == list(range(100))
    assert all(status.state is LaneState.STOPPED for status in pipeline.status())


def test_lane_continues_at_its_cursor(node: Served, make: Make, tmp_path: Path) -> None:
    """Its checkpoint is removed and its filter changes: no event is lost or repeated."""
    node.publish("main", messages(0, 100))
    for filter_ in ("severity < 4", "severity >= 4"):
        pipeline = make(
            ActionSettings(
                name="alerts",
                filter=filter_,
                queue=queue("alerts"),
                output=make_file_output(tmp_path / "alerts"),
            )
        )
        pipeline.start()
        wait_until(wait_until_empty(node, "main", "alerts"), "the lanes", PATIENCE)
        pipeline.stop()
        node.publish("main", messages(100, 200))
    early = [n for n in range(100) if n % 8 < 4]
    late = [n for n in range(100, 200) if n % 8 >= 4]
    assert sorted(numbers(tmp_path / "alerts")) == early + late


def return_no_frame(events: DataFrame) -> str:
    return "no frame"


def raise_error(events: DataFrame) -> DataFrame:
    raise KeyError("a column")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"filter": "severity <"}, r"actions\[0\].filter: .*PARSE_SYNTAX_ERROR"),
        ({"filter": "sevrity < 3"}, r"actions\[0\].filter: .*sevrity.*"),
        ({"filter": "message"}, r"actions\[0\].filter: "),
        ({"transform": "nowhere.at:all"}, "transform: nowhere.at:all: No module"),
        ({"transform": f"{__name__}:missing"}, "transform: .*missing"),
        ({"transform": f"{__name__}:return_no_frame"}, "must return a DataFrame, not str"),
        ({"transform": f"{__name__}:raise_error"}, r"actions\[0\].transform: .*a column"),
    ],
)
def test_pipeline_that_cannot_run_is_refused_with_its_place(
    change: dict[str, Any], message: str, make: Make, tmp_path: Path
) -> None:
    action = ActionSettings(
        name="alerts", queue=queue("alerts"), output=make_file_output(tmp_path / "x"), **change
    )
    with pytest.raises(ConfigError, match=message):
        make(action).start()


def test_outputs_are_loaded_by_type() -> None:
    assert api.load("file") is FileOutput
    with pytest.raises(ConfigError, match="there is no output 'flie'; did you mean file"):
        api.load("flie")
