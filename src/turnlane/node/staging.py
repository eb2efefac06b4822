"""Staged blocks: written to the node's disk, in no queue until a commit says so."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from turnlane.closing import Closing
from turnlane.errors import NoSuchStage, StorageFailed
from turnlane.events import Block
from turnlane.queues.log.files import Disk

SUFFIX = ".stage"
KEPT = ".kept"
"""Stages that a person has to look at: nobody deletes them."""

Vet = Callable[[Block], Block]
"""A block as its queue will take it; raises what the queue would raise for ever."""


class Contents(NamedTuple):
    """What a finished stage holds."""

    queue: str
    schema: pa.Schema
    events: int
    bytes: int
    spare: int = 0
    """So many events may wait in memory if the queue has no room for them; 0: none."""


class Stage(Closing):
    """A file of blocks for one queue, being written; given up unless :meth:`finish` was called."""

    def __init__(
        self, staging: Staging, queue: str, schema: pa.Schema, vet: Vet, spare: int
    ) -> None:
        self.id = uuid.uuid4().hex
        self._queue = queue
        self._schema = schema
        self._vet = vet
        self._spare = spare
        self.events = 0
        self._bytes = 0
        self._staging = staging
        self._finished = False
        self._disk = staging.disk
        self._fd = self._disk.open(staging.path(self.id), create=True)
        self._at = 0
        try:
            self._write(schema.serialize())
        except OSError:
            self.close()
            raise

    def add(self, block: Block) -> None:
        """Stage another block. After an error the stage is to be given up.

        Raises what publishing it would, but never ``QueueFull``; ``OSError``.
        """
        block = self._vet(block)
        self._write(block.serialize())
        self.events += block.num_rows
        self._bytes += block.nbytes

    def finish(self) -> str:
        """Make it last; returns the id to commit it by."""
        self._disk.sync(self._fd)
        self._disk.sync_directory(self._staging.directory)
        contents = Contents(self._queue, self._schema, self.events, self._bytes, self._spare)
        self._staging.finished(self.id, contents)
        self._finished = True
        return self.id

    def _write(self, message: pa.Buffer) -> None:
        """Add an Arrow message: one after the other they are an IPC stream."""
        self._disk.write(self._fd, [message], self._at)
        self._at += message.size

    def close(self) -> None:
        """Let go of the file; an unfinished stage is deleted."""
        self._disk.close(self._fd)
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
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True)

    def stage(
        self, queue: str, schema: pa.Schema, vet: Vet = lambda block: block, spare: int = 0
    ) -> Stage:
        """Begin a stage for a queue. Raises ``StorageFailed``."""
        try:
            return Stage(self, queue, schema, vet, spare)
        except OSError as error:
            raise StorageFailed(f"cannot stage: {error.strerror or error}") from error

    def finished(self, stage_id: str, contents: Contents) -> None:
        """A stage may be committed from now on."""
        self._finished[stage_id] = contents, time.monotonic()

    def contents(self, stage_id: str) -> Contents:
        """What a finished stage holds. Raises ``NoSuchStage``."""
        try:
            return self._finished[stage_id][0]
        except KeyError:
            raise _unknown(stage_id) from None

    def queue_of(self, stage_id: str) -> str | None:
        """The queue that a finished stage is for; ``None`` if there is no such stage."""
        found = self._finished.get(stage_id)
        return None if found is None else found[0].queue

    def path(self, stage_id: str) -> Path:
        """Where a stage lies."""
        return self.directory / (stage_id + SUFFIX)

    def blocks(self, stage_id: str) -> Iterator[Block]:
        """The blocks of a stage, none if it is gone."""
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
