"""Writing events to a file that other programs can read, a block at a time.

A file gets its name only when it is complete: an export that fails or is interrupted leaves no
file.
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
from turnlane.events import conform_block
from turnlane.storage.walk import EventSlice, InspectableQueue, Selection, ignore_progress

# ── peek ─────────────────────────────────────────────────────────────────────────────────────────


class PeekResult(NamedTuple):
    """Events, and how many events between them could not be read."""

    pieces: list[EventSlice]
    unreadable: int


def read_next_events(queue: InspectableQueue, selection: Selection, count: int) -> PeekResult:
    """Return the first ``count`` events of the selection; reads no further than needed."""
    pieces: list[EventSlice] = []
    left = count
    slices = queue.slices(selection)
    for piece in slices:
        taken = EventSlice(piece.offsets[:left], piece.settled, piece.block.slice(0, left))
        pieces.append(taken)
        left -= len(taken.offsets)
        if not left:
            selection = selection._replace(end=int(taken.offsets[-1]) + 1)
            break
    return PeekResult(pieces, queue.unreadable(selection))


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────

OFFSET_COLUMN = "offset"
SETTLED_COLUMN = "settled"
_OWN_COLUMNS = frozenset({OFFSET_COLUMN, SETTLED_COLUMN})


def get_export_name(name: str) -> str:
    """Return the exported name of a column: a user's ``offset`` becomes ``offset_``."""
    return f"{name}_" if name in _OWN_COLUMNS else name


def convert_to_rows(piece: EventSlice) -> Iterator[dict[str, object]]:
    """Yield the events of a slice as JSON objects: values are text, or base64 if they are not."""
    block = piece.block
    names = [get_export_name(name) for name in block.schema.names]
    columns = [_get_values(block.column(at)) for at in range(block.num_columns)]
    for offset, values in zip(piece.offsets.tolist(), zip(*columns, strict=True), strict=True):
        row: dict[str, object] = {OFFSET_COLUMN: offset, SETTLED_COLUMN: piece.settled}
        for name, value in zip(names, values, strict=True):
            put_json_value(row, name, value)
        yield row


def _get_values(column: pa.Array[Any]) -> list[Any]:
    kind = column.type
    if pa.types.is_timestamp(kind):
        return _format_times(column, kind)
    if pa.types.is_map(kind):
        return [None if pairs is None else dict(pairs) for pairs in column.to_pylist()]
    return column.to_pylist()


def _format_times(column: pa.Array[Any], kind: pa.TimestampType[Any, Any]) -> list[str | None]:
    # By NumPy: Python's datetime ends in the year 9999, and a wrong clock does not.
    stamps = column.cast(pa.int64())
    whole = stamps.fill_null(0).to_numpy(zero_copy_only=False).astype(f"datetime64[{kind.unit}]")
    zone = "Z" if kind.tz else ""
    texts = np.datetime_as_string(whole)
    return [
        f"{text}{zone}" if valid else None
        for text, valid in zip(texts.tolist(), stamps.is_valid().to_pylist(), strict=True)
    ]


def put_json_value(row: dict[str, object], name: str, value: object) -> None:
    """Put a value into an object; bytes that are not text get the name ``<name>_base64``."""
    if isinstance(value, bytes):
        try:
            row[name] = value.decode()
        except UnicodeDecodeError:
            row[f"{name}_base64"] = base64.b64encode(value).decode()
    else:
        row[name] = convert_to_json(value)


