"""Events as OTLP log records, written by the column.

Protobuf puts a length before everything that is nested. Lengths repeat, so each is written once,
and everything else is joining columns of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from turnlane.delivery.columns import OURS, PAYLOAD
from turnlane.events import Block
from turnlane.formats.otlp import field, varint
from turnlane.formats.texts import large, strung

Column = Any
"""An Arrow column."""

_NOT_ATTRIBUTES: Final = frozenset(
    {"value", "timestamp", "severity", "queue", "partition", "offset", PAYLOAD}
)
_NUMBERS: Final = (21, 19, 18, 17, 13, 10, 9, 5)
"""OTLP's severity numbers by syslog's severity, as OpenTelemetry's own table has them."""
_PLACES: Final = pa.array(range(len(_NUMBERS)), pa.int64())
_NAMES: Final = ("emerg", "alert", "crit", "err", "warning", "notice", "info", "debug")

# Fields as they stand on the wire, message by message: number and type in one byte.
_RESOURCE_LOGS: Final = b"\x0a"
_RESOURCE, _SCOPE_LOGS = b"\x0a", b"\x12"
_RESOURCE_ATTRIBUTE: Final = b"\x0a"
_SCOPE, _RECORDS = b"\x0a", b"\x12"
_NAME: Final = b"\x0a"
_TIME, _NUMBER, _LEVEL, _BODY = b"\x09", b"\x10", b"\x1a", b"\x2a"
_ATTRIBUTE, _SEEN = b"\x32", b"\x59"
_KEY, _VALUE = b"\x0a", b"\x12"
_TEXT, _TRUTH, _WHOLE, _REAL, _BYTES = b"\x0a", b"\x10", b"\x18", b"\x21", b"\x3a"


def logs_request(
    block: Block, *, resource: Mapping[str, str], ids: Column = None, scope: str = "turnlane"
) -> bytes:
    """An export request that holds a log record for each event, in order.

    The value is the body, and what else there is of the event are attributes; ``ids`` become
    ``log.record.uid``.
    """
    records = _fields(_RECORDS, _records(block, ids))
    inside = field(_SCOPE, field(_NAME, scope.encode())) + strung(large(records)).data.to_pybytes()
    about = b"".join(
        field(
            _RESOURCE_ATTRIBUTE,
            field(_KEY, name.encode()) + field(_VALUE, field(_TEXT, text.encode())),
        )
        for name, text in resource.items()
    )
    group = (field(_RESOURCE, about) if about else b"") + field(_SCOPE_LOGS, inside)
    return field(_RESOURCE_LOGS, group)


def _records(block: Block, ids: Column) -> Column:
    names = block.schema.names
    parts: list[Column] = []
    if "timestamp" in names:
        times = _fixed(_nanoseconds(block.column("timestamp")))
        parts += [_marked(_TIME, times), _marked(_SEEN, times)]
    if "severity" in names:
        parts += _severities(block.column("severity"))
    if "value" in names:
        parts.append(_fields(_BODY, _any(block.column("value"))))
    for name in names:
        if name not in _NOT_ATTRIBUTES and not name.startswith(OURS):
            parts.extend(_attributes(name, block.column(name)))
    if ids is not None:
        parts.extend(_attributes("log.record.uid", ids))
    return _joined(parts, block.num_rows)


def _severities(column: Column) -> list[Column]:
    place = column.cast(pa.int64())
    known: Any = pc.index_in(place, _PLACES)
    numbers = pa.array([varint(number) for number in _NUMBERS], pa.binary()).take(known)
    names = pa.array([name.encode() for name in _NAMES], pa.binary()).take(known)
    return [_marked(_NUMBER, numbers), _fields(_LEVEL, names)]


# ── attributes ───────────────────────────────────────────────────────────────────────────────────


def _attributes(name: str, column: Column) -> Sequence[Column]:
    """A column as attributes of its records; a map is as many as it has entries."""
    if pa.types.is_map(column.type):
        return [_entries(name, column)]
    values = _any(column)
    if values is None:
        return []
    key = pa.scalar(field(_KEY, name.encode()), pa.binary())
    pairs = pc.binary_join_element_wise(key, _fields(_VALUE, values), _NOTHING)
    return [_fields(_ATTRIBUTE, pairs)]


