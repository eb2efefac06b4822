"""Reading streams: a range of offsets, or a batch under a lease."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
from pyarrow import flight

from turnlane.errors import NoSuchLease, QueueEmpty, TransportDown
from turnlane.events import BASE_SCHEMA, Block, conform
from turnlane.node.flight_commands import Consume, Read
from turnlane.node.flight_errors import translated
from turnlane.node.leases import Lease, Leases
from turnlane.queues.holding import HoldingQueue

READ_EVENTS = 65_536
"""The most events in a block that is read by offset."""
LOOK_SECONDS = 0.5
"""How often a call that waits looks whether anybody still wants its answer."""

Piece = tuple[Block, pa.Buffer]


class Patience:
    """How long a call may wait, in slices short enough to notice that it is in vain."""

    def __init__(self, seconds: float, in_vain: Callable[[], bool]) -> None:
        self._until = time.monotonic() + seconds
        self._in_vain = in_vain

    def slices(self) -> Iterator[float]:
        """Seconds to wait, again and again; at least once. Raises ``TransportDown`` if in vain."""
        while True:
            left = self._until - time.monotonic()
            yield min(LOOK_SECONDS, max(0.0, left))
            if left <= LOOK_SECONDS:
                return
            if self._in_vain():
                raise TransportDown("the node is stopping, or the client is gone")


def schema_of(queue: HoldingQueue) -> pa.Schema:
    """All columns that a queue has seen: the base columns first."""
    with queue.lock:
        seen: dict[str, Any] = dict(queue.types)
    extra = [pa.field(name, kind) for name, kind in seen.items() if name not in BASE_SCHEMA.names]
    return pa.schema([*BASE_SCHEMA, *extra])


def read_stream(queue: HoldingQueue, command: Read) -> flight.FlightDataStream:
    """Blocks of a range, all of one schema."""
    end = queue.end if command.end is None else command.end
    schema = schema_of(queue)
    return _stream(schema, _read(queue, command.first, end, schema))


def _read(queue: HoldingQueue, first: int, end: int, schema: pa.Schema) -> Iterator[Piece]:
    known = set(schema.names)
    with translated():
        while first < end:
            found = queue.read(first, min(READ_EVENTS, end - first))
            if found is None or found[0] >= end:
                return
            first, block = found
            block = block.slice(0, end - first)
            if not known.issuperset(block.schema.names):
                return  # a column has come since; the client asks again, and gets it
            yield conform(block, schema), _json(first=first)
            first += block.num_rows


def consume_stream(
    leases: Leases, queue: HoldingQueue, command: Consume, patience: Patience
) -> flight.FlightDataStream:
    """The blocks of a batch, which is the client's until its lease runs out."""
    lease = _taken(leases, queue, command, patience)
    if lease is None:
        return _stream(BASE_SCHEMA, iter(()))
    blocks = list(lease.batch.blocks)
    schema = pa.unify_schemas([block.schema for block in blocks])
    return _stream(schema, _hand_out(leases, lease, [conform(each, schema) for each in blocks]))


def _taken(
    leases: Leases, queue: HoldingQueue, command: Consume, patience: Patience
) -> Lease | None:
    for wait in patience.slices():
        try:
            return leases.take(queue, command.max_events, wait, command.lease, command.holder)
        except QueueEmpty:
            continue
    return None


def _hand_out(leases: Leases, lease: Lease, blocks: list[Block]) -> Iterator[Piece]:
    first = lease.batch.place.first
    complete = False
    try:
        for block in blocks:
            yield block, _json(lease=lease.id, first=first, attempt=lease.batch.attempt)
            first += block.num_rows
        complete = True
    finally:
        if not complete:  # the client has left in the middle: it does not know all of its batch
            _give_back(leases, lease)


def _give_back(leases: Leases, lease: Lease) -> None:
    try:
        leases.release(lease.id)
    except NoSuchLease:
        return  # it has run out


def _stream(schema: pa.Schema, pieces: Iterator[Piece]) -> flight.FlightDataStream:
    stream: Any = flight.GeneratorStream  # its stubs know of no metadata
    made: flight.FlightDataStream = stream(schema, pieces)
    return made


def _json(**values: object) -> pa.Buffer:
    return pa.py_buffer(json.dumps(values).encode())
