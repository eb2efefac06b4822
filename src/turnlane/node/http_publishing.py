"""Publishing for requests that wait for an ack, without a thread for each of them.

All requests for a queue and level share one producer. Its acks, which come on a thread of the
queue, wake in the event loop whichever requests they cover: one sync of the disk answers all who
have come before it, and waiting costs a future.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import Final, NamedTuple

from turnlane.errors import (
    AckPending,
    EventTooLarge,
    QueueClosed,
    QueueFull,
    StorageFailed,
    TransportDown,
)
from turnlane.events import Block
from turnlane.queues.api import Ack, AckLevel, Published
from turnlane.queues.buffered import BufferedQueue
from turnlane.serving.threads import ThreadsByQueue
from turnlane.storage.producer_sequences import Gaps

THREADS: Final = 64
"""Requests at a time that stand in line for room in a queue, or are numbered by their producer."""

_LOOK_AGAIN: Final = 1.0
"""Seconds after which a waiting request looks whether its queue was closed."""


class Numbered(NamedTuple):
    """A producer's own name and the number of the block's first event among all it published."""

    producer: str
    sequence: int
    gaps: Gaps = Gaps.KEEP


class Publishing:
    """Publishes blocks, whole or not at all. Belongs to the event loop."""

    def __init__(self) -> None:
        self._threads = ThreadsByQueue(THREADS)
        self._followers: dict[tuple[str, AckLevel], _Follower] = {}

    async def publish(
        self,
        queue: BufferedQueue,
        block: Block,
        level: AckLevel,
        timeout: float,  # noqa: ASYNC109 - as everywhere else
        numbered: Numbered | None,
    ) -> Published:
        """Publish a block and wait until it has come as far as ``level``.

        Raises ``QueueFull``, ``StorageFailed``, ``EventTooLarge``, ``TransportDown``,
        ``NumbersMissing``: nothing was published;
        ``AckPending``, ``QueueClosed``: it may have been.
        """
        if not block.num_rows:
            return Published(-1, 0, 0, 0)
        _check_fits(queue, block)
        deadline = time.monotonic() + timeout
        # One that may drop older events writes that down at once.
        if numbered is not None or not queue.blocks_when_full:
            threads = self._threads.of(queue.name)
            if threads.exhausted:
                raise TransportDown("the queue has too many such requests at a time", after=1.0)
            return await threads.run(_publish, queue, block, level, deadline, numbered)
        follower = self._follower(queue, level)
        published = follower.producer.try_publish_block(block)
        if published is None:
            return await self._stand_in_line(queue, block, level, deadline)
        if level is not AckLevel.ACCEPTED and published.accepted:
            await follower.wait(published.first + published.accepted, deadline)
        return published

    async def _stand_in_line(
        self, queue: BufferedQueue, block: Block, level: AckLevel, deadline: float
    ) -> Published:
        threads = self._threads.of(queue.name)
        if threads.exhausted:  # the line is long enough
            raise no_room(queue)
        return await threads.run(_publish, queue, block, level, deadline)

    def _follower(self, queue: BufferedQueue, level: AckLevel) -> _Follower:
        follower = self._followers.get((queue.name, level))
        if follower is None or follower.queue is not queue:  # dropped and made anew
            follower = _Follower(queue, level, asyncio.get_running_loop())
            self._followers[queue.name, level] = follower
        return follower


class _Follower:
    """The requests that wait for one level of one queue, in the order of their offsets."""

    def __init__(
        self, queue: BufferedQueue, level: AckLevel, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.queue = queue
        self._level = level
        self._loop = loop
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()
        on_ack = None if level is AckLevel.ACCEPTED else self._hear
        self.producer = queue.producer(ack=level, on_ack=on_ack)

    async def wait(self, end: int, deadline: float) -> None:
        """Wait for all below ``end``. Raises as :meth:`Publishing.publish` does."""
        told: asyncio.Future[int] = self._loop.create_future()
        self._waiting.append((end, told))
        self.queue.urge(self._level, end)  # so that it gathers as many as come
        while not told.done():
            left = deadline - time.monotonic()
            if self.queue.closed:
                raise QueueClosed(f"queue {self.queue.name!r} was closed before the ack")
            if left <= 0:
                raise AckPending(
                    f"the events are in queue {self.queue.name!r}, but not yet {self._level}"
                )
            await asyncio.wait([told], timeout=min(left, _LOOK_AGAIN))
        if told.result() and self.queue.blocks_when_full:
            # Which requests' events an ack counts as lost is not known: all send again, none lose.
            raise StorageFailed(f"queue {self.queue.name!r} lost events to a failing disk")

    def _hear(self, ack: Ack) -> None:
        with contextlib.suppress(RuntimeError):  # the server has stopped, and nobody waits
            self._loop.call_soon_threadsafe(self._tell, ack)

    def _tell(self, ack: Ack) -> None:
        while self._waiting and self._waiting[0][0] <= ack.end:
            _, told = self._waiting.popleft()
            if not told.done():
                told.set_result(ack.dropped)


def no_room(queue: BufferedQueue) -> QueueFull | StorageFailed:
    """Why the queue takes nothing at this moment."""
    if queue.storage_failure:
        return StorageFailed(f"queue {queue.name!r} cannot write to its disk")
    return QueueFull(f"queue {queue.name!r} is full")


def _publish(
    queue: BufferedQueue,
    block: Block,
    level: AckLevel,
    deadline: float,
    numbered: Numbered | None = None,
) -> Published:
    """Publish and wait, on a thread."""
    seconds = max(0.0, deadline - time.monotonic())
    name, sequence, gaps = numbered or (None, None, Gaps.KEEP)
    producer = queue.producer(ack=level, producer_id=name, gaps=gaps)
    try:
        return producer.publish_block(block, sequence=sequence, timeout=seconds)
    except QueueFull as error:
        raise no_room(queue) from error


def _check_fits(queue: BufferedQueue, block: Block) -> None:
    """A block that would go in piece by piece might go in halfway."""
    if block.num_rows > queue.max_events or block.nbytes > queue.max_bytes:
        raise EventTooLarge(
            f"{block.num_rows} events of {block.nbytes} bytes are more than queue {queue.name!r} "
            f"holds ({queue.max_events} events, {queue.max_bytes} bytes); send fewer at a time"
        )
