"""The chunks of an open log, shared by its one writer and its readers.

The list is replaced, never changed, and a chunk's ``size`` grows only after its bytes are written.
So readers need no lock to see a consistent log; what they see may merely be a moment old.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

MARK_EVERY = 256 * 1024
"""Bytes between two marks of a chunk: how far a reader that seeks has to walk at most."""


class ChunkSpan(NamedTuple):
    """A chunk as its owner sees it: offsets ``first`` to ``end - 1``, bytes of its file."""

    first: int
    end: int
    bytes: int


@dataclass(slots=True, eq=False)
class Chunk:
    """One chunk file. Compared by identity: a file replaced under its name is another chunk."""

    first: int
    path: Path
    size: int
    """Readers go no further than this."""
    end: int
    """The offset after its last event, as far as it is known."""
    schema: pa.Schema | None = None
    """Read when it is first needed."""
    data_start: int = 0
    """Where events begin; 0 until the schema is read."""
    synced_size: int = 0
    synced_end: int = 0
    unsaved: bool = False
    """Holds unreadable bytes of which there is no copy: never to be unlinked."""
    marks: list[tuple[int, int]] = field(default_factory=list)
    """Some frames' first offset and byte, in order."""

    def mark(self, offset: int, byte: int) -> None:
        """Remember that the frame at ``byte`` begins with ``offset``; most are not worth it."""
        last = self.marks[-1][1] if self.marks else self.data_start
        if byte >= last + MARK_EVERY:
            self.marks.append((offset, byte))

    def before(self, offset: int) -> tuple[int, int]:
        """An offset and byte of a frame at or before the one that holds ``offset``."""
        marks = self.marks
        at = bisect_right(marks, offset, key=lambda mark: mark[0]) - 1
        # Two threads may have marked out of order: a mark beyond the offset must not be used.
        usable = at >= 0 and marks[at][0] <= offset
        return marks[at] if usable else (self.first, self.data_start)

    def cut(self) -> None:
        """Give up what was not synced."""
        self.size, self.end = self.synced_size, self.synced_end
        self.marks = [mark for mark in self.marks if mark[1] < self.size]


class Catalog:
    """The chunks in order. Reading needs no lock; changing takes the catalog's own."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self.chunks: tuple[Chunk, ...] = tuple(chunks)
        self._lock = threading.Lock()

    def add(self, chunk: Chunk) -> None:
        """Add a chunk; one of the same name is replaced."""
        with self._lock:
            others = (other for other in self.chunks if other.first != chunk.first)
            self.chunks = tuple(sorted([*others, chunk], key=lambda one: one.first))

    def discard(self, chunk: Chunk) -> None:
        """Take a chunk out, if it is still there."""
        with self._lock:
            self.chunks = tuple(other for other in self.chunks if other is not chunk)

    def named(self, first: int) -> Chunk | None:
        """The chunk with this name."""
        return next((chunk for chunk in self.chunks if chunk.first == first), None)

    def at(self, offset: int) -> Chunk | None:
        """The chunk in which to look for ``offset``: the last that begins at or before it."""
        chunks = self.chunks
        if not chunks:
            return None
        return chunks[max(0, bisect_right(chunks, offset, key=lambda chunk: chunk.first) - 1)]

    def after(self, chunk: Chunk) -> Chunk | None:
        """The chunk that follows."""
        chunks = self.chunks
        at = bisect_right(chunks, chunk.first, key=lambda other: other.first)
        return chunks[at] if at < len(chunks) else None

    def spans(self, end: int) -> list[ChunkSpan]:
        """All chunks; each ends where the next begins, the last at ``end``."""
        chunks = self.chunks
        ends = [*(chunk.first for chunk in chunks[1:]), end][: len(chunks)]
        return [
            ChunkSpan(chunk.first, stop, chunk.size)
            for chunk, stop in zip(chunks, ends, strict=True)
        ]

    def __contains__(self, chunk: object) -> bool:
        return any(other is chunk for other in self.chunks)
