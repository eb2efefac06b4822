"""The queues: publishing, reading, syncing, recovery and memory, compared with other queues.

    python -m benchmarks.queues [--quick] [--json]

Systems take turns in several rounds. A figure is the median; ratios are taken round by round.
Targets are printed next to the figures. A missed target is not an error.
"""

from __future__ import annotations

from benchmarks import (
    backlog,
    disk_writing,
    group_commit,
    proxy_memory,
    publish_and_read,
    recovery,
)
from benchmarks.command import main
from benchmarks.effort import Effort
from benchmarks.outcome import Outcome


def run(effort: Effort) -> Outcome:
    """All measurements of the queues."""
    outcome = Outcome()
    for part in (publish_and_read, disk_writing, backlog, group_commit, recovery, proxy_memory):
        outcome.add(part.run(effort))
    return outcome


if __name__ == "__main__":
    main(run, "Measure the queues.")
