"""Events as JSON objects: text where it is text, base64 where it is not."""

from __future__ import annotations

import base64
import datetime as dt
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from turnlane.queues.inspection.slices import Slice

OFFSET = "offset"
SETTLED = "settled"
_OURS = frozenset({OFFSET, SETTLED})


def column_name(name: str) -> str:
    """The name under which a column is exported: a user's ``offset`` becomes ``offset_``."""
    return f"{name}_" if name in _OURS else name


def rows(piece: Slice) -> Iterator[dict[str, object]]:
    """The events of a slice, one JSON object each."""
    block = piece.block
    names = [column_name(name) for name in block.schema.names]
    columns = [_values(block.column(at)) for at in range(block.num_columns)]
    for offset, values in zip(piece.offsets.tolist(), zip(*columns, strict=True), strict=True):
        row: dict[str, object] = {OFFSET: offset, SETTLED: piece.settled}
        for name, value in zip(names, values, strict=True):
            put(row, name, value)
        yield row


def _values(column: pa.Array[Any]) -> list[Any]:
    kind = column.type
    if pa.types.is_timestamp(kind):
        return _times(column, kind)
    if pa.types.is_map(kind):
        return [None if pairs is None else dict(pairs) for pairs in column.to_pylist()]
    return column.to_pylist()


def _times(column: pa.Array[Any], kind: pa.TimestampType[Any, Any]) -> list[str | None]:
    # By numpy: Python's datetime ends in the year 9999, and a damaged clock does not.
    stamps = column.cast(pa.int64())
    whole = stamps.fill_null(0).to_numpy(zero_copy_only=False).astype(f"datetime64[{kind.unit}]")
    zone = "Z" if kind.tz else ""
    texts = np.datetime_as_string(whole)
    return [
        f"{text}{zone}" if valid else None
        for text, valid in zip(texts.tolist(), stamps.is_valid().to_pylist(), strict=True)
    ]


def put(row: dict[str, object], name: str, value: object) -> None:
    """Put a value into an object as JSON can have it; bytes that are no text under another name."""
    if isinstance(value, bytes):
        try:
            row[name] = value.decode()
        except UnicodeDecodeError:
            row[f"{name}_base64"] = base64.b64encode(value).decode()
    else:
        row[name] = plain(value)


def plain(value: object) -> object:
    """The value as JSON can have it."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return _text(value)


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    return str(value)
