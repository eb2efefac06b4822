"""The segment at the end of the log, which is open for writing.

A group of frames is written completely, or the file is cut back to its former end. One group can
be written by a second thread while the log's writer encodes the next one.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from time import perf_counter

from turnlane.storage.disk_io import Disk
from turnlane.storage.encoder import FrameGroup
from turnlane.storage.segments import Segment

EARLY_SYNC_BYTES = 1 << 20
"""After a write of this size the device is asked to begin at once: a later sync takes less time."""

MAX_GROUPS_IN_PROGRESS = 2
"""Groups that may be in progress before the writer waits: the device always has a next one."""


class SingleThreadExecutor:
    """Runs one call after the other on a thread of its own. For one calling thread.

    The thread starts with the first call. ``concurrent.futures`` does not serve here: its worker
    keeps a finished call, and so the memory of a written group, until the next one comes, and it
    runs a call late that it could not start a thread for. Here the calling thread then runs it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._results: SimpleQueue[BaseException | None] = SimpleQueue()

    def submit(self, call: Callable[[], None]) -> None:
        """Start a call; :meth:`wait` must follow."""
        self._calls.put(call)
        if self._thread is None:
            self._start()

    def wait(self) -> None:
        """Wait for the oldest call that is not waited for yet; raise the error that it raised."""
        error = self._results.get()
        if error is not None:
            raise error

    def stop(self) -> None:
        """End the thread. A later call starts another one."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _start(self) -> None:
        # A daemon thread, as the queue's writer: all that matters is synced before a close returns.
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No thread can start while the interpreter ends, or when the process has too many.
            self._calls.put(None)
            self._run()
        else:
            self._thread = thread

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001  wait() raises it
                self._results.put(error)
            else:
                del call  # frees the memory of the group before the next one is encoded
                self._results.put(None)


class ActiveSegment:
    """The file to which the log's one writer appends, if there is one.

    ``on_written`` is called on the writer's thread after each group, in order.
    """

    def __init__(
        self, disk: Disk, *, durable: bool, on_written: Callable[[FrameGroup], None]
    ) -> None:
        self.segment: Segment | None = None
        self._disk = disk
        self._fd = -1
        self._durable = durable
        self._on_written = on_written
        self._needs_cut = False
        """The file ends with part of a group that failed."""
        self._write_failed = False
        """A write has failed, so the groups after it are not written: they would follow a gap."""
        self._executor = SingleThreadExecutor("turnlane-disk")
        self._in_progress: deque[FrameGroup] = deque()
        """The groups that are being written, in order."""

    def open(self, segment: Segment, fd: int) -> None:
        """Append to this segment and close the former one."""
        self.close()
        self.segment, self._fd = segment, fd

    def close(self) -> None:
        """Close the file; nothing is appended to it any more."""
        if self._fd >= 0:
            self._disk.close(self._fd)
        self.segment, self._fd, self._needs_cut = None, -1, False

    def stop(self) -> None:
        """Close the file and end the thread."""
        self.close()
        self._executor.stop()

    @property
    def bytes_in_progress(self) -> int:
        """Bytes of groups that are being written and are not in the segment's size yet."""
        return sum(group.size for group in self._in_progress)

    def write(self, group: FrameGroup) -> None:
        """Append a group. ``OSError``: nothing of it is in the file."""
        self.finish()
        if self._prepare(group):
            self._complete(group, lambda: self._write(group))

    def begin(self, group: FrameGroup) -> None:
        """Append a group on the second thread; :meth:`finish` raises the error if it fails."""
        if len(self._in_progress) == MAX_GROUPS_IN_PROGRESS:
            self._finish_oldest()
        if self._prepare(group):
            self._executor.submit(lambda: self._write(group))
            self._in_progress.append(group)

    def finish(self) -> None:
        """Wait for all groups in progress. ``OSError``: some of them are not in the file."""
        while self._in_progress:
            self._finish_oldest()

    def sync(self) -> None:
        """Return once the file's data is on the device."""
        self._disk.sync(self._fd)

    def _finish_oldest(self) -> None:
        self._complete(self._in_progress.popleft(), self._executor.wait)

    def _prepare(self, group: FrameGroup) -> bool:
        """Give the group its place in the file; false if there is nothing to write."""
        if self.segment is None or not group.size:
            return False
        if self._needs_cut:
            self._cut_back(self.segment)
        group.at = self.segment.size + self.bytes_in_progress
        return True

    def _write(self, group: FrameGroup) -> None:
        """Write the group and change nothing else: this may run on the second thread."""
        if self._write_failed:
            return
        started = perf_counter()
        try:
            self._disk.write(self._fd, group.buffers, group.at)
        except OSError:
            self._write_failed = True
            raise
        if self._durable and group.size >= EARLY_SYNC_BYTES:
            self._disk.begin_sync(self._fd, group.at, group.size)
        group.seconds = perf_counter() - started

    def _complete(self, group: FrameGroup, wait_for_write: Callable[[], None]) -> None:
        """Wait until the group is in the file, then let readers see it."""
        segment = self.segment
        assert segment is not None
        try:
            wait_for_write()
        except OSError:
            for _ in self._in_progress:
                self._executor.wait()
            self._in_progress.clear()
            self._write_failed, self._needs_cut = False, True
            with contextlib.suppress(OSError):
                self._cut_back(segment)
            raise
        for offset, byte in group.starts:
            segment.add_mark(offset, group.at + byte)
        # The size first: readers trust the end, so the size must cover all events before it.
        segment.size += group.size
        segment.end = group.end
        self._on_written(group)

    def _cut_back(self, segment: Segment) -> None:
        """Cut off a write that failed; nothing may be written until this succeeds."""
        self._disk.truncate(self._fd, segment.size)
        self._needs_cut = False
