"""The parse stage: makes columns of the ``value`` of events, in Spark expressions or Arrow batches.

Every format keeps the columns of events, adds its own, and adds ``parse_error``, which is null if
the event could be parsed. No event is dropped. Syslog is in ``syslog_columns``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.pandas.functions import arrow_udf

from turnlane.delivery.settings import PRIORITY
from turnlane.errors import ConfigError
from turnlane.events import BASE_SCHEMA
from turnlane.formats.parse_settings import PARSE_ERROR, Format, GroupedPattern, ParseSettings
from turnlane.spark.syslog_columns import needs_priority_only, parse_syslog

_SOURCE_COLUMNS: Final[dict[Format, AbstractSet[str]]] = {
    Format.NONE: frozenset(),
    Format.SYSLOG: frozenset({"value", "severity", "timestamp"}),
    Format.JSON: frozenset({"value"}),
    Format.OTLP: frozenset({"value", "headers"}),
    Format.REGEX: frozenset({"value"}),
}
"""The columns of events that each format reads."""


def parse_events(
    df: DataFrame, settings: ParseSettings, wanted: Collection[str] | None = None
) -> DataFrame:
    """Return events with the columns of their format; ``df`` may be a stream or a table.

    With ``wanted``, other columns may be left out. Spark would not compute them either, but it
    plans each batch again, and planning syslog costs more than reading a few thousand messages.
    Raises ``ConfigError`` for errors in the settings that only Spark can find.
    """
    match settings.format:
        case Format.SYSLOG:
            return parse_syslog(df, settings, wanted)
        case Format.JSON:
            return parse_json(df, settings)
        case Format.OTLP:
            return parse_otlp(df)
        case Format.REGEX:
            return parse_regex(df, settings)
        case _:
            return df


def find_source_columns(settings: ParseSettings, wanted: AbstractSet[str]) -> AbstractSet[str]:
    """Return the columns of events from which the ``wanted`` columns are made."""
    own = wanted & set(BASE_SCHEMA.names)
    if settings.format is Format.SYSLOG and needs_priority_only(wanted):
        return own | {"severity", PRIORITY}
    return own | _SOURCE_COLUMNS[settings.format]


# ── JSON: one VARIANT column, `data`, parsed once and read by path ──

_BYTE_ORDER_MARK: Final = "\ufeff"
_SENTINEL: Final = "turnlane: the end"
"""A text behind the value, which shows whether the value is a single JSON text."""
_INVALID_JSON: Final = "this is not one JSON text, or has a key twice in one object"


def parse_json(df: DataFrame, settings: ParseSettings) -> DataFrame:
    """Add ``data``, the columns picked from it, and ``parse_error``.

    A picked column is null if its path does not exist or its value has another type.
    """
    read = add_json_data(df)
    picked = {
        name: F.try_variant_get("data", pick.path, pick.kind)
        for name, pick in settings.build_json_columns().items()
    }
    error_text = (
        F.when(F.col("value").isNull(), "there is no value")
        .when(F.col("data").isNull(), _INVALID_JSON)
    )  # fmt: skip
    return read.withColumns({**picked, PARSE_ERROR: error_text})


def add_json_data(df: DataFrame) -> DataFrame:
    """Add only ``data``; null if the value is no JSON, or has more text after the JSON."""
    text = F.ltrim(F.make_valid_utf8(F.col("value").cast("string")), F.lit(_BYTE_ORDER_MARK))
    # Spark stops reading after the first JSON text. In a list, the text after it is an element.
    read = F.try_parse_json(F.concat(F.lit("["), text, F.lit(f',"{_SENTINEL}"]')))
    listed = df.withColumn("_listed", read)
    is_one = F.try_variant_get("_listed", "$[1]", "string") == _SENTINEL
    data = F.when(is_one, F.try_variant_get("_listed", "$[0]", "variant"))
    return listed.withColumn("data", data).drop("_listed")


# ── OTLP ──
# Spark's expressions cannot read protobuf, so the value and one header go to Python, which decodes
# whole columns.

_TYPES = {"string": "string", "timestamp[us, tz=UTC]": "timestamp"}


def parse_otlp(df: DataFrame) -> DataFrame:
    """Add the columns of a log record, metric or span, and ``parse_error``."""
    if "headers" not in df.columns:
        raise ConfigError("parse", "otlp needs the column `headers`; set includeHeaders to true")
    from turnlane.formats.otlp_columns import COLUMNS, decode_columns

    def decode(values: pa.Array, signals: pa.Array) -> pa.Array:  # type: ignore[type-arg]
        return decode_columns(values, signals)

    kinds = {name: _TYPES.get(str(kind), "map<string,string>") for name, kind in COLUMNS.items()}
    struct = "struct<" + ", ".join(f"{name}: {kind}" for name, kind in kinds.items()) + ">"
    decoded: Any = arrow_udf(decode, struct)  # type: ignore[call-overload]
    found = df.withColumn("_otlp", decoded(F.col("value"), F.col("headers")["signal"]))
    return found.select(*df.columns, *(F.col(f"_otlp.{name}") for name in COLUMNS))


# ── regular expressions: a column for each named group, all in one pass ──

_SEPARATOR: Final = "\x1f"
"""The separator of the groups. A text that contains it needs a pass for each group."""
_VERBOSE_FLAG: Final = re.compile(r"\(\?[a-zA-Z]*x[a-zA-Z]*\)")
"""The beginning of a pattern that ignores spaces and may have comments."""


def parse_regex(df: DataFrame, settings: ParseSettings) -> DataFrame:
    """Add the groups of the first match, empty ones as null, and ``parse_error``.

    The pattern may match anywhere in the text; ``^`` and ``$`` anchor it.
    """
    grouped = settings.build_grouped_pattern()
    for pattern in (grouped.pattern, _match_whole_text(grouped)):
        _check_pattern(df.sparkSession, pattern)
    text = F.make_valid_utf8(F.col("value").cast("string"))
    steps = df.withColumn("_text", text)
    steps = steps.withColumn("_groups", _split_groups(F.col("_text"), grouped))
    columns = {
        name: F.nullif(F.get("_groups", F.lit(at)), F.lit(""))
        for at, name in enumerate(grouped.names, start=1)
    }
    error_text = (
        F.when(F.col("value").isNull(), "there is no value")
        .when(F.col("_groups").isNull() | (F.size("_groups") < 2), "the pattern does not match")
    )  # fmt: skip
    return steps.withColumns({**columns, PARSE_ERROR: error_text}).drop("_text", "_groups")


def _split_groups(text: Column, grouped: GroupedPattern) -> Column:
    """Return an empty text and the groups; null or one element if the pattern does not match."""
    numbers = grouped.numbers.values()
    groups = _SEPARATOR + _SEPARATOR.join(f"${at}" for at in numbers)
    separated = F.split(F.regexp_replace(text, _match_whole_text(grouped), groups), _SEPARATOR)
    one_by_one = F.when(
        F.rlike(text, F.lit(grouped.pattern)),
        F.array(
            F.lit(""), *(F.regexp_extract(text, grouped.pattern, number) for number in numbers)
        ),
    )
    return F.when(F.contains(text, F.lit(_SEPARATOR)), one_by_one).otherwise(separated)


def _match_whole_text(grouped: GroupedPattern) -> str:
    """Return the pattern with the text before and after its first match."""
    # The last line of a pattern with comments may end in a comment.
    end = "\n" if _VERBOSE_FLAG.match(grouped.pattern) else ""
    return rf"\A(?s:.*?)(?:{grouped.pattern}{end})(?s:.*)\z"


def _check_pattern(session: SparkSession, pattern: str) -> None:
    """Have Java compile the pattern now, so that an error does not appear in tasks."""
    try:
        session.sql("SELECT regexp_like('', :pattern)", args={"pattern": pattern}).collect()
    except PySparkException as error:
        why = str(error).partition("\n")[0]
        raise ConfigError("parse.pattern", f"Java cannot compile this pattern: {why}") from None
