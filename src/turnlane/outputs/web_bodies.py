"""Bodies of requests, made smaller."""

from __future__ import annotations

import enum
from typing import Any, Final

import cramjam

_LEVEL: Final = 1
"""The fastest: of events, which look alike, the usual levels leave hardly less, in several times as
long."""


class Compression(enum.StrEnum):
    """How a body is made smaller."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"


def compressed(body: Any, how: Compression) -> Any:  # noqa: ANN401 - whatever is bytes
    """The body as it is sent."""
    match how:
        case Compression.GZIP:
            return memoryview(cramjam.gzip.compress(body, _LEVEL))
        case Compression.ZSTD:
            return memoryview(cramjam.zstd.compress(body, _LEVEL))
        case _:
            return body
