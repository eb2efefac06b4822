"""Spark: the data source beside Spark's own, the whole pipeline beside rsyslog, lanes.

    python -m benchmarks.spark [--quick] [--json]

One Spark session on two cores for all of it. What is measured is steady state: every measurement
leaves out the batches in which Spark loads, compiles and starts things.
"""

from __future__ import annotations

from benchmarks import spark_idle, spark_lanes, spark_pipeline, spark_source, spark_trickle
from benchmarks.command import main
from benchmarks.effort import Effort
from benchmarks.outcome import Outcome
from benchmarks.piped import spark_session


def run(effort: Effort) -> Outcome:
    """All measurements on Spark."""
    outcome = Outcome()
    with spark_session() as spark:
        for part in (spark_source, spark_pipeline, spark_trickle, spark_idle, spark_lanes):
            outcome.add(part.run(effort, spark))
    return outcome


if __name__ == "__main__":
    main(run, "Measure the data source and the pipeline on Spark.")
