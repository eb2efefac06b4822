"""Texts of events for destinations: ids, and templates such as ``logs-{source}-{timestamp:%Y.%m}``.

An event's id is made of its queue, partition and offset, so no state is needed, and it is the same
however many times the event is sent. A destination that stores events by id, or drops ids that it
has seen, gets each event once.

In a template, ``{column}`` is a column's value, ``{column.key}`` an entry of a map or a field of a
struct, ``{column:%Y-%m-%d}`` a time in the given format, ``{event_id}`` the event's id. ``{{`` and
``}}`` are braces. A value that an event does not have is an empty text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any, Final, TypeAlias
from urllib.parse import quote

import google_crc32c
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import AfterValidator

from turnlane.delivery.settings import POSITION_COLUMNS, ROW_NUMBER_COLUMN
from turnlane.errors import RetryLater
from turnlane.events import Block
from turnlane.pipeline.settings import MAIN

Texts: TypeAlias = "pa.Array[Any]"
Escape = Callable[[Texts], Texts]

EVENT_ID: Final = "event_id"
"""The name of the id, which needs no column."""
ISO_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"
_TOKEN: Final = re.compile(r"(\{\{|\}\})|\{([^{}]*)\}|([{}])")
_FIELD: Final = re.compile(r"(?P<column>\w+)(?:\.(?P<key>[^:]+))?(?::(?P<time_format>.+))?")
_CONTROL: Final = r"[\x00-\x1f]"

_TIME: Final = "timestamp"

# ── event ids ────────────────────────────────────────────────────────────────────────────────────


def make_event_ids(block: Block) -> pa.Array[Any] | None:
    """Return ``queue/partition/offset`` of each event; ``None`` if they come from no queue.

    Rows that SQL made of many events come from no queue. If a transform made several rows of one
    event, the second row's id ends in ``.1``, the third row's in ``.2``, and so on.
    """
    names = block.schema.names
    if not all(name in names for name in POSITION_COLUMNS):
        return None
    partition, offset = (block.column(name).cast(pa.string()) for name in POSITION_COLUMNS)
    if ROW_NUMBER_COLUMN in names:
        rows = block.column(ROW_NUMBER_COLUMN)
        numbered = _join(offset, rows.cast(pa.string()), ".")
        offset = pc.if_else(pc.equal(rows, pa.scalar(0)), offset, numbered)
    # In the main lane the column ``queue`` is about the next queue, and is no text.
    at = block.schema.get_field_index("queue")
    is_origin = at >= 0 and pa.types.is_string(block.schema.field(at).type)
    queue: Any = block.column(at) if is_origin else pa.scalar(MAIN)
    return _join(queue, partition, offset, "/")


def make_dated_event_ids(block: Block) -> pa.Array[Any] | None:
    """Return the event ids followed by each event's time, for destinations that keep ids for long.

    A queue that was removed and created again counts its offsets from zero. The time keeps its
    events apart from the events of the old queue.
    """
    ids = make_event_ids(block)
    if ids is None or not _has_times(block):
        return ids
    return _join(ids, pc.strftime(block.column(_TIME), ISO_TIME), "-")


def make_idempotency_key(block: Block, body: pa.Buffer | bytes) -> str | None:
    """Return a key for a request: the same only for the same events in the same form.

    It has the first and the last id, and a checksum of the times and the body: the events between
    may differ another time, and two actions may send the same events in different forms.
    """
    first = make_event_ids(block.slice(0, 1))
    last = make_event_ids(block.slice(block.num_rows - 1))
    if first is None or last is None:
        return None
    checksum = 0
    if _has_times(block):
        times = block.column(_TIME).cast(pa.int64()).fill_null(0)
        checksum = google_crc32c.value(times.to_numpy().tobytes())
    return f"{first[0]}-{last[0]}-{google_crc32c.extend(checksum, body):08x}"


def _has_times(block: Block) -> bool:
    at = block.schema.get_field_index(_TIME)
    return at >= 0 and pa.types.is_timestamp(block.schema.field(at).type)


def _join(*parts: Any) -> pa.Array[Any]:
    """Join texts of each row; the last part is the separator, and null is an empty text."""
    joined: pa.Array[Any] = pc.binary_join_element_wise(*parts, null_handling="replace")
    return joined


# ── templates ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class TemplateField:
    """A field of a template, which is replaced by a value of the event."""

    column: str
    key: str | None = None
    time_format: str | None = None

    @classmethod
    def parse(cls, text: str) -> TemplateField:
        """Parse the text between two braces. Raises ``ValueError``."""
        match = _FIELD.fullmatch(text)
        if match is None:
            raise ValueError(f"{{{text}}} is not {{column}}, {{column.key}} or {{column:%Y.%m.%d}}")
        return cls(match["column"], match["key"], match["time_format"])

    def get_texts(self, block: Block) -> Texts:
        """Return each event's text. Raises ``RetryLater``: a person must correct the template."""
        column: Any = make_event_ids(block) if self.column == EVENT_ID else None
        if column is None:
            if self.column not in block.schema.names:
                names = ", ".join(block.schema.names)
                raise RetryLater(
                    f"a template needs the column {self.column!r}; events have: {names}"
                )
            column = block.column(self.column)
        kind = column.type
        if self.key is None:
            pass
        elif pa.types.is_map(kind):
            column = pc.map_lookup(column, pa.scalar(self.key), "last")
        elif pa.types.is_struct(kind) and kind.get_field_index(self.key) >= 0:
            column = pc.struct_field(column, self.key)
        else:
            raise RetryLater(f"the column {self.column!r} of type {kind} has no field {self.key!r}")
        if self.time_format is None:
            return convert_to_text(column, self.column)
        if not pa.types.is_temporal(column.type):
            field = f"{{{self.column}:{self.time_format}}}"
            raise RetryLater(f"{field}: the column must be a time, not {column.type}")
        texts: Texts = pc.strftime(column, self.time_format)
        return texts


