"""Do events that have an order keep it, whatever fails?"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.delivery.harness import (
    block_of_offsets,
    check_account,
    offsets_of,
    run,
    settings_of,
    taken,
)
from turnlane.errors import Never, PartlyDelivered, RetryLater, TurnlaneError
from turnlane.events import Block
from turnlane.testing import FaultyOutput

Make = Callable[[int, float, set[int]], FaultyOutput]

KEYS = 7
BLOCKS = [block_of_offsets(first, 150, KEYS) for first in range(0, 450, 150)]


def moody(seed: int, share: float, poison: set[int]) -> FaultyOutput:
    chance = random.Random(seed)
    lock = threading.Lock()

    def fault(block: Block) -> BaseException | None:
        if poison.intersection(offsets_of(block)):
            return Never("poison")
        with lock:
            return RetryLater("busy") if chance.random() < share else None

    return FaultyOutput(fault)


def picky(seed: int, share: float, poison: set[int]) -> FaultyOutput:
    """Takes some events of a send, and wants others later."""
    chance = random.Random(seed)
    lock = threading.Lock()

    def fault(block: Block) -> BaseException | None:
        failures: dict[int, TurnlaneError] = {}
        for row, offset in enumerate(offsets_of(block)):
            with lock:
                later = chance.random() < share
            if offset in poison:
                failures[row] = Never("poison")
            elif later:
                failures[row] = RetryLater("busy")
        return PartlyDelivered(failures) if failures else None

    return FaultyOutput(fault)


moods = (st.integers(0, 2**32), st.floats(0, 0.5), st.sets(st.integers(0, 449), max_size=3))


made = st.sampled_from([moody, picky])


@given(made, *moods)
@settings(max_examples=40)
def test_strict(make: Make, seed: int, share: float, poison: set[int]) -> None:
    output = make(seed, share, poison)
    delivery = settings_of(ordering="strict", batch_events=20, breaker_failures=3)
    outcomes = run(output, delivery, BLOCKS, takes_apart=make is picky)
    delivered, dead, kept = check_account(output, BLOCKS, outcomes)
    assert output.most_in_flight <= 1
    assert taken(output) == sorted(delivered), "in order, and each once"
    if kept:
        assert max(delivered | dead, default=-1) < min(kept), "nothing passes what is kept"


@given(made, *moods)
@settings(max_examples=40)
def test_by_key(make: Make, seed: int, share: float, poison: set[int]) -> None:
    output = make(seed, share, poison)
    delivery = settings_of(ordering="key", batch_events=5, concurrency=4, breaker_failures=3)
    outcomes = run(output, delivery, BLOCKS, takes_apart=make is picky)
    delivered, _, kept = check_account(output, BLOCKS, outcomes)
    by_key: dict[int, list[int]] = defaultdict(list)
    for offset in taken(output):
        by_key[offset % KEYS].append(offset)
    for key, offsets in by_key.items():
        assert offsets == sorted(set(offsets)), "in order, and each once"
        waiting = [offset for offset in kept if offset % KEYS == key]
        arrived = [offset for offset in delivered if offset % KEYS == key]
        assert not waiting or max(arrived, default=-1) < min(waiting)


def test_a_key_that_has_to_wait_does_not_stop_the_others() -> None:
    def fault(block: Block) -> BaseException | None:
        locked = [row for row, key in enumerate(block.column("key").to_pylist()) if key == "k3"]
        if not locked:
            return None
        return PartlyDelivered({row: RetryLater("locked", alone=True) for row in locked})

    output = FaultyOutput(fault)
    delivery = settings_of(
        ordering="key", batch_events=20, concurrency=2, backoff="30s", max_backoff="30s"
    )
    outcomes = run(output, delivery, BLOCKS)
    delivered, _, kept = check_account(output, BLOCKS, outcomes)
    assert kept == {offset for offset in range(450) if offset % KEYS == 3}
    assert len(delivered) == 450 - len(kept)


def test_events_of_different_keys_go_together_where_they_may_be_taken_apart() -> None:
    output = FaultyOutput()
    delivery = settings_of(ordering="key", concurrency=2)
    (outcome,) = run(output, delivery, [block_of_offsets(0, 700, 70)], takes_apart=True)
    assert outcome.delivered == 700
    assert len(output.taken) == 2 * 10, "each key's first events, then its second ones, and so on"


def test_events_without_a_key_wait_for_nobody() -> None:
    offsets = np.arange(100, dtype=np.int64)
    block = pa.RecordBatch.from_pydict(
        {"key": pa.nulls(100, pa.string()), "offset": pa.array(offsets)}
    )
    output = FaultyOutput()
    (outcome,) = run(output, settings_of(ordering="key", concurrency=4), [block])
    assert outcome.delivered == 100
    assert len(output.taken) == 4, "spread over all tracks"
    (outcome,) = run(output, settings_of(ordering="key"), [block.select(["offset"])])
    assert outcome.delivered == 100
