"""The names of a file that rotates: the one to write to now, and those written before."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple

import pyarrow as pa

DIRECTIVES: Final = {"Y": 4, "m": 2, "d": 2, "H": 2, "M": 2, "S": 2, "j": 3}
"""What may stand after a percent sign in a path, as in strftime, and how many digits it makes.
Only digits: a file of somebody else is never taken for one of ours."""
ENDINGS: Final = {"gzip": ".gz", "zstd": ".zst"}
"""How the names of compressed files end."""

_DIRECTIVE: Final = re.compile("%(.?)")
_AFTER: Final = rf"(?:\.([0-9]+))?({'|'.join(map(re.escape, ENDINGS.values()))})?"
"""What may stand after a file's own name: its number once it is full, and how it is compressed."""


def unknown_directives(path: Path) -> list[str]:
    """What stands after percent signs and must not."""
    found = _DIRECTIVE.findall(str(path))
    return [f"%{each}" for each in found if each not in {*DIRECTIVES, "%"}]


class OldFile(NamedTuple):
    """A file that nobody writes to any more. Sorts by age."""

    written: int
    """When it was last written to, in nanoseconds."""
    number: int
    path: Path
    compressed: bool


class FileNames:
    """All names that one path, with or without the time in it, stands for."""

    def __init__(self, path: Path) -> None:
        self._text = str(path)
        self._parts = path.parts
        self.has_time = "%" in self._text.replace("%%", "")

    def at(self, moment: datetime) -> Path:
        """The file to write to at this time."""
        return Path(moment.strftime(self._text))

    def old(self, current: Callable[[], Path]) -> list[OldFile]:
        """The files written before, the oldest first.

        Which one is written to now is asked last: it may have begun meanwhile.
        """
        found = [self._old(path) for path in self._matching()]
        now = current()
        return sorted(each for each in found if each is not None and each.path != now)

    def next_number(self, path: Path) -> int:
        """The number for the next file that gets full under this name."""
        pattern = re.compile(re.escape(path.name) + _AFTER)
        matches = map(pattern.fullmatch, _names(path.parent))
        return 1 + max((int(match[1] or 0) for match in matches if match), default=0)

    def _old(self, path: Path) -> OldFile | None:
        match = re.compile(_regex(self._parts[-1]) + _AFTER).fullmatch(path.name)
        assert match is not None
        try:
            written = path.stat().st_mtime_ns
        except FileNotFoundError:  # another task has tidied up meanwhile
            return None
        return OldFile(written, int(match[1] or 0), path, match[2] is not None)

    def _matching(self) -> Iterator[Path]:
        folders = [Path()]
        for part in self._parts[:-1]:
            folders = [found for folder in folders for found in _within(folder, part)]
        last = re.compile(_regex(self._parts[-1]) + _AFTER)
        for folder in folders:
            yield from (folder / name for name in _names(folder) if last.fullmatch(name))


def _within(folder: Path, part: str) -> list[Path]:
    if "%" not in part:
        return [folder / part]
    pattern = re.compile(_regex(part))
    return [folder / name for name in _names(folder) if pattern.fullmatch(name)]


def _regex(part: str) -> str:
    """A part of a path as a pattern of the names that it can become."""
    pieces = _DIRECTIVE.split(part)  # text and directive in turn
    made = [re.escape(pieces[0])]
    for directive, text in zip(pieces[1::2], pieces[2::2], strict=True):
        digits = DIRECTIVES.get(directive)
        made.append(f"[0-9]{{{digits}}}" if digits else "%")
        made.append(re.escape(text))
    return "".join(made)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


# ── file_tidying ──
# Files that are full or of an earlier time: compressed, and after a while removed.

log = logging.getLogger(__name__)

Compression = Literal["none", "gzip", "zstd"]


class Tidying(NamedTuple):
    """What is to become of old files."""

    names: FileNames
    compress: Compression
    keep: int | None

    def run(self, current: Callable[[], Path]) -> None:
        """Compress what is not, also what a killed task has left, and remove the oldest."""
        try:
            if self.compress != "none":
                for old in self.names.old(current):
                    if not old.compressed:
                        self._compress(old.path)
            if self.keep is not None:
                files = self.names.old(current)
                for old in files[: max(0, len(files) - self.keep)]:
                    old.path.unlink(missing_ok=True)
        except OSError as error:  # nothing is lost by it, and the next rotation tries again
            log.warning("%s: old files are left as they are: %s", current(), error)

    def _compress(self, path: Path) -> None:
        with locked_for_reading(path) as source:
            if source is None:
                return
            target = path.with_name(path.name + ENDINGS[self.compress])
            if target.exists():
                # Of another time, or of a task that was killed: it is not for us to overwrite.
                path = path.rename(numbered(path, self.names))
                target = path.with_name(path.name + ENDINGS[self.compress])
            _write_compressed(source, target, self.compress)
            path.unlink()
            sync_folder(path.parent)


def _write_compressed(source: IO[bytes], target: Path, compression: Any) -> None:  # noqa: ANN401
    """Make the compressed file in one step, synced: the other one is going to be removed."""
    unfinished = target.with_name(f".{target.name}.unfinished")
    with unfinished.open("wb") as raw:
        stream: Any = pa.CompressedOutputStream(raw, compression)
        with stream:
            shutil.copyfileobj(source, stream, 1 << 20)
    was = os.fstat(source.fileno())
    os.utime(unfinished, ns=(was.st_atime_ns, was.st_mtime_ns))
    with unfinished.open("rb") as written:
        os.fsync(written.fileno())
    unfinished.rename(target)


@contextlib.contextmanager
def locked_for_reading(path: Path) -> Iterator[IO[bytes] | None]:
    """The file, with nobody else writing to it or compressing it; ``None`` if it is gone."""
    try:
        source = path.open("rb")
    except FileNotFoundError:
        yield None
        return
    with source:
        fcntl.flock(source, fcntl.LOCK_EX)
        yield source if is_at(source.fileno(), path) else None


def is_at(fd: int, path: Path) -> bool:
    """Whether the open file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def numbered(path: Path, names: FileNames) -> Path:
    """The name for a file that is full."""
    return path.with_name(f"{path.name}.{names.next_number(path)}")


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the device."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
