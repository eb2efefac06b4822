"""Is every event delivered, dead or deferred, and in one of these states only?"""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
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
from turnlane.errors import Never, PartlyDelivered, PayloadTooLarge, RetryLater, TurnlaneError
from turnlane.events import Block
from turnlane.testing import FaultyOutput

FAILURES = ("none", "later", "wait", "never", "large", "unknown", "partly", "malformed")

scenarios = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "failures": st.lists(st.sampled_from(FAILURES), max_size=8),
        "bad": st.sets(st.integers(0, 399), max_size=5),
        "unpreparable": st.sets(st.integers(0, 399), max_size=3),
        "settings": st.fixed_dictionaries(
            {
                "batch_events": st.sampled_from([1, 7, 100, 1000]),
                "concurrency": st.sampled_from(["adaptive", 1, 4]),
                "ordering": st.sampled_from(["none", "key", "strict"]),
                "pipelined": st.booleans(),
                "max_attempts": st.integers(1, 4),
                "breaker_failures": st.sampled_from([1, 3, 100]),
                "max_time": st.sampled_from([0.05, 60.0]),
            }
        ),
    }
)


class RandomFailures:
    """A destination that fails each send in a way chosen at random."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        self.choices = ["none", *scenario["failures"]]
        self.bad = scenario["bad"]
        self.unpreparable = scenario["unpreparable"]
        self._chance = random.Random(scenario["seed"])
        self._lock = threading.Lock()

    def prepare(self, block: Block) -> BaseException | None:
        return (
            ValueError("cannot be prepared")
            if self.unpreparable.intersection(get_offsets(block))
            else None
        )

    def send(self, block: Block) -> BaseException | None:
        with self._lock:
            failure = self._chance.choice(self.choices)
            rows = [row for row in range(block.num_rows) if self._chance.random() < 0.3]
        if self.bad.intersection(get_offsets(block)):
            return Never("bad event")
        errors: list[TurnlaneError] = [RetryLater("row"), Never("row"), PayloadTooLarge("row")]
        answers: dict[str, BaseException] = {
            "later": RetryLater("later"),
            "wait": RetryLater("later", after=0.002),
            "never": Never("refused"),
            "large": PayloadTooLarge("too large"),
            "unknown": OSError("unknown"),
            "malformed": PartlyDelivered({block.num_rows: RetryLater("no such row")}),
        }
        if rows:
            answers["partly"] = PartlyDelivered({row: errors[row % 3] for row in rows})
        return answers.get(failure)


class CheckedOutput(FaultyOutput):
    """An output that delivers nothing when it reports rows that it was not given."""

    def _record(self, block: Block, error: BaseException | None) -> None:
        if isinstance(error, PartlyDelivered) and block.num_rows in error.failures:
            return
        super()._record(block, error)


@given(scenarios)
@settings(max_examples=60)
def test_any_mix_of_failures_leaves_every_event_in_one_state(scenario: dict[str, Any]) -> None:
    failures = RandomFailures(scenario)
    output = CheckedOutput(failures.send, failures.prepare)
    blocks = [make_block(first, 100) for first in range(0, 400, 100)]
    results = deliver(output, make_settings(**scenario["settings"]), blocks)
    delivered, dead, deferred = check_account(output, blocks, results)
    assert len(delivered) + len(dead) + len(deferred) == 400
    undeliverable = failures.bad | failures.unpreparable
    assert not delivered & undeliverable
    if not scenario["failures"] and scenario["settings"]["max_time"] > 1 and not deferred:
        assert dead == undeliverable
        assert sorted(get_delivered_offsets(output)) == sorted(delivered)


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("ordering", ["none", "key", "strict"])
def test_destination_without_failures_gets_every_event_once(pipelined: bool, ordering: str) -> None:
    output = FaultyOutput()
    blocks = [make_block(first, 2500) for first in range(0, 10_000, 2500)]
    results = deliver(output, make_settings(pipelined=pipelined, ordering=ordering), blocks)
    assert sum(result.delivered for result in results) == 10_000
    assert sorted(get_delivered_offsets(output)) == list(range(10_000))


def test_blocks_without_events_have_results() -> None:
    empty = make_block(0, 0)
    results = deliver(FaultyOutput(), make_settings(), [empty, make_block(0, 3), empty])
    assert [result.delivered for result in results] == [0, 3, 0]
    assert deliver(FaultyOutput(), make_settings(), []) == []
