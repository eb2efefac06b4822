"""Filters that the database applies: those on state, fire time, id, name and key. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from turnlane.table.columns import NANOSECONDS
from turnlane.table.queue import nanoseconds
from turnlane.table.selection import Selection

_FIELDS = {"state": "states", "event_name": "names", "event_id": "ids"}


def selection_of(filters: Iterable[Filter], key: str | None) -> Selection:
    """What filters leave of a table whose key is the column ``key``, and perhaps more.

    Spark applies all of them once more: of the table's nanoseconds it knows only microseconds.
    """
    selection = Selection()
    for each in filters:
        selection = _narrowed(selection, each, key)
    return selection


def _narrowed(selection: Selection, each: Filter, key: str | None) -> Selection:
    narrowed = selection
    match each:
        case EqualTo(("fire_at",), datetime() as at):
            narrowed = _until(_since(selection, at, 0), at, 1)
        case GreaterThan(("fire_at",), datetime() as at):
            narrowed = _since(selection, at, 1)
        case GreaterThanOrEqual(("fire_at",), datetime() as at):
            narrowed = _since(selection, at, 0)
        case LessThan(("fire_at",), datetime() as at):
            narrowed = _until(selection, at, 0)
        case LessThanOrEqual(("fire_at",), datetime() as at):
            narrowed = _until(selection, at, 1)
        case EqualTo((name,), value):
            narrowed = _among(selection, name, (value,), key)
        case In((name,), tuple(values)):
            narrowed = _among(selection, name, values, key)
    return narrowed


def _among(selection: Selection, name: str, values: tuple[Any, ...], key: str | None) -> Selection:
    field = "keys" if name == key else _FIELDS.get(name)
    if field is None or any(value is None for value in values):
        return selection
    known: tuple[Any, ...] | None = getattr(selection, field)
    kept: Any = values if known is None else tuple(each for each in known if each in values)
    changed: dict[str, Any] = {field: kept}
    return replace(selection, **changed)


def _since(selection: Selection, at: datetime, more: int) -> Selection:
    """Due at a microsecond, or at the one after it, or later."""
    bound = nanoseconds(at) + more * NANOSECONDS
    known = selection.fire_from
    return replace(selection, fire_from=bound if known is None else max(known, bound))


def _until(selection: Selection, at: datetime, more: int) -> Selection:
    bound = nanoseconds(at) + more * NANOSECONDS
    known = selection.fire_until
    return replace(selection, fire_until=bound if known is None else min(known, bound))
