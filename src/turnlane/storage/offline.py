"""A queue's directory, looked at from outside: running, stopped or damaged, and never changed.

Chunks are listed first and the journal is read after them. The queue does it the other way round
(journal first, then a chunk goes), so whatever has vanished in between is known to be settled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from turnlane.errors import ConfigError, DirectoryLocked, NotSupported, SchemaMismatch
from turnlane.events import BASE_SCHEMA
from turnlane.intervals import Ranges
from turnlane.ledger import Outcome
from turnlane.queues.settings import QueueSettings
from turnlane.storage.directory import IDENTITY, Quarantine, QueueDirectory
from turnlane.storage.disk_io import Disk
from turnlane.storage.fastqueue import CHUNK_NAME, POSITION_HEADER, FastQueueDirectory
from turnlane.storage.inspect import (
    Inspected,
    Offsets,
    Selection,
    Slice,
    Stretch,
    Walk,
    holder,
    ignore,
    survey,
)
from turnlane.storage.journal import Journal
from turnlane.storage.journal_records import JournalState
from turnlane.storage.log import Found
from turnlane.storage.store import Store
from turnlane.storage.verify import (
    Account,
    Finding,
    FindingKind,
    JournalCheck,
    Report,
    Verification,
    account,
)

# ── fastqueue ──
# FastQueue's own directories, looked at in the same way as turnlane's.
#
# A block is an event; its offset is its byte position in the queue. What lies before the
# metadata's
# reader offset counts as settled.

_ADVICE = "export what can be read; turnlane never changes FastQueue's files"


class FastQueueInspection:
    """A FastQueue directory. Reads only."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        """Raises ``NotAQueue`` if it is none."""
        self.path = path
        self._directory = FastQueueDirectory.open(path, disk=disk)
        metadata = self._directory.metadata
        self.name = (metadata.name if metadata else "") or path.name
        self._reader = metadata.reader_offset if metadata else 0

    @property
    def size(self) -> int:
        """The bytes of all chunks."""
        chunks = [entry for entry in self.path.iterdir() if CHUNK_NAME.fullmatch(entry.name)]
        return sum(chunk.stat().st_size for chunk in chunks)

    @property
    def schema(self) -> pa.Schema:
        """The base columns: FastQueue knows no others."""
        return BASE_SCHEMA

    def slices(
        self, selection: Selection, advance: Callable[[int], None] = ignore
    ) -> Iterator[Slice]:
        """The blocks selected, as events, in batches."""
        first = selection.first or 0
        if not selection.settled:
            first = max(first, self._reader)
        for block in self._directory.blocks(start=first):
            offsets = _positions(block)
            advance(block.nbytes)
            bounds = [first, min(max(first, self._reader), selection.end), selection.end]
            cuts = np.searchsorted(offsets, bounds)
            for start, stop, settled in ((cuts[0], cuts[1], True), (cuts[1], cuts[2], False)):
                if start < stop:
                    piece = block.slice(int(start), int(stop - start))
                    yield Slice(offsets[start:stop], settled, piece)
            if len(offsets) and offsets[-1] >= selection.end:
                return

    @property
    def end(self) -> int:
        """The byte position after the last chunk."""
        chunks = [entry for entry in self.path.iterdir() if CHUNK_NAME.fullmatch(entry.name)]
        return max((int(chunk.name, 16) + chunk.stat().st_size for chunk in chunks), default=0)

    def unreadable(self, selection: Selection) -> int:
        """How many places of the selection cannot be read. Goes through all chunks."""
        first = selection.first if selection.first is not None else self._reader
        positions = [
            int(fault.file.name, 16) + fault.byte
            for fault in self._directory.faults()
            if CHUNK_NAME.fullmatch(fault.file.name)
        ]
        return sum(first <= position < selection.end for position in positions)

    def verify(self, advance: Callable[[int], None] = ignore) -> Report:
        """Check every block."""
        report = Report(self.name, "", None, bytes=self.size)
        report.chunks = sum(1 for entry in self.path.iterdir() if CHUNK_NAME.fullmatch(entry.name))
        for piece in self.slices(Selection(settled=True), advance):
            report.events += len(piece.offsets)
            report.frames = report.events
            report.pending += 0 if piece.settled else len(piece.offsets)
        for fault in self._directory.faults():
            report.findings.append(
                Finding(
                    FindingKind.FASTQUEUE,
                    fault=True,
                    file=fault.file.name,
                    byte=fault.byte,
                    what=fault.what,
                    todo=_ADVICE,
                )
            )
        return report


def _positions(block: pa.RecordBatch) -> Offsets:
    headers = block.column("headers").to_pylist()
    return np.array([int(dict(pairs or ())[POSITION_HEADER]) for pairs in headers], dtype=np.int64)


class Inspection:
    """One look at a directory. Takes no lock, writes nothing."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        """Raises ``NotAQueue`` if there is no queue, or one of an unknown format."""
        self.path = path
        self.disk = disk or Disk()
        directory = QueueDirectory.read_only(path, self.disk)
        self.name = directory.name
        self.queue_id = directory.queue_id
        self.running = holder(path)
        """The process that has the queue open, if one has."""
        self.chunks = survey(path, self.disk, self.queue_id)
        self.state = self.journal()
        self.settled = self.settled_by(self.state)
        self._seen = Ranges()

    def journal(self) -> JournalState:
        """What the journal says at this moment."""
        return Journal.read(self.path, self.disk, self.queue_id)

    def low(self, state: JournalState) -> int:
        """Everything below is settled; without a journal, as the queue itself would assume."""
        if state.found:
            return state.low
        return next((chunk.first for chunk in self.chunks if not chunk.foreign), 0)

    def settled_by(self, state: JournalState) -> Ranges:
        """All offsets that are settled."""
        return Ranges([(0, self.low(state)), *state.settled])

    @property
    def size(self) -> int:
        """The bytes of all chunks."""
        return sum(chunk.size for chunk in self.chunks)

    @property
    def schema(self) -> pa.Schema:
        """All columns of all chunks, base columns first.

        Raises ``SchemaMismatch`` if a column has one type here and another there.
        """
        schemas = [chunk.schema.schema for chunk in self.chunks if chunk.schema]
        try:
            return pa.unify_schemas([BASE_SCHEMA, *schemas])
        except pa.ArrowException as error:
            raise SchemaMismatch(f"{self.path}: chunks have different types: {error}") from None

    def slices(
        self, selection: Selection, advance: Callable[[int], None] = ignore
    ) -> Iterator[Slice]:
        """The events selected that can be read, oldest first, a frame at a time."""
        first, end, everything = self._bounds(selection), selection.end, selection.settled
        self._seen = Ranges()

        def wanted(start: int, stop: int) -> bool:
            needed = everything or not self.settled.covers(start, stop)
            return needed and start < end and stop > first

        chunks = [chunk for chunk in self.chunks if chunk.limit > first]
        for item in Walk(self.disk, chunks, wanted):
            if item.first >= end:
                return
            if isinstance(item, Stretch):
                advance(item.stored)
                self._seen.add(item.first, item.end)
                yield from self._cut(item, max(first, item.first), min(end, item.end), everything)

    def _bounds(self, selection: Selection) -> int:
        if selection.first is not None:
            return selection.first
        return 0 if selection.settled else self.low(self.state)

    def _cut(self, item: Stretch, first: int, end: int, everything: bool) -> Iterator[Slice]:  # noqa: FBT001
        """The part ``[first, end)``, cut where settled and unsettled events meet."""
        if item.block is None:
            return
        pieces = [(start, stop, False) for start, stop in self.settled.missing(first, end)]
        if everything:
            pieces += [(start, stop, True) for start, stop in self.settled.within(first, end)]
        for start, stop, settled in sorted(pieces):
            block = item.block.slice(start - item.first, stop - start)
            yield Slice(np.arange(start, stop, dtype=np.int64), settled, block)

    @property
    def end(self) -> int:
        """The next offset, by the log as far as it was read, and by the journal."""
        return max(self._seen.end, self.state.floor, self.low(self.state))

    def unreadable(self, selection: Selection) -> int:
        """How many unsettled events of the selection the last ``slices()`` could not read.

        Only as far as that one came. What a running queue has settled meanwhile does not count.
        """
        settled = self.settled_by(self.journal())
        known = self._seen.end
        if self.state.position and self.running is None:
            known = max(known, self.state.position.end)
        gone = self._seen.missing(self._bounds(selection), min(known, selection.end))
        return sum(end - first - settled.overlap(first, end) for first, end in gone)

    def verify(self, advance: Callable[[int], None] = ignore) -> Report:
        """Check every frame of every chunk, the journal, and the queue's identity."""
        return Verification(self).run(advance)

    def account(self) -> Account:
        """The ledger, from the journal and the headers of all frames."""
        return account(self)


