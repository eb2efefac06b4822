"""Are templates filled with the values of events, escaped for their context?"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.outputs.web_blocks import make_events, set_column
from turnlane.outputs.templates import Template, escape_header, escape_json, escape_url

TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=50), min_size=1, max_size=5)


def fill_template(template: str, block: Any, **how: Any) -> list[str]:
    found: Any = Template.parse(template).fill(block, **how)
    return list(found.to_pylist())


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("", ""),
        ("plain {{not}} {{", "plain {not} {"),
        ("{key}", "k"),
        ("<{key}{source}>", "<k>"),
        ("{{{key}}}", "{k}"),
        ("{value}", "caf\ufffd"),
        ("{severity}", "3"),
        ("{timestamp}", "2023-11-14T22:13:20.000000Z"),
        ("{timestamp:%d.%m.%Y %H:%M}", "14.11.2023 22:13"),
        ("{headers.a}-{headers.no such key}", "1-"),
        ("{event_id}", "alerts/0/5"),
        ("{place.x}", "7"),
        ("{up}", "true"),
    ],
)
def test_template_is_filled_with_values(template: str, text: str) -> None:
    block = make_events([b"caf\xe9"], first=5, keys=["k"], severities=[3], headers=[{"a": "1"}])
    block = set_column(block, "place", pa.array([{"x": 7}]))
    block = set_column(block, "up", [True])
    assert fill_template(template, block) == [text]


def test_template_without_fields_is_constant() -> None:
    assert Template.parse("a{{b").constant == "a{b"
    assert Template.parse("a{b}").constant is None
    assert Template.parse("a{b}c").get_text_before_fields() == "a"


@given(TEXTS)
def test_value_escaped_for_json_is_read_back_unchanged(texts: list[str]) -> None:
    block = make_events([b""] * len(texts), sources=texts)
    found = fill_template('"{source}"', block, escape=escape_json)
    assert [json.loads(each) for each in found] == texts


@given(TEXTS)
def test_value_escaped_for_a_url_is_one_segment(texts: list[str]) -> None:
    block = make_events([b""] * len(texts), sources=texts)
    for text, url in zip(
        texts, fill_template("http://h/a/{source}/b", block, escape=escape_url), strict=True
    ):
        parts = urlsplit(url)
        assert (parts.netloc, parts.query, parts.fragment) == ("h", "", "")
        _, a, segment, b = parts.path.split("/")
        assert (a, b) == ("a", "b")
        assert segment not in (".", "..")
        assert unquote(segment) == text


@given(TEXTS)
def test_value_escaped_for_a_header_is_on_one_line(texts: list[str]) -> None:
    block = make_events([b""] * len(texts), sources=texts)
    for text in fill_template("{source}", block, escape=escape_header):
        assert not set(text) & {"\r", "\n", "\0"}
