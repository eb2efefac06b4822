"""A disk that fails, fills up, tears, delays or kills, when it is told to."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from turnlane.storage.disk_io import Buffers, Disk

OPERATIONS = frozenset(
    {
        "open",
        "close",
        "write",
        "read",
        "sync",
        "sync_directory",
        "truncate",
        "allocate",
        "size",
        "rename",
        "unlink",
        "listing",
        "free_bytes",
    }
)
"""What a fault can be planned for. ``write_whole`` is made of these and has no name of its own."""


@dataclass(slots=True)
class _Fault:
    """One planned trouble: which calls it meets, and what it does to them."""

    op: str
    match: str
    nth: int
    times: int | None
    error: int | None = None
    keep: int | None = None
    kill: bool = False
    seconds: float = 0.0
    seen: int = 0

    def meets(self, op: str, path: Path | None) -> bool:
        """Count a call, and say whether it is one of those to be hit."""
        if op != self.op or self.match not in (path.name if path else ""):
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)


class FaultyDisk(Disk):
    """A real disk with planned troubles. Safe to use from several threads.

    A plan names an operation (one of :data:`OPERATIONS`) and which call of it to hit: ``nth``
    counts from 1 at the moment of planning, ``times`` says how many calls in a row (``None``: until
    :meth:`clear`), ``match`` restricts it to files whose name contains that text. Several plans
    may stand at once. Faults hit before the operation has any effect, except that :meth:`tear` and
    a full disk leave the first part of a write behind.

    A killed process loses nothing that it had written; :meth:`cut_power` shows what a power cut
    would do to it.
    """

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        """How often each operation was called, failed calls included."""
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self._paths: dict[int, Path] = {}
        self._synced: dict[int, int] = {}
        """By inode: how much of a file was synced."""
        self._room: int | None = None

    # Planning

    def fail(
        self,
        op: str,
        nth: int = 1,
        error: int = errno.EIO,
        times: int | None = 1,
        *,
        match: str = "",
    ) -> None:
        """Raise ``OSError(error)`` from the ``nth`` call on, ``times`` times."""
        self._plan(_Fault(op, match, nth, times, error=error))

    def tear(
        self, nth: int = 1, keep_bytes: int = 0, *, kill: bool = False, match: str = ""
    ) -> None:
        """Write only the first ``keep_bytes`` of a write, then raise EIO, or kill the process."""
        self._plan(_Fault("write", match, nth, 1, error=errno.EIO, keep=keep_bytes, kill=kill))

    def forget(self, nth: int = 1, *, match: str = "") -> None:
        """Fail a sync as a kernel does that gives up what it could not write.

        Unsynced bytes read as zeros after that, and the next sync succeeds.
        """
        self._plan(_Fault("sync", match, nth, 1, error=errno.EIO, keep=0))

    def kill(self, op: str, nth: int = 1, *, match: str = "") -> None:
        """Kill the process with SIGKILL in place of the ``nth`` call."""
        self._plan(_Fault(op, match, nth, 1, kill=True))

    def delay(
        self, op: str, nth: int = 1, seconds: float = 0.1, times: int | None = 1, *, match: str = ""
    ) -> None:
        """Let the call wait before it goes on."""
        self._plan(_Fault(op, match, nth, times, seconds=seconds))

    def clear(self) -> None:
        """Forget all plans, the full disk excepted: :meth:`unfill` ends that."""
        with self._lock:
            self._faults.clear()

    def _plan(self, fault: _Fault) -> None:
        if fault.op not in OPERATIONS:
            raise ValueError(
                f"no operation {fault.op!r}; there are {', '.join(sorted(OPERATIONS))}"
            )
        with self._lock:
            self._faults.append(fault)

    # A power cut

    def cut_power(self, directory: Path, copy: Path, *, match: str = "") -> None:
        """Copy a directory as a power cut at this moment might leave it.

        Files that only grow and whose name contains ``match`` keep their synced part, and are
        gone if nothing was. All others had reached the device: it may write in any order.
        """
        copy.mkdir()
        for path in filter(Path.is_file, directory.iterdir()):
            data = path.read_bytes()
            if match in path.name:
                data = data[: self._synced.get(path.stat().st_ino, 0)]
            if data or match not in path.name:
                (copy / path.name).write_bytes(data)

    # A full disk

    def fill(self, after_bytes: int = 0) -> None:
        """Let files grow by ``after_bytes`` more in all, then raise ENOSPC.

        A write that does not fit is made as far as it does. Bytes that a file already has, or that
        were allocated, cost nothing; deleting, replacing or cutting files gives their bytes back.
        """
        with self._lock:
            self._room = after_bytes

    def drain(self, size: int) -> None:
        """Make room for ``size`` more bytes on the full disk, as if someone had cleaned up."""
        self._give_back(size)

    def unfill(self) -> None:
        """End the shortage."""
        with self._lock:
            self._room = None

    def _take(self, size: int) -> int:
        """Use up room for ``size`` bytes; returns how many of them fit."""
        with self._lock:
            if self._room is None or size <= 0:
                return size
            fits = min(size, self._room)
            self._room -= fits
            return fits

    def _give_back(self, size: int) -> None:
        with self._lock:
            if self._room is not None and size > 0:
                self._room += size

    # The operations

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> int:
        self._pass("open", path)
        fd = super().open(path, create=create, write=write)
        with self._lock:
            self._paths[fd] = path
        if not super().size(fd):
            self._synced.pop(os.fstat(fd).st_ino, None)
        return fd

    def close(self, fd: int) -> None:
        self._pass("close", fd)
        with self._lock:
            self._paths.pop(fd, None)
        super().close(fd)

    def write(self, fd: int, buffers: Buffers, at: int) -> None:
        length = sum(memoryview(buffer).nbytes for buffer in buffers)
        torn = self._pass("write", fd)
        if torn is not None and torn.keep is not None:
            super().write(fd, _cut(buffers, torn.keep), at)
            _strike(torn, self._path(fd))
        grows = max(0, at + length - max(at, super().size(fd)))
        short = grows - self._take(grows)
        super().write(fd, _cut(buffers, length - short) if short else buffers, at)
        if short:
            raise _error(errno.ENOSPC, self._path(fd))

    def read(self, fd: int, length: int, at: int) -> pa.Buffer:
        self._pass("read", fd)
        return super().read(fd, length, at)

    def sync(self, fd: int) -> None:
        forgetting = self._pass("sync", fd)
        file, size = os.fstat(fd).st_ino, super().size(fd)
        if forgetting is not None:
            synced = min(size, self._synced.get(file, 0))
            super().write(fd, [bytes(size - synced)], synced)
            _strike(forgetting, self._path(fd))
        super().sync(fd)
        self._synced[file] = size

    def sync_directory(self, path: Path) -> None:
        self._pass("sync_directory", path)
        super().sync_directory(path)

    def truncate(self, fd: int, size: int) -> None:
        self._pass("truncate", fd)
        before = super().size(fd)
        super().truncate(fd, size)
        self._give_back(before - size)

    def allocate(self, fd: int, size: int) -> None:
        self._pass("allocate", fd)
        grows = max(0, size - super().size(fd))
        fits = self._take(grows)
        if fits < grows:
            self._give_back(fits)
            raise _error(errno.ENOSPC, self._path(fd))
        super().allocate(fd, size)

    def size(self, fd: int) -> int:
        self._pass("size", fd)
        return super().size(fd)

    def rename(self, old: Path, new: Path) -> None:
        self._pass("rename", new)
        replaced = _length(new)
        super().rename(old, new)
        self._give_back(replaced)

    def unlink(self, path: Path) -> None:
        self._pass("unlink", path)
        freed = _length(path)
        super().unlink(path)
        self._give_back(freed)

    def listing(self, path: Path) -> list[str]:
        self._pass("listing", path)
        return super().listing(path)

    def free_bytes(self, path: Path) -> int:
        self._pass("free_bytes", path)
        free = super().free_bytes(path)
        return free if self._room is None else min(free, self._room)

    # How plans are carried out

    def _pass(self, op: str, file: Path | int) -> _Fault | None:
        """Count the call and let the faults that meet it strike; who has a ``keep`` is returned."""
        path = file if isinstance(file, Path) else self._path(file)
        with self._lock:
            self.operations[op] += 1
            due = [fault for fault in self._faults if fault.meets(op, path)]
        # Outside the lock: a delayed call must not delay the others.
        for fault in due:
            if fault.keep is None:
                _strike(fault, path)
        return next((fault for fault in due if fault.keep is not None), None)

    def _path(self, fd: int) -> Path | None:
        with self._lock:
            return self._paths.get(fd)


def _strike(fault: _Fault, path: Path | None) -> None:
    if fault.seconds:
        time.sleep(fault.seconds)
    if fault.kill:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.error is not None:
        raise _error(fault.error, path)


def _error(number: int, path: Path | None) -> OSError:
    return OSError(number, os.strerror(number), str(path) if path else None)


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _cut(buffers: Buffers, keep: int) -> list[memoryview]:
    """The first ``keep`` bytes of the buffers."""
    kept: list[memoryview] = []
    for buffer in buffers:
        view = memoryview(buffer).cast("B")[:keep]
        kept.append(view)
        keep -= len(view)
    return kept
