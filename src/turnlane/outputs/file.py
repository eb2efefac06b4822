"""Output ``file``: appends events to a file, a line each; the file may rotate by size and time.

Several tasks, in several processes, can write to one file. A writer opens the file, takes its lock,
and checks that the file still has its name; if another task has rotated it, the writer starts
again. So exactly one task rotates a file, and lines of two batches never mix.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.errors import StorageFailed
from turnlane.events import Block
from turnlane.formats.lines import lines_of
from turnlane.logs import get_logger
from turnlane.outputs.api import Output, OutputSettings
from turnlane.outputs.file_rotation import (
    DIRECTIVES,
    FileCompression,
    FileNamePattern,
    OldFileCleaner,
    find_unknown_directives,
    is_file_at,
    sync_folder,
)
from turnlane.runtime import start_thread
from turnlane.units import Size
from turnlane.validation import ConfigIssue, ContradictorySettings

log = get_logger(__name__)

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
            ConfigIssue("path", f"{each} is not supported; use {allowed}")
            for each in find_unknown_directives(self.path)
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
        return lines_of(block.column("payload"))

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
                sync_folder(path.parent)
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
            cleanup = start_thread("turnlane-tidier", self._cleaner.run, self._get_path)
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
