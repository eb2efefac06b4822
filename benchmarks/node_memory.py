"""What a node with a long backlog has in memory, against an empty one."""

from __future__ import annotations

import time

import turnlane
from benchmarks.effort import Effort
from benchmarks.lines import in_blocks, log_lines
from benchmarks.measure import Series
from benchmarks.node_flight import BLOCK, flight_speed
from benchmarks.outcome import Cell, Outcome, Table, figure
from benchmarks.served import served

TAIL = 16 << 20
"""The part of the log that the queue keeps in memory."""


SETTLE_SECONDS = 3.0
"""A node gives back what it has freed every two seconds."""


def growth(effort: Effort, events: int) -> tuple[float, float]:
    """Bytes of a node that is empty, and with so many events in its queue."""
    lines = in_blocks(log_lines(BLOCK * 10, 100), BLOCK)
    blocks = [turnlane.block_of(part) for part in lines]
    knobs = {"durability": "interval", "memory_bytes": TAIL}
    with effort.place() as place, served(place, {"main": knobs}) as node:
        empty = node.resident_bytes()
        flight_speed(node, blocks * (events // (BLOCK * 10)))
        time.sleep(effort.seconds(SETTLE_SECONDS, SETTLE_SECONDS))
        return float(empty), float(node.resident_bytes())


def run(effort: Effort) -> Outcome:
    """One backlog is enough: memory does not vary with the machine's mood."""
    events = max(BLOCK * 10, effort.events(10_000_000, 10_000_000))
    empty, full = growth(effort, events)
    ratio = Series([full / (empty + TAIL)])
    how = (
        f"own memory (USS, without what the system may take at once) of a node with {events:,} "
        "events of 100 B in a disk queue / that of an empty node plus its in-memory tail of "
        f"{TAIL >> 20} MiB"
    )
    rows = {
        "empty": [Cell.of(Series([empty / 1e6]))],
        f"{events:,} events": [Cell.of(Series([full / 1e6]))],
    }
    table = Table("Memory of a node", "MB", ("memory",), rows)
    return Outcome([figure("backlog_memory_ratio", ratio, how, unit="×", at_most=1.3)], [table])
