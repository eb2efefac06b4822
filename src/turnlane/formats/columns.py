"""Blocks of events that came together: each its own value, all the same headers and source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from turnlane.errors import EventTooLarge
from turnlane.events import BASE_SCHEMA, Block

MOST_SHARED: Final = 1 << 28
"""What may be written again for each event of a block, in bytes: a few lines of a request must not
become gigabytes."""
_FEW = 100
"""Events: up to here Python's own lists are the quicker way."""
_HEADERS = BASE_SCHEMA.field("headers").type


def block_of_values(
    values: pa.Array[Any],
    *,
    keys: Sequence[str | None] | str | None = None,
    severities: Sequence[int | None] | None = None,
    headers: Mapping[str, str] | pa.Array[Any] | None = None,
    source: str | None = None,
) -> Block:
    """A block of these values; a single key, headers and the source are every event's.

    It has no ``timestamp``: events get theirs when they are published. Raises ``EventTooLarge``.
    """
    count = len(values)
    texts = [source or "", keys if isinstance(keys, str) else ""]
    if isinstance(headers, Mapping):
        texts += [*headers, *headers.values()]
    check_shared(count * sum(map(len, texts)))
    columns: dict[str, pa.Array[Any]] = {"value": values}
    if isinstance(keys, str):
        columns["key"] = repeated(keys, count)
    elif keys is not None:
        columns["key"] = pa.array(keys, pa.string())
    if isinstance(headers, pa.Array):
        columns["headers"] = headers
    elif headers:
        columns["headers"] = same_headers(headers, count)
    if severities is not None:
        columns["severity"] = pa.array(severities, pa.int8())
    if source is not None:
        columns["source"] = repeated(source, count)
    fields = [BASE_SCHEMA.field(name) for name in columns]
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))


def check_shared(size: int) -> None:
    """Raise ``EventTooLarge`` if it takes too much to write what events have in common for each."""
    if size > MOST_SHARED:
        raise EventTooLarge(
            f"what the events have in common takes {size} bytes, written for each of them; "
            f"{MOST_SHARED} are allowed: send them in parts"
        )


def same_headers(headers: Mapping[str, str], count: int) -> pa.Array[Any]:
    """A column of ``count`` times the same headers."""
    names, texts = list(headers), list(headers.values())
    if count <= _FEW:
        return headers_of(names, *([text] * count for text in texts))
    rows = np.tile(np.arange(len(names)), count)
    return _maps(
        len(names), count, pa.array(names, pa.string()).take(rows),
        pa.array(texts, pa.string()).take(rows),
    )  # fmt: skip


def headers_of(names: Sequence[str], *columns: Sequence[str]) -> pa.Array[Any]:
    """A column of headers that all events have, from one column of texts for each name."""
    count = len(columns[0])
    texts = [text for row in zip(*columns, strict=True) for text in row]
    return _maps(
        len(names), count, pa.array([*names] * count, pa.string()), pa.array(texts, pa.string())
    )


def _maps(width: int, count: int, names: Any, texts: Any) -> pa.Array[Any]:  # noqa: ANN401
    ends = pa.array(np.arange(count + 1, dtype=np.int32) * np.int32(width))
    column: pa.Array[Any] = pa.MapArray.from_arrays(ends, names, texts)
    assert column.type == _HEADERS
    return column


def repeated(text: str, count: int) -> pa.Array[Any]:
    """A column of ``count`` times the same text."""
    word = text.encode()
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(len(word))
    buffers = [None, pa.py_buffer(offsets.data), pa.py_buffer(word * count)]
    return pa.Array.from_buffers(pa.string(), count, buffers, 0)
