"""Blocks as lanes hand them to outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from turnlane.events import Block, block_of
from turnlane.outputs.api import Output, load

NOON = 1_700_000_000_000_000
"""Microseconds: 2023-11-14, 22:13:20."""


def events(values: Sequence[bytes], first: int = 0, queue: Any = "alerts", **columns: Any) -> Block:
    """A block with its place, and payloads of JSON."""
    count = len(values)
    block = block_of(values, timestamps=np.arange(count) + NOON, **columns)
    payloads = [json.dumps({"value": value.decode(errors="replace")}).encode() for value in values]
    places = {
        "queue": pa.array([queue] * count),
        "partition": pa.array(np.zeros(count, np.int32)),
        "offset": pa.array(np.arange(first, first + count)),
        "payload": pa.array(payloads, pa.binary()),
    }
    for name, column in places.items():
        block = block.append_column(name, column)
    return block


def with_column(block: Block, name: str, values: Any) -> Block:
    """The block with one column more, or another."""
    at = block.schema.get_field_index(name)
    column = values if isinstance(values, pa.Array) else pa.array(values)
    return block.append_column(name, column) if at < 0 else block.set_column(at, name, column)


def output(kind: str, **settings: Any) -> Output:
    """An output, made as lanes make it: from settings that came as JSON."""
    found = load(kind)
    model = found.settings_type.model_validate({"type": kind, **settings})
    return found(found.settings_type.model_validate(model.model_dump(mode="json")))


def delivered(kind: str, block: Block, **settings: Any) -> None:
    """Deliver a block."""
    with output(kind, **settings) as made:
        made.send(made.prepare(block))
