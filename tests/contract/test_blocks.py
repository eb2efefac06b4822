"""Blocks that a queue accepts, and their contents for consumers."""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa
import pytest

from tests.contract.harness import (
    Harness,
    Task,
    assert_never,
    line_up,
    make_producer_with_acks,
    numbered,
    publish_all,
    wait_until,
)
from turnlane.errors import EventTooLarge, QueueFull, SchemaMismatch
from turnlane.events import BASE_SCHEMA, Block, block_of, iterate_events, join_blocks
from turnlane.queues.api import Batch, Queue
from turnlane.queues.settings import Kind


def with_columns(values: list[bytes], **columns: Any) -> Block:
    """Return a block with additional columns."""
    block = block_of(values, timestamps=0)
    for name, column in columns.items():
        block = block.append_column(name, column)
    return block


@pytest.mark.parametrize("moment", [2**62, -(2**62)])
def test_a_time_beyond_the_calendar_of_python_is_kept_as_a_number(moment: int) -> None:
    assert [event.timestamp for event in iterate_events(block_of([b"x"], timestamps=moment))] == [
        moment
    ]


class Receiver:
    """Takes blocks out of a queue of any kind."""

    def __init__(self, harness: Harness, **knobs: Any) -> None:
        self._blocks: list[Block] = []
        self._is_direct = harness.kind is Kind.DIRECT
        if self._is_direct:
            knobs["consumer"] = self._take
        self.queue: Queue = harness.open(**knobs)

    def _take(self, batch: Batch) -> None:
        self._blocks.append(batch.block)

    def receive(self, count: int) -> Block:
        """Return the next ``count`` events as one block."""
        while sum(block.num_rows for block in self._blocks) < count:
            assert not self._is_direct
            with self.queue.get(count, timeout=20) as batch:
                self._take(batch)
        blocks, self._blocks = self._blocks, []
        return join_blocks(blocks)


def test_publish_block_returns_the_first_offset(any_kind: Harness) -> None:
    """The result also has the accepted events, and no dropped or repeated ones."""
    queue = any_kind.open()
    producer = queue.producer()
    assert producer.publish_block(block_of(numbered(0, 3))) == (0, 3, 0, 0)
    assert producer.try_publish_block(block_of(numbered(3, 5))) == (3, 2, 0, 0)
    assert any_kind.receive(queue, 5) == numbered(0, 5)


