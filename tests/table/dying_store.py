"""A store that kills its manager at a chosen call."""

from __future__ import annotations

from typing import Any

from turnlane.databases import Dialect
from turnlane.table.definition import Definition
from turnlane.table.store import TableStore

OPERATIONS = (
    "acquire_lease",
    "renew_lease",
    "release_lease",
    "set_listening",
    "read_last_id",
    "read_due",
    "read_new",
    "read_ids",
    "read_retried",
    "mark_fired",
    "unmark_fired",
    "insert_fired",
    "store_late_acks",
    "find_open",
    "store_acks",
    "apply_decisions",
    "read_old_fired",
    "delete_old_acked",
    "release_groups",
    "fire_schedule",
)


class ProcessKilled(BaseException):
    """Stands for the death of the process; no code catches it."""


class DyingStore(TableStore):
    """Raises ``ProcessKilled`` before or after the first call of one operation."""

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
            if super(DyingStore, self).__getattribute__("_after"):
                found(*arguments, **named)
            raise ProcessKilled

        return dying
