"""Looking into a queue's directory from outside, and repairing it: the work behind the CLI.

An inspection works on a running, stopped or damaged queue and changes nothing. It lists the
segments first and reads the journal after that. A queue does it in the other order: it records in
the journal first and deletes a segment after that. So a segment that disappeared in between is
known to be settled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from turnlane.errors import DirectoryLocked, NotSupported, SchemaMismatch
from turnlane.events import BASE_SCHEMA
from turnlane.intervals import RangeSet
from turnlane.ledger import Outcome
from turnlane.storage.directory import IDENTITY_FILE, QUARANTINE, Quarantine, QueueDirectory
from turnlane.storage.disk_io import Disk
from turnlane.storage.fastqueue import CHUNK_NAME, POSITION_HEADER, FastQueueDirectory
from turnlane.storage.journal import Journal
from turnlane.storage.journal_records import JournalState
from turnlane.storage.reader import StoredEvents
from turnlane.storage.store import Store, StoreSettings
from turnlane.storage.verify import (
    Finding,
    JournalCheck,
    QueueAccount,
    Verification,
    VerificationReport,
    compute_account,
)
from turnlane.storage.walk import (
    EventSlice,
    FindingKind,
    InspectableQueue,
    IntactFrame,
    Offsets,
    SegmentWalk,
    Selection,
    find_holder,
    ignore_progress,
    list_segment_files,
)


def open_inspection(path: Path) -> InspectableQueue:
    """Return an inspection of a directory, turnlane's or FastQueue's. Raises ``NotAQueue``."""
    return FastQueueInspection(path) if _is_fastqueue(path) else QueueInspection(path)


def open_own_inspection(path: Path) -> QueueInspection:
    """Return an inspection of a directory that must be turnlane's: FastQueue has no ledger."""
    if _is_fastqueue(path):
        raise NotSupported(
            f"{path}: is a FastQueue directory, which supports only peek, verify, export and import"
        )
    return QueueInspection(path)


def _is_fastqueue(path: Path) -> bool:
    return not (path / IDENTITY_FILE).exists() and FastQueueDirectory.is_fastqueue(path)


class QueueInspection:
    """One look at a directory of turnlane's. Takes no lock, writes nothing."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        """Raises ``NotAQueue`` if there is no queue, or one of an unknown format."""
        self.path = path
        self.disk = disk or Disk()
        directory = QueueDirectory.read_only(path, self.disk)
        self.name = directory.name
        self.queue_id = directory.queue_id
        self.running = find_holder(path)
        """The process that has the queue open, if there is one."""
        self.segments = list_segment_files(path, self.disk, self.queue_id)
        self.state = self.journal()
        self.settled = self.find_settled(self.state)
        self._read = RangeSet()
        """The offsets of all frames that the last ``slices()`` came across."""

    def journal(self) -> JournalState:
        """Read the state of the journal at this moment."""
        return Journal.read(self.path, self.disk, self.queue_id)

    def low(self, state: JournalState) -> int:
        """Return the offset below which all is settled; without a journal as a queue assumes it."""
        if state.found:
            return state.low
        return next((segment.first for segment in self.segments if not segment.foreign), 0)

    def find_settled(self, state: JournalState) -> RangeSet:
        """Return all offsets that are settled by this state."""
        return RangeSet([(0, self.low(state)), *state.settled])

    @property
    def size(self) -> int:
        """The bytes of all segments."""
        return sum(segment.size for segment in self.segments)

    @property
    def schema(self) -> pa.Schema:
        """All columns of all segments, base columns first.

        Raises ``SchemaMismatch`` if a column has different types in two segments.
        """
        schemas = [segment.schema.schema for segment in self.segments if segment.schema]
        try:
            return pa.unify_schemas([BASE_SCHEMA, *schemas])
        except pa.ArrowException as error:
            raise SchemaMismatch(f"{self.path}: chunks have different types: {error}") from None

    def slices(
        self, selection: Selection, advance: Callable[[int], None] = ignore_progress
    ) -> Iterator[EventSlice]:
        """Yield the selected events that can be read, oldest first, a frame at a time."""
        first, end = self._get_first(selection), selection.end
        self._read = RangeSet()

        def is_wanted(start: int, stop: int) -> bool:
            has_selected = selection.settled or not self.settled.covers(start, stop)
            return has_selected and start < end and stop > first

        segments = [segment for segment in self.segments if segment.limit > first]
        for item in SegmentWalk(self.disk, segments, is_wanted):
            if item.first >= end:
                return
            if isinstance(item, IntactFrame):
                advance(item.stored_size)
                self._read.add(item.first, item.end)
                low, high = max(first, item.first), min(end, item.end)
                yield from self._cut(item, low, high, with_settled=selection.settled)

    def _get_first(self, selection: Selection) -> int:
        if selection.first is not None:
            return selection.first
        return 0 if selection.settled else self.low(self.state)

    def _cut(
        self, frame: IntactFrame, first: int, end: int, *, with_settled: bool
    ) -> Iterator[EventSlice]:
        """Yield the part ``[first, end)``, cut where settled and unsettled events meet."""
        if frame.block is None:
            return
        parts = [(start, stop, False) for start, stop in self.settled.missing(first, end)]
        if with_settled:
            parts += [(start, stop, True) for start, stop in self.settled.within(first, end)]
        for start, stop, settled in sorted(parts):
            block = frame.block.slice(start - frame.first, stop - start)
            yield EventSlice(np.arange(start, stop, dtype=np.int64), settled, block)

    @property
    def end(self) -> int:
        """The next offset, by the log as far as it was read, and by the journal."""
        return max(self._read.end, self.state.floor, self.low(self.state))

    def unreadable(self, selection: Selection) -> int:
        """Return how many unsettled events the last ``slices()`` of a selection could not read.

        Only as far as it read. Events that a running queue has settled since then do not count.
        """
        settled = self.find_settled(self.journal())
        known = self._read.end
        if self.state.position and self.running is None:
            known = max(known, self.state.position.end)
        gaps = self._read.missing(self._get_first(selection), min(known, selection.end))
        return sum(end - first - settled.overlap(first, end) for first, end in gaps)

    def verify(self, advance: Callable[[int], None] = ignore_progress) -> VerificationReport:
        """Check every frame of every segment, the journal, and the queue's identity."""
        return Verification(self).run(advance)

    def account(self) -> QueueAccount:
        """Return the ledger, from the journal and the headers of all frames."""
        return compute_account(self)