def test_every_event_has_a_timestamp(any_kind: Harness) -> None:
    """The default is now, also in a second block of the same schema."""
    receiver = Receiver(any_kind)
    producer = receiver.queue.producer()
    before = time.time_ns() // 1000
    producer.publish_block(block_of(numbered(0, 2)))
    producer.publish_block(block_of(numbered(2, 4), timestamps=[7, 8]))
    producer.publish_block(block_of(numbered(4, 6)))
    stamps: list[Any] = receiver.receive(6).column("timestamp").cast(pa.int64()).to_pylist()
    assert stamps[2:4] == [7, 8]
    assert all(before <= stamp <= time.time_ns() // 1000 for stamp in stamps[:2] + stamps[4:])


def test_a_block_larger_than_the_queue_goes_in_piece_by_piece(buffered_kind: Harness) -> None:
    """The publisher waits for room for each piece, and the order is kept."""
    queue = buffered_kind.open(size=3)
    producer, acks = make_producer_with_acks(queue)
    publishing = Task(lambda: producer.publish_block(block_of(numbered(0, 20))))
    assert buffered_kind.receive(queue, 20) == numbered(0, 20)
    published = publishing.result()
    assert (published.first, published.accepted) == (0, 20)
    acks.wait_for(20)


def test_a_block_with_more_bytes_than_the_queue_goes_in_piece_by_piece(
    buffered_kind: Harness,
) -> None:
    """The bound in bytes cuts a block like the bound in events, even if sizes vary."""
    queue = buffered_kind.open(max_bytes=1300)
    values = [b"%02d" % n * (n * n) for n in range(25)]
    producer = queue.producer()
    publishing = Task(lambda: producer.publish_block(block_of(values)))
    assert buffered_kind.receive(queue, 25) == values
    assert publishing.result().accepted == 25


def test_a_large_block_that_does_not_fit_in_time_raises_queue_full(buffered_kind: Harness) -> None:
    """The timeout is for the whole block; accepted pieces stay in the queue."""
    queue = buffered_kind.open(size=4, stalled=True)
    started = time.monotonic()
    with pytest.raises(QueueFull):
        queue.producer().publish_block(block_of(numbered(0, 20)), timeout=0.1)
    assert 0.09 <= time.monotonic() - started < 10
    inside = queue.stats().ledger.accepted
    assert 0 < inside <= 4
    buffered_kind.resume()
    assert buffered_kind.receive(queue, inside) == numbered(0, inside)


def test_queue_full_for_a_large_block_tells_how_many_events_are_in(buffered_kind: Harness) -> None:
    """``accepted`` is exact at every level; ``pending`` is true until the level is reached."""
    queue = buffered_kind.open(size=4, stalled=True)
    producer = queue.producer(ack="delivered")
    with pytest.raises(QueueFull) as full:
        producer.publish_block(block_of(numbered(0, 20)), timeout=0.1)
    inside = full.value.accepted
    assert full.value.pending
    assert inside == queue.stats().ledger.accepted > 0
    buffered_kind.resume()
    publishing = Task(lambda: producer.publish_block(block_of(numbered(inside, 20))))
    assert buffered_kind.receive(queue, 20) == numbered(0, 20)
    assert publishing.result().accepted == 20 - inside


def test_publish_of_a_large_block_returns_when_all_pieces_reach_the_level(
    buffered_kind: Harness,
) -> None:
    """Pieces do not wait for each other's acks; the publisher waits for the last one."""
    queue = buffered_kind.open(size=4)
    producer = queue.producer(ack="delivered")
    publishing = Task(lambda: producer.publish_block(block_of(numbered(0, 20))))
    assert buffered_kind.receive(queue, 19) == numbered(0, 19)
    batch = queue.get(timeout=20)
    assert_never(lambda: not publishing.running, "an early return")
    batch.done()
    assert publishing.result().accepted == 20


def test_an_event_too_large_refuses_all_pieces_of_its_block(buffered_kind: Harness) -> None:
    """A publisher that removes the event and publishes again makes no duplicates."""
    queue = buffered_kind.open(size=4, max_event_bytes=200)
    block = block_of([*numbered(0, 9), b"x" * 1000])
    with pytest.raises(EventTooLarge):
        queue.producer().publish_block(block, timeout=10)
    assert queue.stats().ledger.accepted == 0


def test_a_block_that_fits_is_not_interleaved_with_other_events(buffered_kind: Harness) -> None:
    """A block that fits into the queue enters in one step, at any place in line."""
    queue = buffered_kind.open(size=4, stalled=True)
    publish_all(queue.producer(), numbered(0, 2))
    blocks = [block_of([b"%c" % name] * 3) for name in b"abcd"]
    publishing = line_up(
        queue,
        *(lambda block=block: queue.producer().publish_block(block) for block in blocks),
    )
    buffered_kind.resume()
    expected = [*numbered(0, 2), *(value for value in (b"a", b"b", b"c", b"d") for _ in range(3))]
    assert buffered_kind.receive(queue, 14) == expected
    assert all(task.result().accepted == 3 for task in publishing)


def test_try_publish_block_is_all_or_nothing(buffered_kind: Harness) -> None:
    """Without blocking, a block goes in whole or not at all."""
    queue = buffered_kind.open(size=4, stalled=True)
    producer = queue.producer()
    publish_all(producer, numbered(0, 2))
    assert producer.try_publish_block(block_of(numbered(2, 5))) is None
    assert queue.stats().ledger.accepted == 2
    assert producer.try_publish_block(block_of(numbered(2, 4))) is not None
    assert producer.try_publish_block(block_of([b"no"])) is None
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 4) == numbered(0, 4)


def test_a_block_that_can_never_go_in_at_once_is_refused_by_try(buffered_kind: Harness) -> None:
    """Another attempt cannot succeed, so it raises EventTooLarge."""
    queue = buffered_kind.open(size=4, max_bytes=10_000)
    producer = queue.producer()
    with pytest.raises(EventTooLarge):
        producer.try_publish_block(block_of(numbered(0, 5)))
    with pytest.raises(EventTooLarge):
        producer.try_publish_block(block_of([b"x" * 9_000] * 2))


