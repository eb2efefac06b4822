"""The queue tables that a node serves: it runs their managers and sends events to its clients.

A stream goes to one remote receiver. Its events are numbered from 0 in the order in which they are
sent, so a block needs only its first number, and the receiver settles events by their numbers. A
receiver that does not settle gets at most ``prefetch`` events.
"""

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

from turnlane.databases import URL_EXAMPLES
from turnlane.errors import ConfigError, DatabaseDown, NoSuchQueue, NoSuchStream, TurnlaneError
from turnlane.events import Block
from turnlane.logs import get_logger
from turnlane.runtime import Closeable, start_thread
from turnlane.table.definition import Definition
from turnlane.table.receiver import EVENT_COLUMNS, Receiver, TableEvent
from turnlane.table.rows import build_block
from turnlane.table.sharded import ShardedQueue, connect_shards
from turnlane.table.shards import KeyRange, ShardMap
from turnlane.validation import ConfigIssue, ContradictorySettings, get_message

log = get_logger(__name__)

MAX_MESSAGE_EVENTS: Final = 1_000
"""The most events of a message."""
RETRY_SECONDS: Final = 1.0
"""Seconds before a database that did not answer, or had no such queue, is tried again."""

Spans = Iterable[tuple[int, int]]


def _convert_to_text(value: object) -> object:
    """Return a number as text: YAML parses the range ``-80`` as a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class ShardSettings(BaseModel):
    """A database that holds a part of the keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: SecretStr = Field(description=f"The database: {URL_EXAMPLES}.")
    range: Annotated[str, BeforeValidator(_convert_to_text)] = Field(
        "-", description="The key range that it holds.", examples=["-80", "80-"]
    )


class ServedTableSettings(BaseModel):
    """A queue table that the node manages and serves to remote receivers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: SecretStr | None = Field(
        default=None, description=f"Its database, if there is only one: {URL_EXAMPLES}."
    )
    shards: tuple[ShardSettings, ...] = Field(
        (), description="Its databases, if there are several; each key is in exactly one of them."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.url is None) == (not self.shards):
            raise ContradictorySettings([ConfigIssue("url", "give either url or shards")])
        try:
            self.build_map()
        except ConfigError as error:
            raise ContradictorySettings([ConfigIssue("shards", get_message(error))]) from None
        return self

    def build_map(self) -> ShardMap:
        """Return the shards. Raises ``ConfigError``."""
        shards = [(each.url, each.range) for each in self.shards]
        if self.url is not None:
            shards = [(self.url, "-")]
        return ShardMap.from_shards([(url.get_secret_value(), range_) for url, range_ in shards])


class TableStream(Closeable):
    """The events of one remote receiver. Safe to use from any thread; :meth:`take` from one."""

    def __init__(self, table: str, receiver: Receiver, definition: Definition) -> None:
        self.table = table
        self.id = uuid.uuid4().hex
        self.schema = get_event_schema(definition)
        self._receiver = receiver
        self._events: dict[int, TableEvent] = {}
        """Events that were sent and are not settled, by number."""
        self._unconfirmed: dict[int, TableEvent] = {}
        """Events that :meth:`store` has settled and whose acks may not be stored."""
        self._next = 0
        self._changed = threading.Condition()

    def take(self, timeout: float) -> list[tuple[int, Block]]:
        """Return the next events as blocks with their first numbers; none if none come in time.

        Raises ``QueueClosed`` when the node stops serving the table.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._count_room() > 0, timeout)
            room = self._count_room()
        events = self._receiver.take(min(room, MAX_MESSAGE_EVENTS), timeout) if room > 0 else []
        with self._changed:
            first = self._next
            self._next += len(events)
            self._events.update(enumerate(events, first))
        return self._build_blocks(first, events) if events else []

    def ack(self, spans: Spans) -> None:
        """Settle events by their numbers. Settled events are ignored."""
        self._receiver.ack([event for _, event in self._pop_unsettled(spans)])

    def store(self, spans: Spans, timeout: float | None) -> bool:
        """Settle events and wait until their acks are stored; false on timeout.

        The call may be repeated. Raises ``LeadLost``, at every call, if acks of them are lost.
        """
        listed = list(spans)
        events = dict(self._pop_unsettled(listed))
        with self._changed:
            before = {
                number: event
                for number, event in self._unconfirmed.items()
                if any(first <= number < end for first, end in listed)
            }
            self._unconfirmed.update(events)
        self._receiver.ack(list(events.values()))
        stored = self._receiver.flush(timeout, (*before.values(), *events.values()))
        if stored:
            with self._changed:
                for number in (*before, *events):
                    self._unconfirmed.pop(number, None)
        return stored

    def nack(self, spans: Spans, delay: float | None, error: str | None) -> None:
        """Request that events fire again."""
        for _, event in self._pop_unsettled(spans):
            event.nack(delay, error)

    def flush(self, timeout: float | None) -> bool:
        """Wait until all earlier acks are stored, like :meth:`Receiver.flush`."""
        return self._receiver.flush(timeout)

    def close(self) -> None:
        """Close the receiver. The events that it did not settle fire again for others."""
        self._receiver.close()

    def _count_room(self) -> int:
        return self._receiver.prefetch - len(self._events)

    def _build_blocks(self, first: int, events: Sequence[TableEvent]) -> list[tuple[int, Block]]:
        try:
            return [(first, build_block([event.row for event in events], self.schema))]
        except (pa.ArrowException, ValueError, TypeError, ArithmeticError) as error:
            if len(events) > 1:
                return [
                    found
                    for at, event in enumerate(events, first)
                    for found in self._build_blocks(at, [event])
                ]
            # SQLite stores text in a column of numbers. Such an event becomes a dead letter.
            log.warning(
                "table.event_not_sendable", table=self.table, event=events[0].id, error=error
            )
            self.nack([(first, first + 1)], None, f"cannot be sent: {error}")
            return []

    def _pop_unsettled(self, spans: Spans) -> list[tuple[int, TableEvent]]:
        """Remove and return the unsettled events of the given numbers, with their numbers.

        Raises ``ValueError`` for a number that was never sent.
        """
        found: list[tuple[int, TableEvent]] = []
        with self._changed:
            for first, end in spans:
                if end > self._next:
                    raise ValueError(f"event {end - 1} was never sent on this stream")
                # Iterate over the smaller one: a span may be as long as the stream.
                numbers: Iterable[int] = range(first, end)
                if end - first > len(self._events):
                    numbers = [number for number in self._events if first <= number < end]
                found += [(n, self._events.pop(n)) for n in numbers if n in self._events]
            self._changed.notify_all()
        return found


