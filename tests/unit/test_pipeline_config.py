"""The pipeline's part of a configuration: what it gives, what it refuses, and where."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jsonschema_rs
import pytest
from typer.testing import CliRunner

from scripts import config_schema
from tests.acceptance.test_docs import blocks_of
from turnlane.cli import run
from turnlane.cli.app import app
from turnlane.cli.init import example
from turnlane.cli.operation import Opening, Operation, needs_restart, stamp
from turnlane.config import Config, ConfigFaults, load, load_cases, loads, shown
from turnlane.config.document import dotted, parse, undotted
from turnlane.config.nodes import of_the_file
from turnlane.errors import ConfigError
from turnlane.formats.parse_settings import Format
from turnlane.outputs.file import FileSettings
from turnlane.outputs.spark import SparkSinkSettings
from turnlane.queues.kinds import Kind
from turnlane.service import check

ROOT = Path(__file__).parents[2]

HEAD = "node: {data: d}\nactions:\n"
FILE = "output: {type: file, path: out}"


def actions(*lines: str, more: str = "") -> str:
    """A configuration whose third line is the first of the actions."""
    return HEAD + "".join(f"  - {line}\n" for line in lines) + more


def faults_of(text: str) -> list[str]:
    with pytest.raises(ConfigFaults) as caught:
        loads(text, "c.yaml", {})
    return str(caught.value).splitlines()


def only_fault_of(text: str) -> str:
    (fault,) = faults_of(text)
    return fault


# ── what it gives ────────────────────────────────────────────────────────────────────────────────


def test_a_node_without_actions_has_no_pipeline() -> None:
    config = loads("node: {data: d}\nqueues: {q: }")
    assert config.pipeline() is None
    assert config.knobs() == {"q": {"kind": Kind.DISK}}


def test_actions_bring_a_main_queue_and_their_own() -> None:
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
    assert list(pipeline.lanes()) == ["main", "a", "b", "c"]


@pytest.mark.parametrize("given", ["main: {durability: always}", "queues: {main: {size: 9}}"])
def test_the_main_queue_has_its_knobs_in_a_section_or_among_the_queues(given: str) -> None:
    config = loads(actions(f"{{name: a, {FILE}}}", more=given))
    assert list(config.knobs()) == ["main", "a.dead"]
    assert len(config.knobs()["main"]) == 2


def test_a_main_queue_may_be_there_without_a_pipeline() -> None:
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


def test_empty_sections_are_as_if_they_were_not_there() -> None:
    sections = ("parse", "lane", "spark", "nodes", "main", "tests", "inputs", "transform")
    more = "".join(f"{name}:\n" for name in sections)
    text = actions(f"{{name: a, {FILE}}}")
    assert loads(text + more).model_dump() == loads(text).model_dump()


def test_an_output_has_the_settings_of_its_type() -> None:
    (action,) = loads(actions(f"{{name: a, {FILE}}}")).actions
    assert isinstance(action.output, FileSettings)
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
        (f"{{name: a, queue: {{name: x}}, {FILE}}}", "actions[0].queue.name: the queue is called"),
        (f"{{name: a, queue: {{kind: memory, durability: always}}, {FILE}}}", "durability: means"),
        (f"{{name: main, {FILE}}}", "3:12: actions[0].name: main is the main queue"),
        (f"{{name: taken, queue: disk, {FILE}}}", "3:12: actions[0].name: queues has a queue 'ta"),
        (f"{{name: a, sql: SELECT 1, {FILE}}}", "3:15: actions[0].sql: needs a lane of its own"),
        (f"{{name: a, transform: 'm:f', {FILE}}}", "3:15: actions[0].transform: needs a lane"),
        (f"{{name: a, lane: {{max_events: 1}}, {FILE}}}", "actions[0].lane: means nothing without"),
        (f"{{name: a, queue: disk, watermark: 1m, {FILE}}}", "watermark: means nothing without sq"),
        (f"{{name: a, queue: disk, transform: f, {FILE}}}", "transform: is module:function, such"),
        ("{name: a, output: {type: spark, format: csv}}", "3:30: actions[0].output.type: Spark wr"),
        (
            f"{{name: a, queue: disk, sql: SELECT 1, with_queues: [taken, takne], {FILE}}}",
            "3:64: actions[0].with_queues[1]: there is no queue 'takne'; did you mean taken?",
        ),
    ],
)
def test_an_action_that_cannot_be_is_refused_with_its_place(action: str, fault: str) -> None:
    found = only_fault_of(actions(action, more="queues: {taken: }\n"))
    assert found.startswith("c.yaml:3:")
    assert fault in found


SQL = "type: sql, url: 'sqlite:///a.db', table: t, columns: {id: offset}, exactly_once: true"
QUEUE = "type: queue, endpoint: 'turnlane://a:1', queue: q, producer: shop"


@pytest.mark.parametrize(
    ("action", "fault"),
    [
        (f"{{name: a, output: {{{SQL}}}}}", "output.exactly_once: notes which offsets"),
        (
            f"{{name: a, queue: disk, sql: SELECT 1, output: {{{SQL}}}}}",
            "output.exactly_once: is for events",
        ),
        (
            f"{{name: a, queue: disk, delivery: {{mode: try_direct}}, output: {{{SQL}}}}}",
            "output.exactly_once: knows events by their place, and with delivery.mode try_direct",
        ),
        (f"{{name: a, queue: disk, output: {{{QUEUE}}}}}", "output.producer: has the node there"),
        (
            f"{{name: a, queue: disk, delivery: {{ordering: key}}, output: {{{QUEUE}}}}}",
            "output.producer: has the node there drop what comes out of order",
        ),
        (
            f"{{name: a, queue: disk, delivery: {{failover: {{output: {{{QUEUE}}}}}}}, {FILE}}}",
            "delivery.failover.output.producer: has the node there drop what comes out of order",
        ),
        (
            f"{{name: a, delivery: {{failover: {{output: {{{SQL}}}}}}}, {FILE}}}",
            "delivery.failover.output.exactly_once: notes which offsets",
        ),
    ],
)
def test_an_output_that_cannot_keep_its_promise_there_is_refused(action: str, fault: str) -> None:
    assert fault in only_fault_of(actions(action))


def test_outputs_keep_their_promises_behind_a_queue_of_their_own() -> None:
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
def test_two_actions_whose_events_would_be_taken_for_each_others_are_refused(
    one: str, other: str, fault: str
) -> None:
    """Half of them would be left out, and nobody would know."""
    assert fault in only_fault_of(actions(f"{{name: a, {one}}}", f"{{name: b, {other}}}"))


def test_actions_may_share_what_tells_them_apart() -> None:
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
def test_what_is_of_another_shape_is_a_fault_like_any_other(action: str) -> None:
    with pytest.raises(ConfigFaults):
        loads(actions(action))


@pytest.mark.parametrize("kind", ["[]", "{}"])
def test_so_is_a_queue_of_another_shape(kind: str) -> None:
    with pytest.raises(ConfigFaults):
        loads(f"node: {{data: d}}\nqueues: {{main: {{kind: {kind}}}}}")


def test_two_actions_cannot_have_one_name() -> None:
    one = f"{{name: a, {FILE}}}"
    fault = only_fault_of(actions(one, one))
    assert fault == "c.yaml:4:12: actions[1].name: another action is called 'a' too"


def test_an_input_may_fill_the_main_queue_or_an_actions_but_no_other() -> None:
    inputs = "inputs: [{type: unix, path: x, queue: main}, {type: stdin, queue: a}"
    text = actions(f"{{name: a, queue: disk, {FILE}}}", f"{{name: b, {FILE}}}", more=inputs)
    assert len(loads(f"{text}]").inputs) == 2
    assert "there is no queue 'b'" in only_fault_of(f"{text}, {{type: unix, path: y, queue: b}}]")


def test_only_one_input_reads_the_standard_input() -> None:
    inputs = "inputs: [{type: stdin, queue: main}, {type: stdin, name: x, queue: main}]"
    fault = only_fault_of(f"node: {{data: d}}\nmain:\n{inputs}")
    assert "inputs[1].type: another input reads the standard input already" in fault


@pytest.mark.parametrize("section", ["parse: json", "transform: m:f", "lane: {max_events: 1}"])
def test_what_only_a_pipeline_has_is_refused_without_one(section: str) -> None:
    fault = only_fault_of(f"node: {{data: d}}\n{section}")
    assert fault.startswith("c.yaml:2:1: ")
    assert fault.endswith("means nothing without actions; add some")


def test_the_main_queue_is_described_once() -> None:
    text = actions(f"{{name: a, {FILE}}}", more="main: {}\nqueues: {main: }")
    assert only_fault_of(text) == "c.yaml:4:1: main: stands in queues too; keep one of them"


@pytest.mark.parametrize(
    ("parsing", "fault"),
    [
        ("sysog", "must be one of none, syslog, json, otlp, regex, not 'sysog'; did you mean sysl"),
        ("{format: regex}", "parse.pattern: is required with the format `regex`"),
        ("{format: json, pattern: x}", "4:32: parse.pattern: belongs to the format `regex`"),
        ("{fromat: json}", "4:9: parse.fromat: there is no such setting; did you mean format?"),
    ],
)
def test_how_values_are_parsed_is_checked(parsing: str, fault: str) -> None:
    assert fault in only_fault_of(actions(f"{{name: a, {FILE}}}", more=f"parse: {parsing}"))


def test_secrets_of_sinks_are_not_shown() -> None:
    config = loads(
        actions(
            "{name: a, queue: disk, output: {type: spark, format: jdbc, "
            "options: {dbtable: rows, url: 'jdbc:x?a=hush-hush', password: hush-hush}}}"
        )
    )
    assert "hush-hush" not in json.dumps(shown(config))
    assert '"dbtable": "rows"' in json.dumps(shown(config))


# ── what is found later ──────────────────────────────────────────────────────────────────────────


def test_what_spark_finds_wrong_has_its_place() -> None:
    config = loads(actions("name: a\n    filter: severty < 3\n    " + FILE), "c.yaml")
    placed = config.placed(ConfigError("actions[0].filter", "no such column"))
    assert str(placed) == "c.yaml:4:13: actions[0].filter: no such column"
    assert isinstance(placed, ConfigFaults)
    nowhere = config.placed(ConfigError("parse", "wrong"))
    assert str(nowhere) == "c.yaml:1:1: parse: wrong"


def test_settings_without_a_file_have_no_place() -> None:
    config = Config.model_validate({"node": {"data": "d"}})
    error = ConfigError("parse", "wrong")
    assert config.placed(error) is error


@pytest.mark.parametrize("path", [(), ("a",), ("actions", 1, "filter"), ("x", 0, 1)])
def test_a_dotted_path_can_be_taken_apart(path: tuple[str | int, ...]) -> None:
    assert undotted(dotted(path)) == path


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
def test_wrong_cases_are_told_with_their_place(
    tmp_path: Path, old: str, new: str, fault: str
) -> None:
    broken = CASES.replace(old, new)
    assert any(fault in each for each in faults_of(with_cases(broken)))
    file = tmp_path / "cases.yaml"
    file.write_text(broken)
    with pytest.raises(ConfigFaults) as caught:
        load_cases(file, loads(with_cases()))
    assert f"{file}:" in str(caught.value)
    assert fault in str(caught.value)


def test_nothing_is_expected_of_what_is_discarded() -> None:
    discards = actions("{name: a, output: {type: discard}}", more=CASES)
    assert "tests[0].expect.a: what is discarded goes nowhere" in "".join(faults_of(discards))


# ── schema, example, commands ────────────────────────────────────────────────────────────────────


def pipeline_page() -> list[str]:
    blocks = blocks_of(ROOT / "docs/pipeline.md")
    return [block.text for block in blocks if block.language == "yaml" and "node:" in block.text]


@pytest.mark.parametrize("text", [example(), *pipeline_page(), with_cases()])
def test_the_schema_accepts_what_the_loader_accepts(text: str) -> None:
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
def test_the_schema_refuses_what_the_loader_refuses(broken: dict[str, Any]) -> None:
    check = jsonschema_rs.validator_for(json.loads(config_schema.text()))
    assert check.is_valid({"node": {"data": "d"}})
    assert not check.is_valid({"node": {"data": "d"}, **broken})


def test_the_example_is_written_once_and_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "turnlane.yaml"
    made = CliRunner().invoke(app, ["init", str(file)])
    assert made.exit_code == 0, made.output
    pipeline = load(file).pipeline()
    assert pipeline is not None
    assert list(pipeline.lanes()) == ["main", "alerts", "archive", "counts"]
    checked = CliRunner().invoke(app, ["validate", str(file)])
    assert checked.stdout == f"{file}: ok, 0 queues, 2 inputs, 4 actions\n"
    file.write_text("mine")
    again = CliRunner().invoke(app, ["init", str(file)])
    assert again.exit_code == 1
    assert "exists" in again.stderr
    assert file.read_text() == "mine"


@pytest.mark.parametrize("command", ["run", "pipeline", "test", "graph"])
def test_a_node_without_actions_is_no_pipeline(command: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("node: {data: d}\n")
    said = CliRunner().invoke(app, [command, str(file)])
    assert said.exit_code == 78
    assert f"{file}:1:1: actions: there are none" in said.stderr


def test_a_pipeline_needs_a_token_where_the_node_wants_one(tmp_path: Path) -> None:
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
        ("endpoint: 'http://nope'", "4:19: nodes.endpoint: 'http://nope' is not a node's; write"),
        ("endpoint: 'turnlane://a,a'", "4:19: nodes.endpoint: 'turnlane://a,a' names a node twice"),
        ("tls_cert: c.pem", "4:19: nodes.tls_cert: and tls_key belong together: give both or"),
        ("tls_key: c.key", "4:18: nodes.tls_key: and tls_cert belong together: give both or"),
    ],
)
def test_nodes_that_cannot_be_reached_so_are_refused_with_their_place(
    nodes: str, fault: str
) -> None:
    said = only_fault_of(actions(f"{{name: a, {FILE}}}", more=f"nodes: {{{nodes}}}\n"))
    assert said.startswith(f"c.yaml:{fault}")


@pytest.mark.parametrize("command", ["validate", "run", "pipeline", "dlq list"])
@pytest.mark.parametrize(
    ("nodes", "fault"),
    [
        ("token_env: NOT_SET", "4:20: nodes.token_env: the variable NOT_SET is empty or not set"),
        ("token_file: none", "4:21: nodes.token_file: cannot be read: "),
    ],
)
def test_a_token_that_is_not_there_is_told_before_anything_is_started(
    command: str, nodes: str, fault: str, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(actions(f"{{name: a, {FILE}}}", more=f"nodes: {{{nodes}}}\n"))
    said = CliRunner().invoke(app, [*command.split(), str(file)])
    assert said.exit_code == 78, said.output
    assert said.stderr.startswith(f"{file}:{fault}")
    assert said.stderr.count("\n") == 1


def test_a_node_needs_no_token_of_the_pipeline_that_reads_from_it() -> None:
    """It may run elsewhere, with the same file."""
    text = actions(f"{{name: a, {FILE}}}", more="nodes: {token_env: NOT_SET}\n")
    assert not check(loads(text)).has_tokens


@pytest.mark.parametrize("given", ["option", "variable"])
def test_nodes_that_are_none_are_told_before_spark_is_started(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(actions(f"{{name: a, {FILE}}}"))
    if given == "variable":
        monkeypatch.setenv("TURNLANE_URL", "http://nope")
    option = ["--endpoint", "http://nope"] if given == "option" else []
    said = CliRunner().invoke(app, ["pipeline", str(file), *option])
    assert said.exit_code == 78, said.output
    assert said.stderr.startswith("turnlane: url: 'http://nope' is not a node's; write")


def test_what_lanes_find_wrong_with_their_nodes_is_told_by_its_name_in_the_file() -> None:
    """Spark's options have other names."""
    text = actions(f"{{name: a, {FILE}}}", more="nodes: {token_file: gone}\n")
    error = of_the_file(ConfigError("tokenFile", "gone: no such file"))
    told = loads(text, "c.yaml").placed(error)
    assert str(told) == "c.yaml:4:21: nodes.token_file: gone: no such file"
    assert str(of_the_file(ConfigError("actions[0].filter", "no"))) == "actions[0].filter: no"


