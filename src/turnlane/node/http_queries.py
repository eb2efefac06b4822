"""The parameters of requests, checked; what is wrong is a ``ValueError`` naming the parameter."""

from __future__ import annotations

import enum
from typing import TypeVar

from starlette.requests import Request

from turnlane.units import parse_duration

Choice = TypeVar("Choice", bound=enum.StrEnum)

LARGEST = 2**63 - 1

_PREFIX = b"x-turnlane-"


def only(request: Request, *names: str) -> None:
    """Refuse parameters that the operation does not have, and those given twice."""
    for name in request.query_params:
        if name not in names:
            known = f"there are: {', '.join(names)}" if names else "there are none"
            raise ValueError(f"parameter {name[:80]!r}: no such parameter; {known}")
        if len(request.query_params.getlist(name)) > 1:
            raise ValueError(f"parameter {name!r}: given more than once")


def texts(request: Request, *names: str) -> dict[str, str]:
    """Parameters, or else headers of the same name after ``X-Turnlane-``, as far as given."""
    found = {name: request.query_params[name] for name in names if name in request.query_params}
    for header, value in request.scope["headers"]:
        if header.startswith(_PREFIX):
            name = header.removeprefix(_PREFIX).decode("latin-1")
            if name not in names:
                raise ValueError(f"header X-Turnlane-{name[:80]}: there is no such header")
            found.setdefault(name, _utf8(value, name))
    return found


def _utf8(value: bytes, name: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ValueError(f"header X-Turnlane-{name.capitalize()}: not UTF-8") from None


def whole(request: Request, name: str, default: int, *, least: int = 0, most: int = LARGEST) -> int:
    """A whole number."""
    return (
        default
        if (value := request.query_params.get(name)) is None
        else number(value, f"parameter {name!r}", least, most)
    )


def number(value: str, where: str, least: int = 0, most: int = LARGEST) -> int:
    """A whole number from a text."""
    found = int(value) if value.isascii() and value.isdecimal() and len(value) < 20 else -1
    if not least <= found <= most:
        raise ValueError(f"{where}: a whole number from {least} to {most}, not {value[:40]!r}")
    return found


def seconds(
    request: Request, name: str, default: float, *, least: float = 0.0, most: float
) -> float:
    """A duration: ``30s``, or a plain number of seconds."""
    value = request.query_params.get(name)
    if value is None:
        return default
    try:
        found = parse_duration(value)
    except ValueError:
        found = -1.0
    if not least <= found <= most:
        example = "such as 500ms, 30s or a plain number of seconds"
        raise ValueError(
            f"parameter {name!r}: a duration from {least:g}s to {most:g}s, {example}, "
            f"not {value[:40]!r}"
        )
    return found


def choice(request: Request, name: str, kind: type[Choice], default: Choice) -> Choice:
    """One of some words."""
    value = request.query_params.get(name)
    try:
        return default if value is None else kind(value)
    except ValueError:
        raise ValueError(
            f"parameter {name!r}: one of {', '.join(kind)}, not {str(value)[:40]!r}"
        ) from None
