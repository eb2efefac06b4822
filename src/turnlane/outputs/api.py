"""Which event is which, at the destination too: ids that stay the same however often it is sent."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import google_crc32c
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field

from turnlane.delivery.settings import DIRECT, PAYLOAD
from turnlane.events import Block
from turnlane.pipeline.settings import MAIN
from turnlane.plugins import Plugins
from turnlane.runtime import Closing
from turnlane.validation import Problem

# ── contract ──
# What an output is, so that anyone can write one.
#
# An output is passive: a lane hands it a block, prepared apart from the sending so that the two
# can
# overlap, and it succeeds or raises:
#
# - ``RetryLater``, with ``after`` if the destination said when: the same events may go later.
# Also
# for what a person has to put right, an unknown host or a refused password: events wait for
# that.
# - ``PayloadTooLarge``: fewer events at a time might do.
# - ``PartlyDelivered``: all but some, each of which has its own error of this list. If that may
# be
# ``RetryLater``, the output says so by ``takes_apart``.
# - any other ``Never``: something in these events cannot be delivered, now or later. The lane
# finds
# out which by halving.
# - any error that is not turnlane's own counts as ``RetryLater``, but only so many times.
#
# Everything else, waiting, splitting, giving up, is the lane's.


class OutputSettings(BaseModel):
    """The settings that every output has; one of its own adds to them."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    type: str = Field(description="Which output this is.")

    usual: ClassVar[Mapping[str, Any]] = {}
    """What of an action's ``delivery`` has another default for this output."""

    @property
    def wants(self) -> frozenset[str] | None:
        """The columns that :meth:`Output.prepare` reads beside ``payload``; ``None`` if any may be.

        Where an event comes from, ``queue``, ``partition`` and ``offset``, is there in any case.
        Columns that nobody wants need not come the long way to a task.
        """
        return None


class Output(Closing):
    """A destination. Made and closed by one task of a lane.

    ``prepare`` and ``send`` are called by several threads at a time.
    """

    settings_type: ClassVar[type[OutputSettings]] = OutputSettings

    def __init__(self, settings: OutputSettings) -> None:
        self.settings = settings

    @property
    def takes_apart(self) -> bool:
        """Whether it may take some events of a block, and want others later.

        Then events of which one must not pass the other are never in one block.
        """
        return False

    @property
    def rejected(self) -> int:
        """Records inside of delivered events that the destination has refused for good, so far.

        For those that take requests as a whole, and do not say which records they leave out.
        """
        return 0

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """Make of a block what :meth:`send` takes: serialised, compressed. No I/O."""
        return block

    @abc.abstractmethod
    def send(self, prepared: Any) -> None:  # noqa: ANN401
        """Deliver; returning means that the destination has it."""

    def check(self) -> None:
        """Try the destination without delivering anything; raises what :meth:`send` would."""

    def cancel(self) -> None:
        """Have sends that are under way fail now, as far as possible: nobody waits for them.

        Called by another thread than theirs. Later sends are welcome.
        """

    def close(self) -> None:
        """Let go of connections and files."""


# ── discard ──
# Output ``discard``: nowhere. In a direct action it ends the event's way.


class DiscardOutput(Output):
    """Takes everything and keeps nothing."""

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        del prepared


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


# ── once ──
# What outputs that write each event exactly once are told: the settings that they share.


class OnceSettings(BaseModel):
    """Whether to note what was delivered, and under which name."""

    exactly_once: bool = Field(
        default=False,
        description="Note in the table `turnlane_delivered`, in the same transaction, what was "
        "delivered, and leave out what comes again, whatever has become of it since.",
    )
    delivered_as: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="With `exactly_once`: the name under which that is noted. Another one if "
        "another pipeline writes to the same table, or if the queue was made anew. Default: the "
        "table's.",
    )

    def noted_as(self, table: str) -> str | None:
        """The name under which deliveries to a table are noted; ``None`` if they are not."""
        return (self.delivered_as or table) if self.exactly_once else None

    def once_problems(self) -> list[Problem]:
        """What makes no sense."""
        if self.delivered_as is None or self.exactly_once:
            return []
        return [Problem("delivered_as", "means nothing without exactly_once")]


# ── registry ──
# The outputs that are installed.

_PLUGINS = Plugins("turnlane.outputs", Output, "output")  # type: ignore[type-abstract]

types = _PLUGINS.types
load = _PLUGINS.load
