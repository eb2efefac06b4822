"""The queues: publishing, reading, syncing, recovery and memory, beside what else there is.

    python -m benchmarks.queues [--quick] [--json]

Contestants take turns, several rounds; a figure is the median, and a ratio is taken round by round
between neighbours. Nothing here fails for being slow: targets are printed beside the figures.
"""

from __future__ import annotations

from benchmarks import backlog, group_commit, proxy_memory, publishing, recovery, storing
from benchmarks.command import main
from benchmarks.effort import Effort
from benchmarks.outcome import Outcome


def run(effort: Effort) -> Outcome:
    """All measurements of the queues."""
    outcome = Outcome()
    for part in (publishing, storing, backlog, group_commit, recovery, proxy_memory):
        outcome.add(part.run(effort))
    return outcome


if __name__ == "__main__":
    main(run, "Measure the queues.")
