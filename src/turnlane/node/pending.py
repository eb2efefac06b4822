"""A commit whose step is taken and which is not through: what commits.py calls *taken*."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from turnlane.backoff import doubled
from turnlane.errors import NoSuchQueue, QueueClosed, QueueFull, RetryLater
from turnlane.events import Block
from turnlane.node.commit import Part, Plan, Range, keys_of
from turnlane.node.loading import LOOK_SECONDS, Kept, Loading, kept, loads, next_number
from turnlane.node.staging import Staging
from turnlane.node.steps import Steps
from turnlane.node.writers import Writers
from turnlane.queues.holding import HoldingQueue
from turnlane.queues.stored import StoredQueue

log = logging.getLogger(__name__)

FIRST_RETRY: Final = 0.05
LAST_RETRY: Final = 1.0
"""Seconds between attempts to carry out a commit on a disk that fails."""


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
        is_stored = isinstance(self._queues[part.queue], StoredQueue)
        return is_stored and self._means.staging.is_diskless(part.stage)

    def _let_in_or_spare(self, loading: Loading, part: Part) -> None:
        """Let a part in that waits for no disk that fails."""
        if part.stage in self._spared:
            return
        staging, queue = self._means.staging, self._queues[part.queue]
        try:
            loading.publish_all(staging, LOOK_SECONDS)
        except QueueFull:
            if not (isinstance(queue, StoredQueue) and queue.troubled):
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

    def _events_of(self, part: Part, source: HoldingQueue) -> list[Kept]:
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


def _beyond(blocks: Iterable[Block], count: int) -> Iterator[Block]:
    """Blocks without their first events."""
    for block in blocks:
        yield block.slice(min(count, block.num_rows))
        count = max(0, count - block.num_rows)
