"""Output ``file``: appends events to a file, a line each; the file may rotate by size and time.

Several tasks, in several processes, can write to one file. A writer opens the file, takes its lock,
and checks that the file still has its name; if another task has rotated it, the writer starts
again. So exactly one task rotates a file, and lines of two batches never mix.

A path may contain the time; a file that is full gets a number. The pattern alone tells which files
belong to an output, so no list of files is kept: any task, also after a crash, finds the old files
of earlier tasks, compresses them and removes the oldest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple, Self

import pyarrow as pa
from pydantic import Field, model_validator

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.errors import StorageFailed
from turnlane.events import Block
from turnlane.formats.lines import join_lines
from turnlane.logs import get_logger
from turnlane.outputs.api import Output, OutputSettings
from turnlane.runtime import start_thread
from turnlane.storage.disk_io import Disk
from turnlane.units import Size
from turnlane.validation import ConfigIssue, ContradictorySettings

log = get_logger(__name__)

# ── rotated files ────────────────────────────────────────────────────────────────────────────────

FileCompression = Literal["none", "gzip", "zstd"]

DIRECTIVES: Final = {"Y": 4, "m": 2, "d": 2, "H": 2, "M": 2, "S": 2, "j": 3}
"""The letters that may follow a percent sign in a path, as in strftime, with their digits. All of
them give digits only, so that no other program's file is taken for one of ours."""
ENDINGS: Final = {"gzip": ".gz", "zstd": ".zst"}
"""The endings of compressed files' names."""

_DIRECTIVE: Final = re.compile("%(.?)")
_SUFFIX: Final = rf"(?:\.([0-9]+))?({'|'.join(map(re.escape, ENDINGS.values()))})?"
"""What may follow a file's name: the number of a full file, and the ending of a compressed one."""


class OldFile(NamedTuple):
    """A file that is no longer written to. Sorts by age."""

    written: int
    """When it was last written to, in nanoseconds."""
    number: int
    path: Path
    is_compressed: bool


class FileNamePattern:
    """All names that one path, with or without the time in it, stands for."""

    def __init__(self, path: Path) -> None:
        self._text = str(path)
        self._glob = _translate_directives(self._text, glob.escape) + "*"
        self._regex = re.compile(_translate_directives(self._text, re.escape) + _SUFFIX)
        self.has_time = "%" in self._text.replace("%%", "")

    def get_path(self, time: datetime) -> Path:
        """Return the file to write to at this time."""
        return Path(time.strftime(self._text))

    def get_numbered_path(self, path: Path) -> Path:
        """Return the name that a full file gets: with the next number."""
        pattern = re.compile(re.escape(str(path)) + _SUFFIX)
        paths = glob.glob(glob.escape(str(path)) + "*")  # noqa: PTH207 - may be absolute
        matches = map(pattern.fullmatch, paths)
        number = 1 + max((int(match[1] or 0) for match in matches if match), default=0)
        return path.with_name(f"{path.name}.{number}")

    def find_old_files(self, get_current: Callable[[], Path]) -> list[OldFile]:
        """Return the files written before, the oldest first.

        ``get_current`` is called last, because another file may become the current one in between.
        """
        files = []
        paths = glob.glob(self._glob)  # noqa: PTH207 - may be absolute
        for match in filter(None, map(self._regex.fullmatch, paths)):
            path = Path(match[0])
            with contextlib.suppress(FileNotFoundError):  # another task has removed it
                written = path.stat().st_mtime_ns
                files.append(OldFile(written, int(match[1] or 0), path, match[2] is not None))
        current = get_current()
        return sorted(each for each in files if each.path != current)


def _translate_directives(path: str, escape: Callable[[str], str]) -> str:
    """Return a regular expression or a glob pattern for the paths that a path can become."""
    text, *others = _DIRECTIVE.split(path)  # text and directive alternate
    pattern = escape(text)
    for directive, following in zip(others[::2], others[1::2], strict=True):
        pattern += "[0-9]" * DIRECTIVES[directive] if directive in DIRECTIVES else "%"
        pattern += escape(following)
    return pattern