def test_a_block_with_an_event_too_large_is_refused(any_kind: Harness) -> None:
    """One event beyond ``max_event_bytes`` refuses its block, at once."""
    queue = any_kind.open(max_event_bytes=200)
    producer = queue.producer()
    large = "x" * 1000
    blocks = [
        block_of([b"x" * 10, b"x" * 1000, b"x" * 10]),
        block_of([b"x"] * 3, keys=[None, large, "k"]),
        block_of([b"x"] * 3, sources=["s", None, large]),
        block_of([b"x"] * 3, headers=[{"h": "x"}, None, {"h": "x", "i": large}]),
        block_of([b"x"] * 3, headers=[{large: "x"}, {}, None]),
    ]
    for block in [*blocks, *(block.slice(1) for block in blocks[:-1])]:
        for publish_block in (producer.publish_block, producer.try_publish_block):
            with pytest.raises(EventTooLarge):
                publish_block(block)
    assert queue.stats().ledger.accepted == 0


def test_an_empty_block_changes_nothing(any_kind: Harness) -> None:
    """Publishing no events succeeds, takes no offset, and causes no ack."""
    queue = any_kind.open()
    producer, acks = make_producer_with_acks(queue)
    for publish_block in (producer.publish_block, producer.try_publish_block):
        published = publish_block(block_of([]))
        assert published is not None
        assert (published.accepted, published.dropped, published.repeated) == (0, 0, 0)
    assert producer.publish(b"one")
    assert any_kind.receive(queue, 1) == [b"one"]
    acks.wait_for(1)
    assert queue.stats().ledger.accepted == 1


def test_extra_columns_are_kept(any_kind: Harness) -> None:
    """Additional columns keep their name and type."""
    receiver = Receiver(any_kind)
    status = pa.array([200, None], pa.int32())
    tags = pa.array([["a"], []], pa.list_(pa.string()))
    block = with_columns(numbered(0, 2), status=status, tags=tags)
    receiver.queue.producer().publish_block(block)
    received = receiver.receive(2)
    assert received.schema.names == [*BASE_SCHEMA.names, "status", "tags"]
    assert received.column("status").equals(status)
    assert received.column("tags").to_pylist() == [["a"], []]


def test_blocks_of_different_columns_follow_each_other(buffered_kind: Harness) -> None:
    """In a batch of blocks with and without a column, missing values are null."""
    receiver = Receiver(buffered_kind)
    producer = receiver.queue.producer()
    one = pa.array([1], pa.int32())
    producer.publish_block(with_columns([b"000"], one=one))
    producer.publish(b"001")
    producer.publish_block(with_columns([b"002"], other=pa.array(["x"])))
    received = receiver.receive(3)
    assert received.column("value").to_pylist() == numbered(0, 3)
    assert received.column("one").to_pylist() == [1, None, None]
    assert received.column("other").to_pylist() == [None, None, "x"]


@pytest.mark.parametrize(
    "block",
    [
        pa.record_batch({"value": ["text"]}),
        pa.record_batch({"value": [b"x"], "severity": [1]}),
        pa.record_batch({"value": [b"x"], "extra": pa.array(["x"]).dictionary_encode()}),
        pa.record_batch({"value": [b"x"], "extra": pa.nulls(1)}),
        pa.record_batch([pa.array([b"x"]), pa.array([b"y"])], names=["value", "value"]),
    ],
    ids=["value-text", "severity-int64", "dictionary", "null-type", "twice"],
)
def test_a_block_with_wrong_columns_is_refused(any_kind: Harness, block: Block) -> None:
    """The publisher gets the error, and the queue is unchanged."""
    queue = any_kind.open()
    producer = queue.producer()
    for publish_block in (producer.publish_block, producer.try_publish_block):
        with pytest.raises(SchemaMismatch):
            publish_block(block)
    producer.publish(b"one")
    assert any_kind.receive(queue, 1) == [b"one"]
    assert queue.stats().ledger.accepted == 1


@pytest.mark.parametrize("severity", [-1, 8])
def test_a_block_with_a_severity_out_of_bounds_is_refused(any_kind: Harness, severity: int) -> None:
    """The error names the severity; a later block is accepted."""
    producer = any_kind.open().producer()
    for _ in range(2):
        producer.publish_block(block_of([b"x", b"y"], severities=[7, None]))
        with pytest.raises(ValueError, match=f"severity {severity} "):
            producer.publish_block(block_of([b"x", b"y", b"z"], severities=[3, severity, None]))


