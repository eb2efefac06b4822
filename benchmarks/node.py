"""The node: input by syslog, Flight and HTTP, latency, memory, and a comparison with rsyslog.

python -m benchmarks.node [--quick] [--json]
"""

from __future__ import annotations

from benchmarks import node_flight, node_latency, node_memory, node_syslog
from benchmarks.command import main
from benchmarks.effort import Effort
from benchmarks.outcome import Outcome


def run(effort: Effort) -> Outcome:
    """All measurements of the node."""
    outcome = Outcome()
    for part in (node_syslog, node_flight, node_latency, node_memory):
        outcome.add(part.run(effort))
    return outcome


if __name__ == "__main__":
    main(run, "Measure the node.")
