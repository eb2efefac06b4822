"""Dead letters: the events that cannot be delivered, with the reason, as a queue keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from turnlane.delivery.outcome import DeadLetter
from turnlane.events import Block

_FIELDS: list[pa.Field[Any]] = [
    pa.field("dead_action", pa.string()),
    pa.field("dead_reason", pa.string()),
    pa.field("dead_error", pa.string()),
    pa.field("dead_attempts", pa.int32()),
    pa.field("dead_time", pa.timestamp("us", tz="UTC")),
    pa.field("dead_config", pa.string()),
]
COLUMNS = pa.schema(_FIELDS)
"""What a dead letter has beside the columns of its event."""


def dead_letter_block(
    letters: Sequence[DeadLetter], action: str, time_ns: int, config: str | None = None
) -> Block:
    """One block of all these letters, of which there is at least one.

    ``config`` is the version of the configuration that they were delivered by.
    """
    table = pa.Table.from_batches([letter.rows for letter in letters]).combine_chunks()
    (rows,) = table.to_batches()
    same = len(letters)
    values: dict[str, Sequence[object]] = {
        "dead_action": [action] * same,
        "dead_reason": [letter.error for letter in letters],
        "dead_error": [letter.text for letter in letters],
        "dead_attempts": [letter.attempts for letter in letters],
        "dead_time": [time_ns // 1000] * same,
        "dead_config": [config] * same,
    }
    # An event that comes from a queue of dead letters has these columns: it gets new ones.
    rows = rows.select([name for name in rows.schema.names if name not in values])
    which = np.repeat(np.arange(same), [letter.rows.num_rows for letter in letters])
    for field in COLUMNS:
        column: Any = pa.array(values[field.name], field.type)
        rows = rows.append_column(field, column.take(which))
    return rows
