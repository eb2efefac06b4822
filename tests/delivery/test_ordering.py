"""Do ordered events keep their order while sends fail?"""

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
    check_account,
    deliver,
    get_delivered_offsets,
    get_offsets,
    make_block,
    make_settings,
)
from turnlane.errors import Never, PartlyDelivered, RetryLater, TurnlaneError
from turnlane.events import Block
from turnlane.testing import FaultyOutput

OutputMaker = Callable[[int, float, set[int]], FaultyOutput]

KEYS = 7
BLOCKS = [make_block(first, 150, KEYS) for first in range(0, 450, 150)]


def make_failing_output(seed: int, share: float, bad: set[int]) -> FaultyOutput:
    chance = random.Random(seed)
    lock = threading.Lock()

    def fault(block: Block) -> BaseException | None:
        if bad.intersection(get_offsets(block)):
            return Never("bad event")
        with lock:
            return RetryLater("busy") if chance.random() < share else None

    return FaultyOutput(fault)


def make_partial_output(seed: int, share: float, bad: set[int]) -> FaultyOutput:
    """Return an output that takes some events of a send and wants others later."""
    chance = random.Random(seed)
    lock = threading.Lock()

    def fault(block: Block) -> BaseException | None:
        failures: dict[int, TurnlaneError] = {}
        for row, offset in enumerate(get_offsets(block)):
            with lock:
                later = chance.random() < share
            if offset in bad:
                failures[row] = Never("bad event")
            elif later:
                failures[row] = RetryLater("busy")
        return PartlyDelivered(failures) if failures else None

    return FaultyOutput(fault)


failure_plans = (st.integers(0, 2**32), st.floats(0, 0.5), st.sets(st.integers(0, 449), max_size=3))


output_makers = st.sampled_from([make_failing_output, make_partial_output])


@given(output_makers, *failure_plans)
@settings(max_examples=40)
def test_strict_ordering_delivers_all_events_in_order(
    make: OutputMaker, seed: int, share: float, bad: set[int]
) -> None:
    output = make(seed, share, bad)
    delivery = make_settings(ordering="strict", batch_events=20, breaker_failures=3)
    results = deliver(output, delivery, BLOCKS, can_deliver_partly=make is make_partial_output)
    delivered, dead, deferred = check_account(output, BLOCKS, results)
    assert output.most_in_flight <= 1
    assert get_delivered_offsets(output) == sorted(delivered), "in order, each once"
    if deferred:
        assert max(delivered | dead, default=-1) < min(deferred), (
            "no event overtakes a deferred one"
        )


@given(output_makers, *failure_plans)
@settings(max_examples=40)
def test_key_ordering_delivers_events_of_each_key_in_order(
    make: OutputMaker, seed: int, share: float, bad: set[int]
) -> None:
    output = make(seed, share, bad)
    delivery = make_settings(ordering="key", batch_events=5, concurrency=4, breaker_failures=3)
    results = deliver(output, delivery, BLOCKS, can_deliver_partly=make is make_partial_output)
    delivered, _, deferred = check_account(output, BLOCKS, results)
    by_key: dict[int, list[int]] = defaultdict(list)
    for offset in get_delivered_offsets(output):
        by_key[offset % KEYS].append(offset)
    for key, offsets in by_key.items():
        assert offsets == sorted(set(offsets)), "in order, each once"
        waiting = [offset for offset in deferred if offset % KEYS == key]
        arrived = [offset for offset in delivered if offset % KEYS == key]
        assert not waiting or max(arrived, default=-1) < min(waiting)


def test_deferred_key_does_not_hold_up_other_keys() -> None:
    def fault(block: Block) -> BaseException | None:
        locked = [row for row, key in enumerate(block.column("key").to_pylist()) if key == "k3"]
        if not locked:
            return None
        return PartlyDelivered({row: RetryLater("locked", alone=True) for row in locked})

    output = FaultyOutput(fault)
    delivery = make_settings(
        ordering="key", batch_events=20, concurrency=2, backoff="30s", max_backoff="30s"
    )
    results = deliver(output, delivery, BLOCKS)
    delivered, _, deferred = check_account(output, BLOCKS, results)
    assert deferred == {offset for offset in range(450) if offset % KEYS == 3}
    assert len(delivered) == 450 - len(deferred)


def test_batches_of_an_output_that_delivers_partly_have_one_event_per_key() -> None:
    output = FaultyOutput()
    delivery = make_settings(ordering="key", concurrency=2)
    (result,) = deliver(output, delivery, [make_block(0, 700, 70)], can_deliver_partly=True)
    assert result.delivered == 700
    assert len(output.taken) == 2 * 10, (
        "the first events of all keys together, then the second ones, and so on"
    )


def test_events_without_a_key_are_not_ordered() -> None:
    offsets = np.arange(100, dtype=np.int64)
    block = pa.RecordBatch.from_pydict(
        {"key": pa.nulls(100, pa.string()), "offset": pa.array(offsets)}
    )
    output = FaultyOutput()
    (result,) = deliver(output, make_settings(ordering="key", concurrency=4), [block])
    assert result.delivered == 100
    assert len(output.taken) == 4, "spread over all lanes"
    (result,) = deliver(output, make_settings(ordering="key"), [block.select(["offset"])])
    assert result.delivered == 100
