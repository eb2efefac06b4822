"""The parse stage: from the ``value`` of events to columns, in Spark expressions or Arrow batches.

Every format keeps the columns that events have, adds its own, and adds ``parse_error``, which is
null where all went well. No event is dropped here, whatever is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from typing import Final

from pyspark.sql import DataFrame

from turnlane.delivery.settings import PRIORITY
from turnlane.events import BASE_SCHEMA
from turnlane.formats.parse_settings import Format, ParseSettings
from turnlane.spark.parsing.formats import json, otlp, regex
from turnlane.spark.parsing.syslog import needs_priority_only, syslog

__all__ = ["looked_at", "parsed"]

_READ: Final[dict[Format, AbstractSet[str]]] = {
    Format.NONE: frozenset(),
    Format.SYSLOG: frozenset({"value", "severity", "timestamp"}),
    Format.JSON: frozenset({"value"}),
    Format.OTLP: frozenset({"value", "headers"}),
    Format.REGEX: frozenset({"value"}),
}
"""The columns of events that each format is made of."""


def _none(df: DataFrame, settings: ParseSettings) -> DataFrame:
    del settings
    return df


_FORMATS: Final[dict[Format, Callable[[DataFrame, ParseSettings], DataFrame]]] = {
    Format.NONE: _none,
    Format.JSON: json,
    Format.OTLP: otlp,
    Format.REGEX: regex,
}


def parsed(
    df: DataFrame, settings: ParseSettings, wanted: Collection[str] | None = None
) -> DataFrame:
    """The events with the columns of their format. Works on streams and on tables alike.

    Columns that are not ``wanted``, where that is known, may be left out: Spark, which would not
    work them out either, plans each batch anew, and planning syslog costs more than reading a few
    thousand messages. Raises ``ConfigError`` for what only Spark can find wrong with the settings.
    """
    if settings.format is Format.SYSLOG:
        return syslog(df, settings, wanted)
    return _FORMATS[settings.format](df, settings)


def looked_at(settings: ParseSettings, wanted: AbstractSet[str]) -> AbstractSet[str]:
    """The columns of events that are needed to know those that are ``wanted``."""
    known = wanted & set(BASE_SCHEMA.names)
    if settings.format is Format.SYSLOG and needs_priority_only(wanted):
        return known | {"severity", PRIORITY}
    return known | _READ[settings.format]
