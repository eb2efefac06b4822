"""Publishing what a commit has staged, each part into its queue."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from turnlane.errors import Never, QueueClosed, RetryLater
from turnlane.events import Block
from turnlane.node.commit import Part
from turnlane.node.places import Numbers, Piece, copied, unpacked
from turnlane.node.staging import Stage, Staging
from turnlane.queues.accepted import Gaps
from turnlane.queues.holding import HoldingQueue
from turnlane.queues.producer import HoldingProducer, hashed
from turnlane.queues.stored import StoredQueue

log = logging.getLogger(__name__)

OWN: Final = "turnlane."
"""Producer ids that begin so are the node's: nobody else may use up their numbers."""
PRODUCER: Final = f"{OWN}commits"
"""Under this id commits publish: one commit at a time into a queue, so one row of numbers."""

LOOK_SECONDS: Final = 0.05
"""How often a start that waits for the disk looks whether that fails."""

MOST_TOGETHER: Final = 8
"""So many parts are published together: all their places are in memory, of millions of events."""

READ_PAUSE: Final = 5.0
"""Seconds until a queue whose events are to be copied, and that cannot be read, is read again."""

REFUSED: Final = (Never, ValueError, KeyError, TypeError)
"""What a queue, or a stage that cannot be read, says for ever."""

Queues = Mapping[str, HoldingQueue]


def next_number(queue: HoldingQueue) -> int:
    """The number of the next event that a commit publishes into a queue."""
    return queue.next_sequence(hashed(PRODUCER))


# ── what there is to publish ─────────────────────────────────────────────────────────────────────


