"""Staging: blocks on the node's disk that are in no queue until a commit publishes them.

A stage is one file, an Arrow IPC stream, for one target queue. Only stages of recorded commits
survive the process: a writer whose stage is gone writes it again.

A stage may have a *copy in memory* while it is written (``diskless`` on the wire). If the disk
fails, the copy takes the place of the file. Its events are dead letters, and a lane must
not stop because their queue is full or its disk fails. The :class:`OverflowBuffer` holds such
events until their queue takes them.
"""

from __future__ import annotations

import contextlib
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
from turnlane.logs import get_logger
from turnlane.queues.buffered import BufferedQueue
from turnlane.runtime import Closeable
from turnlane.storage.disk_io import Disk

log = get_logger(__name__)

STAGE_SUFFIX: Final = ".stage"
KEPT_SUFFIX: Final = ".kept"
"""The suffix of stages that a person has to look at: the node never deletes them."""

_EVENT_REF_FIELDS: list[tuple[str, pa.DataType]] = [("first", pa.int64()), ("bits", pa.binary())]
EVENT_REF_SCHEMA: Final = pa.schema(_EVENT_REF_FIELDS)
"""The schema of a stage that holds only references to events, see ``event_refs.py``. Each row is a
stretch of offsets: one bit for each offset from ``first`` on."""

BlockCheck = Callable[[Block], Block]
"""Returns a block in the form that its queue takes; raises the permanent errors of the queue."""

MAX_BYTES: Final = 64 << 20
"""The limit for the copies of stages in memory, and for the overflow buffer."""


class StageContents(NamedTuple):
    """The description of a finished stage."""

    queue: str
    schema: pa.Schema
    events: int = 0
    bytes: int = 0
    max_events_in_memory: int = 0
    """How many events may wait in memory if the queue has no room for them; 0: none."""
    has_memory_copy: bool = False
    """Whether they may also wait in memory if the disk is full or fails."""
    blocks: Sequence[Block] | None = None
    """The blocks, if the disk did not take them."""
    source: str | None = None
    """The queue that holds the events, if the stage holds only references to them."""
    source_id: str = ""
    """The id of the source queue."""


