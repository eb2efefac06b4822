"""Blocks whose events can be told apart, and engines that hurry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from turnlane.delivery.destination import DestinationState, LocalDestinationState
from turnlane.delivery.engine import Engine
from turnlane.delivery.results import BlockResult
from turnlane.delivery.settings import DeliverySettings
from turnlane.events import Block
from turnlane.testing import FaultyOutput

PATIENCE = 60.0
HURRIED: dict[str, Any] = {
    "backoff": 0.001,
    "max_backoff": 0.002,
    "breaker_reset": 0.001,
    "max_time": PATIENCE,
}


def settings_of(**knobs: Any) -> DeliverySettings:
    """Settings with next to no waits."""
    return DeliverySettings(**{**HURRIED, **knobs})


def block_of_offsets(first: int, count: int, keys: int = 7) -> Block:
    """Events that are known by their offsets; the key is the offset's remainder."""
    offsets = np.arange(first, first + count, dtype=np.int64)
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([f"k{offset % keys}" for offset in offsets.tolist()], pa.string()),
            "payload": pa.array([b"%d" % offset for offset in offsets.tolist()], pa.binary()),
            "partition": pa.array(np.zeros(count, dtype=np.int32)),
            "offset": pa.array(offsets),
        }
    )


def offsets_of(block: Block) -> list[int]:
    found: Any = block.column("offset").to_pylist()
    return list(found)


def taken(output: FaultyOutput) -> list[int]:
    """The offsets that the destination has, in the order in which it got them."""
    return [offset for block in list(output.taken) for offset in offsets_of(block)]


def run(
    output: FaultyOutput,
    settings: DeliverySettings,
    blocks: Iterable[Block],
    gate: DestinationState | None = None,
    **more: Any,
) -> list[BlockResult]:
    """Deliver blocks with an engine of their own."""
    with Engine(output, settings, gate or LocalDestinationState(settings), **more) as engine:
        return list(engine.run(blocks))


def dead_of(block: Block, outcome: BlockResult) -> set[int]:
    found: set[int] = set()
    for letter in outcome.dead:
        assert offsets_of(letter.rows) == offsets_of(block.take(letter.numbers))
        found.update(offsets_of(letter.rows))
    return found


def kept_of(block: Block, outcome: BlockResult) -> set[int]:
    return set(offsets_of(block.take(outcome.deferred)))


def check_account(
    output: FaultyOutput, blocks: list[Block], outcomes: list[BlockResult]
) -> tuple[set[int], set[int], set[int]]:
    """Every event has one fate, and what is delivered the destination has."""
    assert len(outcomes) == len(blocks)
    delivered: set[int] = set()
    dead: set[int] = set()
    kept: set[int] = set()
    for block, outcome in zip(blocks, outcomes, strict=True):
        its_dead, its_kept = dead_of(block, outcome), kept_of(block, outcome)
        assert its_dead.isdisjoint(its_kept)
        rest = set(offsets_of(block)) - its_dead - its_kept
        assert outcome.delivered == len(rest)
        delivered |= rest
        dead |= its_dead
        kept |= its_kept
    assert delivered <= set(taken(output))
    return delivered, dead, kept
