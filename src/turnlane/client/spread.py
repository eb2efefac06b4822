"""A queue that is spread over several independent nodes.

Events with a key go to the node of the key, so the events of a key stay in order. Events without a
key go to the nodes in turn. A node that is down delays only its own events. Acks of the events of
one node come in the order in which they were published.

Batches come from the node that has one first. Each node has a thread that asks it for a batch while
a consumer waits. A batch that arrives too late is kept for the next consumer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, Unpack

import numpy as np

from turnlane.errors import NotSupported, QueueClosed, QueueEmpty, TransportDown, TurnlaneError
from turnlane.events import Block
from turnlane.key_hash import find_node, find_nodes
from turnlane.ledger import Ledger
from turnlane.queues.api import (
    Ack,
    AckCallback,
    AckLevel,
    Batch,
    EventFields,
    FlowControl,
    Producer,
    Published,
    Queue,
    Stats,
)
from turnlane.queues.buffered import BufferedQueue
from turnlane.runtime import start_thread

POLL_SECONDS = 0.2
"""How long a node may wait for a batch, and the pause before a failed node is asked again."""


class BatchFetcher:
    """Takes batches from all of ``queues``. Safe to use from any thread."""

    def __init__(self, queues: Sequence[Queue]) -> None:
        self._queues = queues
        self._changed = threading.Condition()
        self._ready: list[tuple[Queue, Batch]] = []
        self._error: TurnlaneError | None = None
        self._wanted = 0
        self._largest: int | None = None
        self._threads: list[threading.Thread] = []
        self._ended = 0
        self._closed = False

    def get(self, max_events: int | None, timeout: float | None) -> Batch:
        """Return the next batch of any node. Raises like :meth:`Queue.get`."""
        if max_events is not None and max_events < 1:
            raise ValueError(f"max_events is {max_events}; a batch has at least one event")
        with self._changed:
            self._start()
            self._largest = max_events
            self._wanted += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._has_answer(max_events), timeout)
                return self._answer(max_events)
            finally:
                self._wanted -= 1

    def close(self) -> None:
        """Stop the threads and release the batches that no consumer has taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for _, batch in self._ready:
            _give_back(batch)
        self._ready.clear()

    def _start(self) -> None:
        if not self._threads and not self._closed:
            self._threads = [
                start_thread(f"turnlane-fetch-{queue.name}", self._fetch, queue)
                for queue in self._queues
            ]

    def _has_answer(self, max_events: int | None) -> bool:
        over = self._closed or self._ended == len(self._queues)
        return over or self._error is not None or self._find(max_events) is not None

    def _find(self, max_events: int | None) -> int | None:
        """Return the index of a ready batch that is not too large. Needs the lock."""
        for index, (_, batch) in enumerate(self._ready):
            if max_events is None or len(batch) <= max_events:
                return index
        return None

    def _answer(self, max_events: int | None) -> Batch:
        index = self._find(max_events)
        if index is not None and not self._closed:
            _, batch = self._ready.pop(index)
            self._changed.notify_all()
            return batch
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._closed or self._ended == len(self._queues):
            raise QueueClosed(f"queue {self._queues[0].name!r} is closed")
        raise QueueEmpty(f"queue {self._queues[0].name!r} had nothing to read in the time allowed")

    # ── the threads ──────────────────────────────────────────────────────────────────────────────

    def _fetch(self, queue: Queue) -> None:
        while self._await_want(queue):
            try:
                batch = queue.get(self._largest, timeout=POLL_SECONDS)
            except QueueEmpty:
                continue
            except TransportDown:
                self._pause()
            except QueueClosed:
                break
            except TurnlaneError as error:
                self._fail(error)
            else:
                self._offer(queue, batch)
        with self._changed:
            self._ended += 1
            self._changed.notify_all()

    def _await_want(self, queue: Queue) -> bool:
        """Wait until a consumer waits and this node has no batch ready; false when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._may_fetch(queue))
            self._return_unfit(queue)
            return not self._closed

    def _may_fetch(self, queue: Queue) -> bool:
        mine = [batch for of, batch in self._ready if of is queue]
        return self._wanted > 0 and all(self._is_unfit(batch) for batch in mine)

    def _is_unfit(self, batch: Batch) -> bool:
        return self._largest is not None and len(batch) > self._largest

    def _return_unfit(self, queue: Queue) -> None:
        """Release batches that are too large now, so that the node makes smaller ones."""
        for entry in [each for each in self._ready if each[0] is queue]:
            if self._is_unfit(entry[1]) and not self._closed:
                self._ready.remove(entry)
                _give_back(entry[1])

    def _offer(self, queue: Queue, batch: Batch) -> None:
        with self._changed:
            if not self._closed:
                self._ready.append((queue, batch))
                self._changed.notify_all()
                return
        _give_back(batch)

    def _fail(self, error: TurnlaneError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
        self._pause()

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, POLL_SECONDS)


def _give_back(batch: Batch) -> None:
    try:
        batch.release()
    except TurnlaneError:
        return  # its lease will expire


class SpreadQueue(Queue):
    """The queues of several nodes with the same name as one. Offsets belong to their node."""

    def __init__(self, queues: Sequence[BufferedQueue]) -> None:
        self._queues = queues
        self._fetching = BatchFetcher(queues)

    def producer(
        self,
        *,
        ack: AckLevel | str = AckLevel.ACCEPTED,
        on_ack: AckCallback | None = None,
        flow: FlowControl | str = FlowControl.NONE,
        producer_id: str | None = None,
    ) -> Producer:
        callback = None if on_ack is None else _serialize_callback(on_ack)
        return SpreadProducer(
            [
                queue.producer(ack=ack, on_ack=callback, flow=flow, producer_id=producer_id)
                for queue in self._queues
            ]
        )

    def get(self, max_events: int | None = None, timeout: float | None = None) -> Batch:
        return self._fetching.get(max_events, timeout)

    def finish(self) -> None:
        for queue in self._queues:
            queue.finish()

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        self._fetching.close()
        # At the same time, so that a node that is down does not use up the time of the others.
        with ThreadPoolExecutor(len(self._queues)) as pool:
            list(pool.map(lambda queue: queue.close(drain=drain, timeout=timeout), self._queues))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Drain the queue if the block ends without an error, so that no event is lost."""
        self.close(drain=kind is None)

    @property
    def name(self) -> str:
        return self._queues[0].name

    @property
    def closed(self) -> bool:
        """Whether the queue was closed."""
        return all(queue.closed for queue in self._queues)

    def stats(self) -> Stats:
        return _sum_stats([queue.stats() for queue in self._queues])


