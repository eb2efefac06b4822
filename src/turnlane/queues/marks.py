"""Marks: the fill levels at which a queue begins to shed, slow down or spill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from turnlane.quantities import Percentage


@dataclass(frozen=True, slots=True)
class Marks:
    """A queue's marks in events; ``None`` is off."""

    discard: int | None
    full_delay: int | None
    light_delay: int | None
    high: int | None
    low: int | None


def parse_mark(value: object) -> int | Percentage:
    """A fill level from a number of events or a percentage of the queue's size."""
    if isinstance(value, Percentage):
        return value
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and value.strip().endswith("%"):
        return Percentage.parse(value)
    raise ValueError(
        f"{value!r} is not a mark; write a number of events or a percentage of size, "
        "such as 40000 or 80%"
    )


def events_of(mark: int | Percentage, size: int | None) -> int | None:
    """The mark in events; ``None`` for a percentage of no size."""
    if isinstance(mark, int):
        return mark
    return None if size is None else mark.of(size)


def _written(mark: int | Percentage) -> int | str:
    return mark if isinstance(mark, int) else str(mark)


Mark = Annotated[
    int | Percentage,
    PlainValidator(parse_mark),
    PlainSerializer(_written),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?%$"},
            ],
            "description": "a number of events, or a percentage of size such as 80%",
            "examples": [40000, "80%"],
        }
    ),
]
"""A fill level: a number of events, or a percentage of ``size``."""
