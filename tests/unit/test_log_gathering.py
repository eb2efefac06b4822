"""Are gathered blocks, once they are a message, what joined ones would be?"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from turnlane.events import Block, block_of, join
from turnlane.queues.log import gathering
from turnlane.queues.log.columns import EMPTY, Fitting
from turnlane.queues.log.gathering import Gatherer
from turnlane.queues.log.messages import Messages

ROWS = 50


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks are gathered too."""
    monkeypatch.setattr(gathering, "LEAST_BYTES", 1)


def blocks(count: int = 3, **columns: object) -> list[Block]:
    """Blocks with values of many lengths, some of them empty."""
    return [
        block_of([bytes([65 + row % 26]) * (row * number % 7) for row in range(ROWS)], **columns)  # type: ignore[arg-type]
        for number in range(1, count + 1)
    ]


def message(given: Sequence[Block]) -> bytes:
    """What is written for the blocks."""
    block, contents = Gatherer().gather(given)
    schema, fitted = Fitting().fit(EMPTY, block)
    pieces = Messages(schema).message(fitted, contents)
    return b"".join(bytes(memoryview(piece)) for piece in pieces)


def joined(given: Sequence[Block]) -> bytes:
    """What would be written for one block of the same events."""
    return message([join(given)])


CASES = {
    "plain": blocks(),
    "two": blocks(2),
    "empty values": [block_of([b""] * ROWS)] * 3,
    "sliced": [block.slice(number + 1, ROWS - 9) for number, block in enumerate(blocks())],
    "other columns": blocks(keys=["k"] * ROWS, severities=[1] * ROWS, headers=[{"a": "b"}] * ROWS),
    "some nulls": blocks(keys=["k", None] * (ROWS // 2), severities=[None, 3] * (ROWS // 2)),
    "in some only": [*blocks(1, keys=["k"] * ROWS), *blocks(2)],
    "booleans": [
        block.append_column("flag", pa.array([row % 3 == 0 for row in range(ROWS)]))
        for block in blocks()
    ],
    "other order": [block.select(["timestamp", "value"]) for block in blocks()],
}


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_the_same(case: str) -> None:
    """Whatever columns there are, and wherever in its buffers a block begins."""
    assert message(CASES[case]) == joined(CASES[case])


def test_large_columns_are_not_copied() -> None:
    """The message has the blocks' own memory in it."""
    given = blocks()
    _, contents = Gatherer().gather(given)
    gathered = {piece.address for pieces in contents.values() for piece in pieces}
    values = [block.column("value").buffers()[2] for block in given]
    assert {value.address for value in values if value is not None} <= gathered


@pytest.mark.parametrize(
    "given",
    [
        blocks(1),
        blocks(gathering.MOST_BLOCKS + 1),
        [*blocks(1), blocks(1)[0].select(["value"])],
        [*blocks(1), block_of([])],
        [pa.RecordBatch.from_arrays([pa.nulls(ROWS, pa.string())], names=["key"])] * 2,
    ],
    ids=["one", "many", "unlike", "empty", "only nulls"],
)
def test_others_are_joined(given: list[Block]) -> None:
    """Where gathering is not possible, or not worth it."""
    block, contents = Gatherer().gather(given)
    assert not contents
    assert block.num_rows == sum(each.num_rows for each in given)


def test_what_is_too_large_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more blanks than there is address space for."""
    monkeypatch.setattr(gathering, "BLANK_BYTES", 600)
    given = blocks()
    assert message(given) == joined(given)
