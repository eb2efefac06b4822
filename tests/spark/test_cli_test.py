"""``turnlane test`` and ``turnlane validate --spark``: cases and filters on real Spark."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner, Result

from turnlane.cli import pipeline_tools, serve
from turnlane.cli.app import app
from turnlane.cli.pipeline_tools import read_example
from turnlane.migrate.rsyslog import convert_text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Run = Callable[..., Result]

CONFIG = """\
node: {data: d}
queues: {orders: }
parse: {format: json, columns: {status: "http.status::int", user: user}}
actions:
  - {name: health, filter: user = 'probe', output: {type: discard}}
  - {name: errors, filter: status >= 500, queue: disk, output: {type: file, path: out}}
  - name: counts
    queue: memory
    sql: SELECT status, count(*) AS n FROM events GROUP BY status
    output_mode: update
    output: {type: file, path: counts}
  - name: joined
    queue: memory
    with_queues: [web-1.errors]
    sql: SELECT e.status, e.user FROM events e JOIN `web-1.errors` x ON e.user = x.user
    output: {type: file, path: joined}
  - {name: web-1.errors, filter: status >= 500, queue: disk, output: {type: discard}}
  - {name: tried, queue: disk, delivery: {mode: try_direct}, output: {type: file, path: tried}}
  - {name: all, output: {type: file, path: all}}
tests:
  - name: server errors
    events:
      - '{"http": {"status": 500}, "user": "ann"}'
      - {value: '{"http": {"status": 200}, "user": "ann"}', key: k, severity: 6, headers: {h: x}}
      - '{"http": {"status": 503}, "user": "probe"}'
      - 'no JSON'
    expect:
      errors: [{status: 500, user: ann, key: null, parse_error: null}]
      counts: [{status: 500, n: 1}, {status: 200, n: 1}, {status: null, n: 1}]
      joined: [{status: 500}, {status: 200}]
      tried: 3
      all:
        - {key: k, severity: 6, headers: {h: x}}
        - {user: ann, status: 500}
        - {value: no JSON}
"""


class Shared:
    """A session that must not be stopped: other tests need it."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spark, name)

    def stop(self) -> None:
        """Do nothing."""


@pytest.fixture
def turnlane(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    for module in (pipeline_tools, serve):
        monkeypatch.setattr(module, "start_session", lambda *_args, **_knobs: Shared(spark))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.syspath_prepend(tmp_path)

    def run(command: str, text: str, *arguments: str) -> Result:
        Path("c.yaml").write_text(text)
        return CliRunner().invoke(app, [command, "c.yaml", *arguments])

    return run


def test_matching_cases_pass(turnlane: Run) -> None:
    said = turnlane("test", CONFIG)
    assert said.stdout == "ok     server errors\n1 case, 0 failed\n", said.output
    assert said.exit_code == 0


def test_difference_is_shown_and_fails_the_command(turnlane: Run) -> None:
    wrong = CONFIG.replace("{status: 500, user: ann, key", "{status: 501, user: ann, key")
    said = turnlane("test", wrong)
    assert said.exit_code == 1
    lines = [line.strip() for line in said.stdout.splitlines()]
    assert lines[:4] == [
        "FAILED server errors",
        "errors: expected 1 event, got 1",
        '- {"status": 501, "user": "ann", "key": null, "parse_error": null}',
        '+ {"status": 500, "user": "ann", "key": null, "parse_error": null}',
    ]
    assert lines[-1] == "1 case, 1 failed"


def test_cases_in_other_files_are_reported_as_json(turnlane: Run) -> None:
    text, _, tests = CONFIG.partition("tests:\n")
    Path("one.yaml").write_text(f"tests:\n{tests}")
    Path("two.yaml").write_text("tests: [{name: two, events: ['{}'], expect: {all: 2}}]")
    said = turnlane("test", text, "one.yaml", "two.yaml", "--json")
    results = [json.loads(line) for line in said.stdout.splitlines()]
    assert [(each["case"], each["passed"]) for each in results] == [
        ("server errors", True),
        ("two", False),
    ]
    assert results[1]["differences"][0] == "all: expected 2 events, got 1"
    assert said.exit_code == 1


RAISES = """\
from pyspark.sql.functions import udf

def checked(events):
    @udf(returnType="boolean", useArrow=False)
    def has_total(value):
        if b"total" not in value:
            raise LookupError("order 17 has no total")
        return True

    return events.where(has_total("value"))
"""

ORDERS = """\
node: {data: d}
transform: shop_totals:checked
actions: [{name: all, output: {type: file, path: all}}]
tests:
  - {name: without, events: [order 17], expect: {all: 1}}
  - {name: with, events: [total 17], expect: {all: 1}}
"""


def test_raising_transform_fails_its_case_and_others_are_tried(
    turnlane: Run,
) -> None:
    Path("shop_totals.py").write_text(RAISES)
    said = turnlane("test", ORDERS)
    assert said.exit_code == 1, said.output
    assert said.stdout.splitlines() == [
        "FAILED without",
        "       LookupError: order 17 has no total",
        "ok     with",
        "2 cases, 1 failed",
    ]
    said = turnlane("test", ORDERS, "--json")
    reason = "LookupError: order 17 has no total"
    assert [json.loads(line) for line in said.stdout.splitlines()] == [
        {"case": "without", "passed": False, "differences": [reason]},
        {"case": "with", "passed": True, "differences": []},
    ]


def test_example_configuration_passes_its_cases(turnlane: Run) -> None:
    said = turnlane("test", read_example())
    assert said.stdout.endswith("1 case, 0 failed\n"), said.output


def test_transform_beside_the_configuration_is_found(turnlane: Run) -> None:
    Path("shop_rules.py").write_text(
        "def loud(events):\n    return events.withColumn('user', events.user.cast('string'))"
        ".selectExpr('*', 'upper(user) AS loud')\n"
    )
    said = turnlane(
        "test",
        CONFIG.replace("actions:", "transform: shop_rules:loud\nactions:").replace(
            "[{status: 500, user: ann,", "[{loud: ANN,"
        ),
    )
    assert said.exit_code == 0, said.output


@pytest.mark.parametrize(
    ("old", "new", "place", "words"),
    [
        ("status >= 500", "statsu >= 500", "6:28: actions[1].filter", "`statsu` cannot be resolv"),
        ("status >= 500", "status >=", "6:28: actions[1].filter", "PARSE_SYNTAX_ERROR"),
        ("status >= 500", "status", "6:28: actions[1].filter", "BOOLEAN"),
        ("FROM events GROUP", "FROM evnts GROUP", "9:10: actions[2].sql", "`evnts`"),
        ("output_mode: update", "", "9:10: actions[2].sql", "without watermark"),
        ("actions:", "transform: no_such:f\nactions:", "4:12: transform", "No module named"),
        (
            "actions:",
            "transform: os:sep\nactions:",
            "4:12: transform",
            "TypeError: 'str' object is not callable",
        ),
    ],
)
def test_error_of_spark_is_reported_with_its_place(
    turnlane: Run, old: str, new: str, place: str, words: str
) -> None:
    said = turnlane("validate", CONFIG.replace(old, new, 1), "--spark")
    assert said.exit_code == 78, said.output
    assert said.stderr.startswith(f"c.yaml:{place}: "), said.stderr
    assert words in said.stderr
    assert said.stderr.count("\n") == 1


TEAMS = """\
def key(events):
    return {}["team"]

def bare(events):
    assert "team" in events.columns
    return events

def own(events):
    raise BadOrder("order 17 has no total")

def column(events):
    return events.team

class BadOrder(Exception):
    pass
"""


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("key", "KeyError: 'team' (shop_teams.py:2)"),
        ("bare", "AssertionError (shop_teams.py:5)"),
        ("own", "BadOrder: order 17 has no total (shop_teams.py:9)"),
        ("column", "[ATTRIBUTE_NOT_SUPPORTED] Attribute `team` is not supported."),
    ],
)
def test_raising_transform_is_reported_with_its_line(
    turnlane: Run, function: str, reason: str
) -> None:
    Path("shop_teams.py").write_text(TEAMS)
    text = CONFIG.replace("actions:", f"transform: shop_teams:{function}\nactions:")
    said = turnlane("validate", text, "--spark")
    assert said.exit_code == 78, said.output
    assert said.stderr == f"c.yaml:4:12: transform: {reason}\n"


