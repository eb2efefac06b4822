"""Do templates hold what events have, in a form that the place around them can bear?"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.outputs.web_blocks import events, with_column
from turnlane.outputs.templates import Template, for_header, for_json, for_url

TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=50), min_size=1, max_size=5)


def filled(template: str, block: Any, **how: Any) -> list[str]:
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
def test_what_a_template_holds(template: str, text: str) -> None:
    block = events([b"caf\xe9"], first=5, keys=["k"], severities=[3], headers=[{"a": "1"}])
    block = with_column(block, "place", pa.array([{"x": 7}]))
    block = with_column(block, "up", [True])
    assert filled(template, block) == [text]


def test_the_constant_ones_are_known() -> None:
    assert Template.parse("a{{b").constant == "a{b"
    assert Template.parse("a{b}").constant is None
    assert Template.parse("a{b}c").before_places() == "a"


@given(TEXTS)
def test_a_value_in_json_is_that_value(texts: list[str]) -> None:
    block = events([b""] * len(texts), sources=texts)
    found = filled('"{source}"', block, escape=for_json)
    assert [json.loads(each) for each in found] == texts


@given(TEXTS)
def test_a_value_in_a_path_is_one_segment(texts: list[str]) -> None:
    block = events([b""] * len(texts), sources=texts)
    for text, url in zip(
        texts, filled("http://h/a/{source}/b", block, escape=for_url), strict=True
    ):
        parts = urlsplit(url)
        assert (parts.netloc, parts.query, parts.fragment) == ("h", "", "")
        _, a, segment, b = parts.path.split("/")
        assert (a, b) == ("a", "b")
        assert segment not in (".", "..")
        assert unquote(segment) == text


@given(TEXTS)
def test_a_value_in_a_header_is_on_one_line(texts: list[str]) -> None:
    block = events([b""] * len(texts), sources=texts)
    for text in filled("{source}", block, escape=for_header):
        assert not set(text) & {"\r", "\n", "\0"}
