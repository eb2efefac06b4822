"""Spark: the data source compared with Spark's own, the pipeline compared with rsyslog, lanes.

    python -m benchmarks.spark [--quick] [--json]

All measurements share one Spark session on two cores. They measure the steady state: batches in
which Spark loads and compiles code or starts processes do not count.
"""

from __future__ import annotations

from benchmarks import spark_idle, spark_lanes, spark_pipeline, spark_source, spark_trickle
from benchmarks.command import main
from benchmarks.effort import Effort
from benchmarks.outcome import Outcome
from benchmarks.pipeline_process import spark_session


def run(effort: Effort) -> Outcome:
    """All measurements on Spark."""
    outcome = Outcome()
    with spark_session() as spark:
        for part in (spark_source, spark_pipeline, spark_trickle, spark_idle, spark_lanes):
            outcome.add(part.run(effort, spark))
    return outcome


if __name__ == "__main__":
    main(run, "Measure the data source and the pipeline on Spark.")
