"""What a configuration may say about parsing, and what it is told when it may not."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from turnlane.formats.parse_settings import (
    BadPattern,
    Format,
    GroupedPattern,
    JsonColumn,
    OnError,
    ParseSettings,
)
from turnlane.validation import convert_validation_error


def why(given: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        ParseSettings.model_validate(given)
    return str(convert_validation_error(caught.value, ParseSettings.model_fields))


def test_bare_word_is_the_format() -> None:
    assert ParseSettings.model_validate("syslog").format is Format.SYSLOG
    assert ParseSettings.model_validate(None).format is Format.NONE
    assert ParseSettings().on_error is OnError.KEEP


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sislog", "format: must be one of none, syslog, json, otlp, regex, not 'sislog'; did you"),
        ({"format": "json", "pattern": "x"}, "pattern: belongs to the format `regex`, not"),
        ({"format": "regex"}, "pattern: is required with the format `regex`"),
        ({"format": "regex", "pattern": "x"}, "pattern: has no named group"),
        ({"format": "regex", "pattern": "(?<a>x"}, "opened at character 1 is never closed"),
        ({"format": "regex", "pattern": "(?<a>[x)"}, "class opened at character 6 is never closed"),
        ({"format": "regex", "pattern": "(?<a>x))"}, "`)` at character 8 closes nothing"),
        ({"format": "regex", "pattern": "(?<a>*)"}, "`*` at character 6 repeats nothing"),
        ({"format": "regex", "pattern": "(?<a>x)\\"}, "ends with a lone backslash"),
        ({"format": "regex", "pattern": "(?P<a>x)"}, "is Python; Java writes (?<a>…)"),
        ({"format": "regex", "pattern": "(?<a>x)(?<a>y)"}, "there are two groups 'a'"),
        ({"format": "regex", "pattern": "(?<a>x)(?<A>y)"}, "group 'A' is listed twice"),
        ({"format": "regex", "pattern": r"(?<a>x)\k<b>"}, "there is no group 'b'"),
        ({"format": "regex", "pattern": "(?<a b>x)"}, "group 'a b' is not a column name"),
        ({"format": "regex", "pattern": "(?<_a>x)"}, "group '_a' is not a column name"),
        ({"format": "regex", "pattern": "(?<Severity>x)"}, "'Severity' is a column that every"),
        ({"format": "json", "columns": {"value": "a"}}, "columns.value: is a column that every"),
        ({"format": "json", "columns": {"a": "b::itn"}}, "no type 'itn'; did you mean int?"),
        ({"format": "json", "columns": {"a": "b..c"}}, "'b..c' is not a path"),
        ({"format": "syslog", "time_zone": "Europe/Berln"}, "did you mean Europe/Berlin?"),
        ({"format": "syslog", "on_eror": "dead"}, "on_eror: there is no such knob; did you mean"),
    ],
)  # fmt: skip
def test_wrong_setting_is_named(given: Any, message: str) -> None:
    assert message in why(given)


def test_json_columns_have_paths_and_types() -> None:
    columns = {
        "status": "http.status::int",
        "first": "items[0].name",
        "odd": "['a b'] :: DECIMAL(9,2)",
    }
    assert ParseSettings.model_validate(
        {"format": "json", "columns": columns}
    ).build_json_columns() == {
        "status": JsonColumn("$.http.status", "int"),
        "first": JsonColumn("$.items[0].name", "string"),
        "odd": JsonColumn("$['a b']", "decimal(9,2)"),
    }


@pytest.mark.parametrize(
    ("pattern", "plain", "numbers"),
    [
        (r"(?<a>x)(y)(?:z)(?<b_c>w)", r"(x)(y)(?:z)(w)", {"a": 1, "b_c": 3}),
        (r"(?<=x)(?<!y)(?=z)(?<a>\(|[)\]])", r"(?<=x)(?<!y)(?=z)(\(|[)\]])", {"a": 1}),
        (r"\Q(\E(?<a>[\Q]\E(]+)", r"\Q(\E([\Q]\E(]+)", {"a": 1}),
        (r"(?<a>[a-z&&[^b(]])", r"([a-z&&[^b(]])", {"a": 1}),
        (r"(?<a>[]x(])(?<b>[^](])", r"([]x(])([^](])", {"a": 1, "b": 2}),
        (r"(?i)(?<a>x)0\k<a>0", r"(?i)(x)0(?:\1)0", {"a": 1}),
    ],
)
def test_named_groups_become_numbered_groups(
    pattern: str, plain: str, numbers: dict[str, int]
) -> None:
    assert GroupedPattern.of(pattern) == GroupedPattern(plain, numbers)


@given(st.text(alphabet="ab()[]\\?<>=!:*+^QEk-", max_size=20))
def test_random_pattern_is_parsed_or_refused(pattern: str) -> None:
    try:
        grouped = GroupedPattern.of(pattern)
    except BadPattern:
        return
    assert not re.search(r"(?<!\\)\(\?<\w", re.sub(r"\\Q.*?(\\E|\Z)|\[.*", "", grouped.pattern))


@pytest.mark.parametrize("name", ["payload", "Payload", "turnlane_row", "Turnlane_x", "offset"])
def test_column_with_a_name_of_lanes_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=f"columns.{name}"):
        ParseSettings.model_validate({"format": "json", "columns": {name: "a"}})


def test_names_of_former_columns_are_allowed() -> None:
    columns = dict.fromkeys(("routes", "direct", "hollows", "event_row"), "a")
    assert ParseSettings.model_validate({"format": "json", "columns": columns}).columns == columns
