"""Leftovers: what an earlier process had committed and not carried out, ready to be taken up."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from turnlane.errors import NoSuchQueue, RetryLater
from turnlane.node.commit_apply import Means, Pending, count_of, next_number
from turnlane.node.commit_record import COMMIT, FAILED, Part, Plan, Range
from turnlane.node.staging import Staging
from turnlane.queues.buffered import BufferedQueue

log = logging.getLogger(__name__)

Queues = Mapping[str, BufferedQueue]


@dataclass(slots=True)
class Leftovers:
    """What was found."""

    means: Means
    pending: list[Pending] = field(default_factory=list)
    """To be carried out, in this order."""
    waiting: list[Plan] = field(default_factory=list)
    """Nothing of these can be done now."""
    unreadable: list[Path] = field(default_factory=list)

    def tidy(self) -> None:
        """Discard the stages that nobody needs. All are kept if who needs them cannot be read."""
        try:
            if self.unreadable:
                self.means.staging.set_aside()
            for path in self.unreadable:
                self.means.steps.set_aside(path)
            self.means.staging.discard_all()
        except OSError as error:
            log.warning("stages of an earlier process are left to the next start: %s", error)


def leftovers(means: Means) -> Leftovers:
    """Look for commits that are not through. Raises ``StorageFailed``."""
    means.steps.sweep()
    found = Leftovers(means)
    for path in means.steps.left():
        plan = means.steps.read(path)
        if plan is not None:
            means.staging.claim(plan.stages)
            pending = _taken_up(plan, path, means)
            if pending is None:
                found.waiting.append(plan)
            else:
                found.pending.append(pending)
        elif path.suffix == COMMIT:
            found.unreadable.append(path)
    return found


def _taken_up(plan: Plan, path: Path, means: Means) -> Pending | None:
    """A plan, to be carried out; ``None`` if it has to wait for another start."""
    queues = _open_queues(plan, means)
    if path.suffix == FAILED and not queues:
        log.error("%s waits for queues that are not open", path)
        return None
    try:
        left = _still_meant(plan, queues)
        left = replace(left, parts=_renumbered(left.parts, queues, means.staging))
        if path.suffix == FAILED:
            means.steps.rewrite(path, left)
            return Pending(left, means.steps.take_up(path), queues, means)
    except (OSError, ValueError, RetryLater) as error:
        log.error("%s is left to another start: %s", path, error)  # noqa: TRY400
        return None
    return Pending(left, path, queues, means, is_changed=left != plan)


def _open_queues(plan: Plan, means: Means) -> dict[str, BufferedQueue]:
    queues = {}
    for name in plan.queues:
        try:
            queues[name] = means.find(name)
        except NoSuchQueue:
            continue
    return queues


def _still_meant(plan: Plan, queues: Queues) -> Plan:
    """A plan without what was for queues that were dropped, and offsets nobody knows any more."""
    parts = [
        _capped(part, queues)
        for part in plan.parts
        if not _is_other(part.queue, plan, queues)
        and not (part.source is not None and _is_other(part.source, plan, queues))
    ]
    ranges = [left for each in plan.ranges if (left := _known(each, plan, queues)) is not None]
    return replace(plan, parts=parts, ranges=ranges)


def _capped(part: Part, queues: Queues) -> Part:
    """A part without places that its source does not know any more."""
    if part.source is None or part.source not in queues:
        return part
    return part._replace(source_end=min(part.source_end, queues[part.source].end))


def _is_other(name: str, plan: Plan, queues: Queues) -> bool:
    """Whether the queue of this name is not the one that was meant.

    One without an identity, then or now, is good for what was committed into it.
    """
    now = identity(queues[name]) if name in queues else ""
    return bool(now and plan.ids.get(name) and plan.ids[name] != now)


def _known(each: Range, plan: Plan, queues: Queues) -> Range | None:
    """What the queue still knows of a range.

    Offsets that were not written down when the process ended are given to other events.
    """
    if each.queue not in queues:
        return each
    queue = queues[each.queue]
    if plan.ids.get(each.queue) != identity(queue):
        return None
    left = each._replace(end=min(each.end, queue.end))
    return left if left.first < left.end else None


def _renumbered(parts: Iterable[Part], queues: Queues, staging: Staging) -> list[Part]:
    """Parts with the numbers that come next. Raises ``OSError``, ``ValueError``, ``RetryLater``."""
    next_of = {name: next_number(queue) for name, queue in queues.items()}
    renumbered = []
    for part in parts:
        if part.there is not None and part.queue in queues:
            # What the queue has gets numbers that it knows: a repeat.
            sequence = next_of[part.queue] - part.there
            next_of[part.queue] = sequence + count_of(part, staging)
            part = part._replace(sequence=sequence, there=None)  # noqa: PLW2901
        renumbered.append(part)
    return renumbered


def identity(queue: BufferedQueue) -> str:
    """What tells a queue from another of its name; one that is only in memory has none."""
    return queue.stored_id
