"""When a file is the same file: across renames, restarts, truncation and inodes used again.

Device and inode say which file it is, until the inode is used again or the content replaced. So
some of the content is remembered too: the *head*, which is the first line (or as much of it as was
there), and the bytes just *before* a position. A file that was truncated and written anew differs
in one of them, or is shorter than the position.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import NamedTuple, Self

from turnlane.queues.producer import hashed

HEAD_BYTES = 1024
"""As much of the first line is looked at."""

BEFORE_BYTES = 64
"""So many bytes before a position are compared whenever a file is read on from there."""

GENERATIONS = 256
"""So many generations are looked for when the positions file is lost."""


class FileKey(NamedTuple):
    """What the operating system calls the same file."""

    device: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """The key of a file that was looked at."""
        return cls(status.st_dev, status.st_ino)


class Mark(NamedTuple):
    """A few bytes of a file, remembered by their length and their hash."""

    length: int
    digest: str

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Remember these bytes."""
        return cls(len(data), hashlib.blake2b(data, digest_size=8).hexdigest())

    def holds(self, fd: int, at: int) -> bool:
        """Whether the file still has them at byte ``at``."""
        return at >= 0 and self == Mark.of(os.pread(fd, self.length, at))


NOTHING = Mark.of(b"")


def base_id(label: str, key: FileKey, head: Mark) -> str:
    """What all generations of a file have in common as producers."""
    return f"files/{label}/{key.device}/{key.inode}/{head.length}-{head.digest}"


def fresh_id(base: str, sequences: Mapping[bytes, object]) -> str:
    """An id under which the queue has nothing yet."""
    generation = 0
    while hashed(f"{base}/{generation}") in sequences:
        generation += 1
    return f"{base}/{generation}"


def latest_id(base: str, sequences: Mapping[bytes, object]) -> str | None:
    """The id under which the queue has the newest lines of a file; ``None`` if it has none."""
    ids = (f"{base}/{generation}" for generation in reversed(range(GENERATIONS)))
    return next((each for each in ids if hashed(each) in sequences), None)
