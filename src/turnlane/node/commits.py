"""Commits: publish staged blocks to several queues and settle ranges of others, atomically.

The commit record, one small file that is written as a whole, is the point of no return: before it,
nothing has happened; after it, everything will happen. The work after the record is repeated until
it is complete, and a repetition changes nothing (see ``commit_apply.py``).

A commit is in one of these states::

    requested ──record──▶ recorded ──all applied──▶ complete      (record removed, locks released)
        │                    │ ╰──refused in part──▶ complete, the rest failed
        ▼                    ▼
     refused               stuck ──next start──▶ recorded

- *requested*: the commit waits for its locks (of its queues and its writer). Then everything that
  could fail later is checked. Any error here means that nothing has happened.
- *recorded*: the record is on the disk. The commit holds its locks, so no other commit can write a
  record with the same sequence numbers. A failing disk or a full queue delays it. If a queue is
  dropped, its events are dropped with it, and the rest of the commit continues.
- *stuck*: the node is closing, or a queue is broken. The locks stay taken. Other commits that need
  them are refused before their own record, because they would use the same sequence numbers.
- *complete*: if the record could not be removed, applying it again changes nothing.
- *failed*: events that a queue refuses permanently, or events of a queue that is not open. The
  record keeps only these and is called ``.failed``. Every start tries it again, with new sequence
  numbers if the queue has used the old ones.

Stages can have a copy in memory: if the disk is full or fails, their events wait there, and the
commit continues without them, even without a record if that cannot be written.

A start applies the records in the order in which they were written; a commit that shares a lock
with an unfinished earlier one waits for it. Offsets that an earlier process knew and this one does
not know are not settled: they will belong to other events. Commits that cannot be applied at once
continue on a thread, because the consumers that make room may connect only after the start.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from turnlane.delivery.results import DeadLetterLog
from turnlane.errors import (
    ConfigError,
    NoSuchStage,
    QueueClosed,
    QueueFull,
    RetryLater,
    StorageFailed,
)
from turnlane.logs import get_logger
from turnlane.node.commit_apply import CommitContext, CommitJob, get_next_sequence
from turnlane.node.commit_record import (
    Commit,
    CommitLog,
    CommitPart,
    CommitPlan,
    WriterEpochs,
    get_lock_names,
    name_publish_lock,
    name_settle_lock,
)
from turnlane.node.commit_recovery import find_unfinished_commits
from turnlane.node.staging import OverflowBuffer, Staging
from turnlane.queues.buffered import BufferedQueue
from turnlane.runtime import start_thread
from turnlane.storage.disk_io import Disk

log = get_logger(__name__)

START_SECONDS: Final = 10.0
"""How long a start waits for a slow disk to persist old commits; a thread does the rest later."""

FILL_SECONDS: Final = 0.5
"""How long a reader waits at most for a commit that is publishing to its queue."""

_FAILED_RECORD: Final = "an earlier commit is kept as .failed"


@dataclass(eq=False, slots=True)
class LockSet:
    """The locks of one commit."""

    names: set[str]
    stuck: str = ""
    """Why the commit is incomplete although no thread works on it; else empty."""


class CommitLocks:
    """The named locks of all commits. Safe to use from any thread.

    A commit gets all its locks at once. If it took them one by one, a commit that waits for one
    lock could hold another lock that the first commit's owner needs to finish.
    """

    def __init__(self) -> None:
        self._sets: list[LockSet] = []
        """The lock sets that are held; at a start also lock sets that wait for earlier ones."""
        self._changed = threading.Condition()
        self._closing = False

    def acquire(self, names: set[str]) -> LockSet:
        """Wait until all these locks are free, and take them.

        Raises ``RetryLater`` if one is stuck until the next start, ``QueueClosed`` if the node is
        closing.
        """
        locks = LockSet(names)
        with self._changed:
            self._wait_until_free(locks, lambda: self._sets)
            if self._closing:
                raise QueueClosed("the node is closing")
            self._sets.append(locks)
        return locks

    def enqueue(self, names: set[str], stuck: str = "") -> LockSet:
        """Add a lock set behind the present holders, without waiting."""
        locks = LockSet(names, stuck)
        with self._changed:
            self._sets.append(locks)
        return locks

    def is_first(self, locks: LockSet) -> bool:
        """Whether no earlier lock set has one of its locks."""
        with self._changed:
            return not any(locks.names & other.names for other in self._get_earlier(locks))

    def wait_until_first(self, locks: LockSet) -> None:
        """Wait until no earlier lock set has one of its locks. Raises like :meth:`acquire`."""
        with self._changed:
            self._wait_until_free(locks, lambda: self._get_earlier(locks))

    def release(self, locks: LockSet) -> None:
        """Release the locks of a commit that is complete or was refused."""
        with self._changed:
            self._sets.remove(locks)
            self._changed.notify_all()

    def mark_stuck(self, locks: LockSet, reason: str) -> None:
        """Keep the locks until the next start: the commit is incomplete and was given up."""
        with self._changed:
            locks.stuck = reason
            self._changed.notify_all()

    def wait_until_unused(self, name: str, seconds: float) -> bool:
        """Wait until no running commit has this lock; false if that takes too long."""

        def is_unused() -> bool:
            return not any(name in locks.names and not locks.stuck for locks in self._sets)

        with self._changed:
            return self._changed.wait_for(is_unused, seconds)

    def stop(self) -> None:
        """Give out no more locks."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def wait_until_idle(self) -> None:
        """Wait until no commit is running."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_busy)

    @property
    def is_busy(self) -> bool:
        """Whether a commit that holds locks is running."""
        return not all(locks.stuck for locks in self._sets)

    def _get_earlier(self, locks: LockSet) -> list[LockSet]:
        return self._sets[: self._sets.index(locks)]

    def _wait_until_free(self, locks: LockSet, get_others: Callable[[], list[LockSet]]) -> None:
        while rivals := [other for other in get_others() if locks.names & other.names]:
            if self._closing:
                raise QueueClosed("the node is closing")
            for rival in rivals:
                if rival.stuck:
                    raise RetryLater(rival.stuck)
            self._changed.wait()


class Commits:
    """The commits of a node. Safe to call from any thread.

    Commits of different queues run at the same time, so a lane that waits for room in a queue never
    blocks the lane that empties the queue.
    """

    def __init__(
        self, directory: Path, disk: Disk, staging: Staging, queue: Callable[[str], BufferedQueue]
    ) -> None:
        disk.create_directory(directory)
        self._staging = staging
        self._queue = queue
        self._log = CommitLog(directory, disk)
        self._writers = WriterEpochs(directory, disk)
        self.overflow = OverflowBuffer(queue)
        self._dead_letters = DeadLetterLog()
        self._context = CommitContext(
            self._log, staging, self._writers, queue, self.overflow.add, self._dead_letters
        )
        self._locks = CommitLocks()
        self._closing = threading.Event()
        self.total = 0
        self.repeated = 0
        """The number of requests that were repeats of earlier commits."""

    def commit(self, commit: Commit, check: Callable[[], object] = lambda: None) -> bool:
        """Apply a commit; return false if it is a repeat.

        ``check`` is called when the commit holds its locks; it raises to refuse the commit.
        Raises ``QueueFull`` if a queue has no room for its stages, ``StorageFailed``,
        ``NoSuchStage``, ``NoSuchQueue``, ``SchemaMismatch``, and ``RetryLater`` if an earlier
        commit blocks it until the next start: in all these cases nothing has happened. After
        ``QueueClosed``, which means that the node is closing, the next start may apply the commit:
        repeat the request then.
        """
        if commit.writer is not None and not (commit.stages or commit.ranges):
            raise ConfigError("writer", "a commit with a writer needs at least one stage or range")
        stages = filter(None, map(self._staging.find_contents, commit.stages))
        locks = self._locks.acquire(get_lock_names(stages, commit.ranges, commit.writer))
        job = None
        try:
            if self._is_repeat(commit):
                self.repeated += 1
                self.abort(commit.stages)
                return False
            check()
            for each in commit.ranges if commit.exact else ():
                span = (each.first, each.end)
                if self._queue(each.queue).filter_unsettled([span]) != [span]:
                    raise RetryLater(
                        f"queue {each.queue!r}: another consumer has settled some of the offsets "
                        f"{each.first} to {each.end - 1}"
                    )
            plan, job = self._record(commit)
        finally:
            if job is None:
                self._locks.release(locks)
        if job is not None:
            self._apply(job, locks)
            self.total += 1
        # Keep the stages in memory for which the queue, or the disk, had no room.
        for stage in set(commit.stages).difference(plan.stages):
            contents = self._staging.get_contents(stage)
            self.overflow.add(
                contents.queue, self._staging.blocks(stage), contents.max_events_in_memory
            )
            self._staging.release_claims([stage])
            self.abort([stage])
        return True

    def abort(self, stages: Sequence[str]) -> None:
        """Discard stages."""
        for stage in stages:
            self._staging.discard(stage)

    def wait_for_publishing_commits(self, queue: BufferedQueue) -> None:
        """Wait a short time for a commit that is publishing to a queue.

        A reader then gets all events of the commit in one batch instead of two.
        """
        if not queue.stats().blocked_publishers:  # blocked publishers wait for this reader
            self._locks.wait_until_unused(name_publish_lock(queue.name), FILL_SECONDS)

    def wait_for_settling_commits(self, queue: BufferedQueue, seconds: float) -> bool:
        """Wait until no commit is settling events of a queue; false if that takes too long.

        Before that, a reader sees events as unsettled although they were passed on.
        """
        return self._locks.wait_until_unused(name_settle_lock(queue.name), seconds)

    def get_epoch(self, writer: str) -> int | None:
        """Return the last epoch that a writer has committed, ``None`` if there is none."""
        return self._writers.get_epoch(writer)

    def recover(self) -> int:
        """Apply the recorded commits of an earlier process, and discard its other stages.

        Returns the number of commits. A thread continues with the commits that the disk or a full
        queue delays.
        """
        deadline = time.monotonic() + START_SECONDS
        found = find_unfinished_commits(self._context)
        for plan in found.waiting:
            self._locks.enqueue(plan.locks, stuck=_FAILED_RECORD)
        queued = [(job, self._locks.enqueue(job.plan.locks)) for job in found.jobs]
        try:
            later = [each for each in queued if not self._try_apply(*each, deadline)]
            found.discard_stages()
            for each in later:
                name = "turnlane-commits"
                start_thread(name, self._finish, *each)
        except BaseException:  # such as Ctrl-C: no thread works on them, so close() must not wait
            for _, locks in queued:
                self._locks.mark_stuck(locks, "the node did not start")
            raise
        return len(queued)

    def stop(self) -> None:
        """Refuse new commits. Recorded ones continue until their queues are closed."""
        self._closing.set()
        self._locks.stop()

    def close(self) -> None:
        """Wait for the running commits. The queues have to be closed before."""
        self.stop()
        self._locks.wait_until_idle()
        self._dead_letters.close()

    # ── requested ────────────────────────────────────────────────────────────────────────────────

    def _is_repeat(self, commit: Commit) -> bool:
        if commit.writer is not None:
            last = self.get_epoch(commit.writer)
            if last is not None and commit.epoch <= last:
                return True
        ranges = [each for each in commit.ranges if each.first < each.end]
        return bool(ranges) and all(
            self._queue(each.queue).is_settled(each.first, each.end) for each in ranges
        )

    def _record(self, commit: Commit) -> tuple[CommitPlan, CommitJob | None]:
        """Check that the commit can be applied, and write its record unless it is empty."""
        self._staging.claim_finished(commit.stages)
        try:
            queues = self._find_open_queues(commit)
            parts = self._plan_parts(commit, queues)
            ids = {name: queue.stored_id for name, queue in queues.items()}
            plan = CommitPlan(parts, commit.ranges, commit.writer, commit.epoch, ids)
            if plan.is_empty:
                return plan, None
            path = None
            try:
                path = self._log.append(plan)
            except StorageFailed:
                stages = map(self._staging.get_contents, commit.stages)
                if (
                    not commit.stages
                    or commit.writer
                    or not all(each.has_memory_copy for each in stages)
                ):
                    raise
                # All stages have a copy in memory, so their events wait there, and a queue always
                # has room for acks. Offsets that are not settled when the node ends are read again.
                plan = replace(plan, parts=())
            return plan, CommitJob(plan, path, queues, self._context)
        except BaseException:
            self._staging.release_claims(commit.stages)
            raise

    def _find_open_queues(self, commit: Commit) -> dict[str, BufferedQueue]:
        """Return the queues of a commit. Raises ``NoSuchStage``, ``NoSuchQueue``, ``QueueClosed``.

        Also raises ``SchemaMismatch``.
        """
        queues: dict[str, BufferedQueue] = {}
        for stage in commit.stages:
            contents = self._staging.get_contents(stage)
            queue = queues.setdefault(contents.queue, self._queue(contents.queue))
            queue.check_open()
            queue.check_columns(contents.schema)
            if contents.source is not None:
                source = queues.setdefault(contents.source, self._queue(contents.source))
                if source.stored_id != contents.source_id:
                    raise NoSuchStage(
                        f"stage {stage!r} refers to events of queue {contents.source!r}, which was "
                        "dropped"
                    )
        for each in commit.ranges:
            queue = queues.setdefault(each.queue, self._queue(each.queue))
            if queue.closed:
                raise QueueClosed(f"queue {queue.name!r} is closed")
        return queues

    def _plan_parts(self, commit: Commit, queues: dict[str, BufferedQueue]) -> list[CommitPart]:
        """Assign sequence numbers to the stages, except to stages that will wait in memory.

        Raises ``QueueFull``.
        """
        next_of: dict[str, int] = {}
        events: Counter[str] = Counter()
        size: Counter[str] = Counter()
        parts = []
        for stage in commit.stages:
            contents = self._staging.get_contents(stage)
            if contents.blocks is not None:
                continue
            name = contents.queue
            number = next_of.setdefault(name, get_next_sequence(queues[name]))
            source_end = 0 if contents.source is None else queues[contents.source].end
            parts.append(CommitPart(stage, name, number, None, contents.source, source_end))
            next_of[name] += contents.events
            events[name] += contents.events
            size[name] += contents.bytes
        for name, count in events.items():
            if has_room(queues[name], count, size[name]):
                continue
            mine = [part for part in parts if part.queue == name]
            if not all(
                self._staging.get_contents(part.stage).max_events_in_memory for part in mine
            ):
                message = f"queue {name!r} has no room for {count} staged events"
                raise QueueFull(message, after=1.0)
            parts = [part for part in parts if part.queue != name]
        return parts

    # ── recorded ─────────────────────────────────────────────────────────────────────────────────

    def _apply(self, job: CommitJob, locks: LockSet) -> None:
        """Apply a recorded commit, and wait until it is complete."""
        try:
            self._locks.wait_until_first(locks)
            job.run_until_done(self._closing)
        except BaseException as error:
            reason = f"an earlier commit waits for the next start of the node: {error}"
            self._locks.mark_stuck(locks, reason)
            raise
        self._release(job, locks)

    def _try_apply(self, job: CommitJob, locks: LockSet, deadline: float) -> bool:
        """Apply a commit of an earlier process; false if it has to wait."""
        if not self._locks.is_first(locks):
            return False
        try:
            job.run(deadline)
        except Exception as error:  # noqa: BLE001 - the thread that tries it next reports it
            log.warning("commit.postponed", error=error, hint="a thread continues with it")
            return False
        self._release(job, locks)
        return True

    def _finish(self, job: CommitJob, locks: LockSet) -> None:
        """Run the thread of a commit that was not complete at the start."""
        try:
            self._apply(job, locks)
        except (QueueClosed, RetryLater) as error:
            log.info("commit.left_to_next_start", error=error)
        except Exception:
            log.exception("commit.left_to_next_start")

    def _release(self, job: CommitJob, locks: LockSet) -> None:
        failed = job.failed_locks
        if failed:
            self._locks.enqueue(failed, stuck=_FAILED_RECORD)
        self._locks.release(locks)


def get_free_capacity(queue: BufferedQueue) -> int | None:
    """Return how many more events one commit can publish to a queue; ``None``: any number.

    For a limit in bytes this is an estimate, from the average size of the events in the queue.
    """
    stats = queue.stats()
    if not queue.blocks_when_full:
        return None
    limits = []
    if stats.max_size is not None:
        limits.append(stats.max_size - stats.size)
    if stats.max_bytes is not None and stats.size:
        limits.append((stats.max_bytes - stats.bytes) * stats.size // max(1, stats.bytes))
    return max(0, min(limits)) if limits else None


def has_room(queue: BufferedQueue, events: int, size: int) -> bool:
    """Whether a commit can publish to a queue without waiting for room halfway.

    An empty queue takes any commit: events beyond its limits are published in steps. So does a
    queue that drops events when it is full.
    """
    stats = queue.stats()
    over = (stats.max_size is not None and stats.size + events > stats.max_size) or (
        stats.max_bytes is not None and stats.bytes + size > stats.max_bytes
    )
    return not (over and stats.size and queue.blocks_when_full)
