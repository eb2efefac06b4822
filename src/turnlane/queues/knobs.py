"""What a knob is: how it is declared, and the kinds of value that only queues have."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
)

from turnlane.queues.api import Durability
from turnlane.units import Percentage

if TYPE_CHECKING:
    from turnlane.queues.settings import QueueSettings

# ── kinds ──
# The kinds of queue, and the groups of kinds that share a knob.


class Kind(enum.StrEnum):
    """Where events wait."""

    DIRECT = "direct"
    MEMORY = "memory"
    DISK = "disk"
    DISK_ASSISTED = "disk_assisted"
    PROXY = "proxy"


ALL: Final = tuple(Kind)
WAITING: Final = (Kind.MEMORY, Kind.DISK, Kind.DISK_ASSISTED, Kind.PROXY)
STORING: Final = (Kind.MEMORY, Kind.DISK, Kind.DISK_ASSISTED)
IN_MEMORY: Final = (Kind.MEMORY, Kind.DISK_ASSISTED, Kind.PROXY)
ON_DISK: Final = (Kind.DISK, Kind.DISK_ASSISTED)


class Compression(enum.StrEnum):
    """Whether frames on disk are compressed."""

    AUTO = "auto"
    """Where it makes the frame smaller by a fair part."""
    SNAPPY = "snappy"
    NONE = "none"


def _not_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")  # noqa: TRY004 - pydantic
    return value


def _plain_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", value):
        raise ValueError(f"{value!r} is not a name; use letters, digits, _, . and -, as in web-1")
    return value


Count = Annotated[int, BeforeValidator(_not_bool)]
Rate = Annotated[float, BeforeValidator(_not_bool)]
Name = Annotated[str, AfterValidator(_plain_name)]
DiskDurability = Literal[Durability.ALWAYS, Durability.INTERVAL, Durability.NEVER]


def knob(
    default: object,
    kinds: tuple[Kind, ...],
    meaning: str,
    *,
    example: object,
    shown: str | None = None,
    ge: int | None = None,
    gt: int | None = None,
    le: int | None = None,
) -> Any:  # noqa: ANN401 - as Field() does it, so that the annotation decides
    """Declare a knob; ``shown`` describes a default that is not simply a value."""
    extra: dict[str, Any] = {"kinds": [str(kind) for kind in kinds], "shown": shown or str(default)}
    return Field(
        default,
        description=meaning,
        examples=[example],
        json_schema_extra=extra,
        ge=ge,
        gt=gt,
        le=le,
    )


# ── marks ──
# Marks: the fill levels at which a queue begins to shed, slow down or spill.


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
