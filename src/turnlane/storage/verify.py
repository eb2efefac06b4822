"""Checking a directory and counting its events, without opening the queue.

A verification looks at everything first, then judges it by the settlements in the journal. Damage
to settled events costs nothing and is only a note. So a repaired queue verifies as clean, although
the damaged bytes stay in their segment until it is deleted.

The ledger of a closed queue counts pending events in the log, frame by frame: the journal alone
always adds up. An event that is neither settled nor in the log then shows as a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from turnlane.intervals import RangeSet
from turnlane.ledger import Ledger, Outcome, OutcomeTotals
from turnlane.storage.directory import IDENTITY_FILE, QUARANTINE, read_identity_files
from turnlane.storage.disk_io import Disk
from turnlane.storage.frames import LogPosition
from turnlane.storage.journal_records import (
    HEADER_SIZE,
    JOURNAL_FILES,
    RECORD_SIZE,
    JournalState,
    apply_records,
    compute_seed,
    get_records_start,
    parse_header,
    parse_payload,
)
from turnlane.storage.segments import format_segment_name
from turnlane.storage.walk import Damage, FindingKind, IntactFrame, SegmentWalk

if TYPE_CHECKING:
    from turnlane.storage.inspection import QueueInspection

# ── ledger ───────────────────────────────────────────────────────────────────────────────────────

_NOT_INCLUDED_RUNNING = "events and drops that process {pid} has only in memory"
_NOT_INCLUDED_STOPPED = (
    "events that were accepted but not yet written when their process was killed"
)


@dataclass(frozen=True, slots=True)
class QueueAccount:
    """A ledger that was counted from the files, with remarks."""

    ledger: Ledger
    in_memory: int
    """The pending events that a running queue has not written yet."""
    unaccounted: int
    """Events that are neither settled nor in the log."""
    not_included: str
    """Events that no ledger made from files can include."""
    notes: list[str]

    def as_dict(self) -> dict[str, object]:
        """Return a form for JSON."""
        return {
            **self.ledger.as_dict(),
            "in_memory": self.in_memory,
            "unaccounted": self.unaccounted,
            "not_included": self.not_included,
            "notes": self.notes,
        }


def compute_account(queue: QueueInspection) -> QueueAccount:
    """Count the events. Reads the headers of all frames that may hold unsettled events."""
    present = RangeSet()
    low = queue.low(queue.state)
    segments = [segment for segment in queue.segments if segment.limit > low]
    for item in SegmentWalk(queue.disk, segments, lambda _first, _end: False):
        if isinstance(item, IntactFrame):
            present.add(item.first, item.end)
    # Read after the log: a segment that was deleted since then is settled in here.
    state = queue.journal()
    settled = queue.find_settled(state)
    written = max(present.end, state.position.end if state.position else 0)
    end = max(written, state.floor)
    pending = sum(_count_unsettled(settled, first, stop) for first, stop in present)
    waiting = _count_unsettled(settled, written if queue.running is None else present.end, end)
    never_written = waiting if queue.running is None else 0
    totals = OutcomeTotals(state.totals)
    totals.add(Outcome.MISSING, never_written)
    ledger = totals.ledger(end, pending + waiting - never_written)
    unaccounted = ledger.accepted - ledger.settled - ledger.pending
    notes = []
    if not state.found and queue.segments:
        notes.append("no journal: the settled events are not known")
    if never_written:
        notes.append(f"{never_written} missing were in memory when their process was killed")
    if unaccounted:
        notes.append(f"{unaccounted} unaccounted for: turnlane queue verify says where")
    return QueueAccount(
        ledger=replace(ledger, dropped=dict(ledger.dropped)),
        in_memory=waiting - never_written,
        unaccounted=unaccounted,
        not_included=(
            _NOT_INCLUDED_STOPPED
            if queue.running is None
            else _NOT_INCLUDED_RUNNING.format(pid=queue.running)
        ),
        notes=notes,
    )


def _count_unsettled(settled: RangeSet, first: int, end: int) -> int:
    return end - first - settled.overlap(first, end) if end > first else 0


# ── findings ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. A fault calls for repair, a note does not.

    A fault costs unsettled events, lets settled ones come again, or is a file that the next open
    must replace or set aside: ``queue.json``, a chunk of another queue.
    """

    kind: FindingKind
    fault: bool
    file: str
    byte: int
    what: str
    todo: str
    length: int | None = None
    """How many bytes are concerned, if that is known."""
    first: int | None = None
    end: int | None = None
    """Offsets ``[first, end)``, if they are known."""
    events: int = 0
    """Unsettled events among them that cannot be read."""

    def as_dict(self) -> dict[str, object]:
        """Return a form for JSON."""
        return {**asdict(self), "kind": self.kind.value}


