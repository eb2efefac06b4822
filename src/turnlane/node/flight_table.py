"""Receiving over Flight: events one way, acks the other, on one stream.

One thread reads what the client settles; another, the *sender*, waits for events and writes them.
The stream's end, however it comes, is the receiver's end: what it did not settle fires elsewhere.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pyarrow as pa
from pyarrow import flight

from turnlane.errors import LeadLost, QueueClosed
from turnlane.events import Block
from turnlane.node.flight_commands import Receive, Settle, parsed
from turnlane.node.table_stream import TableStream
from turnlane.node.tables import Tables
from turnlane.table.keyspace import KeyRange

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.5
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
                for first, block in self._stream.take(LOOK_SECONDS):
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
