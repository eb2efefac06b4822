"""A stream of events to a receiver elsewhere, which settles them by their numbers.

Events are numbered from 0 in the order in which they are sent, so a block needs only its first
number. A receiver that does not settle gets no more than ``prefetch`` events.
"""

from __future__ import annotations

import base64
import logging
import threading
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Final

import pyarrow as pa

from turnlane.closing import Closing
from turnlane.events import Block
from turnlane.table.columns import block_of, type_of
from turnlane.table.definition import Definition
from turnlane.table.event import COLUMNS, TableEvent
from turnlane.table.receiver import Receiver

log = logging.getLogger(__name__)

MESSAGE: Final = 1_000
"""Events to a message at most."""

Spans = Iterable[tuple[int, int]]


class TableStream(Closing):
    """One receiver. Safe to use from any thread; :meth:`take` from one at a time."""

    def __init__(self, table: str, receiver: Receiver, definition: Definition) -> None:
        self.table = table
        self.id = uuid.uuid4().hex
        self.schema = schema_of(definition)
        self._receiver = receiver
        self._events: dict[int, TableEvent] = {}
        """Sent and not settled, by number."""
        self._unsure: dict[int, TableEvent] = {}
        """Settled by :meth:`store`, and not known to be stored: some are lost."""
        self._next = 0
        self._changed = threading.Condition()

    def take(self, timeout: float) -> list[tuple[int, Block]]:
        """The next events, with the number of each block's first; none if none came in time.

        Raises ``QueueClosed`` when the table is served no more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._room() > 0, timeout)
            room = self._room()
        events = self._receiver.take(min(room, MESSAGE), timeout) if room > 0 else []
        with self._changed:
            first = self._next
            self._next += len(events)
            self._events.update(enumerate(events, first))
        return self._blocks(first, events) if events else []

    def ack(self, spans: Spans) -> None:
        """Settle events by their numbers; those that were settled before change nothing."""
        self._receiver.ack([event for _, event in self._settled(spans)])

    def store(self, spans: Spans, timeout: float | None) -> bool:
        """Settle events and wait until that is stored; false if the time is over.

        Then it may be repeated. Raises ``LeadLost`` if acks of theirs are lost, however often.
        """
        listed = list(spans)
        events = dict(self._settled(listed))
        with self._changed:
            before = {n: event for n, event in self._unsure.items() if _within(n, listed)}
            self._unsure.update(events)
        self._receiver.ack(list(events.values()))
        stored = self._receiver.flush(timeout, (*before.values(), *events.values()))
        if stored:
            with self._changed:
                for number in (*before, *events):
                    self._unsure.pop(number, None)
        return stored

    def nack(self, spans: Spans, delay: float | None, error: str | None) -> None:
        """Have events fired again."""
        for _, event in self._settled(spans):
            event.nack(delay, error)

    def flush(self, timeout: float | None) -> bool:
        """Wait until all acks so far are stored; as :meth:`Receiver.flush`."""
        return self._receiver.flush(timeout)

    def close(self) -> None:
        """The receiver is gone: what it did not settle fires elsewhere."""
        self._receiver.close()

    def _room(self) -> int:
        return self._receiver.prefetch - len(self._events)

    def _blocks(self, first: int, events: Sequence[TableEvent]) -> list[tuple[int, Block]]:
        try:
            return [(first, block_of([event.row for event in events], self.schema))]
        except (pa.ArrowException, ValueError, TypeError, ArithmeticError) as error:
            if len(events) > 1:
                return [
                    found
                    for at, event in enumerate(events, first)
                    for found in self._blocks(at, [event])
                ]
            # SQLite takes a word for a number; it can be sent to nobody, and ends as a dead letter.
            log.warning("table %s, event %d: %s", self.table, events[0].id, error)
            self.nack([(first, first + 1)], None, f"cannot be sent: {error}")
            return []

    def _settled(self, spans: Spans) -> list[tuple[int, TableEvent]]:
        """Events that were sent and not settled so far, with their numbers."""
        found: list[tuple[int, TableEvent]] = []
        with self._changed:
            for first, end in spans:
                if end > self._next:
                    raise ValueError(f"event {end - 1} was never sent on this stream")
                # Whichever are fewer: a span may be as long as the stream.
                numbers: Iterable[int] = range(first, end)
                if end - first > len(self._events):
                    numbers = [number for number in self._events if first <= number < end]
                found += [(n, self._events.pop(n)) for n in numbers if n in self._events]
            self._changed.notify_all()
        return found


def schema_of(definition: Definition) -> pa.Schema:
    """The fields of a table's events: turnlane's own, then the user's."""
    text = {"event_group", "after_group"}
    own = [pa.field(name, pa.string() if name in text else pa.int64()) for name in COLUMNS]
    users = [pa.field(column.name, type_of(column)) for column in definition.columns]
    return pa.schema([*own, *users])


def rows_of(block: Block) -> list[list[Any]]:
    """Events as JSON has them; bytes in base64."""
    columns = [
        [_in_base64(each) for each in column.to_pylist()]
        if pa.types.is_binary(column.type)
        else column.to_pylist()
        for column in block.columns
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _in_base64(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _within(number: int, spans: Spans) -> bool:
    return any(first <= number < end for first, end in spans)
