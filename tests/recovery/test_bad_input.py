"""Bad input or an interrupted publish affects only its own publisher."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.contract.harness import PATIENCE, Task, line_up, numbered, wait_until
from tests.queue_internals import state_of, store_of
from tests.recovery.hooked_disk import Opener, Stored, drain_queue, take
from turnlane.errors import ConfigError, SchemaMismatch
from turnlane.events import Block
from turnlane.queues.buffer import OpenBlock
from turnlane.queues.buffered import BufferedQueue

both_kinds = pytest.mark.parametrize("kind", ["disk", "disk_assisted"])
keeping_kinds = pytest.mark.parametrize("kind", ["memory", "disk", "disk_assisted"])


def get_knobs(kind: str, path: Path) -> dict[str, Any]:
    """The knobs of a queue of this kind."""
    return {"kind": kind} if kind == "memory" else {"kind": kind, "path": path}


# Blocks


def build_nested_block(tags: pa.DataType) -> Block:
    """A block with a column of lists."""
    column = pa.array([["x"]]).cast(pa.list_(tags))
    return pa.record_batch({"value": pa.array([b"bad"]), "tags": column})


def build_keyed_block(kind: pa.DataType) -> Block:
    """A block with a column of structures of lists."""
    inner = pa.array([["x"]]).cast(pa.list_(kind))
    column = pa.StructArray.from_arrays([inner], names=["deep"])
    return pa.record_batch({"value": pa.array([b"bad"]), "struct": column})


@both_kinds
@pytest.mark.parametrize("make", [build_nested_block, build_keyed_block])
def test_nested_dictionary_column_is_refused_at_publish(
    opener: Opener, tmp_path: Path, kind: str, make: Any
) -> None:
    """The publisher gets the error; other publishers are not affected."""
    queue = opener.stored(kind, tmp_path)
    producer = queue.producer()
    assert producer.publish(b"before")
    with pytest.raises(SchemaMismatch):
        queue.producer().publish_block(make(pa.dictionary(pa.int8(), pa.string())))
    with pytest.raises(SchemaMismatch):
        queue.producer().try_publish_block(make(pa.dictionary(pa.int8(), pa.string())))
    assert producer.publish(b"after")
    assert queue.producer().publish_block(make(pa.string())).accepted == 1
    queue.close()
    assert drain_queue(opener.stored(kind, tmp_path)) == [b"before", b"after", b"bad"]


def build_nullable_block(values: list[bytes], *, nullable: bool, extra: bool) -> Block:
    """Return a block whose columns are all nullable, or all not."""
    columns: dict[str, pa.Array[Any]] = {"value": pa.array(values)}
    if extra:
        columns["n"] = pa.array(range(len(values)))
    fields = [pa.field(name, column.type, nullable=nullable) for name, column in columns.items()]
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))


def is_written(queue: Stored, offset: int) -> bool:
    """Whether the writer has written up to this offset."""
    return store_of(queue).log.end >= offset


@both_kinds
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_columns_with_and_without_nulls_can_be_mixed(
    opener: Opener, tmp_path: Path, kind: str, extra: bool, together: bool
) -> None:
    """Nullability is not part of a column's type, within a frame and across frames."""
    knobs: dict[str, Any] = {"sync_interval": "10ms"}
    if kind == "disk_assisted":
        knobs |= {"size": 100, "high_watermark": 2, "low_watermark": 1}
    queue = opener.stored(kind, tmp_path, **knobs)
    assert queue.producer().publish(b"innocent")
    published = [b"innocent"]
    for number, nullable in enumerate([True, False, False, True]):
        values = numbered(number * 10, number * 10 + 10)
        block = build_nullable_block(values, nullable=nullable, extra=extra)
        first = queue.producer().publish_block(block).first
        published += values
        if not together:
            wait_until(partial(is_written, queue, first), "the writer")
    queue.close()
    assert drain_queue(opener.stored(kind, tmp_path)) == published


# Single events

bad_values = pytest.mark.parametrize(
    "bad",
    [
        {"severity": True},
        {"severity": 3.5},
        {"severity": "3"},
        {"severity": 128},
        {"severity": -1},
        {"timestamp": "now"},
        {"timestamp": 1 << 63},
    ],
    ids=lambda bad: "-".join(f"{name}={value}" for name, value in bad.items()),
)


@keeping_kinds
@bad_values
def test_bad_annotation_is_refused_at_publish(
    opener: Opener, tmp_path: Path, kind: str, bad: dict[str, Any]
) -> None:
    """The publisher gets the error; the events of other publishers are kept."""
    queue = opener(**get_knobs(kind, tmp_path))
    innocent = queue.producer()
    for value in numbered(0, 10):
        innocent.publish(value, severity=3)
    for publish in (queue.producer().publish, queue.producer().try_publish):
        with pytest.raises((TypeError, ValueError)):
            publish(b"bad", **bad)
    for value in numbered(10, 20):
        innocent.publish(value, severity=3)
    if kind != "memory":
        queue.close()
        queue = opener(**get_knobs(kind, tmp_path))
    assert drain_queue(queue) == numbered(0, 20)


# An interrupted publish


