"""Which settings are secret, and how those are shown that may hold a secret."""

from __future__ import annotations

import re
from typing import Final

from turnlane.config.document import Path

MASK: Final = "**********"
"""As pydantic shows a secret."""

_SECRET: Final = re.compile(
    r"(?i)secret|passw|token|credential|api[_-]?key|authorization|jaas"
    r"|(?:access|account|private|shared)[._-]?key"
)
_FREE: Final = frozenset({"conf", "options", "headers"})
"""Mappings whose names are others' to choose: nobody knows which of their values are secret."""
_HARMLESS: Final = re.compile(
    r"(?i)-?[\d.]+\s?[a-z]{0,3}|true|false|utc|fair|fifo|kryo|snappy|none"
)
"""Values that are shown nevertheless: numbers, sizes, times, switches."""
_HARMLESS_NAMES: Final = frozenset(
    {"accept", "content-type", "content-encoding", "user-agent"}
    | {"path", "dbtable", "driver", "topic", "header", "sep", "compression"}
)
_SHORT: Final = re.compile(r"(?i)(?:^|[._-])(?:key|pwd|pass|auth)(?:$|[._-])")
"""What makes a number secret, too, where names are free."""
_PASSWORD: Final = re.compile(r"(//[^/@:]*:)[^/]*@")
_VALUE: Final = re.compile(r"=[^&#]+")


def is_secret_name(path: Path) -> bool:
    """Whether the name of a setting says that it is secret."""
    name = _name(path)
    return bool(_SECRET.search(name)) and not name.endswith(("_env", "_file"))


def masked(path: Path, text: str) -> str:
    """The text of a setting, as it may be shown."""
    if is_secret_name(path) or (_is_free(path) and not _is_harmless(path, text)):
        return MASK
    return _without_secrets(text) if "://" in text else text


def _is_free(path: Path) -> bool:
    return any(part in _FREE for part in path[:-1])


def _is_harmless(path: Path, text: str) -> bool:
    name = _name(path)
    if name.lower() in _HARMLESS_NAMES:
        return True
    return bool(_HARMLESS.fullmatch(text)) and not _SHORT.search(name)


def _name(path: Path) -> str:
    return next((part for part in reversed(path) if isinstance(part, str)), "")


def _without_secrets(url: str) -> str:
    """An address without its password, and without the values of its query.

    Not by urlunsplit, which leaves out the slashes before a host that is empty, as SQLite's is.
    """
    place, mark, query = url.partition("?")
    return _PASSWORD.sub(rf"\1{MASK}@", place) + mark + _VALUE.sub(f"={MASK}", query)
