"""Checking a whole directory: first look at everything, then judge it by what is settled.

Damage to events that are settled costs nothing and is only noted; that is also how a repaired queue
verifies as clean, though the damaged bytes stay where they were until their chunk goes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from turnlane.queues.inspection.findings import Finding, FindingKind, Report
from turnlane.queues.inspection.journal_check import JournalCheck
from turnlane.queues.inspection.walk import Damage, DamageKind, Stretch, Walk
from turnlane.queues.log.chunks import chunk_name
from turnlane.queues.log.directory import IDENTITY
from turnlane.queues.log.journal_state import JournalState
from turnlane.queues.log.position import Position
from turnlane.queues.ranges import Ranges

if TYPE_CHECKING:
    from turnlane.queues.inspection.inspection import Inspection

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
