"""Writing events to a file that another program can read, a block at a time.

A file appears under its name only when it is complete; an export that fails or is interrupted
leaves nothing behind.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import enum
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from turnlane.errors import Never
from turnlane.events import conform
from turnlane.storage.inspect import Inspected, Selection, Slice, ignore

# ── peek ──
# The next few events of a queue.


class Peek(NamedTuple):
    """Events, and how many between them could not be read."""

    pieces: list[Slice]
    unreadable: int


def peek(queue: Inspected, selection: Selection, count: int) -> Peek:
    """The first ``count`` events of the selection; reads no further than it has to."""
    pieces: list[Slice] = []
    left = count
    slices = queue.slices(selection)
    for piece in slices:
        taken = Slice(piece.offsets[:left], piece.settled, piece.block.slice(0, left))
        pieces.append(taken)
        left -= len(taken.offsets)
        if not left:
            selection = selection._replace(end=int(taken.offsets[-1]) + 1)
            break
    return Peek(pieces, queue.unreadable(selection))


# ── rows ──
# Events as JSON objects: text where it is text, base64 where it is not.

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


GROUP_BYTES = 32 << 20
GROUP_EVENTS = 128 * 1024
"""A Parquet row group is written when it has reached one of these; so much is held in memory."""


class Format(enum.StrEnum):
    """What can be written."""

    JSONL = "jsonl"
    PARQUET = "parquet"


class Exported(NamedTuple):
    """What an export has done."""

    events: int
    unreadable: int
    """Unsettled events that were asked for and cannot be read."""


class ExportRefused(Never):
    """The export was not even begun, or cannot be made in this format."""


def export_to_file(
    queue: Inspected,
    selection: Selection,
    target: Path,
    kind: Format,
    *,
    force: bool = False,
    advance: Callable[[int], None] = ignore,
) -> Exported:
    """Write the selection to ``target``, which is replaced only with ``force``."""
    with _replacing(target, force=force) as file:
        return export(queue, selection, file, kind, advance=advance)


def export(
    queue: Inspected,
    selection: Selection,
    file: BinaryIO,
    kind: Format,
    *,
    advance: Callable[[int], None] = ignore,
) -> Exported:
    """Write the selection to an open file."""
    events = 0
    try:
        writer = _JsonLines(file) if kind is Format.JSONL else _Parquet(file, queue, selection)
        for piece in queue.slices(selection, advance):
            writer.write(piece)
            events += len(piece.offsets)
        writer.close()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ExportRefused(f"not possible as {kind}: {error}; try --format jsonl") from error
    return Exported(events, queue.unreadable(selection))


class _JsonLines:
    """One JSON object a line."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, piece: Slice) -> None:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows(piece)]
        self._file.write("\n".join([*lines, ""]).encode())

    def close(self) -> None:
        self._file.flush()


class _Parquet:
    """All columns with their types, after ``offset``, and ``settled`` where that can differ."""

    def __init__(self, file: BinaryIO, queue: Inspected, selection: Selection) -> None:
        import pyarrow.parquet as pq

        self._columns = queue.schema
        ours: list[pa.Field[Any]] = [pa.field(OFFSET, pa.int64(), nullable=False)]
        if selection.settled:
            ours.append(pa.field(SETTLED, pa.bool_(), nullable=False))
        renamed = [field.with_name(column_name(field.name)) for field in self._columns]
        self._schema = pa.schema([*ours, *renamed])
        self._writer = pq.ParquetWriter(file, self._schema, compression="zstd")
        self._group: list[pa.RecordBatch] = []
        self._events = self._bytes = 0

    def write(self, piece: Slice) -> None:
        block = conform(piece.block, self._columns).select(self._columns.names)
        count = block.num_rows
        arrays: list[pa.Array[Any]] = [pa.array(piece.offsets)]
        if SETTLED in self._schema.names:
            arrays.append(pa.array([piece.settled] * count, pa.bool_()))
        arrays += block.columns
        self._group.append(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._events += count
        self._bytes += block.nbytes
        if self._events >= GROUP_EVENTS or self._bytes >= GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._group:
            self._writer.write_table(pa.Table.from_batches(self._group, self._schema))
        self._group, self._events, self._bytes = [], 0, 0


@contextmanager
def _replacing(target: Path, *, force: bool) -> Iterator[BinaryIO]:
    """A file that takes the target's place when all has gone well."""
    _may_write(target, force=force)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with _created(partial, target) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _may_write(target, force=force)
        partial.replace(target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


def _created(partial: Path, target: Path) -> BinaryIO:
    """The new file; what stands in its way is told with the name that the user knows."""
    try:
        return partial.open("xb")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from None


def _may_write(target: Path, *, force: bool) -> None:
    if target.exists() and not target.is_file():
        raise ExportRefused(f"{target}: is not a regular file; use - for the standard output")
    if target.exists() and not force:
        raise ExportRefused(f"{target}: exists already; use --force to replace it")
