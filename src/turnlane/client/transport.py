"""The transport of a proxy queue: one queue of a node over Flight, as ``docs/protocol.md`` says.

Publishing uses a stream of one Flight call. A thread reads the progress that the node reports on
the same stream. A stream has one schema; for a block with new columns another stream is opened.

Batches that the client takes are leased. One thread extends the leases while the batches are held.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from turnlane.client.address import raise_node_errors
from turnlane.client.node_client import RemoteNode, parse_metadata, split_block
from turnlane.errors import (
    BatchFreed,
    ConfigError,
    NoSuchLease,
    QueueClosed,
    QueueEmpty,
    TransportDown,
    TurnlaneError,
)
from turnlane.events import Block, conform_block, join_blocks
from turnlane.logs import get_logger
from turnlane.queues.api import Batch, Durability, NodeProgress, Place
from turnlane.runtime import PeriodicThread, start_thread

GREETING_SECONDS: Final = 10.0
"""How long a node may take to open a stream."""
GRACE_SECONDS: Final = 10.0
"""How long a node may take for a batch, in addition to the requested wait."""


EXTEND_SECONDS = 5.0
"""How long a node may take to extend a lease. Short, because other leases wait."""

log = get_logger(__name__)


class FlightTransport:
    """Publishes to a queue of a node, and takes batches from it."""

    def __init__(
        self, node: RemoteNode, queue: str, *, lease: float, holder: str, keeper: LeaseKeeper
    ) -> None:
        self.queue = queue
        self._node = node
        self._lease = lease
        self._holder = holder
        self._keeper = keeper

    def connect(self, producer_id: str) -> FlightConnection:
        """Open a stream for a producer. Raises the errors of the node."""
        return FlightConnection(self._node, self.queue, producer_id)

    def get(self, max_events: int | None, timeout: float) -> LeasedBatch:
        """Take a batch from the node's queue. Raises ``QueueEmpty`` if there is none in time."""
        command = {
            "consume": self.queue,
            "max_events": max_events,
            "wait": timeout,
            "lease": self._lease,
            "holder": self._holder,
        }
        with raise_node_errors(self._node.place), _convert_queue_closed(self._node.place):
            reader = self._node.get(command, timeout + GRACE_SECONDS)
            chunks = list(reader)
        if not chunks:
            raise QueueEmpty(f"queue {self.queue!r} had nothing to read in the time allowed")
        about = parse_metadata(chunks[0].app_metadata)
        return self._build_batch(about, [chunk.data for chunk in chunks if chunk.data is not None])

    def _build_batch(self, about: dict[str, Any], blocks: list[Block]) -> LeasedBatch:
        end = about["first"] + sum(block.num_rows for block in blocks)
        place = Place(about["first"], end, about["attempt"])
        batch = LeasedBatch(self._node, self._keeper, about["lease"], place, blocks)
        self._keeper.add(batch)
        return batch


