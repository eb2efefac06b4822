"""A sequence number that a producer left out is accepted later, exactly once."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.harness import (
    PATIENCE,
    DiskAssistedHarness,
    DiskHarness,
    Harness,
    numbered,
    values_of,
    wait_until,
)
from tests.queue_internals import state_of
from turnlane.errors import NumbersMissing, QueueEmpty, QueueFull
from turnlane.events import block_of
from turnlane.queues import open_queue
from turnlane.queues.api import Producer, Published
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.producer import hash_producer_id
from turnlane.storage.producer_sequences import MAX_RUNS, AcceptedSequences, GapPolicy


def publish(producer: Producer, first: int, end: int, timeout: float | None = None) -> Published:
    block = block_of(numbered(first, end))
    return producer.publish_block(block, sequence=first, timeout=timeout)


def holding(**knobs: Any) -> BufferedQueue:
    queue = open_queue(kind="memory", **knobs)
    assert isinstance(queue, BufferedQueue)
    return queue


def test_a_refused_block_is_taken_after_a_higher_one(buffered_kind: Harness) -> None:
    """A full queue refused it before, so it is not a repeat."""
    queue = buffered_kind.open(size=12, stalled=True)
    producer = queue.producer(producer_id="me")
    publish(producer, 0, 10)
    with pytest.raises(QueueFull):
        publish(producer, 10, 20, timeout=0)
    assert publish(producer, 20, 22, timeout=0).accepted == 2
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 12) == numbered(0, 10) + numbered(20, 22)
    again = publish(producer, 10, 20)
    assert (again.accepted, again.repeated) == (10, 0)
    assert buffered_kind.receive(queue, 10) == numbered(10, 20)


def test_all_new_parts_of_a_block_are_taken(buffered_kind: Harness) -> None:
    """New parts enter in order; repeated parts are left out."""
    queue = buffered_kind.open()
    producer = queue.producer(producer_id="me")
    for first, end in ((0, 3), (5, 7), (9, 10)):
        publish(producer, first, end)
    done = publish(producer, 1, 12)
    assert (done.accepted, done.repeated) == (6, 5)
    buffered_kind.receive(queue, 6)
    assert buffered_kind.receive(queue, 6) == [
        *numbered(3, 5),
        *numbered(7, 9),
        *numbered(10, 12),
    ]
    assert publish(producer, 0, 12).repeated == 12


def test_the_part_of_a_block_before_a_later_one_is_taken(buffered_kind: Harness) -> None:
    """The rest of the block is a repeat."""
    queue = buffered_kind.open()
    producer = queue.producer(producer_id="me")
    publish(producer, 5, 9)
    done = publish(producer, 2, 7)
    assert (done.accepted, done.repeated) == (3, 2)
    assert publish(producer, 2, 9).repeated == 7
    assert buffered_kind.receive(queue, 7) == numbered(5, 9) + numbered(2, 5)


def test_one_wrong_high_number_hides_no_later_event(buffered_kind: Harness) -> None:
    """All later events are accepted."""
    queue = buffered_kind.open()
    producer = queue.producer(producer_id="me")
    block = block_of([b"wrong"])
    assert producer.publish_block(block, sequence=1 << 61).accepted == 1
    for first in range(0, 50, 10):
        assert publish(producer, first, first + 10).accepted == 10
    assert buffered_kind.receive(queue, 51) == [b"wrong", *numbered(0, 50)]


def test_too_many_gaps_are_refused_until_one_is_filled(buffered_kind: Harness) -> None:
    """The error names the missing numbers, and no event of the block is accepted."""
    queue = buffered_kind.open()
    producer = queue.producer(producer_id="me")
    for number in range(1, MAX_RUNS + 1):
        publish(producer, 2 * number, 2 * number + 1)
    with pytest.raises(NumbersMissing, match=r"128 gaps .* missing are 0 to 1, 3, 5, .*…") as error:
        publish(producer, 1000, 1010)
    assert error.value.missing[:2] == [(0, 2), (3, 4)]
    with pytest.raises(NumbersMissing):
        producer.try_publish_block(block_of(numbered(1000, 1010)), sequence=1000)
    assert publish(producer, 6, 7).repeated == 1
    assert publish(producer, 3, 4).accepted == 1
    assert publish(producer, 1000, 1010).accepted == 10
    assert publish(producer, 0, 2).accepted == 2
    found = buffered_kind.receive(queue, MAX_RUNS + 13)
    assert len(set(found)) == MAX_RUNS + 13


def test_a_producer_that_skips_numbers_may_do_so_without_end() -> None:
    """Skipped numbers never come, so they count as accepted."""
    with holding() as queue:
        producer = queue.producer(producer_id="me", gaps=GapPolicy.SKIP)
        for number in range(0, 10 * MAX_RUNS, 10):
            assert publish(producer, number, number + 1).accepted == 1
        assert state_of(queue).sequences[hash_producer_id("me")] == AcceptedSequences(
            10 * MAX_RUNS - 9
        )
        assert publish(producer, 5, 6).repeated == 1


def test_a_stream_forgets_its_oldest_gaps_only() -> None:
    """A number of a recent gap is still accepted."""
    with holding() as queue:
        producer = queue.producer(producer_id="me", gaps=GapPolicy.FORGET)
        for number in range(0, 10 * 3 * MAX_RUNS, 10):
            assert publish(producer, number, number + 1).accepted == 1
        assert len(state_of(queue).sequences[hash_producer_id("me")].runs) == MAX_RUNS
        assert publish(producer, 5, 6).repeated == 1
        last = 10 * (3 * MAX_RUNS - 1)
        assert publish(producer, last - 5, last).accepted == 5


def test_dropped_events_fill_a_gap() -> None:
    """The answer counted them as dropped, so they do not come again."""
    with holding(size=4, full_behavior="drop_newest") as queue:
        producer = queue.producer(producer_id="me")
        publish(producer, 2, 6)
        assert publish(producer, 0, 2).dropped == 2
        assert state_of(queue).sequences[hash_producer_id("me")] == AcceptedSequences(6)


def test_gaps_survive_a_restart(disk_kind: DiskHarness) -> None:
    """The missing numbers are accepted then, and no other number is accepted twice."""
    queue = disk_kind.open()
    producer = queue.producer(producer_id="me")
    for first, end in ((0, 3), (5, 7), (9, 12)):
        publish(producer, first, end)
    queue.close()
    again = disk_kind.reopen()
    producer = again.producer(producer_id="me")
    done = publish(producer, 0, 12)
    assert (done.accepted, done.repeated) == (4, 8)
    found = disk_kind.receive(again, 12)
    assert sorted(map(bytes, filter(None, found))) == numbered(0, 12)


@pytest.mark.parametrize("settled", [False, True])
def test_gaps_survive_a_kill(tmp_path: Path, settled: bool) -> None:
    """The log has the numbers with the events; the journal has the numbers of settled events."""
    with open_queue(kind="disk", path=tmp_path / "queue", sync_interval="1h") as queue:
        producer = queue.producer(producer_id="me")
        for first, end in ((0, 3), (5, 7), (9, 12), (3, 5)):
            publish(producer, first, end)
        if settled:
            for events in (3, 2, 3, 2):
                queue.get(events).done()
        else:
            queue.producer(ack="persisted").publish(b"last")
        left = shutil.copytree(tmp_path / "queue", tmp_path / "left")
        with open_queue(kind="disk", path=left) as after:
            done = publish(after.producer(producer_id="me"), 0, 14)
            assert (done.accepted, done.repeated) == (4, 10)


class _Run:
    """Publishes to a queue, reads, restarts and kills it. Values are the numbers."""

    def __init__(self, path: Path, kind: str) -> None:
        self._path = path
        self._kind = kind
        self._lives = 0
        self.answered: set[int] = set()
        self.found: Counter[int] = Counter()
        self._open()

    def _open(self) -> None:
        knobs: dict[str, Any] = (
            {} if self._kind == "memory" else {"path": self._path / str(self._lives)}
        )
        self.queue = open_queue(kind=self._kind, size=16, **knobs)
        level = "persisted" if self._kind == "disk" else "accepted"
        self.producer = self.queue.producer(ack=level, on_ack=lambda _: None, producer_id="me")

    def send(self, first: int, count: int) -> None:
        """Publish a block: it is accepted, or refused by a full queue or for its gaps."""
        numbers = range(first, first + count)
        block = block_of([b"%d" % number for number in numbers])
        try:
            done = self.producer.try_publish_block(block, sequence=first)
        except NumbersMissing:
            return
        if done is not None:
            assert done.accepted + done.repeated == count
            assert self.producer.flush(PATIENCE)
            self.answered.update(numbers)

    def read(self, events: int) -> None:
        try:
            batch = self.queue.get(events, timeout=0)
        except QueueEmpty:
            return
        self.found.update(int(value or b"-1") for value in values_of(batch))
        batch.done()

    def restart(self) -> None:
        if self._kind != "memory":
            self.queue.close()
            self._open()

    def kill(self) -> None:
        """Continue with a copy of the directory as a killed process leaves it."""
        if self._kind == "disk":
            before = self._path / str(self._lives)
            self._lives += 1
            shutil.copytree(before, self._path / str(self._lives))
            self.queue.close()
            self._open()

    def check(self) -> None:
        while self.queue.stats().size or self.queue.stats().ledger.pending:
            self.read(16)
        assert set(self.found) == self.answered
        assert set(self.found.values()) <= {1}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 60), st.integers(1, 12)),
        st.tuples(st.just("send"), st.integers(0, 60), st.integers(1, 12)),
        st.tuples(st.just("read"), st.integers(1, 16)),
        st.tuples(st.just("restart")),
        st.tuples(st.just("kill")),
    ),
    max_size=30,
)


@pytest.mark.parametrize("kind", ["memory", "disk", "disk_assisted"])
@settings(max_examples=60, deadline=None)
@given(steps=STEPS, most=st.integers(1, 4))
def test_every_answered_event_is_in_the_queue_exactly_once(
    kind: str, steps: list[tuple[str, int]], most: int
) -> None:
    """This holds for any order of blocks, refusals, repeats, restarts and kills."""
    with (
        tempfile.TemporaryDirectory() as path,
        mock.patch("turnlane.queues.producer.MAX_RUNS", most),
    ):
        run = _Run(Path(path), kind)
        try:
            for name, *arguments in steps:
                getattr(run, name)(*arguments)
            run.check()
        finally:
            run.queue.close()


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 20)), max_size=60))
def test_accepted_numbers_behave_like_a_set(blocks: list[tuple[int, int]]) -> None:
    """The runs agree with a set of numbers."""
    accepted, model = AcceptedSequences(), set[int]()
    for first, count in blocks:
        end = first + count
        assert sum(stop - start for start, stop in accepted.missing(first, end)) == len(
            set(range(first, end)) - model
        )
        accepted.add(first, end)
        model.update(range(first, end))
        assert accepted.end == max(model) + 1
        start = accepted.start_of_run(first)
        assert set(range(start, end)) <= model
        assert start == 0 or start - 1 not in model
    assert {number for first, end in accepted for number in range(first, end)} == model
    assert all(number not in model for first, end in accepted.gaps for number in range(first, end))
    clone = AcceptedSequences()
    clone.update(accepted)
    assert clone == accepted == accepted.copy()


def test_spill_of_a_block_with_positions_claims_no_event_in_memory(
    disk_assisted: DiskAssistedHarness, tmp_path: Path
) -> None:
    """The numbers are bytes of a file, so the number of an event in the middle is not known."""
    queue = disk_assisted.open(size=100, high_watermark=20, low_watermark=10)
    assert isinstance(queue, BufferedQueue)
    files = queue.producer(producer_id="file", gaps=GapPolicy.POSITIONS)
    files.publish_block(block_of(numbered(0, 30)), sequence=3_000 - 30)
    wait_until(lambda: queue.stats().size <= 10, "the spill")
    copy = shutil.copytree(disk_assisted.path / "queue-0", tmp_path / "killed")
    killed = disk_assisted.open(path=copy)
    assert isinstance(killed, BufferedQueue)
    stored = killed.stats().ledger.pending
    assert killed.get_known_sequence("file") == (3_000 if stored == 30 else None)