# ── inspection ──
# Looking into queue directories from outside, and repairing them: the work behind the CLI.


def inspect(path: Path) -> Inspected:
    """Look at a directory, turnlane's or FastQueue's. Raises ``NotAQueue``."""
    return FastQueueInspection(path) if _is_fastqueue(path) else Inspection(path)


def inspect_own(path: Path) -> Inspection:
    """Look at a directory that has to be turnlane's: FastQueue kept no account of anything."""
    if _is_fastqueue(path):
        msg = f"{path}: is FastQueue's; it can be looked at (peek, verify, export) and no more"
        raise NotSupported(msg)
    return Inspection(path)


def _is_fastqueue(path: Path) -> bool:
    return not (path / IDENTITY).exists() and FastQueueDirectory.recognises(path)


# ── repair ──
# Repairing a queue: open it as it opens itself, read all that is pending, settle what is lost.
#
# Nothing here knows how to mend a file. Recovery cuts what is torn, the reader copies what it
# cannot
# read to quarantine, and the journal counts what is gone: repair only makes all of it happen
# now, and
# says what came of it.

_DONE_AT_OPEN = (FindingKind.TORN_TAIL, FindingKind.NEVER_WRITTEN)
"""What costs nothing more than it has already, and is dealt with all the same."""


@dataclass(slots=True)
class Repaired:
    """What a repair has done."""

    saved: int = 0
    """Unsettled events that can be read."""
    lost: dict[str, int] = field(default_factory=dict)
    """Unsettled events that cannot, by the reason under which the ledger now counts them."""
    recovered_acks: int = 0
    """Records behind a damaged one of the journal that were taken over."""
    set_aside: list[str] = field(default_factory=list)
    """Files in which unreadable bytes were kept."""

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "saved": self.saved,
            "lost": self.lost,
            "recovered_acks": self.recovered_acks,
            "set_aside": self.set_aside,
        }


