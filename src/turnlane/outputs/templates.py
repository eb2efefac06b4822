"""Texts with places for columns: ``logs-{source}-{timestamp:%Y.%m}``, filled in for all events.

``{column}`` is a column's value, ``{column.key}`` an entry of a map or a field of a struct,
``{column:%Y-%m-%d}`` a time in a form of its own, ``{event_id}`` the event's id. ``{{`` and ``}}``
are braces. A value that an event lacks is an empty text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import AfterValidator

from turnlane.errors import RetryLater
from turnlane.events import Block
from turnlane.outputs.api import ids_of

Texts: TypeAlias = "pa.Array[Any]"
Escape = Callable[[Texts], Texts]

EVENT_ID: Final = "event_id"
ISO: Final = "%Y-%m-%dT%H:%M:%SZ"
_PIECE: Final = re.compile(r"(\{\{|\}\})|\{([^{}]*)\}|([{}])")
_PLACE: Final = re.compile(r"(?P<column>\w+)(?:\.(?P<key>[^:]+))?(?::(?P<form>.+))?")
_CONTROL: Final = r"[\x00-\x1f]"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value goes."""

    column: str
    key: str | None = None
    form: str | None = None

    def values(self, block: Block) -> Texts:
        """Each event's text. Raises ``RetryLater``: somebody has to mend the template."""
        column = self._column(block)
        if self.key is not None:
            column = self._inside(column, self.key)
        if self.form is not None:
            if not pa.types.is_temporal(column.type):
                raise RetryLater(f"{{{self.column}:{self.form}}}: {column.type} is no time")
            formed: Texts = pc.strftime(column, self.form)
            return formed
        return text_of(column, self.column)

    def _column(self, block: Block) -> Any:  # noqa: ANN401
        ids = ids_of(block) if self.column == EVENT_ID else None
        if ids is not None:
            return ids
        if self.column not in block.schema.names:
            there = ", ".join(block.schema.names)
            raise RetryLater(f"events have no column {self.column!r} for a template; only {there}")
        return block.column(self.column)

    def _inside(self, column: Any, key: str) -> Any:  # noqa: ANN401
        if pa.types.is_map(column.type):
            return pc.map_lookup(column, pa.scalar(key), "last")
        kind: Any = column.type
        if pa.types.is_struct(kind) and kind.get_field_index(key) >= 0:
            return pc.struct_field(column, key)
        raise RetryLater(f"column {self.column!r}, which is {kind}, has no {key!r}")


@dataclass(frozen=True, slots=True)
class Template:
    """A text with places."""

    parts: tuple[str | Place, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Raises ``ValueError``."""
        parts: list[str | Place] = []
        at = 0
        for piece in _PIECE.finditer(text):
            parts.append(text[at : piece.start()])
            doubled, inner, lone = piece.groups()
            if lone is not None:
                raise ValueError(f"write {lone * 2} for a {lone} that begins or ends no {{column}}")
            parts.append(_place(inner) if doubled is None else doubled[0])
            at = piece.end()
        return cls(tuple(part for part in (*parts, text[at:]) if part))

    @property
    def columns(self) -> frozenset[str]:
        """The columns that come into it."""
        places = (part.column for part in self.parts if isinstance(part, Place))
        return frozenset(places) - {EVENT_ID}

    @property
    def constant(self) -> str | None:
        """The text, if it is the same for all events."""
        if any(isinstance(part, Place) for part in self.parts):
            return None
        return "".join(map(str, self.parts))

    def before_places(self) -> str:
        """The text up to the first place."""
        found = ""
        for part in self.parts:
            if isinstance(part, Place):
                break
            found += part
        return found

    def fill(self, block: Block, escape: Escape | None = None) -> Texts:
        """The text for each event; ``escape`` is done to the values that come in."""
        constant = self.constant
        if constant is not None:
            return pa.repeat(pa.scalar(constant), block.num_rows)
        filled: list[Any] = []
        for part in self.parts:
            if isinstance(part, Place):
                values = part.values(block).fill_null("")
                filled.append(values if escape is None else escape(values))
            else:
                filled.append(pa.scalar(part))
        found: Texts = pc.binary_join_element_wise(*filled, pa.scalar(""))
        return found


def _place(inner: str) -> Place:
    match = _PLACE.fullmatch(inner)
    if match is None:
        raise ValueError(f"{{{inner}}} is not {{column}}, {{column.key}} or {{column:%Y.%m.%d}}")
    return Place(match["column"], match["key"], match["form"])


def columns_of(*texts: str | None) -> frozenset[str]:
    """The columns that come into any of these templates."""
    return frozenset().union(*(Template.parse(text).columns for text in texts if text is not None))


def checked(text: str) -> str:
    """The text, if it is a template. Raises ``ValueError``."""
    Template.parse(text)
    return text


TemplateText = Annotated[str, AfterValidator(checked)]
"""A setting that is a template."""


def text_of(column: Any, name: str) -> Texts:  # noqa: ANN401
    """A column as text. Raises ``RetryLater`` if it is none, nor a number, time or truth."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        column = pc.strftime(column, ISO)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _decoded(column)
    if pa.types.is_nested(kind):
        raise RetryLater(f"column {name!r} is {kind}, which is no text; name a key of it")
    found: Texts = column.cast(pa.string())
    return found


def _decoded(column: Any) -> Texts:  # noqa: ANN401
    """Bytes as the text that they nearly always are."""
    try:
        found: Texts = column.cast(pa.string())
    except pa.ArrowInvalid:
        whole = [value and value.decode(errors="replace") for value in column.to_pylist()]
        found = pa.array(whole, pa.string())
    return found


# ── escaping ─────────────────────────────────────────────────────────────────────────────────────


def for_json(texts: Texts) -> Texts:
    """As they stand within the quotes of a JSON text."""
    found: Any = pc.replace_substring_regex(texts, r'(["\\])', r"\\\1")
    if pc.any(pc.match_substring_regex(found, _CONTROL)).as_py():
        found = _each_once(texts, lambda text: json.dumps(text, ensure_ascii=False)[1:-1])
    escaped: Texts = found
    return escaped


def for_url(texts: Texts) -> Texts:
    """As they stand in a path or a query: nothing in them can end the part that they stand in."""
    return _each_once(texts, _quoted)


def for_header(texts: Texts) -> Texts:
    """On one line."""
    found: Texts = pc.replace_substring_regex(texts, r"[\x00-\x1f\x7f]", " ")
    return found


def _quoted(text: str) -> str:
    # A segment of dots alone would name another path.
    return "%2E" * len(text) if text and not text.strip(".") else quote(text, safe="")


def _each_once(texts: Texts, change: Callable[[str], str]) -> Texts:
    """The same change to all texts, made once for each that is different."""
    encoded: Any = texts.dictionary_encode()
    changed = [change(text) for text in encoded.dictionary.to_pylist()]
    found: Texts = pa.array(changed, pa.string()).take(encoded.indices)
    return found
