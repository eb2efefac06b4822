"""Scheduling: the statements about schedules, for queues in one database or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from turnlane.errors import NoSuchSchedule
from turnlane.table.grammar import CreateSchedule, DropSchedule, OfSchedules
from turnlane.table.schedule import Schedule


class Scheduler(AbstractContextManager["Scheduler"], Protocol):
    """A queue, as far as its schedules go."""

    def schedule(self, name: str, every: str, time_zone: str, /, **columns: object) -> None:
        """Make one."""

    def unschedule(self, name: str) -> bool:
        """Forget one; false if there is none."""

    def schedules(self) -> list[Schedule]:
        """All there are."""


def run_statement(
    statement: OfSchedules,
    opened: Callable[[str], Scheduler],
    queues: Callable[[], Iterable[str]],
) -> list[str]:
    """Run it on a queue; returns the names concerned, or statements that make what there is."""
    match statement:
        case CreateSchedule(made):
            with opened(made.queue) as queue:
                queue.schedule(made.name, made.every, made.time_zone, **made.columns)
            return [made.name]
        case DropSchedule(name, of):
            with opened(of) as queue:
                if not queue.unschedule(name):
                    raise NoSuchSchedule(f"{of!r} has no schedule {name!r}")
            return [name]
        case _:
            shown: list[str] = []
            for name in queues():
                with opened(name) as queue:
                    shown += map(str, queue.schedules())
            return shown
