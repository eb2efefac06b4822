"""What a knob is: how it is declared, and the kinds of value that only queues have."""

from __future__ import annotations

import enum
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from turnlane.queues.contract import Durability
from turnlane.queues.kinds import Kind


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
