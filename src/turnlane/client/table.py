"""Queue tables of remote nodes: receive their events over Arrow Flight.

A receiver has one link to each node, and a link has one stream at a time. An event is settled on
its stream, by its number there. The node answers a flush once: all earlier acks are stored, or some
of them are lost. When a stream ends, acks without an answer count as lost.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from turnlane.client.address import raise_node_errors
from turnlane.client.node_client import RemoteNode, parse_metadata
from turnlane.databases import Row
from turnlane.errors import LeadLost, Never, QueueClosed, TransportDown, TurnlaneError
from turnlane.logs import get_logger
from turnlane.runtime import Closeable, create_thread
from turnlane.table.receiver import DEFAULT_PREFETCH, EVENT_COLUMNS, LostAckCounter, TableEvent
from turnlane.table.shards import KeyRange

log = get_logger(__name__)

RETRY: Final = 0.5
"""Seconds before a new stream to a node whose stream has ended."""


class RemoteTable:
    """A queue table that nodes serve."""

    def __init__(self, nodes: Sequence[RemoteNode], name: str) -> None:
        self.name = name
        self._nodes = nodes

    def receive(self, key_range: str = "-", prefetch: int = DEFAULT_PREFETCH) -> RemoteReceiver:
        """Return a receiver of a key range, connected to all nodes: any of them can lead a shard.

        Nodes that are down are tried again. ``take`` raises permanent errors such as
        ``NotAllowed`` and ``NoSuchQueue``.
        """
        KeyRange.parse(key_range)
        return RemoteReceiver(self._nodes, self.name, key_range, prefetch)


class RemoteEvent(TableEvent):
    """An event that came over a stream."""

    __slots__ = ("acked", "number", "stream")

    def __init__(self, row: Row, home: _ReceiveCall, number: int) -> None:
        super().__init__(row, home, 0.0)
        self.stream = home
        self.number = number
        """The number of the event on its stream."""
        self.acked = 0
        """The number of the stream's ack that was the first for this event; 0: none."""


class RemoteReceiver(Closeable):
    """Receives events from nodes, like :class:`turnlane.table.Receiver`. Thread-safe."""

    def __init__(
        self, nodes: Sequence[RemoteNode], table: str, key_range: str, prefetch: int
    ) -> None:
        self.command = {"receive": table, "key_range": key_range, "prefetch": prefetch}
        self.changed = threading.Condition()
        self.waiting: deque[RemoteEvent] = deque()
        self._prefetch = prefetch
        self._failure: Exception | None = None
        self._over = threading.Event()
        self._links = [_Link(node, self) for node in nodes]
        for link in self._links:
            link.start()

    def take(self, most: int | None = None, timeout: float | None = None) -> list[TableEvent]:
        """Take up to ``most`` events, at least one; none if none come in time.

        Raises ``QueueClosed`` once the receiver is closed, and the permanent errors of a node.
        """
        limit = self._prefetch if most is None else most
        with self.changed:
            self.changed.wait_for(
                lambda: self.waiting or self._over.is_set() or self._failure, timeout
            )
            if self._over.is_set():
                raise QueueClosed("the receiver is closed")
            if self._failure is not None:
                raise self._failure
            return [self.waiting.popleft() for _ in range(min(limit, len(self.waiting)))]

    def __iter__(self) -> Iterator[TableEvent]:
        """Yield events one by one until the receiver is closed."""
        while True:
            try:
                taken = self.take(1)
            except QueueClosed:
                return
            yield from taken

    def ack(self, events: Sequence[TableEvent]) -> None:
        """Settle several events at once. Does not wait until the acks are stored."""
        for home, mine in itertools.groupby(events, key=lambda event: event.ack_handler):
            home.ack(list(mine))

    def flush(
        self, timeout: float | None = None, events: Iterable[TableEvent] | None = None
    ) -> bool:
        """Wait until the acks until now are stored on every node; false on timeout.

        Raises ``LeadLost`` if some are lost: their events fire again. With ``events``, raises it at
        every call if acks of these events are lost. Without, raises it once in each thread for any
        loss. Threads that share their work pass ``events``.
        """
        until = None if timeout is None else time.monotonic() + timeout
        stored = [link.flush(until) for link in self._links]
        news = [link for link in self._links if link.has_news()]
        if news if events is None else any(map(_is_lost, events)):
            raise LeadLost("acks were not stored: their events fire again")
        return all(stored)

    def close(self) -> None:
        """Stop receiving. Unsettled events fire again for other receivers."""
        self._over.set()
        with self.changed:
            self.changed.notify_all()
        for link in self._links:
            link.stop()

    # ── links ────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_over(self) -> bool:
        """Whether it is closed."""
        return self._over.is_set()

    def pause(self) -> None:
        """Wait before the next try."""
        self._over.wait(RETRY)

    def fail(self, error: Exception) -> None:
        """Let :meth:`take` raise a permanent error of a node."""
        with self.changed:
            self._failure = error
            self.changed.notify_all()

    def offer(self, events: list[RemoteEvent]) -> None:
        """Add events that have arrived."""
        with self.changed:
            self.waiting.extend(events)
            self.changed.notify_all()

    def forget(self, stream: _ReceiveCall) -> None:
        """Remove the waiting events of a stream that has ended: they fire again."""
        with self.changed:
            self.waiting = deque(event for event in self.waiting if event.ack_handler is not stream)


