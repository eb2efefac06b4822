"""Are rates, and the bounds of a batch, kept?"""

from __future__ import annotations

import threading
import time

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tests.delivery.harness import block_of_offsets, run, settings_of
from turnlane.delivery.batching import get_event_sizes, split_by_size
from turnlane.delivery.destination import LocalDestinationState
from turnlane.events import Block, block_of
from turnlane.testing import FaultyOutput


def test_tasks_of_an_action_share_its_rate() -> None:
    """Two tasks at a time, and others after them: never more than the rate allows."""
    settings = settings_of(rate_limit=400, batch_events=50, max_time=1.0)
    gate = LocalDestinationState(settings)
    began = time.monotonic()
    sent: list[tuple[float, int]] = []

    def noted(block: Block) -> None:
        sent.append((time.monotonic() - began, block.num_rows))

    output = FaultyOutput(noted)
    tasks = [
        threading.Thread(target=run, args=(output, settings, [block_of_offsets(at, 250)], gate))
        for at in (0, 250)
    ]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    run(output, settings, [block_of_offsets(500, 250)], gate)
    total = 0
    for moment, count in sorted(sent):
        total += count
        assert total <= 400 * moment + 1, (moment, total)
    assert total >= 100, "and it is used"


@given(st.lists(st.integers(0, 50), max_size=200), st.integers(1, 30), st.integers(1, 200))
def test_batches_keep_both_bounds_and_lose_nothing(
    sizes: list[int], most_events: int, most_bytes: int
) -> None:
    found = split_by_size(np.array(sizes, dtype=np.int64), most_events, most_bytes)
    assert [row for batch in found for row in batch] == list(range(len(sizes)))
    for batch in found:
        assert 1 <= len(batch) <= most_events
        assert len(batch) == 1 or sum(sizes[row] for row in batch) <= most_bytes


def test_sizes_are_those_of_the_payload_or_the_value() -> None:
    block = block_of([b"four", b"", b"three"])
    assert get_event_sizes(block).tolist() == [4, 0, 5]
    block = block.append_column("payload", pa.array([b"1", None, b"333"]))
    assert get_event_sizes(block).tolist() == [1, 0, 3]
    assert get_event_sizes(block.slice(2)).tolist() == [3]
    assert len(get_event_sizes(block.select(["severity"]))) == 3