class Interruption:
    """Makes ``OpenBlock.annotate`` end in Ctrl-C, once, before or after it does its work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, late: bool) -> None:
        self._annotate = OpenBlock.annotate
        self._late = late
        self.due = False
        interruption = self

        def annotate(block: OpenBlock, *given: Any) -> None:
            interruption.annotate(block, *given)

        monkeypatch.setattr(OpenBlock, "annotate", annotate)

    def annotate(self, block: OpenBlock, *given: Any) -> None:
        if self.due and not self._late:
            self.due = False
            raise KeyboardInterrupt
        self._annotate(block, *given)
        if self.due:
            self.due = False
            raise KeyboardInterrupt


@pytest.fixture(params=[False, True], ids=["early", "late"])
def interruption(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Interruption:
    return Interruption(monkeypatch, late=request.param)


def check_consistent(queue: BufferedQueue) -> None:
    """The counters agree with the contents."""
    with state_of(queue).lock:
        assert state_of(queue).positions.end == state_of(queue).buffer.open.end
        assert len(state_of(queue).buffer.open.values) == len(
            state_of(queue).buffer.open.timestamps
        )
    ledger = queue.stats().ledger
    assert ledger.adds_up
    assert queue.stats().size == ledger.pending


def check_order(queue: BufferedQueue, before: list[bytes], after: list[bytes]) -> None:
    """Every event comes with its own key; only the interrupted one may be missing."""
    events: list[tuple[bytes | None, str | None]] = []
    queue.finish()
    while queue.stats().ledger.pending:
        with queue.get(timeout=PATIENCE) as batch:
            events += [(event.value, event.key) for event in batch]
    values = [value for value, _ in events]
    assert values in ([*before, *after], [*before, b"interrupted", *after])
    assert all(value is not None and key == value.decode() for value, key in events)
    stats = queue.stats()
    assert (stats.size, stats.bytes) == (0, 0)


def publish_keyed(queue: BufferedQueue, values: list[bytes]) -> None:
    """Publish events whose keys contain their values."""
    producer = queue.producer()
    for value in values:
        assert producer.publish(value, key=value.decode())


@keeping_kinds
@pytest.mark.parametrize("verb", ["publish", "try_publish"])
def test_interrupted_publish_leaves_the_queue_consistent(
    opener: Opener, tmp_path: Path, interruption: Interruption, kind: str, verb: str
) -> None:
    """Ctrl-C during a publish shifts no offset: every later event is delivered."""
    queue = opener(**get_knobs(kind, tmp_path))
    publish_keyed(queue, numbered(0, 3))
    interruption.due = True
    with pytest.raises(KeyboardInterrupt):
        getattr(queue.producer(), verb)(b"interrupted", key="interrupted")
    assert not interruption.due
    if kind != "disk":  # its writer may seal the open block at any moment
        check_consistent(queue)
    publish_keyed(queue, numbered(3, 6))
    check_consistent(queue)
    check_order(queue, numbered(0, 3), numbered(3, 6))


@both_kinds
def test_events_after_an_interrupted_publish_are_persisted(
    opener: Opener, tmp_path: Path, interruption: Interruption, kind: str
) -> None:
    """Events acked after a Ctrl-C come once after a restart."""
    queue = opener(**get_knobs(kind, tmp_path))
    publish_keyed(queue, numbered(0, 3))
    interruption.due = True
    with pytest.raises(KeyboardInterrupt):
        queue.producer().publish(b"interrupted", key="interrupted")
    publish_keyed(queue, numbered(3, 6))
    if kind == "disk":
        assert Task(lambda: queue.producer(ack="persisted").publish(b"006", key="006")).result()
    else:
        publish_keyed(queue, [b"006"])
    queue.close()
    check_order(opener(**get_knobs(kind, tmp_path)), numbered(0, 3), numbered(3, 7))


def test_interrupted_consumer_that_admits_a_publisher_loses_nothing(
    opener: Opener, interruption: Interruption
) -> None:
    """The consumer that makes room admits the next publisher; Ctrl-C there harms neither."""
    queue = opener("memory", size=2)
    publish_keyed(queue, numbered(0, 2))
    producer = queue.producer()
    [first, second] = line_up(
        queue,
        lambda: producer.publish(b"interrupted", key="interrupted"),
        lambda: producer.publish(b"002", key="002"),
    )
    batch = queue.get(1)
    interruption.due = True
    with pytest.raises(KeyboardInterrupt):
        batch.done()
    check_consistent(queue)
    assert take(queue, 1) == [b"001"]
    values = take(queue, 1)
    if values == [b"interrupted"]:
        values = take(queue, 1)
    assert values == [b"002"]
    assert second.result()
    assert first.result()


# Settings


def test_disk_queue_without_memory_is_refused(opener: Opener, tmp_path: Path) -> None:
    """Without memory no event could be published."""
    with pytest.raises(ConfigError, match="memory_bytes"):
        opener.stored("disk", tmp_path, memory_bytes=0)


def test_disk_queue_with_little_memory_is_slow_but_works(opener: Opener, tmp_path: Path) -> None:
    """Even with very little memory all events are delivered."""
    queue = opener.stored("disk", tmp_path, memory_bytes=1, full_timeout="5s")
    producer = queue.producer(ack="persisted")
    for value in numbered(0, 5):
        assert producer.publish(value)
    assert take(queue, 5) == numbered(0, 5)