class Stage(Closeable):
    """A stage that is being written. It is deleted unless :meth:`finish` was called."""

    def __init__(self, staging: Staging, contents: StageContents, check: BlockCheck) -> None:
        self.id = uuid.uuid4().hex
        self._contents = contents
        self._check = check
        self.events = 0
        self._bytes = 0
        self._staging = staging
        self._finished = False
        self._disk = staging.disk
        self._fd: int | None = None
        self._position = 0
        self._failure: OSError | None = None
        """The disk error after which the stage continues in memory."""
        self._copy: list[Block] | None = [] if contents.has_memory_copy else None
        """The copy in memory. Needed from the first block on, because the disk may not return
        data that it could not sync."""
        with self._continue_in_memory():
            self._fd = self._disk.open(staging.path(self.id), create=True)
            schema = contents.schema if contents.source is None else EVENT_REF_SCHEMA
            self._write(self._fd, schema.serialize())

    def add(self, block: Block) -> None:
        """Stage another block. After an error the stage is unusable.

        Raises the errors of publishing except ``QueueFull``, and ``OSError``.
        """
        block = self._check(block)
        self.add_counted(block, block.num_rows, block.nbytes)

    def add_counted(self, block: Block, events: int, size: int) -> None:
        """Stage a block that stands for ``events`` events of about ``size`` bytes. ``OSError``."""
        self._add_to_copy(block)
        if self._fd is not None:
            with self._continue_in_memory():
                self._write(self._fd, block.serialize())
        self.events += events
        self._bytes += size

    def finish(self) -> str:
        """Sync the stage, unless it is in memory; return the id for the commit."""
        if self._fd is not None:
            with self._continue_in_memory():
                self._disk.sync(self._fd)
                self._disk.sync_directory(self._staging.directory)
        blocks = None if self._failure is None else self._copy
        if blocks is None:
            self._staging.release_memory(self.id)
        contents = self._contents._replace(events=self.events, bytes=self._bytes, blocks=blocks)
        self._staging.mark_finished(self.id, contents)
        self._finished = True
        return self.id

    def _write(self, fd: int, message: pa.Buffer) -> None:
        """Append an Arrow message; the messages together are an IPC stream."""
        self._disk.write(fd, [message], self._position)
        self._position += message.size

    def _add_to_copy(self, block: Block) -> None:
        """Keep a block in memory; without room for it, continue without a copy."""
        if self._copy is not None and self._staging.reserve_memory(self.id, block):
            self._copy.append(block)
            return
        self._copy = None
        self._staging.release_memory(self.id)
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def _continue_in_memory(self) -> Iterator[None]:
        """After a disk error, continue with the copy in memory; without a copy, delete the stage.

        Raises ``OSError``.
        """
        try:
            yield
        except OSError as error:
            if self._copy is None:
                self.close()
                raise
            self._failure = error
            self._close_file()

    def _close_file(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            self._disk.close(fd)

    def close(self) -> None:
        """Close the file, and delete the stage if it is not finished."""
        self._close_file()
        if not self._finished:
            self.discard()

    def discard(self) -> None:
        """Delete the stage, also if it is finished."""
        self._staging.discard(self.id)


def finish_all(stages: Iterable[Stage]) -> list[str]:
    """Sync all stages, or none; return their ids for the commit. Raises ``OSError``."""
    finished: list[Stage] = []
    try:
        for stage in stages:
            stage.finish()
            finished.append(stage)
    except OSError:
        for stage in finished:
            stage.discard()
        raise
    return [stage.id for stage in finished]


class Staging:
    """The directory of stages. Safe to use from any thread."""

    def __init__(self, directory: Path, disk: Disk) -> None:
        self.directory = directory
        self.disk = disk
        self._finished: dict[str, tuple[StageContents, float]] = {}
        self._claimed: set[str] = set()
        """Stages of running commits: :meth:`discard` does not delete them."""
        self._memory: Counter[str] = Counter()
        """Bytes of the copies in memory, by stage."""
        self._lock = threading.Lock()
        disk.create_directory(directory)

    def stage(self, contents: StageContents, check: BlockCheck = lambda block: block) -> Stage:
        """Begin a stage with this description. Raises ``StorageFailed``."""
        try:
            return Stage(self, contents, check)
        except OSError as error:
            raise StorageFailed(f"cannot stage: {error.strerror or error}") from error

    def reserve_memory(self, stage_id: str, block: Block) -> bool:
        """Reserve memory for a block of a stage; false if the limit is reached."""
        with self._lock:
            if self._memory.total() + block.nbytes > MAX_BYTES:
                return False
            self._memory[stage_id] += block.nbytes
            return True

    def release_memory(self, stage_id: str) -> None:
        """Release the memory of a stage."""
        with self._lock:
            self._memory.pop(stage_id, None)

    def mark_finished(self, stage_id: str, contents: StageContents) -> None:
        """Make a stage available for commits."""
        self._finished[stage_id] = contents, time.monotonic()

    def get_contents(self, stage_id: str) -> StageContents:
        """Return the description of a finished stage. Raises ``NoSuchStage``."""
        found = self.find_contents(stage_id)
        if found is None:
            raise NoSuchStage(
                f"there is no stage {stage_id!r}: it was committed or aborted, or the node was "
                "restarted"
            )
        return found

    def find_contents(self, stage_id: str) -> StageContents | None:
        """Return the description of a finished stage, ``None`` if there is no such stage."""
        found = self._finished.get(stage_id)
        return None if found is None else found[0]

    def path(self, stage_id: str) -> Path:
        """Return the path of a stage's file."""
        return self.directory / (stage_id + STAGE_SUFFIX)

    def blocks(self, stage_id: str) -> Iterator[Block]:
        """Yield the blocks of a stage; none if the stage is gone."""
        found = self.find_contents(stage_id)
        if found is not None and found.blocks is not None:
            yield from found.blocks
            return
        try:
            with (
                pa.OSFile(str(self.path(stage_id)), "rb") as file,
                pa.ipc.open_stream(file) as reader,
            ):
                yield from reader
        except FileNotFoundError:
            return

    def claim_finished(self, stages: Sequence[str]) -> None:
        """Claim finished stages, all of them or none. Raises ``NoSuchStage``."""
        with self._lock:
            for stage_id in stages:
                self.get_contents(stage_id)
            self._claimed.update(stages)

    def claim(self, stages: Iterable[str]) -> None:
        """Protect stages from :meth:`discard` until the claims are released."""
        with self._lock:
            self._claimed.update(stages)

    def release_claims(self, stages: Iterable[str]) -> None:
        """Release the claims on stages."""
        with self._lock:
            self._claimed.difference_update(stages)

    def discard(self, stage_id: str) -> None:
        """Delete a stage unless it is claimed. A stage that does not exist is not an error."""
        with self._lock:
            if stage_id in self._claimed:
                return
            self._finished.pop(stage_id, None)
            self._memory.pop(stage_id, None)
        if not stage_id.isalnum():
            return
        with contextlib.suppress(FileNotFoundError):
            self.disk.unlink(self.path(stage_id))

    def discard_leftovers(self) -> None:
        """Delete the unclaimed stages of an earlier process. Raises ``OSError``."""
        for stage_id in self._list_files():
            self.discard(stage_id)

    def set_aside_unclaimed(self) -> None:
        """Rename the unclaimed stages of an earlier process to ``.kept``. Raises ``OSError``."""
        for stage_id in self._list_files():
            if stage_id not in self._claimed:
                path = self.path(stage_id)
                self.disk.rename(path, path.with_suffix(KEPT_SUFFIX))

    def _list_files(self) -> list[str]:
        names = self.disk.listing(self.directory)
        return [name.removesuffix(STAGE_SUFFIX) for name in names if name.endswith(STAGE_SUFFIX)]

    def discard_older(self, seconds: float) -> int:
        """Delete the stages that were finished more than ``seconds`` ago; return the number."""
        limit = time.monotonic() - seconds
        old = [key for key, (_, since) in list(self._finished.items()) if since < limit]
        for stage_id in old:
            self.discard(stage_id)
        return len(old)

    def __len__(self) -> int:
        return len(self._finished)


class OverflowBuffer:
    """Dead letters that wait in memory until their queue has room. Safe to use from any thread.

    The events are lost with the process, and beyond a limit the oldest are dropped. Both are
    logged and counted; enlarge the queue to avoid them.
    """

    def __init__(self, queue: Callable[[str], BufferedQueue], max_bytes: int = MAX_BYTES) -> None:
        self._queue = queue
        self._max_bytes = max_bytes
        self._waiting: dict[str, deque[Block]] = {}
        self._lock = threading.Lock()
        self.dropped: Counter[str] = Counter()
        """Events dropped, by queue: the oldest beyond a limit; at the end, those that are left."""

    def add(self, name: str, blocks: Iterable[Block], max_events: int) -> None:
        """Keep blocks for a queue; drop the oldest beyond ``max_events`` events."""
        lost: Counter[str] = Counter()
        with self._lock:
            waiting = self._waiting.setdefault(name, deque())
            sizes = {
                queue: sum(block.nbytes for block in backlog)
                for queue, backlog in self._waiting.items()
            }
            for block in blocks:
                if block.num_rows:
                    waiting.append(block)
                    sizes[name] += block.nbytes
                while sum(sizes.values()) > self._max_bytes:
                    # Drop the oldest block of the largest backlog until all fit.
                    largest = max(sizes, key=sizes.__getitem__)
                    oldest = self._waiting[largest].popleft()
                    sizes[largest] -= oldest.nbytes
                    lost[largest] += oldest.num_rows
            excess = sum(block.num_rows for block in waiting) - max_events
            lost[name] += max(0, excess)
            while excess > 0:
                oldest = waiting.popleft()
                if oldest.num_rows > excess:
                    waiting.appendleft(oldest.slice(excess))
                excess -= oldest.num_rows
        log.warning(
            "dead_letters.wait_in_memory", queue=name, hint="the queue is full or its disk fails"
        )
        for queue, events in (+lost).items():
            self._drop(queue, events)

    def drain(self) -> int:
        """Publish as many events as the queues take; return the number."""
        taken = 0
        for name in list(self._waiting):
            with self._lock:
                waiting = self._waiting[name]
                is_full = False
                while waiting and not is_full:
                    oldest = waiting.popleft()
                    count = self._publish(name, oldest)
                    taken += count
                    is_full = count < oldest.num_rows
                    if is_full:
                        waiting.appendleft(oldest.slice(count))
        return taken

    def close(self) -> None:
        """Try a last time to publish; drop and count the rest."""
        self.drain()
        for name, count in self.events().items():
            self._drop(name, count)

    def events(self) -> dict[str, int]:
        """Return the number of waiting events by queue."""
        with self._lock:
            counts = {
                name: sum(block.num_rows for block in blocks)
                for name, blocks in self._waiting.items()
            }
        return {name: count for name, count in counts.items() if count}

    def _publish(self, name: str, block: Block) -> int:
        """Publish a block; return how many of its events the queue has taken."""
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
            log.warning("dead_letters.still_waiting", queue=name, error=error)
            return 0
        return block.num_rows

    def _drop(self, name: str, events: int) -> None:
        log.error(
            "dead_letters.dropped",
            queue=name,
            events=events,
            hint="neither the queue nor the memory has room; enlarge or empty the queue",
        )
        self.dropped[name] += events
        try:
            queue = self._queue(name)
        except TurnlaneError:
            return  # the queue itself is gone
        # They were the oldest here. For the queue they are new events that it could not take.
        queue.count_dropped(Outcome.NEWEST, events)
