"""Commits: staged blocks into several queues, and ranges of others settled, as one durable step.

The step is one small file, written whole: before it nothing has happened, after it everything
will. What follows is repeated until it is through, and repeating changes nothing: blocks are
published under numbers that the file has fixed, so that a queue drops what it has; settling what
is settled is settling it; an epoch never goes back.

A commit is in one of these states::

    asked ──step──▶ taken ──all done──▶ through          (file removed, keys given back)
      │               │ ╰──refused in part──▶ through, the rest failed
      ▼               ▼
    refused         stuck ──next start──▶ taken

- *asked*: it waits for its keys (its queues, its writer), then everything is checked that could
  fail later. Any error here means that nothing has happened.
- *taken*: the file is there. Nobody else has its keys, so no other commit can take a step with the
  same numbers. A disk that fails or a queue that is full delays it. A queue that is dropped takes
  what was for it along; the rest goes on.
- *stuck*: the node is closing, or a queue is broken. Its keys stay taken: others that need them
  are refused before their own step, or theirs would begin with numbers that this one has used.
- *through*: should the file outlast it, carrying it out again changes nothing.
- *failed*: what a queue refuses for ever, or what is for one that is not open. The file has only
  that now and is called ``.failed``. Every start tries it again, under new numbers if the queue has
  numbered on.

Stages may be *diskless*: if the disk is full or fails, what they hold waits in memory, and the
commit goes on without them; without a file, too, if that cannot be written.

A start takes up what it finds in the order in which the steps were taken; whoever shares a key
with one that is not through waits for it. Offsets that an earlier process knew and this one does
not are not settled: they will be those of other events. What cannot be done at once is done by a
thread, for who makes room may only come once the node has started.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from turnlane.errors import (
    ConfigError,
    NoSuchStage,
    QueueClosed,
    QueueFull,
    RetryLater,
    StorageFailed,
)
from turnlane.node.commit_apply import OWN, Means, Pending, next_number
from turnlane.node.commit_record import (
    Commit,
    Part,
    Plan,
    Range,
    Steps,
    Writers,
    into,
    keys_of,
    out_of,
)
from turnlane.node.commit_recovery import identity, leftovers
from turnlane.node.staging import Overflow, Staging
from turnlane.queues.buffered import BufferedQueue
from turnlane.storage.disk_io import Disk

# ── keys ──
# Keys: what a commit has for itself while it is under way.
#
# A claim has all its keys or none. Were they taken one by one, a commit that waits for one of
# them
# could keep another from the very commit that would end its waiting.


class Claim:
    """Some keys, and whoever has them."""

    __slots__ = ("keys", "stuck")

    def __init__(self, keys: Iterable[str], stuck: str = "") -> None:
        self.keys = frozenset(keys)
        self.stuck = stuck
        """Why nobody works on it any more though it is not through; until then empty."""


class Keys:
    """The claims on keys. Safe to use from any thread."""

    def __init__(self) -> None:
        self._line: list[Claim] = []
        """Those who have their keys, and those of a start that come after each other."""
        self._changed = threading.Condition()
        self._closing = False

    def take(self, keys: Iterable[str]) -> Claim:
        """Wait until nobody has any of these keys, and have them.

        Raises ``RetryLater`` if that takes until the next start, ``QueueClosed`` at the node's end.
        """
        claim = Claim(keys)
        with self._changed:
            self._await_free(claim, lambda: self._line)
            if self._closing:
                raise QueueClosed("the node is closing")
            self._line.append(claim)
        return claim

    def join(self, keys: Iterable[str], stuck: str = "") -> Claim:
        """Have these keys, after those who have some of them now."""
        claim = Claim(keys, stuck)
        with self._changed:
            self._line.append(claim)
        return claim

    def is_first(self, claim: Claim) -> bool:
        """Whether nobody who came before has any of its keys."""
        with self._changed:
            return not any(claim.keys & other.keys for other in self._before(claim))

    def await_first(self, claim: Claim) -> None:
        """Wait until it is its turn. Raises what :meth:`take` does."""
        with self._changed:
            self._await_free(claim, lambda: self._before(claim))

    def release(self, claim: Claim) -> None:
        """It is through, or has come to nothing."""
        with self._changed:
            self._line.remove(claim)
            self._changed.notify_all()

    def await_unused(self, key: str, seconds: float) -> bool:
        """Wait, no longer than that, until nobody works on anything with this key; says if so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_used(key), seconds)

    def _is_used(self, key: str) -> bool:
        return any(key in claim.keys and not claim.stuck for claim in self._line)

    def keep(self, claim: Claim, why: str) -> None:
        """It is not through and nobody works on it: its keys are taken until the next start."""
        with self._changed:
            claim.stuck = why
            self._changed.notify_all()

    def stop(self) -> None:
        """Let nobody else have a key."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def await_ended(self) -> None:
        """Wait until nobody works on anything."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_busy)

    @property
    def is_busy(self) -> bool:
        """Whether anybody has a key and works on something."""
        return not all(claim.stuck for claim in self._line)

    def _before(self, claim: Claim) -> list[Claim]:
        return self._line[: self._line.index(claim)]

    def _await_free(self, claim: Claim, others: Callable[[], list[Claim]]) -> None:
        while rivals := [other for other in others() if claim.keys & other.keys]:
            if self._closing:
                raise QueueClosed("the node is closing")
            for rival in rivals:
                if rival.stuck:
                    raise RetryLater(rival.stuck)
            self._changed.wait()