class SpreadProducer(Producer):
    """Publishes to several nodes."""

    def __init__(self, producers: Sequence[Producer]) -> None:
        self._producers = producers
        self._turns = count()

    def publish(
        self,
        value: bytes,
        key: str | None = None,
        *,
        timeout: float | None = None,
        **fields: Unpack[EventFields],
    ) -> bool:
        return self._of(key).publish(value, key, timeout=timeout, **fields)

    def try_publish(
        self, value: bytes, key: str | None = None, **fields: Unpack[EventFields]
    ) -> bool:
        return self._of(key).try_publish(value, key, **fields)

    def publish_block(
        self, block: Block, *, sequence: int | None = None, timeout: float | None = None
    ) -> Published:
        """Publish a block. After ``QueueFull`` any part of the block may be in the queue."""
        _check_no_sequence(sequence)
        left = _start_countdown(timeout)
        published = [
            producer.publish_block(part, timeout=left()) for producer, part in self._parts(block)
        ]
        return Published(-1, *(sum(each[field] for each in published) for field in (1, 2, 3)))

    def try_publish_block(self, block: Block, *, sequence: int | None = None) -> Published | None:
        """Publish a block without waiting. Raises ``NotSupported`` for keys of several nodes."""
        _check_no_sequence(sequence)
        parts = list(self._parts(block))
        if len(parts) != 1:
            raise NotSupported("the block has keys of several nodes: use publish_block()")
        producer, part = parts[0]
        return producer.try_publish_block(part)

    def flush(self, timeout: float | None = None) -> bool:
        left = _start_countdown(timeout)
        flushed = [
            producer.flush(left()) for producer in self._producers
        ]  # all of them, also after a timeout
        return all(flushed)

    def close(self, *, cancel: bool = False) -> None:
        for producer in self._producers:
            producer.close(cancel=cancel)

    def _of(self, key: str | None) -> Producer:
        if key is None:
            return self._next()
        if not isinstance(key, str):
            raise TypeError(f"key must be text, not {type(key).__name__}")
        return self._producers[find_node(key, len(self._producers))]

    def _next(self) -> Producer:
        return self._producers[next(self._turns) % len(self._producers)]

    def _parts(self, block: Block) -> Iterator[tuple[Producer, Block]]:
        """Yield the rows of each node; rows without a key go to the next node in turn."""
        turn = next(self._turns) % len(self._producers)
        if "key" not in block.schema.names or block.column("key").null_count == block.num_rows:
            yield self._producers[turn], block
            return
        nodes = find_nodes(block.column("key"), len(self._producers))
        nodes[nodes < 0] = turn
        for index, producer in enumerate(self._producers):
            rows = np.flatnonzero(nodes == index)
            if len(rows):
                yield producer, block if len(rows) == block.num_rows else block.take(rows)


def _check_no_sequence(sequence: int | None) -> None:
    if sequence is not None:
        raise NotSupported("a queue on several nodes does not support sequence numbers")


def _serialize_callback(on_ack: AckCallback) -> AckCallback:
    """Return a callback that runs on one thread at a time: each node has its own ack thread."""
    lock = threading.Lock()

    def serial(ack: Ack) -> None:
        with lock:
            on_ack(ack)

    return serial


def _start_countdown(timeout: float | None) -> Callable[[], float | None]:
    if timeout is None:
        return lambda: None
    until = time.monotonic() + timeout
    return lambda: max(0.0, until - time.monotonic())


def _sum_stats(parts: Sequence[Stats]) -> Stats:
    """Return the sum of the stats. A limit that one node lacks is missing in the sum."""
    names = Stats.__dataclass_fields__.keys() - {"name", "kind", "ledger", "trouble"}
    totals: dict[str, Any] = {
        name: None if None in values else sum(filter(None, values))
        for name in names
        for values in [[getattr(part, name) for part in parts]]
    }
    dropped: dict[str, int] = {}
    for part in parts:
        for reason, events in part.ledger.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + events
    ledger = Ledger(
        accepted=sum(part.ledger.accepted for part in parts),
        delivered=sum(part.ledger.delivered for part in parts),
        dead=sum(part.ledger.dead for part in parts),
        dropped=dropped,
        pending=sum(part.ledger.pending for part in parts),
    )
    trouble = "; ".join(part.trouble for part in parts if part.trouble)
    return Stats(parts[0].name, parts[0].kind, ledger, trouble=trouble, **totals)
