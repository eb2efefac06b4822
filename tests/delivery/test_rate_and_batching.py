"""Are the rate limit and the limits of a batch kept?"""

from __future__ import annotations

import threading
import time

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tests.delivery.harness import deliver, make_block, make_settings
from turnlane.delivery.batching import estimate_payload_sizes, split_by_size
from turnlane.delivery.destination import LocalDestinationState
from turnlane.events import Block, block_of
from turnlane.testing import FaultyOutput


def test_concurrent_tasks_share_the_rate_limit_of_an_action() -> None:
    """Two concurrent tasks and one after them never send more than the rate allows."""
    settings = make_settings(rate_limit=400, batch_events=50, max_time=1.0)
    state = LocalDestinationState(settings)
    started = time.monotonic()
    sent: list[tuple[float, int]] = []

    def record(block: Block) -> None:
        sent.append((time.monotonic() - started, block.num_rows))

    output = FaultyOutput(record)
    tasks = [
        threading.Thread(target=deliver, args=(output, settings, [make_block(at, 250)], state))
        for at in (0, 250)
    ]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    deliver(output, settings, [make_block(500, 250)], state)
    total = 0
    for moment, count in sorted(sent):
        total += count
        assert total <= 400 * moment + 1, (moment, total)
    assert total >= 100, "the rate is used"


@given(st.lists(st.integers(0, 50), max_size=200), st.integers(1, 30), st.integers(1, 200))
def test_batches_keep_within_both_limits_and_contain_every_row(
    sizes: list[int], most_events: int, most_bytes: int
) -> None:
    found = split_by_size(np.array(sizes, dtype=np.int64), most_events, most_bytes)
    assert [row for batch in found for row in batch] == list(range(len(sizes)))
    for batch in found:
        assert 1 <= len(batch) <= most_events
        assert len(batch) == 1 or sum(sizes[row] for row in batch) <= most_bytes


def test_event_sizes_come_from_the_payload_or_the_value() -> None:
    block = block_of([b"four", b"", b"three"])
    assert estimate_payload_sizes(block).tolist() == [4, 0, 5]
    block = block.append_column("payload", pa.array([b"1", None, b"333"]))
    assert estimate_payload_sizes(block).tolist() == [1, 0, 3]
    assert estimate_payload_sizes(block.slice(2)).tolist() == [3]
    assert len(estimate_payload_sizes(block.select(["severity"]))) == 3
