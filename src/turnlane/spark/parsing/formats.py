"""Text taken apart by a regular expression: a column for each named group, all in one pass."""

from __future__ import annotations

import re
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.functions import arrow_udf

from turnlane.errors import ConfigError
from turnlane.formats.parse_settings import PARSE_ERROR, GroupedPattern, ParseSettings

# ── json ──
# JSON as one VARIANT column, ``data``: parsed once, read by path as often as one likes.

_BYTE_ORDER_MARK: Final = "\ufeff"
_END: Final = "turnlane: the end"
"""Stands behind a value, to see whether something else does."""
_NOT_ONE: Final = "this is not one JSON text, or has a key twice in one object"


def json(df: DataFrame, settings: ParseSettings) -> DataFrame:
    """Add ``data``, the columns picked from it, and ``parse_error``.

    A picked column is null where its path leads nowhere or what is there is not of its type.
    """
    read = with_data(df)
    picked = {
        name: F.try_variant_get("data", pick.path, pick.kind)
        for name, pick in settings.picks().items()
    }
    wrong = (
        F.when(F.col("value").isNull(), "there is no value")
        .when(F.col("data").isNull(), _NOT_ONE)
    )  # fmt: skip
    return read.withColumns({**picked, PARSE_ERROR: wrong})


def with_data(df: DataFrame) -> DataFrame:
    """Add only ``data``; null where the value is no JSON, or there is something behind it."""
    text = F.ltrim(F.make_valid_utf8(F.col("value").cast("string")), F.lit(_BYTE_ORDER_MARK))
    # Spark reads up to the end of the first JSON text and is content. In a list, what comes next
    # is there to be looked at.
    read = F.try_parse_json(F.concat(F.lit("["), text, F.lit(f',"{_END}"]')))
    listed = df.withColumn("_listed", read)
    is_one = F.try_variant_get("_listed", "$[1]", "string") == _END
    data = F.when(is_one, F.try_variant_get("_listed", "$[0]", "variant"))
    return listed.withColumn("data", data).drop("_listed")


# ── otlp ──
# Telemetry as columns, decoded in Arrow batches.
#
# Spark's expressions cannot read protobuf, so it goes to Python: the value and one header, no
# other
# column. There it is decoded by the column, not by the event.

_TYPES = {"string": "string", "timestamp[us, tz=UTC]": "timestamp"}


def otlp(df: DataFrame, settings: ParseSettings) -> DataFrame:
    """Add the columns of a log record, metric or span, and ``parse_error``."""
    del settings
    if "headers" not in df.columns:
        raise ConfigError("parse", "otlp needs the column `headers`; set includeHeaders to true")
    from turnlane.formats.otlp_columns import COLUMNS, columns_of

    def decode(values: pa.Array, signals: pa.Array) -> pa.Array:  # type: ignore[type-arg]
        return columns_of(values, signals)

    kinds = {name: _TYPES.get(str(kind), "map<string,string>") for name, kind in COLUMNS.items()}
    struct = "struct<" + ", ".join(f"{name}: {kind}" for name, kind in kinds.items()) + ">"
    decoded: Any = arrow_udf(decode, struct)  # type: ignore[call-overload]
    found = df.withColumn("_otlp", decoded(F.col("value"), F.col("headers")["signal"]))
    return found.select(*df.columns, *(F.col(f"_otlp.{name}") for name in COLUMNS))


_CUT: Final = "\x1f"
"""Stands between the groups. A text that holds it goes the slow way, a pass for each group."""
_COMMENTED: Final = re.compile(r"\(\?[a-zA-Z]*x[a-zA-Z]*\)")
"""How a pattern begins in which spaces mean nothing and comments may stand."""


def regex(df: DataFrame, settings: ParseSettings) -> DataFrame:
    """Add the groups of the first match, empty ones as null, and ``parse_error``.

    The pattern may match anywhere in the text; ``^`` and ``$`` pin it.
    """
    grouped = settings.grouped()
    for pattern in (grouped.pattern, _whole(grouped)):
        _check(df.sparkSession, pattern)
    text = F.make_valid_utf8(F.col("value").cast("string"))
    cut = df.withColumn("_text", text).withColumn("_groups", _groups(F.col("_text"), grouped))
    columns = {
        name: F.nullif(F.get("_groups", F.lit(at)), F.lit(""))
        for at, name in enumerate(grouped.names, start=1)
    }
    wrong = (
        F.when(F.col("value").isNull(), "there is no value")
        .when(F.col("_groups").isNull() | (F.size("_groups") < 2), "the pattern does not match")
    )  # fmt: skip
    return cut.withColumns({**columns, PARSE_ERROR: wrong}).drop("_text", "_groups")


def _groups(text: Column, grouped: GroupedPattern) -> Column:
    """An empty text and then the groups; null or one element if nothing matches."""
    numbers = grouped.numbers.values()
    marked = F.regexp_replace(text, _whole(grouped), _CUT + _CUT.join(f"${at}" for at in numbers))
    one_by_one = F.when(
        F.rlike(text, F.lit(grouped.pattern)),
        F.array(
            F.lit(""), *(F.regexp_extract(text, grouped.pattern, number) for number in numbers)
        ),
    )
    return F.when(F.contains(text, F.lit(_CUT)), one_by_one).otherwise(F.split(marked, _CUT))


def _whole(grouped: GroupedPattern) -> str:
    """The pattern with all that is before and after its first match."""
    # A line of its own for what follows: the last line of such a pattern may end in a comment.
    end = "\n" if _COMMENTED.match(grouped.pattern) else ""
    return rf"\A(?s:.*?)(?:{grouped.pattern}{end})(?s:.*)\z"


def _check(session: SparkSession, pattern: str) -> None:
    """Let Java read the pattern now, so that no task has to find out."""
    try:
        session.sql("SELECT regexp_like('', :pattern)", args={"pattern": pattern}).collect()
    except PySparkException as error:
        why = str(error).partition("\n")[0]
        raise ConfigError("parse.pattern", f"Java does not take this pattern: {why}") from None
