"""The journal's bytes: snapshots and records as ``docs/disk-format.md`` has them. No files here."""

from __future__ import annotations

import enum
import json
import struct
from typing import Any

import google_crc32c

from turnlane.queues.accepted import Accepted
from turnlane.queues.contract import Outcome
from turnlane.queues.log.journal_state import MAX_ATTEMPT, JournalState
from turnlane.queues.log.position import Position, Stamp
from turnlane.queues.ranges import Ranges

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
