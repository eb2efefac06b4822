"""Reading one file, line by line as they come, and noticing when it is no longer the same."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import logging
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from turnlane.formats.lines import Lines, cut
from turnlane.inputs.files.state import (
    BEFORE_BYTES,
    HEAD_BYTES,
    NOTHING,
    Entry,
    FileKey,
    Mark,
    Progress,
)

# ── watch ──
# Find the files: those that match the globs and are not excluded.

log = logging.getLogger(__name__)

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".Z")
"""What rotation leaves behind when it compresses: its lines were read before."""

MOST_COMPLAINTS = 10_000
"""So many files with trouble are remembered; with more, some things are said again."""


class Sight(NamedTuple):
    """A file as a scan has seen it."""

    path: str
    status: os.stat_result

    @property
    def key(self) -> FileKey:
        """Which file it is."""
        return FileKey.of(self.status)


class Watch:
    """Looks for files. What cannot be used is said once in the log, not at every scan."""

    def __init__(self, paths: tuple[str, ...], exclude: tuple[str, ...]) -> None:
        self._paths = paths
        self._exclude = exclude
        self._complained: set[str] = set()

    def scan(self) -> dict[FileKey, Sight]:
        """All files that match, each once however many names it has: the first name counts."""
        found: dict[FileKey, Sight] = {}
        for path in self._matches():
            try:
                status = os.stat(path)  # noqa: PTH116 - ten thousand times a second
            except (FileNotFoundError, NotADirectoryError):
                continue  # gone since
            except OSError as error:
                self.complain(path, f"cannot be looked at: {error.strerror}")
                continue
            if stat.S_ISREG(status.st_mode):
                sight = Sight(path, status)
                found.setdefault(sight.key, sight)
        return found

    def _matches(self) -> Iterator[str]:
        for pattern in self._paths:
            for path in sorted(glob.iglob(pattern, recursive=True)):  # noqa: PTH207 - names
                if path.endswith(COMPRESSED):
                    self.complain(path, "is compressed and is not read")
                elif not self._excluded(path):
                    yield path

    def _excluded(self, path: str) -> bool:
        name = os.path.basename(path)  # noqa: PTH119 - ten thousand times a second
        return any(
            fnmatch.fnmatchcase(path if "/" in pattern else name, pattern)
            for pattern in self._exclude
        )

    def complain(self, path: str, what: str) -> None:
        """Log a problem of a file, once."""
        if len(self._complained) > MOST_COMPLAINTS:
            self._complained.clear()
        if path not in self._complained:
            self._complained.add(path)
            log.warning("%s %s", path, what)

    def satisfied(self, path: str) -> None:
        """The file can be used: the next trouble with it is news."""
        self._complained.discard(path)


def find_inode(directory: str, inode: int) -> str | None:
    """Where in a directory a file has gone that had another name before."""
    try:
        with os.scandir(directory) as entries:
            return next((each.path for each in entries if each.inode() == inode), None)
    except OSError:
        return None  # the directory is gone; it is looked for again when it is back


State = tuple[int, int]
"""Size and time of the last change: as long as both stay, there is nothing to read."""


class Replaced(Exception):
    """The file's content has changed: truncated, rewritten, or its inode was reused."""


class Chunk(NamedTuple):
    """Lines that were read, and where they stand."""

    lines: Lines
    start: int
    """The byte of the file at which the first one begins."""
    before: bytes
    """What stands before that."""
    data: bytes
    """What they were cut from."""
    state: State | None
    """The state of the file, if this is all that there is to read."""


