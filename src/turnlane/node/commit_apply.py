"""Apply a commit whose record is written: publish its stages, settle its ranges, store its epoch.

A :class:`CommitJob` can run many times, and a repetition changes nothing: events are published
under sequence numbers that the record has fixed, so a queue drops the events that it already has;
settling a settled offset has no effect; an epoch never decreases. An error therefore only delays a
commit. A part that a queue refuses permanently stays in the record, which is then called
``.failed``; it does not delay the other parts.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from turnlane.delivery.results import STEP_FAILED, DeadLetterLog
from turnlane.errors import Never, NoSuchQueue, QueueClosed, QueueFull, RetryLater
from turnlane.events import Block
from turnlane.formats.parse_settings import PARSE_ERROR
from turnlane.logs import get_logger
from turnlane.node.commit_record import (
    CommitLog,
    CommitPart,
    CommitPlan,
    SettleRange,
    WriterEpochs,
    get_lock_names,
)
from turnlane.node.event_refs import (
    CopiedBlock,
    OffsetArray,
    decode_references,
    read_referenced_events,
)
from turnlane.node.staging import Stage, StageContents, Staging, finish_all
from turnlane.pacing import Backoff
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.producer import BufferedProducer
from turnlane.storage.producer_sequences import GapPolicy

log = get_logger(__name__)

NODE_PREFIX: Final = "turnlane."
"""Producer ids with this prefix belong to the node: clients cannot use their sequence numbers."""
COMMIT_PRODUCER: Final = f"{NODE_PREFIX}commits"
"""The producer id of commits. Only one commit at a time publishes to a queue, so all commits share
one series of sequence numbers."""

POLL_SECONDS: Final = 0.05
"""How often a start that waits for the disk checks whether the disk fails."""

MAX_GROUP_PARTS: Final = 8
"""The most parts that are published together: the references of all of them are in memory, and
they can be millions."""

READ_RETRY_SECONDS: Final = 5.0
"""Seconds until a source queue that could not be read is read again."""

RETRY_BACKOFF: Final = Backoff(0.05, 1.0)
"""Seconds between attempts to apply a commit while the disk fails."""

PERMANENT_ERRORS: Final = (Never, ValueError, KeyError, TypeError)
"""Errors of a queue, or of an unreadable stage, that every attempt would raise again."""

Queues = Mapping[str, BufferedQueue]


def get_next_sequence(queue: BufferedQueue) -> int:
    """Return the sequence number of the next event that a commit publishes to a queue."""
    return queue.get_known_sequence(COMMIT_PRODUCER) or 0


# ── the events of parts ──────────────────────────────────────────────────────────────────────────


def group_parts(parts: Sequence[CommitPart]) -> list[list[CommitPart]]:
    """Group parts, in order, that one pass over their source queue can serve.

    A target queue is in a group only once: otherwise events would be published out of the order of
    their sequence numbers.
    """
    groups: list[list[CommitPart]] = []
    for part in parts:
        if (
            groups
            and part.source is not None
            and groups[-1][0].source == part.source
            and all(part.queue != other.queue for other in groups[-1])
            and len(groups[-1]) < MAX_GROUP_PARTS
        ):
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def read_parts(
    group: Sequence[CommitPart], staging: Staging, queues: Queues
) -> Iterator[CopiedBlock]:
    """Yield the events of a group: the index of the part, the index of the first event, a block.

    Raises ``RetryLater`` for referenced events that cannot be read, ``ValueError`` for a stage that
    cannot be read.
    """
    source = group[0].source if group else None
    if source is not None:
        wanted = [_read_references(part, staging) for part in group]
        try:
            yield from read_referenced_events(queues[source], wanted)
        except QueueClosed:
            raise
        except (OSError, *PERMANENT_ERRORS) as error:
            # Wait before the next attempt: a queue gives an event up after a few failed reads.
            message = f"queue {source!r} cannot be read: {error}"
            raise RetryLater(message, after=READ_RETRY_SECONDS) from error
        return
    for number, part in enumerate(group):
        index = 0
        for block in staging.blocks(part.stage):
            yield number, index, block
            index += block.num_rows


def count_part_events(part: CommitPart, staging: Staging) -> int:
    """Return how many sequence numbers a part uses. ``OSError``, ``ValueError``, ``RetryLater``."""
    if part.source is not None:
        return len(_read_references(part, staging))
    return sum(block.num_rows for block in staging.blocks(part.stage))


def _read_references(part: CommitPart, staging: Staging) -> OffsetArray:
    try:
        offsets = decode_references(staging.blocks(part.stage))
    except PERMANENT_ERRORS as error:
        # Not a permanent failure: the events stay in their queue until the commit settles them.
        raise RetryLater(f"stage {part.stage!r} cannot be read: {error}") from error
    return offsets[offsets < part.source_end]


class RestagedEvents(NamedTuple):
    """A stage with the events of a part that had only references before."""

    stage: str
    first: int
    """The index of its first event in the part."""
    events: int


def restage_events(part: CommitPart, staging: Staging, queues: Queues) -> list[RestagedEvents]:
    """Stage the referenced events of a part, one stage for each run without gaps.

    Raises ``OSError``, ``RetryLater``, and ``QueueClosed`` if the source queue is closed.
    """
    stages: list[tuple[int, pa.Schema, Stage]] = []
    with contextlib.ExitStack() as opened:
        end = -1
        for _, index, block in read_parts([part], staging, queues):
            if index != end or block.schema != stages[-1][1]:
                stage = opened.enter_context(staging.stage(StageContents(part.queue, block.schema)))
                stages.append((index, block.schema, stage))
            stages[-1][2].add(block)
            end = index + block.num_rows
        staging.claim(finish_all(stage for _, _, stage in stages))
    return [RestagedEvents(stage.id, index, stage.events) for index, _, stage in stages]


# ── publishing ───────────────────────────────────────────────────────────────────────────────────


class StagePublisher:
    """Publishes a group of parts. A queue that refuses its part does not delay the others."""

    def __init__(
        self,
        group: Sequence[CommitPart],
        queues: Queues,
        is_dropped: Callable[[BufferedQueue], bool],
        dead_letters: DeadLetterLog,
    ) -> None:
        self._dead_letters = dead_letters
        self._group = group
        self._queues = queues
        self._is_dropped = is_dropped
        self._producers: dict[CommitPart, BufferedProducer] = {}
        self._ended: set[CommitPart] = set()
        """Parts that are not published further: refused, or dropped with their queue."""
        self.refused: set[CommitPart] = set()

    def publish_all(self, staging: Staging, timeout: float | None) -> None:
        """Publish all parts. Raises ``QueueFull``, ``RetryLater``, ``QueueClosed``."""
        try:
            for number, index, block in read_parts(self._group, staging, self._queues):
                self._publish(self._group[number], index, block, timeout)
        except QueueClosed:
            source = self._group[0].source
            if source is None or not self._is_dropped(self._queues[source]):
                raise
            log.warning("commit.source_dropped", queue=source, hint="its events are not copied")
        except PERMANENT_ERRORS:
            log.exception("commit.stage_unreadable", hint="the commit is kept as .failed")
            self.refused.update(self._group)

    def _publish(self, part: CommitPart, index: int, block: Block, timeout: float | None) -> None:
        if part in self._ended:
            return
        try:
            with self._end_if_dropped(part):
                published = self._get_producer(part).publish_block(
                    block, sequence=part.sequence + index, timeout=timeout
                )
                self._note_dead_letters(part.queue, block, published.accepted)
        except QueueClosed:
            raise
        except PERMANENT_ERRORS:
            log.exception(
                "commit.part_refused", queue=part.queue, hint="the commit is kept as .failed"
            )
            self.refused.add(part)
            self._ended.add(part)

    def _note_dead_letters(self, queue: str, block: Block, events: int) -> None:
        action, _, suffix = queue.rpartition(".")
        names = {"dead_reason", "dead_error", PARSE_ERROR}.intersection(block.schema.names)
        if not events or suffix != "dead" or not names:
            return
        first = {name: block.column(name)[0].as_py() for name in names}
        reason, text = first.get("dead_reason"), first.get("dead_error") or first.get(PARSE_ERROR)
        if reason != STEP_FAILED:  # the lane has logged it, with the step of its code
            why = ": ".join(filter(None, (reason, text)))
            self._dead_letters.add(action, events, queue, why)

    def _get_producer(self, part: CommitPart) -> BufferedProducer:
        if part not in self._producers:
            queue = self._queues[part.queue]
            # With a callback, publishing does not wait for each block; the flush waits for all.
            self._producers[part] = queue.producer(
                ack=queue.usual_level,
                on_ack=lambda _: None,
                producer_id=COMMIT_PRODUCER,
                gaps=GapPolicy.SKIP,
            )
        return self._producers[part]

    def wait_until_persisted(self, deadline: float | None) -> None:
        """Wait until all events are persisted. Raises ``QueueClosed``.

        With a deadline, raises ``RetryLater`` when the deadline is over or the disk fails.
        """
        for part, producer in self._producers.items():
            with self._end_if_dropped(part):
                queue = self._queues[part.queue]
                while not producer.flush(None if deadline is None else POLL_SECONDS):
                    queue.check_open()
                    if queue.storage_failure or deadline is None or time.monotonic() > deadline:
                        raise RetryLater(f"queue {queue.name!r} has not persisted a commit yet")

    def wait_until_persisted_or_failing(self) -> None:
        """Wait until all events are persisted or the disk of a queue fails. ``QueueClosed``."""
        for part, producer in self._producers.items():
            with self._end_if_dropped(part):
                queue = self._queues[part.queue]
                while not (producer.flush(POLL_SECONDS) or queue.storage_failure):
                    queue.check_open()

    @contextlib.contextmanager
    def _end_if_dropped(self, part: CommitPart) -> Iterator[None]:
        """End a part whose queue is dropped: its events are dropped with the queue."""
        try:
            yield
        except QueueClosed:
            if not self._is_dropped(self._queues[part.queue]):
                raise
            log.warning(
                "commit.target_dropped", queue=part.queue, hint="its events are dropped too"
            )
            self._ended.add(part)


# ── the whole commit ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class CommitContext:
    """The parts of the node that a commit uses."""

    log: CommitLog
    staging: Staging
    writers: WriterEpochs
    find_queue: Callable[[str], BufferedQueue]
    """Raises ``NoSuchQueue``."""
    keep_in_memory: Callable[[str, Iterable[Block], int], None]
    """Keep blocks for a queue in memory, at most the given number of events."""
    dead_letters: DeadLetterLog


class CommitJob:
    """Applies one plan, as many times as necessary.

    The caller holds the locks of the plan. ``queues`` has the queues of the plan by name; a name
    that is missing belongs to a queue that is not open.
    """

    def __init__(
        self,
        plan: CommitPlan,
        path: Path | None,
        queues: Queues,
        context: CommitContext,
        *,
        is_changed: bool = False,
    ) -> None:
        """Prepare the job.

        ``path`` is the record. Without a record the plan only settles, in queues that are all open.
        ``is_changed``: the record has an older plan and has to be rewritten first.
        """
        self.plan = plan
        self._is_changed = is_changed
        self._path = path
        self._queues = queues
        self._context = context
        self._in_memory: set[str] = set()
        """Stages whose events wait in memory, as far as the queue did not take them."""
        self._restaged: dict[CommitPart, list[RestagedEvents]] = {}
        """The events of parts that had only references and could not be published."""
        self._stages = set(plan.stages)
        """All stages that the job has claimed."""
        self.failed = CommitPlan((), ())
        """The part of the plan that cannot be applied and is kept for another start."""

    def run_until_done(self, closing: threading.Event) -> None:
        """Run until the commit is applied, even if the disk fails for long. ``QueueClosed``."""
        for failures in itertools.count(1):
            try:
                self.run()
                return
            except (RetryLater, OSError) as error:
                pause = getattr(error, "after", None) or RETRY_BACKOFF.get_wait(failures)
                log.warning("commit.delayed", error=error, retry_seconds=pause)
                if closing.wait(pause):
                    message = "the node is closing: the next start applies the commit"
                    raise QueueClosed(message) from error

    def run(self, deadline: float | None = None) -> None:
        """Publish the parts, settle the ranges, store the epoch, and remove the record.

        Parts that a queue refuses permanently, or whose queue is not open, do not delay the others.
        Raises ``RetryLater`` and ``OSError``, and ``QueueClosed`` if the next start has to do it.
        """
        self._update_record()
        parts = self._publish(deadline)
        if not self._stages.issuperset(part.stage for part in parts):
            # Record the restaged events before the originals are settled in their source queue.
            self.plan = replace(self.plan, parts=parts)
            self._stages.update(self.plan.stages)
            self._is_changed = True
            self._update_record()
        ranges = self._settle()
        if self.plan.writer is not None:
            self._context.writers.record(self.plan.writer, self.plan.epoch)
        self.failed = replace(self.plan, parts=parts, ranges=ranges, writer=None, epoch=0)
        if self._path is not None:
            self._finish_record(self._path)
        done = self._stages.difference(self.failed.stages)
        self._context.staging.release_claims(done)
        for stage in done:
            try:
                self._context.staging.discard(stage)
            except OSError as error:
                log.warning("commit.stage_not_removed", stage=stage, error=error)

    @property
    def failed_locks(self) -> set[str]:
        """The locks that stay taken until the next start: others would use the same numbers.

        The locks of open queues are not among them: their parts get new numbers.
        """
        parts = [part for part in self.failed.parts if part.published is None]
        return get_lock_names(parts, self.failed.ranges, None)

    def _update_record(self) -> None:
        """Write the current plan to the record if it has changed."""
        if self._is_changed and self._path is not None:
            self._context.log.rewrite(self._path, self.plan)
            self._is_changed = False

    def _finish_record(self, path: Path) -> None:
        if self.failed.is_empty:
            self._context.log.remove(path)
            return
        # In this order: if the process ends in between, the next start applies the rest.
        self._context.log.rewrite(path, self.failed)
        self._context.log.mark_failed(path)
        log.error(
            "commit.partly_failed",
            record=path.stem,
            hint="the rest is kept in the .failed record; every start tries it again",
        )

    # ── parts ────────────────────────────────────────────────────────────────────────────────────

    def _publish(self, deadline: float | None) -> list[CommitPart]:
        """Publish the parts; return the parts that the record has to keep."""
        kept: list[CommitPart] = []
        refusing: set[str] = set()
        for group in group_parts(self.plan.parts):
            ready = [part for part in group if self._is_open(part) and part.queue not in refusing]
            refused = self._publish_group(ready, deadline)
            for part in group:
                if part not in ready or part in refused:
                    kept += self._convert_to_kept(part)
                    # Publish nothing more to this queue. With higher numbers in the queue, the
                    # events that it lacks would look like a repeat.
                    refusing.add(part.queue)
        return kept

    def _is_open(self, part: CommitPart) -> bool:
        for name in filter(None, (part.queue, part.source)):
            if name not in self._queues:
                log.error("commit.queue_not_open", target=part.queue, queue=name)
                return False
        return True

    def _publish_group(
        self, group: Sequence[CommitPart], deadline: float | None
    ) -> Collection[CommitPart]:
        """Publish parts; return the parts that their queues refuse."""
        letters = self._context.dead_letters
        publisher = StagePublisher(group, self._queues, self._is_dropped, letters)
        if any(
            self._queues[part.queue].stored_id and contents is not None and contents.has_memory_copy
            for part in group
            for contents in [self._context.staging.find_contents(part.stage)]
        ):
            self._publish_or_keep_in_memory(publisher, *group)
        else:
            publisher.publish_all(self._context.staging, None if deadline is None else 0.0)
            publisher.wait_until_persisted(deadline)
        return publisher.refused

    def _publish_or_keep_in_memory(self, publisher: StagePublisher, part: CommitPart) -> None:
        """Publish a part without waiting for a failing disk."""
        if part.stage in self._in_memory:
            return
        staging, queue = self._context.staging, self._queues[part.queue]
        try:
            publisher.publish_all(staging, POLL_SECONDS)
        except QueueFull:
            if not queue.storage_failure:
                raise
            published = max(0, get_next_sequence(queue) - part.sequence)
            rest = _skip_events(staging.blocks(part.stage), published)
            limit = staging.get_contents(part.stage).max_events_in_memory
            self._context.keep_in_memory(queue.name, rest, limit)
            self._in_memory.add(part.stage)
        publisher.wait_until_persisted_or_failing()

    def _convert_to_kept(self, part: CommitPart) -> list[CommitPart]:
        """Return the form in which the record keeps a part that cannot be published now."""
        queue = self._queues.get(part.queue)
        published = None if queue is None else max(0, get_next_sequence(queue) - part.sequence)
        if part.source is None or part.source not in self._queues:
            return [part._replace(published=published)]
        # The commit is about to settle the events in their source queue, so stage them now, once.
        if part not in self._restaged:
            try:
                self._restaged[part] = restage_events(part, self._context.staging, self._queues)
            except QueueClosed:
                if not self._is_dropped(self._queues[part.source]):
                    raise
                self._restaged[part] = []
        return [
            CommitPart(
                each.stage,
                part.queue,
                part.sequence + each.first,
                None if published is None else min(each.events, max(0, published - each.first)),
            )
            for each in self._restaged[part]
        ]

    # ── ranges ───────────────────────────────────────────────────────────────────────────────────

    def _settle(self) -> list[SettleRange]:
        """Settle the ranges; return the ranges whose queue is not open."""
        for name in {each.queue for each in self.plan.ranges}:
            queue = self._queues.get(name)
            if queue is None:
                log.error("commit.offsets_not_settled", queue=name, hint="the queue is not open")
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
        """Whether a closed queue was dropped, as opposed to closed because the node is closing."""
        try:
            return self._context.find_queue(queue.name) is not queue
        except NoSuchQueue:
            return True


def _skip_events(blocks: Iterable[Block], count: int) -> Iterator[Block]:
    """Yield the blocks without the first ``count`` events."""
    for block in blocks:
        yield block.slice(min(count, block.num_rows))
        count = max(0, count - block.num_rows)
