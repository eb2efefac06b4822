"""Events as JSON, in both directions: the forms that the HTTP plane takes and gives.

A request is taken as a whole or not at all, so everything is checked here, and an error names the
place: the line and column, or the index of the event and the field.

The typed dictionaries below describe both forms in the OpenAPI document. The functions that decode
events do not validate with them: a request may hold thousands of events, and plain checks of each
field are several times faster than a model of each event. A test asserts that the functions and
the document accept the same events.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, NoReturn, Required

import pyarrow as pa
from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypeAliasType, TypedDict

from turnlane.events import BASE_SCHEMA, Block, Event, block_of, iterate_events
from turnlane.validation import suggest

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
LARGEST_TIMESTAMP: Final = (1 << 63) // 1000 - 1
"""Microseconds; queues count in nanoseconds, which have to fit 64 bits."""

_MICROSECOND: Final = timedelta(microseconds=1)

_NULLS: Final[dict[str, pa.Array[Any]]] = {
    field.name: pa.nulls(1, field.type) for field in BASE_SCHEMA
}
"""Null columns of a block of one event, which would cost more to make than the rest of it."""


# ── forms ───────────────────────────────────────────────────────────────────────────────────────

STRICT: Final = ConfigDict(extra="forbid")
"""A JSON form has the fields that its class names and no others."""

TimestampJson = Annotated[
    Annotated[str, Field(description="ISO 8601 with a time zone.")]
    | Annotated[
        int,
        Field(
            ge=-LARGEST_TIMESTAMP, le=LARGEST_TIMESTAMP, description="Microseconds since the epoch."
        ),
    ],
    Field(examples=["2026-01-31T12:00:00Z", 1769860800000000]),
]
SeverityJson = Annotated[int, Field(ge=0, le=7, description="0 (emergency) to 7 (debug).")]


class _EventFields(TypedDict, total=False):
    key: str | None
    headers: dict[str, str] | None
    severity: SeverityJson | None
    source: str | None
    timestamp: Annotated[TimestampJson | None, Field(description="Default: now.")]
    offset: Annotated[
        Any, Field(description="Ignored, so that an event can be sent in the form it was read in.")
    ]


@with_config(STRICT)
class TextEventJson(_EventFields, total=False):
    """An event whose value is text."""

    value: Required[Annotated[str, Field(description="The value as text.")]]


@with_config(STRICT)
class Base64EventJson(_EventFields, total=False):
    """An event whose value is in base64."""

    value_base64: Required[
        Annotated[
            str,
            Field(
                description="The value in base64.", json_schema_extra={"contentEncoding": "base64"}
            ),
        ]
    ]


@with_config(STRICT)
class DataEventJson(_EventFields, total=False):
    """An event whose value is JSON."""

    data: Required[Annotated[Any, Field(description="The value is this JSON, as JSON text.")]]


NewEvent = TypeAliasType(
    "NewEvent",
    Annotated[
        TextEventJson | Base64EventJson | DataEventJson,
        Field(description="An event; its value has one of three forms."),
    ],
)


@with_config(STRICT)
class EventJson(TypedDict, total=False):
    """An event as it is read. Fields without a value are left out."""

    offset: Required[Annotated[int, Field(ge=0, le=2**63 - 1)]]
    value: Annotated[str | None, Field(description="The value, if it is text.")]
    value_base64: Annotated[str, Field(description="The value in base64, if it is not text.")]
    key: str
    headers: dict[str, str]
    severity: Annotated[int, Field(ge=-128, le=127)]
    source: str
    timestamp: TimestampJson


FIELDS: Final = tuple(
    dict.fromkeys(
        name
        for form in (TextEventJson, Base64EventJson, DataEventJson)
        for name in form.__annotations__
    )
)
"""The fields of an event that is sent."""

_VALUES: Final = ("value", "value_base64", "data")


# ── decoding and encoding ───────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Columns:
    """The columns of a block, filled event by event."""

    now: int
    values: list[bytes] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    headers: list[Mapping[str, str] | None] = field(default_factory=list)
    severities: list[int | None] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)

    def add(self, event: object) -> None:
        """Add one event. Raises ``ValueError`` that names the field."""
        if not isinstance(event, dict):
            raise ValueError(f"an event is an object, not {_name_kind(event)}")  # noqa: TRY004 - 400
        for name in event:
            if name not in FIELDS:
                raise ValueError(f"{name[:80]!r}: no such field{suggest(name, FIELDS)}")
        self.values.append(_read_value(event))
        self.keys.append(_read_text(event, "key"))
        self.headers.append(_read_headers(event.get("headers")))
        self.severities.append(check_severity(event.get("severity")))
        self.sources.append(_read_text(event, "source"))
        stamp = event.get("timestamp")
        self.timestamps.append(self.now if stamp is None else parse_timestamp(stamp))

    def to_block(self) -> Block:
        return block_of(
            self.values,
            timestamps=self.timestamps,
            keys=self.keys,
            headers=self.headers,
            severities=self.severities,
            sources=self.sources,
        )


def decode_json(body: bytes, now: int) -> Block:
    """Return the event, or the array of events, of a JSON text. Raises ``ValueError``."""
    found = _parse(_decode(body), "")
    columns = _Columns(now)
    events = found if isinstance(found, list) else [found]
    for index, event in enumerate(events):
        try:
            columns.add(event)
        except ValueError as error:
            where = f"event {index}: " if isinstance(found, list) else ""
            raise ValueError(f"{where}{error}") from None
    return columns.to_block()


def decode_ndjson(body: bytes, now: int) -> Block:
    """Return the events of JSON lines without the empty lines. Raises ``ValueError``."""
    columns = _Columns(now)
    for number, line in enumerate(body.split(b"\n"), start=1):
        if not line or line.isspace():
            continue
        event = _parse(_decode(line, f"line {number}, "), f"line {number}, ")
        try:
            columns.add(event)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return columns.to_block()


def build_raw_block(
    body: bytes,
    now: int,
    *,
    key: str | None = None,
    source: str | None = None,
    severity: int | None = None,
    timestamp: int | None = None,
) -> Block:
    """Return a block of one event whose value is the body."""
    given = {
        "value": body,
        "timestamp": now if timestamp is None else timestamp,
        "key": key,
        "source": source,
        "severity": severity,
    }
    columns = [
        _NULLS[field.name]
        if given.get(field.name) is None
        else pa.array([given[field.name]], field.type)
        for field in BASE_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=BASE_SCHEMA)


def encode_events(block: Block, first: int) -> list[EventJson]:
    """Return the JSON form of a block's events. ``first`` is the offset of the first event."""
    return [
        _encode_event(event, offset)
        for offset, event in enumerate(iterate_events(block, first), first)
    ]