class _Link:
    """The link of a receiver to one node: opens a new stream whenever one breaks."""

    def __init__(self, node: RemoteNode, receiver: RemoteReceiver) -> None:
        self._node = node
        self._receiver = receiver
        self._stream: _ReceiveCall | None = None
        self._lost = 0
        """How many times acks were lost."""
        self._losses = LostAckCounter()
        self._lock = threading.Lock()
        self._thread = create_thread(f"turnlane-receive-{node.place}", self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._lock:
            stream = self._stream
        if stream is not None:
            stream.cancel()
        self._thread.join()

    def lose(self) -> None:
        """Count a loss of acks."""
        with self._lock:
            self._lost += 1

    def flush(self, until: float | None) -> bool:
        """Wait until the result of all acks until now is known; false on timeout."""
        with self._lock:
            stream = self._stream
        return stream is None or stream.flush(until)

    def has_news(self) -> bool:
        """Whether acks were lost since this thread asked last."""
        with self._lock:
            return self._losses.has_new_losses(self._lost)

    def _run(self) -> None:
        while not self._receiver.is_over:
            try:
                self._listen()
            except Never as error:
                if not isinstance(error, QueueClosed):
                    self._receiver.fail(error)
                    return
            except ValueError as error:
                self._receiver.fail(error)
                return
            except TurnlaneError as error:
                log.debug("table.stream_failed", node=self._node.place, error=error)
            self._receiver.pause()

    def _listen(self) -> None:
        with raise_node_errors(self._node.place):
            stream = _ReceiveCall(self._node, self._receiver, self.lose)
            with self._lock:
                self._stream = stream
            if self._receiver.is_over:
                stream.cancel()
            try:
                stream.listen()
            finally:
                stream.end()
                with self._lock:
                    self._stream = None
                self._receiver.forget(stream)


class _ReceiveCall:
    """One Flight call; the home of the events that came on it."""

    def __init__(
        self, node: RemoteNode, receiver: RemoteReceiver, lose: Callable[[], None]
    ) -> None:
        self.positions: Mapping[str, int] = {}
        self._place = node.place
        self._receiver = receiver
        self._lose = lose
        self._writer, self._reader = node.exchange(receiver.command)
        self._writing = threading.Lock()
        self._changed = threading.Condition()
        self._asked = 0
        self._asks: dict[int, int] = {}
        """The flushes without an answer: the number of a flush, and its last ack."""
        self._sent = 0
        """The number of acks until now."""
        self._told = 0
        """The number of acks whose result is known."""
        self._lost: list[range] = []
        """Ranges of acks of which some are lost, as the node has reported."""
        self._ended = False

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def ack(self, events: Sequence[TableEvent]) -> None:
        """Send acks."""
        with self._writing:
            with self._changed:
                if self._ended:
                    self._lose()
                self._sent += 1
                for event in events:
                    if isinstance(event, RemoteEvent):
                        event.acked = event.acked or self._sent  # a second ack changes nothing
            self._say(ack=_spans(events))

    def nack(self, events: Sequence[TableEvent], delay: float | None, error: str | None) -> None:
        """Send nacks. If the stream has ended, the events fire again anyway."""
        with self._writing:
            self._say(nack=_spans(events), delay=delay, error=error)

    # ── the link ─────────────────────────────────────────────────────────────────────────────────

    def listen(self) -> None:
        """Read events and answers of the node until the stream ends."""
        fields = self._reader.schema.names
        self.positions = {name: at for at, name in enumerate(fields) if at >= len(EVENT_COLUMNS)}
        for chunk in self._reader:
            about = parse_metadata(chunk.app_metadata)
            if chunk.data is not None:
                self._receiver.offer(self._events(about["first"], chunk.data))
            elif "flushed" in about:
                self._hear(about["flushed"], stored=about["stored"])
            elif "ended" in about:
                raise TransportDown(f"{self._place}: {about['ended']}")

    def flush(self, until: float | None) -> bool:
        """Wait until the result of all acks until now is known; false on timeout."""
        with self._writing:
            with self._changed:
                sent = self._sent
                if sent == self._told:
                    return True
                self._asked += 1
                self._asks[self._asked] = sent
            self._say(flush=self._asked)
        left = None if until is None else until - time.monotonic()
        with self._changed:
            return self._changed.wait_for(lambda: self._told >= sent or self._ended, left)

    def _hear(self, number: int, *, stored: bool) -> None:
        """Take the answer to a flush, also after a timeout: the node answers only once."""
        with self._changed:
            sent = self._asks.pop(number)
            if not stored:
                self._lost.append(range(self._told + 1, sent + 1))
                self._lose()
            self._told = max(self._told, sent)
            self._changed.notify_all()

    def has_lost(self, event: RemoteEvent) -> bool:
        """Whether the ack of an event may be lost."""
        with self._changed:
            is_cut_off = self._ended and event.acked > self._told
            return is_cut_off or any(event.acked in acks for acks in self._lost)

    def end(self) -> None:
        """End the stream: acks without a known result count as lost."""
        self._reader.cancel()
        with self._changed:
            self._ended = True
            if self._sent > self._told:
                self._lose()
            self._changed.notify_all()
        with self._writing, contextlib.suppress(pa.ArrowException):  # it has ended in any case
            self._writer.close()

    def cancel(self) -> None:
        """Cancel the call. Unsettled events fire again for other receivers."""
        self._reader.cancel()

    def _events(self, first: int, block: pa.RecordBatch) -> list[RemoteEvent]:
        rows = zip(*(column.to_pylist() for column in block.columns), strict=True)
        return [RemoteEvent(row, self, number) for number, row in enumerate(rows, first)]

    def _say(self, **words: Any) -> None:
        """Send a message. The caller holds the lock. Errors end the stream in ``listen``."""
        if self._ended:
            return
        try:
            self._writer.write_metadata(pa.py_buffer(json.dumps(words).encode()))
        except pa.ArrowException as error:
            log.debug("table.message_not_sent", node=self._place, error=error)


def _is_lost(event: TableEvent) -> bool:
    return isinstance(event, RemoteEvent) and event.stream.has_lost(event)


def _spans(events: Sequence[TableEvent]) -> list[tuple[int, int]]:
    """Return the numbers of events as ranges."""
    spans: list[tuple[int, int]] = []
    for number in sorted(event.number for event in events if isinstance(event, RemoteEvent)):
        if spans and spans[-1][1] >= number:
            spans[-1] = (spans[-1][0], number + 1)
        else:
            spans.append((number, number + 1))
    return spans
