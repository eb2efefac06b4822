"""Lists and maps that are null, on their way from Spark's rows to a task in Python.

Spark asks after every row how large the batch has become, and for that it walks over all the nulls
that a column of lists or maps has had since its last value: events without headers would take
longer the more of them there are. So nulls travel as empty values, and a number in each row says
which they are.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import ArrayType, MapType

from turnlane.delivery.columns import HOLLOWS

_MOST: Final = 62
"""Columns that have a bit; others go as they are."""


def filled(rows: DataFrame) -> DataFrame:
    """Rows without nulls in columns of lists and maps."""
    kinds = {
        field.name: field.dataType
        for field in rows.schema.fields
        if isinstance(field.dataType, (ArrayType, MapType))
    }
    names = list(kinds)[:_MOST]
    if not names:
        return rows
    columns = {name: F.col(f"`{name}`") for name in names}
    bits = [
        F.when(column.isNull(), F.lit(1 << at)).otherwise(F.lit(0)).cast("bigint")
        for at, column in enumerate(columns.values())
    ]
    full = {
        name: F.coalesce(column, _empty(kinds[name]).cast(kinds[name]))
        for name, column in columns.items()
    }
    # The bits first: they are of the columns as they were.
    return rows.withColumn(HOLLOWS, reduce(Column.bitwiseOR, bits)).withColumns(full)


def _empty(kind: ArrayType | MapType) -> Column:
    return F.array() if isinstance(kind, ArrayType) else F.create_map()


def emptied(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows as they were before :func:`filled`."""
    at = rows.schema.get_field_index(HOLLOWS)
    if at < 0:
        return rows
    bits = np.asarray(rows.column(at))
    some = reduce(or_, np.unique(bits).tolist(), 0)
    rows = rows.remove_column(at)
    kinds = (pa.ListType, pa.MapType)
    places = [place for place, field in enumerate(rows.schema) if isinstance(field.type, kinds)]
    for bit, place in enumerate(places[:_MOST]):
        if some >> bit & 1:
            column = _with_nulls(rows.column(place), (bits >> bit & 1).astype(np.bool_))
            rows = rows.set_column(
                place, rows.schema.field(place).with_nullable(nullable=True), column
            )
    return rows


def _with_nulls(column: pa.Array[Any], mask: Any) -> pa.Array[Any]:  # noqa: ANN401 - of numpy
    if mask.all():
        nothing: pa.Array[Any] = pa.nulls(len(column), column.type)
        return nothing
    places: pa.Array[Any] = pa.array(np.arange(len(column)), mask=mask)
    return column.take(places)
