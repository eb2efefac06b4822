"""Checking a whole directory: first look at everything, then judge it by what is settled.

Damage to events that are settled costs nothing and is only noted; that is also how a repaired queue
verifies as clean, though the damaged bytes stay where they were until their chunk goes.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from turnlane.intervals import Ranges
from turnlane.ledger import Ledger, Outcome, Totals
from turnlane.storage.directory import IDENTITY
from turnlane.storage.disk_io import Disk
from turnlane.storage.frames import Position
from turnlane.storage.inspect import Damage, DamageKind, Stretch, Walk, opened
from turnlane.storage.journal import NAMES
from turnlane.storage.journal_records import (
    HEADER_SIZE,
    RECORD_SIZE,
    JournalState,
    parse_header,
    parse_payload,
    records_start,
    replay,
    seed,
)
from turnlane.storage.segments import chunk_name

if TYPE_CHECKING:
    from turnlane.storage.offline import Inspection

# ── account ──
# The ledger of a queue that is not open here: what the journal says against what the log holds.
#
# The journal alone always adds up. So what is pending is counted in the log, frame by frame;
# then an
# event that is neither settled nor there makes a difference, and the difference is shown.

_RUNNING = "what process {pid} holds only in memory, and drops that it has not yet noted"
_STOPPED = "events that were accepted but not yet written when their process was killed"


@dataclass(frozen=True, slots=True)
class Account:
    """A ledger and what there is to say about it."""

    ledger: Ledger
    in_memory: int
    """Of the pending events: those that a running queue has not written yet."""
    unaccounted: int
    """Events that are neither settled nor in the log."""
    not_included: str
    """What no ledger made from files can know."""
    notes: list[str]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            **self.ledger.as_dict(),
            "in_memory": self.in_memory,
            "unaccounted": self.unaccounted,
            "not_included": self.not_included,
            "notes": self.notes,
        }


def account(queue: Inspection) -> Account:
    """Count. Reads the headers of all frames that may hold unsettled events."""
    present = _present(queue)
    # Read after the log: whatever of the log has gone meanwhile is settled in here.
    state = queue.journal()
    settled = queue.settled_by(state)
    written = max(present.end, state.position.end if state.position else 0)
    end = max(written, state.floor)
    pending = sum(_unsettled(settled, first, stop) for first, stop in present)
    waiting = _unsettled(settled, written if queue.running is None else present.end, end)
    never_written = waiting if queue.running is None else 0
    totals = Totals(state.totals)
    totals.add(Outcome.MISSING, never_written)
    ledger = totals.ledger(end, pending + waiting - never_written)
    unaccounted = ledger.accepted - ledger.settled - ledger.pending
    notes = [] if state.found or not queue.chunks else ["no journal: what was settled is not known"]
    if never_written:
        notes.append(f"{never_written} missing were in memory when their process was killed")
    if unaccounted:
        notes.append(f"{unaccounted} unaccounted for: turnlane queue verify says where")
    return Account(
        ledger=replace(ledger, dropped=dict(ledger.dropped)),
        in_memory=waiting - never_written,
        unaccounted=unaccounted,
        not_included=_not_included(queue.running),
        notes=notes,
    )


def _present(queue: Inspection) -> Ranges:
    present = Ranges()
    low = queue.low(queue.state)
    chunks = [chunk for chunk in queue.chunks if chunk.limit > low]
    for item in Walk(queue.disk, chunks, lambda _first, _end: False):
        if isinstance(item, Stretch):
            present.add(item.first, item.end)
    return present


def _unsettled(settled: Ranges, first: int, end: int) -> int:
    return max(0, end - first) - settled.overlap(first, end) if end > first else 0


def _not_included(running: int | None) -> str:
    return _STOPPED if running is None else _RUNNING.format(pid=running)


# ── findings ──
# What a verification says: every finding with its place, its meaning, and what to do about it.


class FindingKind(enum.StrEnum):
    """What was found."""

    CORRUPT_PAYLOAD = "corrupt_payload"
    CORRUPT_HEADER = "corrupt_header"
    UNDECODABLE = "undecodable"
    TRUNCATED = "truncated"
    SCHEMA = "schema"
    FOREIGN = "foreign"
    MISSING = "missing"
    REPEAT = "repeat"
    TORN_TAIL = "torn_tail"
    NEVER_WRITTEN = "never_written"
    JOURNAL = "journal"
    IDENTITY = "identity"
    LEFTOVER = "leftover"
    QUARANTINE = "quarantine"
    FASTQUEUE = "fastqueue"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. A fault calls for repair, a note does not.

    A fault costs unsettled events, lets settled ones come again, or is a file that the next open
    has to replace or put aside: ``queue.json``, another queue's chunk.
    """

    kind: FindingKind
    fault: bool
    file: str
    byte: int
    what: str
    todo: str
    length: int | None = None
    """How many bytes are concerned, where that is known."""
    first: int | None = None
    end: int | None = None
    """Offsets ``[first, end)``, where they are known."""
    events: int = 0
    """Unsettled events among them that cannot be read."""

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "kind": self.kind.value}


