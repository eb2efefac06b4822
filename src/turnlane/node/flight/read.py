"""Reading streams: a range of offsets, or a batch under a lease."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

import pyarrow as pa
from pyarrow import flight

from turnlane.delivery.settings import PRIORITY
from turnlane.errors import LeadLost, NoSuchLease, QueueClosed, QueueEmpty, TransportDown
from turnlane.events import BASE_SCHEMA, Block, conform, gathered
from turnlane.formats.syslog import priorities
from turnlane.node.event_refs import READ_EVENTS, read
from turnlane.node.flight.commands import Consume, Read, Receive, Settle, parsed
from turnlane.node.flight.errors import translated
from turnlane.node.leases import Lease, Leases
from turnlane.node.tables import Tables, TableStream
from turnlane.queues.buffered import BufferedQueue
from turnlane.table.shards import KeyRange

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
            self.check()

    def check(self) -> None:
        """Raise ``TransportDown`` if nobody wants the answer any more."""
        if self._in_vain():
            raise TransportDown("the node is stopping, or the client is gone")


def schema_of(queue: BufferedQueue) -> pa.Schema:
    """All columns that a queue has seen: the base columns first."""
    seen = queue.columns()
    extra = [pa.field(name, kind) for name, kind in seen.items() if name not in BASE_SCHEMA.names]
    return pa.schema([*BASE_SCHEMA, *extra])


def read_stream(queue: BufferedQueue, command: Read, call: ExitStack) -> flight.FlightDataStream:
    """Blocks of a range, all of one schema. The call ends with the stream."""
    end = queue.end if command.end is None else command.end
    schema = schema_of(queue)
    blocks = read(queue, command.first, end)
    if command.columns is None:
        return _stream(schema, _whole(blocks, schema), call)
    chosen = _chosen(schema, command.columns)
    return _stream(chosen, _pieces(blocks, chosen), call)


def _whole(blocks: Iterator[tuple[int, Block]], schema: pa.Schema) -> Iterator[Piece]:
    known = set(schema.names)
    with translated():
        for first, block in blocks:
            if not known.issuperset(block.schema.names):
                return  # a column has come since; the client asks again, and gets it
            yield conform(block, schema), _json(first=first)


def _pieces(blocks: Iterator[tuple[int, Block]], schema: pa.Schema) -> Iterator[Piece]:
    """Only some columns: small, so that many blocks are sent as one."""
    some = ((first, _cut_down(block, schema)) for first, block in blocks)
    with translated():
        for first, block in gathered(some, READ_EVENTS):
            yield block, _json(first=first)


def _chosen(schema: pa.Schema, names: list[str]) -> pa.Schema:
    known = {field.name: field for field in schema} | {PRIORITY: pa.field(PRIORITY, pa.int16())}
    chosen = [known[name] for name in names if name in known]
    # A block without columns would have no rows either, and nobody would know of its events.
    return pa.schema(chosen or [known["severity"]])


def _cut_down(block: Block, schema: pa.Schema) -> Block:
    names = set(block.schema.names)
    arrays: list[pa.Array[Any]] = []
    for field in schema:
        if field.name == PRIORITY:
            values: Any = block.column("value")
            arrays.append(priorities(values))
        elif field.name in names:
            arrays.append(block.column(field.name))
        else:
            arrays.append(pa.nulls(block.num_rows, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def consume_stream(
    leases: Leases, queue: BufferedQueue, command: Consume, patience: Patience, call: ExitStack
) -> flight.FlightDataStream:
    """The blocks of a batch, which is the client's until its lease runs out.

    The call ends with the stream, and with it the lease of a client that has not got all of it.
    """
    lease = _taken(leases, queue, command, patience)
    if lease is None:
        return _stream(BASE_SCHEMA, iter(()), call)
    handing = _HandingOut(leases, lease)
    call.callback(handing.end)
    patience.check()  # it may have left while it waited
    blocks = list(lease.batch.blocks)
    schema = pa.unify_schemas([block.schema for block in blocks])
    return _stream(schema, handing.pieces([conform(each, schema) for each in blocks]), call)


def _taken(
    leases: Leases, queue: BufferedQueue, command: Consume, patience: Patience
) -> Lease | None:
    for wait in patience.slices():
        try:
            return leases.take(queue, command.max_events, wait, command.lease, command.holder)
        except QueueEmpty:
            continue
    return None


class _HandingOut:
    """A batch on its way to a client."""

    def __init__(self, leases: Leases, lease: Lease) -> None:
        self._leases = leases
        self._lease = lease
        self._complete = False

    def pieces(self, blocks: list[Block]) -> Iterator[Piece]:
        """Its blocks, with what the client has to know of them."""
        lease, first = self._lease, self._lease.batch.place.first
        for block in blocks:
            yield block, _json(lease=lease.id, first=first, attempt=lease.batch.attempt)
            first += block.num_rows
        self._complete = True

    def end(self) -> None:
        """Give the batch back if the client has left before it knew all of it."""
        if not self._complete:
            with contextlib.suppress(NoSuchLease):  # it has run out
                self._leases.release(self._lease.id)


def _stream(schema: pa.Schema, pieces: Iterator[Piece], call: ExitStack) -> flight.FlightDataStream:
    begun = _within(call, pieces)
    next(begun)  # so that Flight, which may never ask for a piece, ends the call when it lets go
    stream: Any = flight.GeneratorStream  # its stubs know of no metadata
    made: flight.FlightDataStream = stream(schema, begun)
    return made


def _within(call: ExitStack, pieces: Iterator[Piece]) -> Iterator[Piece | None]:
    """Nothing, and then the pieces; the call is over when they are, or nobody wants them."""
    with call.pop_all():
        yield None
        yield from pieces


def _json(**values: object) -> pa.Buffer:
    return pa.py_buffer(json.dumps(values).encode())


# ── flight_table ──
# Receiving over Flight: events one way, acks the other, on one stream.
#
# One thread reads what the client settles; another, the *sender*, waits for events and writes
# them.
# The stream's end, however it comes, is the receiver's end: what it did not settle fires
# elsewhere.

log = logging.getLogger(__name__)

FLIGHT_TABLE_LOOK_SECONDS: Final = 0.5
"""How often the sender looks whether it is over while no event comes."""

FLUSH_SECONDS: Final = 300.0
"""How long a flush may take, such as while the database is away."""

Chunks = Iterator[tuple[Block | None, pa.Buffer | None]]


class ReceiveStream:
    """One client's receiving from one table. ``run()`` is its whole life."""

    def __init__(
        self,
        stream: TableStream,
        chunks: Chunks,
        writer: flight.MetadataRecordBatchWriter,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._stream = stream
        self._chunks = chunks
        self._writer = writer
        self._is_stopping = is_stopping
        self._writing = threading.Lock()
        self._over = threading.Event()

    def run(self) -> None:
        """Serve the client until it leaves. Raises what it sent wrongly."""
        self._writer.begin(self._stream.schema)
        self._tell(stream=self._stream.id)
        sender = threading.Thread(target=self._send_all, name="turnlane-sender", daemon=True)
        sender.start()
        try:
            for _, metadata in self._chunks:
                self._settle(parsed(Settle, metadata))
        finally:
            self._over.set()
            sender.join()

    def _settle(self, command: Settle) -> None:
        self._stream.ack(command.ack)
        self._stream.nack(command.nack, command.delay, command.error)
        if command.flush is None:
            return
        try:
            stored = self._stream.flush(FLUSH_SECONDS)
        except (LeadLost, QueueClosed):
            stored = False
        self._tell(flushed=command.flush, stored=stored)

    def _send_all(self) -> None:
        try:
            while not self._over.is_set():
                if self._is_stopping():
                    self._tell(ended="the node is stopping, or the token has expired")
                    return
                for first, block in self._stream.take(FLIGHT_TABLE_LOOK_SECONDS):
                    self._send(first, block)
        except QueueClosed:
            self._tell(ended="the table is served no more")
        except pa.ArrowException as error:
            log.debug("a receiver of %s is gone: %s", self._stream.table, error)
        except Exception:
            log.exception("sending events of %s failed", self._stream.table)
            self._tell(ended="the node failed; its log says why")

    def _send(self, first: int, block: Block) -> None:
        metadata = pa.py_buffer(json.dumps({"first": first}).encode())
        with self._writing:
            self._writer.write_with_metadata(block, metadata)

    def _tell(self, **words: Any) -> None:
        with self._writing:
            self._writer.write_metadata(pa.py_buffer(json.dumps(words).encode()))


def receive(
    tables: Tables,
    command: Receive,
    chunks: Chunks,
    writer: flight.MetadataRecordBatchWriter,
    is_stopping: Callable[[], bool],
) -> None:
    """Serve a receiver."""
    key_range = KeyRange.parse(command.key_range)
    with tables.stream(command.receive, key_range, command.prefetch) as stream:
        ReceiveStream(stream, chunks, writer, is_stopping).run()
