"""An event that a lane's own code cannot handle becomes a dead letter; the others go on."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.contract.harness import wait_until
from tests.spark.nodes import Served, numbers, serving
from turnlane.cli.supervise import format_lane_status
from turnlane.client.node_client import Credentials
from turnlane.errors import NoSuchQueue
from turnlane.formats.parse_settings import ParseSettings
from turnlane.outputs.file import FileOutputSettings
from turnlane.outputs.spark import SparkSinkSettings
from turnlane.pipeline.settings import ActionSettings, LaneSettings, PipelineSettings
from turnlane.queues.settings import QueueSettings
from turnlane.spark.isolation import (
    OFFSETS_SHOWN,
    SAMPLES,
    CodeStep,
    EventIsolation,
    Events,
    EventSpan,
    SearchEnded,
    find_bad_events,
)
from turnlane.spark.lane import LaneStatus
from turnlane.spark.nodes import Nodes
from turnlane.spark.pipeline import Pipeline
from turnlane.spark.session import override_settings
from turnlane.spark.steps import LaneStep

PATIENCE = 180.0
QUEUES = ("main", "main.dead", "out", "out.dead")
Caplog = pytest.LogCaptureFixture
pytestmark = pytest.mark.timeout(600)

MODULE = """
import pathlib
from pyspark.sql import functions as F

BROKEN = pathlib.Path("{place}") / "broken"

@F.udf("int", useArrow=False)
def size(value):
    if value == b"bad" or BROKEN.exists():
        raise ValueError("cannot handle " + value.decode())
    return len(value)

def measure(events):
    return events.withColumn("size", size("value"))
"""

_numbers = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with a transform that fails at events with the value ``bad``."""
    name = f"measuring_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(place=tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "data", {name: {} for name in QUEUES}) as served:
        yield served


Make = Callable[..., Pipeline]


@pytest.fixture
def make(spark: SparkSession, node: Served, tmp_path: Path) -> Iterator[Make]:
    """Makes a pipeline with an action ``out`` that has a queue."""
    made: list[Pipeline] = []

    def pipeline(*, of_main: str | None = None, **action: Any) -> Pipeline:
        given = {"output": FileOutputSettings(type="file", path=tmp_path / "out"), **action}
        queue = QueueSettings.of(kind="disk", name="out", path=Path("out"))
        out = ActionSettings(name="out", queue=queue, lane=LaneSettings(min_events=1), **given)
        settings = PipelineSettings(
            parse=ParseSettings.model_validate("none"), transform=of_main, actions=(out,)
        )
        made.append(Pipeline(settings, {"endpoint": node.url}, spark, tmp_path / "checkpoints"))
        return made[-1]

    yield pipeline
    for each in made:
        each.stop()


def get_status(pipeline: Pipeline, name: str) -> LaneStatus:
    (found,) = (each for each in pipeline.status() if each.name == name)
    return found


def is_empty(node: Served, queue: str, count: int) -> bool:
    return node.queue(queue).low == node.queue(queue).end == count


def read_letters(node: Served, queue: str) -> list[tuple[Any, ...]]:
    """Return value, action, reason and error of the dead letters."""
    found = node.queue(queue).read(0, 1000)
    assert found is not None
    columns = ("value", "dead_action", "dead_reason", "dead_error")
    return list(zip(*(found[1].column(name).to_pylist() for name in columns), strict=True))


def read_values(path: Path) -> list[bytes]:
    return sorted(json.loads(line)["value"].encode() for line in path.read_text().splitlines())


def assert_adds_up(node: Served) -> None:
    for name in QUEUES:
        ledger = node.queue(name).stats().ledger
        assert ledger.adds_up, (name, ledger)


GOOD = numbers(0, 300)
SENT = [*GOOD[:100], b"bad", *GOOD[100:250], b"bad", *GOOD[250:]]


# ── the search, without Spark ──


def make_try(bad: set[int], tried: list[int]) -> Callable[[Events], str | None]:
    def try_events(events: Events) -> str | None:
        offsets = [at for each in events for at in range(each.first, each.end)]
        tried.append(len(offsets))
        found = sorted(bad.intersection(offsets))
        return f"bad {found[0]}" if found else None

    return try_events