class FastQueueInspection:
    """A look at a FastQueue directory. Writes nothing.

    A block is an event, and its offset is its byte position in the queue. Blocks before the
    metadata's reader offset count as settled.
    """

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        """Raises ``NotAQueue`` if it is not a FastQueue directory."""
        self.path = path
        self._directory = FastQueueDirectory.open(path, disk=disk)
        metadata = self._directory.metadata
        self.name = (metadata.name if metadata else "") or path.name
        self._reader_offset = metadata.reader_offset if metadata else 0

    def _list_chunks(self) -> list[Path]:
        return [entry for entry in self.path.iterdir() if CHUNK_NAME.fullmatch(entry.name)]

    @property
    def size(self) -> int:
        """The bytes of all chunks."""
        return sum(chunk.stat().st_size for chunk in self._list_chunks())

    @property
    def schema(self) -> pa.Schema:
        """The base columns: FastQueue has no others."""
        return BASE_SCHEMA

    def slices(
        self, selection: Selection, advance: Callable[[int], None] = ignore_progress
    ) -> Iterator[EventSlice]:
        """Yield the selected blocks as events, in batches."""
        first = selection.first or 0
        if not selection.settled:
            first = max(first, self._reader_offset)
        for block in self._directory.blocks(start=first):
            offsets = _get_positions(block)
            advance(block.nbytes)
            bounds = [first, min(max(first, self._reader_offset), selection.end), selection.end]
            cuts = np.searchsorted(offsets, bounds)
            for start, stop, settled in ((cuts[0], cuts[1], True), (cuts[1], cuts[2], False)):
                if start < stop:
                    part = block.slice(int(start), int(stop - start))
                    yield EventSlice(offsets[start:stop], settled, part)
            if len(offsets) and offsets[-1] >= selection.end:
                return

    @property
    def end(self) -> int:
        """The byte position after the last chunk."""
        chunks = self._list_chunks()
        return max((int(chunk.name, 16) + chunk.stat().st_size for chunk in chunks), default=0)

    def unreadable(self, selection: Selection) -> int:
        """Return how many places of the selection cannot be read. Reads all chunks."""
        first = selection.first if selection.first is not None else self._reader_offset
        positions = [
            int(fault.file.name, 16) + fault.byte
            for fault in self._directory.faults()
            if CHUNK_NAME.fullmatch(fault.file.name)
        ]
        return sum(first <= position < selection.end for position in positions)

    def verify(self, advance: Callable[[int], None] = ignore_progress) -> VerificationReport:
        """Check every block."""
        report = VerificationReport(self.name, "", None, bytes=self.size)
        report.chunks = len(self._list_chunks())
        for part in self.slices(Selection(settled=True), advance):
            report.events += len(part.offsets)
            report.frames = report.events
            report.pending += 0 if part.settled else len(part.offsets)
        for fault in self._directory.faults():
            report.findings.append(
                Finding(
                    FindingKind.FASTQUEUE,
                    fault=True,
                    file=fault.file.name,
                    byte=fault.byte,
                    what=fault.message,
                    todo="export what can be read; turnlane never changes FastQueue's files",
                )
            )
        return report


