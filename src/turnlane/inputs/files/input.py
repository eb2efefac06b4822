"""The thread that follows files: scan, read, publish, save."""

from __future__ import annotations

import logging
import resource
import threading
import time
from dataclasses import dataclass
from typing import ClassVar

from turnlane.errors import QueueClosed
from turnlane.inputs.api import Counters, Host, Input, InputSettings
from turnlane.inputs.files.publisher import LinePublisher
from turnlane.inputs.files.state import FilesSettings, PositionsFile
from turnlane.inputs.files.tail import Chunk, Replaced, Tail, Watch
from turnlane.inputs.files.tracker import Roster
from turnlane.queues.state import MAX_SEQUENCES
from turnlane.runtime import start_thread
from turnlane.storage.disk_io import Disk

log = logging.getLogger(__name__)

WARM_SECONDS = 3.0
WARM_POLL = 0.05
"""Files that had something new a moment ago are looked at between scans too."""

SAVE_SECONDS = 1.0
"""How often positions are saved; the queue knows better anyway."""

ACK_SECONDS = 2.0
"""How long to wait for acks when positions must be saved."""

MOST_OPEN = 4096
"""At most this many files are open at once, even if the system allows more."""

SHARE_OF_TIME = 20
"""Scanning and saving take at most one part in this many of the time."""


@dataclass(slots=True)
class FileCounters(Counters):
    """Counts of the input: events, and changes of the files."""

    files: int = 0
    """Files followed at this moment."""
    truncated: int = 0
    """Files that were truncated or rewritten."""
    split: int = 0
    """Cuts inside lines that are longer than ``max_line_bytes``."""
    failed: int = 0
    """Attempts to open or read a file that failed."""


