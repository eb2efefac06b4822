"""What events look like: to actions, in their queues, and when lanes read them again."""

from __future__ import annotations

from collections.abc import Collection

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from turnlane.delivery.columns import DIRECT, PAYLOAD
from turnlane.formats.parse_settings import Format
from turnlane.pipeline.settings import PipelineSettings
from turnlane.spark.answers import called
from turnlane.spark.columns import names_read, read_schema
from turnlane.spark.needs import wanted_by_main
from turnlane.spark.parsing import parsed
from turnlane.spark.parsing.json import with_data


def seen(
    source: DataFrame, settings: PipelineSettings, wanted: Collection[str] | None = None
) -> DataFrame:
    """Events as actions see them: parsed, as far as that is ``wanted``, and transformed."""
    return transformed(parsed(source, settings.parse, wanted), settings)


def transformed(events: DataFrame, settings: PipelineSettings) -> DataFrame:
    """Events after the transform that is above all actions."""
    return events if settings.transform is None else called(settings.transform, events)


def stored(events: DataFrame, settings: PipelineSettings) -> DataFrame:
    """Events without columns that no queue keeps: what only filters have read is left out."""
    if wanted_by_main(settings) is None:
        return storable(events)
    kept = {*names_read(), DIRECT, PAYLOAD}
    return events.select(*(name for name in events.columns if name in kept))


def storable(events: DataFrame) -> DataFrame:
    """Events without columns that a queue has no type for; what they were made of is kept."""
    variants = [
        field.name for field in events.schema.fields if field.dataType.typeName() == "variant"
    ]
    return events.drop(*variants)


def stored_schema(spark: SparkSession, settings: PipelineSettings) -> StructType:
    """The columns of action queues: those of events once they are parsed and transformed."""
    return stored(seen(nothing(spark), settings), settings).schema


def restored(events: DataFrame, settings: PipelineSettings) -> DataFrame:
    """Events of an action's queue, with the columns that no queue stores made again."""
    is_json = settings.parse is not None and settings.parse.format == Format.JSON
    return with_data(events) if is_json else events


def nothing(spark: SparkSession) -> DataFrame:
    """No events, with the columns that all have."""
    return spark.createDataFrame([], read_schema(include_headers=True))