def loads(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts that are published together, in order: those that one read of a queue serves.

    No queue is in a load twice, or the numbers of what comes later would be used first.
    """
    found: list[list[Part]] = []
    for part in parts:
        if (
            found
            and part.source is not None
            and found[-1][0].source == part.source
            and all(part.queue != other.queue for other in found[-1])
            and len(found[-1]) < MOST_TOGETHER
        ):
            found[-1].append(part)
        else:
            found.append([part])
    return found


def pieces(load: Sequence[Part], staging: Staging, queues: Queues) -> Iterator[Piece]:
    """The events of a load: of which part, from which of its numbers on, and a block.

    Raises ``RetryLater`` for places that cannot be read, ``ValueError`` for a stage that cannot.
    """
    source = load[0].source if load else None
    if source is not None:
        yield from _copied(queues[source], [_places(part, staging) for part in load])
        return
    for number, part in enumerate(load):
        index = 0
        for block in staging.blocks(part.stage):
            yield number, index, block
            index += block.num_rows


def _copied(source: HoldingQueue, wanted: Sequence[Numbers]) -> Iterator[Piece]:
    try:
        yield from copied(source, wanted)
    except QueueClosed:
        raise
    except (OSError, *REFUSED) as error:
        # Not again at once: a queue gives up what it could not read a few times.
        message = f"queue {source.name!r} cannot be read: {error}"
        raise RetryLater(message, after=READ_PAUSE) from error


def count_of(part: Part, staging: Staging) -> int:
    """How many numbers a part takes. Raises ``OSError``, ``ValueError``, ``RetryLater``."""
    if part.source is not None:
        return len(_places(part, staging))
    return sum(block.num_rows for block in staging.blocks(part.stage))


def _places(part: Part, staging: Staging) -> Numbers:
    try:
        offsets = unpacked(staging.blocks(part.stage))
    except REFUSED as error:
        # Not for ever: the events are where they are as long as the commit does not settle them.
        raise RetryLater(f"stage {part.stage!r} cannot be read: {error}") from error
    return offsets[offsets < part.source_end]


class Kept(NamedTuple):
    """A stage of events that were staged by their places before."""

    stage: str
    at: int
    """The place of its first event among those that were staged."""
    events: int


def kept(part: Part, staging: Staging, queues: Queues) -> list[Kept]:
    """Stage the events of a part themselves, for later; as many stages as they have gaps.

    Raises ``OSError``, ``RetryLater``, and ``QueueClosed`` if their queue is.
    """
    begun: list[tuple[int, pa.Schema, Stage]] = []
    with contextlib.ExitStack() as opened:
        end = -1
        for _, index, block in pieces([part], staging, queues):
            if index != end or block.schema != begun[-1][1]:
                stage = opened.enter_context(staging.stage(part.queue, block.schema))
                begun.append((index, block.schema, stage))
            begun[-1][2].add(block)
            end = index + block.num_rows
        found: list[Kept] = []
        try:
            for index, _, stage in begun:
                found.append(Kept(stage.finish(), index, stage.events))
        except OSError:
            for each in found:
                staging.discard(each.stage)
            raise
    staging.claim(each.stage for each in found)
    return found


# ── publishing it ────────────────────────────────────────────────────────────────────────────────


class Loading:
    """Publishes the parts of a load. What one queue refuses holds up no other."""

    def __init__(
        self, load: Sequence[Part], queues: Queues, is_dropped: Callable[[HoldingQueue], bool]
    ) -> None:
        self._load = load
        self._queues = queues
        self._is_dropped = is_dropped
        self._producers: dict[Part, HoldingProducer] = {}
        self._over: set[Part] = set()
        """Parts that go no further: refused, or dropped with their queue."""
        self.refused: set[Part] = set()

    def publish_all(self, staging: Staging, timeout: float | None) -> None:
        """Publish what is not refused. Raises ``QueueFull``, ``RetryLater``, ``QueueClosed``."""
        try:
            for number, index, block in pieces(self._load, staging, self._queues):
                self._publish(self._load[number], index, block, timeout)
        except QueueClosed:
            source = self._load[0].source
            if source is None or not self._is_dropped(self._queues[source]):
                raise
            log.warning("queue %s was dropped: with it, what was to be copied from it", source)
        except REFUSED:
            log.exception("a stage cannot be read: it is kept")
            self.refused.update(self._load)

    def _publish(self, part: Part, index: int, block: Block, timeout: float | None) -> None:
        if part in self._over:
            return
        try:
            with self._unless_dropped(part):
                sequence = part.sequence + index
                self._producer(part).publish_block(block, sequence=sequence, timeout=timeout)
        except QueueClosed:
            raise
        except REFUSED:
            log.exception("queue %s refuses what was committed: it is kept", part.queue)
            self.refused.add(part)
            self._over.add(part)

    def _producer(self, part: Part) -> HoldingProducer:
        if part not in self._producers:
            queue = self._queues[part.queue]
            # With a callback publishing does not wait for every block; the flush waits for all.
            self._producers[part] = queue.producer(
                ack=queue.usual_level, on_ack=lambda _: None, producer_id=PRODUCER, gaps=Gaps.SKIP
            )
        return self._producers[part]

    def await_persisted(self, deadline: float | None) -> None:
        """Wait until all is persisted; with a deadline not beyond it, nor for a disk that fails.

        Raises ``RetryLater``, ``QueueClosed``.
        """
        for part, producer in self._producers.items():
            with self._unless_dropped(part):
                _await_persisted(producer, self._queues[part.queue], deadline)

    def await_persisted_or_trouble(self) -> None:
        """Wait until all is persisted, or the disk of a queue fails. Raises ``QueueClosed``."""
        for part, producer in self._producers.items():
            with self._unless_dropped(part):
                queue = self._queues[part.queue]
                while not (producer.flush(LOOK_SECONDS) or _is_failing(queue)):
                    queue.gate.check_open(queue.name)

    @contextlib.contextmanager
    def _unless_dropped(self, part: Part) -> Iterator[None]:
        """A queue that is dropped takes along what was committed into it."""
        try:
            yield
        except QueueClosed:
            if not self._is_dropped(self._queues[part.queue]):
                raise
            log.warning("queue %s was dropped: with it, what was committed into it", part.queue)
            self._over.add(part)


def _await_persisted(
    producer: HoldingProducer, queue: HoldingQueue, deadline: float | None
) -> None:
    while not producer.flush(None if deadline is None else LOOK_SECONDS):
        queue.gate.check_open(queue.name)
        if _is_failing(queue) or deadline is None or time.monotonic() > deadline:
            raise RetryLater(f"queue {queue.name!r} has not persisted a commit yet")


def _is_failing(queue: HoldingQueue) -> bool:
    return isinstance(queue, StoredQueue) and queue.troubled
