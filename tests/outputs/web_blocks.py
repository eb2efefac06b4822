"""Blocks as lanes pass them to outputs, with payloads of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from turnlane.events import Block, block_of
from turnlane.outputs.api import Output, load

NOON = 1_700_000_000_000_000
"""Microseconds since the epoch: 2023-11-14, 22:13:20."""


def make_events(
    values: Sequence[bytes], first: int = 0, queue: Any = "alerts", **columns: Any
) -> Block:
    """Return events with positions, and payloads of JSON."""
    count = len(values)
    block = block_of(values, timestamps=np.arange(count) + NOON, **columns)
    payloads = [json.dumps({"value": value.decode(errors="replace")}).encode() for value in values]
    added = {
        "queue": pa.array([queue] * count),
        "partition": pa.array(np.zeros(count, np.int32)),
        "offset": pa.array(np.arange(first, first + count)),
        "payload": pa.array(payloads, pa.binary()),
    }
    for name, column in added.items():
        block = block.append_column(name, column)
    return block


def set_column(block: Block, name: str, values: Any) -> Block:
    """Add a column to a block, or replace it."""
    at = block.schema.get_field_index(name)
    column = values if isinstance(values, pa.Array) else pa.array(values)
    return block.append_column(name, column) if at < 0 else block.set_column(at, name, column)


def make_output(kind: str, **settings: Any) -> Output:
    """Make an output as lanes do: from settings that were JSON in between."""
    output_type = load(kind)
    model = output_type.settings_type.model_validate({"type": kind, **settings})
    return output_type(output_type.settings_type.model_validate(model.model_dump(mode="json")))


def deliver(kind: str, block: Block, **settings: Any) -> None:
    """Deliver a block with a new output."""
    with make_output(kind, **settings) as output:
        output.send(output.prepare(block))
