"""Telemetry as columns, decoded in Arrow batches.

Spark's expressions cannot read protobuf, so it goes to Python: the value and one header, no other
column. There it is decoded by the column, not by the event.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.functions import arrow_udf

from turnlane.errors import ConfigError
from turnlane.formats.parse_settings import ParseSettings

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
