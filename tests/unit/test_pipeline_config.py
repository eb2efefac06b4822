"""The pipeline's part of a configuration: what it gives, what it refuses, and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from typer.testing import CliRunner

from scripts import config_schema
from tests.acceptance.test_docs import blocks_of
from turnlane.cli.app import app
from turnlane.cli.pipeline_tools import read_example
from turnlane.config import Config, ConfigFileError, get_visible_settings, load, load_cases, loads
from turnlane.config.document import format_path, parse, parse_path
from turnlane.config.settings import convert_option_error
from turnlane.errors import ConfigError
from turnlane.formats.parse_settings import Format
from turnlane.outputs.file import FileOutputSettings
from turnlane.outputs.spark import SparkSinkSettings
from turnlane.pipeline.settings import LaneSettings
from turnlane.queues.settings import Kind
from turnlane.service import check

ROOT = Path(__file__).parents[2]

HEAD = "node: {data: d}\nactions:\n"
FILE = "output: {type: file, path: out}"


def actions(*lines: str, more: str = "") -> str:
    """A configuration whose third line is the first of the actions."""
    return HEAD + "".join(f"  - {line}\n" for line in lines) + more


def load_with_issues(text: str) -> list[str]:
    with pytest.raises(ConfigFileError) as caught:
        loads(text, "c.yaml", {})
    return str(caught.value).splitlines()


def load_with_one_issue(text: str) -> str:
    (fault,) = load_with_issues(text)
    return fault


# ── what it gives ────────────────────────────────────────────────────────────────────────────────


def test_configuration_without_actions_has_no_pipeline() -> None:
    config = loads("node: {data: d}\nqueues: {q: }")
    assert config.pipeline() is None
    assert config.knobs() == {"q": {"kind": Kind.DISK}}


def test_actions_add_a_main_queue_and_their_own_queues() -> None:
    config = loads(
        actions(
            f"{{name: a, queue: {{kind: memory, size: 5}}, {FILE}}}",
            f"{{name: b, queue: disk_assisted, {FILE}}}",
            f"{{name: c, queue: , {FILE}}}",
            f"{{name: d, {FILE}}}",
            f"{{name: e, queue: direct, {FILE}}}",
        )
    )
    assert config.knobs() == {
        "main": {"kind": Kind.DISK},
        "a": {"kind": Kind.MEMORY, "size": 5},
        "b": {"kind": Kind.DISK_ASSISTED},
        "c": {"kind": Kind.DISK},
        **{f"{name}.dead": {} for name in "abcde"},
    }
    pipeline = config.pipeline()
    assert pipeline is not None
    assert list(pipeline.lane_names()) == ["main", "a", "b", "c"]


@pytest.mark.parametrize("given", ["main: {durability: always}", "queues: {main: {size: 9}}"])
def test_main_queue_is_set_in_main_or_in_queues(given: str) -> None:
    config = loads(actions(f"{{name: a, {FILE}}}", more=given))
    assert list(config.knobs()) == ["main", "a.dead"]
    assert len(config.knobs()["main"]) == 2


def test_main_queue_without_a_pipeline_is_accepted() -> None:
    config = loads("node: {data: d}\nmain:\ninputs: [{type: stdin, queue: main}]")
    assert config.knobs() == {"main": {"kind": Kind.DISK}}


def test_every_section_reaches_the_pipeline() -> None:
    config = loads(
        actions(
            "name: a\n    filter: severity < 3\n    queue: disk\n    transform: m.n:f\n"
            "    sql: SELECT 1\n    watermark: 10m\n    output_mode: update\n"
            "    with_queues: [more, other]\n    lane: {max_events: 7}\n"
            "    output: {type: spark, format: parquet, path: p, partition_by: [x]}",
            more="queues: {other: , more: }\nparse: {format: regex, pattern: '(?<ip>.*)'}\n"
            "transform: m:f\n"
            "lane: {trigger: 2s}\nspark: {master: 'local[1]', conf: {spark.a: b}}\n"
            "nodes: {endpoint: 'turnlane://h:1', token_env: T}\n",
        )
    )
    pipeline = config.pipeline()
    assert pipeline is not None
    (action,) = pipeline.actions
    assert action.watermark == 600
    assert action.with_queues == ("more", "other")
    assert action.lane.max_events == 7
    assert isinstance(action.output, SparkSinkSettings)
    assert action.output.partition_by == ("x",)
    assert pipeline.parse.format is Format.REGEX
    assert pipeline.lane.trigger == 2
    assert pipeline.spark.conf == {"spark.a": "b"}
    assert pipeline.transform == "m:f"
    assert config.nodes.access() == {"endpoint": "turnlane://h:1", "tokenEnv": "T"}
    assert config.checkpoints() == Path("d/checkpoints")


def test_empty_section_has_the_defaults() -> None:
    sections = ("parse", "lane", "spark", "nodes", "main", "tests", "inputs", "transform")
    more = "".join(f"{name}:\n" for name in sections)
    text = actions(f"{{name: a, {FILE}}}")
    assert loads(text + more).model_dump() == loads(text).model_dump()


def test_output_has_the_settings_of_its_type() -> None:
    (action,) = loads(actions(f"{{name: a, {FILE}}}")).actions
    assert isinstance(action.output, FileOutputSettings)
    assert action.output.path == Path("out")


# ── what it refuses, and where ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("action", "fault"),
    [
        ("{name: a b, output: {type: discard}}", "3:12: actions[0].name: 'a b' is not a name"),
        ("{name: a, queue: disk}", "3:5: actions[0].output: is required"),
        ("{name: a, output: {type: fil}}", "actions[0].output.type: there is no output 'fil'; did"),
        (f"{{name: a, filtre: x, {FILE}}}", "3:15: actions[0].filtre: there is no such setting"),
        (f"{{name: a, queue: {{knid: x}}, {FILE}}}", "queue.knid: there is no such setting; did"),
        (f"{{name: a, queue: dsik, {FILE}}}", "3:22: actions[0].queue: must be one of"),
        (f"{{name: a, queue: {{kind: proxy}}, {FILE}}}", "3:29: actions[0].queue.kind: an action"),
        (f"{{name: a, queue: {{path: x}}, {FILE}}}", "3:23: actions[0].queue.path: a node keeps"),
        (
            f"{{name: a, queue: {{name: x}}, {FILE}}}",
            "actions[0].queue.name: the queue has the name",
        ),
        (f"{{name: a, queue: {{kind: memory, durability: always}}, {FILE}}}", "durability: means"),
        (f"{{name: main, {FILE}}}", "3:12: actions[0].name: main is the main queue"),
        (f"{{name: taken, queue: disk, {FILE}}}", "3:12: actions[0].name: queues has a queue 'ta"),
        (f"{{name: a, sql: SELECT 1, {FILE}}}", "3:15: actions[0].sql: needs a lane of its own"),
        (f"{{name: a, transform: 'm:f', {FILE}}}", "3:15: actions[0].transform: needs a lane"),
        (f"{{name: a, lane: {{max_events: 1}}, {FILE}}}", "actions[0].lane: has no effect without"),
        (f"{{name: a, queue: disk, watermark: 1m, {FILE}}}", "watermark: has no effect without sq"),
        (
            f"{{name: a, queue: disk, idle_after: 1m, {FILE}}}",
            "idle_after: has no effect without s",
        ),
        (
            f"{{name: a, queue: disk, sql: SELECT 1, output_mode: update, idle_after: 1m, {FILE}}}",
            "actions[0].idle_after: has no effect with output_mode: update",
        ),
        (f"{{name: a, queue: disk, sql: SELECT 1, idle_after: 0s, {FILE}}}", "must be more than 0"),
        (f"{{name: a, queue: disk, sql: SELECT 1, idle_after: soon, {FILE}}}", "is not a duration"),
        (f"{{name: a, queue: disk, sql: SELECT 1, idle_after: off, {FILE}}}", "is not a duration"),
        (f"{{name: a, queue: disk, transform: f, {FILE}}}", "transform: is module:function, such"),
        ("{name: a, output: {type: spark, format: csv}}", "3:30: actions[0].output.type: Spark wr"),
        (
            f"{{name: a, queue: disk, sql: SELECT 1, with_queues: [taken, takne], {FILE}}}",
            "3:64: actions[0].with_queues[1]: there is no queue 'takne'; did you mean taken?",
        ),
    ],
)
def test_contradictory_action_is_refused_with_its_position(action: str, fault: str) -> None:
    found = load_with_one_issue(actions(action, more="queues: {taken: }\n"))
    assert found.startswith("c.yaml:3:")
    assert fault in found


def test_idle_after_is_a_minute_unless_it_is_set_or_null() -> None:
    written = ("", ", idle_after: 10m", ", idle_after: null")
    given = [
        f"{{name: a{at}, queue: disk, sql: x{each}, {FILE}}}" for at, each in enumerate(written)
    ]
    pipeline = loads(actions(*given)).pipeline()
    assert pipeline is not None
    assert [each.idle_after for each in pipeline.actions] == [60.0, 600.0, None]


SQL = "type: sql, url: 'sqlite:///a.db', table: t, columns: {id: offset}, exactly_once: true"
QUEUE = "type: queue, endpoint: 'turnlane://a:1', queue: q, producer: shop"


@pytest.mark.parametrize(
    ("action", "fault"),
    [
        (f"{{name: a, output: {{{SQL}}}}}", "output.exactly_once: records which offsets"),
        (
            f"{{name: a, queue: disk, sql: SELECT 1, output: {{{SQL}}}}}",
            "output.exactly_once: needs events",
        ),
        (
            f"{{name: a, queue: disk, delivery: {{mode: try_direct}}, output: {{{SQL}}}}}",
            (
                "output.exactly_once: identifies events by their queue and offset, "
                "and with delivery.mode try_direct"
            ),
        ),
        (f"{{name: a, queue: disk, output: {{{QUEUE}}}}}", "output.producer: lets the other node"),
        (
            f"{{name: a, queue: disk, delivery: {{ordering: key}}, output: {{{QUEUE}}}}}",
            "output.producer: lets the other node drop events that come out of order",
        ),
        (
            f"{{name: a, queue: disk, delivery: {{failover: {{output: {{{QUEUE}}}}}}}, {FILE}}}",
            (
                "delivery.failover.output.producer: "
                "lets the other node drop events that come out of order"
            ),
        ),
        (
            f"{{name: a, delivery: {{failover: {{output: {{{SQL}}}}}}}, {FILE}}}",
            "delivery.failover.output.exactly_once: records which offsets",
        ),
    ],
)
def test_output_that_cannot_be_exactly_once_is_refused(action: str, fault: str) -> None:
    assert fault in load_with_one_issue(actions(action))


def test_exactly_once_output_behind_a_queue_is_accepted() -> None:
    loads(
        actions(
            f"{{name: a, queue: disk, output: {{{SQL}}}}}",
            f"{{name: b, queue: disk, delivery: {{ordering: strict}}, output: {{{QUEUE}}}}}",
        )
    )


STRICT = f"queue: disk, delivery: {{ordering: strict}}, output: {{{QUEUE}}}"


@pytest.mark.parametrize(
    ("one", "other", "fault"),
    [
        (
            "queue: disk, output: {type: spark, format: parquet, path: out/x}",
            "queue: disk, output: {type: spark, format: json, options: {path: ./out/x/}}",
            "actions[1].output.path: action 'a' writes there too",
        ),
        (STRICT, STRICT, "actions[1].output.producer: action 'a' sends to that queue under this"),
    ],
)
def test_two_actions_with_one_exclusive_target_are_refused(
    one: str, other: str, fault: str
) -> None:
    """Half of them would be skipped without an error."""
    assert fault in load_with_one_issue(actions(f"{{name: a, {one}}}", f"{{name: b, {other}}}"))


def test_actions_with_different_targets_are_accepted() -> None:
    delta = "queue: disk, output: {type: spark, format: delta, path: out/x}"
    table = f"queue: disk, output: {{{SQL}}}"
    loads(actions(*(f"{{name: {name}, {delta}}}" for name in "ab")))
    loads(actions(*(f"{{name: {name}, {table}}}" for name in "ab")))
    loads(actions(f"{{name: a, {STRICT}}}", f"{{name: b, {STRICT.replace('shop', 'till')}}}"))


@pytest.mark.parametrize(
    "action",
    [
        "{name: a, output: {type: []}}",
        "{name: a, output: {type: {}}}",
        "{name: {}, output: {type: discard}}",
        "{name: a, queue: disk, output: {type: spark, format: [], path: {}}}",
        "{name: a, queue: disk, output: {type: queue, endpoint: [], queue: {}, producer: []}}",
        "{name: a, delivery: {failover: {output: {type: []}}}, output: {type: discard}}",
    ],
)
def test_section_of_a_wrong_type_is_refused(action: str) -> None:
    with pytest.raises(ConfigFileError):
        loads(actions(action))


@pytest.mark.parametrize("kind", ["[]", "{}"])
def test_queue_of_a_wrong_type_is_refused(kind: str) -> None:
    with pytest.raises(ConfigFileError):
        loads(f"node: {{data: d}}\nqueues: {{main: {{kind: {kind}}}}}")


def test_two_actions_with_one_name_are_refused() -> None:
    one = f"{{name: a, {FILE}}}"
    fault = load_with_one_issue(actions(one, one))
    assert fault == "c.yaml:4:12: actions[1].name: the name 'a' is already used by another action"


def test_input_with_an_unknown_queue_is_refused() -> None:
    inputs = "inputs: [{type: unix, path: x, queue: main}, {type: stdin, queue: a}"
    text = actions(f"{{name: a, queue: disk, {FILE}}}", f"{{name: b, {FILE}}}", more=inputs)
    assert len(loads(f"{text}]").inputs) == 2
    assert "there is no queue 'b'" in load_with_one_issue(
        f"{text}, {{type: unix, path: y, queue: b}}]"
    )


def test_second_input_of_stdin_is_refused() -> None:
    inputs = "inputs: [{type: stdin, queue: main}, {type: stdin, name: x, queue: main}]"
    fault = load_with_one_issue(f"node: {{data: d}}\nmain:\n{inputs}")
    assert "inputs[1].type: another input reads the standard input already" in fault


@pytest.mark.parametrize("section", ["parse: json", "transform: m:f", "lane: {max_events: 1}"])
def test_section_of_a_pipeline_without_actions_is_refused(section: str) -> None:
    fault = load_with_one_issue(f"node: {{data: d}}\n{section}")
    assert fault.startswith("c.yaml:2:1: ")
    assert fault.endswith("has no effect without actions; add some")


def test_main_queue_in_main_and_in_queues_is_refused() -> None:
    text = actions(f"{{name: a, {FILE}}}", more="main: {}\nqueues: {main: }")
    assert (
        load_with_one_issue(text)
        == "c.yaml:4:1: main: is also defined in `queues`; keep one of them"
    )


@pytest.mark.parametrize(
    ("parsing", "fault"),
    [
        ("sysog", "must be one of none, syslog, json, otlp, regex, not 'sysog'; did you mean sysl"),
        ("{format: regex}", "parse.pattern: is required with the format `regex`"),
        ("{format: json, pattern: x}", "4:32: parse.pattern: belongs to the format `regex`"),
        ("{fromat: json}", "4:9: parse.fromat: there is no such setting; did you mean format?"),
    ],
)
def test_invalid_parse_section_is_refused(parsing: str, fault: str) -> None:
    assert fault in load_with_one_issue(actions(f"{{name: a, {FILE}}}", more=f"parse: {parsing}"))


def test_secrets_of_sinks_are_masked() -> None:
    config = loads(
        actions(
            "{name: a, queue: disk, output: {type: spark, format: jdbc, "
            "options: {dbtable: rows, url: 'jdbc:x?a=hush-hush', password: hush-hush}}}"
        )
    )
    assert "hush-hush" not in json.dumps(get_visible_settings(config))
    assert '"dbtable": "rows"' in json.dumps(get_visible_settings(config))


# ── issues found later ───────────────────────────────────────────────────────────────────────────


def test_issue_that_spark_finds_has_its_position() -> None:
    config = loads(actions("name: a\n    filter: severty < 3\n    " + FILE), "c.yaml")
    placed = config.locate(ConfigError("actions[0].filter", "no such column"))
    assert str(placed) == "c.yaml:4:13: actions[0].filter: no such column"
    assert isinstance(placed, ConfigFileError)
    nowhere = config.locate(ConfigError("parse", "wrong"))
    assert str(nowhere) == "c.yaml:1:1: parse: wrong"


def test_issue_of_settings_without_a_file_has_no_position() -> None:
    config = Config.model_validate({"node": {"data": "d"}})
    error = ConfigError("parse", "wrong")
    assert config.locate(error) is error


@pytest.mark.parametrize("path", [(), ("a",), ("actions", 1, "filter"), ("x", 0, 1)])
def test_formatted_path_is_parsed_to_the_same_path(path: tuple[str | int, ...]) -> None:
    assert parse_path(format_path(path)) == path


# ── cases ────────────────────────────────────────────────────────────────────────────────────────

CASES = """\
tests:
  - name: one
    events: ["text", {value: v, severity: 3, headers: {a: b}}]
    expect: {a: 1, b: [{severity: 3}]}
