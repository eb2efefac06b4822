"""The input ``table``: moves the events of a queue table, when they fire, into a queue of the node.

An event is acked in the table once it has reached the level ``ack`` in the node's queue. After a
crash in between, the table fires it again: delivery is at least once, and a header has the event's
id.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Final, Literal

from pydantic import Field, field_validator

from turnlane.errors import (
    AckPending,
    ConfigError,
    EventTooLarge,
    LeadLost,
    QueueClosed,
    QueueFull,
    TurnlaneError,
)
from turnlane.events import Block, block_of
from turnlane.inputs.api import Host, Input, InputSettings
from turnlane.logs import get_logger
from turnlane.queues.api import FlowControl
from turnlane.runtime import start_thread
from turnlane.storage.export import convert_to_json, put_json_value
from turnlane.table import KeyRange, Receiver, TableEvent, TableQueue, connect
from turnlane.table.definition import Definition
from turnlane.table.shard_directory import TableAddress
from turnlane.table.sharded import ShardedQueue, connect_shards

log = get_logger(__name__)

POLL_SECONDS: Final = 0.1
"""How long to wait for events, or for room, before checking whether the input has to stop."""
ROOM_SECONDS: Final = 5.0
"""How long events wait for room that other producers took; then they fire again."""
RETRY_SECONDS: Final = 1.0
"""How long to pause after a database failed."""
STOP_GRACE_SECONDS: Final = 15.0
"""How much longer than its timeout a stop waits: calls of a database cannot be interrupted."""
EVENT_FIELDS: Final = ("event_id", "fire_at", "priority", "attempts", "event_group")
"""Fields of an event that a header may contain, beside the user's columns."""


class TableInputSettings(InputSettings, TableAddress):
    """The settings of a table input."""

    type: Literal["table"] = "table"
    flow: FlowControl = Field(
        FlowControl.FULL, description="How it slows down before the queue is full."
    )
    key_range: str = Field("-", description="Only events with keys in this range, such as `-80`.")
    key: str | None = Field(
        None, description="The column with the key of events; default: the column of `SHARD BY`."
    )
    value: str | None = Field(
        None, description="The column with the value of events; default: the whole row, as JSON."
    )
    headers: dict[str, str] = Field(
        default_factory=lambda: {"event_id": "event_id"},
        description="Headers, each with its column: one of yours, `event_id`, "
        "`fire_at`, `priority`, `attempts` or `event_group`.",
    )
    batch: int = Field(1_000, ge=1, description="The most events published at a time.")

    @field_validator("key_range")
    @classmethod
    def _check_range(cls, text: str) -> str:
        KeyRange.parse(text)
        return text


