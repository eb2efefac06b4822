"""Plans of pipelines: copying by reference, joins, values that do not fit, sinks, checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit

from tests.contract.harness import wait_until
from tests.spark.nodes import Served, serving
from turnlane.config import Config, loads
from turnlane.errors import ConfigError
from turnlane.formats.parse_settings import Format, ParseSettings
from turnlane.spark.parsing import parse_events
from turnlane.spark.pipeline import Pipeline

PATIENCE = 180.0

Make = Callable[..., tuple[Pipeline, Served]]


@pytest.fixture
def make(spark: SparkSession, tmp_path: Path) -> Iterator[Make]:
    """Create a node with the queues of a configuration, and its pipeline; ``HERE`` is a path."""
    opened: list[Any] = []

    def made(text: str) -> tuple[Pipeline, Served]:
        config = loads(f"node: {{data: d}}\n{text}".replace("HERE", str(tmp_path)))
        node = serving(tmp_path / "data", config.knobs())
        served = node.__enter__()
        pipeline = make_pipeline(config, spark, served.url, tmp_path)
        opened.extend([lambda: node.__exit__(None, None, None), pipeline.stop])
        return pipeline, served

    yield made
    for close in reversed(opened):
        close()


def make_pipeline(
    config: Config, spark: SparkSession, url: str = "turnlane://nowhere:1", place: Path = Path()
) -> Pipeline:
    settings = config.pipeline()
    assert settings is not None
    return Pipeline(settings, {"endpoint": url}, spark, place / "checkpoints")


def has_lines(path: Path, count: int) -> bool:
    return len(lines(path)) >= count


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("filters", "may_group"),
    [
        (["severity <= 3", "facility = 1 AND source = 's1'", "NOT (severity > 5)"], True),
        (["offset % 3 = 1", "queue = 'main' AND severity = 2"], False),
        (["rand() >= 0", "severity = 2"], False),
        (["true"], True),
        (["length(value) = 5", "severity = 2"], False),
    ],
    ids=["by look", "by place", "by chance", "all", "by value"],
)
def test_copying_by_reference_routes_events_by_their_filters(
    make: Make, spark: SparkSession, tmp_path: Path, filters: list[str], may_group: bool
) -> None:
    actions = "".join(
        f'  - {{name: a{at}, filter: "{each}", queue: disk, '
        f"output: {{type: file, path: HERE/{at}, format: raw}}}}\n"
        for at, each in enumerate(filters)
    )
    parse = "none" if filters == ["true"] else "syslog"
    pipeline, node = make(f"parse: {parse}\nactions:\n{actions}")
    values = [b"<%d>%d" % (at % 24, at) for at in range(300)]
    sources = [f"s{at % 2}" for at in range(300)]
    node.publish("main", values, sources=sources)
    columns = "value binary, source string, offset bigint, severity tinyint, timestamp timestamp"
    rows = [(value, sources[at], at, None, None) for at, value in enumerate(values)]
    events = parse_events(spark.createDataFrame(rows, columns), ParseSettings(format=Format.SYSLOG))
    events = events.withColumn("queue", lit("main"))
    pipeline.start()
    for at, each in enumerate(filters):
        expected = sorted(bytes(row.value) for row in events.where(each).collect())
        assert expected
        path = tmp_path / str(at)
        wait_until(partial(has_all_lines, path, expected), f"all of {each}", PATIENCE)
        assert sorted(path.read_bytes().splitlines()) == expected
    main = next(each for each in spark.streams.active if each.name == "main")
    assert pipeline.status()[0].rows == 300
    assert (sum(each.numInputRows for each in main.recentProgress) < 300) == may_group


def has_all_lines(path: Path, expected: list[bytes]) -> bool:
    return path.exists() and len(path.read_bytes().splitlines()) >= len(expected)


def test_join_settles_the_events_of_the_joined_queue(make: Make, tmp_path: Path) -> None:
    """A queue with any name is joined, with columns of JSON and without a lane of its own."""
    pipeline, node = make("""
parse: json
actions:
  - {name: web-1.logins, filter: "data:kind::string = 'login'", queue: disk,
     output: {type: discard}}
  - name: j
    filter: data:kind::string = 'order'
    queue: disk
    sql: SELECT e.data:id::int AS id, l.data:user::string AS user
         FROM events e JOIN `web-1.logins` l ON e.data:user::string = l.data:user::string
    with_queues: [web-1.logins]
    output: {type: file, path: HERE/joined}
""")
    pipeline.start()
    assert [lane.name for lane in pipeline.status()] == ["main", "j"]
    for number in range(2):  # A batch is settled when the next one begins.
        node.publish("main", [b'{"kind": "login", "user": "u%d"}' % number])
        node.publish("main", [b'{"kind": "order", "id": %d, "user": "u%d"}' % (number, number)])
        wait_until(partial(has_lines, tmp_path / "joined", number + 1), "a join", PATIENCE)
    assert sorted((row["id"], row["user"]) for row in lines(tmp_path / "joined")) == [
        (number, f"u{number}") for number in range(2)
    ]
    wait_until(lambda: node.queue("web-1.logins").low > 0, "settled", PATIENCE)


def test_value_that_does_not_fit_passes_no_filter_and_stops_no_lane(
    make: Make, tmp_path: Path
) -> None:
    pipeline, node = make("""
