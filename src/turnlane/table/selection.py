"""Selections: which events of a queue table somebody wants to see. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from turnlane.table.definition import Definition
from turnlane.table.keyspace import EVERYTHING, KeyRange
from turnlane.table.sql.dialect import Dialect


@dataclass(frozen=True, slots=True)
class Selection:
    """Events for which all of it is so; ``None`` asks for nothing."""

    states: tuple[str, ...] | None = None
    fire_from: int | None = None
    """Due then or later: nanoseconds since the epoch."""
    fire_until: int | None = None
    """Due before."""
    keys: tuple[object, ...] | None = None
    """Values of the queue's ``SHARD BY`` column."""
    names: tuple[str, ...] | None = None
    ids: tuple[int, ...] | None = None
    key_range: KeyRange = EVERYTHING

    def where(self, dialect: Dialect, definition: Definition) -> tuple[str, tuple[Any, ...]]:
        """A condition in SQL, and its parameters."""
        mark = dialect.mark
        parts: list[str] = []
        parameters: list[Any] = []
        lists: list[tuple[str, tuple[object, ...] | None]] = [
            ("state", self.states),
            ("event_name", self.names),
            ("event_id", self.ids),
        ]
        if definition.shard_by is not None:
            lists.append((dialect.identifier(definition.shard_by), self.keys))
        for column, values in lists:
            if values is not None:
                marks = ", ".join([mark] * len(values)) or "NULL"
                parts.append(f"{column} IN ({marks})")
                parameters += values
        for bound, condition in ((self.fire_from, "fire_at >="), (self.fire_until, "fire_at <")):
            if bound is not None:
                parts.append(f"{condition} {mark}")
                parameters.append(bound)
        if not self.key_range.is_everything:
            parts.append(f"{dialect.keyspace(definition)} BETWEEN {mark} AND {mark}")
            parameters += self.key_range.stored
        return " AND ".join(parts) or "1 = 1", tuple(parameters)
