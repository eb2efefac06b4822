"""Input ``table``: the events of a queue table, when they fire, into a queue of the node.

An event is acked in the table once the node's queue has it as safely as ``ack`` says. Who dies in
between has it fired again: delivery is at least once, and a header says which event it is.
"""

from __future__ import annotations

import json
import logging
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
from turnlane.queues.api import FlowControl
from turnlane.runtime import start_thread
from turnlane.storage.export import convert_to_json, put_json_value
from turnlane.table import KeyRange, Receiver, TableEvent, TableQueue, connect
from turnlane.table.definition import Definition
from turnlane.table.shard_directory import TableAddress
from turnlane.table.sharded import ShardedQueue, connect_shards

log = logging.getLogger(__name__)

LOOK: Final = 0.1
"""Seconds to wait for events, or for room, before checking whether the input has to stop."""
PATIENCE: Final = 5.0
"""Seconds that events are held for room that others took; then they fire again."""
PAUSE: Final = 1.0
"""Seconds to leave a database alone that failed."""
GRACE: Final = 15.0
"""Seconds more than it is given that a stop waits for a database, whose calls cannot be cut off."""
OWN: Final = ("event_id", "fire_at", "priority", "attempts", "event_group")
"""What a header may be made of, beside the user's columns."""


class TableInputSettings(InputSettings, TableAddress):
    """The settings of a table input."""

    type: Literal["table"] = "table"
    flow: FlowControl = Field(
        FlowControl.FULL, description="How it yields before the queue is full."
    )
    key_range: str = Field("-", description="Only events whose keys lie there, such as `-80`.")
    key: str | None = Field(
        None, description="The column that is the events' key; default: that of `SHARD BY`."
    )
    value: str | None = Field(
        None, description="The column that is their value; default: the whole row, as JSON."
    )
    headers: dict[str, str] = Field(
        default_factory=lambda: {"event_id": "event_id"},
        description="Headers, each with the column that it comes from: yours, `event_id`, "
        "`fire_at`, `priority`, `attempts` or `event_group`.",
    )
    batch: int = Field(1_000, ge=1, description="The most events published at a time.")

    @field_validator("key_range")
    @classmethod
    def _is_range(cls, text: str) -> str:
        KeyRange.parse(text)
        return text


