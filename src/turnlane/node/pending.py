"""A commit whose step is taken and which is not through: what commits.py calls *taken*."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from turnlane.backoff import doubled
from turnlane.errors import Never, NoSuchQueue, QueueClosed, QueueFull, RetryLater
from turnlane.events import Block
from turnlane.node.commit import Part, Plan, Range, keys_of
from turnlane.node.staging import Staging
from turnlane.node.steps import Steps
from turnlane.node.writers import Writers
from turnlane.queues.holding import HoldingQueue
from turnlane.queues.producer import HoldingProducer, hashed
from turnlane.queues.stored import StoredQueue

log = logging.getLogger(__name__)

FIRST_RETRY: Final = 0.05
LAST_RETRY: Final = 1.0
"""Seconds between attempts to carry out a commit on a disk that fails."""

LOOK_SECONDS: Final = 0.05
"""How often a start that waits for the disk looks whether that fails."""

OWN: Final = "turnlane."
"""Producer ids that begin so are the node's: nobody else may use up their numbers."""
PRODUCER: Final = f"{OWN}commits"
"""Under this id commits publish: one commit at a time into a queue, so one row of numbers."""

REFUSED: Final = (Never, ValueError, KeyError, TypeError)
"""What a queue, or a stage that cannot be read, says for ever."""


@dataclass(frozen=True, slots=True)
class Means:
    """What carrying out a commit takes."""

    steps: Steps
    staging: Staging
    writers: Writers
    find: Callable[[str], HoldingQueue]
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
        queues: Mapping[str, HoldingQueue],
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
                if closing.wait(doubled(FIRST_RETRY, LAST_RETRY, failures)):
                    raise QueueClosed("the node is closing: the next start sees to it") from error

    def carry_out(self, deadline: float | None = None) -> None:
        """Publish, settle, note the epoch; then it is through, and its file is gone.

        What a queue refuses for ever, or is for one that is not open, holds up nothing else.
        Raises ``RetryLater``, ``OSError``, and ``QueueClosed`` if that is for the next start.
        """
        if self._is_changed and self._path is not None:
            self._means.steps.rewrite(self._path, self.plan)
            self._is_changed = False
        parts = self._publish(deadline)
        ranges = self._settle()
        if self.plan.writer is not None:
            self._means.writers.note(self.plan.writer, self.plan.epoch)
        self.failed = replace(self.plan, parts=parts, ranges=ranges, writer=None, epoch=0)
        if self._path is not None:
            self._end_step(self._path)
        self._give_up_stages()

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
        queues = [part.queue for part in self.failed.parts if part.there is None]
        return keys_of(queues, self.failed.ranges, None)

    def _give_up_stages(self) -> None:
        done = set(self.plan.stages).difference(self.failed.stages)
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
        for part in self.plan.parts:
            queue = self._queues.get(part.queue)
            if queue is None:
                log.error("a commit into queue %r is kept: it is not open", part.queue)
                left.append(part)
            elif queue.name in refusing or not self._is_published(queue, part, deadline):
                # Had the queue numbers beyond those of what it refused, that would seem a repeat.
                refusing.add(queue.name)
                there = max(0, next_number(queue) - part.sequence)
                left.append(part._replace(there=there))
        return left

    def _is_published(self, queue: HoldingQueue, part: Part, deadline: float | None) -> bool:
        """Publish a part; false if the queue refuses it."""
        try:
            # With a callback publishing does not wait for every block; the flush waits for all.
            producer = queue.producer(
                ack=queue.usual_level, on_ack=lambda _: None, producer_id=PRODUCER
            )
            if isinstance(queue, StoredQueue) and self._means.staging.is_diskless(part.stage):
                return self._is_let_in_or_spared(producer, queue, part)
            is_in = self._is_let_in(producer, part, None if deadline is None else 0.0)
            _await_persisted(producer, queue, deadline)
        except QueueClosed:
            if not self._is_dropped(queue):
                raise
            log.warning("queue %s was dropped: with it, what was committed into it", queue.name)
            return True
        return is_in

    def _is_let_in(self, producer: HoldingProducer, part: Part, timeout: float | None) -> bool:
        sequence = part.sequence
        try:
            for block in self._means.staging.blocks(part.stage):
                producer.publish_block(block, sequence=sequence, timeout=timeout)
                sequence += block.num_rows
        except QueueClosed:
            raise
        except REFUSED:
            log.exception("queue %s refuses what was committed: it is kept", part.queue)
            return False
        return True

    def _is_let_in_or_spared(
        self, producer: HoldingProducer, queue: StoredQueue, part: Part
    ) -> bool:
        """Let a part in that waits for no disk that fails; false if the queue refuses it."""
        if part.stage in self._spared:
            return True
        try:
            is_in = self._is_let_in(producer, part, LOOK_SECONDS)
        except QueueFull:
            if not queue.troubled:
                raise
            is_in = True
            there = max(0, next_number(queue) - part.sequence)
            rest = _beyond(self._means.staging.blocks(part.stage), there)
            self._means.spare(queue.name, rest, self._means.staging.contents(part.stage).spare)
            self._spared.add(part.stage)
        while not (producer.flush(LOOK_SECONDS) or queue.troubled):
            queue.gate.check_open(queue.name)
        return is_in

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
                if isinstance(queue, StoredQueue):
                    queue.sync_acks()
            except QueueClosed:
                if not self._is_dropped(queue):
                    raise
        return [each for each in self.plan.ranges if each.queue not in self._queues]

    def _is_dropped(self, queue: HoldingQueue) -> bool:
        """Whether a queue that is closed is so for ever, and not because the node is closing."""
        try:
            return self._means.find(queue.name) is not queue
        except NoSuchQueue:
            return True


def next_number(queue: HoldingQueue) -> int:
    """The number of the next event that a commit publishes into a queue."""
    return queue.sequences.get(hashed(PRODUCER), 0)


def _beyond(blocks: Iterable[Block], count: int) -> Iterator[Block]:
    """Blocks without their first events."""
    for block in blocks:
        yield block.slice(min(count, block.num_rows))
        count = max(0, count - block.num_rows)


def _await_persisted(
    producer: HoldingProducer, queue: HoldingQueue, deadline: float | None
) -> None:
    """Wait until all is persisted; with a deadline not beyond it, nor for a disk that fails.

    Raises ``RetryLater``, ``QueueClosed``.
    """
    while not producer.flush(None if deadline is None else LOOK_SECONDS):
        queue.gate.check_open(queue.name)
        failing = isinstance(queue, StoredQueue) and queue.troubled
        if failing or deadline is None or time.monotonic() > deadline:
            raise RetryLater(f"queue {queue.name!r} has not persisted a commit yet")
