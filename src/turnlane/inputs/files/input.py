"""The thread that follows files: scan, read, publish, save."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from turnlane.errors import QueueClosed, QueueFull
from turnlane.events import BASE_SCHEMA, Block
from turnlane.formats.lines import repeat_text
from turnlane.inputs.api import Counters, Host, Input, InputSettings
from turnlane.inputs.files.reader import FileReader, FileReplaced, Fingerprint, LineBatch
from turnlane.inputs.files.tracker import FileScanner, FilesSettings, FileTracker, PositionsFile
from turnlane.logs import get_logger
from turnlane.queues.api import Ack, AckLevel, FullBehavior, Published
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.producer import BufferedProducer
from turnlane.queues.settings import Kind
from turnlane.queues.state import MAX_SEQUENCES
from turnlane.runtime import start_thread
from turnlane.storage.disk_io import Disk
from turnlane.storage.producer_sequences import GapPolicy
from turnlane.storage.store import FRAME_BYTES

log = get_logger(__name__)

ACTIVE_SECONDS = 3.0
ACTIVE_POLL = 0.05
"""Files that changed less than ``ACTIVE_SECONDS`` ago are also read between scans."""

SAVE_SECONDS = 1.0
"""How often positions are saved; a disk queue has newer ones."""

ACK_SECONDS = 2.0
"""How long to wait for acks when positions must be saved."""

MAX_OPEN_FILES = 4096
"""The most open files, even if the system allows more."""

MIN_PAUSE_FACTOR = 20
"""After a scan or a save, pause at least this many times its duration."""

FULL_QUEUE_SECONDS = 0.5
"""How long to wait at a full queue before the next check for stops, scans and saves."""

QUEUE_SHARE = 4
"""A block takes at most this part of the queue: a larger one would wait until it is empty."""

ROW_BYTES = 64
"""More than a row costs beside its value and its source."""


class LinePublisher:
    """Publishes lines of files into one queue. The thread of the input owns it."""

    def __init__(
        self,
        queue: BufferedQueue,
        settings: FilesSettings,
        on_progress: Callable[[FileReader], None],
    ) -> None:
        self._queue = queue
        self._settings = settings
        self._on_progress = on_progress
        self.is_durable = queue.settings.kind is Kind.DISK
        # A disk queue saves the position with the lines; the positions file only follows.
        self._level = AckLevel.PERSISTED if self.is_durable else settings.ack
        self._drops_are_losses = queue.settings.full_behavior is FullBehavior.BLOCK
        self._max_rows = max(1, queue.max_events // QUEUE_SHARE)
        # One frame: after a kill between two frames of a block, the first would come again.
        self._max_bytes = max(1, min(queue.max_bytes // QUEUE_SHARE, FRAME_BYTES))

    def get_max_line_bytes(self, source: str) -> int:
        """Return the longest line that fits into an event."""
        room = self._queue.max_event_bytes - len(source.encode()) - ROW_BYTES
        return max(1, min(self._settings.max_line_bytes, room))

    def publish(
        self, reader: FileReader, batch: LineBatch, may_continue: Callable[[], bool]
    ) -> int:
        """Publish lines, also while the queue is full; return how many are in the queue.

        While the queue is full, ``may_continue`` says again and again whether to wait on. Raises
        ``QueueClosed``.
        """
        block = self._build_block(reader, batch)
        producer = reader.producer or self._open_producer(reader)
        first = 0
        while first < block.num_rows:
            # The queue must take a part whole: it must not split it, nor number it by itself.
            part = block.slice(first, self._max_rows)
            while part.num_rows > 1 and part.nbytes > self._max_bytes:
                part = part.slice(0, part.num_rows // 2)
            end = first + part.num_rows
            # The queue keeps the number after the last event: the byte after the last line. A line
            # has at least one byte, so its number is not below the one kept before.
            sequence = batch.start + int(batch.lines.ends[end - 1]) - part.num_rows
            published: Published | None = None
            while published is None:
                try:
                    published = producer.publish_block(
                        part, sequence=sequence, timeout=FULL_QUEUE_SECONDS
                    )
                except QueueFull:
                    if not may_continue():
                        return first
            reader.advance(batch, end)
            queue_end = published.first + published.accepted if published.accepted else None
            reader.progress.add_published(queue_end, reader.position, Fingerprint.of(reader.before))
            if reader.progress.is_settled:
                self._on_progress(reader)
            first = end
        return first

    def _build_block(self, reader: FileReader, batch: LineBatch) -> Block:
        rows = len(batch.lines.ends)
        timestamp = BASE_SCHEMA.field("timestamp").type
        arrays = [
            batch.lines.values,
            pa.array(np.full(rows, time.time_ns() // 1000)).view(timestamp),
            repeat_text(reader.source, rows),
        ]
        names = ["value", "timestamp", "source"]
        if self._settings.offsets:
            starts = np.concatenate(([0], batch.lines.ends[:-1])) + batch.start
            arrays.append(pa.array(starts, pa.int64()))
            names.append("file_offset")
        return pa.RecordBatch.from_arrays(arrays, names=names)

    def _open_producer(self, reader: FileReader) -> BufferedProducer:
        progress = reader.progress

        def on_ack(ack: Ack) -> None:
            progress.handle_ack(ack, drops_are_losses=self._drops_are_losses)
            self._on_progress(reader)

        reader.producer = self._queue.producer(
            ack=self._level,
            on_ack=on_ack,
            flow=self._settings.flow,
            producer_id=reader.id,
            gaps=GapPolicy.POSITIONS,
        )
        return reader.producer


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
    settings: FilesSettings

    def __init__(self, settings: FilesSettings, host: Host, *, disk: Disk | None = None) -> None:
        super().__init__(settings, host)
        self.counters: FileCounters = FileCounters()
        self._disk = disk
        self._scanner = FileScanner(settings, host.data)
        self._stopping = threading.Event()
        self._scanned_once = threading.Event()
        self._ack_deadline = 0.0
        self._thread: threading.Thread | None = None
        self._open: dict[FileReader, None] = {}
        """Readers with an open file, the least recently used first."""
        self._max_open = _compute_max_open_files()
        self._active: dict[FileReader, None] = {}
        """Readers that are asked in every round."""
        self._published_since_save: set[FileReader] = set()
        self._last_published: FileReader | None = None
        self._scan_at = self._save_at = 0.0

    def start(self) -> None:
        self.prepare()
        self._thread = start_thread(f"turnlane-files-{self.settings.label}", self._run)
        self._scanned_once.wait()

    def prepare(self) -> None:
        """Load the saved positions: everything that :meth:`start` does, except the thread."""
        queue = self.host.queue(self.settings.queue)
        name = self.settings.label.replace("%", "%25").replace("/", "%2F")
        positions = PositionsFile(self.host.data / "inputs" / f"{name}.json", self._disk)
        self._tracker = FileTracker(self.settings, self._scanner, queue, positions)
        self._publisher = LinePublisher(queue, self.settings, self._tracker.mark_moved)

    def stop(self, timeout: float) -> None:
        self._ack_deadline = time.monotonic() + timeout
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout + 5.0)
            if thread.is_alive():
                hint = "a read of a file hangs; the thread ends with the process"
                log.error("files.stop_timeout", input=self.settings.label, hint=hint)

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    found_lines = self.run_round()
                except QueueClosed:
                    raise
                except Exception:
                    log.exception("files.round_failed", input=self.settings.label)
                    self._scanned_once.set()
                    self._stopping.wait(self.settings.scan_interval)
                    continue
                if not found_lines:
                    until_scan = max(0.0, self._scan_at - time.monotonic())
                    self._stopping.wait(
                        min(ACTIVE_POLL, until_scan) if self._active else until_scan
                    )
        except QueueClosed as error:
            log.info("files.ended", input=self.settings.label, error=error)
        finally:
            self._scanned_once.set()
            self._finish()

    def run_round(self) -> bool:
        """Ask every file that may have new lines once; true if any had. The work of the thread."""
        self._scan_if_due()
        found_lines = False
        for reader in list(self._active):
            if self._stopping.is_set():
                break
            if self._tracker.readers.get(reader.key) is not reader:
                del self._active[reader]  # dropped since; another reader may follow the file
            elif self._serve(reader):
                found_lines = True
                if self._is_queue_forgetting:
                    self._save_if_due()
            elif reader.idle_seconds > ACTIVE_SECONDS:
                self._active.pop(reader, None)
        self._save_if_due()
        return found_lines

    def _scan_if_due(self) -> None:
        started = time.monotonic()
        if started < self._scan_at:
            return
        self._tracker.scan()
        self.counters.files = len(self._tracker.readers)
        for reader in self._tracker.readers.values():
            if self._may_have_lines(reader):
                self._active[reader] = None
            elif reader.fd is not None and reader.idle_seconds > self.settings.close_inactive:
                self._close(reader)
                self._active.pop(reader, None)
        self._scanned_once.set()
        now = time.monotonic()
        self._scan_at = now + max(self.settings.scan_interval, MIN_PAUSE_FACTOR * (now - started))

    def _may_have_lines(self, reader: FileReader) -> bool:
        takes_partial = self.settings.partial_timeout is not None and reader.has_partial_line
        is_missing = reader.missing_since is not None
        return not reader.is_fully_read or is_missing or takes_partial or reader.progress.has_losses

    # ── one file ─────────────────────────────────────────────────────────────────────────────────

    def _serve(self, reader: FileReader) -> bool:
        """Read and publish the next lines of a file; false if there are none."""
        try:
            return self._read_and_publish(reader)
        except FileReplaced:
            self._restart(reader)
            return True
        except FileNotFoundError:
            self._active.pop(reader, None)  # the next scan finds its new name, if it has one
        except OSError as error:
            if self._scanner.is_first_warning(reader.path):
                log.warning("files.read_failed", path=reader.path, error=error)
            self.count(failed=1)
            self._close(reader)
            self._active.pop(reader, None)
        return False

    def _read_and_publish(self, reader: FileReader) -> bool:
        if reader.fd is None:
            if not self._may_have_lines(reader):
                return False  # closed because too many files are open: scans watch it
            self._open_file(reader)
        if reader.progress.has_losses:
            # The queue has lost lines to a failing disk: read them again, as another producer.
            position = reader.progress.offset
            log.warning("files.lines_lost", path=reader.path, reading_from=position)
            reader.restart(position)
        whole = self._is_last_line_complete(reader)
        if not self._tracker.can_publish(reader):
            return self._identify(reader, whole=whole)
        longest = self._publisher.get_max_line_bytes(reader.source)
        batch = reader.read(self.settings.read_buffer, longest, whole=whole)
        if batch is not None:
            self._scanner.clear_warning(reader.path)
            return self._publish(reader, batch)
        if reader.missing_since is not None and whole:
            self._drop_when_settled(reader)
        return False

    def _is_last_line_complete(self, reader: FileReader) -> bool:
        """Whether a last line without a newline counts as complete."""
        if reader.missing_since is not None:
            missing_seconds = time.monotonic() - reader.missing_since
            return min(missing_seconds, reader.idle_seconds) >= self.settings.rotate_wait
        timeout = self.settings.partial_timeout
        return timeout is not None and reader.idle_seconds >= timeout

    def _identify(self, reader: FileReader, *, whole: bool) -> bool:
        """Identify a new file by its first line; true if the next round can read it."""
        if reader.id is not None:
            return False  # its id is not saved yet
        head = reader.read_head(whole=whole)
        if head is not None:
            self._scanner.clear_warning(reader.path)
            self._tracker.identify(reader, head)
            return True
        if reader.missing_since is not None and whole:
            self._drop_when_settled(reader)
        reader.ask_queue = False
        reader.read_version = reader.version
        return False

    def _publish(self, reader: FileReader, batch: LineBatch) -> bool:
        before = reader.position
        events = self._publisher.publish(reader, batch, self._wait_for_room)
        self.count(events=events, bytes=reader.position - before, split=batch.lines.split)
        self._open[reader] = self._open.pop(reader, None)
        self._published_since_save.add(reader)
        self._last_published = reader
        return events > 0

    def _wait_for_room(self) -> bool:
        """Scan and save while the queue is full; false if the input has to stop.

        New files are opened now: then their lines stay readable if the files are deleted.
        """
        if self._stopping.is_set():
            return False
        self._scan_if_due()
        for reader in self._tracker.readers.values():
            has_room = len(self._open) < self._max_open
            if reader.fd is None and not reader.is_fully_read and has_room:
                try:
                    self._open_file(reader)
                except (FileReplaced, OSError):
                    self._close(reader)  # handled when the file is served
        self._save_if_due()
        return True

    def _open_file(self, reader: FileReader) -> None:
        if len(self._open) >= self._max_open:
            # Not a file without a name: it could not be opened again.
            named = next((each for each in self._open if each.missing_since is None), None)
            if named is not None:
                self._close(named)
        reader.open()
        self._open[reader] = None

    def _close(self, reader: FileReader) -> None:
        self._open.pop(reader, None)
        reader.close()

    def _restart(self, reader: FileReader) -> None:
        """Read a truncated or rewritten file from its start."""
        if reader.missing_since is not None:
            # The globs do not match its new name, or its inode belongs to another file now.
            self._drop(reader, forget=True)
            return
        log.info("files.truncated", path=reader.path, hint="reading it from its start")
        self.count(truncated=1)
        reader.restart()
        self._open.setdefault(reader, None)

    def _drop_when_settled(self, reader: FileReader) -> None:
        """Drop a file without a name, which is read to its end and no longer written."""
        if reader.progress.is_settled or not self._publisher.is_durable:
            log.info("files.finished", path=reader.path)
            self._drop(reader, forget=reader.is_deleted)

    def _drop(self, reader: FileReader, *, forget: bool) -> None:
        self._tracker.drop(reader, forget=forget)
        self._open.pop(reader, None)
        self._active.pop(reader, None)

    # ── saving ───────────────────────────────────────────────────────────────────────────────────

    @property
    def _is_queue_forgetting(self) -> bool:
        """Whether positions must be saved before the queue forgets its least active producers."""
        return self._publisher.is_durable and len(self._published_since_save) >= MAX_SEQUENCES // 2

    def _save_if_due(self) -> None:
        is_forgetting = self._is_queue_forgetting
        is_due = time.monotonic() >= self._save_at and self._tracker.has_changes
        if is_forgetting:
            self._await_acks(time.monotonic() + ACK_SECONDS)
        if is_due or is_forgetting or self._tracker.must_save:
            self._save()

    def _save(self) -> None:
        started = time.monotonic()
        if self._tracker.save():
            published = self._published_since_save
            self._published_since_save = {
                each for each in published if not each.progress.is_settled
            }
        now = time.monotonic()
        self._save_at = now + max(SAVE_SECONDS, MIN_PAUSE_FACTOR * (now - started))

    def _await_acks(self, deadline: float) -> None:
        last = self._last_published
        if last is not None and last.producer is not None:
            last.producer.flush(max(0.0, deadline - time.monotonic()))
        pause = threading.Event()
        while time.monotonic() < deadline:
            if all(each.progress.is_settled for each in self._published_since_save):
                return
            pause.wait(0.005)

    def _finish(self) -> None:
        try:
            self._await_acks(self._ack_deadline)
            self._save()
        finally:
            for reader in list(self._tracker.readers.values()):
                self._close(reader)


def _compute_max_open_files() -> int:
    """Return how many files may be open: at most half of the limit of the process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_OPEN_FILES
    return max(16, min(MAX_OPEN_FILES, soft // 2))
