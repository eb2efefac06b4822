"""The positions file: which files there were, and how far they had come.

It is written whole, in one durable step, before a file's first line is published, and then every
second or so. It only ever says what the queue has acked, so it may be behind, never ahead.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import logging
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import Field, field_validator

from turnlane.errors import DirectoryUnusable
from turnlane.inputs.api import InputSettings
from turnlane.queues.api import Ack, FlowControl
from turnlane.queues.buffered import BufferedQueue
from turnlane.storage.disk_io import Disk
from turnlane.units import Duration, Size

# ── identity ──
# When a file is the same file: across renames, restarts, truncation and inodes used again.
#
# Device and inode say which file it is, until the inode is used again or the content replaced.
# So
# some of the content is remembered too: the *head*, which is the first line (or as much of it as
# was
# there), and the bytes just *before* a position. A file that was truncated and rewritten
# differs
# in one of them, or is shorter than the position.

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


def fresh_id(base: str, queue: BufferedQueue) -> str:
    """An id under which the queue has nothing yet."""
    generation = 0
    while queue.known_sequence(f"{base}/{generation}") is not None:
        generation += 1
    return f"{base}/{generation}"


def latest_id(base: str, queue: BufferedQueue) -> str | None:
    """The id under which the queue has the newest lines of a file; ``None`` if it has none."""
    ids = (f"{base}/{generation}" for generation in reversed(range(GENERATIONS)))
    return next((each for each in ids if queue.known_sequence(each) is not None), None)


log = logging.getLogger(__name__)

VERSION = 1


@dataclasses.dataclass(slots=True)
class Entry:
    """The saved state of one file."""

    key: FileKey
    id: str
    """The producer that publishes its lines."""
    path: str
    """Where it was last."""
    source: str
    """What it was called when it was first seen."""
    head: Mark
    offset: int
    """Every line below this byte is acked."""
    before: Mark
    """What stands just before that."""
    seen: float
    """When it was last there, in seconds since the epoch."""

    def written(self) -> dict[str, Any]:
        """As JSON can keep it."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def read(cls, written: dict[str, Any]) -> Self:
        """The entry that was written. Raises ``TypeError``, ``ValueError`` or ``KeyError``."""
        fields = dict(written)
        fields["key"] = FileKey(*map(int, fields["key"]))
        for name in ("head", "before"):
            length, digest = fields[name]
            fields[name] = Mark(int(length), str(digest))
        entry = cls(**fields)
        if not 0 <= entry.before.length <= int(entry.offset) < 1 << 62 or entry.head == NOTHING:
            raise ValueError(f"{entry.path}: offset {entry.offset} makes no sense")
        return entry


class PositionsFile:
    """The file, read once and written often. For one thread."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self._path = path
        self._disk = disk or Disk()
        self.found = False
        """Whether there was a file, and it could be read."""
        self.spoilt = False
        """Whether a positions file was unreadable: then no file counts as new."""
        self.complete = False
        """Whether every file that was read has an entry."""

    def load(self) -> list[Entry]:
        """The saved positions. An unreadable file is kept under another name.

        Raises ``DirectoryUnusable`` if it cannot be read at all.
        """
        try:
            return self._load()
        except OSError as error:
            raise DirectoryUnusable(f"{self._path}: {error.strerror or error}") from error

    def _load(self) -> list[Entry]:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        try:
            saved = json.loads(content)
            if saved["version"] != VERSION:
                raise ValueError(f"version {saved['version']} is not {VERSION}")  # noqa: TRY301
            entries = [Entry.read(each) for each in saved["files"]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self._put_aside(error)
            return []
        self.found = True
        self.complete = bool(saved["complete"])
        return entries

    def _put_aside(self, error: Exception) -> None:
        self.spoilt = True
        aside = self._path.with_name(self._path.name + ".bad")
        self._disk.rename(self._path, aside)
        log.error("%s makes no sense (%s); kept as %s", self._path, error, aside.name)

    def save(self, entries: list[Entry], *, complete: bool) -> None:
        """Replace the saved positions. Raises ``OSError``."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        saved: dict[str, Any] = {"version": VERSION, "complete": complete}
        saved["files"] = [entry.written() for entry in entries]
        self._disk.write_whole(self._path, json.dumps(saved, separators=(",", ":")).encode())
        self.found = True


