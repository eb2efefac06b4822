"""A configuration is shown completely, except for possible secrets."""

from __future__ import annotations

import json

import pytest

from turnlane.config import get_visible_settings, loads
from turnlane.config.validation import MASK

SECRET = "hunter2"
FILE = "actions: [{name: k, output: {type: file, path: o}}]"


def output(settings: str) -> str:
    return f"actions: [{{name: k, queue: disk, output: {{{settings}}}}}]"


@pytest.mark.parametrize(
    "text",
    [
        output(f"type: spark, format: kafka, options: {{kafka.sasl.jaas.config: 'x {SECRET}'}}"),
        output(f"type: spark, format: x, options: {{anything: {SECRET}}}"),
        output(f"type: http, url: 'https://h/y?a=1&key={SECRET}'"),
        output(f"type: http, url: 'https://h/y', headers: {{X-Key: {SECRET}}}"),
        f"spark: {{conf: {{spark.hadoop.fs.s3a.access.key: {SECRET}}}}}\n{FILE}",
        f"spark: {{conf: {{spark.hadoop.fs.azure.account.key.x: {SECRET}}}}}\n{FILE}",
    ],
)
def test_possible_secrets_are_masked(text: str) -> None:
    config = loads(f"node: {{data: d}}\n{text}", "c.yaml", {})
    assert SECRET not in json.dumps(get_visible_settings(config))
    assert SECRET not in f"{config!r}{config}"


def test_variables_are_shown_as_written() -> None:
    config = loads(
        "node: {data: 'd/${P}'}\n" + output("type: http, url: 'https://h/${P}'"),
        "c.yaml",
        {"P": SECRET},
    )
    found = get_visible_settings(config)
    assert found["node"]["data"] == "d/${P}"
    assert found["actions"][0]["output"]["url"] == "https://h/${P}"
    assert config.actions[0].output.model_dump()["url"] == f"https://h/{SECRET}"


@pytest.mark.parametrize("url", ["sqlite:///x.db", "sqlite:////tmp/a@b.db", "postgresql://me@h/db"])
def test_database_address_without_a_secret_is_shown(url: str) -> None:
    columns = "table: t, columns: {a: value}"
    found = get_visible_settings(
        loads(f"node: {{data: d}}\n{output(f'type: sql, url: {url!r}, {columns}')}")
    )
    assert found["actions"][0]["output"]["url"] == url


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        (f"s3://me:{SECRET}@bucket/x", f"s3://me:{MASK}@bucket/x"),
        (f"jdbc:x://me:{SECRET}@h/db?p={SECRET}#f", f"jdbc:x://me:{MASK}@h/db?p={MASK}#f"),
        (f"http://[me:{SECRET}@h", f"http://[me:{MASK}@h"),
    ],
)
def test_password_in_an_address_is_masked(path: str, seen: str) -> None:
    found = get_visible_settings(
        loads(f"node: {{data: d}}\n{output(f'type: spark, format: x, path: {path!r}')}")
    )
    assert found["actions"][0]["output"]["path"] == seen


def test_harmless_values_are_shown() -> None:
    found = get_visible_settings(
        loads(
            "node: {data: d}\nspark: {conf: {spark.driver.memory: 2g, spark.ui.enabled: 'false'}}\n"
            + output("type: http, url: 'https://h:1/y?a', headers: {Content-Type: text/x}")
        )
    )
    assert found["spark"]["conf"] == {"spark.driver.memory": "2g", "spark.ui.enabled": "false"}
    assert found["actions"][0]["output"]["url"] == "https://h:1/y?a"
    assert found["actions"][0]["output"]["headers"] == {"Content-Type": "text/x"}