class FlightConnection:
    """A connection that publishes to a queue, as a series of streams."""

    def __init__(self, node: RemoteNode, queue: str, producer_id: str) -> None:
        self._node = node
        self._command = {"publish": queue, "producer": producer_id, "ack": "accepted"}
        self._changed = threading.Condition()
        self._progress: NodeProgress | None = None
        self._told: NodeProgress | None = None
        self._failure: Exception | None = None
        self._closed = False
        self._schema: pa.Schema | None = None
        self._stream = self._opened()
        first = self._stream.greeting
        self.resume_at: int = first["resume_at"]
        self.durability = Durability(first["durability"])

    def send(self, sequence: int, block: Block) -> None:
        """Send a block whose first event has this sequence number."""
        self._fit(block.schema)
        assert self._schema is not None
        for piece in split_block(conform_block(block, self._schema)):
            self._check()
            metadata = pa.py_buffer(json.dumps({"sequence": sequence}).encode())
            self._stream.write(piece, metadata)
            sequence += piece.num_rows

    def urge(self) -> None:
        """Ask the node to persist all sent events soon."""
        if self._schema is not None:
            self._check()
            self._stream.write(None, pa.py_buffer(b'{"urge": true}'))

    def progress(self, timeout: float) -> NodeProgress | None:
        """Wait for new progress; ``None`` if there is none in time."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._progress != self._told or self._failure or self._closed, timeout
            )
            if self._progress != self._told and not self._closed:
                self._told = self._progress
                return self._told
        self._check()
        return None

    def close(self) -> None:
        """Close the connection; waiting calls raise ``TransportDown``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            stream = self._stream
        stream.cancel()

    def _check(self) -> None:
        if self._closed:
            raise TransportDown("the connection was closed")
        if self._failure is not None:
            raise self._failure

    def _fit(self, schema: pa.Schema) -> None:
        """Open a stream with all these columns, unless the present stream has them."""
        known = self._schema
        if known is None:
            self._begin(schema)
        elif schema is not known and not set(schema.names) <= set(known.names):
            # After the end of the stream all sent events are in the queue: the order is kept.
            self._stream.finish()
            self._check()
            stream = self._opened()
            with self._changed:
                before, self._stream = self._stream.greeting, stream
                closed = self._closed
            if closed:
                stream.cancel()
            self._check()
            if stream.greeting["instance"] != before["instance"]:
                # It may have lost events of the previous stream, which have to be sent again.
                raise TransportDown(f"{self._node.place} was restarted")
            self._begin(pa.unify_schemas([known, schema]))

    def _begin(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._stream.begin(schema)

    def _opened(self) -> _PublishCall:
        return _PublishCall(self._node, self._command, self)

    # ── called by the stream's thread ────────────────────────────────────────────────────────────

    def on_progress(self, news: dict[str, Any]) -> None:
        """Take the progress that the node reports."""
        progress = NodeProgress(news["accepted"], news["persisted"], news["delivered"])
        with self._changed:
            self._progress = progress
            self._changed.notify_all()

    def on_failure(self, error: Exception) -> None:
        """Take the error that has ended the stream."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()


class _PublishCall:
    """One Flight call, and the thread that reads its answers."""

    def __init__(self, node: RemoteNode, command: dict[str, str], owner: FlightConnection) -> None:
        self.greeting: dict[str, Any] = {}
        self._place = node.place
        self._owner = owner
        self._finishing = False
        self._greeted = threading.Event()
        self._over = threading.Event()
        self._writing = threading.Lock()
        self._error: Exception | None = None
        with raise_node_errors(self._place):
            self._writer, self._reader = node.exchange(command)
        self._listener = start_thread(f"turnlane-stream-{node.place}", self._listen)
        if not self._greeted.wait(GREETING_SECONDS):
            self.cancel()
            raise TransportDown(f"{self._place} did not answer in {GREETING_SECONDS:g} s")
        if self._error is not None and not self.greeting:
            self.cancel()
            raise self._error

    def begin(self, schema: pa.Schema) -> None:
        """Send the schema of the blocks."""
        with self._failing(), self._writing:
            self._writer.begin(schema)

    def write(self, block: Block | None, metadata: pa.Buffer) -> None:
        """Send a block, or only metadata. Waits while the node does not read."""
        with self._failing(), self._writing:
            if block is None:
                self._writer.write_metadata(metadata)
            else:
                self._writer.write_with_metadata(block, metadata)

    def finish(self) -> None:
        """End the data, and wait until the node has taken everything."""
        self._finishing = True
        with self._failing(), self._writing:
            self._writer.done_writing()
        self._over.wait()

    def cancel(self) -> None:
        """End the call at once; the node drops blocks that it has not taken."""
        self._reader.cancel()
        if threading.current_thread() is not self._listener:
            self._listener.join(GRACE_SECONDS)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            with _convert_queue_closed(self._place), raise_node_errors(self._place):
                yield
        except ValueError as error:  # invalid for the node: a retry cannot succeed
            raise ConfigError("publish", str(error)) from None

    def _listen(self) -> None:
        try:
            with self._failing():
                self._hear_all()
            if not self._finishing:
                raise TransportDown(f"{self._place} has ended the stream")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001 - the next use of the connection raises it
            self._error = error
            self._owner.on_failure(error)
        finally:
            self._over.set()
            self._greeted.set()
            self._reader.cancel()
            with self._writing, contextlib.suppress(pa.ArrowException):  # reported above
                self._writer.close()

    def _hear_all(self) -> None:
        for chunk in self._reader:
            news = parse_metadata(chunk.app_metadata)
            if "ended" in news:
                raise TransportDown(f"{self._place}: {news['ended']}")
            if "instance" in news:
                self.greeting = news
                self._greeted.set()
            else:
                self._owner.on_progress(news)


@contextlib.contextmanager
def _convert_queue_closed(place: str) -> Iterator[None]:
    """Convert ``QueueClosed``: the node is stopping and will start again."""
    try:
        yield
    except QueueClosed as error:
        raise TransportDown(f"{place}: {error}") from None


# ── leased batches ───────────────────────────────────────────────────────────────────────────────


class LeasedBatch(Batch):
    """A batch of a node. If its lease expires, another consumer gets its events."""

    def __init__(
        self, node: RemoteNode, keeper: LeaseKeeper, lease: str, place: Place, blocks: list[Block]
    ) -> None:
        self.place = place
        self.lease = lease
        self._node = node
        self._keeper = keeper
        self._blocks: list[Block] | None = blocks
        self._settled = False
        self._in_doubt = False
        self._lock = threading.Lock()

    @property
    def block(self) -> Block:
        blocks = self._contents()
        if len(blocks) > 1:
            self._blocks = blocks = [join_blocks(blocks)]
        return conform_block(blocks[0])

    @property
    def blocks(self) -> Sequence[Block]:
        return [conform_block(block) for block in self._contents()]

    def _contents(self) -> list[Block]:
        if self._blocks is None:
            raise BatchFreed(f"batch {self.place.first} was freed; its contents are gone")
        return self._blocks

    def free(self) -> None:
        self._blocks = None

    def done(self) -> None:
        self._settle("done")

    def dead(self) -> None:
        self._settle("dead")

    def release(self) -> None:
        if self._blocks is None and not self._settled:
            raise BatchFreed(f"batch {self.place.first} was freed and cannot be released")
        self._settle("release")

    def _settle(self, verb: str) -> None:
        """Settle the batch on the node. After ``TransportDown`` call it again."""
        with self._lock:
            if self._settled:
                return
            try:
                self._node.act(verb, lease=self.lease)
            except TransportDown:
                self._in_doubt = True
                raise
            except NoSuchLease:
                # The node may have received the call whose answer was lost. If the lease has
                # expired instead, another consumer gets the events: they are not lost.
                if not self._in_doubt:
                    self._forget()
                    raise
            self._forget()

    def _forget(self) -> None:
        self._settled = True
        self._keeper.remove(self)

    def give_back(self) -> None:
        """Release the batch, freed or not. After an error its lease expires."""
        try:
            self._settle("release")
        except TurnlaneError as error:
            log.info("lease.release_failed", error=error, hint="the lease will expire")

    def extend(self) -> None:
        """Extend the lease. Errors are only logged."""
        try:
            self._node.act("extend", timeout=EXTEND_SECONDS, body={"lease": self.lease})
        except NoSuchLease:
            if not self._settled:
                log.warning(
                    "lease.expired", events=len(self), hint="another consumer gets the events"
                )
            self._keeper.remove(self)
        except TurnlaneError as error:
            log.info("lease.extend_failed", error=error, hint="tried again")


class LeaseKeeper:
    """Extends the leases of all batches that this process still holds, on one thread."""

    def __init__(self, lease: float) -> None:
        self._every = lease / 3
        self._held: weakref.WeakSet[LeasedBatch] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: PeriodicThread | None = None

    def add(self, batch: LeasedBatch) -> None:
        """Extend the lease of a batch until it is settled or garbage."""
        with self._lock:
            self._held.add(batch)
            if self._thread is None:
                self._thread = PeriodicThread("turnlane-leases", self._extend_all, self._every)

    def remove(self, batch: LeasedBatch) -> None:
        """Stop extending the lease of a batch."""
        with self._lock:
            self._held.discard(batch)

    def list_batches(self) -> list[LeasedBatch]:
        """Return the batches that are still held."""
        with self._lock:
            return list(self._held)

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            self._thread.close()

    def _extend_all(self) -> None:
        for batch in self.list_batches():
            batch.extend()
