"""Queue tables on three databases: throughput, lag, statements, shards, churn, other queues.

python -m benchmarks.table [--quick] [--json]
"""

from __future__ import annotations

from benchmarks import table_churn, table_lag, table_shards, table_throughput
from benchmarks.command import main
from benchmarks.effort import Effort
from benchmarks.outcome import Outcome
from benchmarks.table_databases import start_databases
from benchmarks.table_producer import Producer


def run(effort: Effort) -> Outcome:
    """All measurements of queue tables."""
    outcome = Outcome()
    with start_databases(effort) as urls, Producer() as producer:
        postgres = urls["PostgreSQL"]
        outcome.add(table_throughput.compare_contestants(effort, postgres, producer))
        outcome.add(table_lag.run(effort, urls, producer))
        others = {name: url for name, url in urls.items() if url != postgres}
        outcome.add(table_throughput.measure_each_database(effort, others, producer))
        outcome.add(table_shards.run(effort, postgres, producer))
        outcome.add(table_churn.run(effort, postgres, producer))
    return outcome


if __name__ == "__main__":
    main(run, "Measure queue tables.")
