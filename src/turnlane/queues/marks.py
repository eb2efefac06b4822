"""Marks: the fill levels at which a queue begins to shed, slow down or spill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from turnlane.quantities import Percentage
from turnlane.queues.kinds import Kind

if TYPE_CHECKING:
    from turnlane.queues.settings import QueueSettings


@dataclass(frozen=True, slots=True)
class Marks:
    """A queue's marks in events; ``None`` is off."""

    discard: int | None
    full_delay: int | None
    light_delay: int | None
    high: int | None
    low: int | None

    @classmethod
    def of(cls, settings: QueueSettings) -> Self:
        """The marks of a queue with these settings."""
        size, spills = settings.size, settings.kind is Kind.DISK_ASSISTED
        high = _at_least_one(settings.high_watermark, size) if spills else None
        return cls(
            discard=_at_least_one(settings.discard_mark, size),
            full_delay=_at_least_one(settings.full_delay_mark, size),
            light_delay=_at_least_one(settings.light_delay_mark, size),
            high=high,
            low=None if high is None else _low(settings, high),
        )


def _at_least_one(mark: int | Percentage | None, size: int | None) -> int | None:
    events = None if mark is None else events_of(mark, size)
    return None if events is None else max(1, events)


def _low(settings: QueueSettings, high: int) -> int | None:
    if settings.low_watermark is None:
        return Percentage(70).of(high)
    return events_of(settings.low_watermark, settings.size)


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
