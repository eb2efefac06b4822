"""Does a dead letter have everything that a person or a replay needs?"""

from __future__ import annotations

import datetime as dt

from tests.delivery.harness import deliver, get_offsets, make_block, make_settings
from turnlane.delivery.results import DEAD_LETTER_COLUMNS, make_dead_letter_block
from turnlane.errors import Never
from turnlane.events import Block
from turnlane.testing import FaultyOutput

NOW = 1_700_000_000_000_000_000


def make_letters(block: Block, *bad: int) -> Block:
    def fault(rows: Block) -> BaseException | None:
        found = set(bad).intersection(get_offsets(rows))
        return Never(f"{min(found)} is bad") if found else None

    (result,) = deliver(FaultyOutput(fault), make_settings(), [block])
    return make_dead_letter_block(result.dead, "alerts", NOW, "v7")


def test_dead_letter_has_the_event_and_the_reason() -> None:
    block = make_block(0, 100)
    dead = make_letters(block, 3, 77)
    assert get_offsets(dead) == [3, 77]
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


def test_dead_letter_that_fails_again_has_the_newer_reason() -> None:
    dead = make_letters(make_letters(make_block(0, 10), 3), 3)
    assert dead.num_rows == 1
    assert len(set(dead.schema.names)) == len(dead.schema.names)
