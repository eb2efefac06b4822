"""Bodies cut into values: nothing lost, nothing changed, nothing crashes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlane.formats.lines import _split_long_body, split_body_lines, split_json_array
from turnlane.inputs.elasticsearch import parse_bulk

PIECES = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\xff"])).map(b"".join)


@given(PIECES)
def test_body_lines_equal_a_plain_split(body: bytes) -> None:
    *ended, last = body.split(b"\n")
    plain = [*(line.removesuffix(b"\r") for line in ended), last]
    for cut in (split_body_lines, _split_long_body):
        found = cut(body)
        found.validate(full=True)
        assert found.to_pylist() == [line for line in plain if line]


def test_long_body_is_split_like_a_short_one() -> None:
    body = b"one\r\n\ntwo\n" * 1000
    assert split_body_lines(body).to_pylist() == [b"one", b"two"] * 1000


VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
)


@given(st.lists(VALUES, max_size=5), st.sampled_from([None, 1]), st.booleans())
def test_array_elements_are_kept_as_written(
    elements: list[object], indent: int | None, ascii_only: bool
) -> None:
    body = json.dumps(elements, indent=indent, ensure_ascii=ascii_only).encode()
    found = split_json_array(body).to_pylist()
    assert [json.loads(value or b"") for value in found] == elements
    if found:
        assert body.index(found[0] or b"") >= 0


@given(VALUES.filter(lambda value: not isinstance(value, list)))
def test_json_value_without_array_is_kept_whole(value: object) -> None:
    body = json.dumps(value, indent=1).encode()
    assert split_json_array(b" " + body + b"\n").to_pylist() == [body]


@pytest.mark.parametrize(
    "body",
    [b"", b"[", b"[1", b"[1,", b"[1,]", b"[,]", b"[1 2]", b"[1] 2", b"[1]]", b"{", b"\xff", b"x"],
)
def test_body_that_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="not JSON"):
        split_json_array(body)


def test_bulk_documents_are_kept_as_written() -> None:
    body = b'{"index": {"_id": 7}}\r\n{"a":  1.50}\r\n\r\n{"delete": {"_index": "b", "_id": "x"}}'
    first, second = parse_bulk(body, "a")
    assert first[:4] == ("index", "a", "7", b'{"a":  1.50}')
    assert second == ("delete", "b", "x", b"", None)
