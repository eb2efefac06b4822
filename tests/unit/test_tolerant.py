"""Is the short way into JSON null where Spark would fail, and everything else left alone?"""

from __future__ import annotations

import pytest

from turnlane.spark.transforms import use_try_casts


@pytest.mark.parametrize(
    ("written", "made"),
    [
        ("data:http.status::int >= 500", "try_cast(data:http.status AS int) >= 500"),
        ("data:a :: int < 5 AND b > 3", "try_cast(data:a AS int) < 5 AND b > 3"),
        ("e.data:a::int = o.data:a::int", "try_cast(e.data:a AS int) = try_cast(o.data:a AS int)"),
        ("data:items[0]['odd key']::double", "try_cast(data:items[0]['odd key'] AS double)"),
        ("data:[0].a::decimal(9, 2) > 1", "try_cast(data:[0].a AS decimal(9, 2)) > 1"),
        ("data:a::array<struct<b:int>> <> c", "try_cast(data:a AS array<struct<b:int>>) <> c"),
        ("`data`:`odd key`::string", "try_cast(`data`:`odd key` AS string)"),
        ("CAST( data:a.b AS int)", "try_cast(data:a.b AS int)"),
        ("(data:a::int)", "(try_cast(data:a AS int))"),
    ],
)
def test_cast_of_a_json_value_becomes_try_cast(written: str, made: str) -> None:
    assert use_try_casts(written) == made


@pytest.mark.parametrize(
    "text",
    [
        "severity::int > 3",
        "message = 'data:a::int' OR message = \"data:a::int\"",
        "message = 'it\\'s data:a::int'",
        "a > 1 -- data:a::int\n AND b",
        "a > 1 /* data:a::int\n */ AND b",
        "data:a = 1",
        "CAST(severity AS int)",
        "try_cast(data:a AS int)",
        "`it's` = 1 AND `that's` = 2",
        "named_struct('a', 1).a",
    ],
)
def test_other_sql_is_not_changed(text: str) -> None:
    assert use_try_casts(text) == text
