"""The journal's bytes: snapshots and records as ``docs/disk-format.md`` has them. No files here."""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import google_crc32c

from turnlane.intervals import Ranges
from turnlane.ledger import Outcome
from turnlane.storage.frames import Position, Stamp
from turnlane.storage.producer_sequences import Accepted

# ── journal_state ──
# What the journal says of a queue, and how each record changes it: values only, no files.
#
# Apart from the journal so that the memory of a running queue, a snapshot, and the replay of
# records
# after a crash are the same few lines.

MAX_PRODUCERS = 10_000
"""Producers remembered, the most recent: one that was silent for longer may repeat itself."""

MAX_ATTEMPT = 0xFFFF
"""What a record has room for; nobody tells attempt 65,536 from this one."""

ProducerHash = bytes
Returned = tuple[int, int, int]


@dataclass(slots=True)
class JournalState:
    """Which events are settled, and hints for recovery. Not thread-safe."""

    low: int = 0
    """Everything below is settled."""
    ranges: Ranges = field(default_factory=Ranges)
    """What is settled above ``low``."""
    returned: list[Returned] = field(default_factory=list)
    """Unsettled ranges that were given back: first, end, and the attempt they come as. Sorted."""
    totals: dict[Outcome, int] = field(default_factory=dict)
    """Events by how they left, or never entered."""
    bytes: int = 0
    """Size of the unsettled events up to ``position``, less that of events settled beyond it: so
    adding all that the log finds after ``position`` is right, though this may be below zero."""
    position: Position | None = None
    """Where the log ended when last known good: a hint."""
    producers: dict[ProducerHash, Accepted] = field(default_factory=dict)
    """Each producer's numbers that the queue has, least recent first."""
    found: bool = False
    """False if there was no journal to read: then nothing is known, not even what was settled."""

    @property
    def settled(self) -> list[tuple[int, int]]:
        """The settled ranges above ``low``: sorted, disjoint, merged."""
        return list(self.ranges)

    @property
    def floor(self) -> int:
        """The lowest offset that was certainly never used."""
        handed_out = self.returned[-1][1] if self.returned else 0
        written = self.position.end if self.position else 0
        return max(self.low, self.ranges.end, handed_out, written)

    def settled_to(self, offset: int, also: tuple[int, int]) -> int:
        """How far everything from ``offset`` on is settled, if the range ``also`` were so too."""
        first, end = also
        while True:
            reached = self.ranges.end_of_run(max(offset, self.low))
            if first <= reached < end:
                reached = end
            if reached == offset:
                return offset
            offset = reached

    def settle(self, first: int, end: int, size: int, outcome: Outcome) -> None:
        """Settle ``[first, end)``, ``size`` bytes in all; what already was is not counted twice."""
        if first == self.low and first < end and not self.ranges and not self.returned:
            # In order, as nearly all acks are: the same as below in half the time.
            self.low = end
            self.totals[outcome] = self.totals.get(outcome, 0) + end - first
            self.bytes -= size
            return
        fresh = self._fresh(first, end)
        if fresh <= 0:
            return
        self.totals[outcome] = self.totals.get(outcome, 0) + fresh
        self.bytes -= size * fresh // (end - first)
        self._mark(first, end)
        self.returned = _without(self.returned, first, end)

    def give_back(self, first: int, end: int, attempt: int) -> None:
        """Note that ``[first, end)``, settled parts apart, is to be handed out as ``attempt``."""
        pieces = self.ranges.missing(max(first, self.low), end)
        kept = _without(self.returned, first, end)
        kept += [(start, stop, min(attempt, MAX_ATTEMPT)) for start, stop in pieces]
        self.returned = sorted(kept)

    def advance(self, position: Position, unsettled_bytes: int, stamps: Sequence[Stamp]) -> None:
        """Note how far the log has come. Never goes back.

        A write that failed half-way may have left records that replay finds behind newer ones.
        """
        for stamp in stamps:
            self.stamp(stamp)
        if self.position is None or position.end >= self.position.end:
            self.position = position
            self.bytes = unsettled_bytes

    def stamp(self, stamp: Stamp) -> None:
        """Note what a producer has published. Never goes back either."""
        known = self.producers.pop(stamp.producer, None) or Accepted()
        known.add(stamp.first, stamp.next_sequence)
        self.producers[stamp.producer] = known
        if len(self.producers) > MAX_PRODUCERS:
            del self.producers[next(iter(self.producers))]

    def drop(self, outcome: Outcome, events: int) -> None:
        """Count events that were dropped before they got an offset."""
        self.totals[outcome] = self.totals.get(outcome, 0) + events

    def copy(self) -> JournalState:
        """An independent copy."""
        return JournalState(
            self.low,
            self.ranges.copy(),
            self.returned.copy(),
            self.totals.copy(),
            self.bytes,
            self.position,
            {producer: accepted.copy() for producer, accepted in self.producers.items()},
            self.found,
        )

    def _fresh(self, first: int, end: int) -> int:
        start = max(first, self.low)
        return end - start - (self.ranges.overlap(start, end) if self.ranges else 0)

    def _mark(self, first: int, end: int) -> None:
        if first > self.low:
            self.ranges.add(first, end)
            return
        self.low = max(self.low, end)
        if self.ranges:
            self.low = self.ranges.end_of_run(self.low)
            self.ranges.drop_below(self.low)


