"""Bodies of requests, cut into values: by lines, or by the elements of a JSON array."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import pyarrow as pa

from turnlane.events import values_array
from turnlane.formats.lines import cut, without_empty

_SHORT: Final = 2048
"""Bytes: up to here the start of a vectorised search costs more than it saves."""
_DECODER: Final = json.JSONDecoder()
_SPACE: Final = re.compile(r"[ \t\n\r]*")


def lines(body: bytes) -> pa.Array[Any]:
    r"""The lines of a body, without their ends (``\n`` or ``\r\n``); empty ones are left out."""
    return _few_lines(body) if len(body) <= _SHORT else _many_lines(body)


def _few_lines(body: bytes) -> pa.Array[Any]:
    *ended, last = body.split(b"\n")
    found = [*(line.removesuffix(b"\r") for line in ended), last]
    return values_array([line for line in found if line])


def _many_lines(body: bytes) -> pa.Array[Any]:
    """The same without a step for each line."""
    found = cut(body, max(1, len(body)), whole=True)
    return values_array([]) if found is None else without_empty(found.values)


def json_values(body: bytes) -> pa.Array[Any]:
    """The elements of a JSON array, each as it was written, or the one value that is no array.

    Raises ``ValueError``.
    """
    try:
        text = body.decode()
        at = _skip(text, 0)
        found = _elements(text, at + 1) if text[at : at + 1] == "[" else [_whole(text)]
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    return values_array([element.encode() for element in found])


def _whole(text: str) -> str:
    json.loads(text)
    return text.strip()


def _elements(text: str, at: int) -> list[str]:
    found: list[str] = []
    at = _skip(text, at)
    if text[at : at + 1] == "]":
        at += 1
    else:
        while True:
            _, end = _DECODER.raw_decode(text, at)
            found.append(text[at:end])
            end = _skip(text, end)
            at = _skip(text, end + 1)
            if text[end : end + 1] != ",":
                break
        if text[end : end + 1] != "]":
            raise json.JSONDecodeError("Expecting ',' or ']'", text, end)
    if _skip(text, at) != len(text):
        raise json.JSONDecodeError("Extra data", text, at)
    return found


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()
