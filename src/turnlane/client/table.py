"""Queue tables of nodes elsewhere: their events, as they fire, over Arrow Flight."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from turnlane.client.address import understood
from turnlane.client.node_client import RemoteNode, said
from turnlane.errors import LeadLost, Never, QueueClosed, TransportDown, TurnlaneError
from turnlane.runtime import Closing
from turnlane.table.event import EVENT_COLUMNS, TableEvent
from turnlane.table.receiver import DEFAULT_PREFETCH, LostAckCounter
from turnlane.table.shards import KeyRange
from turnlane.table.sql.dialect import Row

log = logging.getLogger(__name__)

RETRY: Final = 0.5
"""Seconds before a node that ended a stream is asked again."""


class RemoteTable:
    """A queue table that nodes serve."""

    def __init__(self, nodes: Sequence[RemoteNode], name: str) -> None:
        self.name = name
        self._nodes = nodes

    def receive(self, key_range: str = "-", prefetch: int = DEFAULT_PREFETCH) -> RemoteReceiver:
        """A receiver of the events in a key range, from all nodes: one of them leads a shard.

        Nodes that are away are tried again. Raises whatever will fail again: ``NotAllowed``,
        ``NoSuchQueue``.
        """
        KeyRange.parse(key_range)
        return RemoteReceiver(self._nodes, self.name, key_range, prefetch)


class RemoteEvent(TableEvent):
    """An event that came over a stream."""

    __slots__ = ("acked", "number", "stream")

    def __init__(self, row: Row, home: _Stream, number: int) -> None:
        super().__init__(row, home, 0.0)
        self.stream = home
        self.number = number
        """Of all that came on its stream."""
        self.acked = 0
        """Which of the stream's acks was its first; 0: none."""