@dataclass(slots=True, eq=False)
class Tail:
    """A file that is followed. Its position moves over whole lines only. For one thread."""

    key: FileKey
    path: str
    """Where it is now; deleted or renamed it may be nowhere."""
    source: str
    """What it was called when it was first seen."""
    position: int = 0
    """The byte after the last line that was published."""
    id: str | None = None
    """The producer as which it publishes; ``None`` until its first line tells who it is."""
    head: Mark = NOTHING
    claim: Entry | None = None
    """The mark that the file has to match before reading continues."""
    recover: bool = False
    """Whether the queue may know it although the positions file does not."""
    progress: Progress = field(default_factory=Progress)
    before: bytes = b""
    fd: int | None = None
    read_at: State | None = None
    """The state in which everything was read."""
    state: State = (0, 0)
    changed_at: float = field(default_factory=time.monotonic)
    nameless_since: float | None = None
    """Since when no scan has found it."""
    was_emptied: bool = False
    """Whether reading restarted on an empty file: its next content may begin with a hole."""

    def sighted(self, sight: Sight) -> None:
        """A scan has found it."""
        self.path = sight.path
        self.nameless_since = None
        self._note(sight.status)

    def _note(self, status: os.stat_result) -> None:
        state = (status.st_size, status.st_mtime_ns)
        if state != self.state:
            self.state = state
            self.changed_at = time.monotonic()

    @property
    def idle(self) -> float:
        """For how many seconds it has not changed."""
        return time.monotonic() - self.changed_at

    @property
    def is_read(self) -> bool:
        """Whether there is nothing to read but, perhaps, the beginning of a line."""
        return self.read_at == self.state

    @property
    def has_rest(self) -> bool:
        """Whether there is a last line without its newline."""
        return self.state[0] > self.position

    # ── opening ──────────────────────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """Open it and see whether it is what it should be.

        Raises ``FileNotFoundError`` if something else has its name, ``Replaced``, ``OSError``.
        """
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        status = os.fstat(self.fd)
        if FileKey.of(status) != self.key:
            self.close()
            raise FileNotFoundError(f"{self.path} is another file by now")
        self._note(status)
        self._check_claim(self.fd)

    def _check_claim(self, fd: int) -> None:
        claim = self.claim
        if claim is None:
            return
        at = claim.offset - claim.before.length
        if self.state[0] < self.position or not claim.head.holds(fd, 0):
            raise Replaced
        if not claim.before.holds(fd, at):
            raise Replaced
        self.claim = None
        self.stand_at(self.position)
        self.progress = Progress(self.position, Mark.of(self.before))

    def stand_at(self, position: int) -> None:
        """Continue reading at this position."""
        assert self.fd is not None
        first = max(0, position - BEFORE_BYTES)
        self.position = position
        self.before = os.pread(self.fd, position - first, first)
        self.read_at = None

    def close(self) -> None:
        """Let go of the file, for now."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    @property
    def is_deleted(self) -> bool:
        """Whether nothing but this tail knows of the file."""
        return self.fd is not None and os.fstat(self.fd).st_nlink == 0

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    def read_head(self, *, whole: bool) -> Mark | None:
        """What tells this file from others: its first line; ``None`` while that is not there."""
        assert self.fd is not None
        data = os.pread(self.fd, HEAD_BYTES, 0)
        end = data.find(b"\n") + 1
        if end or len(data) == HEAD_BYTES or (whole and data):
            return Mark.of(data[:end] if end else data)
        return None

    def read(self, size: int, longest: int, *, whole: bool) -> Chunk | None:
        """The next lines, from about ``size`` bytes; ``None`` if there is no whole line.

        With ``whole``, what stands behind the last newline counts as a line too. Raises
        ``Replaced``, ``OSError``.
        """
        assert self.fd is not None
        self._note(os.fstat(self.fd))
        if self.state[0] < self.position:
            raise Replaced
        if self.is_read and not (whole and self.has_rest):
            return None
        chunk = self._read(size, longest, whole=whole)
        if chunk is None and not self.is_read and size < longest + 3:
            chunk = self._read(longest + 3, longest, whole=whole)
        return chunk

    def _read(self, size: int, longest: int, *, whole: bool) -> Chunk | None:
        assert self.fd is not None
        known = len(self.before)
        data = os.pread(self.fd, known + size, self.position - known)
        if not data.startswith(self.before):
            raise Replaced
        if self.was_emptied and self.position == 0 and data.startswith(b"\0"):
            raise Replaced
        ended = self.position - known + len(data) >= self.state[0]
        skip = known + self._rest_of_newline(data[known : known + 2])
        start, before, data = self.position - known + skip, data[:skip], data[skip:]
        lines = cut(data, longest, whole=whole and ended)
        state = self.state if ended else None
        if lines is None:
            self.read_at = state
            return None
        return Chunk(lines, start, before, data, state)

    def _rest_of_newline(self, data: bytes) -> int:
        """How much of the data only ends a line that was taken before its newline came."""
        if not self.before or self.before.endswith(b"\n"):
            return 0
        return 1 if data[:1] == b"\n" else 2 if data == b"\r\n" else 0

    def advance(self, chunk: Chunk, lines: int) -> None:
        """The first ``lines`` of a chunk are in the queue."""
        used = int(chunk.lines.ends[lines - 1])
        self.position = chunk.start + used
        fresh = chunk.data[max(0, used - BEFORE_BYTES) : used]
        self.before = (chunk.before + fresh)[-BEFORE_BYTES:]
        if lines == len(chunk.lines.ends):
            self.read_at = chunk.state

    # ── restarting ───────────────────────────────────────────────────────────────────────────

    def restart(self, position: int | None = None) -> None:
        """Be another generation: from the first text on, or from ``position``."""
        self.id = None
        self.claim = None
        self.recover = False
        self.progress = Progress()
        self.stand_at(self._first_text() if position is None else position)
        self.was_emptied = self.position == 0

    def _first_text(self) -> int:
        """Where the content begins, after the hole that a writer leaves who was not told.

        Without ``O_APPEND`` it goes on writing where it was, and the file seems as long as before.
        """
        assert self.fd is not None
        first = 0
        with contextlib.suppress(OSError):  # no data at all, or a file system without holes
            first = os.lseek(self.fd, 0, os.SEEK_DATA)
        data = os.pread(self.fd, 1 << 16, first)
        zeros = len(data) - len(data.lstrip(b"\0"))
        return first + zeros