"""


def with_cases(more: str = CASES) -> str:
    return actions(f"{{name: a, {FILE}}}", f"{{name: b, queue: disk, {FILE}}}", more=more)


def test_cases_are_read_from_the_configuration_or_a_file(tmp_path: Path) -> None:
    config = loads(with_cases())
    (case,) = config.tests
    assert case.events[0].value == "text"
    assert case.expect == {"a": 1, "b": ({"severity": 3},)}
    file = tmp_path / "cases.yaml"
    file.write_text(CASES)
    assert load_cases(file, config) == config.tests


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("{a: 1", "{c: 1", "there is no action 'c'"),
        ("events", "evnts", "tests[0].evnts: there is no such setting; did you mean events?"),
        ("severity: 3,", "severity: 9,", "tests[0].events[1].severity: must be at most 7, not 9"),
    ],
)
def test_invalid_cases_are_refused_with_their_positions(
    tmp_path: Path, old: str, new: str, fault: str
) -> None:
    broken = CASES.replace(old, new)
    assert any(fault in each for each in load_with_issues(with_cases(broken)))
    file = tmp_path / "cases.yaml"
    file.write_text(broken)
    with pytest.raises(ConfigFileError) as caught:
        load_cases(file, loads(with_cases()))
    assert f"{file}:" in str(caught.value)
    assert fault in str(caught.value)


def test_case_for_a_discarding_action_is_refused() -> None:
    discards = actions("{name: a, output: {type: discard}}", more=CASES)
    assert "tests[0].expect.a: this action discards its events" in "".join(
        load_with_issues(discards)
    )


# ── schema, example, commands ────────────────────────────────────────────────────────────────────


def pipeline_page() -> list[str]:
    blocks = blocks_of(ROOT / "docs/pipeline.md")
    return [block.text for block in blocks if block.language == "yaml" and "node:" in block.text]


@pytest.mark.parametrize("text", [read_example(), *pipeline_page(), with_cases()])
def test_schema_accepts_valid_configurations(text: str) -> None:
    check = jsonschema_rs.validator_for(json.loads(config_schema.text()))
    values = parse(text, "example.yaml", {}).data
    assert [error.message for error in check.iter_errors(values)] == []
    assert loads(text).pipeline() is not None


@pytest.mark.parametrize(
    "broken",
    [
        {"actions": [{"name": "a"}]},
        {"actions": [{"name": "a", "output": {"type": "nothing"}}]},
        {"actions": [{"name": "a", "queue": "proxy", "output": {"type": "discard"}}]},
        {"parse": "xml"},
        {"lane": {"max_events": "many"}},
    ],
)
def test_schema_refuses_invalid_configurations(broken: dict[str, Any]) -> None:
    check = jsonschema_rs.validator_for(json.loads(config_schema.text()))
    assert check.is_valid({"node": {"data": "d"}})
    assert not check.is_valid({"node": {"data": "d"}, **broken})


def test_init_writes_a_valid_example_and_never_replaces_a_file(tmp_path: Path) -> None:
    file = tmp_path / "turnlane.yaml"
    made = CliRunner().invoke(app, ["init", str(file)])
    assert made.exit_code == 0, made.output
    pipeline = load(file).pipeline()
    assert pipeline is not None
    assert list(pipeline.lane_names()) == ["main", "alerts", "archive", "counts"]
    checked = CliRunner().invoke(app, ["validate", str(file)])
    assert checked.stdout == f"{file}: ok, 4 queues, 2 inputs, 4 actions\n"
    file.write_text("mine")
    again = CliRunner().invoke(app, ["init", str(file)])
    assert again.exit_code == 1
    assert "exists" in again.stderr
    assert file.read_text() == "mine"


@pytest.mark.parametrize("command", ["run", "pipeline", "test", "graph"])
def test_run_without_actions_is_refused(command: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("node: {data: d}\n")
    said = CliRunner().invoke(app, [command, str(file)])
    assert said.exit_code == 78
    assert f"{file}:1:1: actions: there are none" in said.stderr


def test_run_without_a_token_for_a_node_with_tokens_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    tokens = "node: {data: d, tokens: [{name: t, secret: hush-hush, rights: {'*': [read]}}]}\n"
    file.write_text(actions(f"{{name: a, {FILE}}}").replace("node: {data: d}\n", tokens))
    said = CliRunner().invoke(app, ["run", str(file)])
    assert said.exit_code == 78
    assert f"{file}:1:" in said.stderr
    assert "nodes.token_env" in said.stderr


@pytest.mark.parametrize(
    ("nodes", "fault"),
    [
        (
            "endpoint: 'http://nope'",
            "4:19: nodes.endpoint: 'http://nope' is not the URL of a node; write",
        ),
        ("endpoint: 'turnlane://a,a'", "4:19: nodes.endpoint: 'turnlane://a,a' names a node twice"),
        ("tls_cert: c.pem", "4:19: nodes.tls_cert: and tls_key belong together: give both or"),
        ("tls_key: c.key", "4:18: nodes.tls_key: and tls_cert belong together: give both or"),
    ],
)
def test_invalid_nodes_section_is_refused_with_its_position(nodes: str, fault: str) -> None:
    said = load_with_one_issue(actions(f"{{name: a, {FILE}}}", more=f"nodes: {{{nodes}}}\n"))
    assert said.startswith(f"c.yaml:{fault}")


@pytest.mark.parametrize("command", ["validate", "run", "pipeline", "dlq list"])
@pytest.mark.parametrize(
    ("nodes", "fault"),
    [
        (
            "token_env: NOT_SET",
            "4:20: nodes.token_env: there is no token: the variable NOT_SET is empty or not set",
        ),
        ("token_file: none", "4:21: nodes.token_file: the token cannot be read: "),
    ],
)
def test_missing_token_is_reported_before_spark_starts(
    command: str, nodes: str, fault: str, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(actions(f"{{name: a, {FILE}}}", more=f"nodes: {{{nodes}}}\n"))
    said = CliRunner().invoke(app, [*command.split(), str(file)])
    assert said.exit_code == 78, said.output
    assert said.stderr.startswith(f"{file}:{fault}")
    assert said.stderr.count("\n") == 1


def test_serve_needs_no_token_of_the_pipeline() -> None:
    """It may run elsewhere, with the same file."""
    text = actions(f"{{name: a, {FILE}}}", more="nodes: {token_env: NOT_SET}\n")
    assert not check(loads(text)).has_tokens


@pytest.mark.parametrize("given", ["option", "variable"])
def test_invalid_endpoint_is_reported_before_spark_starts(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(actions(f"{{name: a, {FILE}}}"))
    if given == "variable":
        monkeypatch.setenv("TURNLANE_URL", "http://nope")
    option = ["--endpoint", "http://nope"] if given == "option" else []
    said = CliRunner().invoke(app, ["pipeline", str(file), *option])
    assert said.exit_code == 78, said.output
    assert said.stderr.startswith("turnlane: url: 'http://nope' is not the URL of a node; write")


def test_error_in_an_option_names_the_setting_of_the_file() -> None:
    """Spark's options have other names."""
    text = actions(f"{{name: a, {FILE}}}", more="nodes: {token_file: gone}\n")
    error = convert_option_error(ConfigError("tokenFile", "gone: no such file"))
    told = loads(text, "c.yaml").locate(error)
    assert str(told) == "c.yaml:4:21: nodes.token_file: gone: no such file"
    assert (
        str(convert_option_error(ConfigError("actions[0].filter", "no"))) == "actions[0].filter: no"
    )