@dataclass(slots=True)
class VerificationReport:
    """The result of a verification."""

    name: str
    queue_id: str
    running: int | None
    """The process that has the queue open."""
    chunks: int = 0
    frames: int = 0
    events: int = 0
    """Events that can be read, settled or not."""
    pending: int = 0
    """Events that can be read and are not settled."""
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def faults(self) -> Sequence[Finding]:
        """The findings that are faults."""
        return [finding for finding in self.findings if finding.fault]

    @property
    def clean(self) -> bool:
        """Whether there is no fault."""
        return not self.faults

    @property
    def lost(self) -> int:
        """Unsettled events that cannot be read."""
        return sum(finding.events for finding in self.faults)

    def as_dict(self) -> dict[str, object]:
        """Return a form for JSON."""
        return {
            "name": self.name,
            "queue_id": self.queue_id,
            "running": self.running,
            "clean": self.clean,
            "chunks": self.chunks,
            "frames": self.frames,
            "events": self.events,
            "pending": self.pending,
            "bytes": self.bytes,
            "lost": self.lost,
            "findings": [finding.as_dict() for finding in self.findings],
        }


# ── journal ──────────────────────────────────────────────────────────────────────────────────────

_COMES_AGAIN = "events that only this file recorded as settled will come again"
_REPAIR_JOURNAL = "turnlane queue repair keeps a copy in quarantine and writes a new one"


class SettledRecord(NamedTuple):
    """A record found after a damaged one."""

    first: int
    end: int
    size: int
    outcome: Outcome


