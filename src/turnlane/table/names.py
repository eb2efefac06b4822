"""Names of queues and columns: which are allowed, and how SQL has them."""

from __future__ import annotations

from typing import Final

LONGEST: Final = 48
"""Bytes. PostgreSQL cuts names at 63, and the names of indexes are longer than their table's."""


def checked_name(name: str) -> str:
    """The name, if a database can have it. Raises ``ValueError``."""
    if not name:
        raise ValueError("a name cannot be empty")
    if not name.isprintable():
        raise ValueError(f"{name!r} is not a name: it has characters that cannot be printed")
    if name != name.strip():
        # MySQL refuses names that end in a space.
        raise ValueError(f"{name!r} is not a name: it begins or ends with a space")
    if len(name.encode()) > LONGEST:
        raise ValueError(f"{name!r} is too long for a name: at most {LONGEST} bytes")
    if any(ord(character) > 0xFFFF for character in name):
        raise ValueError(f"{name!r} is not a name: MySQL has no such characters in names")
    return name


def quoted(name: str, quote: str = '"') -> str:
    """The name as an identifier that means nothing else, whatever stands in it."""
    return quote + name.replace(quote, quote * 2) + quote
