"""One followed file: its identity, its next lines, and its acked position.

A device and an inode identify a file until the inode is reused or the content is replaced. So the
reader also remembers some of the content: the *head*, which is the first line (or the part of it
that was there), and the bytes just *before* a position. A file that was truncated and rewritten
differs in one of them, or is shorter than the position.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from turnlane.databases.sqlite import find_database_inodes
from turnlane.formats.lines import Lines, split_lines
from turnlane.logs import get_logger
from turnlane.queues.api import Ack
from turnlane.queues.producer import BufferedProducer

log = get_logger(__name__)

HEAD_BYTES = 1024
"""The most bytes of the first line that identify a file."""

BEFORE_BYTES = 64
"""Bytes before a position that are compared whenever reading continues there."""


class FileKey(NamedTuple):
    """The identity of a file in the operating system."""

    device: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Return the key of a file by its status."""
        return cls(status.st_dev, status.st_ino)


class Fingerprint(NamedTuple):
    """The length and the hash of a few bytes of a file."""

    length: int
    digest: str

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Return the fingerprint of these bytes."""
        return cls(len(data), hashlib.blake2b(data, digest_size=8).hexdigest())

    def matches(self, fd: int, at: int) -> bool:
        """Whether the file still has these bytes at byte ``at``."""
        return at >= 0 and self == Fingerprint.of(os.pread(fd, self.length, at))


EMPTY = Fingerprint.of(b"")


@dataclass(slots=True)
class SavedFile:
    """The state of one file in the positions file. The names of the fields are on disk."""

    key: FileKey
    id: str
    """The producer that publishes its lines."""
    path: str
    """Its last path."""
    source: str
    """Its path when it was found first: the ``source`` of its events."""
    head: Fingerprint
    offset: int
    """Every line below this byte is acked."""
    before: Fingerprint
    """The bytes just before ``offset``."""
    seen: float
    """When it existed last, in seconds since the epoch."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON can keep them."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Return the saved state. Raises ``TypeError``, ``ValueError`` or ``KeyError``."""
        fields = dict(content)
        fields["key"] = FileKey(*map(int, fields["key"]))
        for name in ("head", "before"):
            length, digest = fields[name]
            fields[name] = Fingerprint(int(length), str(digest))
        saved = cls(**fields)
        has_texts = all(isinstance(each, str) for each in (saved.id, saved.path, saved.source))
        has_numbers = type(saved.offset) is int and isinstance(saved.seen, int | float)
        if not has_texts or not has_numbers:
            raise TypeError(f"{saved.path}: a field has the wrong type")
        if not 0 <= saved.before.length <= saved.offset < 1 << 62 or saved.head == EMPTY:
            raise ValueError(f"{saved.path}: offset {saved.offset} is not possible")
        return saved


class _PublishedLines(NamedTuple):
    """Lines in the queue: their end in the queue, and in the file."""

    end: int
    offset: int
    before: Fingerprint


class AckProgress:
    """The acked position of a file. One thread publishes, another delivers the acks."""

    def __init__(self, offset: int = 0, before: Fingerprint = EMPTY) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_PublishedLines] = deque()
        self._acked_end = 0
        self.offset = offset
        """Every line below this byte has reached the ack level, or was dropped by policy."""
        self.before = before
        self.has_losses = False
        """Whether the queue has lost accepted lines behind ``offset``."""

    @property
    def is_settled(self) -> bool:
        """Whether every published line is acked."""
        return not self._waiting

    def add_published(self, end: int | None, offset: int, before: Fingerprint) -> None:
        """Note that lines up to byte ``offset`` are in the queue, below its offset ``end``.

        ``end`` is ``None`` if the queue's policy has dropped them all: then no ack comes.
        """
        with self._lock:
            if end is None:
                end = self._waiting[-1].end if self._waiting else self._acked_end
            self._waiting.append(_PublishedLines(end, offset, before))
            self._advance()

    def handle_ack(self, ack: Ack, *, drops_are_losses: bool) -> None:
        """Move the position up to the acked lines. Called on the thread of the queue's acks."""
        with self._lock:
            if ack.dropped and drops_are_losses:
                self.has_losses = True
            self._acked_end = max(self._acked_end, ack.end)
            self._advance()

    def _advance(self) -> None:
        while not self.has_losses and self._waiting and self._waiting[0].end <= self._acked_end:
            _, self.offset, self.before = self._waiting.popleft()