class _SettledCollector(JournalState):
    """A state that collects the records which settle events."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[SettledRecord] = []

    def settle(self, first: int, end: int, size: int, outcome: Outcome) -> None:
        self.records.append(SettledRecord(first, end, size, outcome))


@dataclass(slots=True)
class _CheckedFile:
    """The content of a journal file."""

    name: str
    generation: int = 0
    damaged_at: int | None = None
    is_missing: bool = False
    data: bytes = b""
    records_start: int = 0
    """The byte at which records begin."""


class JournalCheck:
    """A check of both journal files, byte by byte."""

    def __init__(self, directory: Path, disk: Disk, queue_id: str) -> None:
        self._directory = directory
        self._files = [_load_file(directory / name, disk, queue_id) for name in JOURNAL_FILES]
        active = self._active = max(self._files, key=lambda file: file.generation)
        self._valid_end = len(active.data)
        """The byte of the active file at which the first record is not valid."""
        if active.generation:
            records, seed = active.data[active.records_start :], compute_seed(active.generation)
            count = apply_records(records, seed, JournalState())
            self._valid_end = active.records_start + count * RECORD_SIZE

    def list_findings(self, *, has_segments: bool) -> Iterator[Finding]:
        """Yield all that is wrong. A directory without segments need not have a journal."""
        for file in self._files:
            if file.is_missing and has_segments:
                what = f"is missing: {_COMES_AGAIN}"
                yield _journal_finding(file.name, 0, what, "repair writes a new one")
            elif file.damaged_at is not None:
                what = f"is damaged, or another queue's: {_COMES_AGAIN}"
                yield _journal_finding(file.name, file.damaged_at, what, _REPAIR_JOURNAL)
        active = self._active
        if has_segments and not active.generation and not any(f.is_missing for f in self._files):
            what = f"is empty: {_COMES_AGAIN}"
            yield _journal_finding(active.name, 0, what, _REPAIR_JOURNAL)
        ignored = self.list_ignored_records()
        if ignored:
            what = f"a damaged record: {len(ignored)} after it, which settle events, are ignored"
            todo = f"{_REPAIR_JOURNAL}, which includes them"
            yield _journal_finding(active.name, self._valid_end, what, todo)
        elif any(active.data[self._valid_end : self._valid_end + RECORD_SIZE]):
            what = "a torn record: its content was never confirmed"
            todo = "nothing; the next open ignores it"
            yield _journal_finding(active.name, self._valid_end, what, todo, fault=False)

    def list_ignored_records(self) -> list[SettledRecord]:
        """Return the records that settle events and come after a damaged one, in order."""
        seed, data = compute_seed(self._active.generation), self._active.data
        collector = _SettledCollector()
        for at in range(self._valid_end, len(data) - RECORD_SIZE + 1, RECORD_SIZE):
            record = data[at : at + RECORD_SIZE]
            if any(record):
                apply_records(record, seed, collector)
        return collector.records

    @property
    def active_path(self) -> Path:
        """The file that counts."""
        return self._directory / self._active.name


def _load_file(path: Path, disk: Disk, queue_id: str) -> _CheckedFile:
    try:
        with disk.open_file(path) as fd:
            data = bytes(disk.read(fd, disk.size(fd), 0))
    except FileNotFoundError:
        return _CheckedFile(path.name, is_missing=True)
    header = parse_header(data[:HEADER_SIZE])
    if header is None:
        return _CheckedFile(path.name, damaged_at=0 if any(data[:HEADER_SIZE]) else None)
    generation, length, checksum = header
    payload = data[HEADER_SIZE : HEADER_SIZE + length]
    if len(payload) < length or parse_payload(payload, checksum, queue_id) is None:
        return _CheckedFile(path.name, damaged_at=HEADER_SIZE)
    start = get_records_start(length)
    return _CheckedFile(path.name, generation, data=data, records_start=start)


def _journal_finding(file: str, byte: int, what: str, todo: str, *, fault: bool = True) -> Finding:
    return Finding(FindingKind.JOURNAL, fault, file, byte, what, todo)


# ── verification ─────────────────────────────────────────────────────────────────────────────────

_QUARANTINED = "repair copies the bytes to quarantine and counts the events as corrupt"
_TAIL_CUT = "repair cuts the torn tail, keeps a copy and counts the events as missing"
_DESCRIPTIONS = {
    FindingKind.CORRUPT_PAYLOAD: ("a frame's content is damaged", _QUARANTINED),
    FindingKind.CORRUPT_HEADER: ("a frame's header is damaged", _QUARANTINED),
    FindingKind.UNDECODABLE: ("a frame is no record batch of its chunk's schema", _QUARANTINED),
    FindingKind.TRUNCATED: ("no valid frame from here to the end of the file", _QUARANTINED),
    FindingKind.SCHEMA: (
        "the schema frame is damaged, so nothing in this chunk can be decoded",
        "repair moves the chunk to quarantine and counts its events as lost",
    ),
    FindingKind.FOREIGN: (
        "the chunk belongs to another queue, or is a copy under a wrong name",
        "move it back to its place; repair renames it to ….foreign",
    ),
    FindingKind.MISSING: (
        "these events are in no chunk",
        "restore the file if you have it; repair counts the events as missing",
    ),
    FindingKind.REPEAT: ("events that are elsewhere too", "nothing; readers skip them"),
}
_JOURNAL_ATTEMPTS = 3


class Verification:
    """One verification of one directory."""

    def __init__(self, queue: QueueInspection) -> None:
        self._queue = queue
        self._report = VerificationReport(queue.name, queue.queue_id, queue.running)
        self._present = RangeSet()
        """The offsets that can be read."""
        self._accounted = RangeSet()
        """The offsets that are settled, can be read, or are in a finding."""
        self._state = JournalState()

    def run(self, advance: Callable[[int], None]) -> VerificationReport:
        """Check everything; ``advance`` is called with the bytes of every region."""
        queue, report = self._queue, self._report
        report.chunks, report.bytes = len(queue.segments), queue.size
        damages, tail = self._walk(advance)
        # Read after the log: a segment that was deleted since then is settled in here.
        self._state = queue.journal()
        self._accounted = queue.find_settled(self._state)
        for first, end in self._present:
            report.pending += end - first - self._accounted.overlap(first, end)
            self._accounted.add(first, end)
        report.findings += self._check_identity()
        report.findings += self._check_journal()
        report.findings += self._judge(damages, tail)
        report.findings += self._list_other_files()
        return report

    def _walk(self, advance: Callable[[int], None]) -> tuple[list[Damage], list[Damage]]:
        """Return all damage, and separately the damage after the last valid frame."""
        damages: list[Damage] = []
        tail: list[Damage] = []
        for item in SegmentWalk(self._queue.disk, self._queue.segments, lambda _first, _end: True):
            if isinstance(item, IntactFrame):
                self._report.frames += 1
                self._report.events += item.end - item.first
                self._present.add(item.first, item.end)
                advance(item.stored_size)
            else:
                advance(item.length)
            if isinstance(item, Damage) and _can_be_torn_tail(item):
                tail.append(item)
                continue
            if not isinstance(item, Damage) or item.kind is FindingKind.REPEAT:
                damages += tail
                tail = []
            if isinstance(item, Damage):
                damages.append(item)
        return damages, tail

    # Judging damage

    def _judge(self, damages: Sequence[Damage], tail: Sequence[Damage]) -> Iterator[Finding]:
        """Yield what the damage means, in the order of offsets."""
        position = self._state.position
        torn = [damage for damage in tail if _is_behind(damage, position)]
        yield from self._check_before_log()
        for damage in [*damages, *tail[: len(tail) - len(torn)]]:
            yield from self._list_findings(damage)
        if torn:
            yield self._describe_torn_tail(torn)
        yield from self._check_after_log()

    def _count_unaccounted(self, first: int, end: int) -> int:
        """Return how many events of the range no finding has counted yet; count them as found."""
        missing = _count_unsettled(self._accounted, first, end)
        self._accounted.add(first, end)
        return missing

    def _list_findings(self, damage: Damage) -> Iterator[Finding]:
        """Yield the finding, unless it is a gap that settled events have left."""
        end, position = damage.end, self._state.position
        what, todo = _DESCRIPTIONS[damage.kind]
        is_truncated = damage.kind is FindingKind.TRUNCATED
        if is_truncated and damage.segment and damage.segment.is_last:
            end = max(end, position.end if position else 0)
            todo = _TAIL_CUT
        events = self._count_unaccounted(damage.first, end)
        if damage.why:
            what = f"{what} ({damage.why})"
        is_harmless = not events and damage.kind is not FindingKind.FOREIGN
        if is_harmless and damage.kind is FindingKind.MISSING:
            return
        yield Finding(
            damage.kind,
            fault=not is_harmless,
            file=damage.file,
            byte=damage.byte,
            what=_describe_loss(what, damage.first, end, events),
            todo="nothing; no event is lost by it" if is_harmless else todo,
            length=damage.length,
            first=damage.first,
            end=end,
            events=events,
        )

    def _describe_torn_tail(self, torn: Sequence[Damage]) -> Finding:
        start, last = torn[0], torn[-1]
        what, todo = "torn tail, will be cut at next open", "nothing; a copy will be kept"
        if self._report.running is not None:
            what, todo = "the tail is being written", "nothing"
        return Finding(
            FindingKind.TORN_TAIL,
            fault=False,
            file=start.file,
            byte=start.byte,
            what=what,
            todo=todo,
            length=last.byte + last.length - start.byte,
        )

    def _check_before_log(self) -> Iterator[Finding]:
        segments = [segment for segment in self._queue.segments if not segment.foreign]
        low = self._queue.low(self._state)
        if segments and low < segments[0].first:
            name, end = format_segment_name(low), segments[0].first
            yield from self._list_findings(Damage(FindingKind.MISSING, name, 0, 0, low, end))

    def _check_after_log(self) -> Iterator[Finding]:
        """Yield findings for events that were written, or settled, after the last valid frame."""
        state, running = self._state, self._report.running
        if running is not None:
            return
        written = state.position.end if state.position else 0
        start = max(self._present.end, self._queue.low(state))
        if start < written:
            file, byte = self._find_place_after_log(state.position)
            damage = Damage(FindingKind.MISSING, file, byte, 0, start, written)
            yield from self._list_findings(damage)
        start = max(start, written)
        events = self._count_unaccounted(start, state.floor)
        if events:
            what = f"{events} events were in memory when their process was killed"
            todo = "nothing; they will be counted as missing"
            file, byte = self._find_place_after_log(None)
            yield Finding(
                FindingKind.NEVER_WRITTEN, fault=False, file=file, byte=byte, what=what, todo=todo
            )

    def _find_place_after_log(self, position: LogPosition | None) -> tuple[str, int]:
        """Return where the events should be: in a segment that is gone, or after the last one."""
        last = next((segment for segment in self._queue.segments if segment.is_last), None)
        if position and (not last or last.first < position.segment < position.end):
            return format_segment_name(position.segment), 0
        if last:
            return last.path.name, last.size
        return format_segment_name(self._queue.low(self._state)), 0

    # The other files

    def _check_identity(self) -> Iterator[Finding]:
        queue = self._queue
        files = read_identity_files(queue.path, queue.disk)
        has_checksum = any(file.has_checksum for file in files.values())  # old directories: none
        todo = "repair, or the next open, writes a new one"
        if not queue.queue_id:
            todo = "restore it from a backup: nothing else tells the queue's id"
        for name, file in files.items():
            if file.data is None and (name == IDENTITY_FILE or has_checksum):
                what = "is missing"
            elif file.data is not None and file.identity is None:
                what = "is damaged"
            elif file.identity and file.identity.queue_id != queue.queue_id:
                what = "is damaged, or another queue's"
            elif file.identity and has_checksum and not file.has_checksum:
                what = "has lost its checksum"
            else:
                continue
            is_fault = name == IDENTITY_FILE or file.data is not None
            if is_fault and queue.queue_id:
                what += "; the queue's id is known from its copy, its chunks or its journal"
            yield Finding(FindingKind.IDENTITY, is_fault, name, 0, what, todo)

    def _check_journal(self) -> list[Finding]:
        """Check the files, several times if the queue runs, because they change in between."""
        queue = self._queue
        findings: list[Finding] = []
        for _ in range(_JOURNAL_ATTEMPTS if self._report.running is not None else 1):
            check = JournalCheck(queue.path, queue.disk, queue.queue_id)
            findings = list(check.list_findings(has_segments=bool(queue.segments)))
            if not findings:
                break
        return findings

    def _list_other_files(self) -> Iterator[Finding]:
        queue = self._queue
        for name in queue.disk.listing(queue.path):
            if name.endswith((".chunk.new", ".foreign")):
                what, todo = "was set aside, or left by a crash", "delete it when you are sure"
                if name.endswith(".new"):
                    todo = "nothing; the next open handles it"
                yield Finding(FindingKind.LEFTOVER, False, name, 0, what, todo)  # noqa: FBT003
        quarantine = queue.path / QUARANTINE
        files = sorted(quarantine.iterdir()) if quarantine.is_dir() else []
        if files:
            size = sum(path.stat().st_size for path in files)
            what = f"holds {len(files)} unreadable pieces, {size} bytes"
            todo = "look into them, then delete them"
            yield Finding(
                FindingKind.QUARANTINE, fault=False, file=QUARANTINE, byte=0, what=what, todo=todo
            )


def _can_be_torn_tail(damage: Damage) -> bool:
    """Whether recovery would cut it as a torn tail, if no valid frame follows."""
    kinds = (FindingKind.TRUNCATED, FindingKind.CORRUPT_PAYLOAD, FindingKind.CORRUPT_HEADER)
    return damage.segment is not None and damage.segment.is_last and damage.kind in kinds


def _is_behind(damage: Damage, position: LogPosition | None) -> bool:
    """Whether the damage is after everything that is known to have been written."""
    if position is None or damage.segment is None or position.segment < damage.segment.first:
        return True
    return position.segment == damage.segment.first and damage.byte >= position.byte


def _describe_loss(what: str, first: int, end: int, events: int) -> str:
    if not events:
        return what
    if end - first == 1:
        return f"{what}: an unsettled event is lost, offset {first}"
    return f"{what}: {events} unsettled events are lost, of offsets {first} to {end - 1}"