def _without(returned: list[Returned], first: int, end: int) -> list[Returned]:
    """Cut ``[first, end)`` out of the ranges."""
    kept: list[Returned] = []
    for start, stop, attempt in returned:
        pieces = ((start, min(stop, first)), (max(start, end), stop))
        kept += [(low, high, attempt) for low, high in pieces if low < high]
    return kept


MAGIC = b"TLJOURN1"
HEADER_SIZE = 32
RECORD_SIZE = 48


class Kind(enum.IntEnum):
    """What a record says."""

    SETTLED = 1
    RETURNED = 2
    POSITION = 3
    DROPPED = 4
    STAMP = 5


OUTCOMES = (
    Outcome.DELIVERED,
    Outcome.DEAD,
    Outcome.NEWEST,
    Outcome.OLDEST,
    Outcome.SEVERITY,
    Outcome.SAMPLED,
    Outcome.CLOSED,
    Outcome.CORRUPT,
    Outcome.MISSING,
)
"""By their code on disk. Spelt out: the order of the enum is not a contract, this one is."""

_CODES = {outcome: code for code, outcome in enumerate(OUTCOMES)}
_HEADER = struct.Struct("<8sQQI")
_BODY = struct.Struct("<BBHQQQQQ")
_HALVES = struct.Struct("<QQ")


def seed(generation: int) -> int:
    """Where the checksums of a generation's records start.

    So what an earlier use of the file left behind is never taken for a record of this one.
    """
    checksum: int = google_crc32c.value(generation.to_bytes(8, "little"))
    return checksum


def sign(start: int, body: bytes) -> bytes:
    """The record: a body and its checksum, from :func:`seed` on."""
    checksum: int = google_crc32c.extend(start, body)
    return checksum.to_bytes(4, "little") + body


def settled(first: int, end: int, size: int, outcome: Outcome) -> bytes:
    """The body of a record: ``[first, end)``, of ``size`` bytes, is settled."""
    return _BODY.pack(Kind.SETTLED, _CODES[outcome], 0, 0, first, end, size, 0)


def returned(first: int, end: int, attempt: int) -> bytes:
    """The body of a record: ``[first, end)`` was given back."""
    return _BODY.pack(Kind.RETURNED, 0, min(attempt, MAX_ATTEMPT), 0, first, end, 0, 0)


def dropped(outcome: Outcome, events: int) -> bytes:
    """The body of a record: events were dropped before they got an offset."""
    return _BODY.pack(Kind.DROPPED, _CODES[outcome], 0, 0, events, 0, 0, 0)


def advanced(position: Position, size: int) -> bytes:
    """The body of a record: the log has come this far."""
    return _BODY.pack(Kind.POSITION, 0, 0, 0, *position, size)


