"""JSON as one VARIANT column, ``data``: parsed once, read by path as often as one likes."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from turnlane.formats.parse_settings import PARSE_ERROR, ParseSettings


def json(df: DataFrame, settings: ParseSettings) -> DataFrame:
    """Add ``data``, the columns picked from it, and ``parse_error``.

    A picked column is null where its path leads nowhere or what is there is not of its type.
    """
    text = F.make_valid_utf8(F.col("value").cast("string"))
    read = df.withColumn("data", F.try_parse_json(text))
    picked = {
        name: F.try_variant_get("data", pick.path, pick.kind)
        for name, pick in settings.picks().items()
    }
    wrong = (
        F.when(F.col("value").isNull(), "there is no value")
        .when(F.col("data").isNull(), "this is not JSON")
    )  # fmt: skip
    return read.withColumns({**picked, PARSE_ERROR: wrong})
