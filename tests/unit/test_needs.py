"""Which columns of parsing the main lane needs."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyspark.sql")

from turnlane.config import loads
from turnlane.spark.needs import wanted_by_main

RAW = "{type: file, path: a, format: raw}"
JSON = "{type: file, path: a}"


def wanted(*actions: str, parse: str = "syslog", more: str = "") -> frozenset[str] | None:
    listed = "".join(f"  - {{name: a{at}, {each}}}\n" for at, each in enumerate(actions))
    config = loads(f"node: {{data: d}}\nmain: {{}}\nparse: {parse}\n{more}\nactions:\n{listed}")
    pipeline = config.pipeline()
    assert pipeline is not None
    return wanted_by_main(pipeline)


def test_outputs_that_take_values_leave_what_filters_name() -> None:
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
def test_whoever_may_read_them_gets_all(actions: list[str], knobs: dict[str, Any]) -> None:
    assert wanted(*actions, **knobs) is None