def test_a_column_keeps_its_type(buffered_kind: Harness) -> None:
    """A column that the queue has seen with one type is refused with another."""
    queue = buffered_kind.open()
    producer = queue.producer()
    producer.publish_block(with_columns([b"000"], extra=pa.array([1], pa.int32())))
    with pytest.raises(SchemaMismatch, match="extra"):
        producer.publish_block(with_columns([b"no"], extra=pa.array(["x"])))
    producer.publish_block(with_columns([b"001"], extra=pa.array([2], pa.int32())))
    assert buffered_kind.receive(queue, 2) == numbered(0, 2)


def test_a_refused_block_sets_no_column_types(buffered_kind: Harness) -> None:
    """A refused block does not restrict the columns of later blocks."""
    queue = buffered_kind.open()
    producer = queue.producer()
    producer.publish_block(with_columns([b"000"], known=pa.array([1], pa.int32())))
    wrong = with_columns([b"no"], fresh=pa.array([1], pa.int32()), known=pa.array(["x"]))
    with pytest.raises(SchemaMismatch):
        producer.publish_block(wrong)
    producer.publish_block(with_columns([b"001"], fresh=pa.array(["text"])))
    assert buffered_kind.receive(queue, 2) == numbered(0, 2)


def test_a_direct_queue_accepts_changing_column_types(direct: Harness) -> None:
    """A direct queue stores nothing, so types may change."""
    queue = direct.open()
    producer = queue.producer()
    producer.publish_block(with_columns([b"000"], extra=pa.array([1], pa.int32())))
    producer.publish_block(with_columns([b"001"], extra=pa.array(["x"])))
    assert direct.receive(queue, 2) == numbered(0, 2)


def test_a_slice_of_a_block_can_be_published(any_kind: Harness) -> None:
    """Only the events of the slice are published and take room."""
    receiver = Receiver(any_kind)
    block = with_columns(numbered(0, 1000), extra=pa.array(range(1000), pa.int64()))
    receiver.queue.producer().publish_block(block.slice(500, 3))
    assert receiver.queue.stats().bytes < 1000
    received = receiver.receive(3)
    assert received.column("value").to_pylist() == numbered(500, 503)
    assert received.column("extra").to_pylist() == [500, 501, 502]


def test_null_columns_stay_null(any_kind: Harness) -> None:
    """Nulls in any column, the value included, come out as nulls; every event has a time."""
    receiver = Receiver(any_kind)
    rows: list[dict[str, Any]] = [
        {"timestamp": 0},
        {"timestamp": 0, "value": b""},
        {"timestamp": 0, "key": "k"},
    ]
    block = pa.RecordBatch.from_pylist(rows, schema=BASE_SCHEMA)
    receiver.queue.producer().publish_block(block)
    assert receiver.receive(3).to_pylist() == block.to_pylist()


def test_a_block_need_not_have_all_columns(any_kind: Harness) -> None:
    """Missing base columns are null for consumers, except the timestamp."""
    receiver = Receiver(any_kind)
    receiver.queue.producer().publish_block(pa.record_batch({"key": ["a", "b"]}))
    received = receiver.receive(2)
    assert received.column("key").to_pylist() == ["a", "b"]
    assert received.column("value").null_count == 2
    assert received.column("timestamp").null_count == 0


def test_a_later_change_of_the_buffer_does_not_change_the_published_block(
    any_kind: Harness,
) -> None:
    """The same block can be published repeatedly."""
    queue = any_kind.open()
    producer = queue.producer()
    block = block_of(numbered(0, 3))
    for _ in range(3):
        producer.publish_block(block)
    assert any_kind.receive(queue, 9) == numbered(0, 3) * 3


def test_values_of_any_bytes_pass_unchanged(any_kind: Harness) -> None:
    """Zeros, invalid text, empty and long values are plain bytes."""
    queue = any_kind.open()
    values = [b"", b"\x00", b"\xff\xfe", bytes(range(256)), b"x" * 300_000, b"\n"]
    publish_all(queue.producer(), values)
    queue.producer().publish_block(block_of(values))
    assert any_kind.receive(queue, 12) == values * 2
    wait_until(lambda: queue.stats().ledger.delivered == 12)