parse: {format: json, columns: {direct: d, hollows: h, event_row: n}}
actions:
  - {name: errors, filter: "data:http.status::int >= 500", queue: disk,
     output: {type: file, path: HERE/errors}}
  - {name: numbers, filter: "CAST(data:n AS int) / CAST(key AS int) > 1", queue: disk,
     sql: "SELECT data:n::int AS n, CAST(key AS int) AS key FROM events",
     output: {type: file, path: HERE/numbers}}
""")
    values = [
        b'{"http": {"status": %s}, "n": 8, "d": "D", "h": "H"}' % each
        for each in (b"503", b'"abc"', b"504")
    ]
    node.publish("main", [*values, b"no JSON"], keys=["2", "0", "x", "1"])
    pipeline.start()
    wait_until(lambda: node.queue("main").low == 4, "all events", PATIENCE)
    wait_until(lambda: len(lines(tmp_path / "errors")) == 2, "two errors", PATIENCE)
    own = [(row["direct"], row["hollows"], row["event_row"]) for row in lines(tmp_path / "errors")]
    assert own == [("D", "H", "8")] * 2, "users may use names that were internal once"
    wait_until(lambda: lines(tmp_path / "numbers") == [{"n": 8, "key": 2}], "a number", PATIENCE)
    assert [lane.restarts for lane in pipeline.status()] == [0, 0, 0]


def test_jdbc_sink_takes_batches(make: Make, spark: SparkSession, tmp_path: Path) -> None:
    jvm: Any = spark._jvm
    jvm.System.setProperty("derby.stream.error.file", str(tmp_path / "derby.log"))
    url = "jdbc:derby:memory:shop;create=true"
    pipeline, node = make(f"""
actions:
  - name: table
    queue: disk
    output:
      type: spark
      format: jdbc
      options: {{url: "{url}", dbtable: numbers}}
      columns: ["CAST(CAST(value AS string) AS int) AS number"]
