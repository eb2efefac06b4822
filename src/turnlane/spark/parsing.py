"""The parse stage: makes columns of the ``value`` of events.

Every format keeps the columns of events, adds its own, and adds ``parse_error``, which is null if
the event could be parsed. No event is dropped.

Syslog and OTLP are parsed a block at a time (``formats.block_parsing``): by the reader of a queue
(:func:`load_events`), or in a function that Spark calls, if the events come from elsewhere
(:func:`parse_events`). JSON and regular expressions are parsed by Spark's expressions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.streaming.readwriter import DataStreamReader
from pyspark.sql.types import StructField, StructType

from turnlane.errors import ConfigError
from turnlane.formats.block_parsing import BLOCK_FORMATS, BlockParser, get_parsed_types
from turnlane.formats.parse_settings import PARSE_ERROR, Format, GroupedPattern, ParseSettings
from turnlane.spark.row_codec import get_read_schema


def load_events(
    reader: DataStreamReader | DataFrameReader,
    settings: ParseSettings,
    wanted: AbstractSet[str] | None = None,
    more: Sequence[StructField] = (),
) -> DataFrame:
    """Load a queue's events with the columns of their format; with ``wanted``, only those of both.

    The reader is of ``format("turnlane")``; ``more`` are columns that its options ask for.
    """
    spark: SparkSession = reader._spark  # noqa: SLF001 - tells it in no other way
    parse = settings if settings.format in BLOCK_FORMATS else None
    ddl = get_read_schema(include_headers=True, parse=parse)
    fields = spark.createDataFrame([], ddl).schema.fields
    schema = StructType([each for each in fields if wanted is None or each.name in wanted])
    reader = reader.schema(StructType([*schema.fields, *more]))
    if parse is None:
        return parse_events(reader.load(), settings)
    return reader.option("parse", parse.model_dump_json(exclude_unset=True)).load()


def parse_events(df: DataFrame, settings: ParseSettings) -> DataFrame:
    """Return events with the columns of their format; ``df`` may be a stream or a table.

    Raises ``ConfigError`` for errors in the settings that only Spark can find.
    """
    match settings.format:
        case Format.SYSLOG | Format.OTLP:
            return parse_blocks(df, settings)
        case Format.JSON:
            return parse_json(df, settings)
        case Format.REGEX:
            return parse_regex(df, settings)
        case _:
            return df


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


# ── blocks: syslog and OTLP ──


def parse_blocks(df: DataFrame, settings: ParseSettings) -> DataFrame:
    """Add the columns of a format that Spark's expressions do not parse."""
    types = get_parsed_types(settings.format)
    parser = BlockParser(settings, types)
    sources = sorted(parser.source_columns)
    missing = set(sources) - set(df.columns)
    if missing:
        hint = "; set includeHeaders to true" if missing == {"headers"} else ""
        columns = ", ".join(sorted(missing))
        raise ConfigError("parse", f"{settings.format} needs the columns {columns}{hint}")

    def parse(*columns: pa.Array) -> pa.Array:  # type: ignore[type-arg]
        block = pa.RecordBatch.from_arrays(list(columns), names=sources)
        parsed = parser.parse(block)
        return pa.StructArray.from_arrays([parsed[name] for name in types], names=list(types))

    struct = StructType([StructField(name, from_arrow_type(kind)) for name, kind in types.items()])
    parsed: Any = arrow_udf(parse, struct)  # type: ignore[call-overload]
    found = df.withColumn("_parsed", parsed(*(F.col(name) for name in sources)))
    kept = [name for name in df.columns if name not in types]
    return found.select(*kept, *(F.col(f"_parsed.{name}") for name in types))


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
