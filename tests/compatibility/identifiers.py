"""Identifiers that a node makes up: leases, stages, queues, starts of the node.

A recording has placeholders for them. When it is replayed, a placeholder in an answer is bound to
the identifier that the node gives now, and is replaced by that in the calls that follow.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

_IDENTIFIER: Final = re.compile(r"\b[0-9a-f]{32}\b")
_PLACEHOLDER: Final = re.compile(r"\bid-\d+-id\b")


def replace_identifiers(value: Any) -> Any:
    """Replace all identifiers in a recording by placeholders, in the order in which they come."""
    known: dict[str, str] = {}

    def replace(match: re.Match[str]) -> str:
        return known.setdefault(match[0], f"id-{len(known) + 1}-id")

    return json.loads(_IDENTIFIER.sub(replace, json.dumps(value)))


class Identifiers:
    """The current identifiers for the placeholders of a recording."""

    def __init__(self) -> None:
        self._actual: dict[str, str] = {}

    def bind(self, recorded: Any, actual: Any) -> None:
        """Find placeholders in a recorded answer, and the identifiers in their place now."""
        if isinstance(recorded, dict) and isinstance(actual, dict):
            for key in recorded.keys() & actual.keys():
                self.bind(recorded[key], actual[key])
        elif isinstance(recorded, list) and isinstance(actual, list):
            for was, now in zip(recorded, actual, strict=False):
                self.bind(was, now)
        elif isinstance(recorded, str) and isinstance(actual, str):
            pattern = _PLACEHOLDER.sub(r"([0-9a-f]{32})", re.escape(recorded).replace(r"\-", "-"))
            if pattern != recorded and (match := re.fullmatch(pattern, actual)):
                for placeholder, now in zip(
                    _PLACEHOLDER.findall(recorded), match.groups(), strict=True
                ):
                    self._actual.setdefault(placeholder, now)

    def to_actual(self, text: str) -> str:
        """Replace placeholders by identifiers; a placeholder that the client made up stays."""
        return _PLACEHOLDER.sub(lambda match: self._actual.get(match[0], match[0]), text)

    def to_recorded(self, value: Any) -> Any:
        """Put placeholders in place of identifiers."""
        recorded = {actual: placeholder for placeholder, actual in self._actual.items()}
        text = _IDENTIFIER.sub(lambda match: recorded.get(match[0], match[0]), json.dumps(value))
        return json.loads(text)
