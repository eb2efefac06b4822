"""The work that people really have: what a batch costs with a parser and ordinary filters.

    python -m benchmarks.realistic [--quick] [--json]

Spark plans every batch again. So a pipeline that gets one event at a time shows what planning
costs, and how this grows with the number of filters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name

import turnlane
from benchmarks.command import main
from benchmarks.effort import Effort
from benchmarks.measure import Series
from benchmarks.outcome import Cell, Outcome, Table, make_figure
from benchmarks.pipeline_process import (
    RunningPipeline,
    get_size,
    run_pipeline,
    spark_session,
    wait_until,
)
from benchmarks.spark_idle import PARTS, compute_cpu_seconds, get_cpu_seconds

FEW, MANY = 2, 16
"""Numbers of filters."""
WARM_UP = 12
"""Events until Java has compiled the code of planning."""


def add_six_columns(events: DataFrame) -> DataFrame:
    """Add columns, as the transform of a pipeline does."""
    return events.withColumns(
        {
            "host_lower": F.lower("hostname"),
            "app_upper": F.upper("app_name"),
            "size": F.length("message"),
            "first_word": F.substring_index("message", " ", 1),
            "is_severe": F.col("severity") <= 3,
            "delay": F.unix_timestamp("timestamp") - F.unix_timestamp("time"),
        }
    )


def make_sections(place: Path, filters: int, transform: str | None) -> dict[str, Any]:
    """Return a configuration with a text filter and a direct file output for each action."""
    actions = [
        {
            "name": f"action{at}",
            "filter": f"app_name = 'app{at}' OR message LIKE 'q{at}%'",
            "output": {"type": "file", "path": str(place / f"out-{at}")},
        }
        for at in range(filters)
    ]
    sections: dict[str, Any] = {"parse": "syslog", "actions": actions}
    return sections if transform is None else {**sections, "transform": transform}


def measure_batches(running: RunningPipeline, path: Path, events: int) -> list[dict[str, float]]:
    """Return the CPU seconds of each part of the pipeline for each of ``events`` batches."""
    found: list[dict[str, float]] = []
    with turnlane.connect(running.node.flight) as client:
        producer = client.queue("main").producer(ack="accepted", on_ack=lambda _: None)
        for number in range(WARM_UP + events):
            before, size = get_cpu_seconds(), get_size(path)
            batches = running.runner.status()[0].batches
            producer.publish(b"<13>Oct 11 22:14:15 host app0[1]: message %d" % number)
            wait_until(lambda size=size: get_size(path) > size, "a line")  # type: ignore[misc]
            wait_until(lambda done=batches: running.runner.status()[0].batches > done, "a batch")  # type: ignore[misc]
            found.append(compute_cpu_seconds(before, get_cpu_seconds()))
    return found[WARM_UP:]


def run(effort: Effort) -> Outcome:
    """Measure the cost of a batch with a few and with many filters, and with a transform."""
    events = effort.choose(effort.events(20, 100), 2)
    cases = {
        f"{FEW} filters": (FEW, None),
        f"{MANY} filters": (MANY, None),
        f"{MANY} filters, transform": (MANY, "benchmarks.realistic:add_six_columns"),
    }
    totals: dict[str, Series] = {}
    rows: dict[str, list[Cell | None]] = {}
    with spark_session() as spark:
        for name, (filters, transform) in cases.items():
            parts = _measure(effort, spark, filters, transform, events)
            totals[name] = Series([sum(each.values()) for each in parts])
            rows[name] = [Cell.of(Series([each[part] for each in parts])) for part in PARTS]
            rows[name].append(Cell.of(totals[name]))
    few, many, transformed = totals.values()
    how = f"CPU seconds of all processes for a batch of one syslog message, {MANY} text filters"
    growth = many.map(lambda each: each / few.median)
    return Outcome(
        [
            make_figure("plan_cost_16_filters_s", many, how, unit="s", at_most=0.3),
            make_figure("plan_cost_growth", growth, f"the same / with {FEW} filters", at_most=1.5),
            make_figure(
                "plan_cost_transform_s",
                transformed,
                f"{how}, and a transform that adds six columns",
                unit="s",
                at_most=0.5,
            ),
        ],
        [Table("A batch of one event", "CPU seconds", (*PARTS, "all"), rows)],
    )


def _measure(
    effort: Effort, spark: SparkSession, filters: int, transform: str | None, events: int
) -> list[dict[str, float]]:
    with effort.place() as place:
        sections = make_sections(place, filters, transform)
        with run_pipeline(spark, place, sections) as running:
            return measure_batches(running, place / "out-0", events)


if __name__ == "__main__":
    main(run, "Measure what a batch costs with a parser and ordinary filters.")
