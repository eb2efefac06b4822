"""Blocks whose events are known by their offsets, and engines with short waits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from turnlane.delivery.destination import DestinationState, LocalDestinationState, SendPermit
from turnlane.delivery.engine import Engine
from turnlane.delivery.results import BlockResult
from turnlane.delivery.settings import DeliverySettings
from turnlane.events import Block
from turnlane.testing import FaultyOutput

TIMEOUT = 60.0
SHORT_WAITS: dict[str, Any] = {
    "backoff": 0.001,
    "max_backoff": 0.002,
    "breaker_reset": 0.001,
    "max_time": TIMEOUT,
}


def make_settings(**knobs: Any) -> DeliverySettings:
    """Return settings with very short waits."""
    return DeliverySettings(**{**SHORT_WAITS, **knobs})


def make_block(first: int, count: int, keys: int = 7) -> Block:
    """Return events with consecutive offsets; the key is the offset modulo ``keys``."""
    offsets = np.arange(first, first + count, dtype=np.int64)
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([f"k{offset % keys}" for offset in offsets.tolist()], pa.string()),
            "payload": pa.array([b"%d" % offset for offset in offsets.tolist()], pa.binary()),
            "partition": pa.array(np.zeros(count, dtype=np.int32)),
            "offset": pa.array(offsets),
        }
    )


def get_offsets(block: Block) -> list[int]:
    found: Any = block.column("offset").to_pylist()
    return list(found)


def get_delivered_offsets(output: FaultyOutput) -> list[int]:
    """Return the offsets of the delivered events, in the order of delivery."""
    return [offset for block in list(output.taken) for offset in get_offsets(block)]


def deliver(
    output: FaultyOutput,
    settings: DeliverySettings,
    blocks: Iterable[Block],
    state: DestinationState | None = None,
    **more: Any,
) -> list[BlockResult]:
    """Deliver blocks with a new engine."""
    with Engine(output, settings, state or LocalDestinationState(settings), **more) as engine:
        return list(engine.run(blocks))


def get_dead_offsets(block: Block, result: BlockResult) -> set[int]:
    found: set[int] = set()
    for letter in result.dead:
        assert get_offsets(letter.rows) == get_offsets(block.take(letter.numbers))
        found.update(get_offsets(letter.rows))
    return found


def get_deferred_offsets(block: Block, result: BlockResult) -> set[int]:
    return set(get_offsets(block.take(result.deferred)))


def check_account(
    output: FaultyOutput, blocks: list[Block], results: list[BlockResult]
) -> tuple[set[int], set[int], set[int]]:
    """Check that each event has one state; return the delivered, dead and deferred offsets."""
    assert len(results) == len(blocks)
    delivered: set[int] = set()
    dead: set[int] = set()
    deferred: set[int] = set()
    for block, result in zip(blocks, results, strict=True):
        block_dead, block_deferred = (
            get_dead_offsets(block, result),
            get_deferred_offsets(block, result),
        )
        assert block_dead.isdisjoint(block_deferred)
        rest = set(get_offsets(block)) - block_dead - block_deferred
        assert result.delivered == len(rest)
        delivered |= rest
        dead |= block_dead
        deferred |= block_deferred
    assert delivered <= set(get_delivered_offsets(output))
    return delivered, dead, deferred


def peek_permit(state: LocalDestinationState) -> SendPermit:
    """Return what a permit would say, without lending a probe or counting a refusal."""
    return state._make_permit(state._clock.monotonic())
