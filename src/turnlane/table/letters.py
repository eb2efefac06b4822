"""Letters: events on their way from one shard to another. Pure."""

from __future__ import annotations

import enum
import json
from collections.abc import Container, Sequence
from typing import Any, Final, NamedTuple

from turnlane.table.definition import Definition
from turnlane.table.sql.dialect import Row

MOVED: Final = (
    "fire_at",
    "state",
    "attempts",
    "priority",
    "event_name",
    "event_group",
    "after_group",
    "last_error",
)
"""The columns of an event that go with it, beside the user's. It gets another id."""


class Take(enum.Enum):
    """Which events are taken out of a table, as a condition in SQL."""

    FAR = (
        "fire_at > %s AND state = 'to_be_fired' AND attempts = 0 "
        "AND event_group IS NULL AND after_group IS NULL"
    )
    """Those that no manager has in memory, because they are due later than its window reaches."""
    HISTORY = "state = 'acked'"
    PLAIN = "after_group IS NULL"
    ALL = "1 = 1"
    """Also those that wait for a group, whose members have to be there before them."""


ONLINE: Final = (Take.FAR, Take.HISTORY)
"""What can be moved while a manager fires from the same table."""


class Batch(NamedTuple):
    """Events on their way."""

    number: int
    version: int
    """Of the map that says where they go."""
    rows: list[Row]


def columns_of(definition: Definition) -> tuple[str, ...]:
    """The columns of an event that go with it."""
    return (*MOVED, *definition.names)


def welcome(rows: Sequence[Row], definition: Definition, taken: Container[str]) -> list[Row]:
    """Rows as the database takes them to which they came; a name that is taken there is left off.

    What was fired is to be fired again: no ack can reach the manager that did it.
    """
    columns = columns_of(definition)
    at_state, at_name = columns.index("state"), columns.index("event_name")
    booleans = {column.name for column in definition.columns if column.type == "BOOLEAN"}
    at_booleans = [at for at, name in enumerate(columns) if name in booleans]
    found = []
    for row in rows:
        values = list(map(portable, row))
        if values[at_state] == "fired":
            values[at_state] = "to_be_fired"
        if values[at_name] in taken:
            values[at_name] = None
        for at in at_booleans:  # MySQL and SQLite have numbers for them
            values[at] = None if values[at] is None else bool(values[at])
        found.append(tuple(values))
    return found


def portable(value: Any) -> Any:  # noqa: ANN401 - whatever a column holds
    """A value as any of the databases takes it."""
    if value is None or isinstance(value, int | float | str | bytes):
        return value
    if isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    return str(value)  # numbers, times and the like, in the form that SQL reads
