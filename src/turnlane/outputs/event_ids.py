"""Event ids for destinations: the same for an event however many times it is sent.

An id is made of the event's queue, partition and offset, so no state is needed. A destination that
stores events by id, or drops ids that it has seen, gets each event once.
"""

from __future__ import annotations

from typing import Any, Final

import google_crc32c
import pyarrow as pa
import pyarrow.compute as pc

from turnlane.delivery.settings import DIRECT, PAYLOAD
from turnlane.events import Block
from turnlane.pipeline.settings import MAIN

POSITION_COLUMNS: Final = ("partition", "offset")
"""The columns that identify an event in its queue."""
ROW_NUMBER_COLUMN: Final = "turnlane_row"
"""Numbers the rows that a transform made of one event: 0, 1, …"""
INTERNAL_COLUMNS: Final = ("queue", *POSITION_COLUMNS, DIRECT, PAYLOAD, ROW_NUMBER_COLUMN)
"""Columns about the way of an event, not about its contents: destinations do not store them."""
_TIME: Final = "timestamp"


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
    return _join(_get_queues(block), partition, offset, "/")


def make_dated_event_ids(block: Block) -> pa.Array[Any] | None:
    """Return the event ids followed by each event's time, for destinations that keep ids for long.

    A queue that was removed and created again counts its offsets from zero. The time keeps its
    events apart from the events of the old queue.
    """
    ids = make_event_ids(block)
    if ids is None or not _has_times(block):
        return ids
    return _join(ids, pc.strftime(block.column(_TIME), "%Y-%m-%dT%H:%M:%SZ"), "-")


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


def _get_queues(block: Block) -> Any:  # noqa: ANN401
    """Return the queues that events come from. In the main lane the column is about the next."""
    at = block.schema.get_field_index("queue")
    if at >= 0 and pa.types.is_string(block.schema.field(at).type):
        return block.column(at)
    return pa.scalar(MAIN)


def _has_times(block: Block) -> bool:
    at = block.schema.get_field_index(_TIME)
    return at >= 0 and pa.types.is_timestamp(block.schema.field(at).type)


def _join(*parts: Any) -> pa.Array[Any]:
    """Join texts of each row; the last part is the separator, and null is an empty text."""
    joined: pa.Array[Any] = pc.binary_join_element_wise(*parts, null_handling="replace")
    return joined
