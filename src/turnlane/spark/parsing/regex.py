"""Text taken apart by a regular expression: a column for each named group, all in one pass."""

from __future__ import annotations

import re
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from turnlane.errors import ConfigError
from turnlane.formats.java_regex import GroupedPattern
from turnlane.formats.parse_settings import PARSE_ERROR, ParseSettings

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