""")
    node.publish("main", [b"%d" % number for number in range(10)])
    pipeline.start()
    wait_until(lambda: node.queue("table").low == 10, "all rows", PATIENCE)
    rows = spark.read.format("jdbc").options(url=url, dbtable="numbers").load().collect()
    assert sorted(row[0] for row in rows) == list(range(10))


def count_by_key(events: DataFrame) -> DataFrame:
    return events.groupBy("key").count()


def drop_duplicates(events: DataFrame) -> DataFrame:
    return events.dropDuplicates(["key"])


def add_payload_column(events: DataFrame) -> DataFrame:
    return events.withColumn("payload", events.value)


OUT = "output: {type: file, path: o}"
SPARK = "queue: disk, output: {type: spark, format: parquet, path: p"
FILES = "queue: disk, output: {type: spark, path: p, format"
ROWS = "output: {type: sql, url: 'sqlite:///x', table: t, columns: {a: value.a.b, b: mesage}}"


@pytest.mark.parametrize(
    ("action", "more", "fault"),
    [
        (f"{SPARK}, columns: [nosuch]}}", "", r"actions\[0\].output.columns: .*nosuch"),
        (f"{SPARK}, partition_by: [day]}}", "", r"output.partition_by: there is no column 'day'"),
        ("queue: disk, output: {type: spark, format: parqet}", "", r"output.format: .*parqet"),
        (f"{FILES}: csv}}", "", r"\[0\].output.format: .*`headers` .*MAP.*; name the columns"),
        (f"{FILES}: text}}", "", r"\[0\].output.format: .*Text .*; name the columns"),
        (f"{FILES}: text, columns: [key, source]}}", "", r"\[0\].output.columns: .*single column"),
        (f"{FILES}: orc}}", "parse: json", r"\[0\].output.format: .*`data` .*VARIANT"),
        (f"queue: disk, {ROWS}", "", r"\[0\].output.columns.b: the events have no 'mesage'; they"),
        (ROWS, "", r"\[0\].output.columns.b: the events have no 'mesage'; they have key, value"),
        (
            f"queue: disk, {OUT}, delivery: {{failover: {{{ROWS}}}}}",
            "",
            r"\[0\].delivery.failover.output.columns.b: the events have no 'mesage'",
        ),
        (
            (
                "queue: disk, sql: SELECT key FROM events, "
                "output: {type: table, url: 'sqlite:///x', table: t, columns: {b: event_id}}"
            ),
            "",
            r"\[0\].output.columns.b: the events have no 'event_id'; they have key",
        ),
        (OUT, f"transform: '{__name__}:add_payload_column'", "transform: makes a column 'payload'"),
        (
            f"queue: disk, transform: '{__name__}:add_payload_column', {OUT}",
            "",
            r"actions\[0\].transform: makes a column 'payload', which lanes use",
        ),
        (
            f"queue: disk, sql: SELECT 1 AS Payload FROM events, {OUT}",
            "",
            r"actions\[0\].sql: makes a column",
        ),
        (  # A queue stores no variants; only `data` is restored.
            f"queue: disk, sql: SELECT part FROM events, {OUT}",
            "parse: {format: json, columns: {part: 'a::variant'}}",
            r"actions\[0\].sql: .*part",
        ),
        (
            f"queue: disk, sql: 'SELECT key, count(*) FROM events GROUP BY key', {OUT}",
            "",
            r"actions\[0\].sql: .*aggregations without watermark",
        ),
        (
            f"queue: disk, sql: SELECT * FROM events ORDER BY timestamp, {OUT}",
            "",
            r"actions\[0\].sql: Sorting is not supported",
        ),
        (
            f"queue: disk, sql: SELECT * FROM events LIMIT 3, output_mode: update, {OUT}",
            "",
            r"actions\[0\].sql: Limits are not supported",
        ),
        (
            f"queue: disk, transform: '{__name__}:count_by_key', {OUT}",
            "",
            r"actions\[0\].transform: .*aggregations without watermark",
        ),
        (OUT, f"transform: '{__name__}:drop_duplicates'", "transform: removing duplicates has to"),
        (
            (
                f"queue: disk, transform: '{__name__}:drop_duplicates', "
                "delivery: {ordering: strict}, "
                "output: {type: queue, endpoint: 'turnlane://h:1', queue: q, producer: p}"
            ),
            "",
            r"actions\[0\].transform: moves rows to other tasks",
        ),
        (
            (
                "queue: disk, sql: SELECT key AS value_of FROM events, "
                "output: {type: queue, endpoint: 'turnlane://h:1', queue: q}"
            ),
            "",
            r"actions\[0\].sql: a queue cannot store these rows: there is no column `value`",
        ),
        (OUT, "parse: {format: regex, pattern: 'a(?x) (?<n>1) # c'}", "parse: Java cannot compile"),
    ],
)
def test_check_finds_plans_that_cannot_run(
    action: str, more: str, fault: str, spark: SparkSession
) -> None:
    config = loads(f"node: {{data: d}}\n{more}\nactions:\n  - {{name: a, {action}}}\n")
    with pytest.raises(ConfigError, match=fault):
        make_pipeline(config, spark).check()


def test_check_accepts_plans_that_can_run(spark: SparkSession) -> None:
    config = loads(
        """
node: {data: d}
parse: {format: json, columns: {n: "n::int"}}
actions:
  - {name: kept, queue: disk, output: {type: discard}}
  - name: j
    queue: disk
    sql: SELECT e.n, k.data:a::int AS payload FROM events e JOIN kept k ON e.n = k.data:n::int
    watermark: 1m
    with_queues: [kept]
    output: {type: spark, format: parquet, path: p, columns: [n AS m], partition_by: [m]}
  - name: whole
    queue: disk
    transform: HERE:count_by_key
    sql: SELECT key, count FROM events
    output_mode: complete
    output: {type: file, path: o}
  - {name: logins, queue: disk, output: {type: discard}}
  - name: left
    queue: disk
    sql: SELECT e.key FROM events e LEFT JOIN logins l ON e.key = l.key
         AND l.timestamp BETWEEN e.timestamp - INTERVAL 10 MINUTES AND e.timestamp
    watermark: 1m
    with_queues: [logins]
    output: {type: file, path: o}
  - {name: once, queue: disk, transform: "HERE:drop_duplicates", output: {type: file, path: o}}
  - {name: plain, queue: disk, sql: SELECT n FROM events, output: {type: file, path: o}}
  - {name: parquet, queue: disk, output: {type: spark, format: parquet, path: p0}}
  - {name: json, queue: disk, output: {type: spark, format: json, path: p1, partition_by: [key]}}
  - name: text
    queue: disk
    output: {type: spark, format: text, path: p2, columns: [key, n], partition_by: [N]}
  - name: csv
    queue: disk
    output: {type: spark, format: csv, path: p3, columns: [n, timestamp], options: {sep: ;}}
  - {name: console, queue: disk, output: {type: spark, format: console}}
  - name: rows
    queue: disk
    output:
      type: sql
      url: sqlite:///x
      table: t
      columns: {a: event_id, b: value.a.b, c: n, d: payload, e: headers.h, f: partition}
  - {name: now, output: {type: sql, url: "sqlite:///x", table: t, columns: {a: event_id, b: n}}}
""".replace("HERE", __name__)
    )
    remembering = make_pipeline(config, spark).check()
    assert remembering == {"j", "whole", "left", "once"}
