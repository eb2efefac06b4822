"""Trying a pipeline's cases: the same plan as the lanes have, over a small table of events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from turnlane.delivery.settings import DIRECT, PAYLOAD
from turnlane.pipeline.cases import Case, CaseEvent, Row
from turnlane.pipeline.settings import MAIN, ActionSettings, PipelineSettings
from turnlane.spark.pipeline import Pipeline
from turnlane.spark.routing import QUEUE, with_payload
from turnlane.spark.row_codec import read_schema
from turnlane.spark.transforms import answer


class Trial:
    """One case, tried."""

    def __init__(self, spark: SparkSession, settings: PipelineSettings, case: Case) -> None:
        # A session of its own, for the views that SQL is about.
        self._spark = spark.newSession()
        self._settings = settings
        self._case = case
        self._source = self._table(case.events)
        pipeline = Pipeline(settings, {}, self._spark, Path())
        self._routed = pipeline.routed(self._source).cache()

    def results(self) -> Iterator[tuple[str, list[Row]]]:
        """By action, what it gets; those that nothing is expected of are left out."""
        try:
            for action in self._settings.actions:
                if action.name in self._case.expect:
                    yield action.name, _rows(self._of(action))
        finally:
            self._routed.unpersist()

    def _table(self, events: Sequence[CaseEvent]) -> DataFrame:
        now = datetime.now(UTC)
        rows = [_columns(event, now, at) for at, event in enumerate(events)]
        return self._spark.createDataFrame(rows, read_schema(include_headers=True))

    def _of(self, action: ActionSettings) -> DataFrame:
        return answer(action, self._arrived(action), self._queue)

    def _arrived(self, action: ActionSettings) -> DataFrame:
        """What is routed to an action, as its lane would read it."""
        route = DIRECT if action.is_called_by_main else QUEUE
        return (
            self._routed.where(F.array_contains(route, action.name))
            .drop(DIRECT)
            .withColumn("queue", F.lit(action.name))
        )

    def _queue(self, name: str) -> DataFrame:
        """What a queue holds after the case; those that the pipeline does not fill are empty."""
        for action in self._settings.queued:
            if action.name == name:
                return self._arrived(action)
        return self._source.limit(0)


def _columns(event: CaseEvent, now: datetime, offset: int) -> tuple[Any, ...]:
    """In the order of ``read_schema``."""
    value = None if event.value is None else bytearray(event.value.encode())
    stamp = event.timestamp or now
    stamp = stamp if stamp.tzinfo is not None else stamp.replace(tzinfo=UTC)
    place = (MAIN, 0, offset)
    return (event.key, value, stamp, event.severity, event.source, *place, event.headers)


def _rows(events: DataFrame) -> list[Row]:
    """The rows as outputs get them, in JSON; a column that JSON leaves out is null."""
    shown = [name for name in events.columns if name not in (QUEUE, DIRECT)]
    payloads = with_payload(events, "json").select(F.col(PAYLOAD).cast("string")).collect()
    return [{**dict.fromkeys(shown), **json.loads(row[0])} for row in payloads]
