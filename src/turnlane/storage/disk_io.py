"""The disk: every byte that the log and the journal read or write passes through here.

It is one thin layer over the operating system, so that ``turnlane.testing.FaultyDisk`` has one
place to inject failures, full disks, torn writes and delays.

Events may be secret, so only the owner can read what is created here: directories have the mode
0700, files 0600. A directory with the setgid bit belongs to a group that may read it: below it the
modes are 2750 and 0640, and Linux passes on the group and the bit by itself.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pyarrow as pa

Buffers = Sequence["pa.Buffer | bytes | bytearray | memoryview"]

IOV_MAX = 1024
"""Linux's limit for the buffers of one vectored write."""

_SYNC_FILE_RANGE_WRITE = 2


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return Linux's ``sync_file_range``, which Python does not offer."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return cast("Callable[[int, int, int, int], int]", call)


_sync_file_range = _find_sync_file_range()


def is_shared_with_group(directory: Path) -> bool:
    """Whether the group of a directory may read what is created in it."""
    return bool(directory.stat().st_mode & stat.S_ISGID)


def get_file_mode(directory: Path) -> int:
    """Return the mode of a new file in a directory."""
    return 0o640 if is_shared_with_group(directory) else 0o600


def share_with_group(directory: Path, group: str) -> None:
    """Let a group read what is created in a directory from now on. Raises ``OSError``.

    Raises ``LookupError`` if there is no such group.
    """
    shutil.chown(directory, group=group)
    directory.chmod(0o2750)


class Disk:
    """The real disk. Its methods raise only ``OSError``."""

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> int:
        """Open a file and return its descriptor."""
        flags = os.O_CLOEXEC | (os.O_RDWR if write else os.O_RDONLY)
        if not create:
            return os.open(path, flags)
        return os.open(path, flags | os.O_CREAT, get_file_mode(path.parent))

    def create_directory(self, path: Path) -> None:
        """Create a directory and the ones above it, unless it exists."""
        if not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(0o750 if is_shared_with_group(path.parent) else 0o700, exist_ok=True)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    @contextmanager
    def open_file(self, path: Path, *, create: bool = False, write: bool = False) -> Iterator[int]:
        """Open a file, by default only for reading, and close it at the end of the block."""
        fd = self.open(path, create=create, write=write)
        try:
            yield fd
        finally:
            self.close(fd)

    def write(self, fd: int, buffers: Buffers, at: int) -> None:
        """Write all buffers, one after the other, from byte ``at`` on."""
        if len(buffers) == 1 and os.pwrite(fd, buffers[0], at) == memoryview(buffers[0]).nbytes:
            return  # the usual case of a journal record: skip the preparations below
        rest = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        while rest:
            done = os.pwritev(fd, rest[:IOV_MAX], at)
            at += done
            while rest and done >= len(rest[0]):
                done -= len(rest.pop(0))
            if rest and done:
                rest[0] = rest[0][done:]

    def read(self, fd: int, length: int, at: int) -> pa.Buffer:
        """Read ``length`` bytes from byte ``at`` on; fewer at the end of the file.

        The memory comes from Arrow's pool, which reuses it. Fresh memory for every frame would cost
        more page faults than the reading itself.
        """
        buffer = pa.allocate_buffer(length)
        view = memoryview(buffer)
        done = 0
        while done < length:
            got = os.preadv(fd, [view[done:]], at + done)
            if not got:
                break
            done += got
        return buffer.slice(0, done)

    def begin_sync(self, fd: int, at: int, length: int) -> None:
        """Ask the device to begin writing these bytes, so that a later sync takes less time.

        This is only a hint. It promises nothing, and a failure shows at the sync.
        """
        if _sync_file_range is not None:
            _sync_file_range(fd, at, length, _SYNC_FILE_RANGE_WRITE)

    def sync(self, fd: int) -> None:
        """Return once the file's data is on the device."""
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        """Return once the directory's entries are on the device."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def truncate(self, fd: int, size: int) -> None:
        """Cut the file to ``size`` bytes."""
        os.ftruncate(fd, size)

    def allocate(self, fd: int, size: int) -> None:
        """Reserve ``size`` bytes on the device, so that writing them later cannot lack space."""
        os.posix_fallocate(fd, 0, size)

    def size(self, fd: int) -> int:
        """Return the file's length."""
        return os.fstat(fd).st_size

    def rename(self, old: Path, new: Path) -> None:
        """Rename ``old`` to ``new`` and replace a file of this name."""
        old.replace(new)

    def unlink(self, path: Path) -> None:
        """Delete a file."""
        path.unlink()

    def listing(self, path: Path) -> list[str]:
        """Return the names in a directory, sorted."""
        return sorted(os.listdir(path))

    def free_bytes(self, path: Path) -> int:
        """Return the bytes that an unprivileged process may still write."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def write_whole(self, path: Path, data: bytes) -> None:
        """Replace a file's content in one durable step."""
        temporary = path.with_name(path.name + ".new")
        with self.open_file(temporary, create=True, write=True) as fd:
            self.truncate(fd, 0)
            self.write(fd, [data], 0)
            self.sync(fd)
        self.rename(temporary, path)
        self.sync_directory(path.parent)
