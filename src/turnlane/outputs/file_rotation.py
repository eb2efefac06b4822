"""Rotated files: the names that a path with a time stands for, and the care of old files.

A path may contain the time; a file that is full gets a number. The pattern alone tells which files
belong to an output, so no list of files is kept: any task, also after a crash, finds the old files
of earlier tasks, compresses them and removes the oldest.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple

import pyarrow as pa

from turnlane.logs import get_logger

log = get_logger(__name__)

FileCompression = Literal["none", "gzip", "zstd"]

DIRECTIVES: Final = {"Y": 4, "m": 2, "d": 2, "H": 2, "M": 2, "S": 2, "j": 3}
"""The letters that may follow a percent sign in a path, as in strftime, with their digits. All of
them give digits only, so that no other program's file is taken for one of ours."""
ENDINGS: Final = {"gzip": ".gz", "zstd": ".zst"}
"""The endings of compressed files' names."""

_DIRECTIVE: Final = re.compile("%(.?)")
_SUFFIX: Final = rf"(?:\.([0-9]+))?({'|'.join(map(re.escape, ENDINGS.values()))})?"
"""What may follow a file's name: the number of a full file, and the ending of a compressed one."""


def find_unknown_directives(path: Path) -> list[str]:
    """Return the directives of a path that are not allowed."""
    letters = _DIRECTIVE.findall(str(path))
    return [f"%{each}" for each in letters if each not in {*DIRECTIVES, "%"}]


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
        self._parts = path.parts
        self._name = re.compile(_make_regex(self._parts[-1]) + _SUFFIX)
        self.has_time = "%" in self._text.replace("%%", "")

    def get_path(self, time: datetime) -> Path:
        """Return the file to write to at this time."""
        return Path(time.strftime(self._text))

    def get_numbered_path(self, path: Path) -> Path:
        """Return the name that a full file gets: with the next number."""
        pattern = re.compile(re.escape(path.name) + _SUFFIX)
        matches = map(pattern.fullmatch, _list_names(path.parent))
        number = 1 + max((int(match[1] or 0) for match in matches if match), default=0)
        return path.with_name(f"{path.name}.{number}")

    def find_old_files(self, get_current: Callable[[], Path]) -> list[OldFile]:
        """Return the files written before, the oldest first.

        ``get_current`` is called last, because another file may become the current one in between.
        """
        files = []
        for path in self._find_files():
            match = self._name.fullmatch(path.name)
            assert match is not None
            with contextlib.suppress(FileNotFoundError):  # another task has removed it
                written = path.stat().st_mtime_ns
                files.append(OldFile(written, int(match[1] or 0), path, match[2] is not None))
        current = get_current()
        return sorted(each for each in files if each.path != current)

    def _find_files(self) -> Iterator[Path]:
        folders = [Path()]
        for part in self._parts[:-1]:
            folders = [path for folder in folders for path in _find_folders(folder, part)]
        for folder in folders:
            names = _list_names(folder)
            yield from (folder / name for name in names if self._name.fullmatch(name))


def _find_folders(folder: Path, part: str) -> list[Path]:
    if "%" not in part:
        return [folder / part]
    pattern = re.compile(_make_regex(part))
    return [folder / name for name in _list_names(folder) if pattern.fullmatch(name)]


def _make_regex(part: str) -> str:
    """Return a regular expression for the names that a part of a path can become."""
    text, *others = _DIRECTIVE.split(part)  # text and directive alternate
    expression = re.escape(text)
    for directive, following in zip(others[::2], others[1::2], strict=True):
        digits = DIRECTIVES.get(directive)
        expression += f"[0-9]{{{digits}}}" if digits else "%"
        expression += re.escape(following)
    return expression


def _list_names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


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
        with open_locked(path) as source:
            if source is None:
                return
            ending = ENDINGS[self.compress]
            target = path.with_name(path.name + ending)
            if target.exists():
                # The file of another time, or of a killed task: it must not be overwritten.
                path = path.rename(self.names.get_numbered_path(path))
                target = path.with_name(path.name + ending)
            _write_compressed(source, target, self.compress)
            path.unlink()
            sync_folder(path.parent)


def _write_compressed(source: IO[bytes], target: Path, compression: Any) -> None:  # noqa: ANN401
    """Create the compressed file in one step, and sync it: the source is removed afterwards."""
    unfinished = target.with_name(f".{target.name}.unfinished")
    with unfinished.open("wb") as raw:
        stream: Any = pa.CompressedOutputStream(raw, compression)
        with stream:
            shutil.copyfileobj(source, stream, 1 << 20)
    status = os.fstat(source.fileno())
    os.utime(unfinished, ns=(status.st_atime_ns, status.st_mtime_ns))
    with unfinished.open("rb") as written:
        os.fsync(written.fileno())
    unfinished.rename(target)


@contextlib.contextmanager
def open_locked(path: Path) -> Iterator[IO[bytes] | None]:
    """Open a file for reading, with the lock of its writers; ``None`` if the file is gone."""
    try:
        source = path.open("rb")
    except FileNotFoundError:
        yield None
        return
    with source:
        fcntl.flock(source, fcntl.LOCK_EX)
        yield source if is_file_at(source.fileno(), path) else None


def is_file_at(fd: int, path: Path) -> bool:
    """Whether the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def sync_folder(folder: Path) -> None:
    """Return once the names in a folder are on the device."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