# ── progress ──
# How far one file's lines have come, as the queue's acks tell it.


class _Step(NamedTuple):
    """Lines that were published: their end in the queue, and in the file."""

    end: int
    offset: int
    before: Mark


class Progress:
    """The acked position of a file. Steps come from one thread, acks from another."""

    def __init__(self, offset: int = 0, before: Mark = NOTHING) -> None:
        self._lock = threading.Lock()
        self._steps: deque[_Step] = deque()
        self._end = 0
        self.offset = offset
        """Every line below this byte has reached the level, or was dropped by policy."""
        self.before = before
        self.lost = False
        """Whether the queue has lost lines that it had accepted, behind ``offset``."""

    @property
    def settled(self) -> bool:
        """Whether nothing is on its way."""
        return not self._steps

    def published(self, end: int | None, offset: int, before: Mark) -> None:
        """Lines up to byte ``offset`` are in the queue, below its offset ``end``.

        ``end`` is ``None`` if the queue's policy has dropped them all: no ack will come.
        """
        with self._lock:
            if end is None:
                end = self._steps[-1].end if self._steps else self._end
            self._steps.append(_Step(end, offset, before))
            self._settle()

    def acked(self, ack: Ack, *, drops_are_losses: bool) -> None:
        """The queue tells how far it has come."""
        with self._lock:
            if ack.dropped and drops_are_losses:
                self.lost = True
            self._end = max(self._end, ack.end)
            self._settle()

    def _settle(self) -> None:
        while not self.lost and self._steps and self._steps[0].end <= self._end:
            _, self.offset, self.before = self._steps.popleft()


# ── settings ──
# What can be configured about the ``files`` input.


class StartAt(enum.StrEnum):
    """Where to begin with files that are there when the input starts for the first time."""

    BEGINNING = "beginning"
    END = "end"


class FilesSettings(InputSettings):
    """Settings of the ``files`` input."""

    type: str = "files"
    flow: FlowControl = Field(FlowControl.FULL, description="Files can wait as long as needed.")
    paths: tuple[str, ...] = Field(
        min_length=1, description="Globs of the files to follow; ** is any depth of folders."
    )
    exclude: tuple[str, ...] = Field(
        (), description="Globs of files to leave out: of the name, or with a / of the whole path."
    )
    start_at: StartAt = Field(
        StartAt.BEGINNING,
        description="Where to begin with files that are there at the very first start.",
    )
    max_line_bytes: Size = Field(
        1 << 20, ge=1, description="Longer lines are split into events of this size, and counted."
    )
    scan_interval: Duration = Field(
        1.0, gt=0, description="How often to look for new, rotated and changed files."
    )
    rotate_wait: Duration = Field(
        10.0, description="How long a renamed or deleted file is read on after its last line."
    )
    partial_timeout: Duration | None = Field(
        None, description="Take a last line without newline after so long; default: never."
    )
    ignore_older: Duration | None = Field(
        None, description="Leave out files that were last changed longer ago, until they change."
    )
    close_inactive: Duration = Field(
        300.0, description="Close files that had nothing new for so long; they are still watched."
    )
    forget_after: Duration = Field(
        2 * 86_400.0, description="Forget files that have been gone for so long."
    )
    read_buffer: Size = Field(
        1 << 20, ge=64, le=1 << 28, description="How much is read of a file at once."
    )
    offsets: bool = Field(
        default=False, description="Add a column file_offset: the byte at which a line begins."
    )

    @field_validator("paths", "exclude", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("paths")
    @classmethod
    def _absolute(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        if not all(paths):
            raise ValueError("an empty path matches nothing; write a glob such as /var/log/*.log")
        return tuple(map(os.path.abspath, paths))
