"""Quantities as people write them: ``30s``, ``512Mi``, ``80%``, ``22:00-06:00``.

In a pydantic model, ``Duration`` and ``Size`` become plain seconds and bytes; :class:`Percentage`
and :class:`TimeWindow` stay objects, like every :class:`WrittenQuantity`. Every parser raises
``ValueError`` with the allowed form and an example.
"""

from __future__ import annotations

import abc
import math
import re
from dataclasses import dataclass
from datetime import time, timedelta
from decimal import Decimal
from typing import Annotated, ClassVar, Final, Self

from pydantic import (
    BeforeValidator,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

MAX_DURATION: Final = 36_500 * 86_400.0
"""A hundred years: beyond it, the operating system's own waits overflow."""

MAX_SIZE: Final = 2**63 - 1
"""The largest size a file, or a 64-bit counter, can have."""

_SECONDS: Final = {
    "d": Decimal(86_400),
    "h": Decimal(3_600),
    "m": Decimal(60),
    "s": Decimal(1),
    "ms": Decimal("1e-3"),
    "us": Decimal("1e-6"),
}
_BYTES: Final = {
    "Ti": 2**40,
    "Gi": 2**30,
    "Mi": 2**20,
    "Ki": 2**10,
    "T": 10**12,
    "G": 10**9,
    "M": 10**6,
    "k": 10**3,
    "": 1,
}

_NUMBER: Final = r"[0-9]+(?:\.[0-9]+)?"
_DURATION: Final = "".join(rf"(?:({_NUMBER}){unit})?" for unit in _SECONDS)
_SIZE: Final = rf"({_NUMBER}) ?(Ti|Gi|Mi|Ki|T|G|M|k|K)?B?"
_CLOCK: Final = r"([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))?"

_DURATION_HELP: Final = (
    "write a number and a unit (d, h, m, s, ms, us), such as 30s, 500ms or 1h30m; "
    "a plain number is seconds"
)
_SIZE_HELP: Final = (
    "write a number and a unit (Ki, Mi, Gi, Ti, or k, M, G, T for powers of 1000), "
    "such as 512Mi or 1Gi; a plain number is bytes"
)
_PERCENTAGE_HELP: Final = "write more than 0 and at most 100 with a percent sign, such as 80%"
_WINDOW_HELP: Final = (
    "write two different times of day, such as 22:00-06:00 (which runs over midnight)"
)


def parse_duration(value: object) -> float:
    """Return seconds from ``30s``, ``1h30m``, a plain number of seconds or a ``timedelta``."""
    seconds = _seconds(value)
    if seconds is None or not 0 <= seconds <= MAX_DURATION:
        raise ValueError(f"{value!r} is not a duration; {_DURATION_HELP}")
    return seconds


def _seconds(value: object) -> float | None:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if not isinstance(value, str):
        return _plain_number(value)
    text = value.strip()
    if re.fullmatch(_NUMBER, text):
        return float(text)
    match = re.fullmatch(_DURATION, text)
    if match is None or not text:
        return None
    parts = zip(match.groups(), _SECONDS.values(), strict=True)
    return float(sum(Decimal(count) * unit for count, unit in parts if count is not None))


def format_duration(seconds: float) -> str:
    """Return the shortest usual form; :func:`parse_duration` gives the same number back."""
    exact = Decimal(repr(parse_duration(seconds)))
    if exact == 0:
        return "0s"
    if exact < Decimal("1e-3"):
        return f"{_digits(exact.scaleb(6))}us"
    if exact < 1:
        return f"{_digits(exact.scaleb(3))}ms"
    written = ""
    for unit in ("d", "h", "m"):
        count, exact = divmod(exact, _SECONDS[unit])
        written += f"{_digits(count)}{unit}" if count else ""
    return written + (f"{_digits(exact)}s" if exact else "")


def parse_size(value: object) -> int:
    """Return bytes from ``512Mi``, ``10MB``, ``64 KiB`` or a plain whole number."""
    size = _bytes(value)
    if size is None or size != int(size) or not 0 <= size <= MAX_SIZE:
        raise ValueError(f"{value!r} is not a size; {_SIZE_HELP}")
    return int(size)


def _bytes(value: object) -> Decimal | int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        number = _plain_number(value)
        return None if number is None else Decimal(number)
    match = re.fullmatch(_SIZE, value.strip())
    if match is None:
        return None
    digits, unit = match.groups()
    return Decimal(digits) * _BYTES["k" if unit == "K" else unit or ""]


def format_size(size: int) -> str:
    """Return the shortest exact form; :func:`parse_size` gives the same number back."""
    size = parse_size(size)
    if size == 0:
        return "0"
    whole = (f"{size // unit}{name}" for name, unit in _BYTES.items() if size % unit == 0)
    return min(whole, key=len)


def _plain_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= MAX_SIZE and math.isfinite(value) else None


def _digits(number: Decimal) -> str:
    """Return decimal digits without an exponent and without trailing zeros."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0},
                {"type": "string", "pattern": rf"^(?:{_NUMBER}|(?=.){_DURATION})$"},
            ],
            "description": "a duration, such as 30s, 500ms or 1h30m; a plain number is seconds",
            "examples": ["30s", "500ms", "1h30m"],
        }
    ),
]
"""Seconds, written as ``30s``."""

Size = Annotated[
    int,
    BeforeValidator(parse_size),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": rf"^{_SIZE}$"},
            ],
            "description": "a size, such as 512Mi or 10M; a plain number is bytes",
            "examples": ["512Mi", "1Gi", "10M"],
        }
    ),
]
"""Bytes, written as ``512Mi``."""


class WrittenQuantity(abc.ABC):
    """A value with a written form: gives pydantic its parser, its text and its schema."""

    __slots__ = ()

    schema: ClassVar[JsonSchemaValue]

    @classmethod
    @abc.abstractmethod
    def parse(cls, value: object) -> Self:
        """Return the value from its written form, or the value itself. Raises ``ValueError``."""

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: object, _handler: object) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, _schema: CoreSchema, _handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return dict(cls.schema)


@dataclass(frozen=True, slots=True, order=True)
class Percentage(WrittenQuantity):
    """A share of something else: ``80%``. More than 0, at most 100."""

    schema: ClassVar[JsonSchemaValue] = {
        "anyOf": [
            {
                "type": "string",
                "pattern": rf"^(?:{_NUMBER} ?%|(?!0*[01]?(?:\.0+)?$|0+\.){_NUMBER})$",
            },
            {"type": "number", "exclusiveMinimum": 1, "maximum": 100},
        ],
        "description": "a percentage, such as 80%",
        "examples": ["80%"],
    }

    value: float

    def __post_init__(self) -> None:
        if not 0 < self.value <= 100:
            raise ValueError(f"{self.value!r} is not a percentage; {_PERCENTAGE_HELP}")

    @classmethod
    def parse(cls, value: object) -> Self:
        """Return a percentage from ``80%``, or from a plain number above 1.

        A plain number up to 1, such as 0.1, is refused: it may be meant as a ratio, 10%.
        """
        if isinstance(value, cls):
            return value
        has_sign = False
        if isinstance(value, str):
            match = re.fullmatch(rf"({_NUMBER}) ?(%?)", value.strip())
            number = float(match[1]) if match else None
            has_sign = match is not None and bool(match[2])
        else:
            number = _plain_number(value)
        if number is None or not 0 < number <= 100:
            raise ValueError(f"{value!r} is not a percentage; {_PERCENTAGE_HELP}")
        if number <= 1 and not has_sign:
            exact = Decimal(repr(number))
            raise ValueError(
                f"{value!r} may be a ratio or a percentage: write {_digits(exact * 100)}% or "
                f"{_digits(exact)}%"
            )
        return cls(number)

    def of(self, total: int) -> int:
        """Return this percentage of ``total``, rounded down."""
        return int(Decimal(repr(self.value)) * total / 100)

    def __str__(self) -> str:
        return f"{_digits(Decimal(repr(self.value)))}%"


def parse_size_or_share(value: object) -> int | Percentage:
    """Return bytes from ``2Gi``, or a percentage from ``80%``."""
    if isinstance(value, Percentage):
        return value
    if isinstance(value, str) and value.strip().endswith("%"):
        return Percentage.parse(value)
    size = _bytes(value)
    if size is None or size != int(size) or not MIN_SHARED_SIZE <= size <= MAX_SIZE:
        raise ValueError(
            f"{value!r} is neither a percentage, such as 80%, nor a size of at least "
            f"{format_size(MIN_SHARED_SIZE)}, such as 2Gi; write the percent sign or the unit"
        )
    return int(size)


def compute_share(limit: int | Percentage, total: int) -> int:
    """Return a size, at most ``total``, or a percentage of ``total``."""
    return limit.of(total) if isinstance(limit, Percentage) else min(limit, total)


MIN_SHARED_SIZE: Final = 2**20
"""A smaller limit of memory is a number whose unit was forgotten: 80, or 0.8."""

SizeOrShare = Annotated[
    int | Percentage,
    PlainValidator(parse_size_or_share),
    PlainSerializer(lambda limit: limit if isinstance(limit, int) else str(limit)),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": MIN_SHARED_SIZE},
                {"type": "string", "pattern": rf"^(?:{_NUMBER} ?%|{_SIZE})$"},
            ],
            "description": "a size, such as 2Gi, or a percentage, such as 80%",
            "examples": ["80%", "2Gi"],
        }
    ),
]
"""Bytes, or a percentage of a total that is known later: ``2Gi`` or ``80%``."""


@dataclass(frozen=True, slots=True)
class TimeWindow(WrittenQuantity):
    """A span of the day from ``start`` up to, not including, ``end``; may run over midnight."""

    schema: ClassVar[JsonSchemaValue] = {
        "type": "string",
        "pattern": r"^[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?-[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?$",
        "description": "a span of the day, such as 22:00-06:00",
        "examples": ["22:00-06:00"],
    }

    start: time
    end: time

    def __post_init__(self) -> None:
        if self.start == self.end:
            raise ValueError(f"{self} is empty; {_WINDOW_HELP}")

    @classmethod
    def parse(cls, value: object) -> Self:
        """Return a window from ``22:00-06:00`` or ``09:00:30-24:00``."""
        if isinstance(value, cls):
            return value
        text = value.strip() if isinstance(value, str) else ""
        match = re.fullmatch(rf"{_CLOCK} ?- ?{_CLOCK}", text)
        try:
            if match is None:
                raise ValueError(text)  # noqa: TRY301 - one message for all that may be wrong
            hour, minute, second, *end = (int(part or 0) for part in match.groups())
            if end == [24, 0, 0]:
                end = [0, 0, 0]
            return cls(time(hour, minute, second), time(end[0], end[1], end[2]))
        except ValueError:
            raise ValueError(f"{value!r} is not a time window; {_WINDOW_HELP}") from None

    def contains(self, moment: time) -> bool:
        """Whether ``moment`` lies in the window."""
        return self._since_start(moment) < self._since_start(self.end)

    def seconds_until_open(self, moment: time) -> float:
        """Return the seconds from ``moment`` until the window opens; 0 inside it."""
        return 0.0 if self.contains(moment) else 86_400 - self._since_start(moment)

    def _since_start(self, moment: time) -> float:
        return (_second_of_day(moment) - _second_of_day(self.start)) % 86_400

    def __str__(self) -> str:
        return f"{_clock_text(self.start)}-{_clock_text(self.end)}"


def _second_of_day(moment: time) -> float:
    return moment.hour * 3_600 + moment.minute * 60 + moment.second + moment.microsecond / 1_000_000


def _clock_text(moment: time) -> str:
    return moment.isoformat("seconds" if moment.second else "minutes")
