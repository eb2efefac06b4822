"""Events as rows of a table, and the record of which events a table has got.

`build_rows` turns a block of events into rows: it finds the source of each column of the table (a
column of the events, a path into a map, a struct or JSON, or the id of the event).

An output that delivers exactly once records the offsets of the events in a table of its own beside
the rows, in the transaction that writes the rows. Events arrive in any order and some are delivered
later, so one number for each stream is not enough: `DeliveryRecord` stores ranges of offsets, and
selects the rows that no earlier transaction wrote. A transaction locks one row for each stream, so
two connections never write rows of the same stream at the same time. They lock the streams in the
same order, so they do not block each other.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from turnlane.delivery.settings import POSITION_COLUMNS, ROW_NUMBER_COLUMN
from turnlane.errors import Never, RetryLater
from turnlane.events import Block
from turnlane.intervals import RangeSet
from turnlane.logs import get_logger
from turnlane.outputs.templates import EVENT_ID, make_event_ids
from turnlane.table.batch_commit import DELIVERED_TABLE

log = get_logger(__name__)

Offsets = npt.NDArray[np.int64]


class EventStream(NamedTuple):
    """A sequence of events in which an offset belongs to one event."""

    queue: str
    partition: int


StreamPositions = Mapping[EventStream, tuple[Offsets, Offsets]]
"""For each stream: the numbers of its rows, and their offsets in the stream."""


class TableRows(NamedTuple):
    """Rows to write into a table."""

    columns: pa.RecordBatch
    """The values, under the names of the table's columns."""
    positions: StreamPositions
    """Empty if the output does not deliver exactly once."""


def build_rows(block: Block, columns: Mapping[str, str], *, with_positions: bool) -> TableRows:
    """Return the events of a block as rows.

    Raises ``RetryLater`` if a column has no source: a person has to change the settings. Raises
    ``Never`` if a value has to be JSON and is not.
    """
    arrays = [_convert(_get_source(block, source)) for source in columns.values()]
    batch = pa.RecordBatch.from_arrays(arrays, names=list(columns))
    return TableRows(batch, _find_positions(block) if with_positions else {})


def has_source(names: Collection[str], source: str) -> bool:
    """Whether events with columns of these names have the source of a table's column."""
    if source == EVENT_ID and set(POSITION_COLUMNS) <= set(names):
        return True
    first, dot, _ = source.partition(".")
    return source in names or bool(dot and first in names)


def _get_source(block: Block, source: str) -> Any:  # noqa: ANN401
    if source in block.schema.names:
        return block.column(source)
    if source == EVENT_ID and (ids := make_event_ids(block)) is not None:
        return ids
    name, *path = source.split(".")
    if not path or name not in block.schema.names:
        there = ", ".join(block.schema.names)
        raise RetryLater(f"columns: the events have no {source!r}; they have {there}")
    return _get_nested(block.column(name), path)


def _get_nested(column: Any, path: Sequence[str]) -> Any:  # noqa: ANN401
    """Return the values at a path in maps, structs, and JSON texts."""
    for at, name in enumerate(path):
        if pa.types.is_map(column.type):
            column = pc.map_lookup(column, pa.scalar(name, column.type.key_type), "last")
        elif pa.types.is_struct(column.type) and column.type.get_field_index(name) >= 0:
            column = pc.struct_field(column, name)
        elif pa.types.is_struct(column.type):
            return pa.nulls(len(column), pa.string())
        else:
            return _get_from_json(column, path[at:])
    return column


def _get_from_json(column: Any, path: Sequence[str]) -> Any:  # noqa: ANN401
    """Return the value at a path in each text; null where there is none."""
    found = [None if text is None else _parse_value(text, path) for text in column.to_pylist()]
    try:
        return pa.array(found)
    except (pa.ArrowException, OverflowError, TypeError):  # mixed types, or too large
        texts = [
            each if each is None or isinstance(each, str) else json.dumps(each) for each in found
        ]
        return pa.array(texts, pa.string())


def _parse_value(text: str | bytes, path: Sequence[str]) -> Any:  # noqa: ANN401
    try:
        value = json.loads(text)
    except ValueError as error:
        where = ".".join(path)
        raise Never(f"a text is not JSON, so it has no {where!r}: {error}") from None
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return json.dumps(value) if isinstance(value, dict | list) else value


