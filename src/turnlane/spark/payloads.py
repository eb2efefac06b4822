"""What an output is handed: each event as one piece of text or bytes, made by Spark itself."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from turnlane.delivery.columns import DIRECT, PAYLOAD
from turnlane.spark.routing import QUEUE

_PLACE = ("partition", "offset")


def with_payload(events: DataFrame, form: str) -> DataFrame:
    """Events with a column ``payload``: ``json`` of all that is known, or ``raw``, the value."""
    return events.withColumn(PAYLOAD, _raw(events) if form == "raw" else _json(events))


def _raw(events: DataFrame) -> Column:
    return F.col("value") if "value" in events.columns else _json(events)


def _json(events: DataFrame) -> Column:
    """A JSON object with every column; bytes as the text that they nearly always are."""
    columns = []
    for field in events.schema.fields:
        if field.name in (PAYLOAD, QUEUE, DIRECT, *_PLACE):
            continue
        column = F.col(f"`{field.name}`")
        if field.dataType.typeName() == "binary":
            column = column.cast("string").alias(field.name)
        columns.append(column)
    return F.to_json(F.struct(*columns)).cast("binary")
