"""The memory of a node with a long backlog, compared with an empty node."""

from __future__ import annotations

import time

import turnlane
from benchmarks.effort import Effort
from benchmarks.lines import make_log_lines, split_into_blocks
from benchmarks.measure import Series
from benchmarks.node_flight import BLOCK, measure_flight
from benchmarks.node_process import run_node
from benchmarks.outcome import Cell, Outcome, Table, make_figure

TAIL = 16 << 20
"""The part of the log that the queue keeps in memory."""


SETTLE_SECONDS = 3.0
"""A node returns free memory to the system every two seconds."""


def measure_growth(effort: Effort, events: int) -> tuple[float, float]:
    """Return the bytes of an empty node, and with ``events`` events in its queue."""
    lines = split_into_blocks(make_log_lines(BLOCK * 10, 100), BLOCK)
    blocks = [turnlane.block_of(part) for part in lines]
    knobs = {"durability": "interval", "memory_bytes": TAIL}
    with effort.place() as place, run_node(place, {"main": knobs}) as node:
        empty = node.get_own_bytes()
        measure_flight(node, blocks * (events // (BLOCK * 10)))
        time.sleep(effort.seconds(SETTLE_SECONDS, SETTLE_SECONDS))
        return float(empty), float(node.get_own_bytes())


def run(effort: Effort) -> Outcome:
    """Measure once: memory does not depend on the load of the machine."""
    events = max(BLOCK * 10, effort.events(10_000_000, 10_000_000))
    empty, full = measure_growth(effort, events)
    ratio = Series([full / (empty + TAIL)])
    how = (
        f"private memory (USS without lazily freed pages) of a node with {events:,} events of "
        "100 B in a disk queue / private memory of an empty node plus the "
        f"{TAIL >> 20} MiB that the queue keeps in memory"
    )
    rows = {
        "empty": [Cell.of(Series([empty / 1e6]))],
        f"{events:,} events": [Cell.of(Series([full / 1e6]))],
    }
    table = Table("Memory of a node", "MB", ("memory",), rows)
    return Outcome(
        [make_figure("backlog_memory_ratio", ratio, how, unit="×", at_most=1.3)], [table]
    )
