"""Drawings of a pipeline, and differences of test cases."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from turnlane.cli.app import app
from turnlane.cli.pipeline_tools import build_topology
from turnlane.config import loads
from turnlane.pipeline.cases import Case, find_differences
from turnlane.pipeline.graph import Topology, render_svg, render_text, shorten

CONFIG = """\
node: {data: d}
queues: {metrics: {kind: memory}}
inputs:
  - {type: syslog, tcp: 127.0.0.1:5514, queue: main}
  - {type: files, paths: [/var/log/a, /var/log/b], queue: main}
  - {type: http, listen: 127.0.0.1:8080, queue: metrics}
parse: syslog
transform: shop:tidy
actions:
  - {name: noise, filter: severity = 7, output: {type: discard}}
  - {name: alerts, filter: "severity <= 3 AND app_name = '<b>'", queue: disk,
     output: {type: file, path: out/alerts}}
  - {name: counts, queue: {kind: disk_assisted}, sql: SELECT 1, transform: "m:f",
     output: {type: spark, format: parquet, path: "s3://me:hush@bucket/x"}}
  - {name: all, output: {type: file, path: out/all}}
"""


def topology(text: str = CONFIG, **environment: str) -> Topology:
    return build_topology(loads(text, environment=environment))


def leading_to(**output: str) -> str:
    """A configuration with one action."""
    return f"node: {{data: d}}\nactions: [{{name: a, queue: disk, output: {json.dumps(output)}}}]"


def test_text_shows_inputs_actions_and_outputs() -> None:
    assert (
        "\n".join(render_text(topology()))
        == """\
inputs
  http    127.0.0.1:8080         ──▶ queue metrics (memory)
  syslog  tcp 127.0.0.1:5514     ─┐
  files   /var/log/a, /var/log/b ─┴▶ queue main

queue main (disk)
  │ parse: syslog
  │ transform: shop:tidy
  │
  ├─ noise   severity = 7                       ──▶ discard: goes no further
  ├─ alerts  severity <= 3 AND app_name = '<b>' ──▶ queue (disk) ══▶ file out/alerts
  ├─ counts  every event                        ──▶ queue (disk_assisted) ══▶ transform m:f \
══▶ sql ══▶ spark parquet s3://me:**********@bucket/x
  └─ all     every event                        ──▶ file out/all