@pytest.mark.parametrize("bad", [{0}, {999}, {500, 501}, set(range(0, 1000, 90))])
def test_search_finds_exactly_the_bad_events(bad: set[int]) -> None:
    tried: list[int] = []
    spans = [EventSpan("main", 0, 0, 300), EventSpan("main", 1, 300, 301)]
    spans.append(EventSpan("main", 0, 301, 1000))
    found = find_bad_events(spans, make_try(bad, tried))
    assert found.has_passed
    assert [(each.first, each.end, error) for each, error in found.bad] == [
        (at, at + 1, f"bad {at}") for at in sorted(bad)
    ]
    assert len(tried) <= 2 * len(bad) * 11, "it halves"


def test_search_gives_up_no_event_if_none_passes() -> None:
    tried: list[int] = []
    found = find_bad_events([EventSpan("main", 0, 0, 10_000)], make_try(set(range(10_000)), tried))
    assert not found.has_passed
    assert len(found.bad) == SAMPLES, "it does not try them all"


def test_search_goes_on_behind_many_bad_events_in_a_row() -> None:
    bad = set(range(3 * SAMPLES))
    found = find_bad_events([EventSpan("main", 0, 0, 1000)], make_try(bad, []))
    assert found.has_passed
    assert len(found.bad) == len(bad)


def test_search_ends_in_time_with_what_it_has_found() -> None:
    clock = itertools.count(0, 20)
    bad = set(range(0, 1000, 10))
    found = find_bad_events(
        [EventSpan("main", 0, 0, 1000)], make_try(bad, []), lambda: float(next(clock))
    )
    assert 0 < len(found.bad) < len(bad)


def test_search_gives_up_no_good_event_if_one_trial_fails_by_chance() -> None:
    for failing in range(1, 30):
        tried: list[int] = []
        try_bad = make_try({3}, tried)

        def try_events(events: Events, failing: int = failing, tried: list[int] = tried) -> Any:
            error = try_bad(events)  # noqa: B023 - called in this round only
            return "a worker was killed" if len(tried) == failing else error

        try:
            found = find_bad_events([EventSpan("main", 0, 0, 16)], try_events)
        except SearchEnded:
            continue
        assert [each.first for each, _ in found.bad] == [3], failing


def test_search_gives_up_no_event_if_those_that_passed_fail_at_the_end() -> None:
    tried: list[int] = []
    try_bad = make_try({900}, tried)
    errors: list[str | None] = []

    def try_events(events: Events) -> str | None:
        errors.append("Spark has stopped" if None in errors else try_bad(events))
        return errors[-1]

    with pytest.raises(SearchEnded, match="Spark has stopped"):
        find_bad_events([EventSpan("main", 0, 0, 1000)], try_events)


# ── the search with Spark, without lanes ──


class MadeCode:
    """A lane's code of two steps; the first one fails at some events."""

    def __init__(self, spark: SparkSession, node: Served, *bad: EventSpan) -> None:
        self._spark = spark
        self._bad = bad
        self.named: list[EventSpan] = []
        """The events whose failing step was looked for."""
        self.on_named: Callable[[], None] = lambda: None
        steps = [CodeStep("the first step", self._name), CodeStep("the lane", self._apply)]
        letters = LaneStep(action="main", source_queue="main", dead_letters="main.dead")
        nodes = Nodes(node.url, Credentials())
        self.isolation = EventIsolation(nodes, ["main", "more"], steps, letters, 1000)

    def _name(self, events: Events) -> DataFrame:
        self.named += events
        self.on_named()
        return self._apply(events)

    def _apply(self, events: Events) -> DataFrame:
        fails = any(
            bad.queue == each.queue and each.first <= bad.first < each.end
            for bad in self._bad
            for each in events
        )
        return self._spark.range(1).selectExpr("raise_error('a bad value')" if fails else "id")


def test_step_is_looked_for_at_the_first_bad_events_only(spark: SparkSession, node: Served) -> None:
    node.node.create("more")
    node.publish("main", numbers(0, 10))
    bad = [EventSpan("main", 0, at, at + 1) for at in range(1, 9)]
    code = MadeCode(spark, node, *bad)
    assert code.isolation.isolate(lambda: False).dead == 8
    assert code.named == bad[:OFFSETS_SHOWN]
    errors = [each[3] for each in read_letters(node, "main.dead")]
    assert [each.partition(":")[0] for each in errors] == (
        ["the first step"] * OFFSETS_SHOWN + ["the lane's code"] * 3
    )
    assert all("a bad value" in each for each in errors)
    assert_adds_up(node)


