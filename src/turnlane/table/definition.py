"""What a queue table is: its name, the user's columns, the key, the options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from turnlane.table.names import quoted
from turnlane.table.settings import Ordering, TableSettings
from turnlane.table.types import TYPES

OWN_COLUMNS: Final = (
    "event_id",
    "fire_at",
    "state",
    "attempts",
    "priority",
    "keyspace_id",
    "event_name",
    "event_group",
    "after_group",
    "last_error",
)
"""Every queue table has these; the user's columns have other names."""

ENQUEUED: Final = ("fire_at", "priority", "event_name", "event_group", "after_group")
"""Those that an insert may set; the rest are turnlane's."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the user's."""

    name: str
    type: str
    arguments: tuple[int, ...] = ()
    required: bool = False

    def __str__(self) -> str:
        numbers = f"({', '.join(map(str, self.arguments))})" if self.arguments else ""
        return f"{quoted(self.name)} {self.type}{numbers}" + (" NOT NULL" if self.required else "")


@dataclass(frozen=True, slots=True)
class Definition:
    """A queue as ``CREATE QUEUE`` describes it; as text, it is that statement again."""

    name: str
    columns: tuple[Column, ...]
    shard_by: str | None = None
    settings: TableSettings = field(default_factory=TableSettings)

    def __post_init__(self) -> None:
        if self.name.lower().startswith("turnlane_"):
            raise ValueError("names that begin with turnlane_ are turnlane's own")
        seen: set[str] = set()
        for name in self.names:
            # MySQL and SQLite do not tell columns apart by case.
            if name.lower() in OWN_COLUMNS:
                raise ValueError(f"every queue has a column {name!r} of its own")
            if name.lower() in seen:
                raise ValueError(f"the column {name!r} stands there twice")
            seen.add(name.lower())
        self._check_key()

    def _check_key(self) -> None:
        if self.shard_by is None:
            if self.settings.ordering is Ordering.KEY:
                raise ValueError("ordering = key needs SHARD BY (column)")
            return
        column = next((each for each in self.columns if each.name == self.shard_by), None)
        if column is None:
            raise ValueError(f"SHARD BY: there is no column {self.shard_by!r}")
        if not TYPES[column.type].keyed:
            raise ValueError(f"SHARD BY: a column of type {column.type} cannot be the key")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the user's columns."""
        return tuple(column.name for column in self.columns)

    def __str__(self) -> str:
        columns = ", ".join(map(str, self.columns))
        text = f"CREATE QUEUE {quoted(self.name)} ({columns})"
        if self.shard_by is not None:
            text += f" SHARD BY ({quoted(self.shard_by)})"
        options = self.settings.changed()
        if options:
            text += f" WITH ({', '.join(f'{name} = {value}' for name, value in options.items())})"
        return text