class FilesInput(Input):
    """Follows files; each line is an event. See ``turnlane.inputs.files``."""

    settings_type: ClassVar[type[InputSettings]] = FilesSettings

    def __init__(self, settings: InputSettings, host: Host, *, disk: Disk | None = None) -> None:
        super().__init__(settings, host)
        assert isinstance(settings, FilesSettings)
        self.files = settings
        self.counters: FileCounters = FileCounters()
        self._disk = disk
        self._watch = Watch(settings.paths, settings.exclude)
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._ack_until = 0.0
        self._thread: threading.Thread | None = None
        self._open: dict[Tail, None] = {}
        """Tails with an open file, the one served longest ago first."""
        self._max_open = _room_for_files()
        self._warm: dict[Tail, None] = {}
        self._since_save: set[Tail] = set()
        self._last: Tail | None = None
        self._scan_at = self._save_at = 0.0

    def start(self) -> None:
        self.prepare()
        self._thread = start_thread(f"turnlane-files-{self.settings.label}", self._run)
        self._ready.wait()

    def prepare(self) -> None:
        """Load the saved positions: everything that :meth:`start` does, except the thread."""
        queue = self.host.queue(self.settings.queue)
        name = self.settings.label.replace("%", "%25").replace("/", "%2F")
        file = PositionsFile(self.host.data / "inputs" / f"{name}.json", self._disk)
        self._publisher = LinePublisher(queue, self.files, self._on_progress)
        self._roster = Roster(self.files, self._watch, self._publisher, file)

    def _on_progress(self, tail: Tail) -> None:
        self._roster.moved(tail)

    def stop(self, timeout: float) -> None:
        self._ack_until = time.monotonic() + timeout
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout + 5.0)
            if thread.is_alive():
                log.error("input %s hangs in a read; left behind", self.settings.label)

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._pause(busy=self._safe_round())
        except QueueClosed as error:
            log.info("input %s ends: %s", self.settings.label, error)
        finally:
            self._ready.set()
            self._end()

    def _safe_round(self) -> bool:
        """Run one round. After an error the next round runs as usual."""
        try:
            return self.look()
        except QueueClosed:
            raise
        except Exception:
            log.exception("input %s: going on after", self.settings.label)
            self._ready.set()
            self._stopping.wait(self.files.scan_interval)
            return False

    def look(self) -> bool:
        """Look once at every file that may have something; true if any had. The thread's work."""
        self._scan_if_due()
        busy = False
        for tail in list(self._warm):
            if self._stopping.is_set():
                break
            if self._roster.tails.get(tail.key) is not tail:
                del self._warm[tail]  # given up since; the file may be followed by another
            elif self._serve(tail):
                busy = True
                if self._crowded:
                    self._save_if_due()
            elif tail.idle > WARM_SECONDS:
                self._warm.pop(tail, None)
        self._save_if_due()
        return busy

    def _pause(self, *, busy: bool) -> None:
        if not busy:
            until_scan = max(0.0, self._scan_at - time.monotonic())
            self._stopping.wait(min(WARM_POLL, until_scan) if self._warm else until_scan)

    def _scan_if_due(self) -> None:
        began = time.monotonic()
        if began < self._scan_at:
            return
        self._roster.scan()
        self.counters.files = len(self._roster.tails)
        for tail in self._roster.tails.values():
            if self._deserves_a_look(tail):
                self._warm[tail] = None
            elif tail.fd is not None and tail.idle > self.files.close_inactive:
                self._close(tail)
                self._warm.pop(tail, None)
        self._ready.set()
        now = time.monotonic()
        self._scan_at = now + max(self.files.scan_interval, SHARE_OF_TIME * (now - began))

    def _deserves_a_look(self, tail: Tail) -> bool:
        rest = self.files.partial_timeout is not None and tail.has_rest
        return not tail.is_read or tail.nameless_since is not None or rest or tail.progress.lost

    # ── one file ─────────────────────────────────────────────────────────────────────────────────

    def _serve(self, tail: Tail) -> bool:
        """Read and publish the next lines of a file; false if there are none."""
        try:
            return self._follow(tail)
        except Replaced:
            self._renew(tail)
            return True
        except FileNotFoundError:
            self._warm.pop(tail, None)  # the next scan knows where it has gone, if anywhere
        except OSError as error:
            self._watch.complain(tail.path, f"cannot be read: {error.strerror}; trying again")
            self.count(failed=1)
            self._close(tail)
            self._warm.pop(tail, None)
        return False

    def _follow(self, tail: Tail) -> bool:
        if tail.fd is None:
            if not self._deserves_a_look(tail):
                return False  # closed because too many files are open: scans watch it
            self._reopen(tail)
        if tail.progress.lost:
            self._rewind(tail)
        whole = self._is_final(tail)
        if not self._roster.may_publish(tail):
            return self._introduce(tail, whole=whole)
        longest = self._publisher.longest(tail.source)
        chunk = tail.read(self.files.read_buffer, longest, whole=whole)
        if chunk is not None:
            self._watch.satisfied(tail.path)
            return self._publish(tail, chunk)
        if tail.nameless_since is not None and whole:
            self._let_go(tail)
        return False

    def _reopen(self, tail: Tail) -> None:
        if len(self._open) >= self._max_open:
            # Not a file without a name: it could not be opened again.
            named = next((each for each in self._open if each.nameless_since is None), None)
            if named is not None:
                self._close(named)
        tail.open()
        self._open[tail] = None

    def _close(self, tail: Tail) -> None:
        self._open.pop(tail, None)
        tail.close()

    def _is_final(self, tail: Tail) -> bool:
        """Whether a last line without a newline counts as complete."""
        patience = self.files.partial_timeout
        if tail.nameless_since is not None:
            gone = time.monotonic() - tail.nameless_since
            return min(gone, tail.idle) >= self.files.rotate_wait
        return patience is not None and tail.idle >= patience

    def _introduce(self, tail: Tail, *, whole: bool) -> bool:
        """Find out who a new file is; true if it can be read in the next round."""
        if tail.id is not None:
            return False  # it is only to be saved
        head = tail.read_head(whole=whole)
        if head is not None:
            self._watch.satisfied(tail.path)
            self._roster.introduce(tail, head)
            return True
        if tail.nameless_since is not None and whole:
            self._let_go(tail)
        tail.recover = False
        tail.read_at = tail.state
        return False

    def _publish(self, tail: Tail, chunk: Chunk) -> bool:
        before = tail.position
        done = self._publisher.publish(tail, chunk, self._wait_for_room)
        self.count(events=done, bytes=tail.position - before, split=chunk.lines.split)
        self._open[tail] = self._open.pop(tail, None)
        self._since_save.add(tail)
        self._last = tail
        return done > 0

    def _wait_for_room(self) -> bool:
        """The queue is full. Files that appear or disappear during the wait must not be missed."""
        if self._stopping.is_set():
            return False
        self._scan_if_due()
        for tail in self._roster.tails.values():
            if tail.fd is None and not tail.is_read and len(self._open) < self._max_open:
                self._hold(tail)
        self._save_if_due()
        return True

    def _hold(self, tail: Tail) -> None:
        """Open a file early, so that its lines stay within reach when it is deleted."""
        try:
            self._reopen(tail)
        except (Replaced, OSError):
            self._close(tail)  # said and dealt with when it is its turn

    # ── when a file is not what it was ───────────────────────────────────────────────────────────

    def _renew(self, tail: Tail) -> None:
        if tail.nameless_since is not None:
            # Nobody asked for it under its new name, or its inode is another file's by now.
            self._forget(tail)
            return
        log.info("%s was truncated or written anew; reading it from its start", tail.path)
        self.count(truncated=1)
        tail.restart()
        self._open.setdefault(tail, None)

    def _rewind(self, tail: Tail) -> None:
        """The queue has lost lines to a failing disk: read them again, as another producer."""
        position = tail.progress.offset
        log.warning("%s: the queue lost lines; reading again from byte %d", tail.path, position)
        tail.restart(position)

    def _let_go(self, tail: Tail) -> None:
        """A file without a name is read to its end; no program writes to it any more."""
        if tail.progress.settled or not self._publisher.durable:
            log.info("%s is read to its end and gone", tail.path)
            self._forget(tail, entirely=tail.is_deleted)

    def _forget(self, tail: Tail, *, entirely: bool = True) -> None:
        self._roster.drop(tail, forget=entirely)
        self._open.pop(tail, None)
        self._warm.pop(tail, None)

    # ── saving ───────────────────────────────────────────────────────────────────────────────────

    @property
    def _crowded(self) -> bool:
        """The queue forgets the producers that are silent longest; before it does, save them."""
        return self._publisher.durable and len(self._since_save) >= MAX_SEQUENCES // 2

    def _save_if_due(self) -> None:
        crowded = self._crowded
        due = time.monotonic() >= self._save_at and self._roster.has_moved
        if crowded:
            self._await_acks(time.monotonic() + ACK_SECONDS)
        if due or crowded or self._roster.must_save:
            self._save()

    def _save(self) -> None:
        began = time.monotonic()
        if self._roster.save():
            self._since_save = {tail for tail in self._since_save if not tail.progress.settled}
        now = time.monotonic()
        self._save_at = now + max(SAVE_SECONDS, SHARE_OF_TIME * (now - began))

    def _await_acks(self, deadline: float) -> None:
        if self._last is not None:
            self._publisher.flush(self._last, max(0.0, deadline - time.monotonic()))
        pause = threading.Event()
        while time.monotonic() < deadline:
            if all(tail.progress.settled for tail in self._since_save):
                return
            pause.wait(0.005)

    def _end(self) -> None:
        try:
            self._await_acks(self._ack_until)
            self._save()
        finally:
            for tail in list(self._roster.tails.values()):
                self._close(tail)


def _room_for_files() -> int:
    """How many files to hold open: at most half of what the process may."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_OPEN if soft == resource.RLIM_INFINITY else max(16, min(MOST_OPEN, soft // 2))
