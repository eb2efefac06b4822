"""Staged blocks: written to the node's disk, in no queue until a commit says so."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from turnlane.errors import NoSuchStage, QueueFull, StorageFailed, TurnlaneError
from turnlane.events import Block
from turnlane.ledger import Outcome
from turnlane.node.event_refs import PLACES
from turnlane.queues.buffered import BufferedQueue
from turnlane.runtime import Closing
from turnlane.storage.disk_io import Disk

SUFFIX = ".stage"
KEPT = ".kept"
"""Stages that a person has to look at: nobody deletes them."""

Vet = Callable[[Block], Block]
"""A block as its queue will take it; raises what the queue would raise for ever."""

MAX_BYTES: Final = 64 << 20
"""Of all blocks of stages that are in memory, in case the disk does not take them."""


class Contents(NamedTuple):
    """What a finished stage holds."""

    queue: str
    schema: pa.Schema
    events: int
    bytes: int
    spare: int = 0
    """So many events may wait in memory if the queue has no room for them; 0: none."""
    diskless: bool = False
    """They may do so if it is the disk that has no room, or fails, too."""
    held: Sequence[Block] | None = None
    """Its blocks, if the disk did not take them."""
    source: str | None = None
    """The queue that has its events, if the stage has only their places."""
    source_id: str = ""
    """Which queue of that name."""


class Stage(Closing):
    """A file of blocks for one queue, being written; given up unless :meth:`finish` was called."""

    def __init__(self, staging: Staging, contents: Contents, vet: Vet) -> None:
        self.id = uuid.uuid4().hex
        self._contents = contents
        self._vet = vet
        self.events = 0
        self._bytes = 0
        self._staging = staging
        self._finished = False
        self._disk = staging.disk
        self._fd: int | None = None
        self._at = 0
        self._failure: OSError | None = None
        """Why it goes on in memory."""
        self._copy: list[Block] | None = [] if contents.diskless else None
        """Its blocks, in case the disk fails: it may not give back what it could not sync."""
        with self._or_copied():
            self._fd = self._disk.open(staging.path(self.id), create=True)
            schema = contents.schema if contents.source is None else PLACES
            self._write(self._fd, schema.serialize())

    def add(self, block: Block) -> None:
        """Stage another block. After an error the stage is to be given up.

        Raises what publishing it would, but never ``QueueFull``; ``OSError``.
        """
        block = self._vet(block)
        self._put(block, block.num_rows, block.nbytes)

    def refer(self, places: Block, events: int, size: int) -> None:
        """Stage so many events of about this size by their places. Raises ``OSError``."""
        self._put(places, events, size)

    def _put(self, block: Block, events: int, size: int) -> None:
        self._add_to_copy(block)
        if self._fd is not None:
            with self._or_copied():
                self._write(self._fd, block.serialize())
        self.events += events
        self._bytes += size

    def finish(self) -> str:
        """Make it last, unless it is in memory; returns the id to commit it by."""
        if self._fd is not None:
            with self._or_copied():
                self._disk.sync(self._fd)
                self._disk.sync_directory(self._staging.directory)
        held = None if self._failure is None else self._copy
        if held is None:
            self._staging.release(self.id)
        contents = self._contents._replace(events=self.events, bytes=self._bytes, held=held)
        self._staging.finished(self.id, contents)
        self._finished = True
        return self.id

    def _write(self, fd: int, message: pa.Buffer) -> None:
        """Add an Arrow message: one after the other they are an IPC stream."""
        self._disk.write(fd, [message], self._at)
        self._at += message.size

    def _add_to_copy(self, block: Block) -> None:
        """Keep a block in memory, unless there is too much of that."""
        if self._copy is not None and self._staging.may_hold(self.id, block):
            self._copy.append(block)
            return
        self._copy = None
        self._staging.release(self.id)
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def _or_copied(self) -> Iterator[None]:
        """Let the copy do if the disk fails; without one, give the stage up."""
        try:
            yield
        except OSError as error:
            if self._copy is None:
                self.close()
                raise
            self._failure = error
            self._let_go()

    def _let_go(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            self._disk.close(fd)

    def close(self) -> None:
        """Let go of the file; an unfinished stage is deleted."""
        self._let_go()
        if not self._finished:
            self._staging.discard(self.id)


class Staging:
    """The folder of staged blocks.

    Stages are forgotten with the process: their writers, told that a stage is gone, write it again.
    """

    def __init__(self, directory: Path, disk: Disk) -> None:
        self.directory = directory
        self.disk = disk
        self._finished: dict[str, tuple[Contents, float]] = {}
        self._claimed: set[str] = set()
        """Those of commits that are being carried out: not to be deleted by anybody else."""
        self._held_bytes: Counter[str] = Counter()
        """Of stages that are in memory."""
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True)

    def stage(
        self,
        queue: str,
        schema: pa.Schema,
        vet: Vet = lambda block: block,
        spare: int = 0,
        *,
        diskless: bool = False,
    ) -> Stage:
        """Begin a stage for a queue; see ``Contents``. Raises ``StorageFailed``."""
        contents = Contents(queue, schema, 0, 0, spare, diskless=diskless and spare > 0)
        return self.begun(contents, vet)

    def begun(self, contents: Contents, vet: Vet = lambda block: block) -> Stage:
        """Begin a stage. Raises ``StorageFailed``."""
        try:
            return Stage(self, contents, vet)
        except OSError as error:
            raise StorageFailed(f"cannot stage: {error.strerror or error}") from error

    def may_hold(self, stage_id: str, block: Block) -> bool:
        """Whether there is memory for this block of a stage, too; if so, it is taken."""
        with self._lock:
            if self._held_bytes.total() + block.nbytes > MAX_BYTES:
                return False
            self._held_bytes[stage_id] += block.nbytes
            return True

    def release(self, stage_id: str) -> None:
        """A stage needs no memory any more."""
        with self._lock:
            self._held_bytes.pop(stage_id, None)

    def finished(self, stage_id: str, contents: Contents) -> None:
        """A stage may be committed from now on."""
        self._finished[stage_id] = contents, time.monotonic()

    def contents(self, stage_id: str) -> Contents:
        """What a finished stage holds. Raises ``NoSuchStage``."""
        try:
            return self._finished[stage_id][0]
        except KeyError:
            raise _unknown(stage_id) from None

    def look(self, stage_id: str) -> Contents | None:
        """What a finished stage holds; ``None`` if there is no such stage."""
        found = self._finished.get(stage_id)
        return None if found is None else found[0]

    def is_diskless(self, stage_id: str) -> bool:
        """Whether a finished stage may wait in memory if the disk fails; not if it is gone."""
        found = self._finished.get(stage_id)
        return found is not None and found[0].diskless

    def path(self, stage_id: str) -> Path:
        """Where a stage lies."""
        return self.directory / (stage_id + SUFFIX)

    def blocks(self, stage_id: str) -> Iterator[Block]:
        """The blocks of a stage, none if it is gone."""
        found = self._finished.get(stage_id)
        if found is not None and found[0].held is not None:
            yield from found[0].held
            return
        try:
            with (
                pa.OSFile(str(self.path(stage_id)), "rb") as file,
                pa.ipc.open_stream(file) as reader,
            ):
                yield from reader
        except FileNotFoundError:
            return

    def take(self, stages: Sequence[str]) -> None:
        """Claim stages that are finished: all of them, or none. Raises ``NoSuchStage``."""
        with self._lock:
            for stage_id in stages:
                if stage_id not in self._finished:
                    raise _unknown(stage_id)
            self._claimed.update(stages)

    def claim(self, stages: Iterable[str]) -> None:
        """Keep stages, whoever gives them up, until they are disclaimed."""
        with self._lock:
            self._claimed.update(stages)

    def disclaim(self, stages: Iterable[str]) -> None:
        """Whoever claimed them needs them no more."""
        with self._lock:
            self._claimed.difference_update(stages)

    def discard(self, stage_id: str) -> None:
        """Delete a stage that nobody has claimed; one that is gone, or never was, is fine."""
        with self._lock:
            if stage_id in self._claimed:
                return
            self._finished.pop(stage_id, None)
            self._held_bytes.pop(stage_id, None)
        if not stage_id.isalnum():
            return
        with contextlib.suppress(FileNotFoundError):
            self.disk.unlink(self.path(stage_id))

    def discard_all(self) -> None:
        """Delete whatever an earlier process has left."""
        for stage_id in self._left():
            self.discard(stage_id)

    def set_aside(self) -> None:
        """Keep whatever an earlier process has left and nobody has claimed. Raises ``OSError``."""
        for stage_id in self._left():
            if stage_id not in self._claimed:
                path = self.path(stage_id)
                self.disk.rename(path, path.with_suffix(KEPT))

    def _left(self) -> list[str]:
        names = self.disk.listing(self.directory)
        return [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]

    def discard_older(self, seconds: float) -> int:
        """Delete finished stages that nobody came for; returns how many."""
        limit = time.monotonic() - seconds
        old = [key for key, (_, since) in list(self._finished.items()) if since < limit]
        for stage_id in old:
            self.discard(stage_id)
        return len(old)

    def __len__(self) -> int:
        return len(self._finished)


def _unknown(stage_id: str) -> NoSuchStage:
    return NoSuchStage(f"there is no stage {stage_id!r}: committed, aborted, or lost in a restart")


# ── overflow ──
# Overflow: dead letters that their queue, or its disk, cannot take now, in memory until it can.
#
# A lane is not to stand still because nobody looks after its dead letters. What is here is gone
# with
# the process, and beyond a bound the oldest are dropped: both are worse than a larger queue,
# which
# is why it is logged and counted.

log = logging.getLogger(__name__)


class Overflow:
    """What waits for room, by queue. Safe to use from any thread."""

    def __init__(self, queue: Callable[[str], BufferedQueue], max_bytes: int = MAX_BYTES) -> None:
        self._queue = queue
        self._max_bytes = max_bytes
        self._waiting: dict[str, deque[Block]] = {}
        self._lock = threading.Lock()
        self.dropped: Counter[str] = Counter()
        """Events by queue: the oldest, beyond a bound, and what was left at the end."""

    def take(self, name: str, blocks: Iterable[Block], most: int) -> None:
        """Keep blocks for a queue; if there are more than so many events then, drop the oldest."""
        lost: Counter[str] = Counter()
        with self._lock:
            waiting = self._waiting.setdefault(name, deque())
            sizes = {each: sum(map(_size, found)) for each, found in self._waiting.items()}
            for block in blocks:
                if block.num_rows:
                    waiting.append(block)
                    sizes[name] += _size(block)
                    self._shrink(sizes, lost)
            over = sum(block.num_rows for block in waiting) - most
            lost[name] += max(0, over)
            while over > 0:
                oldest = waiting.popleft()
                if oldest.num_rows > over:
                    waiting.appendleft(oldest.slice(over))
                over -= oldest.num_rows
        log.warning("queue %s cannot take its dead letters now: they wait in memory", name)
        for each, events in (+lost).items():
            self._drop(each, events)

    def _shrink(self, sizes: dict[str, int], lost: Counter[str]) -> None:
        """Give up the oldest of where most waits until all fits; counts what is lost by that."""
        while sum(sizes.values()) > self._max_bytes:
            name = max(sizes, key=sizes.__getitem__)
            oldest = self._waiting[name].popleft()
            sizes[name] -= _size(oldest)
            lost[name] += oldest.num_rows

    def drain(self) -> int:
        """Bring to the queues what they can take; returns how many events they took."""
        taken = 0
        for name in list(self._waiting):
            with self._lock:
                taken += self._drain_one(name, self._waiting[name])
        return taken

    def _drain_one(self, name: str, waiting: deque[Block]) -> int:
        taken = 0
        while waiting:
            count = self._published(name, waiting[0])
            taken += count
            oldest = waiting.popleft()
            if count < oldest.num_rows:
                waiting.appendleft(oldest.slice(count))
                break
        return taken

    def close(self) -> None:
        """A last try; what is left is dropped, and counted."""
        self.drain()
        for name, count in self.events().items():
            self._drop(name, count)

    def events(self) -> dict[str, int]:
        """How many wait, by queue."""
        with self._lock:
            counts = {
                name: sum(block.num_rows for block in blocks)
                for name, blocks in self._waiting.items()
            }
        return {name: count for name, count in counts.items() if count}

    def _published(self, name: str, block: Block) -> int:
        """How many events of a block the queue has taken: not all, if it is full."""
        try:
            queue = self._queue(name)
            stats = queue.stats()
            if stats.max_size is not None:
                block = block.slice(0, max(0, stats.max_size - stats.size))
            if block.num_rows:
                queue.producer().publish_block(block, timeout=0)
        except QueueFull as error:
            return error.accepted
        except TurnlaneError as error:
            log.warning("dead letters still wait for queue %s: %s", name, error)
            return 0
        return block.num_rows

    def _drop(self, name: str, events: int) -> None:
        log.error(
            "%d dead letters of queue %s are dropped: there is no room for them", events, name
        )
        self.dropped[name] += events
        try:
            queue = self._queue(name)
        except TurnlaneError:
            return  # it is gone itself
        # They were the oldest here, but to the queue they are those that never came in.
        queue.count_dropped(Outcome.NEWEST, events)


def _size(block: Block) -> int:
    return block.nbytes
