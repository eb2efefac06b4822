"""Whatever an output does: is every event delivered, dead or kept, and one of them only?"""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
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
from turnlane.errors import Never, PartlyDelivered, PayloadTooLarge, RetryLater, TurnlaneError
from turnlane.events import Block
from turnlane.testing import FaultyOutput

MOODS = ("fine", "later", "said", "never", "large", "unknown", "parts", "nonsense")

worlds = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "moods": st.lists(st.sampled_from(MOODS), max_size=8),
        "poison": st.sets(st.integers(0, 399), max_size=5),
        "broken": st.sets(st.integers(0, 399), max_size=3),
        "knobs": st.fixed_dictionaries(
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


class Moody:
    """A destination with moods, each of which it may be in at any send."""

    def __init__(self, world: dict[str, Any]) -> None:
        self.moods = ["fine", *world["moods"]]
        self.poison = world["poison"]
        self.broken = world["broken"]
        self._chance = random.Random(world["seed"])
        self._lock = threading.Lock()

    def prepare(self, block: Block) -> BaseException | None:
        return ValueError("broken") if self.broken.intersection(offsets_of(block)) else None

    def send(self, block: Block) -> BaseException | None:
        with self._lock:
            mood = self._chance.choice(self.moods)
            rows = [row for row in range(block.num_rows) if self._chance.random() < 0.3]
        if self.poison.intersection(offsets_of(block)):
            return Never("poison")
        errors: list[TurnlaneError] = [RetryLater("row"), Never("row"), PayloadTooLarge("row")]
        answers: dict[str, BaseException] = {
            "later": RetryLater("later"),
            "said": RetryLater("later", after=0.002),
            "never": Never("a whim"),
            "large": PayloadTooLarge("a whim"),
            "unknown": OSError("what is this?"),
            "nonsense": PartlyDelivered({block.num_rows: RetryLater("no such row")}),
        }
        if rows:
            answers["parts"] = PartlyDelivered({row: errors[row % 3] for row in rows})
        return answers.get(mood)


class Account(FaultyOutput):
    """Nonsense delivers nothing, whatever it says."""

    def _note(self, block: Block, error: BaseException | None) -> None:
        if isinstance(error, PartlyDelivered) and block.num_rows in error.failures:
            return
        super()._note(block, error)


@given(worlds)
@settings(max_examples=60)
def test_every_event_has_one_fate(world: dict[str, Any]) -> None:
    moody = Moody(world)
    output = Account(moody.send, moody.prepare)
    blocks = [block_of_offsets(first, 100) for first in range(0, 400, 100)]
    outcomes = run(output, settings_of(**world["knobs"]), blocks)
    delivered, dead, kept = check_account(output, blocks, outcomes)
    assert len(delivered) + len(dead) + len(kept) == 400
    hopeless = moody.poison | moody.broken
    assert not delivered & hopeless
    if not world["moods"] and world["knobs"]["max_time"] > 1 and not kept:
        assert dead == hopeless
        assert sorted(taken(output)) == sorted(delivered)


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("ordering", ["none", "key", "strict"])
def test_a_good_destination_gets_everything_once(pipelined: bool, ordering: str) -> None:
    output = FaultyOutput()
    blocks = [block_of_offsets(first, 2500) for first in range(0, 10_000, 2500)]
    outcomes = run(output, settings_of(pipelined=pipelined, ordering=ordering), blocks)
    assert sum(outcome.delivered for outcome in outcomes) == 10_000
    assert sorted(taken(output)) == list(range(10_000))


def test_blocks_without_events_have_outcomes_too() -> None:
    empty = block_of_offsets(0, 0)
    outcomes = run(FaultyOutput(), settings_of(), [empty, block_of_offsets(0, 3), empty])
    assert [outcome.delivered for outcome in outcomes] == [0, 3, 0]
    assert run(FaultyOutput(), settings_of(), []) == []