def _convert(column: Any) -> Any:  # noqa: ANN401
    """Return a column with a type that databases have; lists, maps and structs become JSON."""
    kind = column.type
    if pa.types.is_null(kind):
        return column.cast(pa.string())
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp("us", tz=kind.tz), safe=False)
    if pa.types.is_nested(kind):
        values = column.to_pylist()
        if pa.types.is_map(kind):
            values = [None if each is None else dict(each) for each in values]
        dump = partial(json.dumps, default=_convert_for_json)
        return pa.array([None if each is None else dump(each) for each in values], pa.string())
    return column


def _convert_for_json(value: Any) -> str:  # noqa: ANN401
    """Return a value that JSON has no form for; bytes become Base64, as in payloads."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _find_positions(block: Block) -> StreamPositions:
    """Return the rows and offsets of each stream.

    If a transform makes several rows of an event, the second rows form a stream of their own, and
    the third rows, and so on: in each stream an offset occurs at most once. The name of such a
    stream ends with ``#`` and a number; no queue has a ``#`` in its name.
    """
    names = block.schema.names
    if not {"queue", "partition", "offset"} <= set(names):
        raise RetryLater("exactly_once: these events come from no queue; sql made them")
    offsets = block.column("offset").to_numpy().astype(np.int64)
    partitions = block.column("partition").to_numpy()
    numbers = (
        block.column(ROW_NUMBER_COLUMN).to_numpy()
        if ROW_NUMBER_COLUMN in names
        else np.zeros_like(offsets)
    )
    queues: Any = block.column("queue").dictionary_encode()
    found = {}
    for at, queue in enumerate(queues.dictionary.to_pylist()):
        of_queue = queues.indices.to_numpy() == at
        for partition, number in np.unique(
            np.stack((partitions[of_queue], numbers[of_queue])), axis=1
        ).T.tolist():
            rows = np.flatnonzero(of_queue & (partitions == partition) & (numbers == number))
            name = f"{queue}#{number}" if number else str(queue)
            found[EventStream(name, partition)] = (rows, offsets[rows])
    return found


# ── the record of delivered events ───────────────────────────────────────────────────────────────

_LOCK: Final = -1
"""The ``first`` of a row that is no range: a transaction locks it to have the stream alone."""

RunStatement = Callable[[str, Sequence[Any]], Sequence[Any]]
"""Runs a statement, whose parameters are ``?``, and returns its rows."""


def find_runs(offsets: Offsets) -> list[tuple[int, int]]:
    """Return offsets, given in any order, as ranges ``[first, end)``."""
    if not len(offsets):
        return []
    ordered = np.unique(offsets)
    breaks = np.flatnonzero(np.diff(ordered) != 1)
    firsts = ordered[np.concatenate(([0], breaks + 1))]
    lasts = ordered[np.concatenate((breaks, [len(ordered) - 1]))]
    return list(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True))


def select_outside(offsets: Offsets, known: RangeSet) -> npt.NDArray[np.bool_]:
    """Return a mask of the offsets that are in none of the ranges."""
    if not known:
        return np.ones(len(offsets), dtype=bool)
    firsts, ends = np.array(list(known), dtype=np.int64).T
    at = np.searchsorted(firsts, offsets, side="right") - 1
    fresh: npt.NDArray[np.bool_] = (at < 0) | (offsets >= ends[at])
    return fresh


class DeliveryRecord:
    """The record of which rows one target has got. One thread uses it at a time.

    ``execute`` and ``transaction`` use the connection that writes the rows. ``lock`` is the end of
    a SELECT that locks its rows until the transaction ends.
    """

    def __init__(
        self,
        target: str,
        quote: Callable[[str], str],
        execute: RunStatement,
        transaction: Callable[[], AbstractContextManager[None]],
        lock: str,
    ) -> None:
        self._target = target
        self._execute = execute
        self._transaction = transaction
        self._lock = lock
        self._names = [quote(name) for name in ("target", "queue", "partition", "first", "end")]
        *key, self._first, self._end = self._names
        self._stream = " AND ".join(f"{name} = ?" for name in key)
        self._has_table = False
        self._prepared: set[EventStream] = set()

    def prepare(self, streams: Iterable[EventStream]) -> None:
        """Create the table, and a row to lock for each stream; not within a transaction."""
        if not self._has_table:
            probe = f"SELECT 1 FROM {DELIVERED_TABLE} WHERE 1 = 0"  # noqa: S608 - names are ours
            self._ensure(lambda: [self._execute(probe, [])], self._create_table)
            self._has_table = True
        for stream in set(streams) - self._prepared:
            self._ensure(
                partial(self._select_lock_row, stream), partial(self._insert, stream, _LOCK, _LOCK)
            )
            self._prepared.add(stream)

    def record(self, positions: StreamPositions) -> Offsets:
        """Record rows as delivered; returns the numbers of the rows that were not, in order."""
        new = [np.empty(0, dtype=np.int64)]
        for stream, (numbers, offsets) in sorted(positions.items()):
            if not self._select_lock_row(stream, self._lock):
                self._prepared.clear()
                raise RetryLater(
                    f"the rows of {DELIVERED_TABLE} were deleted; they are created again"
                )
            # Only the ranges that contain some of the offsets or are next to them matter.
            near = f"{self._first} >= 0 AND {self._end} >= ? AND {self._first} <= ?"
            bounds = [int(offsets.min()), int(offsets.max()) + 1]
            known = RangeSet(self._select(stream, near, bounds))
            new.append(numbers[select_outside(offsets, known)])
            self._add(stream, offsets, known)
        chosen: Offsets = np.sort(np.concatenate(new))
        return chosen

    def _add(self, stream: EventStream, offsets: Offsets, known: RangeSet) -> None:
        """Add offsets to the known ranges near them; adjacent ranges become one."""
        merged = known.copy()
        for first, end in find_runs(offsets):
            merged.add(first, end)
        before, after = set(known), set(merged)
        for first, _ in sorted(before - after):
            self._execute(
                f"DELETE FROM {DELIVERED_TABLE} WHERE {self._stream} AND {self._first} = ?",  # noqa: S608
                [self._target, *stream, first],
            )
        for first, end in sorted(after - before):
            self._insert(stream, first, end)

    def _select_lock_row(self, stream: EventStream, lock: str = "") -> Sequence[Any]:
        return self._select(stream, f"{self._first} = ?", [_LOCK], lock)

    def _select(
        self, stream: EventStream, condition: str, values: Sequence[Any], lock: str = ""
    ) -> Sequence[Any]:
        return self._execute(
            f"SELECT {self._first}, {self._end} FROM {DELIVERED_TABLE} "  # noqa: S608 - names are ours
            f"WHERE {self._stream} AND {condition} {lock}",
            [self._target, *stream, *values],
        )

    def _insert(self, stream: EventStream, first: int, end: int) -> None:
        self._execute(
            f"INSERT INTO {DELIVERED_TABLE} ({', '.join(self._names)}) VALUES (?, ?, ?, ?, ?)",  # noqa: S608
            [self._target, *stream, first, end],
        )

    def _create_table(self) -> None:
        target, queue, partition, first, end = self._names
        self._execute(
            f"CREATE TABLE {DELIVERED_TABLE} ({target} VARCHAR(200) NOT NULL, "
            f"{queue} VARCHAR(200) NOT NULL, {partition} INTEGER NOT NULL, "
            f"{first} BIGINT NOT NULL, {end} BIGINT NOT NULL, "
            f"PRIMARY KEY ({target}, {queue}, {partition}, {first}))",
            [],
        )

    def _ensure(self, find: Callable[[], Sequence[Any]], create: Callable[[], None]) -> None:
        """Create something that is not found; another connection may do it at the same time."""
        if self._is_found(find):
            return
        try:
            with self._transaction():
                create()
        except Exception:
            if not self._is_found(find):
                raise

    def _is_found(self, find: Callable[[], Sequence[Any]]) -> bool:
        try:
            with self._transaction():
                return bool(find())
        except Exception as error:  # noqa: BLE001 - creating it fails too, if this is serious
            log.debug("sql.delivery_record_missing", table=DELIVERED_TABLE, error=error)
            return False