def test_dead_letters_of_a_queue_are_logged_if_the_next_commit_fails(
    spark: SparkSession, node: Served, caplog: Caplog
) -> None:
    node.node.create("more")
    node.publish("main", numbers(0, 4))
    node.publish("more", numbers(0, 4))
    code = MadeCode(spark, node, EventSpan("main", 0, 1, 2), EventSpan("more", 0, 2, 3))

    def drop_at_the_second() -> None:
        if len(code.named) == 2:
            node.node.drop("more")

    code.on_named = drop_at_the_second
    with pytest.raises(NoSuchQueue, match="more"):
        code.isolation.isolate(lambda: False)
    assert node.values("main.dead") == [b"1"]
    (line,) = [each for each in caplog.messages if each.startswith("lane.events_dead")]
    assert 'events=1 offsets="main 1"' in line


def test_scattered_events_are_read_by_a_few_tasks(spark: SparkSession, node: Served) -> None:
    values = numbers(0, 400)
    node.publish("main", values)
    spans = json.dumps([(0, at, at + 1) for at in range(0, 400, 2)])
    options = {"endpoint": node.url, "queue": "main", "spans": spans}
    events = spark.read.format("turnlane").options(**options).load()
    assert events.rdd.getNumPartitions() <= 2
    assert sorted(bytes(row.value) for row in events.collect()) == sorted(values[::2])


STOPPED_SPARK = """
import sys
from pathlib import Path
from tests.spark.nodes import numbers, serving
from turnlane.client.node_client import Credentials
from turnlane.pipeline.settings import SparkSettings
from turnlane.spark.isolation import CodeStep, EventIsolation, SearchEnded
from turnlane.spark.nodes import Nodes
from turnlane.spark.session import open_session
from turnlane.spark.steps import LaneStep

spark = open_session(SparkSettings(master="local[1]", app_name="stopped"))

def stop_and_build(events):
    spark.sparkContext._jsc.sc().stop()
    return spark.range(1)

with serving(Path(sys.argv[1]), {"main": {}, "main.dead": {}}) as node:
    node.publish("main", numbers(0, 10))
    letters = LaneStep(action="main", source_queue="main", dead_letters="main.dead")
    nodes, steps = Nodes(node.url, Credentials()), [CodeStep("the lane", stop_and_build)]
    try:
        print(EventIsolation(nodes, ["main"], steps, letters, 100).isolate(lambda: False))
    except SearchEnded as error:
        print("ended:", error)
spark.stop()
"""


def test_stopped_spark_is_no_fault_of_the_code(tmp_path: Path) -> None:
    program = [sys.executable, "-c", STOPPED_SPARK, str(tmp_path / "data")]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ended: "), done.stdout
    assert "stopped SparkContext" in done.stdout


# ── lanes ──


@pytest.mark.parametrize("place", ["main", "out"])
def test_event_that_a_transform_cannot_handle_is_a_dead_letter(
    node: Served, make: Make, module: str, *, tmp_path: Path, place: str, caplog: Caplog
) -> None:
    name = f"{module}:measure"
    pipeline = make(of_main=name) if place == "main" else make(transform=name)
    node.publish("main", SENT)
    pipeline.start()
    wait_until(lambda: is_empty(node, "main", 302), "the main lane", PATIENCE)
    passed = 300 if place == "main" else 302
    wait_until(lambda: is_empty(node, "out", passed), "the lane", PATIENCE)
    pipeline.stop()
    error = f"the transform {name}: ValueError: cannot handle bad"
    assert read_letters(node, f"{place}.dead") == [(b"bad", place, "StepFailed", error)] * 2
    assert read_values(tmp_path / "out") == sorted(GOOD)
    assert_adds_up(node)
    assert node.queue(place).stats().ledger.dead == 2
    (line,) = [each for each in caplog.messages if each.startswith("lane.events_dead")]
    assert f'lane={place} events=2 offsets="{place} 100, {place} 251"' in line


