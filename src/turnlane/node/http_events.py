"""Events as JSON, and back: what the HTTP plane takes and gives.

A request is taken whole or not at all, so everything is checked here, and what is wrong is named
by its place: the line and column, or the event's index and field.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NoReturn

import pyarrow as pa

from turnlane.events import BASE_SCHEMA, Block, Event, block_of, events_of
from turnlane.validation import did_you_mean

FIELDS: Final = (
    "value",
    "value_base64",
    "data",
    "key",
    "headers",
    "severity",
    "source",
    "timestamp",
    "offset",
)
"""``offset`` is given, and ignored when it is sent: an event that was read can be sent as it is."""

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
LARGEST_TIMESTAMP: Final = (1 << 63) // 1000 - 1
"""Microseconds; queues count in nanoseconds, which have to fit 64 bits."""

_MICROSECOND: Final = timedelta(microseconds=1)

_NOTHING: Final[dict[str, pa.Array[Any]]] = {
    field.name: pa.nulls(1, field.type) for field in BASE_SCHEMA
}
"""Null columns of a block of one event, which would cost more to make than the rest of it."""


@dataclass(slots=True)
class _Columns:
    """Events on their way into a block."""

    now: int
    values: list[bytes] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    headers: list[Mapping[str, str] | None] = field(default_factory=list)
    severities: list[int | None] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)

    def add(self, event: object) -> None:
        """Take one event over. Raises ``ValueError`` naming the field."""
        if not isinstance(event, dict):
            raise ValueError(f"an event is an object, not {_kind(event)}")  # noqa: TRY004 - 400
        for name in event:
            if name not in FIELDS:
                raise ValueError(f"{name[:80]!r}: no such field{did_you_mean(name, FIELDS)}")
        self.values.append(_value(event))
        self.keys.append(_text(event, "key"))
        self.headers.append(_headers(event.get("headers")))
        self.severities.append(severity_of(event.get("severity")))
        self.sources.append(_text(event, "source"))
        stamp = event.get("timestamp")
        self.timestamps.append(self.now if stamp is None else timestamp_of(stamp))

    def block(self) -> Block:
        return block_of(
            self.values,
            timestamps=self.timestamps,
            keys=self.keys,
            headers=self.headers,
            severities=self.severities,
            sources=self.sources,
        )


def of_json(body: bytes, now: int) -> Block:
    """The event, or array of events, that a JSON text holds. Raises ``ValueError``."""
    found = _parsed(_decoded(body), "")
    columns = _Columns(now)
    events = found if isinstance(found, list) else [found]
    for index, event in enumerate(events):
        try:
            columns.add(event)
        except ValueError as error:
            where = f"event {index}: " if isinstance(found, list) else ""
            raise ValueError(f"{where}{error}") from None
    return columns.block()


def of_ndjson(body: bytes, now: int) -> Block:
    """The events of JSON lines, empty ones left out. Raises ``ValueError``."""
    columns = _Columns(now)
    for number, line in enumerate(body.split(b"\n"), start=1):
        if not line or line.isspace():
            continue
        event = _parsed(_decoded(line, f"line {number}, "), f"line {number}, ")
        try:
            columns.add(event)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return columns.block()


def of_raw(
    body: bytes,
    now: int,
    *,
    key: str | None = None,
    source: str | None = None,
    severity: int | None = None,
    timestamp: int | None = None,
) -> Block:
    """One event whose value is the body."""
    given = {
        "value": body,
        "timestamp": now if timestamp is None else timestamp,
        "key": key,
        "source": source,
        "severity": severity,
    }
    columns = [
        _NOTHING[field.name]
        if given.get(field.name) is None
        else pa.array([given[field.name]], field.type)
        for field in BASE_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=BASE_SCHEMA)


def to_json(block: Block, first: int) -> list[dict[str, Any]]:
    """The block's events, fields that are null left out; offsets are counted from ``first``."""
    return [_shown(event) for event in events_of(block, first)]


# ── fields ──────────────────────────────────────────────────────────────────────────────────────


