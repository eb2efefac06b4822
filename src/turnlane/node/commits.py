"""Commits: staged blocks into several queues, and ranges of others settled, as one durable step.

The step is one small file, written whole: before it nothing has happened, after it everything
will. What follows is repeated after a crash until it is through, and repeating changes nothing:
blocks are published under numbers that the file has fixed, so that a queue drops what it has, and
settling what is settled is settling it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from turnlane.backoff import doubled
from turnlane.errors import Never, QueueClosed, QueueFull, RetryLater, StorageFailed
from turnlane.node.overflow import Overflow
from turnlane.node.staging import Staging
from turnlane.queues.contract import Outcome
from turnlane.queues.holding import HoldingQueue
from turnlane.queues.log.files import Disk
from turnlane.queues.producer import hashed
from turnlane.queues.stored import StoredQueue

log = logging.getLogger(__name__)

FIRST_RETRY = 0.05
LAST_RETRY = 1.0
"""Seconds between attempts to carry out a commit on a disk that fails."""

SUFFIX = ".commit"
OWN = "turnlane."
"""Producer ids that begin so are the node's: nobody else may use up their numbers."""
PRODUCER = f"{OWN}commits"
"""Under this id commits publish: one commit at a time into a queue, so one row of numbers."""


def foreign(producer_id: str) -> str:
    """The producer id of a client. Raises ``ValueError`` for one of the node's own."""
    if producer_id.startswith(OWN):
        raise ValueError(f"producer ids that begin with {OWN!r} are the node's own")
    return producer_id


class Range(NamedTuple):
    """Offsets ``first`` to ``end - 1`` of a queue, to be settled."""

    queue: str
    first: int
    end: int
    outcome: Outcome = Outcome.DELIVERED


@dataclass(frozen=True, slots=True)
class Commit:
    """Publish ``stages``, each to the queue it was staged for, and settle ``ranges``.

    It is a repeat, and nothing happens, if all its ranges are settled, or if ``writer`` has
    committed this ``epoch`` or a later one. If only some are settled it goes on, unless it is to be
    ``exact``: then it is refused, for what is staged was made of all of them.
    """

    stages: Sequence[str] = ()
    ranges: Sequence[Range] = ()
    writer: str | None = None
    epoch: int = 0
    exact: bool = False


class _Part(NamedTuple):
    """A stage as the file has it: into which queue, and under which numbers."""

    stage: str
    queue: str
    sequence: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """A commit as its file has it: all that carrying it out needs."""

    parts: Sequence[_Part]
    ranges: Sequence[Range]
    writer: str | None
    epoch: int

    def to_json(self) -> bytes:
        values = {
            "parts": self.parts,
            "ranges": self.ranges,
            "writer": self.writer,
            "epoch": self.epoch,
        }
        return json.dumps(values).encode()

    @property
    def stages(self) -> list[str]:
        return [part.stage for part in self.parts]

    @property
    def keys(self) -> set[str]:
        return _keys_of((part.queue for part in self.parts), self.ranges, self.writer)

    @classmethod
    def of_json(cls, data: bytes) -> _Plan:
        values = json.loads(data)
        return cls(
            [_Part(*part) for part in values["parts"]],
            [Range(*each[:3], *map(Outcome, each[3:])) for each in values["ranges"]],
            values["writer"],
            values["epoch"],
        )


