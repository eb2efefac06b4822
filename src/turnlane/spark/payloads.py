"""What an output is handed: each event as one piece of text or bytes, made by Spark itself."""

from __future__ import annotations

from collections.abc import Sequence

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
    """A JSON object with every column."""
    columns: list[Column] = []
    for field in events.schema.fields:
        if field.name in (PAYLOAD, QUEUE, DIRECT, *_PLACE):
            continue
        if field.dataType.typeName() == "binary":
            columns += _bytes(field.name, events.columns)
        else:
            columns.append(F.col(f"`{field.name}`"))
    return F.to_json(F.struct(*columns)).cast("binary")


def _bytes(name: str, taken: Sequence[str]) -> tuple[Column, Column]:
    """Bytes as the text that they nearly always are; under another name where they are none.

    One of the two is null, and left out. Bytes within others, and these, are base64 in JSON.
    """
    column = F.col(f"`{name}`")
    text = column.cast("string")
    is_text = F.is_valid_utf8(text)
    other = f"{name}_base64"
    while other in taken:
        other += "_"
    return F.when(is_text, text).alias(name), F.when(~is_text, column).alias(other)