class Repair:
    """One repair of one directory, which nobody may have open."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        """Raises ``DirectoryLocked`` if somebody seems to have it open, or ``NotAQueue``."""
        self._path = path
        self._disk = disk or Disk()
        self._queue = Inspection(path, self._disk)
        if self._queue.running is not None:
            raise DirectoryLocked(f"{path}: held by process {self._queue.running}")

    def plan(self, advance: Callable[[int], None] = ignore) -> Report:
        """What there is to repair; changes nothing."""
        return self._queue.verify(advance)

    def run(self, advance: Callable[[int], None] = ignore) -> Repaired:
        """Repair. Raises ``DirectoryLocked`` if somebody has opened it meanwhile."""
        before = self._kept()
        check = JournalCheck(self._path, self._disk, self._queue.queue_id)
        store = Store.open(self._settings(), self._disk)
        try:
            repaired = Repaired()
            self._take_over(store, check, repaired)
            self._read_through(store, repaired, advance)
            store.journal.snapshot()
        finally:
            store.close()
        repaired.set_aside = sorted(self._kept() - before)
        return repaired

    def _settings(self) -> QueueSettings:
        """As a queue of this name; the name matters only if ``queue.json`` has to be written."""
        try:
            return QueueSettings.of(kind="disk", path=self._path, name=self._queue.name)
        except ConfigError:
            return QueueSettings.of(kind="disk", path=self._path)

    def _kept(self) -> set[str]:
        """The files that turnlane has set aside."""
        names = {name for name in self._disk.listing(self._path) if name.endswith(".foreign")}
        quarantine = self._path / "quarantine"
        if quarantine.is_dir():
            names |= {f"quarantine/{name}" for name in self._disk.listing(quarantine)}
        return names

    def _take_over(self, store: Store, check: JournalCheck, repaired: Repaired) -> None:
        """What the journal as it was found says, and opening alone would not believe."""
        later = check.later()
        if later:
            # Before anything is recorded: the journal will write over this file.
            Quarantine(self._path, self._disk).keep(check.active)
        for record in later:
            store.journal.settled(*record)
        repaired.recovered_acks = len(later)
        if not self._queue.state.found:
            # Chunks go only when all in them is settled; so does the queue itself assume.
            store.journal.settled(0, store.log.start, 0, Outcome.DELIVERED)

    def _read_through(
        self, store: Store, repaired: Repaired, advance: Callable[[int], None]
    ) -> None:
        state = store.journal.state()
        unsettled = Ranges([(0, state.low), *state.settled]).missing(0, store.log.end)
        pending = sum(end - first for first, end in unsettled)
        each = store.unsettled_bytes() // max(1, pending)
        for first, end in unsettled:
            at = first
            while at < end:
                found = store.fetch(at, end)
                if isinstance(found, Found):
                    stop = at + found.block.num_rows
                    repaired.saved += stop - at
                    advance(found.block.nbytes)
                else:
                    stop = min(found.end, end)
                    store.journal.settled(at, stop, each * (stop - at), found.outcome)
                    reason = found.outcome.value
                    repaired.lost[reason] = repaired.lost.get(reason, 0) + stop - at
                at = stop


def is_repairable(finding: Finding) -> bool:
    """Whether a repair does something about it."""
    return finding.fault or finding.kind in _DONE_AT_OPEN