lanes: 1 + 2 = 3 (main, alerts, counts)"""
    )


def test_text_says_that_there_are_no_inputs() -> None:
    only = "node: {data: d}\nactions: [{name: a, output: {type: discard}}]"
    lines = list(render_text(topology(only)))
    assert lines[1] == "  (none: events are published by clients)"
    assert lines[-1] == "lanes: 1 + 0 = 1 (main)"


def test_narrow_terminal_shortens_filters() -> None:
    lines = list(render_text(topology(), 60))
    assert any("severity <…" in line for line in lines)


def test_picture_is_valid_xml_and_complete() -> None:
    root = ET.fromstring(render_svg(topology()))
    words = [text for element in root.iter() if (text := element.text)]
    for expected in ("noise", "alerts", "counts", "all", "main (disk)", "disk_assisted"):
        assert expected in words
    assert "severity <= 3 AND app_name = '<b>'" in words
    assert not any("hush" in word for word in words)
    paths = [element for element in root.iter() if element.tag.endswith("path")]
    # Two inputs, four actions, two arrows into queues, and four to outputs.
    assert len(paths) == 2 + 4 + 2 + 4
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height


def test_command_prints_text_or_writes_the_picture(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG)
    printed = CliRunner().invoke(app, ["graph", str(config)])
    assert printed.exit_code == 0
    assert "lanes: 1 + 2 = 3" in printed.stdout
    picture = tmp_path / "g.svg"
    assert CliRunner().invoke(app, ["graph", str(config), "--svg", str(picture)]).exit_code == 0
    drawn = CliRunner().invoke(app, ["graph", str(config), "--svg", "-"])
    assert drawn.stdout == picture.read_text()


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("https://h/x?token=${HUSH}", "https://h/x?token=${HUSH}"),
        ("https://h/${HUSH}", "https://h/${HUSH}"),
        ("https://h/x?a=hunter2&token=hunter2&b", "https://h/x?a=**********&token=**********&b"),
    ],
)
def test_secrets_in_addresses_are_not_shown(url: str, seen: str) -> None:
    found = topology(leading_to(type="http", url=url), HUSH="hunter2")
    assert any(line.endswith(f"http {seen}") for line in render_text(found, 200))
    for drawn in (*render_text(found, 200), render_svg(found)):
        assert "hunter2" not in drawn


def test_filter_is_shown_as_written() -> None:
    actions = "[{name: a, filter: \"key = '${HUSH}'\", output: {type: discard}}]"
    found = topology(f"node: {{data: d}}\nactions: {actions}", HUSH="hunter2")
    assert any("key = '${HUSH}'" in line for line in render_text(found))
    assert "hunter2" not in render_svg(found)


@pytest.mark.parametrize(
    "path", ["sqlite:///x.db", "sqlite:////tmp/a@b.db", "out/a@b", "file:///o"]
)
def test_address_without_secrets_is_shown_as_written(path: str) -> None:
    found = topology(leading_to(type="spark", format="parquet", path=path))
    assert any(line.endswith(f"parquet {path}") for line in render_text(found))


def test_long_text_is_shortened() -> None:
    assert shorten("a  b\nc", 5) == "a b c"
    assert shorten("abcdef", 4) == "abc…"


# ── differences of cases ──


def found(expect: object, **got: list[dict[str, object]]) -> list[str]:
    case = Case.model_validate({"name": "c", "events": [], "expect": expect})
    return list(find_differences(case, got))


def test_rows_match_in_any_order_by_the_given_columns() -> None:
    rows: list[dict[str, object]] = [{"a": 1, "b": "x"}, {"a": 2, "b": None, "c": {"d": 1, "e": 2}}]
    assert found({"q": [{"a": 2, "b": None, "c": {"d": 1}}, {"b": "x"}]}, q=rows) == []
    assert found({"q": 2}, q=rows) == []
    assert found({}, q=rows) == []


def test_vague_expectation_does_not_take_the_row_of_an_exact_one() -> None:
    assert found({"q": [{"a": 1}, {"a": 1, "b": 2}]}, q=[{"a": 1, "b": 2}, {"a": 1, "b": 3}]) == []


def test_difference_shows_the_closest_row() -> None:
    rows: list[dict[str, object]] = [{"a": 1, "b": "x", "z": 0}, {"a": 5, "b": "y", "z": 0}]
    assert found({"q": [{"a": 1, "b": "w"}]}, q=rows) == [
        "q: expected 1 event, got 2",
        '  - {"a": 1, "b": "w"}',
        '  + {"a": 1, "b": "x"}',
        '  + {"a": 5, "b": "y"}',
    ]


def test_wrong_count_shows_the_rows() -> None:
    assert found({"q": 0}, q=[{"a": 1}]) == ["q: expected 0 events, got 1", '  got {"a": 1}']
    assert found({"q": 3}) == ["q: expected 3 events, got 0"]
    many: list[dict[str, object]] = [{"a": at} for at in range(9)]
    assert found({"q": 0}, q=many)[-1] == "  … and 4 more"


def test_missing_column_is_named() -> None:
    lines = found({"q": [{"hostnam": "a"}]}, q=[{"hostname": "a"}])
    assert "  there is no column 'hostnam'; did you mean hostname?" in lines


def test_true_does_not_equal_one() -> None:
    assert found({"q": [{"a": True}]}, q=[{"a": 1}])
    assert found({"q": [{"a": 1}]}, q=[{"a": 1.0}]) == []


def test_joined_queue_leads_to_the_joining_action() -> None:
    found = topology(
        "node: {data: d}\nactions:\n"
        "  - {name: kept, queue: disk, output: {type: discard}}\n"
        "  - {name: j, queue: disk, sql: SELECT 1, with_queues: [kept],\n"
        "     output: {type: file, path: o}}\n"
    )
    assert any(
        "kept  every event ──▶ queue (disk) ══▶ joined by j" in x for x in render_text(found)
    )
    assert "joined" in render_svg(found)
    assert found.lanes == "lanes: 1 + 1 = 2 (main, j)"