def convert_to_json(value: object) -> object:
    """Return the value in a form that JSON has."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(name): convert_to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [convert_to_json(each) for each in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, dt.date | dt.time) else str(value)


ROW_GROUP_BYTES = 32 << 20
ROW_GROUP_EVENTS = 128 * 1024
"""A Parquet row group is written when it reaches one of these; until then it is in memory."""


class ExportFormat(enum.StrEnum):
    """The formats of an export."""

    JSONL = "jsonl"
    PARQUET = "parquet"


class ExportSummary(NamedTuple):
    """The result of an export."""

    events: int
    unreadable: int
    """Unsettled events of the selection that cannot be read."""


class ExportRefused(Never):
    """The export did not start, or its format cannot hold the events."""


def export_to_file(
    queue: InspectableQueue,
    selection: Selection,
    target: Path,
    kind: ExportFormat,
    *,
    force: bool = False,
    advance: Callable[[int], None] = ignore_progress,
) -> ExportSummary:
    """Write the selection to ``target``; an existing file is replaced only with ``force``."""
    with _open_replacement(target, force=force) as file:
        return export(queue, selection, file, kind, advance=advance)


def export(
    queue: InspectableQueue,
    selection: Selection,
    file: BinaryIO,
    kind: ExportFormat,
    *,
    advance: Callable[[int], None] = ignore_progress,
) -> ExportSummary:
    """Write the selection to an open file."""
    events = 0
    try:
        writer = (
            _JsonLinesWriter(file)
            if kind is ExportFormat.JSONL
            else _ParquetWriter(file, queue, selection)
        )
        for piece in queue.slices(selection, advance):
            writer.write(piece)
            events += len(piece.offsets)
        writer.close()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ExportRefused(f"cannot be written as {kind}: {error}; try --format jsonl") from error
    return ExportSummary(events, queue.unreadable(selection))


class _JsonLinesWriter:
    """Writes one JSON object per line."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, piece: EventSlice) -> None:
        lines = [json.dumps(row, ensure_ascii=False) for row in convert_to_rows(piece)]
        self._file.write("\n".join([*lines, ""]).encode())

    def close(self) -> None:
        self._file.flush()


class _ParquetWriter:
    """Writes ``offset``, ``settled`` if it can differ, then all columns with their types."""

    def __init__(self, file: BinaryIO, queue: InspectableQueue, selection: Selection) -> None:
        import pyarrow.parquet as pq

        self._columns = queue.schema
        ours: list[pa.Field[Any]] = [pa.field(OFFSET_COLUMN, pa.int64(), nullable=False)]
        if selection.settled:
            ours.append(pa.field(SETTLED_COLUMN, pa.bool_(), nullable=False))
        renamed = [field.with_name(get_export_name(field.name)) for field in self._columns]
        self._schema = pa.schema([*ours, *renamed])
        self._writer = pq.ParquetWriter(file, self._schema, compression="zstd")
        self._group: list[pa.RecordBatch] = []
        self._events = self._bytes = 0

    def write(self, piece: EventSlice) -> None:
        block = conform_block(piece.block, self._columns).select(self._columns.names)
        count = block.num_rows
        arrays: list[pa.Array[Any]] = [pa.array(piece.offsets)]
        if SETTLED_COLUMN in self._schema.names:
            arrays.append(pa.array([piece.settled] * count, pa.bool_()))
        arrays += block.columns
        self._group.append(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._events += count
        self._bytes += block.nbytes
        if self._events >= ROW_GROUP_EVENTS or self._bytes >= ROW_GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._group:
            self._writer.write_table(pa.Table.from_batches(self._group, self._schema))
        self._group, self._events, self._bytes = [], 0, 0


@contextmanager
def _open_replacement(target: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Open a file that replaces the target at the end of the block, if nothing failed."""
    _check_target(target, force=force)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        try:
            file = partial.open("xb")
        except OSError as error:  # name the file that the user knows
            raise OSError(error.errno, error.strerror, str(target)) from None
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _check_target(target, force=force)
        partial.replace(target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


def _check_target(target: Path, *, force: bool) -> None:
    if target.exists() and not target.is_file():
        raise ExportRefused(f"{target}: is not a regular file; use - for the standard output")
    if target.exists() and not force:
        raise ExportRefused(f"{target}: exists already; use --force to replace it")
