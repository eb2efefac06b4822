"""Elasticsearch's bulk format: lines that say what to do, each followed by its document."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pyarrow as pa

from turnlane.events import build_values
from turnlane.formats.lines import cut, without_empty

# ── bodies ──
# Bodies of requests, cut into values: by lines, or by the elements of a JSON array.

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
    return build_values([line for line in found if line])


def _many_lines(body: bytes) -> pa.Array[Any]:
    """The same without a step for each line."""
    found = cut(body, max(1, len(body)), whole=True)
    return build_values([]) if found is None else without_empty(found.values)


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
    return build_values([element.encode() for element in found])


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


WITH_SOURCE: Final = frozenset({"index", "create", "update"})
OF_ONE_DOCUMENT: Final = frozenset({"update", "delete"})
"""What has to say to which document."""
ACTIONS: Final = WITH_SOURCE | OF_ONE_DOCUMENT

# Bytes, as Elasticsearch has it.
_LONGEST_ID: Final = 512
_LONGEST_INDEX: Final = 255


class Item(NamedTuple):
    """One thing to do."""

    action: str
    target: str
    """The index, as Elasticsearch calls it."""
    id: str
    source: bytes
    """The document, as it was written; nothing for a ``delete``."""
    problem: str | None = None
    """What is wrong with the document, if anything."""


def items_of(body: bytes, index: str | None = None) -> list[Item]:
    """The items of a bulk request; ``index`` is that of those that name none.

    Raises ``ValueError`` if a line is not an action: what follows it cannot be understood.
    """
    return list(_items(body, index))


def item_of(action: str, index: str, key: str | None, source: bytes) -> Item:
    """One item with its document; an id is made up if it has none."""
    name = key or new_id()
    problem = _too_long("_id", name, _LONGEST_ID) or _too_long("_index", index, _LONGEST_INDEX)
    if problem is None and action != "delete":
        problem = problem_of(source)
    return Item(action, index, name, source, problem)


def _too_long(what: str, text: str, most: int) -> str | None:
    length = len(text.encode())
    return None if length <= most else f"{what} has {length} bytes; {most} are allowed"


def new_id() -> str:
    """An id for a document that came without one."""
    return uuid.uuid4().hex


def problem_of(source: bytes) -> str | None:
    """What is wrong with a document: it has to be a JSON object."""
    try:
        document = json.loads(source)
    except RecursionError:
        return "the document is nested too deeply"
    except ValueError as error:
        return f"the document is not JSON: {error}"
    return None if isinstance(document, dict) else "the document is not a JSON object"


def _items(body: bytes, index: str | None) -> Iterator[Item]:
    lines = iter(enumerate(body.split(b"\n"), start=1))
    for number, line in lines:
        if not line or line.isspace():
            continue
        try:
            action, named, key = _action(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not an action: {error}") from None
        target = named or index
        if target is None:
            raise ValueError(f"line {number} names no index, and neither does the path")
        source = next(lines, (0, b""))[1].strip() if action in WITH_SOURCE else b""
        yield item_of(action, target, key, source)


def _action(line: bytes) -> tuple[str, str | None, str | None]:
    """What to do, to which index, to which document."""
    found = json.loads(line)
    if not isinstance(found, dict) or len(found) != 1:
        raise ValueError('it has to be an object such as {"index": {"_id": "1"}}')
    [(action, about)] = found.items()
    if action not in ACTIONS or not isinstance(about, dict):
        raise ValueError(f"{action!r} is none of {', '.join(sorted(ACTIONS))}")
    key = _text(about, "_id")
    if key is None and action in OF_ONE_DOCUMENT:
        raise ValueError(f"{action} needs an _id")
    return action, _text(about, "_index"), key


def _text(about: dict[str, Any], name: str) -> str | None:
    value = about.get(name)
    if value is None or (isinstance(value, str) and not value):
        return None
    if not isinstance(value, str | int):
        raise ValueError(f"{name} has to be text")  # noqa: TRY004 - about the line, as the others
    text = str(value)
    text.encode()  # a lone surrogate is no text that a queue could keep
    return text
