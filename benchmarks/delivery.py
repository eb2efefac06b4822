"""Delivery: the engine, a lane's backlog, changing capacity, recovery.

python -m benchmarks.delivery [--quick] [--json]
"""

from __future__ import annotations

from benchmarks import delivery_adaptive, delivery_engine, delivery_lane
from benchmarks.command import main
from benchmarks.effort import Effort
from benchmarks.http_server import http_server
from benchmarks.outcome import Outcome
from benchmarks.pipeline_process import spark_session


def run(effort: Effort) -> Outcome:
    """All measurements of delivery."""
    outcome = Outcome()
    with http_server() as server:
        for part in (delivery_engine, delivery_adaptive):
            outcome.add(part.run(effort, server))
        with spark_session() as spark:
            outcome.add(delivery_lane.run(effort, spark, server))
    return outcome


if __name__ == "__main__":
    main(run, "Measure delivery.")