@pytest.mark.parametrize("output_format", ["json", "raw"])
def test_event_that_a_filter_cannot_handle_is_a_dead_letter(
    spark: SparkSession,
    node: Served,
    make: Make,
    tmp_path: Path,
    output_format: Literal["json", "raw"],
) -> None:
    """With raw outputs, the main lane copies events by reference."""
    output = FileOutputSettings(type="file", path=tmp_path / "out", format=output_format)
    with override_settings(spark, {"spark.sql.ansi.enabled": "true"}):
        pipeline = make(filter="CAST(CAST(value AS string) AS int) >= 0", output=output)
        node.publish("main", SENT)
        pipeline.start()
        wait_until(lambda: is_empty(node, "main", 302), "the main lane", PATIENCE)
        wait_until(lambda: is_empty(node, "out", 300), "the lane", PATIENCE)
        pipeline.stop()
    letters = read_letters(node, "main.dead")
    assert [each[:3] for each in letters] == [(b"bad", "main", "StepFailed")] * 2
    assert letters[0][3].startswith("the filter of out: [CAST_INVALID_INPUT] The value 'bad'")
    assert_adds_up(node)


def test_code_at_which_every_event_fails_suspends_the_lane_until_it_works(
    node: Served, make: Make, module: str, tmp_path: Path, caplog: Caplog
) -> None:
    pipeline = make(of_main=f"{module}:measure")
    (tmp_path / "broken").touch()
    node.publish("main", GOOD)
    pipeline.start()
    wait_until(lambda: get_status(pipeline, "main").suspended, "the suspension", PATIENCE)
    expected = f"suspended: no event passes the transform {module}:measure: ValueError: cannot"
    assert expected in format_lane_status(get_status(pipeline, "main"))
    assert any(each.startswith("lane.suspended lane=main") for each in caplog.messages)
    assert node.queue("main").low == 0
    (tmp_path / "broken").unlink()
    wait_until(lambda: is_empty(node, "out", 300), "all events", PATIENCE)
    wait_until(lambda: get_status(pipeline, "main").suspended is None, "the end of it", PATIENCE)
    pipeline.stop()
    assert node.queue("main.dead").end == 0, "no event was given up"
    assert read_values(tmp_path / "out") == sorted(GOOD)


def test_single_bad_event_waits_until_another_event_passes(
    node: Served, make: Make, module: str
) -> None:
    """Alone it says nothing about the code."""
    pipeline = make(of_main=f"{module}:measure")
    node.publish("main", [b"bad"])
    pipeline.start()
    wait_until(lambda: get_status(pipeline, "main").suspended, "the suspension", PATIENCE)
    assert node.queue("main.dead").end == 0
    node.publish("main", [b"good"])
    wait_until(lambda: is_empty(node, "out", 1), "the good event", PATIENCE)
    pipeline.stop()
    assert node.values("main.dead") == [b"bad"]


@pytest.mark.parametrize("sink", ["file", "parquet"])
def test_event_that_sql_with_state_cannot_handle_is_a_dead_letter(
    spark: SparkSession, node: Served, make: Make, tmp_path: Path, sink: str
) -> None:
    """Spark repeats the batch with the same offsets, but without the event."""
    output: Any = FileOutputSettings(type="file", path=tmp_path / "out")
    if sink == "parquet":
        output = SparkSinkSettings(type="spark", format="parquet", path=str(tmp_path / "files"))
    sql = (
        "SELECT window.start, sum(CASE WHEN value = X'626164' THEN raise_error('a bad value') "
        "ELSE 1 END) AS events FROM events GROUP BY window(timestamp, '1 hour')"
    )
    pipeline = make(sql=sql, watermark=60.0, output=output)
    pipeline.start()
    start = 1_700_000_000_000_000
    for at, values in enumerate((GOOD, SENT, [b"end"])):
        node.publish("main", values, timestamps=start + at * 7_200_000_000)
        count = (300, 602, 603)[at]
        wait_until(lambda count=count: is_empty(node, "out", count), "the lane", PATIENCE)  # type: ignore[misc]

    def count_rows() -> list[int]:
        if sink == "parquet":
            files = spark.read.schema("events long").parquet(str(tmp_path / "files"))
            return [row.events for row in files.collect()]
        lines = (tmp_path / "out").read_text().splitlines()
        return [json.loads(line)["events"] for line in lines]

    wait_until(lambda: len(count_rows()) == 2, "the first windows", PATIENCE)
    pipeline.stop()
    assert count_rows() == [300, 300], "the counts of before are kept, and nothing counts twice"
    letters = read_letters(node, "out.dead")
    assert [each[:3] for each in letters] == [(b"bad", "out", "StepFailed")] * 2
    assert letters[0][3].startswith("the sql: ")
    assert "a bad value" in letters[0][3]
    assert_adds_up(node)
