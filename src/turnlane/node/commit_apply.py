"""A commit whose step is taken and which is not through: what commits.py calls *taken*."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from turnlane.errors import Never, NoSuchQueue, QueueClosed, QueueFull, RetryLater
from turnlane.events import Block
from turnlane.node.commit_record import Part, Plan, Range, Steps, Writers, keys_of
from turnlane.node.event_refs import Numbers, Piece, copied, unpacked
from turnlane.node.staging import Stage, Staging
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.producer import BufferedProducer
from turnlane.retry import doubled
from turnlane.storage.producer_sequences import Gaps

# ── loading ──
# Publishing what a commit has staged, each part into its queue.

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

Queues = Mapping[str, BufferedQueue]


def next_number(queue: BufferedQueue) -> int:
    """The number of the next event that a commit publishes into a queue."""
    return queue.known_sequence(PRODUCER) or 0


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


def _copied(source: BufferedQueue, wanted: Sequence[Numbers]) -> Iterator[Piece]:
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
        self, load: Sequence[Part], queues: Queues, is_dropped: Callable[[BufferedQueue], bool]
    ) -> None:
        self._load = load
        self._queues = queues
        self._is_dropped = is_dropped
        self._producers: dict[Part, BufferedProducer] = {}
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

    def _producer(self, part: Part) -> BufferedProducer:
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
                    queue.check_open()

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
    producer: BufferedProducer, queue: BufferedQueue, deadline: float | None
) -> None:
    while not producer.flush(None if deadline is None else LOOK_SECONDS):
        queue.check_open()
        if _is_failing(queue) or deadline is None or time.monotonic() > deadline:
            raise RetryLater(f"queue {queue.name!r} has not persisted a commit yet")


def _is_failing(queue: BufferedQueue) -> bool:
    return bool(queue.storage_failure)


FIRST_RETRY: Final = 0.05
LAST_RETRY: Final = 1.0
"""Seconds between attempts to carry out a commit on a disk that fails."""


@dataclass(frozen=True, slots=True)
class Means:
    """What carrying out a commit takes."""

    steps: Steps
    staging: Staging
    writers: Writers
    find: Callable[[str], BufferedQueue]
    spare: Callable[[str, Iterable[Block], int], None]
    """Keep blocks for a queue in memory, so many events at most."""


class Pending:
    """A plan to be carried out, as often as it takes: what is done is not done again.

    Whoever carries it out has its keys. ``queues`` are those that it means, by name; one that is
    missing is not open.
    """

    def __init__(
        self,
        plan: Plan,
        path: Path | None,
        queues: Mapping[str, BufferedQueue],
        means: Means,
        *,
        is_changed: bool = False,
    ) -> None:
        """``is_changed``: the file has it otherwise, and is to have it so before anything else.

        Without a file it only settles, in queues that are all open.
        """
        self.plan = plan
        self._is_changed = is_changed
        self._path = path
        self._queues = queues
        self._means = means
        self._spared: set[str] = set()
        """Stages of which what the queue did not take waits in memory."""
        self._staged: dict[Part, list[Kept]] = {}
        """Events of parts that had only their places, and could not be published."""
        self._stages = set(plan.stages)
        """All that it has claimed."""
        self.failed = Plan((), ())
        """What of it cannot be done, and is kept for another start."""

    def see_through(self, closing: threading.Event) -> None:
        """Carry it out, however long the disk fails. Raises ``QueueClosed``."""
        for failures in itertools.count(1):
            try:
                self.carry_out()
                return
            except (RetryLater, OSError) as error:
                log.warning("a commit waits for the disk: %s", error)
                pause = getattr(error, "after", None) or doubled(FIRST_RETRY, LAST_RETRY, failures)
                if closing.wait(pause):
                    raise QueueClosed("the node is closing: the next start sees to it") from error

    def carry_out(self, deadline: float | None = None) -> None:
        """Publish, settle, note the epoch; then it is through, and its file is gone.

        What a queue refuses for ever, or is for one that is not open, holds up nothing else.
        Raises ``RetryLater``, ``OSError``, and ``QueueClosed`` if that is for the next start.
        """
        self._write_down()
        parts = self._publish(deadline)
        self._note_left(parts)
        ranges = self._settle()
        if self.plan.writer is not None:
            self._means.writers.note(self.plan.writer, self.plan.epoch)
        self.failed = replace(self.plan, parts=parts, ranges=ranges, writer=None, epoch=0)
        if self._path is not None:
            self._end_step(self._path)
        self._give_up_stages()

    def _note_left(self, parts: Sequence[Part]) -> None:
        """Have the file say which events are left before they are settled where they were."""
        if self._stages.issuperset(part.stage for part in parts):
            return  # it does, or has them in stages that nobody else has a hand in
        self.plan = replace(self.plan, parts=parts)
        self._stages.update(self.plan.stages)
        self._is_changed = True
        self._write_down()

    def _write_down(self) -> None:
        """Have the file say what the plan is now."""
        if self._is_changed and self._path is not None:
            self._means.steps.rewrite(self._path, self.plan)
            self._is_changed = False

    def _end_step(self, path: Path) -> None:
        if self.failed.is_empty:
            self._means.steps.remove(path)
            return
        # In this order: should it end here, what is left is carried out by the next start.
        self._means.steps.rewrite(path, self.failed)
        self._means.steps.set_aside(path)
        log.error("a commit is not carried out in full: see %s", path.stem)

    @property
    def kept_keys(self) -> set[str]:
        """What must not be touched until the next start: it would use the numbers of what failed.

        A queue that is open has numbered on.
        """
        parts = [part for part in self.failed.parts if part.there is None]
        return keys_of(parts, self.failed.ranges, None)

    def _give_up_stages(self) -> None:
        done = self._stages.difference(self.failed.stages)
        self._means.staging.disclaim(done)
        for stage in done:
            try:
                self._means.staging.discard(stage)
            except OSError as error:
                log.warning("a stage that was committed cannot be removed: %s", error)

    # ── its parts ────────────────────────────────────────────────────────────────────────────────

    def _publish(self, deadline: float | None) -> list[Part]:
        """Publish its parts; returns what is left of those that are refused."""
        left: list[Part] = []
        refusing: set[str] = set()
        for load in loads(self.plan.parts):
            ready = [part for part in load if self._is_open(part) and part.queue not in refusing]
            refused = self._refused(ready, deadline)
            for part in load:
                if part not in ready or part in refused:
                    left += self._kept(part)
                    # Had the queue numbers beyond those of what it has not, that would seem a
                    # repeat.
                    refusing.add(part.queue)
        return left

    def _is_open(self, part: Part) -> bool:
        for name in filter(None, (part.queue, part.source)):
            if name not in self._queues:
                log.error("a commit into queue %r is kept: %r is not open", part.queue, name)
                return False
        return True

    def _refused(self, load: Sequence[Part], deadline: float | None) -> Collection[Part]:
        """Publish parts; returns those that their queues refuse."""
        loading = Loading(load, self._queues, self._is_dropped)
        if any(self._may_be_spared(part) for part in load):
            self._let_in_or_spare(loading, *load)
        else:
            loading.publish_all(self._means.staging, None if deadline is None else 0.0)
            loading.await_persisted(deadline)
        return loading.refused

    def _may_be_spared(self, part: Part) -> bool:
        is_stored = bool(self._queues[part.queue].stored_id)
        return is_stored and self._means.staging.is_diskless(part.stage)

    def _let_in_or_spare(self, loading: Loading, part: Part) -> None:
        """Let a part in that waits for no disk that fails."""
        if part.stage in self._spared:
            return
        staging, queue = self._means.staging, self._queues[part.queue]
        try:
            loading.publish_all(staging, LOOK_SECONDS)
        except QueueFull:
            if not queue.storage_failure:
                raise
            there = max(0, next_number(queue) - part.sequence)
            rest = _beyond(staging.blocks(part.stage), there)
            self._means.spare(queue.name, rest, staging.contents(part.stage).spare)
            self._spared.add(part.stage)
        loading.await_persisted_or_trouble()

    def _kept(self, part: Part) -> list[Part]:
        """A part that cannot be published now, as the file is to have it."""
        queue = self._queues.get(part.queue)
        there = None if queue is None else max(0, next_number(queue) - part.sequence)
        if part.source is None or part.source not in self._queues:
            return [part._replace(there=there)]
        # Its events are about to be settled where they are.
        return [
            Part(
                each.stage,
                part.queue,
                part.sequence + each.at,
                None if there is None else min(each.events, max(0, there - each.at)),
            )
            for each in self._events_of(part, self._queues[part.source])
        ]

    def _events_of(self, part: Part, source: BufferedQueue) -> list[Kept]:
        """The events of a part themselves, staged but once; none if they went with their queue."""
        if part not in self._staged:
            try:
                self._staged[part] = kept(part, self._means.staging, self._queues)
            except QueueClosed:
                if not self._is_dropped(source):
                    raise
                self._staged[part] = []
        return self._staged[part]

    # ── its ranges ───────────────────────────────────────────────────────────────────────────────

    def _settle(self) -> list[Range]:
        """Settle its ranges; returns those whose queue is not open."""
        for name in {each.queue for each in self.plan.ranges}:
            queue = self._queues.get(name)
            if queue is None:
                log.error("offsets of queue %r are not settled: it is not open", name)
                continue
            try:
                for each in self.plan.ranges:
                    if each.queue == name:
                        queue.settle(each.first, each.end, each.outcome)
                queue.sync_acks()
            except QueueClosed:
                if not self._is_dropped(queue):
                    raise
        return [each for each in self.plan.ranges if each.queue not in self._queues]

    def _is_dropped(self, queue: BufferedQueue) -> bool:
        """Whether a queue that is closed is so for ever, and not because the node is closing."""
        try:
            return self._means.find(queue.name) is not queue
        except NoSuchQueue:
            return True


def _beyond(blocks: Iterable[Block], count: int) -> Iterator[Block]:
    """Blocks without their first events."""
    for block in blocks:
        yield block.slice(min(count, block.num_rows))
        count = max(0, count - block.num_rows)