class OldFileCleaner(NamedTuple):
    """Compresses old files, and removes the oldest if there are more than ``keep``."""

    names: FileNamePattern
    compress: FileCompression
    keep: int | None

    def run(self, get_current: Callable[[], Path]) -> None:
        """Compress and remove, also files that a killed task left. Never raises."""
        try:
            if self.compress != "none":
                for old in self.names.find_old_files(get_current):
                    if not old.is_compressed:
                        self._compress(old.path)
            if self.keep is not None:
                files = self.names.find_old_files(get_current)
                for old in files[: max(0, len(files) - self.keep)]:
                    old.path.unlink(missing_ok=True)
        except OSError as error:
            hint = "nothing is lost; the next rotation tries again"
            log.warning("file.cleanup_failed", path=get_current(), error=error, hint=hint)

    def _compress(self, path: Path) -> None:
        """Replace a file by a compressed one, unless another task has done it."""
        try:
            source = path.open("rb")
        except FileNotFoundError:
            return
        with source:
            fcntl.flock(source, fcntl.LOCK_EX)  # the lock of its writers
            if not is_file_at(source.fileno(), path):
                return
            ending = ENDINGS[self.compress]
            target = path.with_name(path.name + ending)
            if target.exists():
                # The file of another time, or of a killed task: it must not be overwritten.
                path = path.rename(self.names.get_numbered_path(path))
                target = path.with_name(path.name + ending)
            # The compressed file appears in one step, and is synced before the source is removed.
            unfinished = target.with_name(f".{target.name}.unfinished")
            compression: Any = self.compress
            stream: Any = pa.CompressedOutputStream(str(unfinished), compression)
            with stream:
                shutil.copyfileobj(source, stream, 1 << 20)
            status = os.fstat(source.fileno())
            os.utime(unfinished, ns=(status.st_atime_ns, status.st_mtime_ns))
            with unfinished.open("rb") as written:
                os.fsync(written.fileno())
            unfinished.rename(target)
            path.unlink()
            Disk().sync_directory(path.parent)