def stamped(stamp: Stamp) -> bytes:
    """The body of a record: a producer has published these numbers."""
    producer, next_sequence, first = stamp
    return _BODY.pack(Kind.STAMP, 0, 0, 0, *_HALVES.unpack(producer), next_sequence, first)


def replay(data: bytes, start: int, state: JournalState) -> int:
    """Apply records in order up to the first that is not valid; returns how many those were."""
    for at in range(0, len(data) - RECORD_SIZE + 1, RECORD_SIZE):
        body = data[at + 4 : at + RECORD_SIZE]
        if sign(start, body) != data[at : at + RECORD_SIZE] or not _apply(body, state):
            return at // RECORD_SIZE
    return len(data) // RECORD_SIZE


def _apply(body: bytes, state: JournalState) -> bool:
    """Apply one record; false if it is of a kind that this version does not know."""
    kind, code, attempt, _, a, b, c, d = _BODY.unpack(body)
    if code >= len(OUTCOMES):
        return False
    match kind:
        case Kind.SETTLED:
            state.settle(a, b, c, OUTCOMES[code])
        case Kind.RETURNED:
            state.give_back(a, b, attempt)
        case Kind.POSITION:
            state.advance(Position(a, b, c), d, ())
        case Kind.DROPPED:
            state.drop(OUTCOMES[code], a)
        case Kind.STAMP:
            state.stamp(Stamp(_HALVES.pack(a, b), c, d))
        case _:
            return False
    return True


def encode_snapshot(state: JournalState, queue_id: str, generation: int) -> tuple[bytes, bytes]:
    """The header, and the payload with its padding, apart because they are written apart."""
    payload = json.dumps(_values_of(state, queue_id), separators=(",", ":")).encode()
    start = _HEADER.pack(MAGIC, generation, len(payload), google_crc32c.value(payload))
    checksum: int = google_crc32c.value(start)
    return start + checksum.to_bytes(4, "little"), payload + bytes(-len(payload) % 8)


def _values_of(state: JournalState, queue_id: str) -> dict[str, Any]:
    producers = {producer.hex(): accepted for producer, accepted in state.producers.items()}
    values: dict[str, Any] = {
        "queue_id": queue_id,
        "low": state.low,
        "settled": state.settled,
        "returned": state.returned,
        "totals": state.totals,
        "bytes": state.bytes,
        "position": state.position._asdict() if state.position else None,
        "producers": {name: accepted.low for name, accepted in producers.items()},
    }
    ahead = {name: list(accepted.runs) for name, accepted in producers.items() if accepted.runs}
    if ahead:
        values["ahead"] = ahead
    return values


def records_start(length: int) -> int:
    """The byte at which the records begin after a payload of this length."""
    return HEADER_SIZE + length + -length % 8


def parse_header(data: bytes) -> tuple[int, int, int] | None:
    """Generation, payload length and payload CRC; nothing if this is no header."""
    start = data[: _HEADER.size]
    if len(data) < HEADER_SIZE or not start.startswith(MAGIC):
        return None
    if google_crc32c.value(start).to_bytes(4, "little") != data[_HEADER.size : HEADER_SIZE]:
        return None
    _, generation, length, checksum = _HEADER.unpack(start)
    return generation, length, checksum


def parse_payload(payload: bytes, checksum: int, queue_id: str) -> JournalState | None:
    """The state in a snapshot; nothing if it is damaged, or another queue's."""
    if google_crc32c.value(payload) != checksum:
        return None
    try:
        values = json.loads(payload)
        return _state_of(values) if values["queue_id"] == queue_id else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _state_of(values: dict[str, Any]) -> JournalState:
    position = values["position"]
    ahead = values.get("ahead", {})
    return JournalState(
        low=values["low"],
        ranges=Ranges((first, end) for first, end in values["settled"]),
        returned=[(first, end, attempt) for first, end, attempt in values["returned"]],
        totals={Outcome(name): count for name, count in values["totals"].items()},
        bytes=values["bytes"],
        position=Position(**position) if position else None,
        producers={
            bytes.fromhex(name): Accepted(low, ((first, end) for first, end in ahead.get(name, ())))
            for name, low in values["producers"].items()
        },
        found=True,
    )
