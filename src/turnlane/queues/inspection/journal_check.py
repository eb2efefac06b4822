"""The journal's two files, byte by byte: are they whole, and what is behind a damaged record?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from turnlane.queues.contract import Outcome
from turnlane.queues.inspection.findings import Finding, FindingKind
from turnlane.queues.inspection.survey import opened
from turnlane.queues.log.files import Disk
from turnlane.queues.log.journal import NAMES
from turnlane.queues.log.journal_format import (
    HEADER_SIZE,
    RECORD_SIZE,
    parse_header,
    parse_payload,
    records_start,
    replay,
    seed,
)
from turnlane.queues.log.journal_state import JournalState

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