def timestamp_of(value: object) -> int:
    """Microseconds since the epoch, from these or from an ISO 8601 text. ``ValueError``."""
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(_no_timestamp(value)) from None
        if moment.tzinfo is None:
            raise ValueError(f"timestamp: {value!r} has no time zone; add Z for UTC")
        return (moment - EPOCH) // _MICROSECOND
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > LARGEST_TIMESTAMP:
        raise ValueError(_no_timestamp(value))
    return value


def severity_of(value: object) -> int | None:
    """A severity, or none. Raises ``ValueError``."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 7:
        raise ValueError("severity: a whole number from 0 (emergency) to 7 (debug)")
    return value


def _no_timestamp(value: object) -> str:
    shown = repr(value)[:40]
    return f"timestamp: {shown} is neither ISO 8601 nor microseconds since the epoch"


def _value(event: Mapping[str, Any]) -> bytes:
    given = [name for name in ("value", "value_base64", "data") if name in event]
    if len(given) != 1:
        said = "both " + " and ".join(given) if given else "none of them"
        raise ValueError(f"give exactly one of value, value_base64 and data, not {said}")
    if given == ["data"]:
        return _json_text(event["data"])
    text = event[given[0]]
    if not isinstance(text, str):
        raise ValueError(f"{given[0]}: must be text, not {_kind(text)}")  # noqa: TRY004 - 400
    if given == ["value"]:
        return _encoded(text, "value")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"value_base64: {error}") from None


def _json_text(data: object) -> bytes:
    try:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only the escaped form can hold
        return json.dumps(data, separators=(",", ":")).encode()
    except RecursionError:  # the stack may be deeper here than it was for reading
        raise ValueError("data: nested too deeply") from None


def _text(event: Mapping[str, Any], name: str) -> str | None:
    text = event.get(name)
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError(f"{name}: must be text, not {_kind(text)}")  # noqa: TRY004 - 400
    if not text.isascii():
        _encoded(text, name)
    return text


def _headers(value: object) -> Mapping[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"headers: must be an object, not {_kind(value)}")  # noqa: TRY004 - 400
    for name, text in value.items():
        where = f"headers.{name[:80]!r}"
        if not isinstance(text, str):
            raise ValueError(f"{where}: must be text, not {_kind(text)}")  # noqa: TRY004 - 400
        _encoded(name, where)
        _encoded(text, where)
    return value


def _encoded(text: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: half a surrogate pair at {error.start} is no text") from None


def _shown(event: Event) -> dict[str, Any]:
    shown: dict[str, Any] = {"offset": event.offset}
    if event.value is None:
        shown["value"] = None
    else:
        try:
            shown["value"] = event.value.decode()
        except UnicodeDecodeError:
            shown["value_base64"] = base64.b64encode(event.value).decode()
    shown.update(_rest(event))
    return shown


def _rest(event: Event) -> Iterator[tuple[str, Any]]:
    for name in ("key", "headers", "severity", "source"):
        value = getattr(event, name)
        if value is not None:
            yield name, value
    if event.timestamp is not None:
        yield "timestamp", iso(event.timestamp)


def iso(timestamp: int) -> str | int:
    """Microseconds as ISO 8601 in UTC; as they are, in years that has no digits for."""
    try:
        moment = EPOCH + timestamp * _MICROSECOND
    except OverflowError:
        return timestamp
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


# ── JSON ────────────────────────────────────────────────────────────────────────────────────────


def parsed_object(body: bytes) -> dict[str, Any]:
    """A JSON object; an empty body is an empty one. Raises ``ValueError``."""
    found = _parsed(_decoded(body), "") if body.strip() else {}
    if not isinstance(found, dict):
        raise ValueError(f"the body is an object, not {_kind(found)}")  # noqa: TRY004 - 400
    return found


def _decoded(body: bytes, where: str = "") -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}byte {error.start}: not UTF-8") from None


def _parsed(text: str, where: str) -> object:
    """``where`` names the line if the text is a line among others."""
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except json.JSONDecodeError as error:
        line = where or f"line {error.lineno}, "
        raise ValueError(f"{line}column {error.colno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{where}nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "text", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")