def test_a_missing_java_is_said_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark.sql")
    file = tmp_path / "c.yaml"
    file.write_text(actions(f"{{name: a, {FILE}}}"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    said = CliRunner().invoke(app, ["run", str(file)])
    assert said.exit_code == 1
    assert said.stderr.count("\n") == 1
    assert "Spark needs Java 17" in said.stderr


def test_a_missing_spark_is_said_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(actions(f"{{name: a, {FILE}}}"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    said = CliRunner().invoke(app, ["run", str(file)])
    assert said.exit_code == 1
    assert said.stderr == "turnlane: Spark is not installed: pip install 'turnlane[spark]'\n"


OTHER_DATA = "OTHER"
MORE = f"  - {{name: c, queue: disk, {FILE}}}\n"


def changed_by(change: str) -> str:
    text = actions(f"{{name: a, {FILE}}}", more=change.removeprefix(OTHER_DATA))
    return text.replace("data: d", "data: e") if change.startswith(OTHER_DATA) else text


def test_what_lanes_alone_cannot_take_is_named() -> None:
    old = loads(with_cases())
    assert list(needs_restart(old, loads(with_cases()), old.knobs())) == []
    lanes = loads(with_cases().replace("name: a,", "name: a, filter: x,"))
    assert list(needs_restart(old, lanes, old.knobs())) == []
    other = with_cases().replace("data: d", "data: e").replace("queue: disk", "queue: memory")
    assert list(needs_restart(old, loads(other + "spark: {master: m}"), old.knobs())) == [
        "node",
        "spark",
        "queue b",
    ]


@pytest.mark.parametrize(
    ("more", "late", "on_cluster"),
    [
        ("tables: {t: {url: 'sqlite:///t.db'}}", ["tables"], []),
        ("nodes: {token_env: T}", [], ["nodes.token_env"]),
        ("nodes: {token_file: f, endpoint: 'turnlane://h:1'}", [], []),
    ],
)
def test_so_is_what_neither_the_node_nor_executors_take(
    more: str, late: list[str], on_cluster: list[str]
) -> None:
    old, new = loads(with_cases()), loads(with_cases() + more)
    assert list(needs_restart(old, new, old.knobs())) == late
    told = list(needs_restart(old, new, old.knobs(), on_cluster=True))
    assert told == late + on_cluster


@pytest.mark.parametrize(
    ("changes", "late"),
    [
        ([OTHER_DATA, OTHER_DATA + MORE, MORE], [["node"], ["node"], []]),
        ([MORE, MORE.replace("disk", "memory"), "", MORE], [[], ["queue c"], [], []]),
    ],
    ids=["sections", "a queue that a reload has made"],
)
def test_a_restart_is_needed_for_what_differs_from_what_runs_not_from_the_last_file(
    changes: list[str], late: list[list[str]], tmp_path: Path
) -> None:
    pytest.importorskip("pyspark.sql")
    file = tmp_path / "c.yaml"
    told: list[Any] = []
    file.write_text(changed_by(""))
    operation = Operation(
        file,
        load(file),
        Opening(lambda: cast("Any", None)),
        report=lambda _, __, **about: told.append(about.get("needs_restart")),
        seen=stamp(file),
        endpoint="turnlane://h:1",
    )
    operation._runner = cast("Any", SimpleNamespace(plan=None, start=lambda _: None))
    for change in changes:
        file.write_text(changed_by(change))
        operation._reload()
    assert [each for each in told if each is not None] == late


# ── names, places, and what only a start takes ───────────────────────────────────────────────────


def test_no_action_is_called_as_the_second_output_of_another_is() -> None:
    """They would have one breaker."""
    fault = only_fault_of(actions(f"{{name: a, {FILE}}}", f"{{name: a.failover, {FILE}}}"))
    assert fault.endswith("actions[1].name: the second output of another action is called so")


@pytest.mark.parametrize("more", ["", "parse: {format: json, on_error: dead}\n"])
def test_no_action_is_called_as_the_dead_letters_of_parsing_are(more: str) -> None:
    fault = only_fault_of(actions(f"{{name: main.dead, queue: disk, {FILE}}}", more=more))
    assert fault == "c.yaml:3:12: actions[0].name: dead letters of others are called so"


def test_checkpoints_are_in_a_directory() -> None:
    def text(place: str) -> str:
        return actions(f"{{name: a, {FILE}}}", more=f"spark: {{checkpoints: '{place}'}}\n")

    assert loads(text("file:///shared/c")).checkpoints() == Path("/shared/c")
    assert loads(text("/shared/c")).checkpoints() == Path("/shared/c")
    fault = only_fault_of(text("hdfs://nn:9000/c"))
    assert "4:22: spark.checkpoints: is a directory that every machine has, " in fault


def test_a_reload_leaves_checkpoints_where_they_are() -> None:
    """State would begin anew, and sinks of files would refuse the new place."""
    pytest.importorskip("pyspark.sql")
    old, new = (loads(actions(f"{{name: a, {FILE}}}").replace("d}", f"{at}}}")) for at in "xy")

    def no_session() -> Any:
        return None

    operation = Operation(
        Path("c.yaml"),
        old,
        Opening(no_session),
        report=lambda *_, **__: None,
        seen=None,
        endpoint="turnlane://h:1",
    )
    plan = operation._plan(new)
    assert plan is not None
    assert plan.checkpoints == Path("x/checkpoints").absolute()
    assert list(needs_restart(old, new, old.knobs())) == ["node"]


def access_after(old: str, new: str, **knobs: Any) -> dict[str, str]:
    """How a pipeline that began with one `nodes` reaches its nodes once it has another."""
    pytest.importorskip("pyspark.sql")
    begun, taken = (
        loads(actions(f"{{name: a, {FILE}}}", more=f"nodes: {{{nodes}}}\n")) for nodes in (old, new)
    )
    opening = Opening(lambda: cast("Any", None))
    made = Operation(
        Path("c.yaml"), begun, opening, report=lambda *_, **__: None, seen=None, **knobs
    )
    plan = made._plan(taken)
    assert plan is not None
    return dict(plan.access)


A_NODE, B_NODE = "turnlane://a:1", "turnlane://b:1"


def test_a_reload_takes_the_nodes_that_the_file_names_by_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TURNLANE_URL", raising=False)
    old, new = (f"endpoint: '{url}'" for url in (A_NODE, B_NODE))
    assert access_after(old, new) == {"endpoint": B_NODE}
    assert access_after(old, "") == {"endpoint": "turnlane://127.0.0.1:8815"}
    monkeypatch.setenv("TURNLANE_URL", "turnlane://c:1")
    assert access_after(old, "") == {"endpoint": "turnlane://c:1"}


def test_nodes_that_an_option_names_are_those_whatever_the_file_says() -> None:
    access = access_after(f"endpoint: '{A_NODE}'", f"endpoint: '{B_NODE}'", endpoint=A_NODE)
    assert access == {"endpoint": A_NODE}


def test_executors_of_a_cluster_have_the_token_of_the_start() -> None:
    """Their variables were given to them then; those of a local Spark are this process's."""
    known = {"endpoint": A_NODE, "on_cluster": True}
    assert access_after("token_env: A", "token_env: B", endpoint=A_NODE)["tokenEnv"] == "B"
    assert access_after("token_env: A", "token_env: B", **known)["tokenEnv"] == "A"
    assert "tokenEnv" not in access_after("token_file: f", "token_env: B", **known)
    assert access_after("token_file: f", "token_env: B", **known)["tokenFile"] == "f"
    assert access_after("token_env: A", "token_file: f", **known)["tokenFile"] == "f"


class Lanes:
    """A runner whose lanes do not end before the test says so."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.asked: list[list[str]] = []
        self.left = ["main"]

    def start(self, plan: Any) -> None:
        from turnlane.spark.runner import LanesLeft

        self.asked.append(list(plan.settings.lanes()))
        self.plan = None
        if self.left:
            raise LanesLeft(self.left)
        self.plan = plan

    def stop(self) -> list[str]:
        return self.left

    def changes(self) -> list[Any]:
        return []


class HungUp:
    """Signals, the first of which asks for a reload."""

    hung_up = True


@pytest.fixture
def told() -> list[tuple[str, dict[str, Any]]]:
    return []


@pytest.fixture
def operation(
    tmp_path: Path, told: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> Operation:
    """One that runs an action ``a``; its file has changed, and has ``b``."""
    pytest.importorskip("pyspark.sql")
    monkeypatch.setattr("turnlane.cli.operation.AGAIN_SECONDS", 0.0)
    path = tmp_path / "c.yaml"
    path.write_text(actions(f"{{name: b, queue: disk, {FILE}}}"))
    session: Any = SimpleNamespace(stop=lambda: None)
    made = Operation(
        path,
        loads(actions(f"{{name: a, queue: disk, {FILE}}}")),
        Opening(lambda: session),
        report=lambda event, _, **about: told.append((event, about)),
        seen=stamp(path),
        endpoint="turnlane://h:1",
    )
    made._runner = Lanes(made._plan(made.config))  # type: ignore[assignment]
    return made


def due(operation: Operation, signals: Any) -> None:
    """Do what there is to be done."""
    work = operation._due(signals)
    assert work is not None
    work()


def test_a_reload_that_waits_for_lanes_to_end_is_tried_again(
    operation: Operation, told: list[tuple[str, dict[str, Any]]]
) -> None:
    """And those before it, which have made room for it, are not started instead."""
    runner: Any = operation._runner
    signals: Any = HungUp()
    due(operation, signals)
    due(operation, signals)
    assert [event for event, _ in told] == ["waiting"] * 2
    why = "lane main of the configuration before has not ended yet"
    assert told[0][1]["reason"] == why
    runner.left = []
    due(operation, signals)
    assert runner.asked == [["main", "b"]] * 3
    assert [about["accepted"] for event, about in told if event == "reload"] == [True]
    assert operation._due(signals) is None


def test_if_it_is_rejected_meanwhile_the_lanes_before_it_are_started_again(
    operation: Operation, told: list[tuple[str, dict[str, Any]]]
) -> None:
    runner: Any = operation._runner
    signals: Any = HungUp()
    due(operation, signals)
    operation._path.write_text("actions: 7")
    due(operation, signals)
    assert told[-1][1]["accepted"] is False
    runner.left = []
    due(operation, signals)
    assert runner.asked == [["main", "b"], ["main", "a"]]
    assert operation._due(signals) is None


def test_a_pipeline_alone_needs_no_secrets_of_its_node_for_a_reload(
    operation: Operation, told: list[tuple[str, dict[str, Any]]]
) -> None:
    """Nor did it for its start: they are where the node is."""
    runner: Any = operation._runner
    runner.left = []
    tokens = "tokens: [{name: t, secret_env: NOT_SET, rights: {'*': [read]}}]"
    text = operation._path.read_text().replace("data: d", f"data: d, {tokens}")
    operation._path.write_text(text)
    due(operation, HungUp())
    assert [about["accepted"] for event, about in told if event == "reload"] == [True]


@pytest.mark.parametrize("nodes", ["token_env: NOT_SET", "endpoint: 'http://nope'"])
def test_a_reload_with_nodes_that_cannot_be_reached_so_is_rejected(
    nodes: str, operation: Operation, told: list[tuple[str, dict[str, Any]]]
) -> None:
    lines = operation._path.read_text().count("\n")
    with operation._path.open("a") as file:
        file.write(f"nodes: {{{nodes}}}\n")
    due(operation, HungUp())
    (fault,) = told[-1][1]["faults"]
    knob = nodes.partition(":")[0]
    assert fault.startswith(f"{operation._path}:{lines + 1}:{11 + len(knob)}: nodes.{knob}: ")


def test_lanes_that_have_not_ended_are_not_said_to_have_stopped(
    operation: Operation, told: list[tuple[str, dict[str, Any]]]
) -> None:
    operation.stop()
    assert told == [("lanes", {"count": 1, "names": ["main"]})]


class NoNode(contextlib.nullcontext[Any]):
    """In the place of a node's process."""

    def __init__(self, *_about: Any) -> None:
        super().__init__(self)

    def start(self) -> None:
        """Nothing is."""

    def stop(self, _patience: float) -> None:
        """Nor stopped."""

    def close(self) -> None:
        """Nor closed."""


@pytest.mark.parametrize("command", ["run", "pipeline"])
def test_a_file_that_changes_while_its_pipeline_starts_is_news(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the reading of it and the first look at it Java is looked for, and a node started."""
    file = tmp_path / "c.yaml"
    file.write_text(actions(f"{{name: a, {FILE}}}"))
    news: list[bool] = []

    def edit() -> None:
        file.write_text(actions(f"{{name: b, {FILE}}}"))

    class Looking(Operation):
        def run(self, _signals: Any) -> None:
            news.append(self._is_changed(cast("Any", SimpleNamespace(hung_up=False))))

    monkeypatch.setattr(run, "need_spark", edit)
    monkeypatch.setattr(run, "session", lambda *_, **__: SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr(run, "NodeProcess", NoNode)
    monkeypatch.setattr(run, "Operation", Looking)
    said = CliRunner().invoke(app, [command, str(file)])
    assert said.exit_code == 0, said.output
    assert news == [True]
