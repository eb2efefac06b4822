"""The chunk at the log's end, open for writing: what goes there goes whole, or is cut off again."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from time import perf_counter

from turnlane.storage.disk_io import Disk
from turnlane.storage.encoder import Group
from turnlane.storage.segments import Chunk

# ── hand ──
# A second pair of hands: does one thing on a thread of its own while the caller does the next.


class Hand:
    """Does one call at a time. For one thread; its own begins with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[BaseException | None] = SimpleQueue()

    def begin(self, call: Callable[[], None]) -> None:
        """Have it done; :meth:`finish` has to follow."""
        self._calls.put(call)
        if self._thread is None:
            self._start()

    def finish(self) -> None:
        """Wait until it is done. Raises what the call has raised."""
        outcome = self._outcomes.get()
        if outcome is not None:
            raise outcome

    def _start(self) -> None:
        # A daemon, as the queue's writer is: what matters is synced before a close returns.
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # When a program ends, or has too many, there are no more threads: do it here.
            self._calls.put(None)
            self._run()
        else:
            self._thread = thread

    def stop(self) -> None:
        """End the thread. A call afterwards begins another."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001  whoever waits for it is told
                self._outcomes.put(error)
            else:
                del call  # and with it what was written: its memory is for the next frame
                self._outcomes.put(None)


EARLY_BYTES = 1 << 20
"""From so much on the device is asked to begin at once: a sync that follows then takes less long.
"""

BEGUN_GROUPS = 2
"""As many are begun before the first has to be written: so the device has the next at once."""


class Active:
    """The file that the log's one writer writes to, if there is one."""

    def __init__(self, disk: Disk, *, durable: bool, written: Callable[[Group], None]) -> None:
        self.chunk: Chunk | None = None
        self._disk = disk
        self._fd = -1
        self._durable = durable
        self._written = written
        self._uncut = False
        self._put_failed = False
        """A write has failed; those begun after it are not done: they would lie behind a gap."""
        self._hand = Hand("turnlane-disk")
        self._begun: deque[Group] = deque()
        """What is being written, in order."""

    def take(self, chunk: Chunk, fd: int) -> None:
        """Write to this chunk from now on."""
        self.retire()
        self.chunk, self._fd = chunk, fd

    def retire(self) -> None:
        """Write no more to the chunk."""
        if self._fd >= 0:
            self._disk.close(self._fd)
        self.chunk, self._fd, self._uncut = None, -1, False

    def close(self) -> None:
        """Close the file, for good."""
        self.retire()
        self._hand.stop()

    def write(self, group: Group) -> None:
        """Write a group at the end. ``OSError``: none of it is in."""
        self.finish()
        if self._is_ready(group):
            self._finished(group, lambda: self._put(group))

    def begin(self, group: Group) -> None:
        """Write a group while the caller makes the next; :meth:`finish` says how it went."""
        if len(self._begun) == BEGUN_GROUPS:
            self._finish_first()
        if self._is_ready(group):
            self._hand.begin(lambda: self._put(group))
            self._begun.append(group)

    @property
    def begun(self) -> int:
        """Bytes that were begun to be written, and are not in the chunk's size yet."""
        return sum(group.size for group in self._begun)

    def finish(self) -> None:
        """Wait for what was begun, if anything was. ``OSError``: some of it is not in."""
        while self._begun:
            self._finish_first()

    def _finish_first(self) -> None:
        self._finished(self._begun.popleft(), self._hand.finish)

    def _is_ready(self, group: Group) -> bool:
        if self.chunk is None or not group.size:
            return False
        if self._uncut:
            self._cut_back(self.chunk)
        group.at = self.chunk.size + self.begun
        return True

    def _put(self, group: Group) -> None:
        """Nothing but the writing: it may happen on another thread."""
        if self._put_failed:
            return
        started = perf_counter()
        try:
            self._disk.write(self._fd, group.buffers, group.at)
        except OSError:
            self._put_failed = True
            raise
        if self._durable and group.size >= EARLY_BYTES:
            self._disk.begin_sync(self._fd, group.at, group.size)
        group.seconds = perf_counter() - started

    def _finished(self, group: Group, await_written: Callable[[], None]) -> None:
        chunk = self.chunk
        assert chunk is not None
        try:
            await_written()
        except OSError:
            self._failed(chunk)
            raise
        self._wrote(group, chunk)

    def _failed(self, chunk: Chunk) -> None:
        for _ in self._begun:
            self._hand.finish()
        self._begun.clear()
        self._put_failed, self._uncut = False, True
        with contextlib.suppress(OSError):
            self._cut_back(chunk)

    def _cut_back(self, chunk: Chunk) -> None:
        """Cut off a write that failed; until that works nothing may be written after it."""
        self._disk.truncate(self._fd, chunk.size)
        self._uncut = False

    def _wrote(self, group: Group, chunk: Chunk) -> None:
        """A group is in the file: let readers see it."""
        for offset, byte in group.starts:
            chunk.mark(offset, group.at + byte)
        # Readers look at the log's end first: it must never promise what the size does not cover.
        chunk.size += group.size
        chunk.end = group.end
        self._written(group)

    def sync(self) -> None:
        """Return once the file's data is on the device."""
        self._disk.sync(self._fd)
