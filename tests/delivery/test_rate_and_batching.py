"""Are rates, and the bounds of a batch, kept?"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from turnlane.delivery.batching import batches, event_sizes
from turnlane.delivery.rate import Bucket
from turnlane.events import block_of


@given(
    st.floats(0.5, 10_000),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1)), max_size=60),
)
def test_never_more_than_the_rate_and_a_second_in_hand(
    rate: float, wishes: list[tuple[float, float]]
) -> None:
    bucket = Bucket(rate, 0.0)
    now, taken = 0.0, 0
    for pause, share in wishes:
        now += pause
        count = max(1, int(bucket.size * share))
        now += bucket.wait(count, now) * (1 + 1e-9) + 1e-9
        assert bucket.wait(count, now) < 1e-6
        bucket.take(count, now)
        taken += count
        assert taken <= rate * now * (1 + 1e-6) + 1e-3


def test_an_idle_time_gives_one_second_at_most() -> None:
    bucket = Bucket(100.0, 0.0)
    assert bucket.wait(100, 3600.0) == 0
    bucket.take(100, 3600.0)
    assert bucket.wait(100, 3600.0) == 1.0


@given(st.lists(st.integers(0, 50), max_size=200), st.integers(1, 30), st.integers(1, 200))
def test_batches_keep_both_bounds_and_lose_nothing(
    sizes: list[int], most_events: int, most_bytes: int
) -> None:
    found = batches(np.array(sizes, dtype=np.int64), most_events, most_bytes)
    assert [row for batch in found for row in batch] == list(range(len(sizes)))
    for batch in found:
        assert 1 <= len(batch) <= most_events
        assert len(batch) == 1 or sum(sizes[row] for row in batch) <= most_bytes


def test_sizes_are_those_of_the_payload_or_the_value() -> None:
    block = block_of([b"four", b"", b"three"])
    assert event_sizes(block).tolist() == [4, 0, 5]
    block = block.append_column("payload", pa.array([b"1", None, b"333"]))
    assert event_sizes(block).tolist() == [1, 0, 3]
    assert event_sizes(block.slice(2)).tolist() == [3]
    assert len(event_sizes(block.select(["severity"]))) == 3
