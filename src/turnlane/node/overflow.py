"""Overflow: dead letters that their queue, or its disk, cannot take now, in memory until it can.

A lane is not to stand still because nobody looks after its dead letters. What is here is gone with
the process, and beyond a bound the oldest are dropped: both are worse than a larger queue, which
is why it is logged and counted.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Final

from turnlane.errors import QueueFull, TurnlaneError
from turnlane.events import Block
from turnlane.queues.contract import Outcome
from turnlane.queues.holding import HoldingQueue

log = logging.getLogger(__name__)

MAX_BYTES: Final = 64 << 20
"""Of all that waits, whatever clients ask for: a queue has a bound so that memory has one."""


class Overflow:
    """What waits for room, by queue. Safe to use from any thread."""

    def __init__(self, queue: Callable[[str], HoldingQueue], max_bytes: int = MAX_BYTES) -> None:
        self._queue = queue
        self._max_bytes = max_bytes
        self._waiting: dict[str, deque[Block]] = {}
        self._lock = threading.Lock()
        self.dropped: Counter[str] = Counter()
        """Events by queue: the oldest, beyond a bound, and what was left at the end."""

    def take(self, name: str, blocks: Iterable[Block], most: int) -> None:
        """Keep blocks for a queue; if there are more than so many events then, drop the oldest."""
        lost: Counter[str] = Counter()
        with self._lock:
            waiting = self._waiting.setdefault(name, deque())
            sizes = {each: sum(map(_size, found)) for each, found in self._waiting.items()}
            for block in blocks:
                if block.num_rows:
                    waiting.append(block)
                    sizes[name] += _size(block)
                    self._shrink(sizes, lost)
            over = sum(block.num_rows for block in waiting) - most
            lost[name] += max(0, over)
            while over > 0:
                oldest = waiting.popleft()
                if oldest.num_rows > over:
                    waiting.appendleft(oldest.slice(over))
                over -= oldest.num_rows
        log.warning("queue %s cannot take its dead letters now: they wait in memory", name)
        for each, events in (+lost).items():
            self._drop(each, events)

    def _shrink(self, sizes: dict[str, int], lost: Counter[str]) -> None:
        """Give up the oldest of where most waits until all fits; counts what is lost by that."""
        while sum(sizes.values()) > self._max_bytes:
            name = max(sizes, key=sizes.__getitem__)
            oldest = self._waiting[name].popleft()
            sizes[name] -= _size(oldest)
            lost[name] += oldest.num_rows

    def drain(self) -> int:
        """Bring to the queues what they can take; returns how many events they took."""
        taken = 0
        for name in list(self._waiting):
            with self._lock:
                taken += self._drain_one(name, self._waiting[name])
        return taken

    def _drain_one(self, name: str, waiting: deque[Block]) -> int:
        taken = 0
        while waiting:
            count = self._published(name, waiting[0])
            taken += count
            oldest = waiting.popleft()
            if count < oldest.num_rows:
                waiting.appendleft(oldest.slice(count))
                break
        return taken

    def close(self) -> None:
        """A last try; what is left is dropped, and counted."""
        self.drain()
        for name, count in self.events().items():
            self._drop(name, count)

    def events(self) -> dict[str, int]:
        """How many wait, by queue."""
        with self._lock:
            counts = {
                name: sum(block.num_rows for block in blocks)
                for name, blocks in self._waiting.items()
            }
        return {name: count for name, count in counts.items() if count}

    def _published(self, name: str, block: Block) -> int:
        """How many events of a block the queue has taken: not all, if it is full."""
        try:
            queue = self._queue(name)
            stats = queue.stats()
            if stats.max_size is not None:
                block = block.slice(0, max(0, stats.max_size - stats.size))
            if block.num_rows:
                queue.producer().publish_block(block, timeout=0)
        except QueueFull as error:
            return error.accepted
        except TurnlaneError as error:
            log.warning("dead letters still wait for queue %s: %s", name, error)
            return 0
        return block.num_rows

    def _drop(self, name: str, events: int) -> None:
        log.error(
            "%d dead letters of queue %s are dropped: there is no room for them", events, name
        )
        self.dropped[name] += events
        try:
            queue = self._queue(name)
        except TurnlaneError:
            return  # it is gone itself
        # They were the oldest here, but to the queue they are those that never came in.
        with queue.lock:
            queue.dropped_at_door(Outcome.NEWEST, events)


def _size(block: Block) -> int:
    return block.nbytes
