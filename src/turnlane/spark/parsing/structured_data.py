r"""The structured data of RFC 5424: ``[id name="value" …][…]`` as a map of ``id.name`` to value.

No loop over a group backtracks here (``*+``): Java needs stack for each turn of one that does,
and a single long message could then end the task again and again.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

_VALUE: Final = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_PARAM: Final = rf'[^\s=\]"]++={_VALUE}'
_ELEMENT: Final = rf'\[[^\s=\]"]++(?: ++{_PARAM})*+ *+\]'
_WHOLE: Final = rf"(?s)\A(?:{_ELEMENT})++(?= |\z)"
_ESCAPED: Final = r'\\(["\\\]])'


def cut_off(text: Column) -> Column:
    """The structured data that a text starts with; empty if it starts with none."""
    return F.regexp_extract(text, _WHOLE, 0)


def as_map(data: Column) -> Column:
    """The map, null for nil; an element without parameters is there with an empty value.

    A parameter may be repeated; its values are then joined with commas.
    """
    elements = F.regexp_extract_all(data, F.lit(f"(?s){_ELEMENT}"), F.lit(0))
    pairs = F.flatten(F.transform(elements, _pairs_of))
    empty = F.create_map().cast("map<string,string>")
    return F.when(~data.isin("", "-"), F.aggregate(pairs, empty, _with))


def _pairs_of(element: Column) -> Column:
    """The parameters of an element, each a struct of key and value."""
    inner = F.substr(element, F.lit(2), F.length(element) - 2)
    name = F.substring_index(inner, " ", 1)
    params = F.regexp_extract_all(element, F.lit(f"(?s){_PARAM}"), F.lit(0))
    found = F.transform(params, lambda param: _pair(name, param))
    alone = F.array(F.struct(name.alias("key"), F.lit("").alias("value")))
    return F.when(F.size(params) == 0, alone).otherwise(found)


def _pair(name: Column, param: Column) -> Column:
    label = F.substring_index(param, "=", 1)
    start = F.length(label) + 3
    value = F.substr(param, start, F.length(param) - start)
    plain = F.when(
        F.contains(value, F.lit("\\")), F.regexp_replace(value, _ESCAPED, "$1")
    ).otherwise(value)
    return F.struct(F.concat(name, F.lit("."), label).alias("key"), plain.alias("value"))


def _with(known: Column, pair: Column) -> Column:
    """The map with one more pair; a key it has already gets both values."""
    earlier = F.element_at(known, pair["key"])
    others = F.map_filter(known, lambda key, _: key != pair["key"])
    joined = F.concat_ws(",", earlier, pair["value"])
    return F.when(
        earlier.isNull(), F.map_concat(known, F.create_map(pair["key"], pair["value"]))
    ).otherwise(F.map_concat(others, F.create_map(pair["key"], joined)))
