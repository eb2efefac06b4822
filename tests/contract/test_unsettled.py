"""The unsettled ranges that a queue returns to a reader."""

from __future__ import annotations

from tests.contract.harness import DiskHarness, Harness, numbered
from turnlane.events import block_of
from turnlane.intervals import count_offsets, take_newest, take_oldest
from turnlane.queues.buffered import MAX_SPANS, BufferedQueue


def opened(harness: Harness, count: int) -> BufferedQueue:
    queue = harness.open()
    assert isinstance(queue, BufferedQueue)
    queue.producer().publish_block(block_of(numbered(0, count)))
    return queue


def test_a_short_backlog_is_returned_in_full(keeping: Harness) -> None:
    queue = opened(keeping, 10)
    assert queue.find_unsettled(10) == ([(0, 10)], 10, 10)
    assert queue.find_unsettled(10, newest=3) == ([(0, 10)], 10, 10)


def test_settled_events_are_left_out(keeping: Harness) -> None:
    queue = opened(keeping, 10)
    queue.settle(0, 2)
    queue.settle(4, 5)
    assert queue.find_unsettled(100) == ([(2, 4), (5, 10)], 7, 10)
    assert queue.find_unsettled(3).spans == [(2, 4), (5, 6)]
    queue.settle(2, 10)
    assert queue.find_unsettled(100) == ([], 0, 10)


def test_a_long_backlog_includes_the_newest_events(keeping: Harness) -> None:
    queue = opened(keeping, 100)
    queue.settle(95, 98)
    assert queue.find_unsettled(20, newest=5).spans == [(0, 15), (92, 95), (98, 100)]


def test_settled_events_stay_settled_after_a_restart(disk_kind: DiskHarness) -> None:
    queue = opened(disk_kind, 10)
    queue.settle(4, 6)
    queue.close()
    again = disk_kind.reopen()
    assert isinstance(again, BufferedQueue)
    assert again.find_unsettled(100).spans == [(0, 4), (6, 10)]


def test_scattered_offsets_are_returned_in_parts(keeping: Harness) -> None:
    queue = opened(keeping, 2 * MAX_SPANS + 20)
    for offset in range(0, queue.end, 2):
        queue.settle(offset, offset + 1)
    found = queue.find_unsettled(1_000_000)
    assert len(found.spans) == MAX_SPANS
    assert found.spans[0] == (1, 2)
    assert found.pending == MAX_SPANS + 10
    some = queue.find_unsettled(MAX_SPANS, newest=10)
    assert count_offsets(some.spans) == MAX_SPANS
    assert some.spans[-1][1] == found.end


def test_spans_are_cut_from_either_side() -> None:
    spans = [(0, 4), (6, 7), (10, 20)]
    assert take_oldest(spans, 5) == [(0, 4), (6, 7)]
    assert take_oldest(spans, 6) == [(0, 4), (6, 7), (10, 11)]
    assert take_newest(spans, 3) == [(17, 20)]
    assert take_newest(spans, 12) == [(3, 4), (6, 7), (10, 20)]
    assert take_oldest(spans, 0) == take_newest(spans, 0) == []
