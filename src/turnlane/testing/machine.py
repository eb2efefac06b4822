"""The machine under the control of a test: a clock that stands still, and a disk that fails.

A test plans faults of the disk in advance. A plan (``CallPlan``) says which calls it hits; all
plans that hit a call are carried out.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from turnlane.clock import Clock
from turnlane.storage.disk_io import Buffers, Disk


class ManualClock(Clock):
    """A clock that stands still until a test moves it. Safe to use from several threads."""

    def __init__(self, time_ns: int = 1_700_000_000_000_000_000, monotonic: float = 1000.0) -> None:
        self._lock = threading.Lock()
        self._wall = time_ns
        self._monotonic = round(monotonic * 1e9)

    def time_ns(self) -> int:
        """Return nanoseconds since the epoch."""
        return self._wall

    def monotonic(self) -> float:
        """Return seconds that only :meth:`advance` changes."""
        return self._monotonic / 1e9

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        if seconds < 0:
            raise ValueError(f"cannot advance by {seconds} s; use jump() to move the wall clock")
        step = round(seconds * 1e9)
        with self._lock:
            self._wall += step
            self._monotonic += step

    def jump(self, seconds: float) -> None:
        """Move the wall clock alone, forward or back, as an operator or NTP would."""
        with self._lock:
            self._wall += round(seconds * 1e9)


# ── the disk ─────────────────────────────────────────────────────────────────────────────────────

_COMPOSED = {"begin_sync", "open_file", "write_whole"}
"""Methods of a disk that call its operations."""
OPERATIONS = frozenset(name for name in vars(Disk) if not name.startswith("_")) - _COMPOSED
"""The operations that can fail."""


@dataclass(slots=True)
class CallPlan:
    """Which calls to hit: the ``nth`` from now and the following, ``times`` in all or without end.

    The owner's lock guards the count.
    """

    nth: int
    times: int | None
    calls: int = 0

    def count_call(self) -> bool:
        """Count a call; return whether the plan hits it."""
        self.calls += 1
        return self.calls >= self.nth and (self.times is None or self.calls < self.nth + self.times)


@dataclass(slots=True)
class DiskFault:
    """A planned fault: which calls it hits, and what happens to them."""

    op: str
    match: str
    plan: CallPlan
    error: int | None = None
    keep: int | None = None
    """The bytes of a write that are written before the fault; other faults come first."""
    kill: bool = False
    seconds: float = 0.0

    def hits(self, op: str, path: Path | None) -> bool:
        """Count a call if it is of this kind; return whether the fault hits it."""
        is_match = op == self.op and self.match in (path.name if path else "")
        return is_match and self.plan.count_call()

    def carry_out(self, path: Path | None) -> None:
        """Wait, kill the process or raise."""
        if self.seconds:
            time.sleep(self.seconds)
        if self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.error is not None:
            raise _make_error(self.error, path)


class FaultyDisk(Disk):
    """A real disk with planned faults. Safe to use from several threads.

    A plan names an operation (one of :data:`OPERATIONS`) and the calls to hit: ``nth`` counts from
    1 at the moment of planning, ``times`` says how many calls in a row (``None``: until
    :meth:`clear`), and ``match`` restricts it to files whose name contains that text. Several plans
    may exist at once. A fault comes before the operation has any effect, except that :meth:`tear`
    and a full disk write the first part.

    A killed process loses nothing that it had written; :meth:`cut_power` shows what a power cut
    would do, :class:`PowerCutDisk` also with writes that are reordered.
    """

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        """How many times each operation was called, failed calls included."""
        self._lock = threading.Lock()
        self._faults: list[DiskFault] = []
        self._paths: dict[int, Path] = {}
        self._synced: dict[int, int] = {}
        """By inode: the synced bytes of a file."""
        self._room: int | None = None

    # ── plans ───────────────────────────────────────────────────────────────────────────────────

    def fail(
        self,
        op: str,
        nth: int = 1,
        error: int = errno.EIO,
        times: int | None = 1,
        *,
        match: str = "",
    ) -> None:
        """Raise ``OSError(error)`` ``times`` times, beginning at the ``nth`` call."""
        self._add(DiskFault(op, match, CallPlan(nth, times), error=error))

    def tear(
        self, nth: int = 1, keep_bytes: int = 0, *, kill: bool = False, match: str = ""
    ) -> None:
        """Write only the first ``keep_bytes`` of a write, then raise EIO, or kill the process."""
        plan = CallPlan(nth, 1)
        self._add(DiskFault("write", match, plan, error=errno.EIO, keep=keep_bytes, kill=kill))

    def forget(self, nth: int = 1, *, match: str = "") -> None:
        """Fail a sync like a kernel that drops the data that it could not write.

        Unsynced bytes read as zeros after that, and the next sync succeeds.
        """
        self._add(DiskFault("sync", match, CallPlan(nth, 1), error=errno.EIO, keep=0))

    def kill(self, op: str, nth: int = 1, *, match: str = "") -> None:
        """Kill the process with SIGKILL instead of the ``nth`` call."""
        self._add(DiskFault(op, match, CallPlan(nth, 1), kill=True))

    def delay(
        self, op: str, nth: int = 1, seconds: float = 0.1, times: int | None = 1, *, match: str = ""
    ) -> None:
        """Let a call wait before it goes on."""
        self._add(DiskFault(op, match, CallPlan(nth, times), seconds=seconds))

    def clear(self) -> None:
        """Remove all plans. A full disk stays full: :meth:`unfill` ends that."""
        with self._lock:
            self._faults.clear()

    def _add(self, fault: DiskFault) -> None:
        if fault.op not in OPERATIONS:
            raise ValueError(
                f"no operation {fault.op!r}; there are {', '.join(sorted(OPERATIONS))}"
            )
        with self._lock:
            self._faults.append(fault)

    def cut_power(self, directory: Path, copy: Path, *, match: str = "") -> None:
        """Copy a directory in a state in which a power cut at this moment might leave it.

        Files that only grow and whose name contains ``match`` keep their synced bytes, and are not
        copied if there are none. All other files are complete: a device may write in any order.
        """
        copy.mkdir()
        for path in filter(Path.is_file, directory.iterdir()):
            data = path.read_bytes()
            if match in path.name:
                data = data[: self._synced.get(path.stat().st_ino, 0)]
            if data or match not in path.name:
                (copy / path.name).write_bytes(data)

    # ── a full disk ─────────────────────────────────────────────────────────────────────────────

    def fill(self, after_bytes: int = 0) -> None:
        """Let all files together grow by ``after_bytes`` more, then raise ENOSPC.

        The first part of a write that does not fit is written. Bytes that a file already has, or
        that were allocated, need no room; deleting, replacing or truncating files makes room.
        """
        with self._lock:
            self._room = after_bytes

    def drain(self, size: int) -> None:
        """Make room for ``size`` more bytes on the full disk, as if a person had cleaned up."""
        with self._lock:
            if self._room is not None and size > 0:
                self._room += size

    def unfill(self) -> None:
        """End the shortage."""
        with self._lock:
            self._room = None

    def _take_room(self, size: int) -> int:
        """Use up room for ``size`` bytes; return how many of them fit."""
        with self._lock:
            if self._room is None or size <= 0:
                return size
            fits = min(size, self._room)
            self._room -= fits
            return fits

    # ── operations ──────────────────────────────────────────────────────────────────────────────

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> int:
        self._begin("open", path)
        fd = super().open(path, create=create, write=write)
        with self._lock:
            self._paths[fd] = path
        if not super().size(fd):
            self._synced.pop(os.fstat(fd).st_ino, None)
        return fd

    def close(self, fd: int) -> None:
        self._begin("close", fd)
        with self._lock:
            self._paths.pop(fd, None)
        super().close(fd)

    def write(self, fd: int, buffers: Buffers, at: int) -> None:
        length = sum(memoryview(buffer).nbytes for buffer in buffers)
        torn = self._begin("write", fd)
        if torn is not None and torn.keep is not None:
            super().write(fd, _cut(buffers, torn.keep), at)
            torn.carry_out(self._get_path(fd))
        growth = max(0, at + length - max(at, super().size(fd)))
        missing = growth - self._take_room(growth)
        super().write(fd, _cut(buffers, length - missing) if missing else buffers, at)
        if missing:
            raise _make_error(errno.ENOSPC, self._get_path(fd))

    def read(self, fd: int, length: int, at: int) -> pa.Buffer:
        self._begin("read", fd)
        return super().read(fd, length, at)

    def sync(self, fd: int) -> None:
        fault = self._begin("sync", fd)
        inode, size = os.fstat(fd).st_ino, super().size(fd)
        if fault is not None:
            synced = min(size, self._synced.get(inode, 0))
            super().write(fd, [bytes(size - synced)], synced)
            fault.carry_out(self._get_path(fd))
        super().sync(fd)
        self._synced[inode] = size

    def sync_directory(self, path: Path) -> None:
        self._begin("sync_directory", path)
        super().sync_directory(path)

    def truncate(self, fd: int, size: int) -> None:
        self._begin("truncate", fd)
        before = super().size(fd)
        super().truncate(fd, size)
        self.drain(before - size)

    def allocate(self, fd: int, size: int) -> None:
        self._begin("allocate", fd)
        growth = max(0, size - super().size(fd))
        fits = self._take_room(growth)
        if fits < growth:
            self.drain(fits)
            raise _make_error(errno.ENOSPC, self._get_path(fd))
        super().allocate(fd, size)

    def size(self, fd: int) -> int:
        self._begin("size", fd)
        return super().size(fd)

    def rename(self, old: Path, new: Path) -> None:
        self._begin("rename", new)
        freed = _get_length(new)
        super().rename(old, new)
        self.drain(freed)

    def unlink(self, path: Path) -> None:
        self._begin("unlink", path)
        freed = _get_length(path)
        super().unlink(path)
        self.drain(freed)

    def listing(self, path: Path) -> list[str]:
        self._begin("listing", path)
        return super().listing(path)

    def free_bytes(self, path: Path) -> int:
        self._begin("free_bytes", path)
        free = super().free_bytes(path)
        return free if self._room is None else min(free, self._room)

    def _begin(self, op: str, file: Path | int) -> DiskFault | None:
        """Count a call and carry out the faults that hit it; return a fault that has a ``keep``."""
        path = file if isinstance(file, Path) else self._get_path(file)
        with self._lock:
            self.operations[op] += 1
            due = [fault for fault in self._faults if fault.hits(op, path)]
        # Outside the lock: a delayed call must not delay the others.
        for fault in due:
            if fault.keep is None:
                fault.carry_out(path)
        return next((fault for fault in due if fault.keep is not None), None)

    def _get_path(self, fd: int) -> Path | None:
        with self._lock:
            return self._paths.get(fd)


SECTOR = 512
"""The bytes that a device writes completely or not at all."""


@dataclass(frozen=True, slots=True)
class UnsyncedChange:
    """A change of a file since its last sync: bytes at an offset, or a new length."""

    at: int
    data: bytes | None = None

    def split(self) -> list[UnsyncedChange]:
        """Return the parts that a device writes independently of each other."""
        if self.data is None:
            return [self]
        ends = range(self.at // SECTOR * SECTOR + SECTOR, self.at + len(self.data), SECTOR)
        starts = [self.at, *ends]
        stops = [*ends, self.at + len(self.data)]
        return [
            UnsyncedChange(start, self.data[start - self.at : stop - self.at])
            for start, stop in zip(starts, stops, strict=True)
        ]

    def apply(self, content: bytearray) -> None:
        """Carry it out. Bytes that were never written are zeros."""
        length = self.at if self.data is None else self.at + len(self.data)
        content.extend(bytes(max(0, length - len(content))))
        if self.data is None:
            del content[length:]
        else:
            content[self.at : length] = self.data


@dataclass(slots=True, eq=False)
class UnsyncedFile:
    """The content of a file at its last sync, and everything that has changed it since."""

    content: bytearray
    changes: list[UnsyncedChange]


class PowerCutDisk(FaultyDisk):
    """A disk that knows what a power cut may leave of unsynced changes. See :meth:`draw_power_cut`.

    It models a device and a file system that promise nothing without a sync. Of the changes since
    the last sync of a file, any part may be on the device, in units of 512 bytes: also a later one
    without an earlier one. The same is true of names (new files, renames, deletions) since the last
    sync of their directory; a rename itself happens completely or not at all. Bytes in a gap are
    zeros. It keeps the files in memory, so it is for small ones. Safe to use from several threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changing = threading.RLock()
        """Makes a change of a file and its record here one step."""
        self._files: dict[int, UnsyncedFile] = {}
        """By descriptor."""
        self._names: dict[Path, UnsyncedFile] = {}
        """The names that there are now; and, below, that there were at the directory's sync."""
        self._synced_names: dict[Path, UnsyncedFile] = {}
        self._renames: list[tuple[Path | None, Path | None, UnsyncedFile]] = []
        """Old name, new name and file: without an old name it is new, without a new one deleted."""
        self._calls: list[tuple[CallPlan, Callable[[], None]]] = []

    def call(self, work: Callable[[], None], nth: int = 1) -> None:
        """Call ``work`` before the ``nth`` operation from now, on the thread of this operation."""
        with self._changing:
            self._calls.append((CallPlan(nth, 1), work))

    def draw_power_cut(self, directory: Path, copy: Path, rng: random.Random) -> None:
        """Copy a directory in a state, drawn at random, in which a power cut may leave it."""
        copy.mkdir()
        with self._changing:
            for path in filter(Path.is_file, directory.iterdir()):
                self._find(path)
            for path, file in self._draw_names(rng).items():
                if path.parent == directory:
                    keeps = _draw_survival(rng)
                    content = bytearray(file.content)
                    for part in (part for change in file.changes for part in change.split()):
                        if keeps():
                            part.apply(content)
                    (copy / path.name).write_bytes(content)

    def _draw_names(self, rng: random.Random) -> dict[Path, UnsyncedFile]:
        keeps = _draw_survival(rng)
        names = dict(self._synced_names)
        for old, new, file in self._renames:
            if keeps() and (old is None or names.get(old) is file):
                if old is not None:
                    del names[old]
                if new is not None:
                    names[new] = file
        return names

    def _begin(self, op: str, file: Path | int) -> DiskFault | None:
        with self._changing:
            for plan, work in self._calls:
                if plan.count_call():
                    work()
        return super()._begin(op, file)

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> int:
        with self._changing:
            existed = path.exists()
            fd = super().open(path, create=create, write=write)
            if not existed:
                self._names[path] = UnsyncedFile(bytearray(), [])
                self._renames.append((None, path, self._names[path]))
            self._files[fd] = self._find(path)
            return fd

    def _find(self, path: Path) -> UnsyncedFile:
        """Return the record of a file that exists. A file from an earlier life is durable."""
        if path not in self._names:
            file = UnsyncedFile(bytearray(path.read_bytes()), [])
            self._names[path] = self._synced_names[path] = file
        return self._names[path]

    def close(self, fd: int) -> None:
        with self._changing:
            super().close(fd)
            del self._files[fd]

    def write(self, fd: int, buffers: Buffers, at: int) -> None:
        with self._changing:
            super().write(fd, buffers, at)
            data = b"".join(memoryview(buffer).cast("B") for buffer in buffers)
            self._files[fd].changes.append(UnsyncedChange(at, data))

    def truncate(self, fd: int, size: int) -> None:
        with self._changing:
            super().truncate(fd, size)
            self._files[fd].changes.append(UnsyncedChange(size))

    def allocate(self, fd: int, size: int) -> None:
        with self._changing:
            super().allocate(fd, size)
            self._files[fd].changes.append(UnsyncedChange(self.size(fd)))

    def sync(self, fd: int) -> None:
        file = self._files[fd]
        with self._changing:
            count = len(file.changes)
        super().sync(fd)
        with self._changing:
            for change in file.changes[:count]:
                change.apply(file.content)
            del file.changes[:count]

    def sync_directory(self, path: Path) -> None:
        with self._changing:
            super().sync_directory(path)
            unsynced = []
            for old, new, file in self._renames:
                if path not in {name.parent for name in (old, new) if name is not None}:
                    unsynced.append((old, new, file))
                    continue
                if old is not None:
                    self._synced_names.pop(old, None)
                if new is not None:
                    self._synced_names[new] = file
            self._renames = unsynced

    def rename(self, old: Path, new: Path) -> None:
        with self._changing:
            file = self._find(old)
            if new.exists():
                self._find(new)
            super().rename(old, new)
            self._names[new] = self._names.pop(old)
            self._renames.append((old, new, file))

    def unlink(self, path: Path) -> None:
        with self._changing:
            file = self._find(path)
            super().unlink(path)
            del self._names[path]
            self._renames.append((path, None, file))


def _draw_survival(rng: random.Random) -> Callable[[], bool]:
    """Return a function that tells of one change after the other whether it is on the device."""
    share = rng.random()
    first = iter([True] * rng.randrange(20))
    return rng.choice(
        [
            lambda: False,
            lambda: True,
            lambda: next(first, False),  # in order
            lambda: rng.random() < share,  # in any order
        ]
    )


def _make_error(number: int, path: Path | None) -> OSError:
    return OSError(number, os.strerror(number), str(path) if path else None)


def _get_length(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _cut(buffers: Buffers, length: int) -> list[memoryview]:
    """Return the first ``length`` bytes of the buffers."""
    views = []
    for buffer in buffers:
        view = memoryview(buffer).cast("B")[:length]
        views.append(view)
        length -= len(view)
    return views