def _get_positions(block: pa.RecordBatch) -> Offsets:
    headers = block.column("headers").to_pylist()
    return np.array([int(dict(pairs or ())[POSITION_HEADER]) for pairs in headers], dtype=np.int64)


# ── repair ───────────────────────────────────────────────────────────────────────────────────────
# A repair opens the store as a queue does, reads all pending events, and settles the lost ones.
# It contains no repair of files: recovery cuts a torn tail, the reader copies damaged bytes to
# quarantine, the journal counts the losses. The repair makes all of this happen now and
# reports it.


@dataclass(slots=True)
class RepairResult:
    """What a repair has done."""

    saved: int = 0
    """Unsettled events that can be read."""
    lost: dict[str, int] = field(default_factory=dict)
    """Unsettled events that cannot be read, by the reason in the ledger."""
    recovered_acks: int = 0
    """Valid records after a damaged one of the journal that were applied."""
    set_aside: list[str] = field(default_factory=list)
    """Files in which unreadable bytes were kept."""

    def as_dict(self) -> dict[str, object]:
        """Return a form for JSON."""
        return asdict(self)


class QueueRepair:
    """One repair of one directory, which no process may have open."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        """Raises ``DirectoryLocked`` if a process has the queue open, or ``NotAQueue``."""
        self._path = path
        self._disk = disk or Disk()
        self._queue = QueueInspection(path, self._disk)
        if self._queue.running is not None:
            raise DirectoryLocked(f"{path}: held by process {self._queue.running}")

    def plan(self, advance: Callable[[int], None] = ignore_progress) -> VerificationReport:
        """Return everything that a repair would handle; changes nothing."""
        return self._queue.verify(advance)

    def run(self, advance: Callable[[int], None] = ignore_progress) -> RepairResult:
        """Repair. Raises ``DirectoryLocked`` if a process has opened the queue since then."""
        set_aside_before = self._list_set_aside()
        check = JournalCheck(self._path, self._disk, self._queue.queue_id)
        # The name matters only if queue.json has to be written again.
        store = Store.open(StoreSettings(self._path, self._queue.name), self._disk)
        try:
            result = RepairResult()
            self._apply_ignored_records(store, check, result)
            self._read_pending(store, result, advance)
            store.journal.snapshot()
        finally:
            store.close()
        result.set_aside = sorted(self._list_set_aside() - set_aside_before)
        return result

    def _list_set_aside(self) -> set[str]:
        """Return the files that turnlane has set aside."""
        names = {name for name in self._disk.listing(self._path) if name.endswith(".foreign")}
        quarantine = self._path / QUARANTINE
        if quarantine.is_dir():
            names |= {f"{QUARANTINE}/{name}" for name in self._disk.listing(quarantine)}
        return names

    def _apply_ignored_records(
        self, store: Store, check: JournalCheck, result: RepairResult
    ) -> None:
        """Apply the records after a damaged one, which an opening queue ignores."""
        ignored = check.list_ignored_records()
        if ignored:
            # Before anything is recorded: the journal will overwrite this file.
            Quarantine(self._path, self._disk).copy_file(check.active_path)
        for record in ignored:
            store.journal.record_settled(*record)
        result.recovered_acks = len(ignored)
        if not self._queue.state.found:
            # Segments are deleted only when all their events are settled; a queue assumes the same.
            store.journal.record_settled(0, store.log.start, 0, Outcome.DELIVERED)

    def _read_pending(
        self, store: Store, result: RepairResult, advance: Callable[[int], None]
    ) -> None:
        """Read all pending events, and settle the unreadable ones."""
        state = store.journal.state()
        unsettled = RangeSet([(0, state.low), *state.settled]).missing(0, store.log.end)
        pending = sum(end - first for first, end in unsettled)
        average_size = store.unsettled_bytes // max(1, pending)
        for first, end in unsettled:
            at = first
            while at < end:
                found = store.fetch(at, end)
                if isinstance(found, StoredEvents):
                    stop = at + found.block.num_rows
                    result.saved += stop - at
                    advance(found.block.nbytes)
                else:
                    stop = min(found.end, end)
                    size = average_size * (stop - at)
                    store.journal.record_settled(at, stop, size, found.outcome)
                    reason = found.outcome.value
                    result.lost[reason] = result.lost.get(reason, 0) + stop - at
                at = stop


def is_repairable(finding: Finding) -> bool:
    """Whether a repair does something about the finding."""
    # The latter two are notes, because they cost no events; the next open handles them.
    return finding.fault or finding.kind in (FindingKind.TORN_TAIL, FindingKind.NEVER_WRITTEN)
