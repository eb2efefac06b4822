"""Recovery of commits: find the commits that an earlier process did not apply completely.

Records are taken up in the order in which they were written. A plan is adapted to the queues that
are open now: parts of queues that were dropped are left out, offsets that the queue no longer knows
are not settled, and parts get new sequence numbers where other commits may have used the old ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from turnlane.errors import NoSuchQueue, RetryLater, StorageFailed
from turnlane.logs import get_logger
from turnlane.node.commit_apply import (
    CommitContext,
    CommitJob,
    count_part_events,
    get_next_sequence,
)
from turnlane.node.commit_record import (
    COMMIT_SUFFIX,
    FAILED_SUFFIX,
    CommitPart,
    CommitPlan,
    SettleRange,
)
from turnlane.node.staging import Staging
from turnlane.queues.buffered import BufferedQueue

log = get_logger(__name__)

Queues = Mapping[str, BufferedQueue]


@dataclass(slots=True)
class UnfinishedCommits:
    """The commits that a start has found."""

    context: CommitContext
    jobs: list[CommitJob] = field(default_factory=list)
    """The commits to apply, in this order."""
    waiting: list[CommitPlan] = field(default_factory=list)
    """The commits of which no part can be applied now."""
    unreadable: list[Path] = field(default_factory=list)

    def discard_stages(self) -> None:
        """Discard the stages that no commit needs. Keep all if a record is unreadable."""
        try:
            if self.unreadable:
                self.context.staging.set_aside_unclaimed()
            for path in self.unreadable:
                self.context.log.mark_failed(path)
            self.context.staging.discard_leftovers()
        except OSError as error:
            log.warning("staging.cleanup_failed", error=error, hint="the next start tries it again")


def find_unfinished_commits(context: CommitContext) -> UnfinishedCommits:
    """Find the commits that were not applied completely. Raises ``StorageFailed``."""
    context.log.remove_unfinished_files()
    found = UnfinishedCommits(context)
    for path in context.log.list_records():
        plan = context.log.read(path)
        if plan is not None:
            context.staging.claim(plan.stages)
            job = _create_job(plan, path, context)
            if job is None:
                found.waiting.append(plan)
            else:
                found.jobs.append(job)
        elif path.suffix == COMMIT_SUFFIX:
            found.unreadable.append(path)
    return found


def _create_job(plan: CommitPlan, path: Path, context: CommitContext) -> CommitJob | None:
    """Return the job that applies a plan; ``None`` if the plan waits for another start."""
    queues = _find_open_queues(plan, context)
    if path.suffix == FAILED_SUFFIX and not queues:
        log.error("commit.queues_not_open", record=path, queues=sorted(plan.queues))
        return None
    try:
        left = _adapt_plan(plan, queues)
        left = replace(left, parts=_renumber_parts(left.parts, queues, context.staging))
        if path.suffix == FAILED_SUFFIX:
            context.log.rewrite(path, left)
            return CommitJob(left, context.log.mark_active(path), queues, context)
    except (OSError, ValueError, RetryLater) as error:
        log.error(  # noqa: TRY400 - the traceback says nothing more
            "commit.resume_failed", record=path, error=error, hint="the next start tries it again"
        )
        return None
    return CommitJob(left, path, queues, context, is_changed=left != plan)


def _find_open_queues(plan: CommitPlan, context: CommitContext) -> dict[str, BufferedQueue]:
    queues = {}
    for name in plan.queues:
        try:
            queues[name] = context.find_queue(name)
        except (NoSuchQueue, StorageFailed):
            continue
    return queues


def _adapt_plan(plan: CommitPlan, queues: Queues) -> CommitPlan:
    """Remove the parts of dropped queues, and the offsets that the queues no longer have."""
    parts = [
        part._replace(source_end=min(part.source_end, queues[part.source].end))
        if part.source in queues and part.source is not None
        else part
        for part in plan.parts
        if not _is_other_queue(part.queue, plan, queues)
        and not (part.source is not None and _is_other_queue(part.source, plan, queues))
    ]
    limited = [_limit_range(each, plan, queues) for each in plan.ranges]
    return replace(plan, parts=parts, ranges=[each for each in limited if each is not None])


def _is_other_queue(name: str, plan: CommitPlan, queues: Queues) -> bool:
    """Whether the open queue of this name is not the queue of the plan.

    A queue without an id, then or now, counts as the same queue.
    """
    now = queues[name].stored_id if name in queues else ""
    return bool(now and plan.ids.get(name) and plan.ids[name] != now)


def _limit_range(each: SettleRange, plan: CommitPlan, queues: Queues) -> SettleRange | None:
    """Return the part of a range that the queue still has, ``None`` if there is no such part.

    Offsets that were not on the disk when the process ended are given to other events later.
    """
    if each.queue not in queues:
        return each
    queue = queues[each.queue]
    if plan.ids.get(each.queue) != queue.stored_id:
        return None
    left = each._replace(end=min(each.end, queue.end))
    return left if left.first < left.end else None


def _renumber_parts(
    parts: Iterable[CommitPart], queues: Queues, staging: Staging
) -> list[CommitPart]:
    """Give the next sequence numbers to parts whose own numbers may be used by other events.

    Raises ``OSError``, ``ValueError``, ``RetryLater``.
    """
    next_of = {name: get_next_sequence(queue) for name, queue in queues.items()}
    renumbered = []
    for part in parts:
        if part.published is not None and part.queue in queues:
            # Events that the queue already has get numbers below its next one: a repeat.
            sequence = next_of[part.queue] - part.published
            next_of[part.queue] = sequence + count_part_events(part, staging)
            part = part._replace(sequence=sequence, published=None)  # noqa: PLW2901
        renumbered.append(part)
    return renumbered
