"""Which event is which, at the destination too: ids that stay the same however often it is sent."""

from __future__ import annotations

from typing import Any, Final

import google_crc32c
import pyarrow as pa
import pyarrow.compute as pc

from turnlane.delivery.columns import DIRECT, PAYLOAD
from turnlane.events import Block
from turnlane.pipeline.settings import MAIN

PLACE: Final = ("partition", "offset")
"""The columns without which nobody knows which event it is."""
_TIME: Final = "timestamp"
ROW: Final = "turnlane_row"
"""The column that tells the rows which a transform has made of one event apart: 0, 1, …"""
NOT_OF_EVENTS: Final = ("queue", *PLACE, DIRECT, PAYLOAD, ROW)
"""Columns that say where an event is, or goes, or how it looks there; they are not stored."""


def ids_of(block: Block) -> pa.Array[Any] | None:
    """``queue/partition/offset`` of each event; ``None`` if they come from no queue.

    Rows that SQL has made of many events do not. Of several rows that a transform has made of one
    event, the second has ``.1`` behind that, and so on.
    """
    names = block.schema.names
    if not all(name in names for name in PLACE):
        return None
    partition, offset = (block.column(name).cast(pa.string()) for name in PLACE)
    return _joined(_queues(block), partition, _told_apart(offset, block), "/")


def lasting_ids(block: Block) -> pa.Array[Any] | None:
    """The same with each event's time behind it: ids for where they are kept for long.

    A queue that was removed and made anew counts its offsets from the beginning. What keeps
    documents by their ids must not take its events for those that it has.
    """
    ids = ids_of(block)
    if ids is None or not _has_times(block):
        return ids
    return _joined(ids, pc.strftime(block.column(_TIME), "%Y-%m-%dT%H:%M:%SZ"), "-")


def key_of(block: Block, body: pa.Buffer | bytes) -> str | None:
    """A key for a request with these events: the same only for the same events in the same form.

    The first id and the last, and a checksum of what the events look like: those between may be
    others another time, and two actions may send the same events in different forms.
    """
    first, last = ids_of(block.slice(0, 1)), ids_of(block.slice(block.num_rows - 1))
    if first is None or last is None:
        return None
    check = google_crc32c.extend(_times(block), body)
    return f"{first[0]}-{last[0]}-{check:08x}"


def _told_apart(offsets: pa.Array[Any], block: Block) -> pa.Array[Any]:
    """Offsets as texts, with the row's number behind those of further rows of an event."""
    if ROW not in block.schema.names:
        return offsets
    rows = block.column(ROW)
    further = _joined(offsets, rows.cast(pa.string()), ".")
    texts: pa.Array[Any] = pc.if_else(pc.equal(rows, pa.scalar(0)), offsets, further)
    return texts


def _queues(block: Block) -> Any:  # noqa: ANN401
    """The queues that events come from. In the main lane the column says where they go next."""
    at = block.schema.get_field_index("queue")
    if at >= 0 and pa.types.is_string(block.schema.field(at).type):
        return block.column(at)
    return pa.scalar(MAIN)


def _has_times(block: Block) -> bool:
    at = block.schema.get_field_index(_TIME)
    return at >= 0 and pa.types.is_timestamp(block.schema.field(at).type)


def _times(block: Block) -> int:
    """A checksum of the events' times."""
    if not _has_times(block):
        return 0
    times = block.column(_TIME).cast(pa.int64()).fill_null(0)
    check: int = google_crc32c.value(times.to_numpy().tobytes())
    return check


def _joined(*parts: Any) -> pa.Array[Any]:
    """Texts side by side; the last part stands between them. Null is nothing."""
    found: pa.Array[Any] = pc.binary_join_element_wise(*parts, null_handling="replace")
    return found