class TableInput(Input):
    """Runs a manager for every shard, as one of perhaps many: one of all leads each."""

    settings_type: ClassVar[type[InputSettings]] = TableInputSettings
    settings: TableInputSettings

    def __init__(self, settings: TableInputSettings, host: Host) -> None:
        super().__init__(settings, host)
        self._stopping = threading.Event()
        self._until = float("inf")
        """The deadline for acks after the input is stopped; monotonic."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; a database that is away, or has no such table yet, is tried again."""
        settings = self.settings
        self._queue = self.host.queue(settings.queue)
        self._producer = self._queue.producer(ack=settings.ack, flow=settings.flow)
        name = f"turnlane-{settings.label}"
        self._thread = start_thread(name, self._run)

    def stop(self, timeout: float) -> None:
        self._until = time.monotonic() + timeout
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout + GRACE)
            if thread.is_alive():
                log.error("input %s: its database hangs; left behind", self.settings.label)

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with ExitStack() as opened:
                    self._serve(self._opened(opened))
            except QueueClosed as error:
                log.info("input %s ends: %s", self.settings.label, error)
                return
            except TurnlaneError as error:
                log.warning("input %s tries again: %s", self.settings.label, error)
            except Exception:
                log.exception("input %s tries again", self.settings.label)
            self._stopping.wait(PAUSE)

    def _opened(self, opened: ExitStack) -> TableQueue | ShardedQueue:
        shards = self.settings.list_databases()
        table: TableQueue | ShardedQueue
        if len(shards) > 1:
            table = opened.enter_context(connect_shards(shards)).queue(self.settings.table)
        else:
            table = opened.enter_context(connect(shards[0].url)).queue(self.settings.table)
        self._maker = EventMaker(self.settings, table.definition)
        return table

    def _serve(self, table: TableQueue | ShardedQueue) -> None:
        """Take events while there is room. An event that is not taken has no attempt counted."""
        while not self._stopping.is_set():
            room = min(self._room(), self.settings.batch)
            if room:
                with table.receive(self.settings.key_range, prefetch=room) as receiver:
                    self._pass_on(receiver)
            else:
                self._stopping.wait(LOOK)

    def _room(self) -> int:
        return self._queue.room

    def _pass_on(self, receiver: Receiver) -> None:
        """Publish and ack until the queue is full, or the input has to stop."""
        acked = False
        while not self._stopping.is_set() and (room := self._room()):
            try:
                events = receiver.take(min(room, receiver.prefetch), timeout=LOOK)
            except QueueClosed:
                return  # its managers are gone: others may be there
            acked |= bool(events)
            if events and not self._publish(receiver, events):
                break
        if acked:
            self._flush(receiver)

    def _flush(self, receiver: Receiver) -> None:
        try:
            receiver.flush(max(0.0, min(PATIENCE, self._until - time.monotonic())))
        except LeadLost as error:
            log.warning("input %s: %s", self.settings.label, error)

    def _publish(self, receiver: Receiver, events: Sequence[TableEvent]) -> bool:
        """Publish events and ack the safe ones; false if there was no room for all."""
        try:
            block = self._maker.block(events)
            published = self._producer.publish_block(block, timeout=PATIENCE)
        except EventTooLarge as error:
            return self._without_the_large(receiver, events, error)
        except QueueFull as error:
            if not error.pending or self._persisted():
                self._ack(receiver, events[: error.accepted])
            return False
        except AckPending:
            # They are in the queue; only the disk is missing.
            if not self._persisted():
                return False
            self._ack(receiver, events)
            return True
        self.count(bytes=int(block.nbytes))
        self._ack(receiver, events, published.accepted)
        return True

    def _without_the_large(
        self, receiver: Receiver, events: Sequence[TableEvent], error: EventTooLarge
    ) -> bool:
        if len(events) == 1:
            events[0].nack(error=str(error))  # until it is a dead letter there
            self.count(invalid=1)
            return True
        half = len(events) // 2
        parts = (events[:half], events[half:])
        return all(self._publish(receiver, part) for part in parts)

    def _persisted(self) -> bool:
        while time.monotonic() < self._until:
            if self._producer.flush(LOOK):
                return True
        return False

    def _ack(
        self, receiver: Receiver, events: Sequence[TableEvent], accepted: int | None = None
    ) -> None:
        receiver.ack(events)
        self.count(events=len(events) if accepted is None else accepted)


class EventMaker:
    """Makes the node's events of rows. Raises ``ConfigError`` for a column that is not there."""

    def __init__(self, settings: TableInputSettings, definition: Definition) -> None:
        self._key = settings.key or definition.shard_by
        self._value = settings.value
        self._headers = settings.headers
        self._source = definition.name
        yours = definition.column_names
        for knob, name in (("key", settings.key), ("value", settings.value)):
            if name is not None and name not in yours:
                raise ConfigError(knob, f"{definition.name!r} has no column {name!r}")
        for name in settings.headers.values():
            if name not in (*yours, *OWN):
                raise ConfigError("headers", f"{definition.name!r} has no column {name!r}")

    def block(self, events: Sequence[TableEvent]) -> Block:
        """The events; their time is when they were due."""
        return block_of(
            [self._bytes(event) for event in events],
            keys=None if self._key is None else [_text(event[self._key]) for event in events],
            headers=[self._header(event) for event in events] if self._headers else None,
            timestamps=[event.fire_at // 1_000 for event in events],
            sources=[self._source] * len(events),
        )

    def _bytes(self, event: TableEvent) -> bytes:
        if self._value is None:
            row: dict[str, object] = {}
            for name, value in event.columns.items():
                put_json_value(row, name, value)
            return json.dumps(row, ensure_ascii=False).encode()
        found = event[self._value]
        return bytes(found) if isinstance(found, bytes | memoryview) else _written(found).encode()

    def _header(self, event: TableEvent) -> dict[str, str]:
        found = {name: _text(_own(event, column)) for name, column in self._headers.items()}
        return {name: text for name, text in found.items() if text is not None}


def _own(event: TableEvent, column: str) -> Any:  # noqa: ANN401 - whatever the column holds
    match column:
        case "event_id":
            return event.id
        case "event_group":
            return event.group
        case "fire_at" | "priority" | "attempts":
            return getattr(event, column)
    return event[column]


def _text(value: object) -> str | None:
    return None if value is None else _written(value)


def _written(value: object) -> str:
    """A value as text: itself, or as JSON has it."""
    found = convert_to_json(value)
    if found is None:
        return ""
    return found if isinstance(found, str) else json.dumps(found)
