"""A store whose manager dies at a call of the test's choice."""

from __future__ import annotations

from typing import Any

from turnlane.table.sql.dialect import Dialect

from turnlane.table.definition import Definition
from turnlane.table.store import TableStore

OPERATIONS = (
    "acquire",
    "renew",
    "release",
    "listen",
    "last_id",
    "read_due",
    "read_new",
    "read_ids",
    "read_retried",
    "mark",
    "unmark",
    "insert_fired",
    "late_ack",
    "standing",
    "ack",
    "put_back",
    "old_fired",
    "purge",
    "release_groups",
    "fire_schedule",
)


class Killed(BaseException):
    """The process is gone; nobody catches this."""


class MortalStore(TableStore):
    """Dies before or after the first call of one operation."""

    def __init__(
        self, dialect: Dialect, definition: Definition, operation: str, *, after: bool
    ) -> None:
        self._fatal = operation
        self._after = after
        super().__init__(dialect, definition)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in OPERATIONS or name != super().__getattribute__("_fatal"):
            return found

        def dying(*arguments: Any, **named: Any) -> Any:
            if super(MortalStore, self).__getattribute__("_after"):
                found(*arguments, **named)
            raise Killed

        return dying