class RemoteReceiver(Closing):
    """Takes events from nodes; as :class:`turnlane.table.Receiver`. Safe to use from any thread."""

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
        """Take up to ``most`` events, at least one; none if none came in time.

        Raises ``QueueClosed`` once the receiver is closed, and what a node will always refuse.
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
        """Events, one by one, until the receiver is closed."""
        while True:
            try:
                taken = self.take(1)
            except QueueClosed:
                return
            yield from taken

    def ack(self, events: Sequence[TableEvent]) -> None:
        """Settle several events at once; does not wait until that is stored."""
        for home, mine in itertools.groupby(events, key=lambda event: event.home):
            home.ack(list(mine))

    def flush(
        self, timeout: float | None = None, events: Iterable[TableEvent] | None = None
    ) -> bool:
        """Wait until the acks so far are stored, on every node; false if the time is over.

        Raises ``LeadLost`` if some may never be: their events fire again. If ``events`` are given,
        only if acks of theirs are among those, as often as it is called; else each thread hears
        once of any loss. Threads that share their work give events.
        """
        until = None if timeout is None else time.monotonic() + timeout
        stored = [link.flush(until) for link in self._links]
        news = [link for link in self._links if link.has_news()]
        if news if events is None else any(map(_is_lost, events)):
            raise LeadLost("acks were not stored: their events fire again")
        return all(stored)

    def close(self) -> None:
        """Take no more events; those that were not settled fire elsewhere."""
        self._over.set()
        with self.changed:
            self.changed.notify_all()
        for link in self._links:
            link.stop()

    # ── for links ────────────────────────────────────────────────────────────────────────────────

    @property
    def is_over(self) -> bool:
        """Whether it is closed."""
        return self._over.is_set()

    def pause(self) -> None:
        """Wait before the next try."""
        self._over.wait(RETRY)

    def fail(self, error: Exception) -> None:
        """A node will always refuse."""
        with self.changed:
            self._failure = error
            self.changed.notify_all()

    def offer(self, events: list[RemoteEvent]) -> None:
        """Take events in."""
        with self.changed:
            self.waiting.extend(events)
            self.changed.notify_all()

    def forget(self, stream: _Stream) -> None:
        """A stream is over: what nobody took of it fires elsewhere."""
        with self.changed:
            self.waiting = deque(event for event in self.waiting if event.home is not stream)


class _Link:
    """One node, for one receiver: a stream, and another one whenever it breaks."""

    def __init__(self, node: RemoteNode, receiver: RemoteReceiver) -> None:
        self._node = node
        self._receiver = receiver
        self._stream: _Stream | None = None
        self._lost = 0
        """How often there were acks that were not stored."""
        self._losses = LostAckCounter()
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name=f"turnlane-receive-{node.place}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._lock:
            stream = self._stream
        if stream is not None:
            stream.cancel()
        self._thread.join()

    def lose(self) -> None:
        """Some acks are not stored, and never will be."""
        with self._lock:
            self._lost += 1

    def flush(self, until: float | None) -> bool:
        """Whether it is known in time what became of all acks so far."""
        with self._lock:
            stream = self._stream
        return stream is None or stream.flush(until)

    def has_news(self) -> bool:
        """Whether acks were lost of which this thread was not told; now it was."""
        with self._lock:
            return self._losses.is_news(self._lost)

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
                log.debug("%s: %s", self._node.place, error)
            self._receiver.pause()

    def _listen(self) -> None:
        with understood(self._node.place):
            stream = _Stream(self._node, self._receiver, self.lose)
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


class _Stream:
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
        """By number, those that are not answered: how many acks each is about."""
        self._sent = 0
        """Acks so far,"""
        self._told = 0
        """and how many of them are known to be stored, or lost."""
        self._lost: list[range] = []
        """Acks of which the node has said that some are lost."""
        self._ended = False

    # ── for events ───────────────────────────────────────────────────────────────────────────────

    def ack(self, events: Sequence[TableEvent]) -> None:
        """Send acks."""
        with self._writing:
            with self._changed:
                if self._ended:
                    self._lose()
                self._sent += 1
                for event in events:
                    if isinstance(event, RemoteEvent):
                        event.acked = event.acked or self._sent  # a second one changes nothing
            self._say(ack=_spans(events))

    def nack(self, events: Sequence[TableEvent], delay: float | None, error: str | None) -> None:
        """Send nacks; if the stream is over, the events fire again anyway."""
        with self._writing:
            self._say(nack=_spans(events), delay=delay, error=error)

    # ── for the link ─────────────────────────────────────────────────────────────────────────────

    def listen(self) -> None:
        """Hear the node until the stream is over."""
        fields = self._reader.schema.names
        self.positions = {name: at for at, name in enumerate(fields) if at >= len(EVENT_COLUMNS)}
        for chunk in self._reader:
            about = said(chunk.app_metadata)
            if chunk.data is not None:
                self._receiver.offer(self._events(about["first"], chunk.data))
            elif "flushed" in about:
                self._hear(about["flushed"], stored=about["stored"])
            elif "ended" in about:
                raise TransportDown(f"{self._place}: {about['ended']}")

    def flush(self, until: float | None) -> bool:
        """Whether it is known what became of all acks so far; lost ones are told to the link."""
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
        """Take an answer, also one for which nobody waits any more: the node says it once."""
        with self._changed:
            sent = self._asks.pop(number)
            if not stored:
                self._lost.append(range(self._told + 1, sent + 1))
                self._lose()
            self._told = max(self._told, sent)
            self._changed.notify_all()

    def has_lost(self, event: RemoteEvent) -> bool:
        """Whether an event's ack may be lost."""
        with self._changed:
            is_cut_off = self._ended and event.acked > self._told
            return is_cut_off or any(event.acked in acks for acks in self._lost)

    def end(self) -> None:
        """It is over: acks of which nobody knows that they are stored are lost."""
        self._reader.cancel()
        with self._changed:
            self._ended = True
            if self._sent > self._told:
                self._lose()
            self._changed.notify_all()
        with self._writing, contextlib.suppress(pa.ArrowException):  # it is over in any case
            self._writer.close()

    def cancel(self) -> None:
        """End the call; what is not settled fires elsewhere."""
        self._reader.cancel()

    def _events(self, first: int, block: pa.RecordBatch) -> list[RemoteEvent]:
        rows = zip(*(column.to_pylist() for column in block.columns), strict=True)
        return [RemoteEvent(row, self, number) for number, row in enumerate(rows, first)]

    def _say(self, **words: Any) -> None:
        """Called with the lock held. What cannot be sent is lost with the stream."""
        if self._ended:
            return
        try:
            self._writer.write_metadata(pa.py_buffer(json.dumps(words).encode()))
        except pa.ArrowException as error:
            log.debug("%s: %s", self._place, error)


def _is_lost(event: TableEvent) -> bool:
    return isinstance(event, RemoteEvent) and event.stream.has_lost(event)


def _spans(events: Sequence[TableEvent]) -> list[tuple[int, int]]:
    """The numbers of events, those in a row as one pair."""
    spans: list[tuple[int, int]] = []
    for number in sorted(event.number for event in events if isinstance(event, RemoteEvent)):
        if spans and spans[-1][1] >= number:
            spans[-1] = (spans[-1][0], number + 1)
        else:
            spans.append((number, number + 1))
    return spans
