"""JSON as one VARIANT column, ``data``: parsed once, read by path as often as one likes."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from turnlane.formats.parse_settings import PARSE_ERROR, ParseSettings

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
