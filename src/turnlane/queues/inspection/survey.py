"""The chunk files of a directory at one moment, opened by nobody, changed by nothing here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from turnlane.errors import NotAQueue
from turnlane.queues.log.chunks import ChunkSchema, chunk_name, list_chunks, read_schema
from turnlane.queues.log.files import Disk

NO_LIMIT = 1 << 64


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A chunk, as long as it was when it was looked at: what is appended later is not seen."""

    first: int
    path: Path
    size: int
    schema: ChunkSchema | None
    """None if the schema frame is damaged."""
    foreign: bool = False
    limit: int = NO_LIMIT
    """The first offset of the next chunk, at which a reader changes over."""
    is_last: bool = False
    """Whether this is the one that an opening queue writes on."""
    is_trailing: bool = False
    """Whether it comes after that one, so that an opening queue sets it aside."""

    @property
    def readable(self) -> bool:
        """Whether events can be read from it."""
        return self.schema is not None and not self.foreign


@contextmanager
def opened(disk: Disk, path: Path) -> Iterator[int]:
    """A descriptor to read from."""
    fd = disk.open(path, write=False)
    try:
        yield fd
    finally:
        disk.close(fd)


def survey(directory: Path, disk: Disk, queue_id: str) -> list[ChunkFile]:
    """All chunks, in order. Raises ``NotAQueue`` for one of an unknown format."""
    found = []
    for first in list_chunks(directory, disk):
        with contextlib.suppress(FileNotFoundError):  # settled and removed since it was listed
            found.append(_look(directory / chunk_name(first), first, disk, queue_id))
    return _placed(found)


def _look(path: Path, first: int, disk: Disk, queue_id: str) -> ChunkFile:
    with opened(disk, path) as fd:
        try:
            schema = read_schema(disk, fd)
        except NotAQueue as error:
            raise NotAQueue(f"{path}: {error}") from None
        foreign = schema is not None and bool(queue_id) and schema.queue_id != queue_id
        return ChunkFile(first, path, disk.size(fd), schema, foreign)


def _placed(chunks: Sequence[ChunkFile]) -> list[ChunkFile]:
    last = max((at for at, chunk in enumerate(chunks) if chunk.readable), default=-1)
    return [
        replace(
            chunk,
            limit=chunks[at + 1].first if at < last else NO_LIMIT,
            is_last=at == last,
            is_trailing=at > last,
        )
        for at, chunk in enumerate(chunks)
    ]