def is_file_at(fd: int, path: Path) -> bool:
    """Whether the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


# ── the output ───────────────────────────────────────────────────────────────────────────────────

MIN_UNCACHED_BYTES: Final = 1 << 20
"""Smaller writes go through the page cache, because the kernel combines them."""
_DONT_CACHE: Final = 0x80
"""``RWF_DONTCACHE``, for which Python has no name."""
_UNSUPPORTED: Final = (errno.EOPNOTSUPP, errno.EINVAL, errno.ESPIPE)
"""The errors of older kernels, of file systems that do not support it, and of pipes."""


class FileOutputSettings(OutputSettings):
    """The settings of the output ``file``."""

    path: Path = Field(
        description="The file. It and its directories are created if they do not exist. The path "
        "may contain the time of writing, in UTC: `%Y`, `%m`, `%d`, `%H`, `%M`, `%S`, `%j`.",
        examples=["out/%Y-%m-%d/alerts.jsonl"],
    )
    format: Literal["json", "raw"] = Field(
        default="json",
        description="A line is the whole event as JSON (`json`), or its unchanged value (`raw`).",
    )
    sync: bool = Field(
        default=False,
        description="Whether a batch counts as delivered only once it is on the device.",
    )
    rotate_size: Size | None = Field(
        default=None,
        ge=1,
        description="Begin another file before this one gets larger; full files are numbered. "
        "Default: never.",
        examples=["100Mi"],
    )
    compress: FileCompression = Field(
        default="none", description="How full files, and files of an earlier time, are compressed."
    )
    keep: int | None = Field(
        default=None,
        ge=0,
        description="How many of those files are kept; the oldest are removed. Default: all.",
    )

    # A file takes large batches, and only one at a time.
    delivery_defaults: ClassVar[Mapping[str, Any]] = {
        "batch_events": 65_536,
        "batch_bytes": 8 << 20,
        "max_concurrency": 1,
    }

    @property
    def wanted_columns(self) -> frozenset[str]:
        """No column but the payload."""
        return frozenset()

    @model_validator(mode="after")
    def _check_rotation(self) -> Self:
        allowed = ", ".join(f"%{letter}" for letter in DIRECTIVES)
        issues = [
            ConfigIssue("path", f"%{letter} is not supported; use {allowed}")
            for letter in _DIRECTIVE.findall(str(self.path))
            if letter not in {*DIRECTIVES, "%"}
        ]
        if self.rotate_size is None and not FileNamePattern(self.path).has_time:
            needless = {"compress": self.compress != "none", "keep": self.keep is not None}
            message = "needs rotate_size, or the time in path: without them the file never rotates"
            issues += [ConfigIssue(name, message) for name, is_set in needless.items() if is_set]
        if issues:
            raise ContradictorySettings(issues)
        return self


class FileOutput(Output):
    """Appends whole lines: all of a batch or none, unless the process is killed in between."""

    settings_type = FileOutputSettings
    settings: FileOutputSettings

    def __init__(self, settings: FileOutputSettings, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(settings)
        self._clock = clock
        self._names = FileNamePattern(settings.path)
        self._cleaner = OldFileCleaner(self._names, settings.compress, settings.keep)
        self._cleanups: list[threading.Thread] = []
        self._cleanups_lock = threading.Lock()

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """Return the payloads of the block as lines, in one buffer."""
        return join_lines(block.column("payload"))

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        """Append the lines. Raises ``StorageFailed``."""
        data = memoryview(prepared)
        path = self._get_path()
        try:
            while not self._append(path, data):
                path = self._get_path()
        except OSError as error:
            raise StorageFailed(f"{path}: {error.strerror or error}") from error

    def check(self) -> None:
        """Open the file for writing; creates an empty file if it does not exist."""
        path = self._get_path()
        try:
            os.close(_open_for_append(path))
        except OSError as error:
            raise StorageFailed(f"{path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Wait until rotated files are compressed."""
        for cleanup in self._cleanups:
            cleanup.join()

    def _get_path(self) -> Path:
        return self._names.get_path(datetime.fromtimestamp(self._clock.time_ns() / 1e9, UTC))

    def _append(self, path: Path, data: memoryview) -> bool:
        """Append the data and return true; return false if another file must be written to."""
        is_new = not path.exists()
        fd = _open_for_append(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if not is_file_at(fd, path):
                return False  # another task rotated it while this one waited for the lock
            if stat.S_ISREG(os.fstat(fd).st_mode):
                _end_last_line(fd, path)
                size, limit = os.fstat(fd).st_size, self.settings.rotate_size
                if limit is not None and size > 0 and size + len(data) > limit:
                    path.rename(self._names.get_numbered_path(path))
                    return False
            self._write_all(fd, data)
            if is_new and self.settings.sync:
                Disk().sync_directory(path.parent)
        finally:
            os.close(fd)
        if is_new:
            self._start_cleanup()
        return True

    def _write_all(self, fd: int, data: memoryview) -> None:
        """Write everything or nothing: after an error the whole batch is written again."""
        before = os.fstat(fd)
        try:
            while data:
                data = data[append_past_cache(fd, data) :]
            if self.settings.sync:
                os.fsync(fd)
        except OSError:
            if stat.S_ISREG(before.st_mode):  # a device or a pipe cannot be truncated
                os.ftruncate(fd, before.st_size)
            raise

    def _start_cleanup(self) -> None:
        """Compress and remove old files on another thread: a new file has begun."""
        if self.settings.compress == "none" and self.settings.keep is None:
            return
        with self._cleanups_lock:
            self._cleanups = [each for each in self._cleanups if each.is_alive()]
            cleanup = start_thread("turnlane-file-cleanup", self._cleaner.run, self._get_path)
            self._cleanups.append(cleanup)


def append_past_cache(fd: int, data: memoryview) -> int:
    """Write some of the data to a file that is open for appending; return how many bytes.

    Large writes leave nothing in the page cache. Lines that stream into a file by the hundred
    megabytes push data that others read out of memory, and the kernel must find a new page for each
    of them, which takes longer than to write them. Since Linux 6.14 a write can say that its pages
    are free as soon as they are on the disk.
    """
    if len(data) >= MIN_UNCACHED_BYTES:
        try:
            return os.pwritev(fd, [data], 0, _DONT_CACHE)  # appending ignores the offset 0
        except NotImplementedError:  # an older C library
            pass
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    return os.write(fd, data)


def _open_for_append(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _end_last_line(fd: int, path: Path) -> None:
    """End a last line that has no newline, so that the next batch begins on a line of its own.

    A killed task may have left half a line, or another program may have written any data. They
    cannot be told apart, so nothing is ever removed.
    """
    size = os.fstat(fd).st_size
    if size == 0:
        return
    with path.open("rb") as file:
        file.seek(size - 1)
        if file.read(1) == b"\n":
            return
    log.warning("file.last_line_incomplete", path=path, hint="it is kept and ended by a newline")
    os.write(fd, b"\n")
