"""Which columns lanes need: the main one of those that parsing makes, the others to deliver."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyspark.sql")

from turnlane.config import loads
from turnlane.pipeline.settings import PipelineSettings
from turnlane.spark.lane_shape import (
    can_copy_by_reference,
    can_deliver_by_reference,
    find_filter_columns,
    find_task_columns,
)

RAW = "{type: file, path: a, format: raw}"
JSON = "{type: file, path: a}"
TEMPLATES = (
    "output: {type: http, url: 'http://a/{source}/{event_id}', body: '{value}', "
    "headers: {X-Host: '{hostname}'}, idempotency_key: false}"
)


def pipeline_of(*actions: str, parse: str = "syslog", more: str = "") -> PipelineSettings:
    listed = "".join(f"  - {{name: a{at}, {each}}}\n" for at, each in enumerate(actions))
    config = loads(f"node: {{data: d}}\nmain: {{}}\nparse: {parse}\n{more}\nactions:\n{listed}")
    pipeline = config.pipeline()
    assert pipeline is not None
    return pipeline


def wanted(*actions: str, **knobs: Any) -> frozenset[str] | None:
    return find_filter_columns(pipeline_of(*actions, **knobs))


def test_raw_outputs_need_only_columns_of_filters() -> None:
    found = wanted(
        f"queue: disk, filter: 'Severity <= 3', output: {RAW}",
        f"filter: 'upper(`app_name`) = \"X\"', output: {RAW}",
        "filter: 'facility = 1', output: {type: discard}",
    )
    assert found is not None
    assert found >= {"severity", "app_name", "facility"}
    assert "hostname" not in found


@pytest.mark.parametrize(
    ("actions", "knobs"),
    [
        ([f"queue: disk, output: {JSON}"], {}),
        ([f"queue: disk, output: {RAW}", f"output: {JSON}"], {}),
        ([f"queue: disk, transform: 'a:b', output: {RAW}"], {}),
        ([f"queue: disk, sql: 'SELECT value FROM events', output: {RAW}"], {}),
        ([f"queue: disk, filter: 'size(array(*)) > 1', output: {RAW}"], {}),
        ([f"queue: disk, delivery: {{failover: {{output: {JSON}}}}}, output: {RAW}"], {}),
        ([f"queue: disk, output: {RAW}"], {"more": "transform: a:b"}),
        ([f"queue: disk, output: {RAW}"], {"parse": "{format: syslog, on_error: dead}"}),
    ],
    ids=["json", "one of two", "transform", "sql", "star", "failover", "all", "dead letters"],
)
def test_other_readers_need_all_columns(actions: list[str], knobs: dict[str, Any]) -> None:
    assert wanted(*actions, **knobs) is None


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        (f"output: {RAW}", set()),
        (f"output: {JSON}", set()),
        ("output: {type: http, url: 'http://a/'}", {"timestamp"}),
        (
            TEMPLATES,
            {"source", "hostname", "value"},
        ),
        (
            "output: {type: elasticsearch, url: 'http://a', index: 'logs-{source}'}",
            {"source", "timestamp"},
        ),
        ("output: {type: syslog, address: 'a:1', format: raw}", set()),
        (f"delivery: {{ordering: key}}, output: {RAW}", {"key"}),
        (f"delivery: {{failover: {{output: {RAW}}}}}, output: {JSON}", {"value"}),
        (f"transform: 'a:b', output: {JSON}", set()),
    ],
)
def test_tasks_need_offsets_and_columns_of_outputs(knobs: str, expected: set[str]) -> None:
    (action,) = pipeline_of(f"queue: disk, {knobs}").queued_actions
    assert find_task_columns(action) == frozenset(expected | {"partition", "offset"})


@pytest.mark.parametrize(
    "knobs",
    [
        "output: {type: syslog, address: 'a:1'}",
        "output: {type: otlp, url: 'http://a'}",
        f"sql: 'SELECT value FROM events', output: {JSON}",
        f"delivery: {{failover: {{output: {{type: otlp, url: 'http://a'}}}}}}, output: {RAW}",
    ],
)
def test_tasks_need_all_columns_if_an_output_reads_any(knobs: str) -> None:
    (action,) = pipeline_of(f"queue: disk, {knobs}").queued_actions
    assert find_task_columns(action) is None


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ([f"queue: disk, filter: severity < 4, output: {RAW}"] * 2, True),
        ([f"queue: disk, output: {RAW}"] * 62, True),
        ([f"queue: disk, output: {RAW}"] * 63, False),
        ([f"queue: disk, output: {JSON}"], False),
        ([f"queue: {{discard_mark: 10, discard_severity: 4}}, output: {RAW}"], False),
    ],
    ids=["values", "many", "more than there are bits", "parsed columns", "sheds by severity"],
)
def test_main_lane_copies_by_reference_if_queues_store_raw_events(
    actions: list[str], expected: bool
) -> None:
    assert can_copy_by_reference(pipeline_of(*actions)) == expected


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        (f"output: {RAW}", True),
        (f"delivery: {{ordering: key, failover: {{output: {RAW}}}}}, output: {RAW}", True),
        ("output: {type: http, url: 'http://a/', format: raw}", True),
        (f"output: {JSON}", False),
        (f"delivery: {{failover: {{output: {JSON}}}}}, output: {RAW}", False),
        (f"transform: 'a:b', output: {RAW}", False),
        (f"sql: 'SELECT value FROM events', output: {RAW}", False),
        (TEMPLATES, False),
    ],
    ids=["raw", "key and failover", "http", "json", "one json", "transform", "sql", "parsed"],
)
def test_lane_delivers_by_reference_if_spark_changes_nothing(knobs: str, expected: bool) -> None:
    (action,) = pipeline_of(f"queue: disk, {knobs}").queued_actions
    assert can_deliver_by_reference(action) == expected
