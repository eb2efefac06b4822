"""The plain values of a configuration, as those look at them who say what is wrong together."""

from __future__ import annotations

from typing import Any

from turnlane.config.document import Path

Values = dict[str, Any]
"""What stands in a mapping, whether it is right or not."""
Wrong = tuple[Path, str]
"""Where something is wrong, and what."""


def mapping(value: object) -> Values:
    """The value, if it is a mapping; what is none has nothing in it."""
    return value if isinstance(value, dict) else {}


def mappings(values: object) -> list[tuple[int, Values]]:
    """The mappings in a list, each with its place; what else is there is somebody else's fault."""
    parts = enumerate(values) if isinstance(values, list) else ()
    return [(at, each) for at, each in parts if isinstance(each, dict)]
