"""A reopened journal has all its records."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import struct
import tempfile
import threading
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from turnlane.ledger import Outcome
from turnlane.storage.disk_io import Disk
from turnlane.storage.frames import LogPosition, ProducerSequence
from turnlane.storage.journal import Journal
from turnlane.storage.journal_records import (
    JOURNAL_FILES,
    MAX_PRODUCERS,
    JournalState,
    encode_snapshot,
)
from turnlane.storage.producer_sequences import AcceptedSequences
from turnlane.testing import FaultyDisk

ID = "0123456789abcdef" * 2
DELIVERED, DEAD, NEWEST = Outcome.DELIVERED, Outcome.DEAD, Outcome.NEWEST
P1, P2 = b"1" * 16, b"2" * 16


# The state, and the effect of each record


def settled(*spans: tuple[int, int]) -> JournalState:
    state = JournalState()
    for first, end in spans:
        state.settle(first, end, 10 * (end - first), DELIVERED)
    return state


def test_settling_in_order_raises_low() -> None:
    state = settled((0, 5), (5, 8))
    assert (state.low, state.settled, state.totals) == (8, [], {DELIVERED: 8})


def test_settling_out_of_order_keeps_ranges_until_the_gap_closes() -> None:
    state = settled((10, 20), (30, 40), (20, 25))
    assert (state.low, state.settled) == (0, [(10, 25), (30, 40)])
    state.settle(0, 10, 0, DEAD)
    assert (state.low, state.settled) == (25, [(30, 40)])
    assert state.totals == {DELIVERED: 25, DEAD: 10}


def test_settling_again_counts_nothing_twice() -> None:
    state = settled((0, 10), (20, 30))
    state.bytes = 1000
    state.settle(5, 25, 200, DEAD)
    assert state.totals == {DELIVERED: 20, DEAD: 10}
    assert state.bytes == 900
    state.settle(0, 30, 300, DEAD)
    assert state.totals == {DELIVERED: 20, DEAD: 10}


def test_empty_range_settles_nothing() -> None:
    assert settled((0, 0), (5, 5), (7, 3)) == JournalState()


def test_settled_range_is_no_longer_returned() -> None:
    state = JournalState()
    state.give_back(0, 100, 2)
    state.settle(0, 20, 0, DELIVERED)
    assert state.returned == [(20, 100, 2)]
    state.settle(40, 60, 0, DELIVERED)
    assert state.returned == [(20, 40, 2), (60, 100, 2)]
    state.settle(20, 40, 0, DELIVERED)
    assert (state.low, state.returned) == (60, [(60, 100, 2)])


def test_range_returned_again_has_the_later_attempt() -> None:
    state = JournalState()
    state.give_back(0, 100, 2)
    state.give_back(50, 150, 3)
    assert state.returned == [(0, 50, 2), (50, 150, 3)]


def test_returning_an_empty_range_has_no_effect() -> None:
    state = JournalState()
    state.give_back(0, 10, 2)
    state.give_back(7, 3, 3)
    assert state.returned == [(0, 10, 2)]


def test_returning_a_settled_range_has_no_effect() -> None:
    state = settled((0, 10), (20, 30))
    state.give_back(5, 40, 2)
    assert state.returned == [(10, 20, 2), (30, 40, 2)]


def test_position_and_sequences_never_go_back() -> None:
    state = JournalState()
    state.advance(LogPosition(0, 800, 100), 1000, [ProducerSequence(P1, 50)])
    state.advance(LogPosition(0, 400, 50), 500, [ProducerSequence(P1, 25)])
    assert (state.position, state.bytes) == (LogPosition(0, 800, 100), 1000)
    assert state.producers == {P1: AcceptedSequences(50)}
    state.advance(LogPosition(100, 64, 100), 900, [])
    assert (state.position, state.bytes) == (LogPosition(100, 64, 100), 900)


@pytest.mark.parametrize("snapshot", [False, True])
def test_sequences_with_gaps_survive_reopening(tmp_path: Path, snapshot: bool) -> None:
    journal, _ = Journal.open(tmp_path, Disk(), ID)
    journal.record_sequences(
        [
            ProducerSequence(P1, 10),
            ProducerSequence(P1, 22, 20),
            ProducerSequence(P2, 5, 3),
            ProducerSequence(P1, 12),
        ]
    )
    if snapshot:
        journal.snapshot()
    journal.close()
    assert reopened(tmp_path).producers == {
        P1: AcceptedSequences(12, [(20, 22)]),
        P2: AcceptedSequences(0, [(3, 5)]),
    }


def test_snapshot_without_gaps_has_no_field_ahead() -> None:
    state = JournalState()
    state.add_sequence(ProducerSequence(P1, 7))
    payload = json.loads(encode_snapshot(state, ID, 1)[1].rstrip(b"\0"))
    assert (payload["producers"], "ahead" in payload) == ({P1.hex(): 7}, False)


@pytest.mark.parametrize(
    "change",
    [
        {"low": "3"},
        {"settled": [["a", "b"]]},
        {"returned": [[8, None, 2]]},
        {"totals": {"delivered": 1.5}},
        {"bytes": None},
        {"position": {"chunk": "a", "byte": 1, "end": 2}},
        {"producers": {"00": "a"}},
        {},
    ],
    ids=lambda change: next(iter(change), "nested"),
)
def test_senseless_snapshot_goes_to_quarantine(change: dict[str, object], tmp_path: Path) -> None:
    """Its checksum is right."""
    _, payload = encode_snapshot(settled((0, 10)), ID, 1)
    content = json.dumps({**json.loads(payload.rstrip(b"\0")), **change}).encode()
    content = content if change else b"[" * 100_000
    start = struct.pack("<8sQQI", b"TLJOURN1", 1, len(content), google_crc32c.value(content))
    checksum = google_crc32c.value(start).to_bytes(4, "little")
    (tmp_path / JOURNAL_FILES[0]).write_bytes(start + checksum + content + bytes(8))
    journal, state = Journal.open(tmp_path, Disk(), ID)
    journal.close()
    assert state == JournalState()
    assert (tmp_path / "quarantine" / JOURNAL_FILES[0]).exists()


def test_only_the_most_recent_producers_are_remembered() -> None:
    state = JournalState()
    for number in range(MAX_PRODUCERS):
        state.add_sequence(ProducerSequence(number.to_bytes(16), 1))
    state.add_sequence(ProducerSequence((0).to_bytes(16), 2))
    state.add_sequence(ProducerSequence(P1, 1))
    assert len(state.producers) == MAX_PRODUCERS
    assert (0).to_bytes(16) in state.producers
    assert (1).to_bytes(16) not in state.producers


def test_floor_is_above_all_known_offsets() -> None:
    state = settled((0, 10))
    assert state.floor == 10
    state.settle(20, 30, 0, DELIVERED)
    assert state.floor == 30
    state.advance(LogPosition(0, 0, 40), 0, [])
    assert state.floor == 40


offset = st.integers(0, 60)
spans = st.tuples(offset, offset).map(sorted)


@given(st.lists(st.tuples(st.booleans(), spans, st.integers(1, 9)), max_size=30))
def test_state_equals_a_model_of_plain_sets(steps: list[tuple[bool, list[int], int]]) -> None:
    state, done, back = JournalState(), set[int](), dict[int, int]()
    for settling, (first, end), attempt in steps:
        numbers = range(first, end)
        if settling:
            state.settle(first, end, end - first, DELIVERED)
            done |= set(numbers)
        else:
            state.give_back(first, end, attempt)
            back |= dict.fromkeys(numbers, attempt)
        back = {number: attempt for number, attempt in back.items() if number not in done}
    above = {number for first, end in state.settled for number in range(first, end)}
    assert set(range(state.low)) | above == done
    assert state.low not in done
    assert state.totals.get(DELIVERED, 0) == len(done) == -state.bytes
    assert {n: a for first, end, a in state.returned for n in range(first, end)} == back
    assert state.returned == sorted(state.returned)


# The files


def reopened(path: Path) -> JournalState:
    journal, state = Journal.open(path, Disk(), ID)
    journal.close()
    return state


def test_new_journal_is_empty_and_preallocated(tmp_path: Path) -> None:
    state = reopened(tmp_path)
    assert state == JournalState()
    assert not state.found
    for name in JOURNAL_FILES:
        status = (tmp_path / name).stat()
        assert status.st_size == 1 << 20
        assert status.st_blocks * 512 >= 1 << 20


def tell_everything(journal: Journal) -> None:
    journal.record_settled(0, 10, 100, DELIVERED)
    journal.record_settled(20, 30, 100, DEAD)
    journal.record_returned(10, 15, 2)
    journal.record_returned(15, 20, 1_000_000)
    journal.record_position(
        LogPosition(0, 81920, 1400), 48213, [ProducerSequence(P1, 7), ProducerSequence(P2, 9)]
    )
    journal.record_settled(1000, 1100, 13, Outcome.CORRUPT)
    journal.record_dropped(NEWEST, 17)


EVERYTHING = {
    "low": 10,
    "settled": [(20, 30), (1000, 1100)],
    "returned": [(10, 15, 2), (15, 20, 65535)],
    "totals": {DELIVERED: 10, DEAD: 10, Outcome.CORRUPT: 100, NEWEST: 17},
    "bytes": 48200,
    "position": LogPosition(0, 81920, 1400),
    "producers": {P1: AcceptedSequences(7), P2: AcceptedSequences(9)},
    "found": True,
}


@pytest.mark.parametrize("snapshot", [False, True])
def test_all_records_survive_reopening(tmp_path: Path, snapshot: bool) -> None:
    journal, _ = Journal.open(tmp_path, Disk(), ID)
    tell_everything(journal)
    if snapshot:
        journal.snapshot()
    journal.close()
    state = reopened(tmp_path)
    assert {name: getattr(state, name) for name in EVERYTHING} == EVERYTHING


def test_bytes_follow_the_documented_format(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path, Disk(), ID)
    tell_everything(journal)
    journal.close()
    data = (tmp_path / "journal.b").read_bytes()
    magic, generation, length, payload_crc, crc = struct.unpack_from("<8sQQII", data)
    payload = data[32 : 32 + length]
    assert (magic, generation) == (b"TLJOURN1", 1)
    assert crc == google_crc32c.value(data[:28])
    assert payload_crc == google_crc32c.value(payload)
    assert json.loads(payload)["queue_id"] == ID
    start = 32 + length + -length % 8
    records = [data[at : at + 48] for at in range(start, start + 8 * 48, 48)]
    generation_crc = google_crc32c.value(struct.pack("<Q", generation))
    for record in records:
        checksum = google_crc32c.extend(generation_crc, record[4:])
        assert record[:4] == checksum.to_bytes(4, "little")
    fields = [struct.unpack("<BBHQQQQQ", record[4:]) for record in records]
    half = int.from_bytes(P1[:8], "little")
    assert fields[0] == (1, 0, 0, 0, 0, 10, 100, 0)
    assert fields[1] == (1, 1, 0, 0, 20, 30, 100, 0)
    assert fields[2] == (2, 0, 2, 0, 10, 15, 0, 0)
    assert fields[4] == (5, 0, 0, 0, half, half, 7, 0)
    assert fields[6] == (3, 0, 0, 0, 0, 81920, 1400, 48213)
    assert fields[7] == (1, 7, 0, 0, 1000, 1100, 13, 0)


def test_position_and_its_sequences_are_one_write(tmp_path: Path) -> None:
    disk = FaultyDisk()
    journal, _ = Journal.open(tmp_path, disk, ID)
    before = disk.operations["write"], disk.operations["sync"]
    journal.record_position(
        LogPosition(0, 8, 1), 0, [ProducerSequence(bytes([n]) * 16, n) for n in range(20)]
    )
    assert (disk.operations["write"], disk.operations["sync"]) == (before[0] + 1, before[1])
    journal.close()


def test_reading_changes_nothing(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path, Disk(), ID)
    tell_everything(journal)
    before = {name: (tmp_path / name).read_bytes() for name in JOURNAL_FILES}
    assert Journal.read(tmp_path, Disk(), ID) == dataclasses.replace(journal.state(), found=True)
    assert {name: (tmp_path / name).read_bytes() for name in JOURNAL_FILES} == before
    journal.close()


def test_returned_state_is_a_copy(tmp_path: Path) -> None:
    journal, state = Journal.open(tmp_path, Disk(), ID)
    state.settle(0, 10, 0, DELIVERED)
    assert journal.state().low == 0
    journal.record_settled(0, 5, 0, DELIVERED)
    assert state.low == 10
    journal.close()


def test_many_records_change_files_repeatedly(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path, Disk(), ID)
    for number in range(70_000):
        journal.record_settled(number, number + 1, 1, DELIVERED)
    assert journal.syncs == 2 * 4
    assert all((tmp_path / name).stat().st_size == 1 << 20 for name in JOURNAL_FILES)
    journal.close()
    state = reopened(tmp_path)
    assert (state.low, state.totals) == (70_000, {DELIVERED: 70_000})


def test_large_snapshot_makes_the_file_larger(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path, Disk(), ID, file_size=16384)
    stamps = [ProducerSequence(number.to_bytes(16), number) for number in range(2000)]
    journal.record_position(LogPosition(0, 0, 1), 0, stamps)
    for number in range(2000):
        journal.record_settled(2 * number + 1, 2 * number + 2, 1, DELIVERED)
    journal.close()
    state = reopened(tmp_path)
    assert len(state.producers) == len(state.settled) == 2000


def test_threads_can_record_concurrently(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path, Disk(), ID, file_size=32768)

    def tell(start: int) -> None:
        for number in range(start, 8000, 4):
            journal.record_settled(number, number + 1, 1, DELIVERED)

    threads = [threading.Thread(target=tell, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    journal.sync()
    for thread in threads:
        thread.join()
    journal.close()
    state = reopened(tmp_path)
    assert (state.low, state.totals[DELIVERED], state.bytes) == (8000, 8000, -8000)


def test_closed_journal_refuses_records(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path, Disk(), ID)
    journal.close()
    journal.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        journal.record_settled(0, 1, 1, DELIVERED)


def test_new_queue_logs_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal, _ = Journal.open(tmp_path, Disk(), ID)
    journal.close()
    assert not caplog.records


def test_missing_journal_next_to_chunks_logs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"{0:016x}.chunk").touch()
    with caplog.at_level(logging.WARNING):
        journal, _ = Journal.open(tmp_path, Disk(), ID)
    journal.close()
    assert "journal.missing" in caplog.text


# The model


class JournalMachine(RuleBasedStateMachine):
    """After any records in any order, a reopened journal equals the state in memory."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.disk = FaultyDisk()
        self.model = JournalState()
        self.open()

    def open(self) -> None:
        # The smallest file: it changes every few records.
        self.journal, state = Journal.open(Path(self.folder.name), self.disk, ID, file_size=16384)
        assert state == dataclasses.replace(self.model, found=state.found)

    @rule(
        first=offset,
        count=st.integers(0, 20),
        size=st.integers(0, 2**40),
        how=st.sampled_from(list(Outcome)),
    )
    def settle(self, first: int, count: int, size: int, how: Outcome) -> None:
        self.journal.record_settled(first, first + count, size, how)
        self.model.settle(first, first + count, size, how)

    @rule(first=offset, count=st.integers(0, 20), attempt=st.integers(1, 70_000))
    def give_back(self, first: int, count: int, attempt: int) -> None:
        self.journal.record_returned(first, first + count, attempt)
        self.model.give_back(first, first + count, attempt)

    @rule(
        end=st.integers(0, 2**63),
        size=st.integers(0, 2**40),
        producers=st.lists(st.binary(min_size=16, max_size=16), max_size=80),
    )
    def advance(self, end: int, size: int, producers: list[bytes]) -> None:
        stamps = [ProducerSequence(producer, end // 2) for producer in producers]
        self.journal.record_position(LogPosition(end // 3, end // 4, end), size, stamps)
        self.model.advance(LogPosition(end // 3, end // 4, end), size, stamps)

    @rule(events=st.integers(0, 2**40), how=st.sampled_from(list(Outcome)))
    def drop(self, events: int, how: Outcome) -> None:
        self.journal.record_dropped(how, events)
        self.model.drop(how, events)

    @rule(count=st.integers(1, 200))
    def settle_many(self, count: int) -> None:
        for number in range(self.model.low, self.model.low + count):
            self.settle(number, 1, 1, DELIVERED)

    @rule(op=st.sampled_from(["write", "sync"]), nth=st.integers(1, 4))
    def a_call_fails(self, op: str, nth: int) -> None:
        self.disk.fail(op, nth=nth, match="journal")
        for number in range(4):
            try:
                self.journal.record_settled(200 + number, 201 + number, 1, DEAD)
            except OSError as error:
                assert error.errno == errno.EIO  # noqa: PT017
            else:
                self.model.settle(200 + number, 201 + number, 1, DEAD)
        self.disk.clear()

    @rule()
    def snapshot(self) -> None:
        self.journal.snapshot()

    @rule()
    def sync(self) -> None:
        self.journal.sync()

    @rule()
    def reopen(self) -> None:
        self.journal.close()
        self.open()

    @invariant()
    def says_the_same(self) -> None:
        if hasattr(self, "journal"):
            state = self.journal.state()
            assert state == dataclasses.replace(self.model, found=state.found)

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.reopen()
            self.journal.close()
            self.folder.cleanup()


TestJournalMachine = JournalMachine.TestCase
