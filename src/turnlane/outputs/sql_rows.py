"""Events as rows of a table: which column, or which part of one, becomes which."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from turnlane.errors import Never, RetryLater
from turnlane.events import Block
from turnlane.outputs.api import PLACE, ROW, ids_of

EVENT_ID: Final = "event_id"
"""A source that is there without a column: which event it is."""

Offsets = npt.NDArray[np.int64]


class Stream(NamedTuple):
    """Where events come from: their offsets there are theirs alone."""

    queue: str
    partition: int


class Rows(NamedTuple):
    """What is to be written."""

    columns: pa.RecordBatch
    """Named as the table's columns are."""
    places: Mapping[Stream, tuple[Offsets, Offsets]]
    """For each stream, which rows are of it, and their offsets there; empty if nobody asks."""


def rows_of(block: Block, columns: Mapping[str, str], *, places: bool) -> Rows:
    """The rows, with their ``places`` if they are wanted.

    Raises ``RetryLater`` if there is no such column: a person has to put that right. Raises
    ``Never`` if what should be JSON is none.
    """
    arrays = [_plain(_source(block, source)) for source in columns.values()]
    batch = pa.RecordBatch.from_arrays(arrays, names=list(columns))
    return Rows(batch, _places(block) if places else {})


def has_source(names: Collection[str], source: str) -> bool:
    """Whether events with columns of these names have what a column is to come from."""
    if source == EVENT_ID and set(PLACE) <= set(names):
        return True
    first, dot, _ = source.partition(".")
    return source in names or bool(dot and first in names)


def _source(block: Block, source: str) -> Any:  # noqa: ANN401
    if source in block.schema.names:
        return block.column(source)
    if source == EVENT_ID and (ids := ids_of(block)) is not None:
        return ids
    name, *path = source.split(".")
    if not path or name not in block.schema.names:
        there = ", ".join(block.schema.names)
        raise RetryLater(f"columns: the events have no {source!r}; they have {there}")
    return _within(block.column(name), path)


def _within(column: Any, path: Sequence[str]) -> Any:  # noqa: ANN401
    """What is at a path in maps, structs, and texts that are JSON."""
    for at, name in enumerate(path):
        if pa.types.is_map(column.type):
            column = pc.map_lookup(column, pa.scalar(name, column.type.key_type), "last")
        elif pa.types.is_struct(column.type) and column.type.get_field_index(name) >= 0:
            column = pc.struct_field(column, name)
        elif pa.types.is_struct(column.type):
            return pa.nulls(len(column), pa.string())
        else:
            return _picked(column, path[at:])
    return column


def _picked(column: Any, path: Sequence[str]) -> Any:  # noqa: ANN401
    """What is at a path in each of the texts; null where there is nothing."""
    found = [None if text is None else _at(text, path) for text in column.to_pylist()]
    try:
        return pa.array(found)
    except (pa.ArrowException, OverflowError, TypeError):  # of several kinds, or too large
        return pa.array([_text(each) for each in found], pa.string())


def _at(text: str | bytes, path: Sequence[str]) -> Any:  # noqa: ANN401
    try:
        value = json.loads(text)
    except ValueError as error:
        where = ".".join(path)
        raise Never(f"a text is not JSON, to look for {where!r} in it: {error}") from None
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return json.dumps(value) if isinstance(value, dict | list) else value


def _text(value: Any) -> str | None:  # noqa: ANN401
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _plain(column: Any) -> Any:  # noqa: ANN401
    """A column of a type that databases have; lists, maps and structs are JSON."""
    kind = column.type
    if pa.types.is_null(kind):
        return column.cast(pa.string())
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp("us", tz=kind.tz), safe=False)
    if pa.types.is_nested(kind):
        texts = [None if each is None else _json(each, kind) for each in column.to_pylist()]
        return pa.array(texts, pa.string())
    return column


def _json(value: Any, kind: pa.DataType) -> str:  # noqa: ANN401
    return json.dumps(dict(value) if pa.types.is_map(kind) else value, default=_in_json)


def _in_json(value: Any) -> str:  # noqa: ANN401
    """What JSON has no form for; bytes as in payloads."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _places(block: Block) -> dict[Stream, tuple[Offsets, Offsets]]:
    """The rows and offsets of each stream.

    Further rows that a transform has made of events are streams of their own, by their number:
    each has an offset at most once. No queue has a ``#`` in its name.
    """
    names = block.schema.names
    if not {"queue", "partition", "offset"} <= set(names):
        raise RetryLater("exactly_once: these events come from no queue; sql made them")
    offsets = block.column("offset").to_numpy().astype(np.int64)
    partitions = block.column("partition").to_numpy()
    numbers = block.column(ROW).to_numpy() if ROW in names else np.zeros_like(offsets)
    queues: Any = block.column("queue").dictionary_encode()
    found = {}
    for at, queue in enumerate(queues.dictionary.to_pylist()):
        of_queue = queues.indices.to_numpy() == at
        for partition, number in np.unique(
            np.stack((partitions[of_queue], numbers[of_queue])), axis=1
        ).T.tolist():
            rows = np.flatnonzero(of_queue & (partitions == partition) & (numbers == number))
            name = f"{queue}#{number}" if number else str(queue)
            found[Stream(name, partition)] = (rows, offsets[rows])
    return found
