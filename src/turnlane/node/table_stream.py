"""A stream of events to a receiver elsewhere, which settles them by their numbers.

Events are numbered from 0 in the order in which they are sent, so a block needs only its first
number. A receiver that does not settle gets no more than ``prefetch`` events.
"""

from __future__ import annotations

import base64
import json
import threading
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Final

import pyarrow as pa

from turnlane.closing import Closing
from turnlane.table.definition import Definition
from turnlane.table.event import COLUMNS, TableEvent
from turnlane.table.receiver import Receiver

MESSAGE: Final = 1_000
"""Events to a message at most."""

_KINDS: Final = {
    "BIGINT": pa.int64(),
    "INT": pa.int64(),
    "INTEGER": pa.int64(),
    "SMALLINT": pa.int64(),
    "BOOLEAN": pa.bool_(),
    "REAL": pa.float64(),
    "DOUBLE": pa.float64(),
    "BLOB": pa.binary(),
    "BYTEA": pa.binary(),
}
"""What is not here goes as text: numbers of many digits, times, JSON, UUIDs."""

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
        self._next = 0
        self._changed = threading.Condition()

    def take(self, timeout: float) -> tuple[int, list[TableEvent]]:
        """The next events and the number of the first; none if none came in time.

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
        return first, events

    def ack(self, spans: Spans) -> None:
        """Settle events by their numbers; those that were settled before change nothing."""
        self._receiver.ack(self._settled(spans))

    def nack(self, spans: Spans, delay: float | None, error: str | None) -> None:
        """Have events fired again."""
        for event in self._settled(spans):
            event.nack(delay, error)

    def flush(self, timeout: float | None) -> bool:
        """Wait until all acks so far are stored; as :meth:`Receiver.flush`."""
        return self._receiver.flush(timeout)

    def close(self) -> None:
        """The receiver is gone: what it did not settle fires elsewhere."""
        self._receiver.close()

    def _room(self) -> int:
        return self._receiver.prefetch - len(self._events)

    def _settled(self, spans: Spans) -> list[TableEvent]:
        found: list[TableEvent] = []
        with self._changed:
            for first, end in spans:
                if end > self._next:
                    raise ValueError(f"event {end - 1} was never sent on this stream")
                # Whichever are fewer: a span may be as long as the stream.
                numbers: Iterable[int] = range(first, end)
                if end - first > len(self._events):
                    numbers = [number for number in self._events if first <= number < end]
                found += [self._events.pop(n) for n in numbers if n in self._events]
            self._changed.notify_all()
        return found


def schema_of(definition: Definition) -> pa.Schema:
    """The fields of a table's events: turnlane's own, then the user's."""
    text = {"event_group", "after_group"}
    own = [pa.field(name, pa.string() if name in text else pa.int64()) for name in COLUMNS]
    users = [
        pa.field(column.name, _KINDS.get(column.type, pa.string())) for column in definition.columns
    ]
    return pa.schema([*own, *users])


def block_of(schema: pa.Schema, events: Sequence[TableEvent]) -> pa.RecordBatch:
    """Events as Arrow has them."""
    columns = zip(*(event.row for event in events), strict=True)
    arrays = [
        pa.array([_valued(each, field.type) for each in values], field.type)
        for field, values in zip(schema, columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def rows_of(schema: pa.Schema, events: Sequence[TableEvent]) -> list[list[Any]]:
    """Events as JSON has them; bytes in base64."""
    kinds = [field.type for field in schema]
    return [
        [_in_json(_valued(value, kind)) for value, kind in zip(event.row, kinds, strict=True)]
        for event in events
    ]


def _valued(value: Any, kind: pa.DataType) -> Any:  # noqa: ANN401 - whatever a column holds
    if value is None or isinstance(value, str):
        return value if not pa.types.is_binary(kind) or value is None else value.encode()
    if pa.types.is_string(kind):
        return json.dumps(value) if isinstance(value, dict | list) else str(value)
    if pa.types.is_boolean(kind):
        return bool(value)
    return bytes(value) if pa.types.is_binary(kind) else value


def _in_json(value: Any) -> Any:  # noqa: ANN401 - whatever a column holds
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