@dataclass(slots=True)
class Report:
    """What a verification has found."""

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
        """For JSON."""
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


# ── journal_check ──
# The journal's two files, byte by byte: are they whole, and what is behind a damaged record?

_AGAIN = "what it alone had recorded as settled will come again"
_REPAIR = "turnlane queue repair keeps a copy in quarantine and writes a new one"


class Settled(NamedTuple):
    """A record found behind a damaged one."""

    first: int
    end: int
    size: int
    outcome: Outcome


class _Recorder(JournalState):
    """Takes records like a state, and keeps those that settle."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Settled] = []

    def settle(self, first: int, end: int, size: int, outcome: Outcome) -> None:
        self.kept.append(Settled(first, end, size, outcome))


@dataclass(slots=True)
class _File:
    """What is in a journal file."""

    name: str
    generation: int = 0
    damaged_at: int | None = None
    missing: bool = False
    data: bytes = b""
    records: int = 0
    """The byte at which records begin."""


class JournalCheck:
    """A check of both files."""

    def __init__(self, directory: Path, disk: Disk, queue_id: str) -> None:
        self._directory = directory
        self._files = [_load(directory / name, disk, queue_id) for name in NAMES]
        self._active = max(self._files, key=lambda file: file.generation)
        self._valid = self._valid_end()

    def findings(self, *, has_chunks: bool) -> Iterator[Finding]:
        """All that is wrong. A directory without chunks need not have a journal."""
        for file in self._files:
            if file.missing and has_chunks:
                yield _finding(file.name, 0, f"is missing: {_AGAIN}", "repair makes a new one")
            elif file.damaged_at is not None:
                what = f"is damaged, or another queue's: {_AGAIN}"
                yield _finding(file.name, file.damaged_at, what, _REPAIR)
        if has_chunks and not self._active.generation and not any(f.missing for f in self._files):
            yield _finding(self._active.name, 0, f"holds nothing: {_AGAIN}", _REPAIR)
        later = self.later()
        rest = self._active.data[self._valid : self._valid + RECORD_SIZE]
        if later:
            what = f"a damaged record: {len(later)} after it, which settle events, are ignored"
            yield _finding(self._active.name, self._valid, what, f"{_REPAIR}, with those in it")
        elif any(rest):
            what = "a torn record: what it said was never confirmed to anyone"
            todo = "nothing; it is left out at the next open"
            yield _finding(self._active.name, self._valid, what, todo, fault=False)

    def later(self) -> list[Settled]:
        """The records that settle events and lie behind a damaged one, in order."""
        start, data = seed(self._active.generation), self._active.data
        found = _Recorder()
        for at in range(self._valid, len(data) - RECORD_SIZE + 1, RECORD_SIZE):
            record = data[at : at + RECORD_SIZE]
            if any(record):
                replay(record, start, found)
        return found.kept

    @property
    def active(self) -> Path:
        """The file that counts."""
        return self._directory / self._active.name

    def _valid_end(self) -> int:
        active = self._active
        if not active.generation:
            return len(active.data)
        state = JournalState()
        count = replay(active.data[active.records :], seed(active.generation), state)
        return active.records + count * RECORD_SIZE


def _load(path: Path, disk: Disk, queue_id: str) -> _File:
    try:
        with opened(disk, path) as fd:
            data = bytes(disk.read(fd, disk.size(fd), 0))
    except FileNotFoundError:
        return _File(path.name, missing=True)
    header = parse_header(data[:HEADER_SIZE])
    if header is None:
        damaged = any(data[:HEADER_SIZE])
        return _File(path.name, damaged_at=0 if damaged else None)
    generation, length, checksum = header
    payload = data[HEADER_SIZE : HEADER_SIZE + length]
    if len(payload) < length or parse_payload(payload, checksum, queue_id) is None:
        return _File(path.name, damaged_at=HEADER_SIZE)
    return _File(path.name, generation, data=data, records=records_start(length))


def _finding(file: str, byte: int, what: str, todo: str, *, fault: bool = True) -> Finding:
    return Finding(FindingKind.JOURNAL, fault, file, byte, what, todo)


_QUARANTINED = "repair copies the bytes to quarantine and counts the events as corrupt"
_TAIL_CUT = "repair cuts the torn tail, keeps a copy and counts the events as missing"
_WORDS = {
    DamageKind.CORRUPT_PAYLOAD: ("a frame's content is damaged", _QUARANTINED),
    DamageKind.CORRUPT_HEADER: ("a frame's header is damaged", _QUARANTINED),
    DamageKind.UNDECODABLE: ("a frame is no record batch of its chunk's schema", _QUARANTINED),
    DamageKind.TRUNCATED: ("no whole frame from here to the end of the file", _QUARANTINED),
    DamageKind.SCHEMA: (
        "the schema frame is damaged, so nothing in this chunk can be decoded",
        "repair moves the chunk to quarantine and counts its events as lost",
    ),
    DamageKind.FOREIGN: (
        "the chunk belongs to another queue",
        "put it back where it belongs; repair renames it to ….foreign",
    ),
    DamageKind.MISSING: (
        "these events are in no chunk",
        "restore the file if you have it; repair counts the events as missing",
    ),
    DamageKind.REPEAT: ("events that are elsewhere too", "nothing; readers pass over them"),
}
_TRIES = 3


class Verification:
    """One verification of one directory."""

    def __init__(self, queue: Inspection) -> None:
        self._queue = queue
        self._report = Report(queue.name, queue.queue_id, queue.running)
        self._present = Ranges()
        self._accounted = Ranges()
        self._state = JournalState()

    def run(self, advance: Callable[[int], None]) -> Report:
        """Check everything; ``advance`` hears of every byte gone through."""
        queue, report = self._queue, self._report
        report.chunks, report.bytes = len(queue.chunks), queue.size
        damages, tail = self._look(advance)
        # Read after the log: whatever of the log has gone meanwhile is settled in here.
        self._state = queue.journal()
        self._accounted = queue.settled_by(self._state)
        for first, end in self._present:
            report.pending += end - first - self._accounted.overlap(first, end)
            self._accounted.add(first, end)
        report.findings += self._identity()
        report.findings += self._journal()
        report.findings += self._judged(damages, tail)
        report.findings += self._others()
        return report

    # Looking

    def _look(self, advance: Callable[[int], None]) -> tuple[list[Damage], list[Damage]]:
        """All damage; and apart from it, what comes after the last whole frame."""
        damages: list[Damage] = []
        tail: list[Damage] = []
        for item in Walk(self._queue.disk, self._queue.chunks, lambda _first, _end: True):
            if isinstance(item, Stretch):
                self._report.frames += 1
                self._report.events += item.end - item.first
                self._present.add(item.first, item.end)
                advance(item.stored)
            else:
                advance(item.length)
            if isinstance(item, Damage) and item.chunk and item.chunk.is_last and _cut(item):
                tail.append(item)
                continue
            if not isinstance(item, Damage) or item.kind is DamageKind.REPEAT:
                damages += tail
                tail = []
            if isinstance(item, Damage):
                damages.append(item)
        return damages, tail

    # Judging

    def _judged(self, damages: Sequence[Damage], tail: Sequence[Damage]) -> Iterator[Finding]:
        """What the damage means, in the order of offsets."""
        position = self._state.position
        torn = [damage for damage in tail if _is_torn(damage, position)]
        yield from self._before_the_log()
        for damage in [*damages, *tail[: len(tail) - len(torn)]]:
            yield from self._findings(damage)
        if torn:
            yield self._torn(torn)
        yield from self._after_the_log()

    def _unaccounted(self, first: int, end: int) -> int:
        """Events that are neither there nor settled, and were not yet told of."""
        gone = end - first - self._accounted.overlap(first, end) if end > first else 0
        self._accounted.add(first, end)
        return gone

    def _findings(self, damage: Damage) -> Iterator[Finding]:
        """The finding; but a gap that settled events have left is as it should be."""
        finding = self._finding(damage)
        if finding.fault or damage.kind is not DamageKind.MISSING:
            yield finding

    def _finding(self, damage: Damage) -> Finding:
        end = damage.end
        position = self._state.position
        if damage.kind is DamageKind.TRUNCATED and damage.chunk and damage.chunk.is_last:
            end = max(end, position.end if position else 0)
        events = self._unaccounted(damage.first, end)
        what, todo = _WORDS[damage.kind]
        if damage.kind is DamageKind.TRUNCATED and damage.chunk and damage.chunk.is_last:
            todo = _TAIL_CUT
        if damage.why:
            what = f"{what} ({damage.why})"
        harmless = not events and not self._in_the_way(damage)
        return Finding(
            FindingKind(damage.kind.value),
            fault=not harmless,
            file=damage.file,
            byte=damage.byte,
            what=_with_loss(what, damage.first, end, events),
            todo="nothing; no event is lost by it" if harmless else todo,
            length=damage.length,
            first=damage.first,
            end=end,
            events=events,
        )

    def _in_the_way(self, damage: Damage) -> bool:
        """Whether it is a chunk of another queue that the next open puts aside."""
        chunk = damage.chunk
        if damage.kind is not DamageKind.FOREIGN or chunk is None:
            return False
        return chunk.is_trailing or chunk is self._queue.chunks[0]

    def _torn(self, torn: Sequence[Damage]) -> Finding:
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

    def _before_the_log(self) -> Iterator[Finding]:
        chunks = self._queue.chunks
        low = self._queue.low(self._state)
        if chunks and low < chunks[0].first:
            damage = Damage(DamageKind.MISSING, chunk_name(low), 0, 0, low, chunks[0].first)
            yield from self._findings(damage)

    def _after_the_log(self) -> Iterator[Finding]:
        """What was written, or settled, beyond the last whole frame."""
        state, running = self._state, self._report.running
        if running is not None:
            return
        written = state.position.end if state.position else 0
        start = max(self._present.end, self._queue.low(state))
        if start < written:
            file, byte = self._place_after(state.position)
            damage = Damage(DamageKind.MISSING, file, byte, 0, start, written)
            yield from self._findings(damage)
        start = max(start, written)
        events = self._unaccounted(start, state.floor)
        if events:
            what = f"{events} events were in memory when their process was killed"
            todo = "nothing; they will be counted as missing"
            file, byte = self._place_after(None)
            yield Finding(
                FindingKind.NEVER_WRITTEN, fault=False, file=file, byte=byte, what=what, todo=todo
            )

    def _place_after(self, position: Position | None) -> tuple[str, int]:
        """Where it should have been: in a chunk that is gone, or at the end of the last one."""
        ours = [chunk for chunk in self._queue.chunks if chunk.is_last]
        if position and (not ours or ours[0].first < position.chunk < position.end):
            return chunk_name(position.chunk), 0
        if ours:
            return ours[0].path.name, ours[0].size
        return chunk_name(self._queue.low(self._state)), 0

    # The other files

    def _identity(self) -> Iterator[Finding]:
        path = self._queue.path / IDENTITY
        if not path.exists():
            what = "is missing; the queue's id is taken from its chunks"
        elif not _is_whole(path.read_bytes()[: 1 << 16]):
            what = "cannot be read; the queue's id is taken from its chunks"
        else:
            return
        todo = "repair, or the next open, writes a new one"
        yield Finding(FindingKind.IDENTITY, fault=True, file=IDENTITY, byte=0, what=what, todo=todo)

    def _journal(self) -> list[Finding]:
        """Of a running queue, only what is found again: files may change while they are read."""
        queue = self._queue
        findings: list[Finding] = []
        for _ in range(_TRIES if self._report.running is not None else 1):
            check = JournalCheck(queue.path, queue.disk, queue.queue_id)
            findings = list(check.findings(has_chunks=bool(queue.chunks)))
            if not findings:
                break
        return findings

    def _others(self) -> Iterator[Finding]:
        queue = self._queue
        for name in queue.disk.listing(queue.path):
            if name.endswith((".chunk.new", ".foreign")):
                what, todo = "was set aside, or left by a crash", "delete it when you are sure"
                if name.endswith(".new"):
                    todo = "nothing; the next open deals with it"
                yield Finding(FindingKind.LEFTOVER, False, name, 0, what, todo)  # noqa: FBT003
        quarantine = queue.path / "quarantine"
        kept = sorted(quarantine.iterdir()) if quarantine.is_dir() else []
        if kept:
            size = sum(path.stat().st_size for path in kept)
            what = f"holds {len(kept)} unreadable pieces, {size} bytes"
            todo = "look into them, then delete them"
            yield Finding(
                FindingKind.QUARANTINE, fault=False, file="quarantine", byte=0, what=what, todo=todo
            )


def _cut(damage: Damage) -> bool:
    """Whether recovery would take it for a torn tail, if nothing whole comes after."""
    kinds = (DamageKind.TRUNCATED, DamageKind.CORRUPT_PAYLOAD, DamageKind.CORRUPT_HEADER)
    return damage.kind in kinds


def _is_torn(damage: Damage, position: Position | None) -> bool:
    """Whether it lies behind all that is known to have been written."""
    if position is None or damage.chunk is None or position.chunk < damage.chunk.first:
        return True
    return position.chunk == damage.chunk.first and damage.byte >= position.byte


def _is_whole(data: bytes) -> bool:
    try:
        values = json.loads(data)
        return all(isinstance(values[name], str) for name in ("queue_id", "name"))
    except (ValueError, KeyError, TypeError):
        return False


def _with_loss(what: str, first: int, end: int, events: int) -> str:
    if not events:
        return what
    if end - first == 1:
        return f"{what}: an unsettled event is lost, offset {first}"
    return f"{what}: {events} unsettled events are lost, of offsets {first} to {end - 1}"
