"""The queue tables that a node serves: it runs their managers, and its clients receive."""

from __future__ import annotations

import base64
import logging
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final, Self

import pyarrow as pa
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from turnlane.errors import ConfigError, DatabaseDown, NoSuchQueue, NoSuchStream, TurnlaneError
from turnlane.events import Block
from turnlane.runtime import Closing
from turnlane.table.definition import Definition
from turnlane.table.event import COLUMNS, TableEvent
from turnlane.table.receiver import Receiver
from turnlane.table.row_codec import block_of, type_of
from turnlane.table.sharded import ShardedQueue, connect_shards
from turnlane.table.shards import KeyRange, ShardMap
from turnlane.table.url import EXAMPLES
from turnlane.validation import Contradiction, Problem, message_of

# ── table_settings ──
# Which queue tables a node serves, as its configuration says.


def _text(value: object) -> object:
    """YAML takes -80 for a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class ShardSettings(BaseModel):
    """A database that has a part of the keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: SecretStr = Field(description=f"The database: {EXAMPLES}.")
    range: Annotated[str, BeforeValidator(_text)] = Field(
        "-", description="The key range that it has.", examples=["-80", "80-"]
    )


class ServedTableSettings(BaseModel):
    """A queue table that the node runs managers for, and gives to receivers elsewhere."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: SecretStr | None = Field(
        default=None, description=f"Its database, if it is only one: {EXAMPLES}."
    )
    shards: tuple[ShardSettings, ...] = Field(
        (), description="Its databases, if there are several; together they have every key once."
    )

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if (self.url is None) == (not self.shards):
            raise Contradiction([Problem("url", "give either url or shards")])
        try:
            self.map()
        except ConfigError as error:
            raise Contradiction([Problem("shards", message_of(error))]) from None
        return self

    def map(self) -> ShardMap:
        """The shards. Raises ``ConfigError``."""
        if self.url is not None:
            return ShardMap.of([(self.url.get_secret_value(), "-")])
        return ShardMap.of([(each.url.get_secret_value(), each.range) for each in self.shards])


# ── table_stream ──
# A stream of events to a receiver elsewhere, which settles them by their numbers.
#
# Events are numbered from 0 in the order in which they are sent, so a block needs only its first
# number. A receiver that does not settle gets no more than ``prefetch`` events.

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


RETRY: Final = 1.0
"""Seconds before a database that did not answer, or had no such queue, is tried again."""


class ServedTable(Closing):
    """One queue table. Its databases may be away when the node starts."""

    def __init__(self, name: str, settings: ServedTableSettings) -> None:
        self.name = name
        self._shards = settings.map()
        self._queue: ShardedQueue | None = None
        self._trouble: str = "it was not reached yet"
        self._over = threading.Event()
        self._opener = threading.Thread(
            target=self._open, name=f"turnlane-table-{name}", daemon=True
        )
        self._opener.start()

    @property
    def is_open(self) -> bool:
        """Whether its databases were reached."""
        return self._queue is not None

    @property
    def queue(self) -> ShardedQueue:
        """The queue. Raises ``DatabaseDown`` until its databases were reached."""
        if self._queue is None:
            raise DatabaseDown(f"queue table {self.name!r}: {self._trouble}", after=RETRY)
        return self._queue

    def close(self) -> None:
        self._over.set()
        self._opener.join()

    def _open(self) -> None:
        """Open it and keep it until the end."""
        # Drivers raise what they like for an address that leads nowhere.
        while not self._over.is_set():
            try:
                self._serve()
            except Exception as error:  # noqa: BLE001 - said, and tried again
                self._trouble = str(error)
                level = logging.WARNING if isinstance(error, TurnlaneError) else logging.ERROR
                log.log(level, "queue table %s: %s", self.name, error)
                self._over.wait(RETRY)

    def _serve(self) -> None:
        with connect_shards(self._shards.shards) as databases:
            queue = databases.queue(self.name)
            queue.manage()
            self._queue = queue
            self._over.wait()


class Tables(Closing):
    """All queue tables of a node, and the streams of their receivers. Safe from any thread."""

    def __init__(self, settings: Mapping[str, ServedTableSettings] | None = None) -> None:
        self._tables = {name: ServedTable(name, each) for name, each in (settings or {}).items()}
        self._streams: dict[str, TableStream] = {}
        self._lock = threading.Lock()

    def all(self) -> dict[str, ServedTable]:
        """The tables by name."""
        return dict(self._tables)

    def table(self, name: str) -> ServedTable:
        """The table of this name. Raises ``NoSuchQueue``."""
        found = self._tables.get(name)
        if found is None:
            known = ", ".join(sorted(self._tables)) or "none"
            raise NoSuchQueue(f"there is no queue table {name!r} here; there are: {known}")
        return found

    @contextmanager
    def stream(self, name: str, key_range: KeyRange, prefetch: int) -> Iterator[TableStream]:
        """A receiver elsewhere, for as long as it is there."""
        queue = self.table(name).queue
        with TableStream(name, queue.receive(str(key_range), prefetch), queue.definition) as made:
            with self._lock:
                self._streams[made.id] = made
            try:
                yield made
            finally:
                with self._lock:
                    del self._streams[made.id]

    def stream_of(self, table: str, stream_id: str) -> TableStream:
        """A stream by its id. Raises ``NoSuchStream``."""
        with self._lock:
            found = self._streams.get(stream_id)
        if found is None or found.table != table:
            raise NoSuchStream(
                f"stream {stream_id[:80]!r} is over: what was not acked fires elsewhere"
            )
        return found

    @property
    def streams(self) -> int:
        """How many receivers elsewhere there are."""
        return len(self._streams)

    def close(self) -> None:
        """Stop the managers; what is out fires again elsewhere."""
        for table in self._tables.values():
            table.close()