def test_all_errors_of_spark_are_reported_together(turnlane: Run) -> None:
    said = turnlane(
        "validate",
        """\
node: {data: d}
actions:
  - {name: one, filter: severty = 1, output: {type: file, path: o}}
  - name: two
    queue: disk
    filter: sorce = 's'
    output:
      type: spark
      format: parqet
      path: p
      columns: [kye]
  - name: three
    queue: disk
    output: {type: spark, format: csv, path: q, partition_by: [day, hour]}
  - {name: four, queue: disk, sql: SELECT nothing FROM events, output: {type: file, path: o}}
  - name: five
    queue: disk
    output:
      {type: sql, url: "sqlite:///x", table: t, columns: {a: nosuch, b: key, c: neither}}
""",
        "--spark",
    )
    assert said.exit_code == 78, said.output
    places = [":".join(line.split(":")[:4]) for line in said.stderr.splitlines()]
    assert places == [
        "c.yaml:3:25: actions[0].filter",
        "c.yaml:6:13: actions[1].filter",
        "c.yaml:9:15: actions[1].output.format",
        "c.yaml:11:16: actions[1].output.columns",
        "c.yaml:14:35: actions[2].output.format",
        "c.yaml:14:63: actions[2].output.partition_by",
        "c.yaml:14:63: actions[2].output.partition_by",
        "c.yaml:15:36: actions[3].sql",
        "c.yaml:19:62: actions[4].output.columns.a",
        "c.yaml:19:81: actions[4].output.columns.c",
    ], said.stderr


def test_configuration_that_spark_accepts_is_valid(turnlane: Run) -> None:
    said = turnlane("validate", CONFIG, "--spark")
    assert said.stdout == "c.yaml: ok, 7 queues, 0 inputs, 7 actions\n", said.output


RSYSLOG = r"""
mail,news.warning;mail.!=err                     /var/log/selected
:msg, !contains, "it's C:\\temp"                 /var/log/negated
if $programname == ['shop', 'bar'] and not ($msg contains_i 'NOISE') then /var/log/compared
if prifilt('*.err') then { stop }
*.* /var/log/rest
"""
CASES = r"""
tests:
  - name: filters
    events:
      - "<20>1 2026-01-01T00:00:00Z web-1 shop 1 - - it's C:\\temp"
      - "<19>1 2026-01-01T00:00:00Z web-1 bar 1 - - some noise"
      - "<14>1 2026-01-01T00:00:00Z web-1 - 1 - - hello"
    expect:
      file: [{app_name: shop}]
      file-2: [{message: some noise}, {message: hello}]
      file-3: [{app_name: shop}]
      file-4: [{app_name: shop}, {message: hello}]
"""


def test_spark_evaluates_filters_that_were_converted_from_rsyslog(turnlane: Run) -> None:
    said = turnlane("test", convert_text(RSYSLOG, "rsyslog.conf").render() + CASES)
    assert said.exit_code == 0, said.output