log = logging.getLogger(__name__)

START_SECONDS: Final = 10.0
"""So long a start waits for a slow disk to persist what it takes up; the rest is done later."""

FILL_SECONDS: Final = 0.5
"""So long a reader waits at most for a commit that is filling its queue."""


def foreign(producer_id: str) -> str:
    """The producer id of a client. Raises ``ValueError`` for one of the node's own."""
    if producer_id.startswith(OWN):
        raise ValueError(f"producer ids that begin with {OWN!r} are the node's own")
    return producer_id


class Commits:
    """The node's commits. Safe to call from any thread.

    Those of different queues run side by side, so that a lane that waits for room in a queue never
    keeps the lane that empties it from doing so.
    """

    def __init__(
        self, directory: Path, disk: Disk, staging: Staging, queue: Callable[[str], BufferedQueue]
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._staging = staging
        self._queue = queue
        self._steps = Steps(directory, disk)
        self._writers = Writers(directory, disk)
        self.overflow = Overflow(queue)
        self._means = Means(self._steps, staging, self._writers, queue, self.overflow.take)
        self._keys = Keys()
        self._closing = threading.Event()
        self.total = 0
        self.repeated = 0
        """Commits that had been carried out before."""

    def commit(self, commit: Commit, check: Callable[[], object] = lambda: None) -> bool:
        """Carry a commit out; false if it was carried out before.

        ``check`` is called when no other commit of its queues can come between any more, and raises
        if it is not to be.
        Raises ``QueueFull`` if a queue has no room for its stages, ``StorageFailed``,
        ``NoSuchStage``, ``NoSuchQueue``, ``SchemaMismatch``, and ``RetryLater`` if an earlier one
        is in its way until the next start: then nothing has happened. After ``QueueClosed``, which
        is to say that the node is closing, it may be carried out by the next start: repeat it then.
        """
        if commit.writer is not None and not (commit.stages or commit.ranges):
            raise ConfigError("writer", "commits something: name stages, or ranges")
        claim = self._keys.take(self._keys_of(commit))
        pending = None
        try:
            if self._is_repeat(commit):
                self.repeated += 1
                self.abort(commit.stages)
                return False
            check()
            if commit.exact:
                self._check_unsettled(commit.ranges)
            plan, pending = self._taken(commit)
        finally:
            if pending is None:
                self._keys.release(claim)
        if pending is not None:
            self._see_through(pending, claim)
            self.total += 1
        self._spare(commit, plan)
        return True

    def abort(self, stages: Sequence[str]) -> None:
        """Give stages up."""
        for stage in stages:
            self._staging.discard(stage)

    def await_filled(self, queue: BufferedQueue) -> None:
        """Let a commit into a queue be through with it, if that does not take long.

        Whoever reads what there is then gets all of it at once, and not in two batches.
        """
        if not queue.stats().blocked_publishers:  # they wait for whoever reads
            self._keys.await_unused(into(queue.name), FILL_SECONDS)

    def await_emptied(self, queue: BufferedQueue, seconds: float) -> bool:
        """Wait until no commit is settling events of a queue; false if one still is after that.

        Whoever looks before sees events that wait, and that have been passed on.
        """
        return self._keys.await_unused(out_of(queue.name), seconds)

    def epoch_of(self, writer: str) -> int | None:
        """The last epoch that a writer has committed."""
        return self._writers.epoch_of(writer)

    def recover(self) -> int:
        """Finish what was committed before the node went down, discard what was not.

        Returns how many commits there were. What the disk or a full queue delays is finished later.
        """
        deadline = time.monotonic() + START_SECONDS
        found = leftovers(self._means)
        for plan in found.waiting:
            self._keys.join(plan.keys, stuck="an earlier commit is kept as .failed")
        claimed = [(pending, self._keys.join(pending.plan.keys)) for pending in found.pending]
        try:
            later = [each for each in claimed if not self._is_through(*each, deadline)]
            found.tidy()
            for each in later:
                name = "turnlane-commits"
                threading.Thread(target=self._finish, args=each, name=name, daemon=True).start()
        except BaseException:  # Ctrl-C, say: nobody works on them, so nobody is to wait for them
            for _, claim in claimed:
                self._keys.keep(claim, "the node did not start")
            raise
        return len(claimed)

    def stop(self) -> None:
        """Let no commit begin; those whose step is taken go on until their queues are closed."""
        self._closing.set()
        self._keys.stop()

    def close(self) -> None:
        """Wait for those that are under way, once the queues are closed."""
        self.stop()
        self._keys.await_ended()

    # ── asked ────────────────────────────────────────────────────────────────────────────────────

    def _keys_of(self, commit: Commit) -> set[str]:
        stages = map(self._staging.look, commit.stages)
        return keys_of(filter(None, stages), commit.ranges, commit.writer)

    def _is_repeat(self, commit: Commit) -> bool:
        if commit.writer is not None:
            last = self.epoch_of(commit.writer)
            if last is not None and commit.epoch <= last:
                return True
        ranges = [each for each in commit.ranges if each.first < each.end]
        return bool(ranges) and all(
            self._queue(each.queue).is_settled(each.first, each.end) for each in ranges
        )

    def _check_unsettled(self, ranges: Sequence[Range]) -> None:
        for each in ranges:
            span = (each.first, each.end)
            if self._queue(each.queue).filter_unsettled([span]) != [span]:
                raise RetryLater(f"queue {each.queue!r}: offsets were settled by somebody else")

    def _taken(self, commit: Commit) -> tuple[Plan, Pending | None]:
        """Check that everything can be done, and take the step, unless there is nothing to do."""
        self._staging.take(commit.stages)
        try:
            queues = self._open_queues(commit)
            parts = self._parts(commit, queues)
            ids = {name: identity(queue) for name, queue in queues.items()}
            plan = Plan(parts, commit.ranges, commit.writer, commit.epoch, ids)
            if plan.is_empty:
                return plan, None
            plan, path = self._step(commit, plan)
            return plan, Pending(plan, path, queues, self._means)
        except BaseException:
            self._staging.disclaim(commit.stages)
            raise

    def _step(self, commit: Commit, plan: Plan) -> tuple[Plan, Path | None]:
        """Take the step; without the disk, if nothing of the commit needs it. ``StorageFailed``."""
        try:
            return plan, self._steps.take(plan)
        except StorageFailed:
            stages = map(self._staging.contents, commit.stages)
            if not commit.stages or commit.writer or not all(each.diskless for each in stages):
                raise
            # What is staged waits in memory, and queues always have room for what is settled. What
            # is not, if the node ends meanwhile, comes again.
            return replace(plan, parts=()), None

    def _open_queues(self, commit: Commit) -> dict[str, BufferedQueue]:
        """The queues of a commit. Raises ``NoSuchStage``, ``NoSuchQueue``, ``QueueClosed``."""
        queues: dict[str, BufferedQueue] = {}
        for stage in commit.stages:
            contents = self._staging.contents(stage)
            queue = queues.setdefault(contents.queue, self._queue(contents.queue))
            queue.check_open()
            queue.check_columns(contents.schema)
            if contents.source is not None:
                source = queues.setdefault(contents.source, self._queue(contents.source))
                if identity(source) != contents.source_id:
                    raise NoSuchStage(f"the events of stage {stage!r} went with their queue")
        for each in commit.ranges:
            queue = queues.setdefault(each.queue, self._queue(each.queue))
            if queue.closed:
                raise QueueClosed(f"queue {queue.name!r} is closed")
        return queues

    def _parts(self, commit: Commit, queues: dict[str, BufferedQueue]) -> list[Part]:
        """Stages and their numbers, those left out that are to wait in memory.

        Raises ``QueueFull``.
        """
        next_of: dict[str, int] = {}
        events: Counter[str] = Counter()
        size: Counter[str] = Counter()
        parts = []
        for stage in commit.stages:
            contents = self._staging.contents(stage)
            if contents.held is not None:
                continue
            name = contents.queue
            number = next_of.setdefault(name, next_number(queues[name]))
            source_end = 0 if contents.source is None else queues[contents.source].end
            parts.append(Part(stage, name, number, None, contents.source, source_end))
            next_of[name] += contents.events
            events[name] += contents.events
            size[name] += contents.bytes
        for name, count in events.items():
            if has_room(queues[name], count, size[name]):
                continue
            mine = [part for part in parts if part.queue == name]
            if not all(self._staging.contents(part.stage).spare for part in mine):
                message = f"queue {name!r} has no room for {count} staged events"
                raise QueueFull(message, after=1.0)
            parts = [part for part in parts if part.queue != name]
        return parts

    # ── taken ────────────────────────────────────────────────────────────────────────────────────

    def _see_through(self, pending: Pending, claim: Claim) -> None:
        """Carry out what can no longer be taken back."""
        try:
            self._keys.await_first(claim)
            pending.see_through(self._closing)
        except BaseException as error:
            self._keys.keep(claim, f"an earlier commit waits for the node's next start: {error}")
            raise
        self._end(pending, claim)

    def _is_through(self, pending: Pending, claim: Claim, deadline: float) -> bool:
        """Carry out what an earlier process has left; false if that has to wait."""
        if not self._keys.is_first(claim):
            return False
        try:
            pending.carry_out(deadline)
        except Exception as error:  # noqa: BLE001 - whoever tries it next tells of it
            log.warning("a commit is to be finished later: %s", error)
            return False
        self._end(pending, claim)
        return True

    def _finish(self, pending: Pending, claim: Claim) -> None:
        """The thread of a commit that was not through at the start."""
        try:
            self._see_through(pending, claim)
        except (QueueClosed, RetryLater) as error:
            log.info("a commit is left to the next start: %s", error)
        except Exception:
            log.exception("a commit is left to the next start")

    def _end(self, pending: Pending, claim: Claim) -> None:
        kept = pending.kept_keys
        if kept:
            self._keys.join(kept, stuck="an earlier commit is kept as .failed")
        self._keys.release(claim)

    def _spare(self, commit: Commit, plan: Plan) -> None:
        """Put what its queue, or the disk, had no room for where it can wait."""
        for stage in set(commit.stages).difference(plan.stages):
            contents = self._staging.contents(stage)
            self.overflow.take(contents.queue, self._staging.blocks(stage), contents.spare)
            self._staging.disclaim([stage])
            self.abort([stage])


def room_of(queue: BufferedQueue) -> int | None:
    """How many more events a queue takes in one commit; ``None`` if that does not matter.

    By their bytes that is a guess: as if they were as large as those that are there.
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
    """Whether a queue takes what would otherwise wait for room with the step half carried out.

    One that is empty takes anything: what is larger than the queue goes in bit by bit. So does one
    that drops when it is full.
    """
    stats = queue.stats()
    over = (stats.max_size is not None and stats.size + events > stats.max_size) or (
        stats.max_bytes is not None and stats.bytes + size > stats.max_bytes
    )
    return not (over and stats.size and queue.blocks_when_full)
