"""The names under which clients number what they publish."""

from __future__ import annotations

from typing import Final

from turnlane.node.commits import foreign

_FILES: Final = "files/"
"""Under such ids the ``files`` input numbers lines."""


def checked(producer_id: str) -> str:
    """A client's producer id. Raises ``ValueError`` for one that the node itself may use."""
    if producer_id.startswith(_FILES):
        raise ValueError(f"producer ids that begin with {_FILES!r} are those of files")
    return foreign(producer_id)