# ── fields ──────────────────────────────────────────────────────────────────────────────────────


def parse_timestamp(value: object) -> int:
    """Return microseconds since the epoch; takes ISO 8601, too. Raises ``ValueError``."""
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(_explain_timestamp(value)) from None
        if moment.tzinfo is None:
            raise ValueError(f"timestamp: {value!r} has no time zone; add Z for UTC")
        return (moment - EPOCH) // _MICROSECOND
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > LARGEST_TIMESTAMP:
        raise ValueError(_explain_timestamp(value))
    return value


def check_severity(value: object) -> int | None:
    """Return the severity, or ``None``. Raises ``ValueError``."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 7:
        raise ValueError("severity: a whole number from 0 (emergency) to 7 (debug)")
    return value


def _explain_timestamp(value: object) -> str:
    shown = repr(value)[:40]
    return f"timestamp: {shown} is neither ISO 8601 nor microseconds since the epoch"


def _read_value(event: Mapping[str, Any]) -> bytes:
    given = [name for name in _VALUES if name in event]
    if len(given) != 1:
        said = "both " + " and ".join(given) if given else "none of them"
        raise ValueError(f"give exactly one of value, value_base64 and data, not {said}")
    if given == ["data"]:
        return _dump_data(event["data"])
    text = event[given[0]]
    if not isinstance(text, str):
        raise ValueError(f"{given[0]}: must be text, not {_name_kind(text)}")  # noqa: TRY004 - 400
    if given == ["value"]:
        return _encode(text, "value")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"value_base64: {error}") from None


def _dump_data(data: object) -> bytes:
    try:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only the escaped form can hold
        return json.dumps(data, separators=(",", ":")).encode()
    except RecursionError:  # the stack may be deeper here than it was for reading
        raise ValueError("data: nested too deeply") from None


def _read_text(event: Mapping[str, Any], name: str) -> str | None:
    text = event.get(name)
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError(f"{name}: must be text, not {_name_kind(text)}")  # noqa: TRY004 - 400
    if not text.isascii():
        _encode(text, name)
    return text


def _read_headers(value: object) -> Mapping[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"headers: must be an object, not {_name_kind(value)}")  # noqa: TRY004 - 400
    for name, text in value.items():
        where = f"headers.{name[:80]!r}"
        if not isinstance(text, str):
            raise ValueError(f"{where}: must be text, not {_name_kind(text)}")  # noqa: TRY004 - 400
        _encode(name, where)
        _encode(text, where)
    return value


def _encode(text: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: the unpaired surrogate at {error.start} is not valid text"
        ) from None


def _encode_event(event: Event, offset: int) -> EventJson:
    shown: EventJson = {"offset": offset}
    if event.value is None:
        shown["value"] = None
    else:
        try:
            shown["value"] = event.value.decode()
        except UnicodeDecodeError:
            shown["value_base64"] = base64.b64encode(event.value).decode()
    if event.key is not None:
        shown["key"] = event.key
    if event.headers is not None:
        shown["headers"] = event.headers
    if event.severity is not None:
        shown["severity"] = event.severity
    if event.source is not None:
        shown["source"] = event.source
    if event.timestamp is not None:
        shown["timestamp"] = format_timestamp(event.timestamp)
    return shown


def format_timestamp(timestamp: int) -> str | int:
    """Return ISO 8601 in UTC, or the microseconds for years that ISO 8601 cannot write."""
    try:
        moment = EPOCH + timestamp * _MICROSECOND
    except OverflowError:
        return timestamp
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


# ── JSON ────────────────────────────────────────────────────────────────────────────────────────


def parse_object(body: bytes) -> dict[str, Any]:
    """Return a JSON object; an empty body is an empty object. Raises ``ValueError``."""
    found = _parse(_decode(body), "") if body.strip() else {}
    if not isinstance(found, dict):
        raise ValueError(f"the body is an object, not {_name_kind(found)}")  # noqa: TRY004 - 400
    return found


def _decode(body: bytes, where: str = "") -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}byte {error.start}: not UTF-8") from None


def _parse(text: str, where: str) -> object:
    """Return the value of a JSON text. ``where`` names the line if the body has several."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_parse_float)
    except json.JSONDecodeError as error:
        line = where or f"line {error.lineno}, "
        raise ValueError(f"{line}column {error.colno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{where}nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number


def _name_kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "text", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")