def test_missing_java_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyspark.sql")
    file = tmp_path / "c.yaml"
    file.write_text(actions(f"{{name: a, {FILE}}}"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    said = CliRunner().invoke(app, ["run", str(file)])
    assert said.exit_code == 1
    assert said.stderr.count("\n") == 1
    assert "Spark needs Java 17" in said.stderr


def test_missing_spark_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(actions(f"{{name: a, {FILE}}}"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    said = CliRunner().invoke(app, ["run", str(file)])
    assert said.exit_code == 1
    assert said.stderr == "turnlane: Spark is not installed: pip install 'turnlane[spark]'\n"


# ── names and places ─────────────────────────────────────────────────────────────────────────────


def test_action_with_the_name_of_a_second_output_is_refused() -> None:
    """They would have one breaker."""
    fault = load_with_one_issue(actions(f"{{name: a, {FILE}}}", f"{{name: a.failover, {FILE}}}"))
    assert fault.endswith(
        "actions[1].name: the second output of another action has this name; choose another one"
    )


@pytest.mark.parametrize("more", ["", "parse: {format: json, on_error: dead}\n"])
def test_action_with_the_name_of_dead_letters_is_refused(more: str) -> None:
    fault = load_with_one_issue(actions(f"{{name: main.dead, queue: disk, {FILE}}}", more=more))
    assert (
        fault
        == "c.yaml:3:12: actions[0].name: a queue of dead letters has this name; choose another one"
    )


def test_checkpoints_that_are_not_a_directory_are_refused() -> None:
    def text(place: str) -> str:
        return actions(f"{{name: a, {FILE}}}", more=f"spark: {{checkpoints: '{place}'}}\n")

    assert loads(text("file:///shared/c")).checkpoints() == Path("/shared/c")
    assert loads(text("/shared/c")).checkpoints() == Path("/shared/c")
    fault = load_with_one_issue(text("hdfs://nn:9000/c"))
    assert "4:22: spark.checkpoints: is a directory that every machine has, " in fault


@pytest.mark.parametrize(("workers", "most"), [(None, 3), (0, 6), (1, 1), (8, 8)])
def test_lane_has_a_task_for_each_core_or_two_with_zero_workers(
    workers: int | None, most: int
) -> None:
    assert LaneSettings(workers=workers).get_workers(cores=3) == most