@dataclass(frozen=True, slots=True)
class Template:
    """A text with fields."""

    parts: tuple[str | TemplateField, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Parse a template. Raises ``ValueError``."""
        parts: list[str | TemplateField] = []
        at = 0
        for token in _TOKEN.finditer(text):
            parts.append(text[at : token.start()])
            brace, inner, lone = token.groups()
            if lone is not None:
                raise ValueError(f"write {lone * 2} for a {lone} that begins or ends no {{column}}")
            parts.append(TemplateField.parse(inner) if brace is None else brace[0])
            at = token.end()
        return cls(tuple(part for part in (*parts, text[at:]) if part))

    @property
    def columns(self) -> frozenset[str]:
        """The columns that the template uses."""
        names = (part.column for part in self.parts if isinstance(part, TemplateField))
        return frozenset(names) - {EVENT_ID}

    @property
    def constant(self) -> str | None:
        """The text, if it is the same for all events."""
        if any(isinstance(part, TemplateField) for part in self.parts):
            return None
        return "".join(map(str, self.parts))

    def get_text_before_fields(self) -> str:
        """Return the text before the first field."""
        texts = takewhile(lambda part: isinstance(part, str), self.parts)
        return "".join(map(str, texts))

    def fill(self, block: Block, escape: Escape | None = None) -> Texts:
        """Return the text for each event; ``escape`` is applied to the values of fields."""
        constant = self.constant
        if constant is not None:
            return pa.repeat(pa.scalar(constant), block.num_rows)
        columns: list[Any] = []
        for part in self.parts:
            if isinstance(part, TemplateField):
                values = part.get_texts(block).fill_null("")
                columns.append(values if escape is None else escape(values))
            else:
                columns.append(pa.scalar(part))
        texts: Texts = pc.binary_join_element_wise(*columns, pa.scalar(""))
        return texts


def find_template_columns(*texts: str | None) -> frozenset[str]:
    """Return the columns that any of these templates uses."""
    return frozenset().union(*(Template.parse(text).columns for text in texts if text is not None))


def check_template(text: str) -> str:
    """Return the text if it is a template. Raises ``ValueError``."""
    Template.parse(text)
    return text


TemplateText = Annotated[str, AfterValidator(check_template)]
"""A setting that is a template."""


def convert_to_text(column: Any, name: str) -> Texts:  # noqa: ANN401
    """Convert a column to text. Raises ``RetryLater`` if it has nested values."""
    kind = column.type
    if pa.types.is_nested(kind):
        raise RetryLater(f"the column {name!r} of type {kind} has no text; name a field of it")
    if pa.types.is_timestamp(kind):
        column = pc.strftime(column, ISO_TIME)
    try:
        texts: Texts = column.cast(pa.string())
    except pa.ArrowInvalid:
        if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            raise
        decoded = [value and value.decode(errors="replace") for value in column.to_pylist()]
        texts = pa.array(decoded, pa.string())
    return texts


# ── escaping ─────────────────────────────────────────────────────────────────────────────────────


def escape_json(texts: Texts) -> Texts:
    """Escape texts for the inside of a JSON string."""
    escaped: Any = pc.replace_substring_regex(texts, r'(["\\])', r"\\\1")
    if pc.any(pc.match_substring_regex(escaped, _CONTROL)).as_py():
        escaped = _map_distinct(texts, lambda text: json.dumps(text, ensure_ascii=False)[1:-1])
    found: Texts = escaped
    return found


def escape_url(texts: Texts) -> Texts:
    """Escape texts for one segment of a path or one value of a query."""

    def quote_segment(text: str) -> str:
        # A segment of dots alone would change the path.
        return "%2E" * len(text) if text and not text.strip(".") else quote(text, safe="")

    return _map_distinct(texts, quote_segment)


def escape_header(texts: Texts) -> Texts:
    """Replace control characters, which would end a header, by spaces."""
    escaped: Texts = pc.replace_substring_regex(texts, r"[\x00-\x1f\x7f]", " ")
    return escaped


def _map_distinct(texts: Texts, function: Callable[[str], str]) -> Texts:
    """Apply a function to all texts, once for each distinct text."""
    encoded: Any = texts.dictionary_encode()
    mapped = [function(text) for text in encoded.dictionary.to_pylist()]
    found: Texts = pa.array(mapped, pa.string()).take(encoded.indices)
    return found
