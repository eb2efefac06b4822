"""Reading streams: a range of offsets, a batch under a lease, or the events of a queue table.

A client receives the events of a table and sends acks on the same stream. One thread reads the
acks; another, the *sender*, waits for events and sends them. When the stream ends, for any reason,
the receiver is closed, and its unsettled events fire again for others.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

import pyarrow as pa
from pyarrow import flight

from turnlane.delivery.settings import PRIORITY
from turnlane.errors import LeadLost, NoSuchLease, QueueClosed, QueueEmpty, TransportDown
from turnlane.events import BASE_SCHEMA, Block, conform_block, join_consecutive
from turnlane.formats.syslog import parse_priorities
from turnlane.logs import get_logger
from turnlane.node.event_refs import READ_EVENTS, read_range, read_unsettled
from turnlane.node.flight.messages import (
    Chunks,
    ConsumeCommand,
    ReadCommand,
    ReceiveCommand,
    SettleCommand,
    parse_command,
    translate_errors,
)
from turnlane.node.leases import Leases
from turnlane.node.tables import Tables, TableStream
from turnlane.queues.buffered import BufferedQueue
from turnlane.runtime import start_thread
from turnlane.table.shards import KeyRange

log = get_logger(__name__)

POLL_SECONDS = 0.5
"""How often a call that waits checks whether its client still wants the answer."""

FLUSH_SECONDS: Final = 300.0
"""How long a flush may take, for example while the database is down."""

Blocks = Iterator[tuple[int, Block]]
"""Blocks with their first offsets."""
BlockWithMetadata = tuple[Block, pa.Buffer]


class AbortableWait:
    """The time that a call may wait, in slices short enough to notice that its client left."""

    def __init__(self, seconds: float, is_abandoned: Callable[[], bool]) -> None:
        self._until = time.monotonic() + seconds
        self._is_abandoned = is_abandoned

    def slices(self) -> Iterator[float]:
        """Yield the seconds to wait next, at least once. Raises like :meth:`check`."""
        while True:
            left = self._until - time.monotonic()
            yield min(POLL_SECONDS, max(0.0, left))
            if left <= POLL_SECONDS:
                return
            self.check()

    def check(self) -> None:
        """Raise ``TransportDown`` if the client has left or the node is stopping."""
        if self._is_abandoned():
            raise TransportDown("the node is stopping, or the client has left")


def get_queue_schema(queue: BufferedQueue) -> pa.Schema:
    """Return all columns that a queue has had: the base columns first."""
    seen = queue.columns()
    extra = [pa.field(name, kind) for name, kind in seen.items() if name not in BASE_SCHEMA.names]
    return pa.schema([*BASE_SCHEMA, *extra])


def read_stream(
    queue: BufferedQueue, command: ReadCommand, call: ExitStack
) -> flight.FlightDataStream:
    """Return the stream of a range, with one schema. The call ends with the stream."""
    end = queue.end if command.end is None else command.end
    schema = get_queue_schema(queue)
    read = read_range if command.settled else read_unsettled
    blocks = read(queue, command.first, end)
    if command.columns is None:
        return _build_stream(schema, _read_all_columns(blocks, schema), call)
    chosen = _select_columns(schema, command.columns)
    return _build_stream(chosen, _read_some_columns(blocks, chosen), call)


def _read_all_columns(blocks: Blocks, schema: pa.Schema) -> Iterator[BlockWithMetadata]:
    known = set(schema.names)
    with translate_errors():
        for first, block in blocks:
            if not known.issuperset(block.schema.names):
                return  # the queue has a new column; the client asks again and gets it
            yield conform_block(block, schema), _encode_metadata(first=first)


def _read_some_columns(blocks: Blocks, schema: pa.Schema) -> Iterator[BlockWithMetadata]:
    """Yield some of the columns. Such blocks are small, so several are joined."""
    some = ((first, _project_block(block, schema)) for first, block in blocks)
    with translate_errors():
        for first, block in join_consecutive(some, READ_EVENTS):
            yield block, _encode_metadata(first=first)


def _select_columns(schema: pa.Schema, names: list[str]) -> pa.Schema:
    known = {field.name: field for field in schema} | {PRIORITY: pa.field(PRIORITY, pa.int16())}
    chosen = [known[name] for name in names if name in known]
    # A block without columns has no rows, so the client would not see its events.
    return pa.schema(chosen or [known["severity"]])


def _project_block(block: Block, schema: pa.Schema) -> Block:
    names = set(block.schema.names)
    arrays: list[pa.Array[Any]] = []
    for field in schema:
        if field.name == PRIORITY:
            values: Any = block.column("value")
            arrays.append(parse_priorities(values))
        elif field.name in names:
            arrays.append(block.column(field.name))
        else:
            arrays.append(pa.nulls(block.num_rows, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def consume_stream(
    leases: Leases,
    queue: BufferedQueue,
    command: ConsumeCommand,
    wait: AbortableWait,
    call: ExitStack,
) -> flight.FlightDataStream:
    """Return the stream of a batch, which the client holds until its lease expires.

    The call ends with the stream. If the client did not get all blocks, the lease ends too.
    """
    for seconds in wait.slices():
        with contextlib.suppress(QueueEmpty):
            lease = leases.take(queue, command.max_events, seconds, command.lease, command.holder)
            break
    else:
        return _build_stream(BASE_SCHEMA, iter(()), call)
    is_complete = False

    def release_unless_complete() -> None:
        if not is_complete:
            with contextlib.suppress(NoSuchLease):  # it has expired
                leases.release(lease.id)

    def read_blocks(blocks: list[Block]) -> Iterator[BlockWithMetadata]:
        nonlocal is_complete
        first = lease.batch.place.first
        for block in blocks:
            yield block, _encode_metadata(lease=lease.id, first=first, attempt=lease.batch.attempt)
            first += block.num_rows
        is_complete = True

    call.callback(release_unless_complete)
    wait.check()  # the client may have left during the wait
    blocks = list(lease.batch.blocks)
    schema = pa.unify_schemas([block.schema for block in blocks])
    return _build_stream(
        schema, read_blocks([conform_block(each, schema) for each in blocks]), call
    )


def _build_stream(
    schema: pa.Schema, pieces: Iterator[BlockWithMetadata], call: ExitStack
) -> flight.FlightDataStream:
    begun = _keep_call_open(call, pieces)
    # Start the generator: Flight may never ask for a block, and only a started generator ends the
    # call when Flight closes it.
    next(begun)
    stream: Any = flight.GeneratorStream  # the stubs lack the metadata
    made: flight.FlightDataStream = stream(schema, begun)
    return made


def _keep_call_open(
    call: ExitStack, pieces: Iterator[BlockWithMetadata]
) -> Iterator[BlockWithMetadata | None]:
    """Yield ``None``, then the blocks; end the call after the last one or when closed."""
    with call.pop_all():
        yield None
        yield from pieces


def _encode_metadata(**values: object) -> pa.Buffer:
    return pa.py_buffer(json.dumps(values).encode())


# ── queue tables ─────────────────────────────────────────────────────────────────────────────────


class ReceiveStream:
    """One client that receives from one table; ``run()`` serves it until it leaves."""

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
        """Serve the client until it leaves. Raises errors of its messages."""
        self._writer.begin(self._stream.schema)
        self._send_message(stream=self._stream.id)
        sender = start_thread("turnlane-sender", self._send_all)
        try:
            for _, metadata in self._chunks:
                self._settle(parse_command(SettleCommand, metadata))
        finally:
            self._over.set()
            sender.join()

    def _settle(self, command: SettleCommand) -> None:
        self._stream.ack(command.ack)
        self._stream.nack(command.nack, command.delay, command.error)
        if command.flush is None:
            return
        try:
            stored = self._stream.flush(FLUSH_SECONDS)
        except (LeadLost, QueueClosed):
            stored = False
        self._send_message(flushed=command.flush, stored=stored)

    def _send_all(self) -> None:
        try:
            while not self._over.is_set():
                if self._is_stopping():
                    self._send_message(ended="the node is stopping, or the token has expired")
                    return
                for first, block in self._stream.take(POLL_SECONDS):
                    with self._writing:
                        self._writer.write_with_metadata(block, _encode_metadata(first=first))
        except QueueClosed:
            self._send_message(ended="the node does not serve the table any more")
        except pa.ArrowException as error:
            log.debug("flight.receiver_left", table=self._stream.table, error=error)
        except Exception:
            log.exception("flight.send_failed", table=self._stream.table)
            self._send_message(ended="the node failed; its log says why")

    def _send_message(self, **message: object) -> None:
        with self._writing:
            self._writer.write_metadata(_encode_metadata(**message))


def serve_receiver(
    tables: Tables,
    command: ReceiveCommand,
    chunks: Chunks,
    writer: flight.MetadataRecordBatchWriter,
    is_stopping: Callable[[], bool],
) -> None:
    """Serve a client that receives events of a table."""
    key_range = KeyRange.parse(command.key_range)
    with tables.stream(command.receive, key_range, command.prefetch) as stream:
        ReceiveStream(stream, chunks, writer, is_stopping).run()