class Commits:
    """The node's commits. Safe to call from any thread.

    Those of different queues run side by side, so that a lane that waits for room in a queue never
    keeps the lane that empties it from doing so.
    """

    def __init__(
        self, directory: Path, disk: Disk, staging: Staging, queue: Callable[[str], HoldingQueue]
    ) -> None:
        self._directory = directory
        self._disk = disk
        self._staging = staging
        self._queue = queue
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self.overflow = Overflow(queue)
        self.total = 0
        self.repeated = 0
        """Commits that had been carried out before."""
        directory.mkdir(parents=True, exist_ok=True)

    def commit(self, commit: Commit) -> bool:
        """Carry a commit out; false if it was carried out before.

        Raises ``QueueFull`` if a queue has no room for its stages, ``StorageFailed``,
        ``NoSuchStage``, ``NoSuchQueue``, ``SchemaMismatch``: then nothing has happened. After
        ``QueueClosed``, which is to say that the node is closing, it may be carried out by the
        next start: repeat it then.
        """
        with contextlib.ExitStack() as held:
            for key in sorted(self._keys(commit)):
                held.enter_context(self._lock_of(key))
            if self._is_repeat(commit):
                self.repeated += 1
                self.abort(commit.stages)
                return False
            if commit.exact:
                self._check_unsettled(commit.ranges)
            path = self._directory / (uuid.uuid4().hex + SUFFIX)
            self._staging.claim(commit.stages)
            try:
                plan = self._planned(commit)
                if not (plan.parts or plan.ranges or plan.writer):
                    self._spare(commit, plan)
                    return True
                self._take_step(plan, path)
            except BaseException:
                self._staging.disclaim(commit.stages)
                raise
            self._see_through(plan)
            self._spare(commit, plan)
            self._finish(plan, path)
            self.total += 1
            return True

    def abort(self, stages: Sequence[str]) -> None:
        """Give stages up."""
        for stage in stages:
            self._staging.discard(stage)

    def epoch_of(self, writer: str) -> int | None:
        """The last epoch that a writer has committed."""
        try:
            values = json.loads(self._writer_path(writer).read_bytes())
        except FileNotFoundError:
            return None
        epoch: int = values["epoch"]
        return epoch

    def recover(self) -> int:
        """Finish what was committed before the node went down, discard what was not.

        What finds a queue full is finished later, once somebody can have made room.
        """
        names = [name for name in self._disk.listing(self._directory) if name.endswith(SUFFIX)]
        later: list[tuple[_Plan, Path]] = []
        for name in names:
            path = self._directory / name
            try:
                plan = _Plan.of_json(path.read_bytes())
                self._staging.claim(plan.stages)
                self._carry_out(plan, timeout=0)
            except QueueFull:
                later.append((plan, path))
                continue
            except (Never, ValueError, KeyError, TypeError):
                # Nothing that was committed is thrown away: a person has to look at it.
                log.exception("commit %s cannot be carried out: kept as .failed", name)
                self._disk.rename(path, path.with_suffix(".failed"))
                continue
            self._finish(plan, path)
        if not any(name.endswith(".failed") for name in self._disk.listing(self._directory)):
            self._staging.discard_all()
        held: set[str] = set()
        for plan, path in later:
            self._finish_later(plan, path, plan.keys - held)
            held |= plan.keys
        return len(names)

    def _finish_later(self, plan: _Plan, path: Path, keys: set[str]) -> None:
        """See a plan through on a thread; commits that touch the same queues wait for it."""
        held = contextlib.ExitStack()
        for key in keys:
            held.enter_context(self._lock_of(key))

        def finish() -> None:
            with held:
                try:
                    self._see_through(plan)
                    self._finish(plan, path)
                except QueueClosed as error:
                    log.info("a commit is left to the next start: %s", error)
                except Exception:
                    log.exception("a commit is left to the next start")

        threading.Thread(target=finish, name="turnlane-commits", daemon=True).start()

    # ── before the step ──────────────────────────────────────────────────────────────────────────

    def _keys(self, commit: Commit) -> set[str]:
        queues = map(self._staging.queue_of, commit.stages)
        return _keys_of(filter(None, queues), commit.ranges, commit.writer)

    def _lock_of(self, key: str) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(key, threading.Lock())

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
            if self._queue(each.queue).unsettled_of([span]) != [span]:
                raise RetryLater(f"queue {each.queue!r}: offsets were settled by somebody else")

    def _planned(self, commit: Commit) -> _Plan:
        """The plan, everything checked that could fail once the step is taken."""
        for each in commit.ranges:
            self._queue(each.queue)
        next_number: dict[str, int] = {}
        events: Counter[str] = Counter()
        size: Counter[str] = Counter()
        parts = []
        for stage in commit.stages:
            contents = self._staging.contents(stage)
            queue = self._queue(contents.queue)
            queue.check_types(contents.schema)
            known = queue.sequences.get(hashed(PRODUCER), 0)
            number = next_number.setdefault(contents.queue, known)
            parts.append(_Part(stage, contents.queue, number))
            next_number[contents.queue] += contents.events
            events[contents.queue] += contents.events
            size[contents.queue] += contents.bytes
        for name, count in events.items():
            if has_room(self._queue(name), count, size[name]):
                continue
            mine = [part for part in parts if part.queue == name]
            if not all(self._staging.contents(part.stage).spare for part in mine):
                message = f"queue {name!r} has no room for {count} staged events"
                raise QueueFull(message, after=1.0)
            parts = [part for part in parts if part.queue != name]
        return _Plan(parts, commit.ranges, commit.writer, commit.epoch)

    def _take_step(self, plan: _Plan, path: Path) -> None:
        try:
            self._disk.write_whole(path, plan.to_json())
        except OSError as error:
            # It may be there, all the same, and must not be found by the next start.
            with contextlib.suppress(OSError):
                self._disk.unlink(path)
            raise StorageFailed(f"cannot commit: {error.strerror or error}") from error

    # ── after it ─────────────────────────────────────────────────────────────────────────────────

    def _see_through(self, plan: _Plan) -> None:
        """Carry out what can no longer be taken back, however long the disk fails."""
        for failures in itertools.count(1):
            try:
                self._carry_out(plan)
                return
            except (RetryLater, OSError) as error:
                log.warning("a commit waits for the disk: %s", error)
                time.sleep(doubled(FIRST_RETRY, LAST_RETRY, failures))

    def _carry_out(self, plan: _Plan, timeout: float | None = None) -> None:
        for part in plan.parts:
            self._publish(part, timeout)
        for each in plan.ranges:
            reader = self._queue(each.queue)
            reader.settle(each.first, each.end, each.outcome)
            if isinstance(reader, StoredQueue):
                reader.sync_acks()
        if plan.writer is not None:
            values = json.dumps({"writer": plan.writer, "epoch": plan.epoch})
            self._disk.write_whole(self._writer_path(plan.writer), values.encode())

    def _spare(self, commit: Commit, plan: _Plan) -> None:
        """Put what its queue had no room for where it can wait."""
        for stage in set(commit.stages).difference(plan.stages):
            contents = self._staging.contents(stage)
            self.overflow.take(contents.queue, self._staging.blocks(stage), contents.spare)
            self._staging.disclaim([stage])
            self.abort([stage])

    def _finish(self, plan: _Plan, path: Path) -> None:
        try:
            self._disk.unlink(path)
        except OSError as error:
            # It is carried out; the next start does so again, which changes nothing.
            log.warning("a commit that is through cannot be removed: %s", error)
        self._staging.disclaim(plan.stages)
        self.abort(plan.stages)

    def _publish(self, part: _Part, timeout: float | None) -> None:
        queue = self._queue(part.queue)
        # With a callback publishing does not wait for every block; the flush waits for all.
        producer = queue.producer(
            ack=queue.usual_level, on_ack=lambda _: None, producer_id=PRODUCER
        )
        sequence = part.sequence
        for block in self._staging.blocks(part.stage):
            producer.publish_block(block, sequence=sequence, timeout=timeout)
            sequence += block.num_rows
        if not producer.flush():
            raise QueueClosed(f"queue {part.queue!r} was closed before it had persisted a commit")

    def _writer_path(self, writer: str) -> Path:
        name = hashlib.sha256(writer.encode()).hexdigest()[:32]
        return self._directory / f"{name}.writer"


def _keys_of(queues: Iterable[str], ranges: Sequence[Range], writer: str | None) -> set[str]:
    """What a commit must have for itself; emptying a queue and filling it are apart."""
    keys = {f"into {queue}" for queue in queues} | {f"from {each.queue}" for each in ranges}
    return keys | ({f"writer {writer}"} if writer is not None else set())


def has_room(queue: HoldingQueue, events: int, size: int) -> bool:
    """Whether a queue takes what would otherwise wait for room with the step half carried out.

    One that is empty takes anything: what is larger than the queue goes in bit by bit. So does one
    that drops when it is full.
    """
    stats = queue.stats()
    over = (stats.max_size is not None and stats.size + events > stats.max_size) or (
        stats.max_bytes is not None and stats.bytes + size > stats.max_bytes
    )
    return not (over and stats.size and queue.door.blocks)