def _entries(name: str, maps: Column) -> Column:
    """All entries of a map as attributes, side by side, each called ``name.key``."""
    lists = maps.cast(pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())])))
    entries = lists.flatten()
    keys = _fields(_KEY, _marked(f"{name}.".encode(), entries.field("key").cast(pa.binary())))
    values = _fields(_VALUE, _any(entries.field("value").fill_null("")))
    pairs = _fields(_ATTRIBUTE, pc.binary_join_element_wise(keys, values, _NOTHING))
    lengths = pc.list_value_length(lists).fill_null(0)
    ends = np.zeros(len(maps) + 1, np.int32)
    np.cumsum(lengths.to_numpy(zero_copy_only=False), out=ends[1:])
    offsets: Any = pa.array(ends)
    return pc.binary_join(pa.ListArray.from_arrays(offsets, pairs), b"")


def _any(column: Column) -> Column:
    """Each value as an ``AnyValue``; null stays null. ``None`` for types that are no attribute."""
    kind = column.type
    if pa.types.is_boolean(kind):
        truths = pa.array([b"\x00", b"\x01"], pa.binary()).take(column.cast(pa.int8()))
        return _marked(_TRUTH, truths)
    if pa.types.is_integer(kind):
        return _marked(_WHOLE, _varints(column))
    if pa.types.is_floating(kind):
        return _marked(_REAL, _fixed(column.cast(pa.float64())))
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _bytes(column.cast(pa.binary()))
    try:
        return _fields(_TEXT, column.cast(pa.string()).cast(pa.binary()))
    except pa.ArrowNotImplementedError:  # lists and structs, among others
        return None


def _bytes(column: Column) -> Column:
    """Bytes as the text that they nearly always are; as bytes where they are none."""
    try:
        column.cast(pa.string())
    except pa.ArrowInvalid:
        is_text = pa.array([each is None or _is_text(each) for each in column.to_pylist()])
        texts = _fields(_TEXT, column)
        return pc.if_else(is_text, texts, _fields(_BYTES, column))
    return _fields(_TEXT, column)


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


# ── the wire ─────────────────────────────────────────────────────────────────────────────────────

_NOTHING: Final = pa.scalar(b"", pa.binary())


def _fields(tag: bytes, contents: Column) -> Column:
    """Contents with tag and length before each; null stays null."""
    lengths: Any = pc.binary_length(contents)
    lengths = lengths.dictionary_encode()
    heads = [
        None if each is None else tag + varint(each) for each in lengths.dictionary.to_pylist()
    ]
    head = pa.array(heads, pa.binary()).take(lengths.indices)
    return pc.binary_join_element_wise(head, contents, _NOTHING)


def _marked(tag: bytes, contents: Column) -> Column:
    """Contents with something before each, and no length; null stays null."""
    return pc.binary_join_element_wise(pa.scalar(tag, pa.binary()), contents, _NOTHING)


def _varints(column: Column) -> Column:
    """Whole numbers, each different one written once; a negative one as 64 bits have it."""
    encoded = column.dictionary_encode()
    written = [varint(number & (1 << 64) - 1) for number in encoded.dictionary.to_pylist()]
    return pa.array(written, pa.binary()).take(encoded.indices)


def _fixed(column: Column) -> Column:
    """Numbers of eight bytes, as they are."""
    data = pa.py_buffer(column.fill_null(0).to_numpy().tobytes())
    found = pa.Array.from_buffers(pa.binary(8), len(column), [None, data]).cast(pa.binary())
    return pc.if_else(column.is_null(), None, found) if column.null_count else found


def _nanoseconds(times: Column) -> Column:
    return pc.multiply(times.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()), 1000)


def _joined(parts: Sequence[Column], count: int) -> Column:
    """Fields side by side; of null nothing is written at all."""
    if not parts:
        return pa.repeat(_NOTHING, count)
    filled = [part.fill_null(b"") for part in parts]
    return pc.binary_join_element_wise(*filled, _NOTHING)