FileVersion = tuple[int, int]
"""Size and modification time: while both stay the same, there is nothing new to read."""


class FileReplaced(Exception):
    """The content of the file has changed: truncated, rewritten, or its inode was reused."""


class LineBatch(NamedTuple):
    """Lines of one read, and their place in the file."""

    lines: Lines
    start: int
    """The byte of the file at which the first line begins."""
    before: bytes
    """Bytes just before ``start``."""
    data: bytes
    """The bytes from which the lines were cut."""
    version: FileVersion | None
    """The version of the file, if these lines are all there is to read."""


@dataclass(slots=True, eq=False)
class FileReader:
    """A followed file. Its position moves over whole lines only. Used by one thread."""

    key: FileKey
    path: str
    """The current path; a deleted or renamed file may have none."""
    source: str
    """The path when the file was found first."""
    position: int = 0
    """The byte after the last published line."""
    id: str | None = None
    """The producer that publishes its lines; ``None`` until the first line identifies the file."""
    producer: BufferedProducer | None = None
    """The producer with this ``id``, once lines were published."""
    head: Fingerprint = EMPTY
    expected: SavedFile | None = None
    """The saved state that the file has to match before reading continues."""
    ask_queue: bool = False
    """Whether the queue may know the file although the positions file does not."""
    progress: AckProgress = field(default_factory=AckProgress)
    before: bytes = b""
    fd: int | None = None
    read_version: FileVersion | None = None
    """The version of which everything was read."""
    version: FileVersion = (0, 0)
    changed_at: float = field(default_factory=time.monotonic)
    missing_since: float | None = None
    """Since when scans do not find it: it was renamed or deleted."""
    was_emptied: bool = False
    """Whether reading restarted on an empty file: its next content may begin with a hole."""

    def update_version(self, status: os.stat_result) -> None:
        """Compare the status with the last one, and note a change."""
        version = (status.st_size, status.st_mtime_ns)
        if version != self.version:
            self.version = version
            self.changed_at = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """For how many seconds it has not changed."""
        return time.monotonic() - self.changed_at

    @property
    def is_fully_read(self) -> bool:
        """Whether nothing is left to read, except perhaps the beginning of a line."""
        return self.read_version == self.version

    @property
    def has_partial_line(self) -> bool:
        """Whether there is a last line without its newline."""
        return self.version[0] > self.position

    @property
    def is_deleted(self) -> bool:
        """Whether the file is open here and has no name any more."""
        return self.fd is not None and os.fstat(self.fd).st_nlink == 0

    # ── opening ──────────────────────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """Open the file and check that it is the expected one.

        Raises ``FileNotFoundError`` if another file has its name, ``FileReplaced``, ``OSError``.
        """
        if self.key in find_database_inodes():
            raise FileNotFoundError(f"{self.path} is a database of this process now")
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        status = os.fstat(self.fd)
        if FileKey.of(status) != self.key:
            self.close()
            raise FileNotFoundError(f"{self.path} is another file now")
        self.update_version(status)
        saved = self.expected
        if saved is not None:
            is_shorter = self.version[0] < self.position
            if is_shorter or not saved.head.matches(self.fd, 0):
                raise FileReplaced
            if not saved.before.matches(self.fd, saved.offset - saved.before.length):
                raise FileReplaced
            self.expected = None
            self.seek(self.position)
            self.progress = AckProgress(self.position, Fingerprint.of(self.before))

    def seek(self, position: int) -> None:
        """Continue reading at this position."""
        assert self.fd is not None
        first = max(0, position - BEFORE_BYTES)
        self.position = position
        self.before = os.pread(self.fd, position - first, first)
        self.read_version = None

    def close(self) -> None:
        """Close the file; :meth:`open` opens it again."""
        if self.fd is not None:
            status = os.fstat(self.fd)
            if (status.st_dev, status.st_ino) in find_database_inodes():
                # Opened here before SQLite did: closing it would drop the locks of SQLite.
                log.warning("files.database_kept_open", path=self.path)
            else:
                os.close(self.fd)
            self.fd = None

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    def read_head(self, *, whole: bool) -> Fingerprint | None:
        """Return the fingerprint of the first line, ``None`` while that line is incomplete.

        With ``whole``, a line without a newline counts as complete.
        """
        assert self.fd is not None
        data = os.pread(self.fd, HEAD_BYTES, 0)
        end = data.find(b"\n") + 1
        if end or len(data) == HEAD_BYTES or (whole and data):
            return Fingerprint.of(data[:end] if end else data)
        return None

    def read(self, size: int, longest: int, *, whole: bool) -> LineBatch | None:
        """Return the next lines, from about ``size`` bytes; ``None`` if no line is complete.

        With ``whole``, the bytes after the last newline count as a line, too. Raises
        ``FileReplaced``, ``OSError``.
        """
        assert self.fd is not None
        self.update_version(os.fstat(self.fd))
        if self.version[0] < self.position:
            raise FileReplaced
        if self.is_fully_read and not (whole and self.has_partial_line):
            return None
        batch = self._read(size, longest, whole=whole)
        if batch is None and not self.is_fully_read and size < longest + 3:
            batch = self._read(longest + 3, longest, whole=whole)
        return batch

    def _read(self, size: int, longest: int, *, whole: bool) -> LineBatch | None:
        assert self.fd is not None
        known = len(self.before)
        data = os.pread(self.fd, known + size, self.position - known)
        if not data.startswith(self.before):
            raise FileReplaced
        if self.was_emptied and self.position == 0 and data.startswith(b"\0"):
            raise FileReplaced
        is_end = self.position - known + len(data) >= self.version[0]
        skip = known
        if self.before and not self.before.endswith(b"\n"):
            # The last line was published before its newline was written: skip the newline now.
            rest = data[known : known + 2]
            skip += 1 if rest[:1] == b"\n" else 2 if rest == b"\r\n" else 0
        start, before, data = self.position - known + skip, data[:skip], data[skip:]
        lines = split_lines(data, longest, whole=whole and is_end)
        version = self.version if is_end else None
        if lines is None:
            self.read_version = version
            return None
        return LineBatch(lines, start, before, data, version)

    def advance(self, batch: LineBatch, lines: int) -> None:
        """Move the position behind the first ``lines`` of a batch: they are in the queue."""
        used = int(batch.lines.ends[lines - 1])
        self.position = batch.start + used
        last = batch.data[max(0, used - BEFORE_BYTES) : used]
        self.before = (batch.before + last)[-BEFORE_BYTES:]
        if lines == len(batch.lines.ends):
            self.read_version = batch.version

    def restart(self, position: int | None = None) -> None:
        """Begin another generation at ``position``; default: where the content begins."""
        self.id = self.producer = self.expected = None
        self.ask_queue = False
        self.progress = AckProgress()
        self.seek(self._find_content() if position is None else position)
        self.was_emptied = self.position == 0

    def _find_content(self) -> int:
        """Return where the content begins, after the hole that some writers leave.

        A writer without ``O_APPEND`` continues at its old position after a truncation, and the file
        seems as long as before.
        """
        assert self.fd is not None
        first = 0
        with contextlib.suppress(OSError):  # no data at all, or a file system without holes
            first = os.lseek(self.fd, 0, os.SEEK_DATA)
        data = os.pread(self.fd, 1 << 16, first)
        return first + len(data) - len(data.lstrip(b"\0"))