def get_event_schema(definition: Definition) -> pa.Schema:
    """Return the schema of a table's events: turnlane's own columns, then the user's."""
    text = {"event_group", "after_group"}
    own = [pa.field(name, pa.string() if name in text else pa.int64()) for name in EVENT_COLUMNS]
    users = [pa.field(column.name, column.arrow_type) for column in definition.columns]
    return pa.schema([*own, *users])


def convert_rows_to_json(block: Block) -> list[list[Any]]:
    """Return the rows of a block as JSON values, bytes in base64."""

    def convert(value: Any) -> Any:  # noqa: ANN401 - any value of a column
        return base64.b64encode(value).decode() if isinstance(value, bytes) else value

    columns = [map(convert, column.to_pylist()) for column in block.columns]
    return [list(row) for row in zip(*columns, strict=True)]


class ServedTable(Closeable):
    """One queue table that the node serves. Its databases may be down when the node starts."""

    def __init__(self, name: str, settings: ServedTableSettings) -> None:
        self.name = name
        self._shards = settings.build_map()
        self._queue: ShardedQueue | None = None
        self._trouble: str = "its databases were not reached yet"
        self._over = threading.Event()
        self._opener = start_thread(f"turnlane-table-{name}", self._open)

    @property
    def is_open(self) -> bool:
        """Whether its databases were reached."""
        return self._queue is not None

    @property
    def queue(self) -> ShardedQueue:
        """Return the queue. Raises ``DatabaseDown`` until its databases were reached."""
        if self._queue is None:
            raise DatabaseDown(f"queue table {self.name!r}: {self._trouble}", after=RETRY_SECONDS)
        return self._queue

    def close(self) -> None:
        self._over.set()
        self._opener.join()

    def _open(self) -> None:
        """Connect to the databases, again after every error, and serve until the end."""
        while not self._over.is_set():
            try:
                with connect_shards(self._shards.shards) as databases:
                    queue = databases.queue(self.name)
                    queue.manage()
                    self._queue = queue
                    self._over.wait()
            except Exception as error:  # noqa: BLE001 - drivers raise any error for a bad address
                self._trouble = str(error)
                level = logging.WARNING if isinstance(error, TurnlaneError) else logging.ERROR
                log.log(level, "table.open_failed", table=self.name, error=error)
                self._over.wait(RETRY_SECONDS)


class Tables(Closeable):
    """All queue tables of a node, and the streams of their receivers. Thread-safe."""

    def __init__(self, settings: Mapping[str, ServedTableSettings] | None = None) -> None:
        self._tables = {name: ServedTable(name, each) for name, each in (settings or {}).items()}
        self._streams: dict[str, TableStream] = {}
        self._lock = threading.Lock()

    def all(self) -> dict[str, ServedTable]:
        """Return the tables by name."""
        return dict(self._tables)

    def table(self, name: str) -> ServedTable:
        """Return the table of this name. Raises ``NoSuchQueue``."""
        found = self._tables.get(name)
        if found is None:
            known = ", ".join(sorted(self._tables)) or "none"
            raise NoSuchQueue(f"there is no queue table {name!r} here; there are: {known}")
        return found

    @contextmanager
    def stream(self, name: str, key_range: KeyRange, prefetch: int) -> Iterator[TableStream]:
        """Open a stream for a remote receiver, and close it at the end of the block."""
        queue = self.table(name).queue
        with TableStream(name, queue.receive(str(key_range), prefetch), queue.definition) as made:
            with self._lock:
                self._streams[made.id] = made
            try:
                yield made
            finally:
                with self._lock:
                    del self._streams[made.id]

    def find_stream(self, table: str, stream_id: str) -> TableStream:
        """Return a stream by its id. Raises ``NoSuchStream``."""
        with self._lock:
            found = self._streams.get(stream_id)
        if found is None or found.table != table:
            raise NoSuchStream(
                f"stream {stream_id[:80]!r} has ended: events that were not acked fire again"
            )
        return found

    @property
    def streams(self) -> int:
        """The number of streams to remote receivers."""
        return len(self._streams)

    def close(self) -> None:
        """Stop the managers. Unsettled events fire again from another node."""
        for table in self._tables.values():
            table.close()
