"""The journal's state, and its bytes as ``docs/disk-format.md`` specifies them. No files here.

``JournalState`` is used by a running queue, in a snapshot, and in the replay of records after a
crash: the same few methods change it in all three cases.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import google_crc32c

from turnlane.intervals import RangeSet
from turnlane.ledger import Outcome
from turnlane.storage.frames import LogPosition, ProducerSequence
from turnlane.storage.producer_sequences import AcceptedSequences

JOURNAL_FILES = ("journal.a", "journal.b")

MAX_PRODUCERS = 10_000
"""Only the most recent producers are remembered. A forgotten producer may repeat events."""

MAX_ATTEMPT = 0xFFFF
"""The largest attempt that a record has room for; later attempts are stored as this one."""

ProducerHash = bytes
ReturnedRange = tuple[int, int, int]

# ── state ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class JournalState:
    """Which events are settled, and hints for recovery. Not thread-safe."""

    low: int = 0
    """All offsets below are settled."""
    ranges: RangeSet = field(default_factory=RangeSet)
    """The settled offsets above ``low``."""
    returned: list[ReturnedRange] = field(default_factory=list)
    """Unsettled ranges that consumers returned: first, end, and their next attempt. Sorted."""
    totals: dict[Outcome, int] = field(default_factory=dict)
    """Events by outcome, including events that were dropped before they got an offset."""
    bytes: int = 0
    """Size of the unsettled events up to ``position``, minus the events settled after it. Adding
    all that the log finds after ``position`` gives the right sum, so this may be below zero."""
    position: LogPosition | None = None
    """Where the log ended at the last hint."""
    producers: dict[ProducerHash, AcceptedSequences] = field(default_factory=dict)
    """The sequence numbers that the queue has of each producer, least recent producer first."""
    found: bool = False
    """False if there was no journal to read: then the settled events are unknown."""

    @property
    def settled(self) -> list[tuple[int, int]]:
        """The settled ranges above ``low``: sorted, disjoint, merged."""
        return list(self.ranges)

    @property
    def floor(self) -> int:
        """The lowest offset that was certainly never used."""
        returned_end = self.returned[-1][1] if self.returned else 0
        written = self.position.end if self.position else 0
        return max(self.low, self.ranges.end, returned_end, written)

    def find_settled_end(self, offset: int, also: tuple[int, int]) -> int:
        """Return the end of the settled run at ``offset``, as if ``also`` were settled too."""
        first, end = also
        while True:
            reached = self.ranges.end_of_run(max(offset, self.low))
            if first <= reached < end:
                reached = end
            if reached == offset:
                return offset
            offset = reached

    def settle(self, first: int, end: int, size: int, outcome: Outcome) -> None:
        """Settle ``[first, end)``, ``size`` bytes in all; count only unsettled events."""
        if first == self.low and first < end and not self.ranges and not self.returned:
            # Nearly all acks come in order: the same as below in half the time.
            self.low = end
            self.totals[outcome] = self.totals.get(outcome, 0) + end - first
            self.bytes -= size
            return
        start = max(first, self.low)
        fresh = end - start - (self.ranges.overlap(start, end) if self.ranges else 0)
        if fresh <= 0:
            return
        self.totals[outcome] = self.totals.get(outcome, 0) + fresh
        self.bytes -= size * fresh // (end - first)
        if first > self.low:
            self.ranges.add(first, end)
        else:
            self.low = max(self.low, end)
            if self.ranges:
                self.low = self.ranges.end_of_run(self.low)
                self.ranges.drop_below(self.low)
        self.returned = _cut_out(self.returned, first, end)

    def give_back(self, first: int, end: int, attempt: int) -> None:
        """Record that the unsettled parts of ``[first, end)`` come next as ``attempt``."""
        if first >= end:
            return
        unsettled = self.ranges.missing(max(first, self.low), end)
        returned = _cut_out(self.returned, first, end)
        returned += [(start, stop, min(attempt, MAX_ATTEMPT)) for start, stop in unsettled]
        self.returned = sorted(returned)

    def advance(
        self, position: LogPosition, unsettled_bytes: int, sequences: Sequence[ProducerSequence]
    ) -> None:
        """Record how far the log has come. The position never goes back.

        A write that failed half-way may leave records that replay finds after newer ones.
        """
        for sequence in sequences:
            self.add_sequence(sequence)
        if self.position is None or position.end >= self.position.end:
            self.position = position
            self.bytes = unsettled_bytes

    def add_sequence(self, sequence: ProducerSequence) -> None:
        """Record the numbers that a producer has published."""
        known = self.producers.pop(sequence.producer, None) or AcceptedSequences()
        known.add(sequence.first, sequence.next_sequence)
        self.producers[sequence.producer] = known
        if len(self.producers) > MAX_PRODUCERS:
            del self.producers[next(iter(self.producers))]

    def drop(self, outcome: Outcome, events: int) -> None:
        """Count events that were dropped before they got an offset."""
        self.totals[outcome] = self.totals.get(outcome, 0) + events

    def copy(self) -> JournalState:
        """Return an independent copy."""
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


def _cut_out(returned: list[ReturnedRange], first: int, end: int) -> list[ReturnedRange]:
    """Return the ranges without ``[first, end)``."""
    rest: list[ReturnedRange] = []
    for start, stop, attempt in returned:
        parts = ((start, min(stop, first)), (max(start, end), stop))
        rest += [(low, high, attempt) for low, high in parts if low < high]
    return rest


# ── records ──────────────────────────────────────────────────────────────────────────────────────

MAGIC = b"TLJOURN1"
HEADER_SIZE = 32
RECORD_SIZE = 48


class RecordKind(enum.IntEnum):
    """What a record says."""

    SETTLED = 1
    RETURNED = 2
    POSITION = 3
    DROPPED = 4
    SEQUENCE = 5


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
    Outcome.CANCELLED,
)
"""By their code on disk. This order is part of the format; the order of the enum is not."""

_CODES = {outcome: code for code, outcome in enumerate(OUTCOMES)}
_HEADER = struct.Struct("<8sQQI")
_BODY = struct.Struct("<BBHQQQQQ")
_HALVES = struct.Struct("<QQ")


def compute_seed(generation: int) -> int:
    """Return the value with which the checksums of a generation's records start.

    So a record that an earlier use of the file left behind is never valid in this generation.
    """
    checksum: int = google_crc32c.value(generation.to_bytes(8, "little"))
    return checksum


def sign_record(seed: int, body: bytes) -> bytes:
    """Return the record: the checksum of the body, which starts with the seed, and the body."""
    checksum: int = google_crc32c.extend(seed, body)
    return checksum.to_bytes(4, "little") + body


def encode_settled(first: int, end: int, size: int, outcome: Outcome) -> bytes:
    """Return the body of a record: ``[first, end)``, of ``size`` bytes, is settled."""
    return _BODY.pack(RecordKind.SETTLED, _CODES[outcome], 0, 0, first, end, size, 0)


def encode_returned(first: int, end: int, attempt: int) -> bytes:
    """Return the body of a record: a consumer returned ``[first, end)``."""
    return _BODY.pack(RecordKind.RETURNED, 0, min(attempt, MAX_ATTEMPT), 0, first, end, 0, 0)


def encode_dropped(outcome: Outcome, events: int) -> bytes:
    """Return the body of a record: events were dropped before they got an offset."""
    return _BODY.pack(RecordKind.DROPPED, _CODES[outcome], 0, 0, events, 0, 0, 0)


def encode_position(position: LogPosition, size: int) -> bytes:
    """Return the body of a record: the log has come this far."""
    return _BODY.pack(RecordKind.POSITION, 0, 0, 0, *position, size)


def encode_sequence(sequence: ProducerSequence) -> bytes:
    """Return the body of a record: a producer has published these numbers."""
    producer, next_sequence, first = sequence
    halves = _HALVES.unpack(producer)
    return _BODY.pack(RecordKind.SEQUENCE, 0, 0, 0, *halves, next_sequence, first)


def apply_records(data: bytes, seed: int, state: JournalState) -> int:
    """Apply records in order up to the first that is not valid; return how many were applied."""
    for at in range(0, len(data) - RECORD_SIZE + 1, RECORD_SIZE):
        body = data[at + 4 : at + RECORD_SIZE]
        if sign_record(seed, body) != data[at : at + RECORD_SIZE] or not _apply(body, state):
            return at // RECORD_SIZE
    return len(data) // RECORD_SIZE


def _apply(body: bytes, state: JournalState) -> bool:
    """Apply one record; false if this version does not know its kind."""
    kind, code, attempt, _, a, b, c, d = _BODY.unpack(body)
    if code >= len(OUTCOMES):
        return False
    match kind:
        case RecordKind.SETTLED:
            state.settle(a, b, c, OUTCOMES[code])
        case RecordKind.RETURNED:
            state.give_back(a, b, attempt)
        case RecordKind.POSITION:
            state.advance(LogPosition(a, b, c), d, ())
        case RecordKind.DROPPED:
            state.drop(OUTCOMES[code], a)
        case RecordKind.SEQUENCE:
            state.add_sequence(ProducerSequence(_HALVES.pack(a, b), c, d))
        case _:
            return False
    return True


# ── snapshots ────────────────────────────────────────────────────────────────────────────────────


def encode_snapshot(state: JournalState, queue_id: str, generation: int) -> tuple[bytes, bytes]:
    """Return the header and the padded payload, which are written separately."""
    producers = {producer.hex(): accepted for producer, accepted in state.producers.items()}
    position = state.position
    values: dict[str, Any] = {
        "queue_id": queue_id,
        "low": state.low,
        "settled": state.settled,
        "returned": state.returned,
        "totals": state.totals,
        "bytes": state.bytes,
        "position": position
        and {"chunk": position.segment, "byte": position.byte, "end": position.end},
        "producers": {name: accepted.low for name, accepted in producers.items()},
    }
    ahead = {name: list(accepted.runs) for name, accepted in producers.items() if accepted.runs}
    if ahead:
        values["ahead"] = ahead
    payload = json.dumps(values, separators=(",", ":")).encode()
    start = _HEADER.pack(MAGIC, generation, len(payload), google_crc32c.value(payload))
    checksum: int = google_crc32c.value(start)
    return start + checksum.to_bytes(4, "little"), payload + bytes(-len(payload) % 8)


def get_records_start(length: int) -> int:
    """Return the byte at which the records begin after a payload of this length."""
    return HEADER_SIZE + length + -length % 8


def parse_header(data: bytes) -> tuple[int, int, int] | None:
    """Return generation, payload length and payload checksum; ``None`` if this is no header."""
    start = data[: _HEADER.size]
    if len(data) < HEADER_SIZE or not start.startswith(MAGIC):
        return None
    if google_crc32c.value(start).to_bytes(4, "little") != data[_HEADER.size : HEADER_SIZE]:
        return None
    _, generation, length, checksum = _HEADER.unpack(start)
    return generation, length, checksum


def parse_payload(payload: bytes, checksum: int, queue_id: str) -> JournalState | None:
    """Return the state in a snapshot; ``None`` if it is damaged, or another queue's."""
    if parse_queue_id(payload, checksum) != queue_id:
        return None
    try:
        return _parse_state(json.loads(payload))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def parse_queue_id(payload: bytes, checksum: int) -> str | None:
    """Return the id of the queue whose snapshot this is; ``None`` if it is damaged."""
    if google_crc32c.value(payload) != checksum:
        return None
    try:
        return str(json.loads(payload)["queue_id"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _parse_state(values: dict[str, Any]) -> JournalState:
    position = values["position"]
    ahead = values.get("ahead", {})
    state = JournalState(
        low=values["low"],
        ranges=RangeSet((first, end) for first, end in values["settled"]),
        returned=[(first, end, attempt) for first, end, attempt in values["returned"]],
        totals={Outcome(name): count for name, count in values["totals"].items()},
        bytes=values["bytes"],
        position=(
            LogPosition(position["chunk"], position["byte"], position["end"]) if position else None
        ),
        producers={
            bytes.fromhex(name): AcceptedSequences(
                low, ((first, end) for first, end in ahead.get(name, ()))
            )
            for name, low in values["producers"].items()
        },
        found=True,
    )
    single = (state.low, state.bytes, *state.totals.values(), *(state.position or ()))
    spans = chain(state.settled, state.returned, *state.producers.values())
    if any(type(number) is not int for number in chain(single, *spans)):
        raise TypeError("the snapshot has something else in the place of a number")
    return state
