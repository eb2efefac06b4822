"""Does a dead letter have all that a person, or a replay, needs?"""

from __future__ import annotations

import datetime as dt

from tests.delivery.harness import block_of_offsets, offsets_of, run, settings_of
from turnlane.delivery.results import DEAD_LETTER_COLUMNS, make_dead_letter_block
from turnlane.errors import Never
from turnlane.events import Block
from turnlane.testing import FaultyOutput

NOW = 1_700_000_000_000_000_000


def letters(block: Block, *bad: int) -> Block:
    def fault(rows: Block) -> BaseException | None:
        found = set(bad).intersection(offsets_of(rows))
        return Never(f"{min(found)} is bad") if found else None

    (outcome,) = run(FaultyOutput(fault), settings_of(), [block])
    return make_dead_letter_block(outcome.dead, "alerts", NOW, "v7")


def test_it_is_the_event_and_why() -> None:
    block = block_of_offsets(0, 100)
    dead = letters(block, 3, 77)
    assert offsets_of(dead) == [3, 77]
    assert dead.select(block.schema.names).equals(block.take([3, 77]))
    rows = dead.select(DEAD_LETTER_COLUMNS.names).to_pylist()
    assert [row["dead_error"] for row in rows] == ["3 is bad", "77 is bad"]
    assert all(row.pop("dead_attempts") >= 1 and row.pop("dead_error") for row in rows)
    when = dt.datetime.fromtimestamp(NOW / 1e9, tz=dt.UTC)
    assert (
        rows
        == [
            {
                "dead_action": "alerts",
                "dead_reason": "Never",
                "dead_time": when,
                "dead_config": "v7",
            }
        ]
        * 2
    )


def test_one_that_dies_again_has_the_newer_reason() -> None:
    dead = letters(letters(block_of_offsets(0, 10), 3), 3)
    assert dead.num_rows == 1
    assert len(set(dead.schema.names)) == len(dead.schema.names)