class TableInput(Input):
    """Runs a manager for every shard. Of all managers of a shard, on all nodes, one leads it."""

    settings_type: ClassVar[type[InputSettings]] = TableInputSettings
    settings: TableInputSettings

    def __init__(self, settings: TableInputSettings, host: Host) -> None:
        super().__init__(settings, host)
        self._stopping = threading.Event()
        self._ack_deadline = float("inf")
        """The deadline for acks after the input is stopped; monotonic."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start; a database that is down, or has no such table yet, is tried again."""
        settings = self.settings
        self._queue = self.host.queue(settings.queue)
        self._producer = self._queue.producer(ack=settings.ack, flow=settings.flow)
        name = f"turnlane-{settings.label}"
        self._thread = start_thread(name, self._run)

    def stop(self, timeout: float) -> None:
        self._ack_deadline = time.monotonic() + timeout
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout + STOP_GRACE_SECONDS)
            if thread.is_alive():
                hint = "its database does not answer; the thread ends with the process"
                log.error("table_input.stop_timeout", input=self.settings.label, hint=hint)

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        label = self.settings.label
        while not self._stopping.is_set():
            try:
                with ExitStack() as stack:
                    self._serve(self._open_table(stack))
            except QueueClosed as error:
                log.info("table_input.ended", input=label, error=error)
                return
            except TurnlaneError as error:
                log.warning("table_input.retrying", input=label, error=error)
            except Exception:
                log.exception("table_input.retrying", input=label)
            self._stopping.wait(RETRY_SECONDS)

    def _open_table(self, stack: ExitStack) -> TableQueue | ShardedQueue:
        shards = self.settings.list_databases()
        table: TableQueue | ShardedQueue
        if len(shards) > 1:
            table = stack.enter_context(connect_shards(shards)).queue(self.settings.table)
        else:
            table = stack.enter_context(connect(shards[0].url)).queue(self.settings.table)
        self._converter = RowConverter(self.settings, table.definition)
        return table

    def _serve(self, table: TableQueue | ShardedQueue) -> None:
        """Receive events only while there is room: each reception counts as an attempt."""
        while not self._stopping.is_set():
            room = min(self._queue.room, self.settings.batch)
            if room:
                with table.receive(self.settings.key_range, prefetch=room) as receiver:
                    self._transfer(receiver)
            else:
                self._stopping.wait(POLL_SECONDS)

    def _transfer(self, receiver: Receiver) -> None:
        """Publish and ack until the queue is full, or the input has to stop."""
        has_acks = False
        while not self._stopping.is_set() and (room := self._queue.room):
            try:
                events = receiver.take(min(room, receiver.prefetch), timeout=POLL_SECONDS)
            except QueueClosed:
                return  # its managers are gone: the next receiver finds others
            has_acks |= bool(events)
            if events and not self._publish(receiver, events):
                break
        if has_acks:
            try:
                left = self._ack_deadline - time.monotonic()
                receiver.flush(max(0.0, min(ROOM_SECONDS, left)))
            except LeadLost as error:
                log.warning("table_input.lead_lost", input=self.settings.label, error=error)

    def _publish(self, receiver: Receiver, events: Sequence[TableEvent]) -> bool:
        """Publish events and ack the safe ones; false if there was no room for all."""
        try:
            block = self._converter.build_block(events)
            published = self._producer.publish_block(block, timeout=ROOM_SECONDS)
        except EventTooLarge as error:
            if len(events) == 1:
                events[0].nack(error=str(error))  # it becomes a dead letter in the table
                self.count(invalid=1)
                return True
            half = len(events) // 2
            parts = (events[:half], events[half:])
            return all(self._publish(receiver, part) for part in parts)
        except QueueFull as error:
            if not error.pending or self._await_acks():
                self._ack(receiver, events[: error.accepted], error.accepted)
            return False
        except AckPending:
            # The events are in the queue, but not on its disk yet.
            if not self._await_acks():
                return False
            self._ack(receiver, events, len(events))
            return True
        self.count(bytes=int(block.nbytes))
        self._ack(receiver, events, published.accepted)
        return True

    def _await_acks(self) -> bool:
        while time.monotonic() < self._ack_deadline:
            if self._producer.flush(POLL_SECONDS):
                return True
        return False

    def _ack(self, receiver: Receiver, events: Sequence[TableEvent], accepted: int) -> None:
        receiver.ack(events)
        self.count(events=accepted)


class RowConverter:
    """Makes the node's events of rows. Raises ``ConfigError`` for a column that does not exist."""

    def __init__(self, settings: TableInputSettings, definition: Definition) -> None:
        self._key = settings.key or definition.shard_by
        self._value = settings.value
        self._headers = settings.headers
        self._source = definition.name
        columns = definition.column_names
        for knob, name in (("key", settings.key), ("value", settings.value)):
            if name is not None and name not in columns:
                raise ConfigError(knob, f"{definition.name!r} has no column {name!r}")
        for name in settings.headers.values():
            if name not in (*columns, *EVENT_FIELDS):
                raise ConfigError("headers", f"{definition.name!r} has no column {name!r}")

    def build_block(self, events: Sequence[TableEvent]) -> Block:
        """Return the events as a block; their timestamps are the times when they were due."""
        return block_of(
            [self._build_value(event) for event in events],
            keys=None if self._key is None else [_to_text(event[self._key]) for event in events],
            headers=[self._build_headers(event) for event in events] if self._headers else None,
            timestamps=[event.fire_at // 1_000 for event in events],
            sources=[self._source] * len(events),
        )

    def _build_value(self, event: TableEvent) -> bytes:
        if self._value is None:
            row: dict[str, object] = {}
            for name, value in event.columns.items():
                put_json_value(row, name, value)
            return json.dumps(row, ensure_ascii=False).encode()
        value = event[self._value]
        return bytes(value) if isinstance(value, bytes | memoryview) else _format(value).encode()

    def _build_headers(self, event: TableEvent) -> dict[str, str]:
        texts = {
            name: _to_text(_get_field(event, column)) for name, column in self._headers.items()
        }
        return {name: text for name, text in texts.items() if text is not None}


def _get_field(event: TableEvent, column: str) -> Any:  # noqa: ANN401 - any type of a column
    match column:
        case "event_id":
            return event.id
        case "event_group":
            return event.group
        case "fire_at" | "priority" | "attempts":
            return getattr(event, column)
    return event[column]


def _to_text(value: object) -> str | None:
    return None if value is None else _format(value)


def _format(value: object) -> str:
    """Return a text as it is, and any other value as JSON."""
    content = convert_to_json(value)
    if content is None:
        return ""
    return content if isinstance(content, str) else json.dumps(content)
