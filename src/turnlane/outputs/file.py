"""Output ``file``: events appended to a file, a line each, which may rotate by size and time.

Whoever writes holds the file's lock and looks whether the file still has its name: so several
tasks, of several processes, can share it, and it is rotated by exactly one of them.
"""

from __future__ import annotations

import errno
import fcntl
import logging
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
from turnlane.outputs.api import Output, OutputSettings
from turnlane.outputs.file_rotation import (
    DIRECTIVES,
    Compression,
    FileNames,
    Tidying,
    is_at,
    numbered,
    sync_folder,
    unknown_directives,
)
from turnlane.units import Size
from turnlane.validation import Contradiction, Problem

# ── uncached ──
# Writing much at a time without leaving it in the page cache.
#
# Lines that stream into a file by the hundred megabytes push out of memory what others read, and
# the
# kernel has to find a new page for each of theirs, which takes longer than to write them. Since
# Linux
# 6.14 a write can say that its pages are free again as soon as they are on the disk.

LARGE: Final = 1 << 20
"""Bytes. Less than that is left to the kernel, which gathers small writes before it writes them."""
_DONT_CACHE: Final = 0x80
"""``RWF_DONTCACHE``, which Python has no name for."""
_UNABLE: Final = (errno.EOPNOTSUPP, errno.EINVAL, errno.ESPIPE)
"""What an older kernel, a file system that cannot do it, and a pipe say to that."""


def append(fd: int, data: memoryview) -> int:
    """Write some of it to a file that was opened for appending; returns how many bytes."""
    if len(data) >= LARGE:
        try:
            return os.pwritev(fd, [data], 0, _DONT_CACHE)  # appending, so the place says nothing
        except NotImplementedError:  # an older C library
            pass
        except OSError as error:
            if error.errno not in _UNABLE:
                raise
    return os.write(fd, data)


log = logging.getLogger(__name__)


class FileSettings(OutputSettings):
    """The settings of a file output."""

    path: Path = Field(
        description="The file, made with its directories if it is not there. May hold the time of "
        "writing, in UTC: `%Y`, `%m`, `%d`, `%H`, `%M`, `%S`, `%j`.",
        examples=["out/%Y-%m-%d/alerts.jsonl"],
    )
    format: Literal["json", "raw"] = Field(
        default="json", description="A line is the whole event as JSON, or its value as it is."
    )
    sync: bool = Field(
        default=False, description="Whether a batch is done only once it is on the device."
    )
    rotate_size: Size | None = Field(
        default=None,
        ge=1,
        description="Begin another file before this one gets larger; full ones are numbered. "
        "Default: never.",
        examples=["100Mi"],
    )
    compress: Compression = Field(
        default="none", description="How files that are full, or of an earlier time, are kept."
    )
    keep: int | None = Field(
        default=None,
        ge=0,
        description="How many of those files stay; older ones are removed. Default: all.",
    )

    # A file takes as much at a time as one likes, and from one at a time only.
    usual: ClassVar[Mapping[str, Any]] = {
        "batch_events": 65_536,
        "batch_bytes": 8 << 20,
        "max_concurrency": 1,
    }

    @property
    def wants(self) -> frozenset[str]:
        """Nothing else."""
        return frozenset()

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        problems = [
            Problem("path", f"{each} is none of {', '.join(f'%{one}' for one in DIRECTIVES)}")
            for each in unknown_directives(self.path)
        ]
        if self.rotate_size is None and not FileNames(self.path).has_time:
            needless = {"compress": self.compress != "none", "keep": self.keep is not None}
            problems += [
                Problem(knob, "needs rotate_size, or the time in path: the file never rotates")
                for knob, given in needless.items()
                if given
            ]
        if problems:
            raise Contradiction(problems)
        return self


class FileOutput(Output):
    """Appends whole lines, all of a batch or none, unless it is killed meanwhile."""

    settings_type = FileSettings
    settings: FileSettings

    def __init__(self, settings: FileSettings, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(settings)
        self._clock = clock
        self._names = FileNames(settings.path)
        self._tidying = Tidying(self._names, settings.compress, settings.keep)
        self._tidies = settings.compress != "none" or settings.keep is not None
        self._tidiers: list[threading.Thread] = []
        self._starting = threading.Lock()

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """The block's payloads as lines, in one piece of memory."""
        return lines_of(block.column("payload"))

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        data = memoryview(prepared)
        path = self._path()
        try:
            while not self._written(path, data):
                path = self._path()
        except OSError as error:
            raise StorageFailed(f"{path}: {error.strerror or error}") from error

    def check(self) -> None:
        """Open the file as for writing; one that was not there is there then, and empty."""
        path = self._path()
        try:
            os.close(self._opened(path))
        except OSError as error:
            raise StorageFailed(f"{path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Wait until what was rotated is compressed."""
        for tidier in self._tidiers:
            tidier.join()

    def _path(self) -> Path:
        return self._names.at(datetime.fromtimestamp(self._clock.time_ns() / 1e9, UTC))

    def _opened(self, path: Path) -> int:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _written(self, path: Path, data: memoryview) -> bool:
        """Append, if that is still the file to write to."""
        begins = not path.exists()
        fd = self._opened(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if not is_at(fd, path):
                return False  # rotated while we waited
            if stat.S_ISREG(os.fstat(fd).st_mode):
                _end_line(fd, path)
                if self._is_full(fd, len(data)):
                    path.rename(numbered(path, self._names))
                    return False
            self._append(fd, data)
            if begins and self.settings.sync:
                sync_folder(path.parent)
        finally:
            os.close(fd)
        if begins:
            self._tidy()
        return True

    def _is_full(self, fd: int, more: int) -> bool:
        size, most = os.fstat(fd).st_size, self.settings.rotate_size
        return most is not None and size > 0 and size + more > most

    def _append(self, fd: int, data: memoryview) -> None:
        """Append all of it or nothing: half a batch would come again with the other half."""
        before = os.fstat(fd)
        try:
            while data:
                data = data[append(fd, data) :]
            if self.settings.sync:
                os.fsync(fd)
        except OSError:
            if stat.S_ISREG(before.st_mode):  # a device or a pipe keeps what it has got
                os.ftruncate(fd, before.st_size)
            raise

    def _tidy(self) -> None:
        """A file has begun: those before it are old. Compressing is nothing to wait for."""
        if not self._tidies:
            return
        tidier = threading.Thread(
            target=self._tidying.run, args=[self._path], name="turnlane-tidier", daemon=True
        )
        with self._starting:
            self._tidiers = [each for each in self._tidiers if each.is_alive()]
            tidier.start()
            self._tidiers.append(tidier)


def _end_line(fd: int, path: Path) -> None:
    """End a last line that has no end, so that ours begin on a line of their own.

    A killed task of ours may have left half a line, or another program data of any kind. Nobody can
    tell which, so nothing is ever taken away.
    """
    size = os.fstat(fd).st_size
    if size == 0 or _ends_a_line(path, size):
        return
    log.warning("%s: the last line had no end; it stays, and gets one", path)
    os.write(fd, b"\n")


def _ends_a_line(path: Path, size: int) -> bool:
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) == b"\n"
