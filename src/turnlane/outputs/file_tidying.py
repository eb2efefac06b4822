"""Files that are full or of an earlier time: compressed, and after a while removed."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import pyarrow as pa

from turnlane.outputs.file_names import ENDINGS, FileNames

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
